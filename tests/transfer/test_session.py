"""Both sessions, two real block managers and a hostile network between them.

The network drops, repeats, reorders and delays; either side may crash, the reader may abort, the lease may end, the
engine may fail, and freed blocks are handed to others at once. Checked after every step: nobody completes with wrong
KV, no block is freed under a live reader, nothing lands in blocks that were given back, one outcome each.
Checked at the end: time passes, everything terminates, and no block, pin or ticket is left.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvbaton.kv.blocks import BlockManager, OutOfBlocks
from kvbaton.transfer import offering, pulling, session
from kvbaton.transfer.errors import LeaseLost, PeerUnreachable
from kvbaton.transfer.machine import IllegalEvent
from kvbaton.transfer.offering import PrefillSession
from kvbaton.transfer.pulling import DecodeSession, Pulling, PullLimits, Source
from kvbaton.transfer.wire import Abort, Ack, Failed, First, Offer, Progress, Renew, RenewReply, Start
from kvbaton.types import CapacityError, GenerateRequest, SamplingParams, TokenOutput

LEASE_S, DEADLINE_S = 9.0, 60.0
SELDOM = st.integers(0, 9).map(lambda n: n == 9)  # else no transfer would ever get far
BLOCK, LAYERS, NUM_BLOCKS = 4, 2, 14


@dataclass
class Transfer:
    """One request on both sides, and what each side's shell holds of it."""

    name: str
    request: GenerateRequest
    have: int
    reader: DecodeSession
    dst: list[int]
    lender: PrefillSession | None = None  # None until Start arrives
    src: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=lambda: [0] * LAYERS)  # tokens in place, by layer
    engine: str = "none"  # none, queued, running, held, gone
    sampled: bool = False
    granted: bytes | None = None
    ends: bool = False  # the request ends at its first token
    copies: dict[pulling.Region, dict] = field(default_factory=dict)
    outcomes: list[pulling.Finish] = field(default_factory=list)
    first_seen: int = 0
    closed: int = 0
    connected: bool = True


class HandoffMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.sources = BlockManager(NUM_BLOCKS, BLOCK, prefix_caching=False)
        self.destinations = BlockManager(NUM_BLOCKS, BLOCK, prefix_caching=False)
        self.source_memory: dict[tuple[int, int], object] = {}
        self.destination_memory: dict[tuple[int, int], object] = {}
        self.transfers: list[Transfer] = []
        self.to_prefill: list[tuple[Transfer, object]] = []
        self.to_decode: list[tuple[Transfer, object]] = []
        self.num_made = 0

    # -- shells: carry out actions the way server.py and client.py do

    def feed_reader(self, t: Transfer, event: object) -> None:
        for action in t.reader.step(event):
            match action:
                case pulling.Send():
                    if t.connected:
                        self.to_prefill.append((t, action.message))
                case pulling.StartCopy():
                    assert not t.outcomes, "a copy begins after the end"
                    t.copies[action.region] = {"offer": action.offer, "read": None}
                case pulling.StopCopies():
                    pass
                case pulling.DeliverFirst():
                    t.first_seen += 1
                case pulling.Finish():
                    t.outcomes.append(action)
                    if action.state is Pulling.DONE and not t.ends:
                        self.assert_content(t)
                    self.destinations.release(t.dst)  # decoded, or given to somebody else
        t.reader.check()

    def feed_lender(self, t: Transfer, event: object) -> None:
        if t.lender is None:
            return
        for action in t.lender.step(event):
            match action:
                case offering.Send():
                    if t.connected:
                        self.to_decode.append((t, action.message))
                case offering.StartPrefill():
                    assert t.engine == "none", "started twice"
                    t.engine = "queued"
                case offering.Grant():
                    t.granted = action.offer.ticket
                case offering.Revoke():
                    assert t.granted == action.ticket
                    t.granted = None
                case offering.RenewLease():
                    renewed = self.sources.renew(t.name, self.now_s, self.now_s + action.lease_s)
                    self.feed_lender(t, offering.EngineRenewed(renewed, self.now_s))
                case offering.ReleasePrefill() | offering.AbortPrefill():
                    assert t.granted is None, "blocks are let go before the ticket is revoked"
                    if isinstance(action, offering.ReleasePrefill):
                        assert t.reader.finished and not t.copies, "freed under a reader"
                    self.engine_forget(t)
                case offering.Close():
                    t.closed += 1
                    assert t.closed == 1 and t.granted is None

    def engine_forget(self, t: Transfer) -> None:
        if t.engine in ("running", "held"):
            self.sources.unpin(t.name)
            self.sources.release(t.src)
        t.engine = "gone"

    def assert_content(self, t: Transfer) -> None:
        for layer in range(LAYERS):
            for index in range(t.have // BLOCK, len(t.dst)):
                found = self.destination_memory.get((layer, t.dst[index]))
                assert found == (t.name, layer, index), f"{t.name} is done, but block {index} holds {found}"

    # -- requests

    @precondition(lambda self: sum(not t.outcomes for t in self.transfers) < 4)
    @rule(num_blocks=st.integers(1, 3), short=st.integers(0, 3), have=st.integers(0, 3), ends=st.booleans())
    def begin(self, num_blocks: int, short: int, have: int, ends: bool) -> None:
        num_tokens = num_blocks * BLOCK - short
        have_tokens = min(have, num_blocks) * BLOCK
        have_tokens = have_tokens if have_tokens < num_tokens else (num_blocks - 1) * BLOCK
        try:
            dst = self.destinations.allocate(num_blocks)
        except OutOfBlocks:
            return
        self.num_made += 1
        name = f"t{self.num_made}"
        request = GenerateRequest(name, tuple(range(num_tokens)), SamplingParams(max_tokens=1 if ends else 5))
        reader = DecodeSession(
            self.num_made,
            request,
            have_tokens,
            Source(LAYERS, BLOCK, NUM_BLOCKS),
            PullLimits(max_layer_blocks=2, max_copies=2),
            self.now_s + DEADLINE_S,
        )
        t = Transfer(name, request, have_tokens, reader, dst, ends=ends)
        for block in dst:  # whatever was there
            for layer in range(LAYERS):
                self.destination_memory[layer, block] = "stale"
        self.transfers.append(t)
        self.feed_reader(t, pulling.Begin())

    # -- the network

    def _pick(self, data, queue):
        """Any message, not only the oldest: reordering. Mostly the oldest, so that transfers get somewhere."""
        index = 0 if data.draw(st.integers(0, 3)) else data.draw(st.integers(0, len(queue) - 1))
        return index

    @precondition(lambda self: self.to_prefill)
    @rule(data=st.data())
    def deliver_to_prefill(self, data) -> None:
        t, message = self.to_prefill.pop(self._pick(data, self.to_prefill))
        self.arrive_at_prefill(t, message)

    def arrive_at_prefill(self, t: Transfer, message: object) -> None:
        if not t.connected:
            return
        match message:
            case Start():
                if t.lender is None:
                    t.lender = PrefillSession(message, LEASE_S)
                self.feed_lender(t, offering.StartArrived(self.now_s))
            case Abort():
                self.feed_lender(t, offering.AbortArrived())
            case Ack():
                self.feed_lender(t, offering.AckArrived(message.ticket))
            case Renew():
                self.feed_lender(t, offering.RenewArrived(message.ticket))

    @precondition(lambda self: self.to_decode)
    @rule(data=st.data())
    def deliver_to_decode(self, data) -> None:
        t, message = self.to_decode.pop(self._pick(data, self.to_decode))
        self.arrive_at_decode(t, message)

    def arrive_at_decode(self, t: Transfer, message: object) -> None:
        if not t.connected:
            return
        match message:
            case Offer():
                self.feed_reader(t, pulling.Offered(message, self.now_s))
            case Progress():
                self.feed_reader(t, pulling.Progressed(message.ticket, message.tokens_ready, message.layers_ready))
            case First():
                self.feed_reader(t, pulling.FirstArrived(message))
            case RenewReply():
                self.feed_reader(t, pulling.LeaseAnswered(message.ticket, message.renewed))
            case Failed():
                self.feed_reader(t, pulling.PeerFailed(message))

    @precondition(lambda self: self.to_prefill or self.to_decode)
    @rule(data=st.data(), repeat=st.booleans(), really=SELDOM)
    def drop_or_repeat(self, data, repeat: bool, really: bool) -> None:
        if not (really or repeat):
            return
        queue = data.draw(st.sampled_from([q for q in (self.to_prefill, self.to_decode) if q]))
        index = data.draw(st.integers(0, len(queue) - 1))
        if repeat:
            queue.append(queue[index])
        else:
            del queue[index]

    # -- the prefill engine

    def _in(self, *states: str) -> list[Transfer]:
        return [t for t in self.transfers if t.engine in states]

    @precondition(lambda self: self._in("queued", "running"))
    @rule(data=st.data())
    def engine_step(self, data) -> None:
        t = data.draw(st.sampled_from(self._in("queued", "running")))
        if t.engine == "queued":
            self.engine_schedule(t)
            return
        self.engine_compute(t, data.draw(st.sampled_from([BLOCK, 6, 12])))

    def engine_compute(self, t: Transfer, num: int) -> None:
        num_tokens = len(t.request.prompt_token_ids)
        layer = min(range(LAYERS), key=lambda layer: (t.computed[layer], layer))
        if t.computed[layer] < num_tokens:
            stop = min(num_tokens, t.computed[layer] + num)
            if layer and t.computed[layer - 1] < num_tokens:
                stop = t.computed[layer - 1]  # the same chunk as in the layer below
            for index in range(t.computed[layer] // BLOCK, -(-stop // BLOCK)):
                # Block content counts as right only once all of its tokens are there.
                whole = stop >= min(num_tokens, (index + 1) * BLOCK)
                self.source_memory[layer, t.src[index]] = (t.name, layer, index) if whole else "partial"
            t.computed[layer] = stop
            self.feed_lender(t, offering.Computed(stop, layer + 1))
        else:
            t.engine, t.sampled = "held", True
            output = TokenOutput(7, finish_reason="length" if t.ends else None)
            self.feed_lender(t, offering.Sampled(output, self.now_s))

    def engine_schedule(self, t: Transfer) -> None:
        try:
            t.src = self.sources.allocate(len(t.dst))
        except OutOfBlocks as error:
            t.engine = "gone"
            self.feed_lender(t, offering.EngineFailed(error))
            return
        self.sources.pin(t.name, t.src, self.now_s + LEASE_S)
        for block in t.src:
            for layer in range(LAYERS):
                self.source_memory[layer, block] = "stale"
        t.engine = "running"
        generations = tuple(self.sources.generation(block) for block in t.src)
        ticket = t.name.encode().ljust(16, b".")
        self.feed_lender(t, offering.Scheduled(ticket, tuple(t.src), generations, 0, self.now_s))

    @precondition(lambda self: self._in("queued", "running"))
    @rule(data=st.data(), really=SELDOM)
    def engine_breaks(self, data, really: bool) -> None:
        if not really:
            return
        t = data.draw(st.sampled_from(self._in("queued", "running")))
        self.engine_forget(t)
        self.feed_lender(t, offering.EngineFailed(RuntimeError("step failed")))

    @rule(num=st.integers(1, 4))
    def others_use_the_pool(self, num: int) -> None:
        """Freed blocks are handed out and overwritten at once."""
        try:
            blocks = self.sources.allocate(num)
        except OutOfBlocks:
            return
        for block in blocks:
            for layer in range(LAYERS):
                self.source_memory[layer, block] = "somebody else's"
        self.sources.release(blocks)

    # -- copies: they begin, they look at memory at some later time, they end at yet a later one

    def _copying(self) -> list[tuple[Transfer, pulling.Region]]:
        return [(t, region) for t in self.transfers for region in t.copies]

    @precondition(lambda self: self._copying())
    @rule(data=st.data(), breaks=SELDOM)
    def copy_moves(self, data, breaks: bool) -> None:
        self.move_copy(*data.draw(st.sampled_from(self._copying())), breaks)

    def move_copy(self, t: Transfer, region: pulling.Region, breaks: bool) -> None:
        copy = t.copies[region]
        offer = copy["offer"]
        if breaks:
            del t.copies[region]
            self.feed_reader(t, pulling.CopyBroke(region, PeerUnreachable("link")))
        elif copy["read"] is None:
            copy["read"] = {
                (layer, index): self.source_memory.get((layer, offer.block_ids[index]))
                for layer in range(region.layer_start, region.layer_stop)
                for index in range(region.block_start, region.block_stop)
            }
            for (layer, index), content in copy["read"].items():
                assert not t.outcomes, "lands in blocks that were given back"
                self.destination_memory[layer, t.dst[index]] = content
        else:
            del t.copies[region]
            same = all(
                self.sources.generation(offer.block_ids[i]) == offer.generations[i]
                for i in range(region.block_start, region.block_stop)
            )
            self.feed_reader(
                t, pulling.CopyFinished(region) if same else pulling.CopyBroke(region, LeaseLost("reused"))
            )

    @rule(rounds=st.integers(1, 6), copies=st.booleans(), num=st.sampled_from([BLOCK, 6]))
    def all_goes_well_for_a_while(self, rounds: int, copies: bool, num: int) -> None:
        for _ in range(rounds):
            for t in self._in("queued", "running"):
                if t.engine == "queued":
                    self.engine_schedule(t)
                else:
                    self.engine_compute(t, num)
            for queue, arrive in (
                (self.to_prefill, self.arrive_at_prefill),
                (self.to_decode, self.arrive_at_decode),
            ):
                while queue:
                    arrive(*queue.pop(0))
            for t, region in self._copying() if copies else ():
                self.move_copy(t, region, breaks=False)

    # -- time, aborts, crashes

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 10.0]), readers_sleep=st.booleans())
    def some_time_passes(self, seconds: float, readers_sleep: bool) -> None:
        self.time_passes(seconds, readers_sleep)

    def time_passes(self, seconds: float, readers_sleep: bool = False) -> None:
        """A reader that sleeps does not even notice that its lease has ended."""
        self.now_s += seconds
        for name in self.sources.expire(self.now_s):
            t = next(t for t in self.transfers if t.name == name)
            self.sources.release(t.src)
            t.engine = "gone"
            self.feed_lender(t, offering.EngineFailed(CapacityError("the lease expired")))
        for t in self.transfers:
            if not readers_sleep:
                self.feed_reader(t, pulling.Tick(self.now_s))
            self.feed_lender(t, offering.Tick(self.now_s))

    @precondition(lambda self: self._copying())
    @rule(lost=st.booleans())
    def leases_end_while_readers_sleep_and_others_take_the_blocks(self, lost: bool) -> None:
        self.time_passes(LEASE_S, readers_sleep=True)
        self.others_use_the_pool(self.sources.num_free)
        if lost:
            self.to_decode = [(t, m) for t, m in self.to_decode if not isinstance(m, Failed)]

    def _live(self) -> list[Transfer]:
        return [t for t in self.transfers if not t.outcomes]

    @precondition(lambda self: self._live())
    @rule(data=st.data(), really=SELDOM)
    def client_goes_away(self, data, really: bool) -> None:
        if not really:
            return
        self.feed_reader(data.draw(st.sampled_from(self._live())), pulling.AbortAsked())

    @precondition(lambda self: any(t.connected for t in self.transfers))
    @rule(data=st.data(), order=st.booleans(), really=SELDOM)
    def connection_dies(self, data, order: bool, really: bool) -> None:
        """A crash of either side looks like this to the other."""
        if not really:
            return
        t = data.draw(st.sampled_from([t for t in self.transfers if t.connected]))
        self.cut(t, order)

    def cut(self, t: Transfer, order: bool = True) -> None:
        t.connected = False
        ends = [
            lambda: self.feed_reader(t, pulling.PeerLost(PeerUnreachable("gone"))),
            lambda: self.feed_lender(t, offering.ReaderLost()),
        ]
        for end in ends if order else reversed(ends):
            end()

    # -- what always holds

    @invariant()
    def one_outcome_and_sound_blocks(self) -> None:
        self.sources.check()
        self.destinations.check()
        for t in self.transfers:
            assert len(t.outcomes) <= 1 and t.first_seen <= 1 and t.closed <= 1
            assert t.reader.finished == bool(t.outcomes)
            if t.outcomes and t.outcomes[0].state is Pulling.DONE:
                assert t.first_seen == 1
            if t.lender is not None and t.lender.finished:
                assert t.engine in ("none", "gone") and t.granted is None

    def teardown(self) -> None:
        """Copies end, time passes, no message is ever delivered again: everything must come to an end."""
        for t, region in self._copying():
            del t.copies[region]
            self.feed_reader(t, pulling.CopyBroke(region, PeerUnreachable("end")))
        for _ in range(20):
            self.time_passes(10.0)
            for t, region in self._copying():
                del t.copies[region]
                self.feed_reader(t, pulling.CopyBroke(region, PeerUnreachable("end")))
        for t in self.transfers:
            assert t.reader.finished and len(t.outcomes) == 1, f"{t.name} never ends: {t.reader.story}"
            if t.engine == "queued":  # heartbeats end the connection of a reader that is silent
                self.cut(t)
            assert t.engine in ("none", "gone"), f"{t.name} is held for ever: {t.lender.story}"
        assert self.sources.num_used == self.sources.num_pinned == self.destinations.num_used == 0
        self.one_outcome_and_sound_blocks()


