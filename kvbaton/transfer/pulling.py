"""The decode side of one hand-off, as a state machine: ask, read what is ready, acknowledge.

Invariants: the destination blocks belong to the session until ``Finish``, and at ``Finish`` no copy into them is in
flight; there is exactly one ``Finish``; it says done only if the first token is here and (unless that token ended the
request) every region was copied and verified; the prefill side hears ``Ack`` or ``Abort`` only after the last read has
stopped, so it never frees under a reader that is alive; after a lost lease nothing read counts.

Pure: time comes in with events. Knows nothing about sockets, memory or layouts beyond block counts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

import msgspec

from kvbaton.transfer.errors import DeadlineExceeded, HandoffError, LeaseLost, PrefillFailed, ProtocolViolation
from kvbaton.transfer.machine import Row, Table, rows, walk
from kvbaton.transfer.ranges import CopyPlan, Region
from kvbaton.transfer.wire import Abort, Ack, Failed, First, Offer, Renew, Start
from kvbaton.types import CapacityError, GenerateRequest, KvbatonError, LocalError


class Pulling(Enum):
    NEW = "new"
    WAITING = "waiting"  # Start is sent, no offer yet
    PULLING = "pulling"
    DRAINING = "draining"  # the outcome is known, but a copy into our blocks has not stopped yet
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"


# -- events


@dataclass(frozen=True)
class Begin:
    pass


@dataclass(frozen=True)
class Offered:
    offer: Offer
    now_s: float


@dataclass(frozen=True)
class Progressed:
    ticket: bytes
    tokens_ready: int
    layers_ready: int


@dataclass(frozen=True)
class FirstArrived:
    first: First


@dataclass(frozen=True)
class CopyFinished:
    """The region is in our blocks, and the source was still what was offered after the last byte was read."""

    region: Region


@dataclass(frozen=True)
class CopyBroke:
    """The copy of a region has stopped without success; nothing of it lands any more."""

    region: Region
    error: KvbatonError


@dataclass(frozen=True)
class LeaseAnswered:
    ticket: bytes
    renewed: bool


@dataclass(frozen=True)
class PeerFailed:
    failure: Failed


@dataclass(frozen=True)
class PeerLost:
    error: HandoffError


@dataclass(frozen=True)
class AbortAsked:
    """The client is gone."""


@dataclass(frozen=True)
class Tick:
    now_s: float


# -- actions


@dataclass(frozen=True)
class Send:
    message: msgspec.Struct


@dataclass(frozen=True)
class StartCopy:
    offer: Offer
    region: Region


@dataclass(frozen=True)
class StopCopies:
    """End the copies in flight as soon as it can be done; each still reports CopyFinished or CopyBroke."""


@dataclass(frozen=True)
class DeliverFirst:
    first: First


@dataclass(frozen=True)
class Finish:
    """The only terminal word. ``error`` is None when done, and when aborted (nobody is left to tell)."""

    state: Pulling
    error: KvbatonError | None
    num_layer_blocks: int  # copied


Action = Send | StartCopy | StopCopies | DeliverFirst | Finish


@dataclass(frozen=True)
class PullLimits:
    """``max_layer_blocks`` bounds one copy, and so how long an abort waits; a few at once hide the way to the peer."""

    max_layer_blocks: int
    max_copies: int = 2
    streaming: bool = True


@dataclass(frozen=True)
class Source:
    """What the handshake told of the peer's pool."""

    num_layers: int
    block_size: int
    num_blocks: int


