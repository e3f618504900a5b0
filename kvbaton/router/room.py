"""Requests that found no room on any worker, in the order they will be tried again.

Bounded. Lower priority number first, then the one that came first; new requests queue behind those that wait. The first
in line is woken whenever a worker gave something back, whenever one that was woken got in (there may be room for more),
and after ``LONGEST_NAP_S`` in any case, since room may come from requests that are not ours.
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
        self._waiting: list[tuple[int, float, int, asyncio.Future[None]]] = []
        self._number = count()

    @property
    def num_waiting(self) -> int:
        return sum(not waiter.done() for *_, waiter in self._waiting)

    @property
    def full(self) -> bool:
        return self.num_waiting >= self._max_waiting

    async def wait(self, priority: int, received_s: float, timeout_s: float) -> bool:
        """Until it is this request's turn to try. False when ``timeout_s`` passed before."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, received_s, next(self._number), waiter))
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        try:
            while not waiter.done():
                left_s = deadline_s - loop.time()
                if left_s <= 0:
                    return False
                await asyncio.wait((waiter,), timeout=min(left_s, LONGEST_NAP_S))
                if not waiter.done() and self._first() is waiter:
                    return True
            return True
        finally:
            waiter.cancel()

    def freed(self) -> None:
        """There may be room: the first in line tries."""
        first = self._first()
        if first is not None:
            first.set_result(None)

    def _first(self) -> asyncio.Future[None] | None:
        while self._waiting:
            waiter = self._waiting[0][-1]
            if not waiter.done():
                return waiter
            heapq.heappop(self._waiting)
        return None
