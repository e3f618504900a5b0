"""Samples of all contenders to medians, ratios and the distance to the hardware's limit; and those to a table.

Ratios are taken within each turn, between measurements a few seconds apart, and their median is reported: a machine
that is slow for a minute is slow for both. Knows nothing about how a sample was measured.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.contenders import OURS


@dataclass(frozen=True)
class Workload:
    """``num_prompts`` prompts of ``prompt_tokens`` at once, ``max_tokens`` output tokens each."""

    name: str
    num_prompts: int
    prompt_tokens: int
    max_tokens: int
    unit: str  # "tok/s": more is better; "ms": less is better
    turns: int = 1  # in a round; a short measurement is taken often, or one hiccup of the host decides it

    def value(self, reply: dict[str, Any]) -> float:
        if self.unit == "ms":
            return 1e3 * (reply["last_s"][0] - reply["first_s"][0]) / (self.max_tokens - 1)
        if self.max_tokens == 1:
            return self.num_prompts * self.prompt_tokens / max(reply["last_s"])
        return self.num_prompts * self.max_tokens / max(reply["last_s"])


WORKLOADS = (
    Workload("prefill_512", 1, 512, 1, "tok/s", turns=5),
    Workload("prefill_2048", 1, 2048, 1, "tok/s", turns=2),
    Workload("tpot_batch_1", 1, 32, 64, "ms", turns=2),
    Workload("output_batch_8", 8, 32, 64, "tok/s"),
    Workload("output_batch_32", 32, 32, 64, "tok/s"),
)


@dataclass(frozen=True)
class Sample:
    turn: int  # of all engines, over all rounds
    engine: str
    precision: str
    workload: str
    value: float
    busy: float  # CPU seconds over wall seconds: below 0.93 something else had our core


def summarise(samples: list[Sample], limits: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """One row for each precision, workload and engine; ``limits[precision][workload]`` is the hardware's bound."""
    rows = []
    for precision in dict.fromkeys(s.precision for s in samples):
        for workload in WORKLOADS:
            here = [s for s in samples if s.precision == precision and s.workload == workload.name]
            ours = {s.turn: s.value for s in here if s.engine == OURS}
            for engine in dict.fromkeys(s.engine for s in here):
                theirs = [s for s in here if s.engine == engine]
                values = [s.value for s in theirs]
                ratios = [ours[s.turn] / s.value for s in theirs if s.turn in ours]
                median = statistics.median(values)
                limit = limits.get(precision, {}).get(workload.name)
                rows.append(
                    {
                        "precision": precision,
                        "workload": workload.name,
                        "unit": workload.unit,
                        "engine": engine,
                        "median": median,
                        "best": min(values) if workload.unit == "ms" else max(values),
                        "kvbaton_over_this": statistics.median(ratios) if ratios else None,
                        "limit": limit,
                        "share_of_limit": _share(median, limit, workload.unit),
                        "num_samples": len(values),
                        "num_disturbed": sum(s.busy < 0.93 for s in theirs),
                    }
                )
    return rows


def _share(value: float, limit: float | None, unit: str) -> float | None:
    if limit is None:
        return None
    return limit / value if unit == "ms" else value / limit


def markdown(rows: list[dict[str, Any]]) -> str:
    """One table for each precision: engines down, workloads across, our ratio to each in brackets."""
    parts = []
    for precision in dict.fromkeys(row["precision"] for row in rows):
        cells = {(r["engine"], r["workload"]): r for r in rows if r["precision"] == precision}
        names = [w.name for w in WORKLOADS if any(key[1] == w.name for key in cells)]
        units = {w.name: w.unit for w in WORKLOADS}
        head = [precision, *(f"{name} ({units[name]})" for name in names)]
        lines = [head, ["---", *("---:" for _ in names)]]
        limits = {r["workload"]: r["limit"] for r in cells.values() if r["limit"] is not None}
        lines.append(["limit of the hardware", *(_number(limits.get(name)) for name in names)])
        for engine in dict.fromkeys(key[0] for key in cells):
            lines.append([engine, *(_cell(cells.get((engine, name)), engine) for name in names)])
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(parts)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _cell(row: dict[str, Any] | None, engine: str) -> str:
    if row is None:
        return ""
    if engine == OURS:
        share = row["share_of_limit"]
        return f"**{_number(row['median'])}**" + (f" ({share:.0%} of the limit)" if share is not None else "")
    ratio = row["kvbaton_over_this"]
    return _number(row["median"]) + (f" ({ratio:.2f}x)" if ratio is not None else "")
