"""What a drill found, for people: a table on the terminal, a page, a Markdown file; and the whole record as JSON.

The page is one file that opens offline. Knows nothing about how anything was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import median

import msgspec

from kvbaton import __version__
from kvbaton.bench.report_style import STYLE
from kvbaton.drill.run import DrillRecord
from kvbaton.drill.scenarios import BY_NAME
from kvbaton.drill.verdict import Result

HEAD = (
    "scenario", "result", "requests", "errors", "lost", "wrong", "detected s", "recovered s", "whole s",
    "prefill wasted", "KV moved MB", "slowest s",
)  # fmt: skip
MOST_REASONS = 5


class Line(msgspec.Struct, frozen=True):
    """One scenario over all runs."""

    name: str
    title: str
    promise: str
    rehearsed: int
    passed: int
    requests: int
    errors: dict[str, int]
    lost: int
    wrong: int
    detect_s: tuple[float, float] | None  # median and worst
    recover_s: tuple[float, float] | None
    whole_s: tuple[float, float] | None
    wasted_share: float  # of the prompt tokens computed while it was rehearsed
    moved_bytes: int
    slowest_s: float
    skipped: str

    @property
    def verdict(self) -> str:
        if not self.rehearsed:
            return f"skipped: {self.skipped}"
        return f"{'pass' if self.passed == self.rehearsed else 'FAIL'} {self.passed}/{self.rehearsed}"


def lines(record: DrillRecord) -> list[Line]:
    found = []
    for name in BY_NAME:
        mine = [result for result in record.results if result.name == name]
        if mine:
            found.append(_line(name, mine))
    return found


def _line(name: str, mine: Sequence[Result]) -> Line:
    done = [result for result in mine if not result.skipped]
    errors: dict[str, int] = {}
    for result in done:
        for what, number in result.errors.items():
            errors[what] = errors.get(what, 0) + number
    computed = sum(result.computed_tokens for result in done)
    return Line(
        name=name,
        title=BY_NAME[name].title,
        promise=BY_NAME[name].promise.text,
        rehearsed=len(done),
        passed=sum(result.passed for result in done),
        requests=sum(result.requests for result in done),
        errors=errors,
        lost=sum(result.lost for result in done),
        wrong=sum(result.wrong for result in done),
        detect_s=_spread([result.detect_s for result in done]),
        recover_s=_spread([result.recover_s for result in done]),
        whole_s=_spread([result.whole_s for result in done]),
        wasted_share=sum(result.wasted_tokens for result in done) / computed if computed else 0.0,
        moved_bytes=sum(result.moved_bytes for result in done),
        slowest_s=max((result.slowest_s for result in done), default=0.0),
        skipped=next((result.skipped for result in mine if result.skipped), ""),
    )


def _spread(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (median(known), max(known)) if known else None


def cells(line: Line) -> list[str]:
    def spread(found: tuple[float, float] | None) -> str:
        return "-" if found is None else f"{found[0]:.2f} ({found[1]:.2f})"

    errors = ", ".join(f"{number} {what}" for what, number in sorted(line.errors.items())) or "0"
    return [
        line.name,
        line.verdict,
        str(line.requests),
        errors,
        str(line.lost),
        str(line.wrong),
        spread(line.detect_s),
        spread(line.recover_s),
        spread(line.whole_s),
        f"{line.wasted_share:.1%}",
        f"{line.moved_bytes / 1e6:,.0f}",
        f"{line.slowest_s:.1f}",
    ]


def sentence(record: DrillRecord) -> str:
    done = record.done
    failed = sum(not result.passed for result in done)
    requests, wrong = sum(r.requests for r in done), sum(r.wrong for r in done)
    lost = sum(r.lost for r in done if not BY_NAME[r.name].promise.may_break)
    errors = sum(sum(result.errors.values()) for result in done)
    verdict = "Passed" if record.passed else "FAILED"
    text = (
        f"{verdict}: {len(done)} rehearsals, {failed} failed; {requests} requests, {wrong} wrong answers, {lost} lost, "
        f"{errors} answered with an error."
    )
    if record.nothing_moved:
        text += " No KV went from one worker to another: send longer prompts, or lower the router's threshold."
    if record.doubtful:
        text += f" The healthy fleet itself answers {len(record.doubtful)} prompts in two ways."
    return text + (f" It ended early: {record.stopped}." if record.stopped else "")


def summary_text(record: DrillRecord) -> str:
    rows = [list(HEAD), *(cells(line) for line in lines(record))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*table, "", sentence(record), *(f"  {line}" for line in _failures(record))])


def _failures(record: DrillRecord) -> list[str]:
    return [
        f"{result.name}, seed {result.seed}: {reason}"
        for result in record.results
        if not result.passed
        for reason in result.reasons[:MOST_REASONS]
    ]


def markdown(record: DrillRecord) -> str:
    def row(items: Sequence[str]) -> str:
        return "| " + " | ".join(item.replace("|", "\\|") for item in items) + " |"

    parts = [
        "# Drill",
        "",
        f"**{sentence(record)}**",
        "",
        _about(record),
        "",
        "Times count from the fault: median (worst). *Detected*: the fleet page shows it. *Recovered*: the first right",
        "canary after which no request failed. *Whole*: every worker is back. *Prefill wasted*: share of the prompt",
        "tokens computed meanwhile whose KV served no answer. Requests lost with a killed router are foreseen.",
        "",
        row(HEAD),
        "|" + "---|" * len(HEAD),
        *(row(cells(line)) for line in lines(record)),
        "",
        "## What was done, and what is promised",
        "",
        *(f"* **{line.name}**: {line.title}. {line.promise[0].upper()}{line.promise[1:]}." for line in lines(record)),
        "",
    ]
    if failures := _failures(record):
        parts += ["## What failed", "", *(f"* {failure}" for failure in failures), ""]
    parts += ["## Evidence", ""]
    for result in record.results:
        if result.evidence:
            mark = "pass" if result.passed else "FAIL"
            parts += [f"{result.name}, run {result.run + 1}, seed `{result.seed}`: {mark}", ""]
            parts += ["```", *result.evidence, "```", ""]
    return "\n".join(parts).rstrip() + "\n"


def _about(record: DrillRecord) -> str:
    fleet = ", ".join(f"{number} {role}" for role, number in record.fleet.items())
    settings = record.settings
    return (
        f"kvbaton {__version__}; fleet: {fleet}; KV over {record.transport}; {settings['num_runs']:g} runs, seed "
        f"{settings['seed']:g}; {settings['rate_per_s']:g} requests/s and a canary every "
        f"{settings['canary_every_s']:g} s. "
        + "; ".join(f"{name} {value}" for name, value in record.machine.items() if name != "kvbaton")
    )


def page(record: DrillRecord) -> str:
    def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
        return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'

    found = lines(record)
    promises = [[line.name, line.title, line.promise] for line in found]
    failures = "".join(f"<li>{escape(failure)}</li>" for failure in _failures(record))
    evidence = "".join(
        f"<details{'' if result.passed else ' open'}><summary>{escape(result.name)}, run {result.run + 1}: "
        f"{'pass' if result.passed else 'FAIL'}</summary><pre>{escape(chr(10).join(result.evidence))}</pre></details>"
        for result in record.results
        if result.evidence
    )
    style = STYLE + ".verdict.bad { border-color: var(--bad); } .verdict.good { border-color: var(--good); } "
    style += "pre { overflow-x: auto; background: var(--wash); padding: 10px; font-size: .8rem; }"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Drill</title>'
        f"<style>{style}</style></head><body><main><h1>Drill</h1>"
        f'<p class="verdict {"good" if record.passed else "bad"}">{escape(sentence(record))}</p>'
        f'<p class="note">{escape(_about(record))}</p>'
        f"{table(HEAD, [cells(line) for line in found])}"
        '<p class="note">Times count from the fault: median (worst). Detected: the fleet page shows it. Recovered: the '
        "first right canary after which no request failed. Whole: every worker is back.</p>"
        + (f"<h2>What failed</h2><ul>{failures}</ul>" if failures else "")
        + f"<h2>What was done, and what is promised</h2>{table(('scenario', 'fault', 'promise'), promises)}"
        f"<h2>Evidence</h2>{evidence}</main></body></html>\n"
    )


def _cell(text: str) -> str:
    kind = "better" if text.startswith("pass ") else "worse" if text.startswith("FAIL ") else ""
    return f'<td><b class="{kind}">{escape(text)}</b></td>' if kind else f"<td>{escape(text)}</td>"


def write_reports(record: DrillRecord, directory: Path) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    everything = {
        "kvbaton": __version__,
        "passed": record.passed,
        "sentence": sentence(record),
        "lines": [{**msgspec.to_builtins(line), "verdict": line.verdict} for line in lines(record)],
        **msgspec.to_builtins(record),
    }
    written = []
    for name, text in (
        ("report.json", msgspec.json.format(msgspec.json.encode(everything), indent=1).decode() + "\n"),
        ("report.md", markdown(record)),
        ("report.html", page(record)),
    ):
        path = directory / name
        path.write_text(text)
        written.append(path)
    return written
