"""Split, do not split, or not proven: what a comparison may say, and from what.

Rule, in order (docs/measure.md says why):
1. Invalid runs, failures over the limit, a disturbed machine, arms that differ from themselves between runs, or from
   each other in what must be equal: not proven.
2. Attainment of the gates is judged first when the difference is sure: fewer users served within the gates cannot be
   bought back by a nicer median.
3. Else the objective (p95 ITL unless another was chosen): a ratio whose whole interval lies beyond the smallest effect
   worth acting on wins or loses, if every interleaved pair points the same way. An interval that lies wholly within
   the smallest effect is a draw, and a draw is "do not split", for the single pool is simpler.
4. Anything else is not proven.

Pure: no files, no time; chance is a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np

from kvbaton.bench import stats
from kvbaton.bench.samples import RequestSample, Run
from kvbaton.bench.stats import Floats, Gates, Interval

Decision = Literal["split", "do not split", "not proven"]
Reading = Literal["better", "worse", "no difference", "unclear"]
NUM_RESAMPLES = 400
PRICE_RATIO = 1.2  # a headline figure that moves this much the other way is named in the sentence
SMALLEST_EFFECT = 0.05  # a change of latency users or bills would not show is not a reason to run two pools


class Comparison(msgspec.Struct, frozen=True):
    """One metric, arm A (colocated) against arm B (disaggregated). ``ratio`` is B / A."""

    name: str
    unit: str
    lower_is_better: bool
    a: float | None
    b: float | None
    a_interval: Interval | None = None
    b_interval: Interval | None = None
    ratio: float | None = None
    ratio_interval: Interval | None = None
    pair_ratios: tuple[float, ...] = ()  # one for each interleaved pair of runs
    reading: Reading = "unclear"


class Verdict(msgspec.Struct, frozen=True):
    decision: Decision
    sentence: str
    reasons: tuple[str, ...] = ()


# The latencies a comparison is made of: name, values of one request, weights of one request.
Values = Callable[[RequestSample], tuple[list[float], list[float]]]


def _one(of: Callable[[RequestSample], float | None]) -> Values:
    def values(sample: RequestSample) -> tuple[list[float], list[float]]:
        value = of(sample)
        return ([], []) if value is None else ([value], [1.0])

    return values


METRICS: dict[str, Values] = {
    "ttft": _one(stats.ttft_s),
    "tpot": _one(stats.tpot_s),
    "itl": stats.itl_s,
    "e2e": _one(stats.e2e_s),
}


class _Weighted:
    """Values of a cohort, sorted, with the request each came from, ready for resampling."""

    def __init__(self, samples: Sequence[RequestSample], values: Values) -> None:
        rows = [values(sample) for sample in samples if sample.ok]
        flat = np.concatenate([np.asarray(row[0], dtype=np.float64) for row in rows] or [np.empty(0)])
        weight = np.concatenate([np.asarray(row[1], dtype=np.float64) for row in rows] or [np.empty(0)])
        owner = np.repeat(np.arange(len(rows)), [len(row[0]) for row in rows])
        order = np.argsort(flat, kind="stable")
        self.values: Floats = flat[order]
        self.weight: Floats = weight[order]
        self.owner = owner[order]
        self.num = len(rows)

    def quantile(self, fraction: float, times: Floats | None = None) -> float | None:
        weight = self.weight if times is None else self.weight * times[self.owner]
        kept = weight > 0
        if not kept.any():
            return None
        return stats.quantile(self.values[kept], np.cumsum(weight[kept]), fraction)

    def resample(self, chance: np.random.Generator, fraction: float) -> float | None:
        times = chance.multinomial(self.num, np.full(self.num, 1.0 / self.num)).astype(np.float64)
        return self.quantile(fraction, times)


def title(name: str, percent: int) -> str:
    return f"p{percent} {'end to end' if name == 'e2e' else name.upper()}"


def compare_latency(
    name: str,
    percent: int,
    pairs: Sequence[tuple[Sequence[RequestSample], Sequence[RequestSample]]],
    seed: int = 0,
    smallest_effect: float = SMALLEST_EFFECT,
) -> Comparison:
    """A percentile of a latency in both arms over all interleaved ``pairs`` of (A, B) cohorts."""
    values = METRICS[name]
    fraction = percent / 100
    sides = [_Weighted([sample for pair in pairs for sample in pair[side]], values) for side in (0, 1)]
    points = [side.quantile(fraction) if side.num else None for side in sides]
    a, b = points
    if a is None or b is None or a <= 0:
        return Comparison(title(name, percent), "ms", True, a, b)
    chance = np.random.default_rng(seed)
    drawn = [[side.resample(chance, fraction) for _ in range(NUM_RESAMPLES)] for side in sides]
    both = [(x, y) for x, y in zip(*drawn, strict=True) if x and y is not None]
    intervals = [_middle([row[side] for row in both]) for side in (0, 1)]
    ratio_interval = _middle([y / x for x, y in both])
    pair_ratios = []
    for pair in pairs:
        one, two = (_Weighted(part, values).quantile(fraction) for part in pair)
        if one and two is not None:
            pair_ratios.append(two / one)
    found = Comparison(
        title(name, percent),
        "ms",
        True,
        a * 1e3,
        b * 1e3,
        _times(intervals[0]),
        _times(intervals[1]),
        b / a,
        ratio_interval,
        tuple(pair_ratios),
    )
    return msgspec.structs.replace(found, reading=read(found, smallest_effect))


def drift_doubts(
    name: str, percent: int, recorded: Sequence[tuple[str, Run]], max_factor: float
) -> list[str]:  # fmt: skip
    """The control: runs of one arm against each other. Where an arm differs from itself by more than the factor, the
    machine or the load changed between the runs, and a difference between the arms would prove nothing."""
    doubts = []
    for style, arm in (("a", "the single pool"), ("b", "the split")):
        found = [
            _Weighted(run.measured(), METRICS[name]).quantile(percent / 100) for of, run in recorded if of == style
        ]
        values = [value for value in found if value]
        factor = max(values) / min(values) if len(values) > 1 else 1.0
        if factor > max_factor:
            figures = ", ".join(f"{_figure(value * 1e3)} ms" for value in values)
            doubts.append(f"{arm} differs from itself by {factor:.2f} in {title(name, percent)} "
                          f"({figures} in its runs; the limit is {max_factor:g})")  # fmt: skip
    return doubts


def compare_rate(
    name: str,
    unit: str,
    pairs: Sequence[tuple[float, float]],
    lower_is_better: bool,
    smallest_effect: float = SMALLEST_EFFECT,
) -> Comparison:
    """A figure that exists once a run (tokens per second, cost): mean over the runs, interval from their spread."""
    a, b = (float(np.mean([pair[side] for pair in pairs])) for side in (0, 1))
    a_interval, b_interval = (_spread([pair[side] for pair in pairs]) for side in (0, 1))
    ratios = tuple(pair[1] / pair[0] for pair in pairs if pair[0] > 0)
    found = Comparison(name, unit, lower_is_better, a, b, a_interval, b_interval)
    if not ratios:
        return found
    found = msgspec.structs.replace(
        found, ratio=float(np.mean(ratios)), ratio_interval=_spread(ratios), pair_ratios=ratios
    )
    return msgspec.structs.replace(found, reading=read(found, smallest_effect))


def read(found: Comparison, smallest_effect: float) -> Reading:
    """What a ratio says about arm B, given its interval and whether the pairs agree."""
    interval = found.ratio_interval
    if interval is None:
        return "unclear"
    small = interval.low >= 1 - smallest_effect and interval.high <= 1 + smallest_effect
    if small and all(abs(ratio - 1) <= 2 * smallest_effect for ratio in found.pair_ratios):
        return "no difference"
    agree_down = all(ratio < 1 for ratio in found.pair_ratios)
    agree_up = all(ratio > 1 for ratio in found.pair_ratios)
    if interval.high < 1 - smallest_effect and agree_down:
        return "better" if found.lower_is_better else "worse"
    if interval.low > 1 + smallest_effect and agree_up:
        return "worse" if found.lower_is_better else "better"
    return "unclear"


class AttainmentDifference(msgspec.Struct, frozen=True):
    """B minus A, as shares of all requests."""

    a: float
    b: float
    difference: float
    interval: Interval
    pair_differences: tuple[float, ...]
    reading: Reading


def compare_attainment(
    pairs: Sequence[tuple[Sequence[RequestSample], Sequence[RequestSample]]], gates: Gates
) -> AttainmentDifference:
    """Newcombe's interval of the difference, on the number of independent requests each arm amounts to."""
    found = [stats.attainment([sample for pair in pairs for sample in pair[side]], gates) for side in (0, 1)]
    a, b = found
    low = (b.share - a.share) - ((b.share - b.interval.low) ** 2 + (a.interval.high - a.share) ** 2) ** 0.5
    high = (b.share - a.share) + ((b.interval.high - b.share) ** 2 + (a.share - a.interval.low) ** 2) ** 0.5
    each = tuple(stats.attainment(two, gates).share - stats.attainment(one, gates).share for one, two in pairs)
    reading: Reading = "unclear"
    if low > 0 and all(difference > 0 for difference in each):
        reading = "better"
    elif high < 0 and all(difference < 0 for difference in each):
        reading = "worse"
    elif low > -0.02 and high < 0.02:
        reading = "no difference"
    return AttainmentDifference(a.share, b.share, b.share - a.share, Interval(low, high), each, reading)


