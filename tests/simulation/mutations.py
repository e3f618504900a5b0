"""Known bugs, put into the product for the length of a run: a checker that does not find them checks nothing.

Each is a mistake that somebody could make (most were made by somebody), at one place. Nothing of this is reachable from
the product.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kvbaton.kv.blocks import BlockManager
from kvbaton.plan import control
from kvbaton.router.kv_feed import KVFeed
from kvbaton.router.kv_index import Expectation
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.router.registry import Hold, Registry
from kvbaton.router.replay import Journal
from kvbaton.transfer import pulling
from kvbaton.transfer.client import _Pull
from kvbaton.transfer.offering import PrefillSession
from kvbaton.transfer.pulling import DecodeSession, Pulling
from kvbaton.transfer.tickets import TicketBook
from kvbaton.transfer.wire import Ack
from kvbaton.workers import journal
from kvbaton.workers.http import Exchange

from .handoff import SimSource

Change = tuple[Any, str, Any]


def lease_ignored() -> list[Change]:
    """What a reader does not acknowledge is held for ever."""
    return [
        (BlockManager, "expire", lambda self, now_s: []),
        (PrefillSession, "next_tick_s", property(lambda self: float("inf"))),
    ]


def generation_ignored() -> list[Change]:
    """Blocks that were reused while they were read count as read."""
    return [(SimSource, "_reused", lambda self, copy: None)]


def copies_not_awaited() -> list[Change]:
    """A pull that is given up leaves its blocks to others while its copies still land."""

    async def stop(self: Any) -> None:
        self._feed(pulling.AbortAsked())

    return [(_Pull, "stop", stop)]


def acknowledged_too_early() -> list[Change]:
    """The reader says that it has everything when the first token comes."""
    first_arrived = DecodeSession._first_arrived

    def too_early(self: Any, event: Any) -> list[Any]:
        actions = first_arrived(self, event)
        early = self.state is Pulling.PULLING and self._in_flight
        return [*actions, pulling.Send(Ack(event.first.ticket))] if early else actions

    row = pulling.TABLE[Pulling.PULLING, pulling.FirstArrived]
    changed: Any = {**pulling.TABLE, (Pulling.PULLING, pulling.FirstArrived): type(row)(too_early, row.to, row.why)}
    return [(pulling, "TABLE", changed)]


def ticket_not_revoked() -> list[Change]:
    """Whoever had a ticket may go on reading."""
    return [(TicketBook, "revoke", lambda self, ticket: None)]


def answered_twice() -> list[Change]:
    """A stream that is continued begins again: the client has its first tokens twice."""

    def take(self: Any, events: bytes) -> bytes:
        return journal.split(events)[0]

    def read(self: Any, num_choices: int) -> Any:
        whole = journal.read(b"", num_choices)
        return tuple(type(each)(opened=True) for each in whole)

    return [(Journal, "take", take), (Journal, "read", read)]


def error_not_told() -> list[Change]:
    """A request that fails gets no answer."""

    async def fail(self: Any, error: Any, headers: Any = None) -> None: ...

    return [(Exchange, "fail", fail)]


def count_leaks() -> list[Change]:
    """An attempt that ends with an error stays counted on its worker."""
    release = Hold.release

    def forgetful(self: Any) -> None:
        if sys.exc_info()[0] is None:
            release(self)

    return [(Hold, "release", forgetful)]


def restart_not_noticed() -> list[Change]:
    """The index goes on with what a dead life of a worker held."""
    heard_of = PrefixIndex.heard_of

    def deaf(self: Any, worker: str, life: str, *rest: Any) -> None:
        heard_of(self, worker, self._lives.get(worker, life), *rest)

    return [(PrefixIndex, "heard_of", deaf), (PrefixIndex, "forget", lambda self, worker: None)]


def gap_ignored() -> list[Change]:
    """Events that the log has dropped already are skipped over."""
    on_events = KVFeed.on_events

    def skip(self: Any, answer: Any, began: int) -> Any:
        if answer.gap:
            self.next = answer.end
            return "nothing"
        return on_events(self, answer, began)

    return [(KVFeed, "on_events", skip)]


def expected_for_ever() -> list[Change]:
    """Blocks of requests that ended are still foretold."""
    return [(Expectation, "settle", lambda self: None)]


def ghost_stays() -> list[Change]:
    """A worker that left the cluster stays a member."""
    set_members = Registry.set_members

    def keep(self: Any, settings: Any) -> None:
        names = {each.name for each in settings}
        set_members(self, [*settings, *(m.settings for m in self._members.values() if m.name not in names)])

    return [(Registry, "set_members", keep)]


def minimum_ignored() -> list[Change]:
    """An idle pool shrinks to nothing."""
    target = control._target

    def no_bound(pool: Any, seen: Any, want: Any) -> int:
        return want.most - 1 if want.most is not None and want.most <= 1 and want.known else target(pool, seen, want)

    return [(control, "_target", no_bound)]


# In how many seeds, from 0 on, each is found at the latest.
MUTATIONS: dict[Callable[[], list[Change]], int] = {
    lease_ignored: 60,
    generation_ignored: 50,
    copies_not_awaited: 20,
    acknowledged_too_early: 10,
    ticket_not_revoked: 10,
    answered_twice: 20,
    error_not_told: 20,
    count_leaks: 10,
    restart_not_noticed: 20,
    gap_ignored: 10,
    expected_for_ever: 10,
    ghost_stays: 20,
    minimum_ignored: 20,
}


@contextlib.contextmanager
def applied(mutation: Callable[[], list[Change]]) -> Iterator[None]:
    changes = mutation()
    before = [(owner, name, owner.__dict__[name]) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
