"""What a drift run saw, what of it was missed, and the report that is kept.

Knows nothing about how it was seen.
"""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvbaton.bench.charts import Series, lines
from kvbaton.bench.report_style import STYLE

ALERT = "KvbatonRatioDrift"


class Request(msgspec.Struct, frozen=True):
    due_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    total_s: float
    failed: str  # empty: it went well


class Look(msgspec.Struct, frozen=True):
    at_s: float
    prefill: int  # workers that take requests
    decode: int
    inflight: int
    queued: int
    waiting_prompt_tokens: int
    ratio: float | None  # the router's gauges
    drift: float | None
    firing: list[str]  # alerts


class Record(msgspec.Struct):
    shape: dict[str, float]
    band: tuple[float, float]
    load_before: float = 0.0  # processes that wanted a core in the minute before
    requests: list[Request] = []
    looks: list[Look] = []
    pictures: list[str] = []
    told: list[str] = []  # by the autoscaler, on stderr
    advised: int | None = None  # exit code of `kvbaton advise`

    def first(self, name: str) -> float | None:
        """When an alert first fired after half time."""
        return next(
            (each.at_s for each in self.looks if each.at_s > self.shape["half_s"] and name in each.firing), None
        )

    def at_half(self) -> Look:
        """The last look at the chat."""
        return [each for each in self.looks if each.at_s <= self.shape["half_s"]][-1]

    def grown(self) -> Look | None:
        """The first with more prefill workers than at half time."""
        before = self.at_half()
        return next((each for each in self.looks if each.at_s > before.at_s and each.prefill > before.prefill), None)

    def shrunk(self) -> Look | None:
        """The first with fewer decode workers than at half time."""
        before = self.at_half()
        return next((each for each in self.looks if each.at_s > before.at_s and each.decode < before.decode), None)


def missed(record: Record) -> list[str]:
    """What should have happened and did not; empty: all of it did."""
    half_s, wrong = record.shape["half_s"], []
    if record.first(ALERT) is None:
        wrong.append(f"{ALERT} never fired")
    before = [each for each in record.looks if half_s - 60 < each.at_s < half_s]
    if any(ALERT in each.firing for each in before):
        wrong.append(f"{ALERT} fired before the traffic changed")
    if record.grown() is None:
        wrong.append("no prefill worker was added")
    if record.shrunk() is None:
        wrong.append("no decode worker was drained")
    wrong += [f"the picture {each!r} is missing" for each in ("before", "alert", "prometheus", "after")
              if each not in record.pictures]  # fmt: skip
    failed = [each for each in record.requests if each.failed]
    if failed or not record.requests:
        wrong.append(f"{len(failed)} of {len(record.requests)} requests failed, the first with {failed[:1]}")
    if record.advised not in (0, 1):
        wrong.append(f"kvbaton advise ended with {record.advised}")
    return wrong


def write(out: Path, record: Record, command: str) -> None:
    (out / "record.json").write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    (out / "workers.svg").write_text(_chart(
        "Workers that take requests", record,
        (("prefill", "a", [(each.at_s, float(each.prefill)) for each in record.looks]),
         ("decode", "b", [(each.at_s, float(each.decode)) for each in record.looks])), "workers",
    ))  # fmt: skip
    ratio = [(each.at_s, each.ratio) for each in record.looks if each.ratio is not None]
    (out / "ratio.svg").write_text(_chart("Computed prompt tokens for each output token, five minutes", record,
                                          (("ratio", "a", ratio),), "ratio", record.band))  # fmt: skip
    (out / "report.md").write_text("\n".join(_lines(record, command)) + "\n")


def _chart(title: str, record: Record, series: Sequence[tuple[str, str, list[tuple[float, float]]]], label: str,
           band: tuple[float, ...] = ()) -> str:  # fmt: skip
    gates: list[tuple[float, bool, str]] = [(record.shape["half_s"], True, "documents begin")]
    alert_s = record.first(ALERT)
    if alert_s is not None:
        gates.append((alert_s, True, "alert"))
    gates += [(edge, False, f"band {edge:g}") for edge in band]
    text = lines(title, [Series(*each) for each in series], ("seconds", label), gates)
    head, rest = text.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg" width="840"><style>{STYLE}</style>{rest}'


