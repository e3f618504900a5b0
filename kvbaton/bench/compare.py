"""Runs both arms over the same workloads in the order A B B A and puts what they showed into one struct.

Invariants: both arms of a pair get the same requests at the same instants; pairs alternate their order, so that a
drift of the machine does not favour either; the colocated arm is tuned first and both arms then run with the flags it
chose; nothing is left out of the result, failed and invalid runs included.

Knows nothing about HTML. The judgement is made in verdict.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.bench import verdict as judge
from kvbaton.bench.arms import Arm, Difference, describe_endpoint, parity, running
from kvbaton.bench.client import Progress
from kvbaton.bench.machine import MAX_OTHER_CORES, MachineUse, MachineWatch
from kvbaton.bench.prediction import Simulated, predict_all
from kvbaton.bench.runner import run_load
from kvbaton.bench.samples import Run, file_sha256
from kvbaton.bench.stats import Gates
from kvbaton.bench.summary import RunSummary, summarize_run
from kvbaton.bench.verdict import AttainmentDifference, Comparison, Verdict
from kvbaton.bench.workload import LoadSpec
from kvbaton.plan.profile_file import ProfileFile
from kvbaton.types import LocalError

Tell = Callable[[str], None]
# Tuning runs are short: they rank settings, they prove nothing.
TUNING_SHARE = 0.5
# What the advised arm may do worse is said with the advice.
PRICED = ("p95 TTFT", "p95 TPOT", "p95 ITL", "p95 end to end", "cost per million output tokens")


@dataclass(frozen=True)
class CompareSpec:
    """What to compare. ``rates_per_s[0]`` is the rate the verdict is about, the others draw latency against rate."""

    a: Arm
    b: Arm
    load: LoadSpec
    gates: Gates | None
    rates_per_s: tuple[float, ...]
    rounds: int = 1  # of A B B A
    objective: str = "itl:95"
    tuning: tuple[tuple[str, ...], ...] = ()  # flag sets tried on the colocated arm
    stall_bound_s: float = 0.5
    max_error_share: float = 0.01
    max_other_cores: float = MAX_OTHER_CORES  # of other programs, mean over a run
    max_drift: float = 1.5  # factor by which the objective may differ between two runs of the same arm
    title: str = "colocated against disaggregated"
    directory: Path = Path("compare")
    profile: ProfileFile | None = None  # of a worker like these: the runs are simulated too
    headers: dict[str, str] = field(default_factory=dict)


class ArmRun(msgspec.Struct, frozen=True):
    """One run of one arm, with where its raw samples are."""

    arm: str
    rate_per_s: float
    order: int
    summary: RunSummary
    samples_file: str
    samples_sha256: str
    machine: MachineUse | None = None


class TuningRow(msgspec.Struct, frozen=True):
    flags: tuple[str, ...]
    attainment: float | None
    p95_itl_ms: float | None
    p95_ttft_ms: float | None
    output_tokens_per_s: float
    chosen: bool
    samples_file: str = ""
    samples_sha256: str = ""


class RateResult(msgspec.Struct, frozen=True):
    """Both arms at one rate, pooled over their runs."""

    rate_per_s: float
    a: RunSummary
    b: RunSummary
    comparisons: tuple[Comparison, ...]
    attained: AttainmentDifference | None


class CompareResult(msgspec.Struct, frozen=True):
    title: str
    verdict: Verdict
    arms: dict[str, Any]
    differences: tuple[Difference, ...]
    tuning: tuple[TuningRow, ...]
    gates: Gates | None
    config: dict[str, Any]
    versions: dict[str, str]
    started_at: str
    rates: tuple[RateResult, ...]
    runs: tuple[ArmRun, ...]
    goodput: dict[str, float]  # by arm: highest tried rate whose whole attainment interval is above the target
    simulated: Simulated | None = None  # the same runs, by the simulator


class CompareRuns(msgspec.Struct):
    """The result and the raw cohorts at the verdict's rate, for drawing."""

    result: CompareResult
    raw: dict[str, list[Run]]


