"""The router's index behind a bad network: after it calms down the index is the worker's cache, and never a dead one's.

The worker's side is real (block manager, event log), so is the router's (feed, index). Between them a network loses,
repeats, delays and reorders answers, cuts snapshots, and the log forgets what is old.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbaton.clock import ManualClock
from kvbaton.kv.blocks import BlockManager, OutOfBlocks, block_hashes
from kvbaton.router.kv_feed import KVFeed
from kvbaton.router.kv_index import Expectation
from kvbaton.router.prefix_index import PrefixIndex, PromptChains
from kvbaton.workers.kv_events import KVEventLog, KVEventsAnswer

BLOCK_SIZE = 2
NUM_BLOCKS = 10
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(lambda bits: [b for b in bits for _ in range(2)])


class Worker:
    """One life: a cache and what it tells."""

    def __init__(self, life: str, ring: int) -> None:
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.log = KVEventLog(life, BLOCK_SIZE, self.take, ManualClock(), ring)
        self.held: list[list[int]] = []

    async def take(self) -> tuple[int, list[bytes]]:
        self.publish()
        return self.log.next_sequence, self.blocks.cached_hashes()

    def publish(self) -> None:
        if events := self.blocks.drain_events():
            self.log.append(events)

    def run(self, tokens: list[int]) -> None:
        hashes = block_hashes(tokens, BLOCK_SIZE)
        matched = self.blocks.match(hashes)
        self.blocks.acquire(matched)
        try:
            fresh = self.blocks.allocate(len(hashes) - len(matched))
        except OutOfBlocks:
            self.blocks.release(matched)
            return
        for block, name in zip(fresh, hashes[len(matched) :], strict=True):
            self.blocks.publish(block, name)
        self.held.append(matched + fresh)


class FeedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.num_lives = 0
        self.index = PrefixIndex(BLOCK_SIZE, 100)
        self.under_way: list[list[Expectation]] = []
        self.answers: list[tuple[KVEventsAnswer, int]] = []  # in the network, with the round they were asked in
        self.snapshots: list[tuple[str, int, list[bytes]]] = []
        self.possible: dict[str, set[bytes]] = {}  # by life: what it computed, or was sent by this router
        self.restart(30)

    # -- the worker --------------------------------------------------------------------------------------------------

    @rule(ring=st.integers(1, 60))
    def restart(self, ring: int) -> None:
        """The process is new; the router does not know it yet."""
        self.num_lives += 1
        self.worker = Worker(f"life-{self.num_lives}", ring)
        self.possible[self.worker.log.incarnation] = set()
        self.ring = ring

    @rule()
    def poll(self) -> None:
        """The router hears who is there."""
        life = self.worker.log.incarnation
        self.index.heard_of("w", life, BLOCK_SIZE, True, NUM_BLOCKS * BLOCK_SIZE)
        if not hasattr(self, "feed") or self.feed.life != life:
            assert self.index.num_blocks("w") == 0
            self.feed = KVFeed(self.index, "w", life)

    @rule(tokens=prompts, publish=st.booleans())
    def compute(self, tokens: list[int], publish: bool) -> None:
        self.worker.run(tokens)
        self.possible[self.worker.log.incarnation].update(block_hashes(tokens, BLOCK_SIZE))
        if publish:
            self.worker.publish()

    @precondition(lambda self: self.worker.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.worker.blocks.release(self.worker.held.pop(data.draw(st.integers(0, len(self.worker.held) - 1))))

    @rule()
    def clear(self) -> None:
        self.worker.blocks.clear_cache()
        self.worker.publish()

    # -- the router --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.index.exact.knows("w"))
    @rule(max_hashes=st.integers(1, 20))
    def ask(self, max_hashes: int) -> None:
        began = self.index.exact.begin_round("w")
        self.answers.append((self.worker.log.read(self.feed.next, max_hashes), began))

    @precondition(lambda self: self.index.exact.knows("w") and self.feed.wants_snapshot)
    @rule()
    def ask_snapshot(self) -> None:
        sequence, hashes = asyncio.run(self.worker.log.snapshot())
        self.snapshots.append((self.worker.log.incarnation, sequence, hashes))

    @precondition(lambda self: self.index.exact.knows("w"))
    @rule(tokens=prompts)
    def dispatch(self, tokens: list[int]) -> None:
        self.sent(tokens)
        self.under_way.append(self.index.expect("w", PromptChains([tokens])))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        expected = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        for each in expected:
            each.settle()

    @precondition(lambda self: self.index.exact.knows("w"))
    @rule(tokens=prompts)
    def computed(self, tokens: list[int]) -> None:
        self.sent(tokens)
        self.index.record("w", PromptChains([tokens]))

    def sent(self, tokens: list[int]) -> None:
        life = self.index.life("w")
        assert life is not None
        self.possible[life].update(block_hashes(tokens, BLOCK_SIZE))

    @precondition(lambda self: self.index.exact.knows("w"))
    @rule()
    def no_events_any_more(self) -> None:
        self.index.exact.lost("w")

    # -- the network -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data: st.DataObject, keep: bool) -> None:
        """Any of those under way, whichever was asked first; it may come again."""
        number = data.draw(st.integers(0, len(self.answers) - 1))
        answer, began = self.answers[number] if keep else self.answers.pop(number)
        self.feed.on_events(answer, began)

    @precondition(lambda self: self.answers)
    @rule()
    def lose(self) -> None:
        self.answers.pop(0)

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), cut=st.booleans(), meanwhile=st.booleans())
    def deliver_snapshot(self, data: st.DataObject, cut: bool, meanwhile: bool) -> None:
        life, sequence, hashes = self.snapshots.pop(data.draw(st.integers(0, len(self.snapshots) - 1)))
        staged = self.feed.on_snapshot(life, sequence)
        if staged is None:
            return
        staged.add(hashes[: len(hashes) // 2])
        if meanwhile:  # the worker restarts while its snapshot is read
            self.restart(self.ring)
            self.poll()
        if cut:
            staged.discard()
            return
        staged.add(hashes[len(hashes) // 2 :])
        staged.commit()

    # -- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def it_adds_up(self) -> None:
        self.index.exact.check()

    @invariant()
    def nothing_is_known_that_this_life_had_no_part_in(self) -> None:
        """What a dead life had, or was sent, is never foretold of the next one."""
        life = self.index.life("w")
        if life is not None:
            known = self.index.exact.held("w") | set(self.index.exact._holders["w"].expected)
            assert known <= self.possible[life]

    def teardown(self) -> None:
        """Quiescence: the network answers, everything under way ends, nothing new happens."""
        self.poll()
        for expected in self.under_way:
            for each in expected:
                each.settle()
        self.worker.publish()
        for _ in range(40):
            if self.feed.wants_snapshot:
                self.ask_snapshot()
                life, sequence, hashes = self.snapshots[-1]
                staged = self.feed.on_snapshot(life, sequence)
                assert staged is not None
                staged.add(hashes)
                staged.commit()
            began = self.index.exact.begin_round("w")
            self.feed.on_events(self.worker.log.read(self.feed.next), began)
        cached = set(self.worker.blocks.cached_hashes())
        assert self.index.exact.held("w") == cached
        assert self.index.exact.trust("w") == "fresh"
        assert not self.index.exact._holders["w"].expected, "nothing is under way any more"
        for tokens in ([0] * 12, [1] * 12, [0, 0, 1, 1, 0, 0]):
            depth = len(self.worker.blocks.match(block_hashes(tokens, BLOCK_SIZE)))
            most = (len(tokens) - 1) // BLOCK_SIZE
            foretold = self.index.cached_tokens(PromptChains([tokens]), ["w"])["w"]
            assert foretold == min(depth, most) * BLOCK_SIZE, "foretold what a match would find"
        self.index.exact.check()


class TestFeed(FeedMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestFeedLong(FeedMachine.TestCase):
    settings = settings(max_examples=500, stateful_step_count=100, deadline=None)


def joined(life: str = "1") -> tuple[PrefixIndex, KVFeed]:
    index = PrefixIndex(BLOCK_SIZE, 100)
    index.heard_of("w", life, BLOCK_SIZE, True, 100)
    return index, KVFeed(index, "w", life)


def answer(life: str, first: int, *batches: Any, gap: bool = False, block_size: int = BLOCK_SIZE) -> KVEventsAnswer:
    return KVEventsAnswer(life, block_size, first, first + len(batches), gap, tuple(batches))


def test_an_answer_of_a_dead_life_is_ignored_whenever_it_comes() -> None:
    """RT-12, AS-09: events out of order, and those of a worker that was replaced."""
    worker = Worker("1", 100)
    worker.run([0] * 8)
    worker.publish()
    index, feed = joined()
    late = worker.log.read(0)
    index.heard_of("w", "2", BLOCK_SIZE, True, 100)
    assert feed.on_events(late, 1) == "ignored" and not feed.counts
    new = KVFeed(index, "w", "2")
    assert new.on_events(late, 1) == "ignored"
    assert index.cached_tokens(PromptChains([[0] * 12]), ["w"]) == {"w": 0}
    index.forget("w")
    assert new.on_events(answer("2", 0), 1) == "ignored" and new.on_snapshot("2", 0) is None


def test_hashes_of_another_block_size_are_not_taken() -> None:
    index, feed = joined()
    assert feed.on_events(answer("1", 0, block_size=16), 1) == "ignored"


def test_a_gap_asks_for_a_snapshot_once() -> None:
    index, feed = joined()
    assert feed.on_events(answer("1", 5, gap=True), 1) == "ignored", "of another question"
    assert feed.on_events(answer("1", 0, gap=True), 1) == "gap" and feed.wants_snapshot
    assert feed.on_events(answer("1", 0, gap=True), 1) == "ignored"
    staged = feed.on_snapshot("1", 7)
    assert staged is not None
    staged.commit()
    assert feed.next == 7 and not feed.wants_snapshot and feed.on_snapshot("1", 7) is None
