"""Numbered batches of one publisher in order, each once, whatever its socket drops: what to do with a batch that came.

    live batch, the next number ----> apply
    live batch, a later number  ----> something was dropped: ask for a replay from the next number on, keep this one
    replayed batch, the next one ---> apply; one behind a hole: the hole is for ever, forget what was learnt and go on
    live batch that was replayed ---> nothing
    live batch, a number that came live before ----> the publisher is another one: forget, start over

Numbers start at 0 with the publisher, and a replay gives what it still has, in order. Invariants: batches are applied
once and in order; after a hole that no replay fills, everything learnt before it is forgotten first. Pure; knows
nothing about sockets or what a batch says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Batch:
    number: int
    payload: bytes


@dataclass(frozen=True)
class Forget:
    """What was learnt is of no use any more."""

    why: Literal["gap", "restart"]


Step = Batch | Forget
MAX_KEPT = 4096  # live batches that wait for a replay; beyond it the oldest go, and make a hole


class BatchOrder:
    """``wants_replay`` is the number from which on a replay is to be asked for, or None."""

    def __init__(self) -> None:
        self._next = 0
        self._last_live = -1
        self._kept: dict[int, bytes] = {}
        self.wants_replay: int | None = 0  # what was published before we listened
        self.num_gaps = 0

    def restarted(self) -> list[Step]:
        """The publisher went away: whoever answers from now on may be another."""
        known = self._next > 0
        self._next, self._last_live, self.wants_replay = 0, -1, 0
        self._kept.clear()
        return [Forget("restart")] if known else []

    def live(self, number: int, payload: bytes) -> list[Step]:
        steps = self.restarted() if number <= self._last_live else []
        self._last_live = number
        if number < self._next:
            return steps
        self._kept[number] = payload
        while len(self._kept) > MAX_KEPT:
            del self._kept[min(self._kept)]
        steps += self._take()
        if self._kept and self.wants_replay is None:
            self.num_gaps += 1
            self.wants_replay = self._next
        return steps

    def replayed(self, number: int, payload: bytes) -> list[Step]:
        if number < self._next:
            return []
        self._kept[number] = payload
        return self._take_through(number)

    def replay_ended(self) -> list[Step]:
        """All that the publisher still has was given."""
        self.wants_replay = None
        return self._take_through(max(self._kept, default=-1))

    def look_again(self) -> None:
        """It has been silent for long: the last batches may have been dropped, which no later one tells."""
        if self.wants_replay is None:
            self.wants_replay = self._next

    def _take_through(self, number: int) -> list[Step]:
        """Up to ``number``, over holes: those are behind what a replay could still give."""
        steps = self._take()
        while self._next <= number:
            if self._next:
                steps.append(Forget("gap"))
            self._next = min(self._kept)
            steps += self._take()
        return steps

    def _take(self) -> list[Step]:
        steps: list[Step] = []
        while (payload := self._kept.pop(self._next, None)) is not None:
            steps.append(Batch(self._next, payload))
            self._next += 1
        return steps
