"""The answer as one HTML file that needs nothing from the network: tables and inline SVG.

Text is escaped; figures are drawn from the answer alone. Knows nothing about how it was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvbaton.plan.answer import Answer, Arm

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #d8dee4;vertical-align:top}td.n{text-align:right}
.verdict{border-left:.4rem solid var(--c);padding:.6rem 1rem;background:#f6f8fa}.verdict b{font-size:1.3rem}
.split{--c:#1a7f37}.stay{--c:#0969da}.unsure{--c:#9a6700}svg{width:100%;max-width:40rem;height:auto;display:block}
svg text{font:12px sans-serif}.wide{overflow-x:auto}
small{color:#57606a}.tag{padding:0 .4rem;border-radius:.3rem;background:#eaeef2}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}.verdict,.tag{background:#161b22}
th,td{border-color:#30363d}svg text{fill:#e6edf3}small{color:#9da7b1}}
"""
BLUE, GREEN, GREY = "#0969da", "#1a7f37", "#8c959f"


def render(answer: Answer) -> str:
    """The whole page."""
    kind = {"split": "split", "stay": "stay"}.get(answer.verdict, "unsure")
    parts = [
        f"<h1>{escape(answer.name)}: split prefill from decode?</h1>",
        f'<div class="verdict {kind}"><b>{escape(answer.verdict)}</b><br>{escape(answer.reason)}.</div>',
        _measure_next(answer),
        f"<p>At most {answer.num_gpus} GPUs. {escape(answer.slo)}. Step times: {escape(answer.step_source)}. "
        f"Link: {escape(answer.link_source)}. {answer.num_simulations} simulations.</p>",
        "".join(f"<p>Note: {escape(text)}.</p>" for text in answer.warnings),
        "<h2>The two arms at their best</h2>" + _arms(answer),
        "<h2>Goodput for each dollar an hour</h2>" + _goodput_chart(answer),
        "<h2>If a constant is off</h2>" + _uncertainty_chart(answer),
        "<h2>If the workload or the price changes</h2>" + _sensitivity(answer),
        "<h2>What was searched</h2>" + _searched(answer),
        "<h2>Nine conditions</h2>" + _matrix(answer),
        "<h2>Cheaper things to try first</h2>" + _cheaper(answer),
        "<h2>Workload</h2>" + _workload(answer),
    ]
    title = escape(answer.name)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f"<!doctype html><html lang=en><head>{head}<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>"


def _measure_next(answer: Answer) -> str:
    if not answer.measure_next:
        return ""
    items = "".join(f"<li>{escape(each)}</li>" for each in answer.measure_next)
    return (
        f"<p>Measure next, in this order (<code>kvbaton profile</code>, <code>kvbaton link</code>):</p><ol>{items}</ol>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: bool = True) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = []
    for row in rows:
        kind = ' class="n"' if numeric else ""
        cells = "".join(f"<td{kind if index else ''}>{escape(cell)}</td>" for index, cell in enumerate(row))
        body.append(f"<tr>{cells}</tr>")
    return f'<div class="wide"><table><tr>{top}</tr>{"".join(body)}</table></div>'


def _arms(answer: Answer) -> str:
    arms = [answer.colocated] + ([answer.split] if answer.split else [])
    names = ["single pool"] + (["split"] if answer.split else [])

    def row(label: str, values: Sequence[str]) -> list[str]:
        return [label, *values]

    def ms(arm: Arm, what: str) -> str:
        each, band = getattr(arm, what), getattr(arm, f"{what}_band")
        return "; ".join(
            f"{getattr(each, name) * 1e3:,.0f} ({getattr(band.low, name) * 1e3:,.0f} to "
            f"{getattr(band.high, name) * 1e3:,.0f})"
            for name in ("p50", "p90", "p99")
        )

    rows = [
        row("layout", [arm.label for arm in arms]),
        row("goodput, requests/s", [f"{arm.goodput_per_s:.2f}" for arm in arms]),
        row("goodput a GPU", [f"{arm.goodput_per_gpu:.3f}" for arm in arms]),
        row("simulated at, requests/s", [f"{arm.at_rate_per_s:.2f}" for arm in arms]),
        row("attainment", [f"{arm.attainment:.1%}" for arm in arms]),
        row("TTFT p50; p90; p99, ms (a constant off)", [ms(arm, "ttft") for arm in arms]),
        row("TPOT p50; p90; p99, ms (a constant off)", [ms(arm, "tpot") for arm in arms]),
        row("p99 gap, ms", [f"{arm.p99_gap_s * 1e3:,.0f}" for arm in arms]),
        row("p90 exposed transfer, ms", [f"{arm.p90_exposed_s * 1e3:,.1f}" for arm in arms]),
        row("busy, by pool", ["; ".join(_use(pool) for pool in arm.pools) for arm in arms]),
        row("cache blocks in use, peak", ["; ".join(f"{pool.role} {pool.peak_block_share:.0%}" for pool in arm.pools)
                                          for arm in arms]),
        row("$ an hour (GPU hours)", [_hourly(arm) for arm in arms]),
        row("$ per million output tokens", [f"{arm.cost.usd_per_million_output:.3f}" for arm in arms]),
        row("by pool: $ per million prompt / output", [_by_pool(arm) for arm in arms]),
        row("GPUs for the wanted rate", ["" if arm.gpus_for_rate is None else str(arm.gpus_for_rate) for arm in arms]),
    ]  # fmt: skip
    text = _table(["", *names], rows)
    if answer.threshold_tokens is not None:
        text += f"<p>Routing threshold: {answer.threshold_tokens:,} uncached tokens.</p>"
    if answer.drift is not None:
        band = answer.drift
        text += f"<p>Drift band for the operator's alert: {band.low:.1f} to {band.high:.1f} prompt tokens for each "
        text += f"output token (now {band.now:.1f}); outside it one of the pools is past its goodput.</p>"
    return text


def _use(pool: object) -> str:
    role, prefill, decode, link = (
        getattr(pool, name) for name in ("role", "prefill_share", "decode_share", "link_share")
    )
    return f"{role}: prefill {prefill:.0%}, decode {decode:.0%}" + (f", link {link:.0%}" if link else "")


def _hourly(arm: Arm) -> str:
    return f"{arm.cost.usd_per_hour:.2f} ({arm.cost.gpu_hours_per_hour:g})"


def _by_pool(arm: Arm) -> str:
    cost = arm.cost
    if cost.usd_per_million_prompt is None or cost.usd_per_million_output_decode_pool is None:
        return ""
    return f"{cost.usd_per_million_prompt:.3f} / {cost.usd_per_million_output_decode_pool:.3f}"


def bars(rows: Sequence[tuple[str, float, str]], mark: float | None = None, unit: str = "") -> str:
    """Horizontal bars with labels; ``mark`` draws a vertical line."""
    widest = max([value for _, value, _ in rows] + ([mark] if mark else []) + [1e-9])
    width, step = 480, 40  # labels stand above their bars, so that a phone shows them large enough
    room = width - 56 - 7 * len(unit)
    height = step * len(rows) + (20 if mark else 4)
    shapes = []
    for index, (label, value, colour) in enumerate(rows):
        y, long = index * step, room * max(0.0, value) / widest
        figure = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        shapes.append(f'<text x="0" y="{y + 14}">{escape(label)}</text>')
        shapes.append(f'<rect x="0" y="{y + 19}" width="{long:.1f}" height="16" fill="{colour}"/>')
        shapes.append(f'<text x="{long + 6:.1f}" y="{y + 32}">{figure}{escape(unit)}</text>')
    if mark:
        x = room * mark / widest
        shapes.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 16}" stroke="#cf222e"/>')
        shapes.append(f'<text x="{x:.1f}" y="{height - 4}" text-anchor="middle">{mark:.2f}</text>')
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(shapes)}</svg>'