# A running engine is given its end by the teardown's leases: pins expire whatever state it is in.
QUICK = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


def test_sessions_on_a_hostile_network():
    run_state_machine_as_test(HandoffMachine, settings=QUICK)


@pytest.mark.slow
def test_sessions_on_a_hostile_network_ten_thousand_steps():
    long = settings(QUICK, max_examples=250, stateful_step_count=400)  # 100,000 steps at most, well over 10,000
    run_state_machine_as_test(HandoffMachine, settings=long)


# -- single cases

SOURCE = Source(LAYERS, BLOCK, NUM_BLOCKS)


def make_reader(num_tokens: int = 8, have: int = 0, max_tokens: int = 5, **limits) -> DecodeSession:
    request = GenerateRequest("r", tuple(range(num_tokens)), SamplingParams(max_tokens=max_tokens))
    return DecodeSession(1, request, have, SOURCE, PullLimits(**{"max_layer_blocks": 8, **limits}), DEADLINE_S)


def make_offer(num_tokens: int = 8, cached: int = 0, **changes) -> Offer:
    num_blocks = -(-num_tokens // BLOCK)
    fields = {
        "pull_id": 1,
        "ticket": b"t" * 16,
        "block_ids": tuple(range(num_blocks)),
        "generations": (1,) * num_blocks,
        "num_tokens": num_tokens,
        "cached_tokens": cached,
        "lease_s": LEASE_S,
    }
    return Offer(**{**fields, **changes})


FIRST = First(b"t" * 16, TokenOutput(3), 0.0, 0.0)


def kinds(actions) -> list[str]:
    return [type(a.message if isinstance(a, pulling.Send) else a).__name__ for a in actions]


def test_an_illegal_event_raises_and_changes_nothing():
    reader = make_reader()
    with pytest.raises(IllegalEvent, match="CopyFinished.*in state new"):
        reader.step(pulling.CopyFinished(pulling.Region(0, 1, 0, 1)))
    assert reader.state is Pulling.NEW
    assert kinds(reader.step(pulling.Begin())) == ["Start"]
    lender = PrefillSession(Start(1, reader.request, 0), LEASE_S)
    with pytest.raises(IllegalEvent):
        lender.step(offering.Sampled(TokenOutput(1), 0.0))
    assert lender.state is offering.Offering.NEW


def test_zero_blocks_to_move_moves_nothing_and_completes():
    reader = make_reader(num_tokens=8, have=8)
    reader.step(pulling.Begin())
    assert reader.step(pulling.Offered(make_offer(), 0.0)) == []
    assert kinds(reader.step(pulling.FirstArrived(FIRST))) == ["DeliverFirst", "Ack", "Finish"]
    assert reader.state is Pulling.DONE


def test_without_streaming_nothing_is_read_before_everything_is_computed():
    reader = make_reader(streaming=False)
    reader.step(pulling.Begin())
    assert reader.step(pulling.Offered(make_offer(cached=4), 0.0)) == []
    assert reader.step(pulling.Progressed(b"t" * 16, 8, 1)) == []
    (copy,) = reader.step(pulling.Progressed(b"t" * 16, 8, 2))
    assert copy.region == pulling.Region(0, 2, 0, 2)


def test_a_completed_transfer_judged_late_is_a_success():
    """LK-09: what has come is taken in before the deadline is judged."""
    reader = make_reader()
    reader.step(pulling.Begin())
    (copy,) = reader.step(pulling.Offered(make_offer(cached=8), 0.0))
    reader.step(pulling.CopyFinished(copy.region))
    assert kinds(reader.step(pulling.FirstArrived(FIRST)))[-1] == "Finish"
    assert reader.step(pulling.Tick(DEADLINE_S * 1.1)) == []
    assert reader.state is Pulling.DONE


def test_an_unfinished_transfer_does_time_out():
    reader = make_reader()
    reader.step(pulling.Begin())
    assert reader.step(pulling.Tick(DEADLINE_S * 0.9)) == []
    send, finish = reader.step(pulling.Tick(DEADLINE_S * 1.1))
    assert isinstance(send.message, Abort) and "in time" in str(finish.error)


def test_an_abort_waits_for_the_copy_in_flight_before_it_ends_and_before_it_tells():
    reader = make_reader()
    reader.step(pulling.Begin())
    (copy,) = reader.step(pulling.Offered(make_offer(cached=8), 0.0))
    assert kinds(reader.step(pulling.AbortAsked())) == ["StopCopies"]
    assert not reader.finished, "its blocks are quarantined"
    assert kinds(reader.step(pulling.CopyFinished(copy.region))) == ["Abort", "Finish"]
    assert reader.state is Pulling.ABORTED


def test_a_request_of_one_token_moves_nothing():
    reader = make_reader(max_tokens=1)
    reader.step(pulling.Begin())
    assert reader.step(pulling.Offered(make_offer(cached=8), 0.0)) == []
    ended = First(b"t" * 16, TokenOutput(3, finish_reason="length"), 0.0, 0.0)
    assert kinds(reader.step(pulling.FirstArrived(ended))) == ["DeliverFirst", "Ack", "Finish"]


def test_the_lease_is_renewed_at_a_third_and_lost_loudly():
    reader = make_reader()
    reader.step(pulling.Begin())
    reader.step(pulling.Offered(make_offer(), 0.0))
    assert reader.next_tick_s == 3.0
    assert kinds(reader.step(pulling.Tick(3.0))) == ["Renew"]
    reader.step(pulling.LeaseAnswered(b"t" * 16, True))
    assert kinds(reader.step(pulling.Tick(6.0))) == ["Renew"]
    abort, finish = reader.step(pulling.LeaseAnswered(b"t" * 16, False))
    assert isinstance(abort.message, Abort) and isinstance(finish.error, LeaseLost)


def test_an_unconfirmed_lease_is_a_lost_one():
    reader = make_reader()
    reader.step(pulling.Begin())
    reader.step(pulling.Offered(make_offer(), 0.0))
    for at_s in (3.0, 6.0):
        assert kinds(reader.step(pulling.Tick(at_s))) == ["Renew"]
    assert isinstance(reader.step(pulling.Tick(9.0))[-1].error, LeaseLost)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 9},
        {"block_ids": (0,), "generations": (1,)},
        {"block_ids": (0, 0)},
        {"block_ids": (0, NUM_BLOCKS)},
        {"generations": (1,)},
        {"cached_tokens": 9},
    ],
)
def test_an_offer_that_makes_no_sense_is_refused(changes):
    reader = make_reader()
    reader.step(pulling.Begin())
    abort, finish = reader.step(pulling.Offered(make_offer(**changes), 0.0))
    assert isinstance(abort.message, Abort) and finish.state is Pulling.FAILED


