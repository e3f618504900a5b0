"""The prefill side of one hand-off, as a state machine: schedule, offer, report, and let go once.

Invariants: the engine hears exactly one of release, abort or nothing-because-it-failed-itself; blocks are let go only
on ``Ack``, on ``Abort``, when the peer is lost, or when the lease ended, and the ticket is revoked before they are;
nothing stays held for ever: the connection's death or the lease ends every session; a ticket is good once, for one
request.

Pure: tickets and time come in with events. Knows nothing about sockets, threads or the engine behind the actions.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

import msgspec

from kvbaton.transfer.machine import Row, Table, rows, walk
from kvbaton.transfer.wire import Failed, FailureKind, First, Offer, Progress, RenewReply, Start
from kvbaton.types import CapacityError, LocalError, TokenOutput


class Offering(Enum):
    NEW = "new"
    QUEUED = "queued"  # the engine has it, it is not scheduled yet
    OFFERED = "offered"  # ticket and lease are live
    RELEASED = "released"
    FAILED = "failed"
    ABORTED = "aborted"


# -- events


@dataclass(frozen=True)
class StartArrived:
    now_s: float


@dataclass(frozen=True)
class Scheduled:
    """The engine has scheduled the prompt and pinned its blocks."""

    ticket: bytes  # fresh and unguessable
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    cached_tokens: int
    now_s: float


@dataclass(frozen=True)
class Computed:
    tokens_ready: int
    layers_ready: int


@dataclass(frozen=True)
class Sampled:
    output: TokenOutput
    now_s: float


@dataclass(frozen=True)
class EngineFailed:
    """The engine gave the request up and has let its blocks go by itself."""

    error: Exception


@dataclass(frozen=True)
class AckArrived:
    ticket: bytes


@dataclass(frozen=True)
class AbortArrived:
    pass


@dataclass(frozen=True)
class RenewArrived:
    ticket: bytes


@dataclass(frozen=True)
class EngineRenewed:
    """The engine's answer to RenewLease, which was asked at ``asked_s``."""

    renewed: bool
    asked_s: float


@dataclass(frozen=True)
class ReaderLost:
    """The control connection is gone: so is the reader."""


@dataclass(frozen=True)
class Tick:
    now_s: float


# -- actions


@dataclass(frozen=True)
class Send:
    message: msgspec.Struct


@dataclass(frozen=True)
class StartPrefill:
    start: Start


@dataclass(frozen=True)
class Grant:
    """From now on the ticket is good for reading these blocks."""

    offer: Offer


@dataclass(frozen=True)
class Revoke:
    ticket: bytes


@dataclass(frozen=True)
class RenewLease:
    lease_s: float


@dataclass(frozen=True)
class ReleasePrefill:
    """The reader has everything: the engine may drop the blocks."""


@dataclass(frozen=True)
class AbortPrefill:
    """Nobody wants it: the engine stops computing and drops the blocks."""


@dataclass(frozen=True)
class Close:
    """The only terminal action: the session can be forgotten."""

    state: Offering


Action = Send | StartPrefill | Grant | Revoke | RenewLease | ReleasePrefill | AbortPrefill | Close


