"""Exact behaviour of the block manager."""

from __future__ import annotations

import pytest

from kvbaton.kv.blocks import NO_EVENTS, BlockEvents, BlockManager, OutOfBlocks, block_hashes
from kvbaton.types import CapacityError, LocalError


def fill(blocks: BlockManager, hashes: list[bytes]) -> list[int]:
    """A sequence that computed and published a chain; the caller still holds its blocks."""
    held = blocks.match(hashes)
    blocks.acquire(held)
    fresh = blocks.allocate(len(hashes) - len(held))
    for block, block_hash in zip(fresh, hashes[len(held) :], strict=True):
        blocks.publish(block, block_hash)
    return held + fresh


def test_hashes_cover_full_blocks_only_and_are_chained() -> None:
    """Case KV-13: a partial last block has no hash."""
    tokens = list(range(40))
    hashes = block_hashes(tokens, 16)
    assert len(hashes) == 2 and len(set(hashes)) == 2 and all(len(block_hash) == 16 for block_hash in hashes)
    assert block_hashes(tokens[:32] + [7] * 24, 16)[:2] == hashes
    assert block_hashes([1, *tokens[1:]], 16)[1] != hashes[1], "the second block depends on the first"
    assert block_hashes(tokens[:15], 16) == []


def test_hashes_are_the_same_on_every_machine() -> None:
    """Routers and peers compare them: the bytes are part of the protocol."""
    assert block_hashes(range(16), 16)[0].hex() == "4e17c02d1cea2f3225fde7667b4f4294"
    assert block_hashes(range(16), 16, salt="tenant")[0].hex() == "c5abab30aa92445a8cc13fd008d4f19a"


@pytest.mark.parametrize("token", [-1, 1 << 32, "a"])
def test_what_is_no_token_id_is_refused(token: object) -> None:
    with pytest.raises(LocalError) as caught:
        block_hashes([1, token], 2)  # type: ignore[list-item]
    assert caught.value.field == "prompt"


def test_salts_share_nothing() -> None:
    tokens = list(range(64))
    assert not set(block_hashes(tokens, 16)) & set(block_hashes(tokens, 16, salt="a"))
    assert not set(block_hashes(tokens, 16, salt="b")) & set(block_hashes(tokens, 16, salt="a"))


def test_allocation_is_all_or_nothing() -> None:
    blocks = BlockManager(4, 16)
    assert blocks.allocate(3) == [0, 1, 2], "low ids first, adjacent"
    with pytest.raises(OutOfBlocks) as caught:
        blocks.allocate(2)
    assert isinstance(caught.value, CapacityError)
    assert blocks.num_free == 1 and blocks.num_used == 3
    assert blocks.allocate(0) == []
    blocks.check({0: 1, 1: 1, 2: 1})


def test_a_released_run_is_handed_out_as_the_same_run() -> None:
    blocks = BlockManager(8, 16)
    held = blocks.allocate(5)
    blocks.release(held)
    assert blocks.allocate(5) == held


def test_a_cached_block_survives_release_and_is_revived() -> None:
    blocks = BlockManager(4, 16)
    hashes = block_hashes(range(32), 16)
    held = fill(blocks, hashes)
    blocks.release(held)
    assert (blocks.num_used, blocks.num_free, blocks.num_cached) == (0, 4, 2)
    assert blocks.match(hashes) == held
    blocks.acquire(held)
    assert (blocks.num_used, blocks.num_free, blocks.num_cached) == (2, 2, 2)
    blocks.check()


def test_match_stops_at_the_first_gap() -> None:
    blocks = BlockManager(8, 16)
    hashes = block_hashes(range(64), 16)
    held = blocks.allocate(4)
    for index in (0, 1, 3):
        blocks.publish(held[index], hashes[index])
    assert blocks.match(hashes) == held[:2]
    assert blocks.match(hashes[1:]) == held[1:2]
    assert blocks.match([]) == []


def test_the_tail_of_a_chain_is_evicted_before_its_head() -> None:
    blocks = BlockManager(4, 16)
    hashes = block_hashes(range(64), 16)
    held = fill(blocks, hashes)
    blocks.release(held)
    assert blocks.allocate(1) == [held[3]]
    assert blocks.match(hashes) == held[:3]
    assert blocks.allocate(2) == [held[2], held[1]]
    assert blocks.match(hashes) == held[:1]


def test_a_shared_prefix_outlives_the_tails_that_used_it() -> None:
    blocks = BlockManager(6, 4)
    prefix = list(range(8))
    first, second = block_hashes([*prefix, 1, 1, 1, 1], 4), block_hashes([*prefix, 2, 2, 2, 2], 4)
    blocks.release(fill(blocks, first))
    blocks.release(fill(blocks, second))
    blocks.allocate(4)  # two free ones, then both tails
    assert len(blocks.match(first)) == 2


def test_the_least_recently_used_chain_goes_first() -> None:
    blocks = BlockManager(4, 4)
    first, second = block_hashes([1] * 8, 4), block_hashes([2] * 8, 4)
    held_first, held_second = fill(blocks, first), fill(blocks, second)
    blocks.release(held_first)
    blocks.release(held_second)
    blocks.acquire(blocks.match(first))
    blocks.release(held_first)
    blocks.allocate(2)
    assert blocks.match(first) == held_first and blocks.match(second) == []