class DecodeSession:
    """One pull of one request. ``deadline_s`` is absolute, on the clock of the events."""

    def __init__(
        self,
        pull_id: int,
        request: GenerateRequest,
        have_tokens: int,
        source: Source,
        limits: PullLimits,
        deadline_s: float,
    ) -> None:
        assert 0 <= have_tokens <= len(request.prompt_token_ids)
        self.pull_id = pull_id
        self.request = request
        self.have_tokens = have_tokens
        self.state = Pulling.NEW
        self.story: deque[str] = deque(maxlen=24)
        self._source = source
        self._limits = limits
        self._deadline_s = deadline_s
        self._offer: Offer | None = None
        self._plan: CopyPlan | None = None
        self._first: First | None = None
        self._in_flight: set[Region] = set()
        self._num_copied = 0
        self._lease_until_s = float("inf")
        self._renew_at_s = float("inf")
        self._renew_sent_s: float | None = None  # the oldest renewal that is not answered
        self._verdict: tuple[Pulling, KvbatonError | None] | None = None
        self._farewell: Ack | Abort | None = None

    @property
    def finished(self) -> bool:
        return self.state in TERMINAL

    @property
    def next_tick_s(self) -> float:
        """When to send the next Tick."""
        if self.state is Pulling.PULLING:
            return min(self._deadline_s, self._renew_at_s, self._lease_until_s)
        return self._deadline_s if self.state in (Pulling.NEW, Pulling.WAITING) else float("inf")

    def step(self, event: object) -> list[Action]:
        return walk(self, TABLE, event)

    def check(self) -> None:
        assert self.finished <= (not self._in_flight), "a copy is in flight after the end"
        assert (self.state is Pulling.DRAINING) <= bool(self._in_flight), "draining, but nothing is in flight"
        assert len(self._in_flight) <= self._limits.max_copies
        if self.state is Pulling.DONE:
            assert self._first is not None
            ended = self._first.output.finish_reason is not None
            assert ended or (self._plan is not None and self._num_copied == self._plan.num_layer_blocks)

    @property
    def _agreed(self) -> Offer:
        """In the states that have one."""
        assert self._offer is not None
        return self._offer

    @property
    def _reading(self) -> CopyPlan:
        assert self._plan is not None
        return self._plan

    # -- what the rows do

    def _absorb(self, _event: object) -> list[Action]:
        return []

    def _begin(self, _event: Begin) -> list[Action]:
        self.state = Pulling.WAITING
        return [Send(Start(self.pull_id, self.request, self.have_tokens))]

    def _offered(self, event: Offered) -> list[Action]:
        problem = self._problem_with(event.offer)
        if problem is not None:
            return self._end(Pulling.FAILED, ProtocolViolation(problem), self._abort())
        self.state = Pulling.PULLING
        offer = self._offer = event.offer
        self._plan = CopyPlan(
            self._source.num_layers,
            self._source.block_size,
            offer.num_tokens,
            self.have_tokens,
            offer.cached_tokens,
            self._limits.streaming,
        )
        self._lease_until_s = event.now_s + offer.lease_s
        self._renew_at_s = event.now_s + offer.lease_s / 3
        if self._first is not None:
            self._plan.all_ready()
        return self._pull_on()

    def _offered_late(self, event: Offered) -> list[Action]:
        """An offer for a request we gave up: without an answer its blocks would wait for the lease to end."""
        return [Send(self._abort())]

    def _progressed(self, event: Progressed) -> list[Action]:
        if event.ticket != self._agreed.ticket:
            return []
        self._reading.progress(event.tokens_ready, event.layers_ready)
        return self._pull_on()

    def _first_arrived(self, event: FirstArrived) -> list[Action]:
        if self._first is not None or (self._offer is not None and event.first.ticket != self._offer.ticket):
            return []
        self._first = event.first
        deliver: list[Action] = [DeliverFirst(event.first)]
        if event.first.output.finish_reason is not None:
            return deliver + self._end(Pulling.DONE, None, Ack(event.first.ticket))
        if self._plan is None:
            return deliver  # overtook its offer, which is still needed
        self._plan.all_ready()
        return deliver + self._pull_on()

    def _copy_finished(self, event: CopyFinished) -> list[Action]:
        self._in_flight.remove(event.region)
        self._num_copied += event.region.num_layer_blocks
        return self._pull_on()

    def _copy_broke(self, event: CopyBroke) -> list[Action]:
        self._in_flight.remove(event.region)
        return self._end(Pulling.FAILED, event.error, self._abort())

    def _copy_stopped(self, event: CopyFinished | CopyBroke) -> list[Action]:
        self._in_flight.remove(event.region)
        return self._close_if_drained()

    def _lease_answered(self, event: LeaseAnswered) -> list[Action]:
        if event.ticket != self._agreed.ticket:
            return []
        if not event.renewed:
            return self._lease_lost("the prefill side says that the lease is gone")
        if self._renew_sent_s is not None:
            self._lease_until_s = max(self._lease_until_s, self._renew_sent_s + self._agreed.lease_s)
            self._renew_at_s = self._renew_sent_s + self._agreed.lease_s / 3
            self._renew_sent_s = None
        return []

    def _peer_failed(self, event: PeerFailed) -> list[Action]:
        return self._end(Pulling.FAILED, error_of(event.failure), None)

    def _peer_lost(self, event: PeerLost) -> list[Action]:
        return self._end(Pulling.FAILED, event.error, None)

    def _peer_lost_draining(self, _event: PeerLost) -> list[Action]:
        self._farewell = None
        return []

    def _abort_asked(self, _event: AbortAsked) -> list[Action]:
        return self._end(Pulling.ABORTED, None, None if self.state is Pulling.NEW else self._abort())

    def _tick(self, event: Tick) -> list[Action]:
        if event.now_s >= self._deadline_s:
            waited_for = "an offer" if self._offer is None else "the KV" if self._first else "the first token"
            return self._end(Pulling.FAILED, DeadlineExceeded(f"{waited_for} did not come in time"), self._abort())
        if event.now_s >= self._lease_until_s:
            return self._lease_lost("the prefill side did not confirm the lease in time")
        if event.now_s >= self._renew_at_s:
            if self._renew_sent_s is None:
                self._renew_sent_s = event.now_s
            self._renew_at_s = event.now_s + self._agreed.lease_s / 3
            return [Send(Renew(self._agreed.ticket))]
        return []

    # -- helpers

    def _abort(self) -> Abort:
        return Abort(self.pull_id)

    def _lease_lost(self, why: str) -> list[Action]:
        return self._end(Pulling.FAILED, LeaseLost(why), self._abort())

    def _pull_on(self) -> list[Action]:
        """Start what is ready; acknowledge when everything is here."""
        actions: list[Action] = []
        # A request of one token ends at its first one: its KV is for nobody.
        wanted = self.request.sampling.max_tokens > 1 or self._first is not None
        while wanted and len(self._in_flight) < self._limits.max_copies:
            region = self._reading.next_region(self._limits.max_layer_blocks)
            if region is None:
                break
            self._in_flight.add(region)
            actions.append(StartCopy(self._agreed, region))
        if self._first is not None and self._reading.exhausted and not self._in_flight:
            actions += self._end(Pulling.DONE, None, Ack(self._agreed.ticket))
        return actions

    def _end(self, state: Pulling, error: KvbatonError | None, farewell: Ack | Abort | None) -> list[Action]:
        self._verdict, self._farewell = (state, error), farewell
        if self._in_flight:
            self.state = Pulling.DRAINING
            return [StopCopies()]
        return self._close_if_drained()

    def _close_if_drained(self) -> list[Action]:
        if self._in_flight:
            return []
        assert self._verdict is not None
        self.state, error = self._verdict
        farewell = [] if self._farewell is None else [Send(self._farewell)]
        return [*farewell, Finish(self.state, error, self._num_copied)]

    def _problem_with(self, offer: Offer) -> str | None:
        """Never trust a peer's arithmetic: a short or odd list would leave blocks unwritten."""
        if offer.num_tokens != len(self.request.prompt_token_ids):
            return f"offer of {offer.num_tokens} tokens for a prompt of {len(self.request.prompt_token_ids)}"
        if len(offer.block_ids) != -(-offer.num_tokens // self._source.block_size):
            return f"offer of {len(offer.block_ids)} blocks for {offer.num_tokens} tokens"
        if len(offer.generations) != len(offer.block_ids) or len(set(offer.block_ids)) != len(offer.block_ids):
            return "offer with repeated blocks or missing generations"
        if max(offer.block_ids, default=0) >= self._source.num_blocks or offer.cached_tokens > offer.num_tokens:
            return "offer outside of the peer's pool"
        return None


def error_of(failure: Failed) -> KvbatonError:
    """What the caller raises: whose fault it is decides the HTTP status."""
    message = f"prefill: {failure.message}"
    if failure.kind == "capacity":
        return CapacityError(message, field=failure.field)
    if failure.kind == "invalid":
        return LocalError(message, field=failure.field)
    error = LeaseLost(message) if failure.kind == "lease" else PrefillFailed(message, field=failure.field)
    error.retryable = failure.retryable
    return error


TERMINAL = (Pulling.DONE, Pulling.FAILED, Pulling.ABORTED)
_S, _D = Pulling, DecodeSession
_OVER = (_S.DRAINING, *TERMINAL)

TABLE: Table = {
    (_S.NEW, Begin): Row(_D._begin, (_S.WAITING,), "sends Start"),
    (_S.NEW, AbortAsked): Row(_D._abort_asked, (_S.ABORTED,), "nothing was asked yet"),
    (_S.NEW, PeerLost): Row(_D._peer_lost, (_S.FAILED,), "the connection broke before Start"),
    (_S.NEW, Tick): Row(_D._absorb, (_S.NEW,), "deadlines count from Start"),
    (_S.WAITING, Offered): Row(
        _D._offered, (_S.PULLING, _S.DONE, _S.FAILED), "reads what is cached there; fails if the offer makes no sense"
    ),
    (_S.WAITING, Progressed): Row(_D._absorb, (_S.WAITING,), "overtook its offer; First promises the same and more"),
    (_S.WAITING, FirstArrived): Row(
        _D._first_arrived, (_S.WAITING, _S.DONE), "overtook its offer; delivered; done if the request ends with it"
    ),
    (_S.PULLING, Offered): Row(_D._absorb, (_S.PULLING,), "repeated"),
    (_S.PULLING, Progressed): Row(_D._progressed, (_S.PULLING,), "reads what became ready"),
    (_S.PULLING, FirstArrived): Row(
        _D._first_arrived,
        (_S.PULLING, _S.DONE, _S.DRAINING),
        "delivered at once; everything is ready now; a request that ends with it waits for no KV",
    ),
    (_S.PULLING, CopyFinished): Row(_D._copy_finished, (_S.PULLING, _S.DONE), "reads on, or acknowledges"),
    (_S.PULLING, CopyBroke): Row(_D._copy_broke, (_S.FAILED, _S.DRAINING), "nothing read counts"),
    (_S.PULLING, LeaseAnswered): Row(
        _D._lease_answered, (_S.PULLING, _S.FAILED, _S.DRAINING), "goes on, or fails loudly if the lease is gone"
    ),
    **rows((_S.WAITING,), LeaseAnswered, Row(_D._absorb, (), "of a lease that is not known yet")),
    **rows((_S.WAITING, _S.PULLING), Begin, Row(_D._absorb, (), "repeated")),
    **rows((_S.WAITING,), PeerFailed, Row(_D._peer_failed, (_S.FAILED,), "prefill gave up: its reason is passed on")),
    **rows((_S.WAITING,), PeerLost, Row(_D._peer_lost, (_S.FAILED,), "the connection is dead: so is what was on it")),
    **rows((_S.WAITING,), AbortAsked, Row(_D._abort_asked, (_S.ABORTED,), "sends Abort")),
    **rows((_S.WAITING,), Tick, Row(_D._tick, (_S.WAITING, _S.FAILED), "fails at the deadline")),
    **rows(
        (_S.PULLING,), PeerFailed, Row(_D._peer_failed, (_S.FAILED, _S.DRAINING), "prefill gave up, or the lease ended")
    ),
    **rows((_S.PULLING,), PeerLost, Row(_D._peer_lost, (_S.FAILED, _S.DRAINING), "stops copying, then fails")),
    **rows((_S.PULLING,), AbortAsked, Row(_D._abort_asked, (_S.ABORTED, _S.DRAINING), "stops copying, then Abort")),
    **rows(
        (_S.PULLING,),
        Tick,
        Row(_D._tick, (_S.PULLING, _S.FAILED, _S.DRAINING), "renews the lease; fails at the deadline or without lease"),
    ),
    **rows(
        (_S.DRAINING,),
        CopyFinished,
        Row(_D._copy_stopped, (_S.DRAINING, *TERMINAL), "the last copy to stop releases our blocks"),
    ),
    **rows((_S.DRAINING,), CopyBroke, Row(_D._copy_stopped, (_S.DRAINING, *TERMINAL), "the same")),
    **rows((_S.DRAINING,), PeerLost, Row(_D._peer_lost_draining, (_S.DRAINING,), "nobody is left to tell")),
    **rows((_S.DRAINING,), Offered, Row(_D._absorb, (), "repeated")),
    **rows(TERMINAL, Offered, Row(_D._offered_late, (), "answered with Abort: else its blocks wait for the lease")),
    **rows(TERMINAL, PeerLost, Row(_D._absorb, (), "too late to matter")),
    **rows(_OVER, Begin, Row(_D._absorb, (), "repeated")),
    **rows(_OVER, Progressed, Row(_D._absorb, (), "too late to matter")),
    **rows(_OVER, FirstArrived, Row(_D._absorb, (), "too late to matter")),
    **rows(_OVER, LeaseAnswered, Row(_D._absorb, (), "too late to matter")),
    **rows(_OVER, PeerFailed, Row(_D._absorb, (), "too late to matter")),
    **rows(_OVER, AbortAsked, Row(_D._absorb, (), "there is an outcome already")),
    **rows(_OVER, Tick, Row(_D._absorb, (), "no deadline is left")),
}