class PrefillSession:
    """One offer of one request, on one connection. ``lease_s`` is the engine's: it pins, this watches."""

    def __init__(self, start: Start, lease_s: float) -> None:
        assert lease_s > 0
        self.start = start
        self.state = Offering.NEW
        self.story: deque[str] = deque(maxlen=24)
        self._lease_s = lease_s
        self._offer: Offer | None = None
        self._lease_until_s = float("inf")
        self._num_renewing = 0  # asked of the engine, not answered: until then the lease is not judged
        self._started_s = 0.0
        self._offered_s = 0.0
        self._sampled = False

    @property
    def finished(self) -> bool:
        return self.state in TERMINAL

    @property
    def ticket(self) -> bytes | None:
        return None if self._offer is None else self._offer.ticket

    @property
    def next_tick_s(self) -> float:
        return self._lease_until_s if self.state is Offering.OFFERED and not self._num_renewing else float("inf")

    def step(self, event: object) -> list[Action]:
        return walk(self, TABLE, event)

    @property
    def _agreed(self) -> Offer:
        """In the states that have one."""
        assert self._offer is not None
        return self._offer

    # -- what the rows do

    def _absorb(self, _event: object) -> list[Action]:
        return []

    def _started(self, event: StartArrived) -> list[Action]:
        num_tokens = len(self.start.request.prompt_token_ids)
        if num_tokens == 0 or self.start.have_tokens > num_tokens:
            return self._fail("invalid", "the prompt is empty, or shorter than what is said to be there", "have_tokens")
        self.state = Offering.QUEUED
        self._started_s = event.now_s
        return [StartPrefill(self.start)]

    def _scheduled(self, event: Scheduled) -> list[Action]:
        self.state = Offering.OFFERED
        self._offered_s = event.now_s
        self._lease_until_s = event.now_s + self._lease_s
        self._offer = Offer(
            pull_id=self.start.pull_id,
            ticket=event.ticket,
            block_ids=event.block_ids,
            generations=event.generations,
            num_tokens=len(self.start.request.prompt_token_ids),
            cached_tokens=event.cached_tokens,
            lease_s=self._lease_s,
        )
        return [Grant(self._offer), Send(self._offer)]

    def _scheduled_again(self, _event: Scheduled) -> list[Action]:
        """Its blocks were taken from it, and a reader may have read some: there is no way to go on."""
        return self._fail("internal", "the prefill was preempted after it was offered", abort=True)

    def _computed(self, event: Computed) -> list[Action]:
        return [Send(Progress(self._agreed.ticket, event.tokens_ready, event.layers_ready))]

    def _first(self, event: Sampled) -> list[Action]:
        if self._sampled:
            return []
        self._sampled = True
        queue_s, prefill_s = self._offered_s - self._started_s, event.now_s - self._offered_s
        return [Send(First(self._agreed.ticket, event.output, queue_s, prefill_s))]

    def _engine_failed(self, event: EngineFailed) -> list[Action]:
        error = event.error
        if isinstance(error, CapacityError):
            # Once scheduled there is room; what can still run out is the lease.
            return self._fail("capacity" if self._offer is None else "lease", str(error), error.field)
        if isinstance(error, LocalError) and error.field is not None:
            return self._fail("invalid", str(error), error.field, retryable=False)
        return self._fail("internal", str(error) or type(error).__name__)

    def _acked(self, event: AckArrived) -> list[Action]:
        if event.ticket != self._agreed.ticket:
            return []
        if not self._sampled:  # it cannot have everything: take it as a reader that gave up
            return self._abandon()
        return self._over(Offering.RELEASED, ReleasePrefill())

    def _abort(self, _event: AbortArrived | ReaderLost) -> list[Action]:
        return self._abandon()

    def _cancel_unstarted(self, _event: AbortArrived | ReaderLost) -> list[Action]:
        self.state = Offering.ABORTED
        return [Close(self.state)]

    def _renew(self, event: RenewArrived) -> list[Action]:
        if event.ticket != self._agreed.ticket:
            return [Send(RenewReply(event.ticket, False))]
        self._num_renewing += 1
        return [RenewLease(self._lease_s)]

    def _refuse_renewal(self, event: RenewArrived) -> list[Action]:
        return [Send(RenewReply(event.ticket, False))]

    def _renewed(self, event: EngineRenewed) -> list[Action]:
        self._num_renewing -= 1
        if not event.renewed:
            return self._fail("lease", "the lease on the offered blocks ended", abort=True)
        self._lease_until_s = max(self._lease_until_s, event.asked_s + self._lease_s)
        return [Send(RenewReply(self._agreed.ticket, True))]

    def _tick(self, event: Tick) -> list[Action]:
        if event.now_s < self._lease_until_s or self._num_renewing:
            return []
        return self._fail("lease", "the lease on the offered blocks ended", abort=True)

    # -- helpers

    def _abandon(self) -> list[Action]:
        return self._over(Offering.ABORTED, AbortPrefill())

    def _over(self, state: Offering, *last: Action) -> list[Action]:
        """Revoke first: no read may begin once the engine may reuse the blocks."""
        self.state = state
        revoke = [] if self._offer is None else [Revoke(self._offer.ticket)]
        return [*revoke, *last, Close(state)]

    def _fail(
        self,
        kind: FailureKind,
        message: str,
        field: str | None = None,
        retryable: bool = True,
        abort: bool = False,
    ) -> list[Action]:
        """``abort``: the engine does not know yet."""
        failed = Send(Failed(self.start.pull_id, kind, message[:2000], field, retryable))
        return self._over(Offering.FAILED, *((AbortPrefill(),) if abort else ()), failed)


