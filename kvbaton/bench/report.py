"""A comparison as people read it: one HTML file that opens offline, Markdown for a write-up, JSON for machines.

Invariants: the page loads nothing from anywhere and runs no script; every number in it is also in the JSON; text that
came from outside is escaped. Knows nothing about how the runs were made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.bench import charts, stats
from kvbaton.bench.compare import ArmRun, CompareResult, CompareRuns, RateResult
from kvbaton.bench.prediction import Prediction
from kvbaton.bench.report_style import STYLE
from kvbaton.bench.samples import Run
from kvbaton.bench.summary import RunSummary
from kvbaton.bench.verdict import Comparison

MAX_CDF_VALUES = 200_000


def write_reports(found: CompareRuns, directory: Path) -> list[Path]:
    """report.html, report.md and report.json in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    written = {
        "report.html": html_page(found),
        "report.md": markdown(found.result),
        "report.json": msgspec.json.format(msgspec.json.encode(found.result), indent=1).decode() + "\n",
    }
    paths = []
    for name, text in written.items():
        path = directory / name
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def html_page(found: CompareRuns) -> str:
    result = found.result
    body = "".join(
        [
            f'<header><p class="kind">kvbaton compare</p><h1>{escape(result.title)}</h1>',
            f'<p class="verdict {result.verdict.decision.replace(" ", "-")}">{escape(result.verdict.sentence)}</p>',
            f"{_legend(result)}</header>",
            f"<section><h2>What was measured, at {result.rates[0].rate_per_s:g} requests/s</h2>",
            _comparison_table(result),
            "</section>",
            f'<section><h2>Plots</h2><div class="plots">{"".join(_plots(found))}</div></section>',
            f"<section><h2>Why</h2>{_list(result.verdict.reasons)}</section>",
            _simulated(result),
            f"<section><h2>Each run</h2>{_run_table(result)}</section>",
            f"<section><h2>The arms</h2>{_arms(result)}</section>",
            f"<section><h2>To repeat it</h2>{_config(result)}</section>",
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(result.title)}</title><style>{STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>\n"
    )


def _legend(result: CompareResult) -> str:
    return (
        '<p class="legend">'
        + "".join(
            f'<span><i class="{style}"></i>{escape(arm["name"])}</span>' for style, arm in sorted(result.arms.items())
        )
        + "</p>"
    )


def _list(rows: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(row)}</li>" for row in rows) + "</ul>"


class _Tag(str):
    """Made here, of text that is escaped already. What begins like a tag may be anybody's."""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are escaped, but for tags of ours."""

    def cell(text: str) -> str:
        return text if isinstance(text, _Tag) else escape(text)

    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def comparison_rows(found: RateResult) -> list[list[str]]:
    """metric, A with interval, B with interval, ratio with interval, direction, reading."""
    rows = [_row(one) for one in found.comparisons]
    a, b = found.a.server, found.b.server
    if b.get("transfer"):
        times = [_number(of["transfer"]["p99_ms"]) if of.get("transfer") else "none" for of in (a, b)]
        count = f"{b['transfer']['count']} transfers"
        rows.append(["p99 KV transfer, from its start (ms)", *times, count, "", ""])
    if b.get("moved"):
        megabytes = [_number(of["moved"]["bytes"] / 1e6) if of.get("moved") else "not known" for of in (a, b)]
        rows.append(["KV moved between workers (MB)", *megabytes, f"by {b['moved']['source']}", "", ""])
    if "moved" in b.get("moved", {}).get("prompt_tokens", {}):
        rows.append(["prompt tokens whose KV came from a peer", _tokens(a), _tokens(b), "by the engine", "", ""])
    return rows


def _tokens(server: dict[str, Any]) -> str:
    tokens = server.get("moved", {}).get("prompt_tokens", {})
    if "moved" not in tokens:
        return "not known"
    return f"{tokens['moved']:,.0f}; computed {tokens.get('computed', 0):,.0f}, cached {tokens.get('cached', 0):,.0f}"


def _row(one: Comparison) -> list[str]:
    unit = f" ({one.unit})" if one.unit else ""
    ratio = "" if one.ratio is None else _number(one.ratio)
    return [
        f"{one.name}{unit}",
        _with_interval(one.a, one.a_interval),
        _with_interval(one.b, one.b_interval),
        ratio + (_span(one.ratio_interval) if one.ratio is not None else ""),
        "lower is better" if one.lower_is_better else "higher is better",
        one.reading,
    ]


def _with_interval(value: float | None, interval: stats.Interval | None) -> str:
    return "not measured" if value is None else f"{_number(value)}{_span(interval)}"


def _span(interval: stats.Interval | None) -> str:
    return "" if interval is None else f" [{_number(interval.low)}, {_number(interval.high)}]"


def _number(value: float) -> str:
    """Three digits, never an exponent where a person would write none."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


HEAD = ("metric", "A", "B", "B / A", "direction", "B reads")


def _comparison_table(result: CompareResult) -> str:
    rows = [
        [*row[:5], _Tag(f'<b class="{escape(row[5]).replace(" ", "-")}">{escape(row[5])}</b>') if row[5] else ""]
        for row in comparison_rows(result.rates[0])
    ]
    names = {style: arm["name"] for style, arm in result.arms.items()}
    head = (HEAD[0], names["a"], names["b"], "ratio", *HEAD[4:])
    note = (
        '<p class="note">In brackets the 95% interval. Latencies count from the instant a request was due. '
        "The ratio is the second arm over the first.</p>"
    )
    return _table(head, rows) + note


def _plots(found: CompareRuns) -> Iterable[str]:
    result = found.result
    gates = result.gates
    names = {style: str(arm["name"]) for style, arm in result.arms.items()}
    for title, values, gate in (
        ("Time to first token", stats.ttft_s, gates.ttft_s if gates else None),
        ("Time per output token, per request", stats.tpot_s, gates.tpot_s if gates else None),
    ):
        series = [
            charts.Series(names[style], style, charts.cdf(_values(found.raw[style], values))) for style in ("a", "b")
        ]
        yield _cdf(title, series, gate)
    gaps = [charts.Series(names[style], style, charts.cdf(_gaps(found.raw[style]))) for style in ("a", "b")]
    yield _cdf("Gaps between tokens (ITL)", gaps, gates.tpot_s if gates else None)
    if len(result.rates) > 1:
        yield _by_rate(result, names, "ttft", "p95 time to first token by rate", gates.ttft_s if gates else None)
        yield _by_rate(result, names, "itl", "p95 gap between tokens by rate", gates.tpot_s if gates else None)
    yield _goodput_bars(result, names)
    yield _stalls(found, names)


def _values(runs: Sequence[Run], of: Any) -> list[float]:
    values = (of(sample) for run in runs for sample in run.measured() if sample.ok)
    return [value * 1e3 for value in values if value is not None]


def _gaps(runs: Sequence[Run]) -> list[float]:
    gaps = [gap * 1e3 for run in runs for sample in run.measured() if sample.ok for gap in stats.itl_s(sample)[0]]
    return gaps[:: max(1, len(gaps) // MAX_CDF_VALUES)]


def _cdf(title: str, series: Sequence[charts.Series], gate_s: float | None) -> str:
    gates = [(gate_s * 1e3, True, "gate")] if gate_s is not None else []
    percents = [
        charts.Series(one.name, one.style, [(x, y * 100) for x, y in one.points]) for one in series if one.points
    ]
    return charts.lines(title, percents, ("milliseconds (log scale)", "% of all"), gates, log_x=True)


def _by_rate(result: CompareResult, names: dict[str, str], metric: str, title: str, gate_s: float | None) -> str:
    series = []
    for style in ("a", "b"):
        points, bounds = [], []
        for found in sorted(result.rates, key=lambda rate: rate.rate_per_s):
            summary: RunSummary = getattr(found, style)
            value, interval = summary.p(metric, "p95"), summary.interval(metric, "p95")
            if value is None:
                continue
            points.append((found.rate_per_s, value * 1e3))
            bounds.append((interval.low * 1e3, interval.high * 1e3) if interval else (value * 1e3, value * 1e3))
        series.append(charts.Series(names[style], style, points, bounds))
    gates = [(gate_s * 1e3, False, "gate")] if gate_s is not None else []
    return charts.lines(title, series, ("requests per second", "ms"), gates)


def _goodput_bars(result: CompareResult, names: dict[str, str]) -> str:
    """Requests per second inside both gates; without gates, the plain output rate."""
    wanted = "requests in both gates" if result.gates is not None else "output rate"
    found = next((one for one in result.rates[0].comparisons if one.name == wanted), None)
    if found is None:
        return charts.empty("Goodput")
    rows = []
    for style, value, interval in (("a", found.a, found.a_interval), ("b", found.b, found.b_interval)):
        value = value or 0.0
        low, high = (max(0.0, interval.low), interval.high) if interval else (value, value)
        rows.append((names[style], style, value, low, min(high, 3 * value or high)))
    title = "Goodput: requests/s within both gates" if result.gates is not None else "Output tokens/s"
    return charts.bars(title, rows, f"{found.unit} at {result.rates[0].rate_per_s:g} requests/s offered")


def _stalls(found: CompareRuns, names: dict[str, str]) -> str:
    bound = found.result.rates[0].a.stalls.bound_s
    rows = []
    span = 1.0
    for style in ("a", "b"):
        first = found.raw[style][0]
        stalls = stats.stalls(first.measured(), bound)
        span = max(span, *(stall.start_s + stall.gap_s for stall in stalls), first.footer.wall_s)
        rows.append((names[style], style, [(stall.start_s, stall.gap_s) for stall in stalls]))
    return charts.timeline(f"Stalls: gaps over {bound * 1e3:g} ms, first run of each", rows, span, "", bound)


SIMULATED_HEAD = ("arm", "requests/s", "figure", "simulated ms", "measured ms (of the runs)", "error")


def simulated_rows(result: CompareResult) -> list[list[str]]:
    found = result.simulated
    return [
        [
            each.arm, f"{each.rate_per_s:g}", each.name, _number(each.predicted_ms), _measured(each),
            f"{each.error:+.0%}",
        ]
        for each in (found.predictions if found is not None else ())
    ]  # fmt: skip


def _measured(each: Prediction) -> str:
    runs = f" ({_number(min(each.runs_ms))} to {_number(max(each.runs_ms))})" if len(each.runs_ms) > 1 else ""
    return _number(each.measured_ms) + runs


def _simulated(result: CompareResult) -> str:
    found = result.simulated
    if found is None:
        return ""
    note = f'<p class="note">The same requests at the same instants, simulated from {escape(found.profile)}.</p>'
    table = _table(SIMULATED_HEAD, simulated_rows(result))
    return f"<section><h2>What the simulator says of these runs</h2>{table}{note}{_list(found.notes)}</section>"


def _run_table(result: CompareResult) -> str:
    head = (
        "arm",
        "rate",
        "order",
        "ok",
        "failed",
        "p95 TTFT ms",
        "p95 ITL ms",
        "in gates",
        "client lag p99 ms",
        "other programs' cores",
        "samples",
    )
    return _table(head, run_rows(result))


def run_rows(result: CompareResult) -> list[list[str]]:
    rows = []
    for run in result.runs:
        found = run.summary
        met = found.attainment
        rows.append(
            [
                run.arm,
                f"{run.rate_per_s:g}",
                str(run.order + 1),
                str(found.counts.ok),
                str(found.counts.failed),
                _ms(found.p("ttft", "p95")),
                _ms(found.p("itl", "p95")),
                f"{met.share:.1%}" if met is not None else "",
                f"{found.client.lag_p99_ms:.2f}" + ("" if found.valid else " INVALID"),
                _machine(run),
                f"{run.samples_file} sha256 {run.samples_sha256[:16]}",
            ]
        )
    return rows


def _machine(run: ArmRun) -> str:
    used = run.machine
    if used is None or used.steal_cores is None:
        return "not known"
    other = "not known" if used.other_cores is None else f"{used.other_cores:.2f}"
    return other + (f", stolen {used.steal_cores:.2f}" if used.steal_cores >= 0.01 else "")


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value * 1e3:.2f}"


def _arms(result: CompareResult) -> str:
    rows = [[str(arm["name"]), str(arm["runs"])] for _, arm in sorted(result.arms.items())]
    parts = [_table(("arm", "what ran"), rows)]
    if result.differences:
        differences = [[one.field, one.a, one.b, "compared" if one.allowed else "UNFAIR"] for one in result.differences]
        parts.append("<h3>In what they differ</h3>" + _table(("field", "A", "B", ""), differences))
    else:
        parts.append("<p>They differ in nothing that either says of itself.</p>")
    if result.tuning:
        parts.append("<h3>Tuning of the colocated arm</h3>" + _table(TUNING_HEAD, tuning_rows(result)))
    return "".join(parts)


TUNING_HEAD = ("flags", "in gates", "p95 TTFT ms", "p95 ITL ms", "tokens/s", "", "samples")


def tuning_rows(result: CompareResult) -> list[list[str]]:
    return [
        [
            " ".join(row.flags) or "(defaults)",
            "" if row.attainment is None else f"{row.attainment:.1%}",
            "" if row.p95_ttft_ms is None else f"{row.p95_ttft_ms:.1f}",
            "" if row.p95_itl_ms is None else f"{row.p95_itl_ms:.1f}",
            f"{row.output_tokens_per_s:.1f}",
            "chosen" if row.chosen else "",
            f"{row.samples_file} sha256 {row.samples_sha256[:16]}" if row.samples_file else "",
        ]
        for row in result.tuning
    ]


def _config(result: CompareResult) -> str:
    rows = [[name, str(value)] for name, value in result.config.items() if value not in (None, "", {}, [])]
    rows += [[name, value] for name, value in result.versions.items()] + [["started", result.started_at]]
    return _table(("setting", "value"), rows)


def markdown(result: CompareResult) -> str:
    """The same facts without plots, for a write-up."""
    names = {style: str(arm["name"]) for style, arm in result.arms.items()}
    parts = [f"# {result.title}", "", f"**{result.verdict.sentence}**", ""]
    if result.gates is not None:
        gates = result.gates
        parts += [
            f"Gates: TTFT {gates.ttft_s * 1e3:g} ms, TPOT {gates.tpot_s * 1e3:g} ms, "
            f"for {gates.attainment:.0%} of requests.",
            "",
        ]
    for found in result.rates:
        parts += [f"## At {found.rate_per_s:g} requests/s", ""]
        parts += _markdown_table(
            ("metric", names["a"], names["b"], "ratio", "direction", "reads"), comparison_rows(found)
        )
    parts += ["## Why", "", *(f"* {reason}" for reason in result.verdict.reasons), ""]
    if result.simulated is not None:
        parts += ["## What the simulator says of these runs", ""]
        parts += _markdown_table(SIMULATED_HEAD, simulated_rows(result))
        parts += [f"* simulated from {result.simulated.profile}", *(f"* {note}" for note in result.simulated.notes), ""]
    parts += [
        "## The arms",
        "",
        *(f"* {names[style]}: `{arm['runs']}`" for style, arm in sorted(result.arms.items())),
        "",
    ]
    if result.differences:
        rows = [[one.field, one.a, one.b, "compared" if one.allowed else "UNFAIR"] for one in result.differences]
        parts += _markdown_table(("field", "A", "B", ""), rows)
    if result.tuning:
        parts += ["## Tuning of the colocated arm", "", *_markdown_table(TUNING_HEAD, tuning_rows(result))]
    parts += ["## Raw samples", ""]
    rows = [
        [run.arm, f"{run.rate_per_s:g}", str(run.order + 1), _machine(run), run.samples_file, f"`{run.samples_sha256}`"]
        for run in result.runs
    ]
    parts += _markdown_table(("arm", "rate", "order", "other programs' cores", "file", "sha256"), rows)
    return "\n".join(parts).rstrip() + "\n"


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *(line(row) for row in rows), ""]