def _goodput_chart(answer: Answer) -> str:
    rows = [("single pool", answer.colocated.goodput_per_usd_hour, BLUE)]
    if answer.split is not None:
        rows.append(("split", answer.split.goodput_per_usd_hour, GREEN))
    return bars(rows, unit=" requests/s")


def _uncertainty_chart(answer: Answer) -> str:
    if not answer.uncertainty:
        return "<p>No split to compare with, or uncertainty 0.</p>"
    rows = [("as modelled", answer.advantage or 0.0, GREEN)]
    rows += [
        (f"{each.what.split(' (')[0]} {each.factor - 1:+.0%}", each.advantage, GREY) for each in answer.uncertainty
    ]
    note = (
        "<small>Advantage of the split: its goodput for a dollar over the single pool's. The line is the bar.</small>"
    )
    return bars(rows, mark=1.0 + answer.margin) + note


def _sensitivity(answer: Answer) -> str:
    if not answer.sensitivity:
        return "<p>Not evaluated.</p>"
    rows = [(each.change, each.advantage, GREEN if each.verdict == "split" else BLUE) for each in answer.sensitivity]
    return bars(rows, mark=1.0 + answer.margin)


def _searched(answer: Answer) -> str:
    rows = [(each.name, ", ".join(each.tried), each.single, each.split) for each in answer.searched]
    return _table(["what", "tried", "single pool", "split"], rows, numeric=False)


def _matrix(answer: Answer) -> str:
    rows = [(each.question, each.measured, each.leaning, each.why) for each in answer.matrix]
    return _table(["condition", "measured", "leans to", "why it matters"], rows, numeric=False)


def _cheaper(answer: Answer) -> str:
    rows = [(each.what, each.gain, each.source) for each in answer.cheaper]
    return _table(["what", "gain", "source"], rows, numeric=False)


def _workload(answer: Answer) -> str:
    stats = answer.trace
    rows = [
        (name, *(f"{getattr(each, key):,.0f}" for key in ("mean", "p10", "p50", "p90", "p99", "max")))
        for name, each in (("prompt tokens", stats.prompt), ("output tokens", stats.output))
    ]
    hit = "unknown (the trace has no block hashes)" if stats.token_hit is None else f"{stats.token_hit:.1%} of tokens"
    text = _table(["", "mean", "p10", "p50", "p90", "p99", "max"], rows)
    text += f"<p>{stats.rows:,} requests over {stats.span_s:,.0f} s, gap CV {stats.gap_cv:.2f}, "
    text += f"{stats.prompt_per_output:.1f} prompt tokens for each output token; infinite prefix cache: {hit}.</p>"
    chart = bars([(f"up to {edge:,} tokens", float(count), BLUE) for edge, count in answer.prompt_buckets])
    return text + "<p>Requests by prompt length</p>" + chart