TERMINAL = (Offering.RELEASED, Offering.FAILED, Offering.ABORTED)
_S, _P = Offering, PrefillSession

TABLE: Table = {
    (_S.NEW, StartArrived): Row(_P._started, (_S.QUEUED, _S.FAILED), "to the engine, unless it makes no sense"),
    (_S.NEW, AbortArrived): Row(_P._cancel_unstarted, (_S.ABORTED,), "nothing was started"),
    (_S.NEW, ReaderLost): Row(_P._cancel_unstarted, (_S.ABORTED,), "nothing was started"),
    (_S.QUEUED, Scheduled): Row(_P._scheduled, (_S.OFFERED,), "grants the ticket, then sends the offer"),
    (_S.OFFERED, Scheduled): Row(_P._scheduled_again, (_S.FAILED,), "preempted: what was read is void"),
    (_S.OFFERED, Computed): Row(_P._computed, (_S.OFFERED,), "sends Progress"),
    (_S.OFFERED, Sampled): Row(_P._first, (_S.OFFERED,), "sends First; the blocks stay for the reader"),
    (_S.OFFERED, AckArrived): Row(
        _P._acked, (_S.OFFERED, _S.RELEASED, _S.ABORTED), "lets go; an Ack before First counts as Abort"
    ),
    (_S.QUEUED, AckArrived): Row(_P._absorb, (_S.QUEUED,), "there is no such ticket"),
    **rows((_S.QUEUED, _S.OFFERED), StartArrived, Row(_P._absorb, (), "repeated")),
    **rows((_S.QUEUED, _S.OFFERED), AbortArrived, Row(_P._abort, (_S.ABORTED,), "revokes, then aborts in the engine")),
    **rows((_S.QUEUED, _S.OFFERED), ReaderLost, Row(_P._abort, (_S.ABORTED,), "a dead connection aborts all on it")),
    **rows((_S.QUEUED, _S.OFFERED), EngineFailed, Row(_P._engine_failed, (_S.FAILED,), "passes the reason on")),
    **rows((_S.QUEUED,), RenewArrived, Row(_P._refuse_renewal, (), "there is no lease")),
    **rows((_S.OFFERED,), RenewArrived, Row(_P._renew, (_S.OFFERED,), "asks the engine, who owns the lease")),
    **rows(
        (_S.OFFERED,), EngineRenewed, Row(_P._renewed, (_S.OFFERED, _S.FAILED), "confirms; or the lease ended: says so")
    ),
    **rows((_S.NEW, _S.QUEUED), Tick, Row(_P._absorb, (), "no lease runs yet")),
    **rows((_S.OFFERED,), Tick, Row(_P._tick, (_S.OFFERED, _S.FAILED), "ends with the lease, unless a renewal is due")),
    **rows(TERMINAL, StartArrived, Row(_P._absorb, (), "replayed: a request is started once")),
    **rows(TERMINAL, Scheduled, Row(_P._absorb, (), "the abort was on its way to the engine")),
    **rows(TERMINAL, Computed, Row(_P._absorb, (), "the same")),
    **rows(TERMINAL, Sampled, Row(_P._absorb, (), "the same")),
    **rows(TERMINAL, EngineFailed, Row(_P._absorb, (), "the same")),
    **rows(TERMINAL, AckArrived, Row(_P._absorb, (), "repeated, or too late")),
    **rows(TERMINAL, AbortArrived, Row(_P._absorb, (), "repeated, or too late")),
    **rows(TERMINAL, RenewArrived, Row(_P._refuse_renewal, (), "the lease is gone, and the reader must know")),
    **rows(TERMINAL, EngineRenewed, Row(_P._absorb, (), "too late to matter")),
    **rows(TERMINAL, ReaderLost, Row(_P._absorb, (), "too late to matter")),
    **rows(TERMINAL, Tick, Row(_P._absorb, (), "no lease is left")),
}
