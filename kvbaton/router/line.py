"""The line of requests that found no room: a bound for each class of priority, and what those are told who cannot wait.

Classes: high (``priority`` below 0), normal (0), low (above). Each has its own bound, so that a flood of one does not
lock out the others. Invariants: a request beyond its bound is refused at once with 429 and Retry-After, and so is one
that would wait in vain, because at the pace of late its turn comes after its patience has ended; nobody waits longer
than ``queue_timeout_s`` for each time it has to; a stream that is being continued is never refused for length, nor is
one that waited, had its turn and found no room: there are no more of those than open requests. Knows nothing about
workers.
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
CLASSES: tuple[PriorityClass, ...] = ("high", "normal", "low")  # in the order in which they are served
LONGEST_RETRY_AFTER_S = 30
_HOPE = 0.6  # of a patience, that waiting may be foretold to take: nearly all that wait shall get their turn
_SMOOTHING = 0.1  # of the mean wait that Retry-After is taken from, and of the pace of the line


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
        # When each one that waits was received, in the order in which they began to wait.
        self._waiting: dict[PriorityClass, dict[object, float]] = {"high": {}, "normal": {}, "low": {}}
        self._timeout_s = settings.queue_timeout_s
        self._metrics = metrics
        self._clock = clock
        self._mean_wait_s = 0.0
        self._place_s = 0.0  # what one place in the line cost of late
        self._num_turns = 0  # that let somebody in, as far as is known
        self._room = Room(sum(self._limits.values()))

    @property
    def num_waiting(self) -> int:
        return self._room.num_waiting

    def freed(self) -> None:
        """There may be room: the first in line tries."""
        self._room.freed()

    def check(self, priority: int, received_s: float, patience_s: float) -> None:
        """Refuse what would find no place, or no turn in time."""
        name = class_of(priority)
        full = len(self._waiting[name]) >= self._limits[name]
        if full or self._num_ahead(name, received_s) * self._place_s > _HOPE * patience_s:
            self._metrics.add("kvbaton_router_queue_refusals_total", name)
            raise self.full(name)

    async def wait(
        self, priority: int, received_s: float, patience_s: float, error: ApiError, may_be_refused: bool = True
    ) -> float:
        """Until it is this request's turn to try; the seconds that took. ``error`` is raised when time is up."""
        if may_be_refused:
            self.check(priority, received_s, patience_s)
        name, place = class_of(priority), object()
        started_s, turns_before = self._clock.now_s(), self._num_turns
        self._waiting[name][place] = received_s
        got_turn = False
        try:
            got_turn = await self._room.wait(priority, received_s, patience_s)
        finally:
            del self._waiting[name][place]
            waited_s = self._clock.now_s() - started_s
            self._num_turns += got_turn
            # Not by the places in front: under overload many of those leave because their time is up.
            turn_s = waited_s / max(1, self._num_turns - turns_before)
            self._place_s += _SMOOTHING * (turn_s - self._place_s)
            self._mean_wait_s += _SMOOTHING * (waited_s - self._mean_wait_s)
            self._metrics.observe("kvbaton_router_queue_seconds", value=waited_s)
        if not got_turn:
            raise error
        return waited_s

    def in_vain(self) -> None:
        """One that had its turn found no room after all, and will wait again."""
        self._num_turns -= 1

    def _num_ahead(self, name: PriorityClass, received_s: float) -> int:
        """Those that will be served before one that begins to wait. One that was woken too early is in front again."""
        ahead = sum(len(self._waiting[better]) for better in CLASSES[: CLASSES.index(name)])
        own = self._waiting[name]
        return ahead if received_s <= next(iter(own.values()), received_s) else ahead + len(own)

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
