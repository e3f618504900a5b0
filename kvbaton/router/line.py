"""The line of requests that found no room: a bound for each class of priority, and what those are told who cannot wait.

Classes: high (``priority`` below 0), normal (0), low (above). Each has its own bound, so that a flood of one does not
lock out the others. Invariants: a request beyond its bound is refused at once with 429 and Retry-After; nobody waits
longer than ``queue_timeout_s`` for each time it has to; a stream that is being continued is never refused for length,
since there are no more of those than open requests. Knows nothing about workers.
"""

from __future__ import annotations

import math
from typing import Literal

from kvbaton.clock import Clock
from kvbaton.config import RouterSettings
from kvbaton.observe.metrics import Metrics
from kvbaton.router.room import Room
from kvbaton.workers.openai_errors import ApiError

PriorityClass = Literal["high", "normal", "low"]
LONGEST_RETRY_AFTER_S = 30
_SMOOTHING = 0.1  # of the mean wait that Retry-After is taken from


def class_of(priority: int) -> PriorityClass:
    if priority == 0:
        return "normal"
    return "high" if priority < 0 else "low"


class Line:
    def __init__(self, settings: RouterSettings, metrics: Metrics, clock: Clock) -> None:
        self._limits: dict[PriorityClass, int] = {
            "high": settings.max_queued_high,
            "normal": settings.max_queued,
            "low": settings.max_queued_low,
        }
        self._num_waiting: dict[PriorityClass, int] = {"high": 0, "normal": 0, "low": 0}
        self._timeout_s = settings.queue_timeout_s
        self._metrics = metrics
        self._clock = clock
        self._mean_wait_s = 0.0
        self._room = Room(sum(self._limits.values()))

    @property
    def num_waiting(self) -> int:
        return sum(self._num_waiting.values())

    def freed(self) -> None:
        """There may be room: the first in line tries."""
        self._room.freed()

    async def wait(
        self, priority: int, received_s: float, patience_s: float, error: ApiError, may_be_refused: bool = True
    ) -> float:
        """Until it is this request's turn to try; the seconds that took. ``error`` is raised when time is up."""
        name = class_of(priority)
        if may_be_refused and self._num_waiting[name] >= self._limits[name]:
            self._metrics.add("kvbaton_router_queue_refusals_total", name)
            raise self.full(name)
        started_s = self._clock.now_s()
        self._num_waiting[name] += 1
        got_turn = False
        try:
            got_turn = await self._room.wait(priority, received_s, patience_s)
        finally:
            self._num_waiting[name] -= 1
            waited_s = self._clock.now_s() - started_s
            self._mean_wait_s += _SMOOTHING * (waited_s - self._mean_wait_s)
            self._metrics.observe("kvbaton_router_queue_seconds", value=waited_s)
        if not got_turn:
            raise error
        return waited_s

    @property
    def retry_after_s(self) -> int:
        """As long as requests waited of late."""
        return min(LONGEST_RETRY_AFTER_S, max(1, math.ceil(self._mean_wait_s)))

    def full(self, name: PriorityClass) -> ApiError:
        return _too_many(f"the queue of requests of {name} priority is full", "queue_full", self.retry_after_s)

    def busy(self) -> ApiError:
        return _too_many("no worker has room now", "no_capacity", self.retry_after_s)


def _too_many(message: str, code: str, retry_after_s: int) -> ApiError:
    return ApiError(429, message, type="rate_limit_error", code=code, retry_after_s=retry_after_s)
