"""Time as an argument. The pure core never reads a clock; shells take one of these."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds; only differences mean anything."""
        ...


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to; for the simulator and the tests."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0.0, "time does not run backwards"
        self._now_s += seconds
