"""Calls at exact instants on an asyncio loop.

Event loops round timers up to whole milliseconds, which is more than the error a measurement may have. A pacer wakes a
little early and then lets the loop turn, still serving its sockets, until the instant has come.

Knows nothing about what it calls.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

# Just over the millisecond that loops round to. The price is up to this much of spinning for each instant.
EARLY_S = 0.0012


class Pacer:
    """One timeline of due calls. Calls never come early; ties run in the order they were added."""

    def __init__(self, now_s: Callable[[], float], early_s: float = EARLY_S) -> None:
        self._now_s = now_s
        self._early_s = early_s
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None
        self._timer_due_s = float("inf")

    def at(self, due_s: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._due, (due_s, next(self._order), call, args))
        if due_s < self._timer_due_s:
            self._arm()

    def clear(self) -> None:
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_due_s = None, float("inf")

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_due_s = None, float("inf")
        if not self._due:
            return
        loop = asyncio.get_running_loop()
        self._timer_due_s = self._due[0][0]
        wait = self._timer_due_s - self._now_s() - self._early_s
        self._timer = loop.call_later(wait, self._turn) if wait > 0 else loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._timer_due_s = float("-inf")  # calls made here may add more; they must not arm a second timer
        now_s = self._now_s()
        while self._due and self._due[0][0] <= now_s:
            _, _, call, args = heapq.heappop(self._due)
            call(*args)
        self._timer = None
        self._arm()