def test_an_acknowledgement_before_the_first_token_releases_nothing_as_good():
    lender = PrefillSession(Start(1, make_reader().request, 0), LEASE_S)
    lender.step(offering.StartArrived(0.0))
    lender.step(offering.Scheduled(b"t" * 16, (0, 1), (1, 1), 0, 0.0))
    assert lender.step(offering.AckArrived(b"x" * 16)) == []
    lender.step(offering.AckArrived(b"t" * 16))
    assert lender.state is offering.Offering.ABORTED


def test_a_preempted_offer_fails_instead_of_going_on_in_other_blocks():
    lender = PrefillSession(Start(1, make_reader().request, 0), LEASE_S)
    lender.step(offering.StartArrived(0.0))
    lender.step(offering.Scheduled(b"t" * 16, (0, 1), (1, 1), 0, 0.0))
    actions = lender.step(offering.Scheduled(b"u" * 16, (2, 3), (1, 1), 0, 0.0))
    assert [type(a).__name__ for a in actions] == ["Revoke", "AbortPrefill", "Send", "Close"]


def test_the_page_of_documentation_is_the_tables():
    page = Path(__file__).parents[2] / "docs" / "handoff-lifecycle.md"
    assert page.read_text() == session.describe(), "run: python -m kvbaton.transfer.session > docs/handoff-lifecycle.md"
    printed = subprocess.run([sys.executable, "-m", "kvbaton.transfer.session"], capture_output=True, check=True)
    assert printed.stdout.decode() == session.describe()


def test_every_state_has_a_row_for_what_may_come_at_any_time():
    for state in Pulling:
        for event in (pulling.AbortAsked, pulling.PeerLost, pulling.Tick):
            assert (state, event) in pulling.TABLE
    for state in offering.Offering:
        for event in (offering.AbortArrived, offering.ReaderLost, offering.Tick):
            assert (state, event) in offering.TABLE