def _lines(record: Record, command: str) -> list[str]:
    shape, half_s = record.shape, record.shape["half_s"]
    failed = sum(bool(each.failed) for each in record.requests)
    half, grown, shrunk = record.at_half(), record.grown(), record.shrunk()
    events = [
        (half_s, f"chat ends, documents begin; {half.prefill} prefill and {half.decode} decode workers"),
        (grown.at_s if grown else None, f"prefill worker {grown.prefill if grown else 0} takes requests"),
        (shrunk.at_s if shrunk else None, f"a decode worker has drained, {shrunk.decode if shrunk else 0} is left"),
        (record.first(ALERT), f"{ALERT} fires in Prometheus"),
        (next((each.at_s for each in record.looks if each.at_s > half_s and (each.drift or 0.0) > 1.0), None),
         "the router's own five minutes have left the band (gauge and page)"),
    ]  # fmt: skip
    found = [
        "# Drift: from chat to long documents at half time",
        "",
        "Written by `PYTHONPATH=.:tests python -m benchmarks.drift`, which runs it again and takes the pictures anew.",
        f"{len(record.requests)} requests, **{failed} failed**.",
        "" if not missed(record) else f"**Not as it should be:** {'; '.join(missed(record))}.",
        "",
        "## What was run",
        "",
        "```",
        *textwrap.wrap(command, 118, subsequent_indent="    ", break_on_hyphens=False),
        "```",
        "",
        f"on {_machine()}; the default model (SmolLM2-135M-Instruct). In the minute before {record.load_before:.0f}",
        "processes wanted a core. This shows what is decided and that nothing is lost, not how fast anything is: on",
        "few cores a third worker brings no new core along.",
        "",
        f"* Until {half_s:g} s {shape['chat_users']:g} users with the requests of Azure's conversation trace, then",
        f"  {shape['documents_users']:g} with Mooncake's, in order, each the next when the last is answered; prompts",
        f"  of chat times {shape['chat_scale']:.3g}, of documents times {shape['documents_scale']:.3g}, answers times",
        f"  {shape['output_scale']:.3g} and {shape['documents_output_scale']:.3g}, for a context of 2048. One worker",
        f"  was measured at {shape['prompt_tokens_per_s']:.0f} prompt tokens a second, which sets the second number.",
        f"* The band {record.band[0]:g} to {record.band[1]:g} is the one a plan for the chat would give.",
        "* Prometheus scrapes every 2 s and evaluates the rules of `kvbaton deploy`, with the ratio over 1 m for 15 s",
        "  (in production over 30 m for 15 m); the autoscaler shrinks after 30 s (in production 300 s).",
        "",
        "## What happened",
        "",
        "| at s | |",
        "|---|---|",
    ]
    for at_s, what in sorted((each for each in events if each[0] is not None), key=lambda each: each[0] or 0.0):
        found.append(f"| {at_s:.0f} | {what} |")
    found += ["", "| | requests | failed | prompt, output tokens, mean | TTFT median, p95 s |", "|---|---|---|---|---|"]
    found += [_phase("chat", [each for each in record.requests if each.due_s < half_s]),
              _phase("documents", [each for each in record.requests if each.due_s >= half_s])]  # fmt: skip
    others = sorted({name for each in record.looks for name in each.firing} - {ALERT})
    found += ["", f"Other alerts that fired meanwhile: {', '.join(others) or 'none'}.", ""]
    found += ["What the autoscaler said (seconds since `up` started):", "", "```", *record.told, "```", ""]
    found += ["![Workers](workers.svg)", "", "![Ratio](ratio.svg)", "", "## Pictures", ""]
    for name, text in (("before", "The page before half time: within the plan"),
                       ("alert", "The page when the alert fires: above the plan"),
                       ("prometheus", "Prometheus at that moment"),
                       ("after", "The page at the end: more prefill workers, fewer that decode")):  # fmt: skip
        found += [f"![{text}]({name}.png)", ""]
    found += ["`scenario.toml` is what `kvbaton advise --write-scenario` made of twenty seconds of the new traffic,",
              "for a new `kvbaton plan`; `record.json` has every look and every request."]  # fmt: skip
    return found


def _phase(name: str, requests: list[Request]) -> str:
    times = sorted(each.ttft_s for each in requests if each.ttft_s is not None)
    if not times:
        return f"| {name} | 0 | | | |"
    mean_prompt, mean_output = (sum(getattr(each, what) for each in requests) / len(requests)
                                for what in ("prompt_tokens", "output_tokens"))  # fmt: skip
    p95 = times[min(len(times) - 1, int(0.95 * len(times)))]
    failed = sum(bool(each.failed) for each in requests)
    return (f"| {name} | {len(requests)} | {failed} | {mean_prompt:.0f}, {mean_output:.0f} "
            f"| {times[len(times) // 2]:.2f}, {p95:.2f} |")  # fmt: skip


def _machine() -> str:
    return f"{os.cpu_count()} cores ({platform.machine()})"
