"""What one pool's decisions remember: where its load is heading, and the most workers it needed lately.

Invariants: a value, passed in and handed back; its size is bounded by the window over the time between decisions; the
window speaks only when all of it was seen. Knows nothing about what the load consists of.
"""

from __future__ import annotations

from math import exp

import msgspec


class Horizon(msgspec.Struct, frozen=True):
    """Time constants of the two running means whose distance is the trend."""

    fast_s: float
    slow_s: float


SEQUENCES = Horizon(20.0, 80.0)  # they stand there, and change as slowly as answers end
# Scatter from look to look, and every change that is only that costs a start; but what follows too slowly keeps workers
# for a load that is gone, which buys nobody anything.
ARRIVALS = Horizon(30.0, 60.0)


class PoolMemory(msgspec.Struct, frozen=True):
    at_s: float | None = None  # of the last look that told something
    fast: float = 0.0  # running means of the load
    slow: float = 0.0
    horizon: Horizon = SEQUENCES
    seen_since_s: float | None = None  # no gap in what was seen from then on
    needs: tuple[tuple[float, int], ...] = ()  # (when, workers needed), oldest first and each more than the next
    drained_s: float | None = None  # when a worker was last sent away

    def saw(self, now_s: float, load: float) -> PoolMemory:
        """Take the load of now into the running means."""
        if self.at_s is None:
            return msgspec.structs.replace(self, at_s=now_s, fast=load, slow=load, seen_since_s=now_s)
        passed_s = max(0.0, now_s - self.at_s)
        fast, slow = (
            mean + (load - mean) * (1.0 - exp(-passed_s / constant_s))
            for mean, constant_s in ((self.fast, self.horizon.fast_s), (self.slow, self.horizon.slow_s))
        )
        return msgspec.structs.replace(self, at_s=now_s, fast=fast, slow=slow)

    def ahead(self, lead_s: float, trust: float) -> float:
        """The load in ``lead_s`` if it goes on growing as it did; a falling one is not expected to fall further."""
        return self.fast + trust * lead_s * max(0.0, self.fast - self.slow) / (
            self.horizon.slow_s - self.horizon.fast_s
        )

    def need(self, now_s: float, workers: int, window_s: float) -> PoolMemory:
        """Remember a need; what is smaller and older can no longer be the window's most."""
        kept = [(at_s, each) for at_s, each in self.needs if each > workers and at_s >= now_s - window_s]
        return msgspec.structs.replace(self, needs=(*kept, (now_s, workers)))

    def gap(self, now_s: float, longest_s: float) -> PoolMemory:
        """Nothing was seen this time. After too long without, the window starts anew."""
        if self.at_s is not None and now_s - self.at_s > longest_s:
            return msgspec.structs.replace(self, at_s=None, seen_since_s=None)
        return self

    def most(self, now_s: float, window_s: float) -> int | None:
        """The most that was needed in the window; None while less than a window was seen."""
        if self.seen_since_s is None or now_s - self.seen_since_s < window_s or not self.needs:
            return None
        return max((each for at_s, each in self.needs if at_s >= now_s - window_s), default=None)
