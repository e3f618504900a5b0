"""The highest rate at which the chosen fraction of requests meets both gates, found without fooling oneself.

A trial at a rate gives passes and a total. Its attainment has an interval; only when the whole interval is above the
target did the rate pass, only when it is below did it fail, and in between the rate is tried again until it is clear
or the patience for it is spent. The answer is a bracket: the highest rate that surely passed and the lowest that
surely failed, with whatever lies unclear between them.

Pure: the caller runs the trials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvbaton.bench.stats import Interval, wilson
from kvbaton.types import LocalError

Verdict = Literal["pass", "fail", "unclear"]


def fewest_requests(target: float) -> int:
    """With fewer, not even a trial in which all of them pass could show that more than ``target`` do."""
    return next(count for count in range(1, 1 << 20) if wilson(count, count).low > target)


@dataclass
class RateTrials:
    """All trials at one rate, pooled. ``worth`` is the number of independent requests they amount to."""

    rate_per_s: float
    met: float = 0.0
    worth: float = 0.0
    num_trials: int = 0

    def interval(self) -> Interval:
        return wilson(round(self.met), self.worth)


class Goodput(msgspec.Struct, frozen=True):
    """What the search found. ``rate_per_s`` is the highest rate that surely passed; 0 when none did."""

    rate_per_s: float
    failed_at_per_s: float | None  # lowest rate that surely failed; None: the ceiling was never reached
    unclear: tuple[float, ...]  # rates that stayed undecided
    target: float
    trials: tuple[tuple[float, float, float, float, int], ...]  # (rate, share, low, high, trials), by rate
    note: str


@dataclass
class GoodputSearch:
    """Call ``next_rate`` and ``record`` in turn until ``next_rate`` is None."""

    target: float
    start_per_s: float
    resolution: float = 0.1  # stop when the bracket is this narrow, relative
    max_trials: int = 16
    patience: int = 3  # trials at one rate before it stays unclear
    max_rate_per_s: float = 1e6
    _rates: dict[float, RateTrials] = field(default_factory=dict)
    _num: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.target < 1 or self.start_per_s <= 0:
            raise LocalError("the target is a share between 0 and 1 and the starting rate above 0", field="goodput")

    def next_rate(self) -> float | None:
        if self._num >= self.max_trials:
            return None
        for trials in self._rates.values():
            if self._verdict(trials) == "unclear" and trials.num_trials < self.patience:
                return trials.rate_per_s
        low, high = self._bracket()
        if low is None and high is None and not self._rates:
            return self.start_per_s
        candidate = self._between(low, high)
        return None if candidate is None else round(candidate, 4)

    def record(self, rate_per_s: float, share: float, worth: float) -> Verdict:
        """Adds a trial: the share of requests that met the gates and how many independent requests it rests on."""
        self._num += 1
        trials = self._rates.setdefault(rate_per_s, RateTrials(rate_per_s))
        trials.met += share * worth
        trials.worth += worth
        trials.num_trials += 1
        return self._verdict(trials)

    def result(self) -> Goodput:
        low, high = self._bracket()
        rows = sorted(self._rates.values(), key=lambda trials: trials.rate_per_s)
        unclear = tuple(trials.rate_per_s for trials in rows if self._verdict(trials) == "unclear")
        return Goodput(
            rate_per_s=low or 0.0,
            failed_at_per_s=high,
            unclear=unclear,
            target=self.target,
            trials=tuple(self._row(trials) for trials in rows),
            note=self._note(low, high, unclear),
        )

    def _row(self, trials: RateTrials) -> tuple[float, float, float, float, int]:
        found = trials.interval()
        return trials.rate_per_s, trials.met / max(trials.worth, 1e-9), found.low, found.high, trials.num_trials

    def _note(self, low: float | None, high: float | None, unclear: tuple[float, ...]) -> str:
        parts = []
        if low is None:
            parts.append("no tried rate surely met the target")
        if high is None:
            parts.append("no tried rate surely failed: the true value may be higher")
        if unclear:
            parts.append(
                f"{', '.join(f'{rate:g}' for rate in unclear)}/s stayed undecided after {self.patience} trials"
            )
        passed = [trials.rate_per_s for trials in self._rates.values() if self._verdict(trials) == "pass"]
        if high is not None and any(rate > high for rate in passed):
            parts.append("a rate above a failed one passed: the server's state, not the rate, decided some trials")
        if self._num >= self.max_trials:
            parts.append(f"stopped after {self.max_trials} trials")
        return "; ".join(parts)

    def _verdict(self, trials: RateTrials) -> Verdict:
        found = trials.interval()
        if found.low >= self.target:
            return "pass"
        if found.high < self.target:
            return "fail"
        return "unclear"

    def _bracket(self) -> tuple[float | None, float | None]:
        """Highest pass below every failure, and lowest failure."""
        fails = [rate for rate, trials in self._rates.items() if self._verdict(trials) == "fail"]
        high = min(fails, default=None)
        passes = [
            rate
            for rate, trials in self._rates.items()
            if self._verdict(trials) == "pass" and (high is None or rate < high)
        ]
        return max(passes, default=None), high

    def _between(self, low: float | None, high: float | None) -> float | None:
        """Doubling or halving until both ends are known, then the geometric middle of the widest untried gap."""
        tried = sorted(self._rates)
        if high is None:
            above = tried[-1] * 2
            return above if above <= self.max_rate_per_s else None
        if low is None:
            below = tried[0] / 2
            return below if below > self.start_per_s / 1024 else None
        edges = [rate for rate in tried if low <= rate <= high]
        gaps = [(right / left, left, right) for left, right in zip(edges, edges[1:], strict=False)]
        widest, left, right = max(gaps)
        return math.sqrt(left * right) if widest > 1 + self.resolution else None
