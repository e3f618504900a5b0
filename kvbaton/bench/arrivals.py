"""When requests are due: arrival processes over warm-up, ramp, steady window and cool-down.

Invariants: the same seed gives the same instants; an instant depends on nothing the server does (open loop); a request
belongs to the phase its *intended* instant falls in.

Knows nothing about prompts, sockets or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from kvbaton.types import LocalError

ArrivalKind = Literal["poisson", "gamma", "constant", "closed", "trace"]
Phase = Literal["warmup", "ramp", "steady", "cooldown"]


@dataclass(frozen=True)
class Phases:
    """Lengths of the timed phases. Warm-up comes before them, is counted in requests, and ends before time zero."""

    ramp_s: float = 0.0
    steady_s: float = 30.0
    cooldown_s: float = 0.0

    def __post_init__(self) -> None:
        if self.steady_s <= 0 or self.ramp_s < 0 or self.cooldown_s < 0:
            raise LocalError(
                "the steady window must be longer than 0 s, ramp and cool-down not negative", field="phases"
            )

    @property
    def total_s(self) -> float:
        return self.ramp_s + self.steady_s + self.cooldown_s

    @property
    def steady_end_s(self) -> float:
        return self.ramp_s + self.steady_s

    def phase_at(self, time_s: float) -> Phase:
        if time_s < self.ramp_s:
            return "ramp"
        return "steady" if time_s < self.steady_end_s else "cooldown"


def arrival_times(kind: ArrivalKind, rate_per_s: float, phases: Phases, random: Random, cv: float = 1.0) -> list[float]:
    """Due instants in [0, total_s). During the ramp the rate rises linearly from 0 to ``rate_per_s``."""
    if rate_per_s <= 0 or not math.isfinite(rate_per_s):
        raise LocalError(f"the rate must be above 0, got {rate_per_s}", field="rate", fix="give requests per second")
    if kind == "gamma" and cv <= 0:
        raise LocalError(f"the coefficient of variation must be above 0, got {cv}", field="cv")
    # Unit-rate arrivals, moved through the inverse of the cumulated rate: the ramp keeps the process's own shape.
    expected_total = rate_per_s * (phases.total_s - phases.ramp_s / 2)
    times: list[float] = []
    unit = 0.0 if kind == "constant" else _gap(kind, random, cv)
    while unit < expected_total:
        times.append(_when(unit, rate_per_s, phases.ramp_s))
        unit += _gap(kind, random, cv)
    return times


def _gap(kind: ArrivalKind, random: Random, cv: float) -> float:
    match kind:
        case "poisson":
            return random.expovariate(1.0)
        case "gamma":
            shape = 1.0 / (cv * cv)
            return random.gammavariate(shape, 1.0 / shape)
        case "constant":
            return 1.0
        case _:
            raise LocalError(f"{kind!r} arrivals have no rate", field="arrivals")


def _when(unit: float, rate_per_s: float, ramp_s: float) -> float:
    in_ramp = rate_per_s * ramp_s / 2
    if unit < in_ramp:
        return math.sqrt(2 * ramp_s * unit / rate_per_s)
    return ramp_s + (unit - in_ramp) / rate_per_s


def replay_times(times_s: Sequence[float], speed: float, tick_s: float, random: Random) -> list[float]:
    """A trace's instants from zero, ``speed`` times as fast.

    Some traces are stored on coarse ticks (Mooncake's conversation trace: 3 s). ``tick_s`` spreads every instant
    evenly over its tick, or the replay would be bursts the users never made.
    """
    if speed <= 0:
        raise LocalError(f"speed must be above 0, got {speed}", field="speed")
    spread = sorted(time + (random.random() * tick_s if tick_s > 0 else 0.0) for time in times_s)
    first = spread[0] if spread else 0.0
    return [(time - first) / speed for time in spread]
