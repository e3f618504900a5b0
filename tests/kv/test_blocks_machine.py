"""The block manager under every order of operations: no leak, no use after free, no lie from the cache.

Every owner remembers the generation of each of its blocks; a generation that moves under an owner or a lease is a use
after free. The test knows what content each block holds, so a match that returns other content is caught.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbaton.kv.blocks import BlockManager, OutOfBlocks, block_hashes

BLOCK_SIZE = 2
NUM_BLOCKS = 12
chains = st.lists(st.integers(0, 1), max_size=5).map(lambda bits: [bit for bit in bits for _ in range(BLOCK_SIZE)])


class BlockMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_names = 0
        self.announced: dict[int, int] = {}
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, on_generation=self.on_generation)
        self.content: dict[int, bytes] = {}  # what was computed into a block since it was handed out
        self.owners: list[list[int]] = []
        self.generations: list[list[int]] = []  # of the owners' blocks, when they took them
        self.leases: dict[str, tuple[list[int], list[int], float]] = {}
        self.index: set[bytes] = set()  # what a router would believe

    def on_generation(self, block: int, generation: int) -> None:
        assert generation > self.announced.get(block, 0), "a generation never goes back"
        assert not any(block in owned for owned in self.owners), "handed out under an owner"
        assert not any(block in blocks for blocks, _, _ in self.leases.values()), "handed out under a lease"
        self.announced[block] = generation
        self.content.pop(block, None)

    def own(self, blocks: list[int]) -> None:
        self.owners.append(blocks)
        self.generations.append([self.blocks.generation(block) for block in blocks])

    @rule(tokens=chains, salt=st.sampled_from(["", "tenant"]), num_extra=st.integers(0, 3))
    def start(self, tokens: list[int], salt: str, num_extra: int) -> None:
        """A sequence: matches, takes the rest, computes and publishes its full blocks."""
        hashes = block_hashes(tokens, BLOCK_SIZE, salt)
        matched = self.blocks.match(hashes)
        assert [self.content[block] for block in matched] == hashes[: len(matched)], "a match of other content"
        num_fresh = len(hashes) - len(matched) + num_extra
        takable = self.blocks.num_takable(matched)
        self.blocks.acquire(matched)
        assert self.blocks.num_free == takable
        try:
            fresh = self.blocks.allocate(num_fresh)
        except OutOfBlocks:
            assert num_fresh > takable
            self.blocks.release(matched)
            return
        assert len(set(fresh) | set(matched)) == len(hashes) + num_extra
        for block, block_hash in zip(fresh, hashes[len(matched) :], strict=False):
            self.content[block] = block_hash
            canonical = self.blocks.publish(block, block_hash)
            assert self.content[canonical] == block_hash
        self.own(matched + fresh)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.owners) - 1))
        self.blocks.release(self.owners.pop(index))
        self.generations.pop(index)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), lease_s=st.floats(0.1, 10.0))
    def offer(self, data: st.DataObject, lease_s: float) -> None:
        owned = data.draw(st.sampled_from(self.owners))
        self.num_names += 1
        self.blocks.pin(f"lease-{self.num_names}", owned, self.now_s + lease_s)
        generations = [self.blocks.generation(block) for block in owned]
        self.leases[f"lease-{self.num_names}"] = (list(owned), generations, self.now_s + lease_s)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), lease_s=st.floats(0.1, 10.0))
    def renew(self, data: st.DataObject, lease_s: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.leases)))
        blocks, generations, expires_at_s = self.leases[name]
        renewed = self.blocks.renew(name, self.now_s, self.now_s + lease_s)
        assert renewed == (expires_at_s > self.now_s)
        if renewed:
            self.leases[name] = (blocks, generations, self.now_s + lease_s)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.leases)))
        del self.leases[name]
        assert self.blocks.unpin(name)
        assert not self.blocks.renew(name, self.now_s, self.now_s + 1.0)

    @rule(seconds=st.floats(0.0, 5.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def expire(self) -> None:
        due = {name for name, (_, _, expires_at_s) in self.leases.items() if expires_at_s <= self.now_s}
        for name in due:
            del self.leases[name]
        assert set(self.blocks.expire(self.now_s)) == due

    @rule()
    def clear_cache(self) -> None:
        self.blocks.clear_cache()
        assert self.blocks.num_cached == 0

    @rule()
    def follow_events(self) -> None:
        events = self.blocks.drain_events()
        if events.cleared:
            self.index.clear()
        assert self.index.issuperset(events.removed) and self.index.isdisjoint(events.stored)
        self.index.difference_update(events.removed)
        self.index.update(events.stored)
        assert self.index == set(self.blocks.cached_hashes())

    @invariant()
    def everything_adds_up(self) -> None:
        held: dict[int, int] = {}
        for owned in self.owners:
            for block in owned:
                held[block] = held.get(block, 0) + 1
        self.blocks.check(held)
        pinned = {block for blocks, _, _ in self.leases.values() for block in blocks}
        assert self.blocks.num_pinned == len(pinned)
        assert self.blocks.num_used == len(pinned | set(held))
        assert self.blocks.num_free + self.blocks.num_used == NUM_BLOCKS

    @invariant()
    def nothing_is_reused_under_its_owner(self) -> None:
        for owned, generations in zip(self.owners, self.generations, strict=True):
            assert [self.blocks.generation(block) for block in owned] == generations
        for blocks, generations, _ in self.leases.values():
            assert [self.blocks.generation(block) for block in blocks] == generations

    def teardown(self) -> None:
        for owned in self.owners:
            self.blocks.release(owned)
        self.blocks.expire(float("inf"))
        assert (self.blocks.num_used, self.blocks.num_pinned, self.blocks.num_leases) == (0, 0, 0)
        assert self.blocks.num_free == NUM_BLOCKS
        self.blocks.check({})


class TestBlocks(BlockMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestBlocksLong(BlockMachine.TestCase):
    settings = settings(max_examples=200, stateful_step_count=100, deadline=None)
