"""The prompt:output ratio of live traffic, and where it lies in the band that a plan was made for.

The ratio is computed prompt tokens (those no prefix cache had) for each output token, over a window of totals that only
grow, as in the alert rules. Invariants: too few output tokens say nothing; totals that went back (the router restarted)
begin a new window; the window's size is bounded however often it is looked at. Time is an argument. Knows nothing about
who counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from kvbaton.types import LocalError

if TYPE_CHECKING:
    from kvbaton.observe.metrics import Metrics

LEAST_OUTPUT_TOKENS = 200.0  # of a window: below that the ratio is chance
WINDOW_S = 300.0
_LOOK_S = 1.0  # two scrapers may ask at once: looks nearer than this are one
Place = Literal["inside", "above", "below", "unknown"]


class Band(msgspec.Struct, frozen=True):
    low: float
    high: float

    def place(self, ratio: float | None) -> Place:
        if ratio is None:
            return "unknown"
        return "above" if ratio > self.high else "below" if ratio < self.low else "inside"

    def drift(self, ratio: float) -> float:
        """The ratio over the end of the band that it left: above 1, below 1, and 1 inside."""
        if ratio > self.high:
            return ratio / self.high
        return ratio / self.low if ratio < self.low else 1.0


def read_band(text: str) -> Band | None:
    """``LOW,HIGH``; empty: there is no plan."""
    if not text.strip():
        return None
    fix = "give two numbers such as 2,8: computed prompt tokens for each output token"
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise LocalError(f"plan_band {text!r} is not LOW,HIGH", field="plan_band", fix=fix) from None
    if not 0 <= low < high < float("inf"):
        raise LocalError(f"plan_band {text!r} is no band", field="plan_band", fix=fix)
    return Band(low, high)


class Totals(msgspec.Struct, frozen=True):
    """What the router has counted so far."""

    at_s: float
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float


def window(seen: tuple[Totals, ...], now: Totals, window_s: float) -> tuple[Totals, ...]:
    """The looks that the ratio of ``now`` is over, oldest first, ``now`` last: one from just before the window on."""
    if seen and (now.output_tokens < seen[-1].output_tokens or now.prompt_tokens < seen[-1].prompt_tokens):
        seen = ()
    while len(seen) > 1 and seen[1].at_s <= now.at_s - window_s:
        seen = seen[1:]
    return (*seen, now)


def ratio_of(seen: tuple[Totals, ...]) -> float | None:
    """Over the whole of a window; None: too little was generated to say."""
    before, now = seen[0], seen[-1]
    output = now.output_tokens - before.output_tokens
    if output < LEAST_OUTPUT_TOKENS:
        return None
    prompt = now.prompt_tokens - before.prompt_tokens - (now.cached_tokens - before.cached_tokens)
    return max(0.0, prompt) / output


class RatioGauges:
    """The gauges of a router, brought up to date when it is scraped: nothing is done for a request."""

    def __init__(self, band: Band | None) -> None:
        self._band = band
        self.seen: tuple[Totals, ...] = ()

    def export(self, metrics: Metrics, now_s: float) -> None:
        total = [
            sum(metrics.values(f"kvbaton_router_{what}_tokens_total").values())
            for what in ("prompt", "cached", "output")
        ]
        if not self.seen or now_s - self.seen[-1].at_s >= _LOOK_S:
            self.seen = window(self.seen, Totals(now_s, *total), WINDOW_S)
        ratio = ratio_of(self.seen)
        if self._band is not None:
            metrics.set("kvbaton_router_plan_ratio", "low", value=self._band.low)
            metrics.set("kvbaton_router_plan_ratio", "high", value=self._band.high)
        for name, value in (
            ("kvbaton_router_prompt_output_ratio", ratio),
            ("kvbaton_router_plan_drift", None if self._band is None or ratio is None else self._band.drift(ratio)),
        ):
            if value is None:  # no figure is better than a wrong one
                metrics.forget(name)
            else:
                metrics.set(name, value=value)