def decide(
    objective: Comparison,
    attained: AttainmentDifference | None,
    doubts: Sequence[str],
    where: str,
    others: Sequence[Comparison] = (),
) -> Verdict:
    """The one sentence. ``where`` names the workload; ``doubts`` are reasons that the runs prove nothing.

    ``others`` change no decision; those that point the other way are named as its price.
    """
    reasons = [_objective_text(objective)]
    if attained is not None:
        reasons.append(
            f"share of requests in both gates: {attained.a:.1%} colocated, {attained.b:.1%} split "
            f"(difference {attained.interval.low * 100:+.1f} .. {attained.interval.high * 100:+.1f} points): "
            f"{attained.reading}"
        )
    if doubts:
        return Verdict("not proven", f"Not proven: {doubts[0]}.", (*doubts, *reasons))
    decision, cause = _by_rule(objective, attained)
    price = _price(decision, objective, others)
    head = {"split": "Split", "do not split": "Do not split", "not proven": "Not proven"}[decision]
    return Verdict(decision, f"{head}: {where}, {cause}{price}.", tuple(reasons))


def _by_rule(objective: Comparison, attained: AttainmentDifference | None) -> tuple[Decision, str]:
    by_gates = attained.reading if attained is not None else "no difference"
    if attained is not None and by_gates in ("better", "worse"):
        cause = (
            f"{attained.b:.0%} of requests met both gates with the split and {attained.a:.0%} on one pool; "
            f"{objective.name} was {_change(objective)}"
        )
        return ("split" if by_gates == "better" else "do not split"), cause
    by_objective: dict[Reading, Decision] = {
        "better": "split",
        "worse": "do not split",
        "no difference": "do not split",
        "unclear": "not proven",
    }
    cause = f"{objective.name} was {_change(objective)}"
    if by_gates == "unclear":
        cause += ", and the gates do not tell the two apart"
    return by_objective[objective.reading], cause


