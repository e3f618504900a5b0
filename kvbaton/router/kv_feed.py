"""One worker's events in order, whatever the network does: what to ask next, and what to make of an answer.

    asked for events ----batches from the next number on---> applied, ask for those behind them
                     ----gap, or something was guessed-----> ask for a snapshot ---> committed, ask for what follows it
                     ----another life, old or new----------> nothing: the registry says which life counts

Invariants: batches are applied once each and in order; answers may be lost, repeated, late or cut, and are at worst
ignored; nothing of another life is applied. Pure; knows nothing about sockets or clocks.
"""

from __future__ import annotations

from typing import Literal

from kvbaton.router.kv_index import Snapshot
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.workers.kv_events import KVEventsAnswer

Result = Literal["applied", "nothing", "gap", "ignored"]


class KVFeed:
    """Of one life of one worker."""

    def __init__(self, prefixes: PrefixIndex, worker: str, life: str) -> None:
        self._prefixes = prefixes
        self._index = prefixes.exact
        self._worker = worker
        self.life = life
        self.next = 0  # number of the batch to ask for
        self._broken = False

    @property
    def counts(self) -> bool:
        """Whether this is still the life that the worker lives, as far as is known."""
        return self._prefixes.life(self._worker) == self.life and self._index.knows(self._worker)

    @property
    def wants_snapshot(self) -> bool:
        return self._broken or self._index.needs_snapshot(self._worker)

    def on_events(self, answer: KVEventsAnswer, began: int) -> Result:
        """``began``: the index's round that the question belongs to."""
        if answer.incarnation != self.life or not self.counts:
            return "ignored"
        if answer.block_size != self._index.block_size(self._worker):
            return "ignored"
        if self.wants_snapshot:
            return "ignored"  # late: the snapshot will say it all
        if answer.gap:
            if answer.first != self.next:
                return "ignored"  # of an older question
            self._broken = True
            return "gap"
        num_known = self.next - answer.first
        if num_known < 0:
            return "ignored"  # what lies between is missing; it is asked for again
        batches = answer.batches[num_known:]
        for batch in batches:
            self._index.apply(self._worker, batch)
        self.next += len(batches)
        if self.next >= answer.end:
            self._index.end_round(self._worker, began)
        return "applied" if batches else "nothing"

    def on_snapshot(self, life: str, sequence: int) -> StagedSnapshot | None:
        """The head of a snapshot; None if it is of no use."""
        if life != self.life or not self.counts or not self.wants_snapshot:
            return None
        return StagedSnapshot(self, self._index.stage(self._worker), sequence)

    def _committed(self, sequence: int) -> None:
        self.next = sequence
        self._broken = False


class StagedSnapshot:
    def __init__(self, feed: KVFeed, snapshot: Snapshot, sequence: int) -> None:
        self._feed, self._snapshot, self._sequence = feed, snapshot, sequence
        self.add = snapshot.add
        self.discard = snapshot.discard

    def commit(self) -> None:
        """All of it has come."""
        self._snapshot.commit()
        self._feed._committed(self._sequence)
