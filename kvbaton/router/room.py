"""Requests that found no room on any worker, in the order they will be tried again.

Bounded. Lower priority number first, then the one that came first; new requests queue behind those that wait. The first
in line is woken whenever a worker gave something back, whenever one that was woken got in (there may be room for more),
and each ``LONGEST_NAP_S`` in any case, since room may come from requests that are not ours. Invariant: a turn is never
lost: one that was woken and is cancelled before it can try passes its turn on.
Knows nothing about workers or how much room anybody needs.
"""

from __future__ import annotations

import asyncio
import heapq
from itertools import count

LONGEST_NAP_S = 0.25


class Room:
    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: list[tuple[int, float, int, asyncio.Future[bool]]] = []  # those that left are dropped lazily
        self._number = count()
        self._nap: asyncio.TimerHandle | None = None
        self.num_waiting = 0

    @property
    def full(self) -> bool:
        return self.num_waiting >= self._max_waiting

    async def wait(self, priority: int, received_s: float, timeout_s: float) -> bool:
        """Until it is this request's turn to try. False when ``timeout_s`` passed before."""
        if timeout_s <= 0:
            return False
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        heapq.heappush(self._waiting, (priority, received_s, next(self._number), waiter))
        timer = loop.call_later(timeout_s, _tell, waiter, False)
        if self._nap is None:
            self._nap = loop.call_later(LONGEST_NAP_S, self._wake_up)
        self.num_waiting += 1
        try:
            return await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.result():
                self.freed()
            raise
        finally:
            self.num_waiting -= 1
            timer.cancel()
            waiter.cancel()
            if len(self._waiting) > 2 * self.num_waiting + 16:
                self._drop_those_who_left()

    def freed(self) -> None:
        """There may be room: the first in line tries."""
        while self._waiting:
            *_, waiter = heapq.heappop(self._waiting)
            if not waiter.done():
                waiter.set_result(True)
                return

    def _wake_up(self) -> None:
        self.freed()
        self._nap = asyncio.get_running_loop().call_later(LONGEST_NAP_S, self._wake_up) if self._waiting else None

    def _drop_those_who_left(self) -> None:
        """A high priority may stay in front for long while others leave from the middle."""
        self._waiting = [entry for entry in self._waiting if not entry[-1].done()]
        heapq.heapify(self._waiting)


def _tell(waiter: asyncio.Future[bool], turn: bool) -> None:
    if not waiter.done():
        waiter.set_result(turn)