async def compare(spec: CompareSpec, tell: Tell, watch: Callable[[Progress], None]) -> CompareRuns:
    """Runs everything; hours for real fleets, minutes for small ones."""
    percent, name = _objective(spec.objective)
    spec, tuned = await _tune(spec, tell, watch)
    says: dict[str, dict[str, str]] = {}
    recorded: dict[float, list[tuple[str, Run]]] = {}
    runs: list[ArmRun] = []
    for rate in spec.rates_per_s:
        recorded[rate] = []
        for order, (arm, seed) in enumerate(_order(spec)):
            path = spec.directory / "samples" / f"{arm.style}-rate{rate:g}-run{order}.jsonl.gz"
            load = msgspec.structs.replace(spec.load, rate_per_s=rate, seed=seed)
            run, used = await _one(spec, arm, load, path, says, watch)
            summary = summarize_run(run, spec.gates, arm.fleet, spec.stall_bound_s)
            runs.append(ArmRun(arm.name, rate, order, summary, path.name, file_sha256(path), used))
            recorded[rate].append((arm.style, run))
            tell("; ".join([_line(arm, rate, summary), *used.doubts(spec.max_other_cores)]))
    rates = tuple(_at_rate(spec, rate, recorded[rate]) for rate in spec.rates_per_s)
    differences = tuple(parity(spec.a, spec.b, says.get("a", {}), says.get("b", {})))
    first = rates[0]
    wanted = next(found for found in first.comparisons if found.name == judge.title(name, percent))
    doubts = _doubts(spec, differences, runs)
    doubts += judge.drift_doubts(name, percent, recorded[first.rate_per_s], spec.max_drift)
    headline = [one for one in first.comparisons if one.name in PRICED]
    verdict = judge.decide(wanted, first.attained, doubts, f"at {first.rate_per_s:g} requests/s", headline)
    headers = [run.header for _, run in recorded[spec.rates_per_s[0]]]
    result = CompareResult(
        title=spec.title,
        verdict=verdict,
        arms={arm.style: {"name": arm.name, "runs": arm.describe, "fleet": arm.fleet} for arm in (spec.a, spec.b)},
        differences=differences,
        tuning=tuned,
        gates=spec.gates,
        config={
            **headers[0].config,
            "url": "",
            "rates_per_s": spec.rates_per_s,
            "rounds": spec.rounds,
            "order": "A B B A",
            "max_other_cores": spec.max_other_cores,
            "max_drift": spec.max_drift,
        },
        versions=headers[0].versions,
        started_at=headers[0].started_at,
        rates=rates,
        runs=tuple(runs),
        goodput=_goodput(spec, rates),
        simulated=predict_all((spec.a, spec.b), recorded, spec.profile) if spec.profile is not None else None,
    )
    raw = {style: [run for found, run in recorded[spec.rates_per_s[0]] if found == style] for style in ("a", "b")}
    return CompareRuns(result, raw)


def _objective(text: str) -> tuple[int, str]:
    name, _, percent = text.partition(":")
    if name not in judge.METRICS or percent not in ("50", "90", "95", "99"):
        raise LocalError(
            f"cannot judge by {text!r}",
            field="objective",
            fix=f"use one of {', '.join(judge.METRICS)}, then :50 to :99",
        )
    return int(percent), name


def _order(spec: CompareSpec) -> list[tuple[Arm, int]]:
    """A B, then B A, each pair with a seed of its own that both its arms share."""
    found = []
    for number in range(spec.rounds):
        seed = spec.load.seed + 2 * number
        found += [(spec.a, seed), (spec.b, seed), (spec.b, seed + 1), (spec.a, seed + 1)]
    return found


async def _one(
    spec: CompareSpec,
    arm: Arm,
    load: LoadSpec,
    path: Path,
    says: dict[str, dict[str, str]],
    watch: Callable[[Progress], None],
) -> tuple[Run, MachineUse]:
    async with running(arm, spec.directory / f"{arm.style}.log") as at:
        if arm.style not in says:
            says[arm.style] = await describe_endpoint(at.url, spec.headers)
        load = msgspec.structs.replace(load, url=at.url)
        machine = MachineWatch(at.pid)
        run = await run_load(load, spec.headers, at.metrics_urls, path, watch)
        return run, machine.end()


async def _tune(
    spec: CompareSpec, tell: Tell, watch: Callable[[Progress], None]
) -> tuple[CompareSpec, tuple[TuningRow, ...]]:
    """Tries flag sets on the colocated arm and keeps the best for both arms."""
    if not spec.tuning:
        return spec, ()
    if not spec.a.up:
        raise LocalError("a running deployment cannot be tuned from here", field="tune", fix="give --colocated N")
    rows: list[TuningRow] = []
    for number, flags in enumerate(spec.tuning):
        arm = spec.a.with_flags(flags)
        load = msgspec.structs.replace(
            spec.load,
            rate_per_s=spec.rates_per_s[0],
            steady_s=spec.load.steady_s * TUNING_SHARE,
            seed=spec.load.seed + 7919,
        )
        path = spec.directory / "samples" / f"tune{number}.jsonl.gz"
        run, _ = await _one(spec, arm, load, path, {}, watch)
        found = summarize_run(run, spec.gates, arm.fleet, spec.stall_bound_s)
        rows.append(
            TuningRow(
                flags=flags,
                attainment=found.attainment.share if found.attainment is not None else None,
                p95_itl_ms=_ms(found.p("itl", "p95")),
                p95_ttft_ms=_ms(found.p("ttft", "p95")),
                output_tokens_per_s=found.rates.output_tokens_per_s,
                chosen=False,
                samples_file=path.name,
                samples_sha256=file_sha256(path),
            )
        )
        tell(f"tuning {' '.join(flags) or '(defaults)'}: {_line(arm, spec.rates_per_s[0], found)}")
    best = max(range(len(rows)), key=lambda number: _rank(rows[number]))
    rows[best] = msgspec.structs.replace(rows[best], chosen=True)
    chosen = spec.tuning[best]
    tuned = CompareSpec(**{**vars(spec), "a": spec.a.with_flags(chosen), "b": spec.b.with_flags(chosen)})
    return tuned, tuple(rows)