def _price(decision: Decision, objective: Comparison, others: Sequence[Comparison]) -> str:
    """What the advised side does worse, surely or by its size alone."""
    if decision == "not proven":
        return ""
    sign = 1 if decision == "split" else -1
    found = []
    for one in others:
        if one.name == objective.name or one.ratio is None or not one.lower_is_better or one.a is None or one.b is None:
            continue
        if (one.ratio if sign > 0 else 1 / one.ratio) > PRICE_RATIO:
            found.append(f"{one.name} {_figure(one.a)} and {_figure(one.b)} {one.unit}".rstrip())
    return f"; the price: {', '.join(found)}" if found else ""


def _change(found: Comparison) -> str:
    interval = found.ratio_interval
    if found.ratio is None or interval is None or found.a is None or found.b is None:
        return "not measured"
    size = f"{_figure(found.a)} {found.unit} on one pool and {_figure(found.b)} {found.unit} split"
    span = f"ratio {found.ratio:.2f}, 95% interval {interval.low:.2f} .. {interval.high:.2f}"
    match found.reading:
        case "no difference":
            return f"the same for any purpose ({size}; {span}), and one pool is simpler"
        case "unclear":
            return f"not told apart ({size}; {span})"
        case _:
            return f"{size} ({span})"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _objective_text(found: Comparison) -> str:
    ratios = ", ".join(f"{ratio:.2f}" for ratio in found.pair_ratios)
    return f"{found.name}: {_change(found)}; ratio in each interleaved pair: {ratios or 'none'}"


def _middle(values: Sequence[float | None]) -> Interval:
    low, high = np.percentile(np.asarray(values, dtype=np.float64), [2.5, 97.5])
    return Interval(float(low), float(high))


def _times(interval: Interval) -> Interval:
    return Interval(interval.low * 1e3, interval.high * 1e3)


# Two-sided 95% quantiles of Student's t for 2, 3, ... degrees of freedom. Two runs have a range, not an interval.
MIN_RUNS = 3
_T95 = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def _spread(values: Sequence[float]) -> Interval | None:
    if len(values) < MIN_RUNS:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / len(values) ** 0.5
    factor = _T95[min(len(values) - MIN_RUNS, len(_T95) - 1)]
    return Interval(mean - factor * error, mean + factor * error)