def test_the_same_content_twice_has_one_canonical_block() -> None:
    blocks = BlockManager(4, 16)
    block_hash = block_hashes(range(16), 16)[0]
    first, second = blocks.allocate(2)
    assert blocks.publish(first, block_hash) == first
    assert blocks.publish(first, block_hash) == first
    assert blocks.publish(second, block_hash) == first
    assert blocks.num_cached == 1
    blocks.release([second])
    assert blocks.num_free == 3 and blocks.match([block_hash]) == [first]
    blocks.check({first: 1})


def test_without_prefix_caching_nothing_is_matched() -> None:
    blocks = BlockManager(4, 16, prefix_caching=False)
    hashes = block_hashes(range(16), 16)
    blocks.release(fill(blocks, hashes))
    assert blocks.match(hashes) == [] and blocks.num_cached == 0 and not blocks.drain_events()
    blocks.check({})


def test_a_generation_grows_before_a_block_can_be_overwritten() -> None:
    published: list[tuple[int, int]] = []
    blocks = BlockManager(2, 16, on_generation=lambda block, generation: published.append((block, generation)))
    held = fill(blocks, block_hashes(range(32), 16))
    seen = [blocks.generation(block) for block in held]
    blocks.release(held)
    blocks.acquire(held)  # revived: still the same content
    assert [blocks.generation(block) for block in held] == seen
    blocks.release(held)
    published.clear()
    blocks.allocate(1)
    assert published == [(held[1], seen[1] + 1)] and blocks.generation(held[1]) == seen[1] + 1


def test_pinned_blocks_are_not_reused_until_unpinned() -> None:
    """Case KV-09: a finished prefill's blocks are evicted only when its reader is done."""
    blocks = BlockManager(4, 16)
    held = fill(blocks, block_hashes(range(48), 16))
    blocks.pin("reader", held, expires_at_s=10.0)
    blocks.release(held)
    assert (blocks.num_pinned, blocks.num_used, blocks.num_free) == (3, 3, 1)
    with pytest.raises(OutOfBlocks):
        blocks.allocate(2)
    assert blocks.unpin("reader") and not blocks.unpin("reader")
    assert (blocks.num_pinned, blocks.num_used, blocks.num_free) == (0, 0, 4)
    blocks.check({})


def test_a_lease_expires_unless_renewed() -> None:
    blocks = BlockManager(4, 16)
    for name, expires_at_s in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        held = blocks.allocate(1)
        blocks.pin(name, held, expires_at_s)
        blocks.release(held)
    assert blocks.expire(0.5) == []
    assert blocks.renew("a", 0.5, 5.0)
    assert blocks.expire(2.0) == ["b"], "a lease is over at its very time"
    assert not blocks.renew("b", 2.0, 9.0)
    assert not blocks.renew("c", 3.0, 9.0), "expired, though not yet released"
    assert blocks.num_pinned == 2
    assert blocks.expire(3.0) == ["c"]
    assert blocks.expire(5.0) == ["a"]
    assert blocks.num_leases == 0 and blocks.num_used == 0
    blocks.check({})


def test_two_leases_on_one_block() -> None:
    blocks = BlockManager(2, 16)
    held = blocks.allocate(1)
    blocks.pin("a", held, 1.0)
    blocks.pin("b", held, 2.0)
    blocks.release(held)
    assert blocks.num_pinned == 1
    blocks.expire(1.0)
    assert blocks.num_pinned == 1 and blocks.num_used == 1
    blocks.expire(2.0)
    assert blocks.num_used == 0


def test_misuse_is_caught() -> None:
    blocks = BlockManager(2, 16)
    held = blocks.allocate(1)
    blocks.release(held)
    with pytest.raises(AssertionError):
        blocks.release(held)
    blocks = BlockManager(2, 16)
    with pytest.raises(AssertionError):
        blocks.acquire([0])
    with pytest.raises(AssertionError):
        blocks.publish(0, b"x")


def test_events_are_the_net_change() -> None:
    blocks = BlockManager(2, 4)
    first, second, third = (block_hashes([token] * 4, 4) for token in (1, 2, 3))
    blocks.release(fill(blocks, first))
    assert blocks.drain_events() == BlockEvents(stored=tuple(first))
    blocks.release(fill(blocks, second))
    blocks.release(fill(blocks, third))  # evicts first
    assert blocks.drain_events() == BlockEvents(removed=tuple(first), stored=(second[0], third[0]))
    blocks.release(fill(blocks, first))  # evicts second
    blocks.release(fill(blocks, second))  # evicts third
    blocks.release(fill(blocks, third))  # evicts first, which nobody heard of
    assert blocks.drain_events() == NO_EVENTS
    assert sorted(blocks.cached_hashes()) == sorted(second + third)


def test_clearing_the_cache_leaves_owners_alone() -> None:
    blocks = BlockManager(4, 4)
    used, idle = block_hashes([1] * 4, 4), block_hashes([2] * 4, 4)
    held = fill(blocks, used)
    blocks.release(fill(blocks, idle))
    blocks.drain_events()
    blocks.clear_cache()
    assert blocks.match(used) == blocks.match(idle) == []
    assert blocks.drain_events() == BlockEvents(cleared=True)
    blocks.clear_cache()
    assert not blocks.drain_events(), "nothing was there to clear"
    third = fill(blocks, idle)
    blocks.clear_cache()
    blocks.release(third)
    again = fill(blocks, idle)
    assert blocks.drain_events() == BlockEvents(cleared=True, stored=tuple(idle))
    blocks.release(again)
    assert blocks.num_used == 1 and blocks.num_free == 3
    blocks.check({held[0]: 1})