def _rank(row: TuningRow) -> tuple[float, float]:
    """Gates first; among equals the lower p95 ITL, because that is where a single pool suffers."""
    infinite = float("inf")
    return round(row.attainment or 0.0, 2), -(row.p95_itl_ms if row.p95_itl_ms is not None else infinite)


def _at_rate(spec: CompareSpec, rate: float, recorded: Sequence[tuple[str, Run]]) -> RateResult:
    by_arm = {style: [run for found, run in recorded if found == style] for style in ("a", "b")}
    # Runs went A B B A A B B A ...: the n-th of A and the n-th of B shared their seed.
    pairs = list(zip(by_arm["a"], by_arm["b"], strict=True))
    cohorts = [(one.measured(), two.measured()) for one, two in pairs]
    comparisons = [
        judge.compare_latency(name, percent, cohorts)
        for name, percent in (("ttft", 50), ("ttft", 95), ("ttft", 99), ("tpot", 95), ("itl", 50), ("itl", 95))
    ]
    comparisons += [judge.compare_latency(name, percent, cohorts) for name, percent in (("itl", 99), ("e2e", 95))]
    summaries = [
        [summarize_run(run, spec.gates, arm.fleet, spec.stall_bound_s) for run in by_arm[arm.style]]
        for arm in (spec.a, spec.b)
    ]
    comparisons += _once_a_run(spec, list(zip(*summaries, strict=True)))
    pooled = [summarize_run(by_arm[arm.style], spec.gates, arm.fleet, spec.stall_bound_s) for arm in (spec.a, spec.b)]
    attained = judge.compare_attainment(cohorts, spec.gates) if spec.gates is not None else None
    return RateResult(rate, pooled[0], pooled[1], tuple(comparisons), attained)


def _once_a_run(spec: CompareSpec, pairs: Sequence[tuple[RunSummary, ...]]) -> list[Comparison]:
    def each(of: Callable[[RunSummary], float | None]) -> list[tuple[float, float]]:
        values = [(of(one), of(two)) for one, two in pairs]
        return [(a, b) for a, b in values if a is not None and b is not None]

    rows = [
        ("output rate", "tokens/s", False, each(lambda found: found.rates.output_tokens_per_s)),
        ("requests in both gates", "1/s", False, each(_within_gates)),
        ("GPU-hours", "h", True, each(lambda found: found.cost.gpu_hours if found.cost else None)),
        (
            "cost per million output tokens",
            "",
            True,
            each(
                lambda found: found.cost.blended_per_million_output_tokens if found.cost and found.cost.money else None
            ),
        ),
        ("stalls a request", "", True, each(lambda found: found.stalls.count / max(1, found.counts.ok))),
    ]
    return [judge.compare_rate(name, unit, values, lower) for name, unit, lower, values in rows if values]


def _within_gates(found: RunSummary) -> float | None:
    """Throughput at the fixed SLO: requests that met both gates, per second."""
    if found.attainment is None or found.rates.wall_s <= 0:
        return None
    return found.attainment.num_met / found.rates.wall_s


def _goodput(spec: CompareSpec, rates: Sequence[RateResult]) -> dict[str, float]:
    if spec.gates is None:
        return {}
    best = {"a": 0.0, "b": 0.0}
    for found in rates:
        for style, summary in (("a", found.a), ("b", found.b)):
            met = summary.attainment
            if met is not None and met.interval.low >= spec.gates.attainment:
                best[style] = max(best[style], found.rate_per_s)
    return best


def _doubts(spec: CompareSpec, differences: Sequence[Difference], runs: Sequence[ArmRun]) -> list[str]:
    """Why these runs would prove nothing, if so."""
    doubts = [
        f"the arms differ in {found.field} ({found.a} against {found.b})" for found in differences if not found.allowed
    ]
    for run in runs:
        if run.rate_per_s != spec.rates_per_s[0]:
            continue
        if not run.summary.valid:
            reasons = "; ".join(run.summary.client.reasons) or "no request succeeded"
            doubts.append(f"run {run.order + 1} of {run.arm} is not valid ({reasons})")
        if run.machine is not None:
            used = run.machine.doubts(spec.max_other_cores)
            doubts += [f"the machine was disturbed in run {run.order + 1} ({run.arm}): {doubt}" for doubt in used]
        if run.summary.counts.error_share > spec.max_error_share:
            doubts.append(
                f"{run.summary.counts.error_share:.1%} of the requests of {run.arm} failed in run {run.order + 1}"
            )
    return doubts


def _line(arm: Arm, rate: float, found: RunSummary) -> str:
    parts = [f"{arm.name} at {rate:g}/s"]
    for title, name in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl")):
        value = found.p(name, "p95")
        parts.append(f"p95 {title} {value * 1e3:.1f} ms" if value is not None else f"no {title}")
    if found.attainment is not None:
        parts.append(f"{found.attainment.share:.1%} in both gates")
    if found.counts.failed:
        parts.append(f"{found.counts.failed} failed")
    if not found.valid:
        parts.append("INVALID: " + "; ".join(found.client.reasons))
    return ", ".join(parts)


def _ms(value: float | None) -> float | None:
    return None if value is None else value * 1e3
