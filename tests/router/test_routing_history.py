"""What was sent where before: matches, bounds, and agreement with a naive one."""

from __future__ import annotations

from collections import OrderedDict
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.kv.blocks import block_hashes
from kvbaton.router.routing_history import RoutingHistory


def chain(tokens: list[int], salt: str = "") -> list[bytes]:
    return block_hashes(tokens, 4, salt)


def test_longest_prefix_by_worker() -> None:
    index = RoutingHistory(block_tokens=4, max_blocks=100)
    index.record("a", chain(list(range(16))))
    assert index.matched_blocks("a", chain(list(range(16)))) == 4
    assert index.matched_blocks("a", chain([*range(8), 99, 98, 97, 96])) == 2
    assert index.matched_blocks("a", chain([99, *range(15)])) == 0
    assert index.matched_blocks("b", chain(list(range(16)))) == 0
    assert index.matched_blocks("a", chain(list(range(3)))) == 0
    assert index.matched_blocks("a", chain(list(range(16)), salt="tenant")) == 0


def test_a_restart_forgets() -> None:
    index = RoutingHistory(4, 100)
    index.record("a", chain(list(range(16))))
    index.forget("a")
    assert index.matched_blocks("a", chain(list(range(16)))) == 0 and index.num_blocks("a") == 0


def test_memory_is_bounded_and_what_was_used_last_stays() -> None:
    index = RoutingHistory(4, 8)
    for start in range(0, 1000, 16):
        index.record("a", chain(list(range(start, start + 16))))
        assert index.num_blocks("a") <= 8
    assert index.matched_blocks("a", chain(list(range(992, 1008)))) == 4
    assert index.matched_blocks("a", chain(list(range(16)))) == 0


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=24), max_size=12), st.lists(st.integers(0, 1), max_size=24))
def test_bisection_finds_what_a_walk_finds(recorded: list[list[int]], asked: list[int]) -> None:
    index = RoutingHistory(4, 10_000)
    held: set[bytes] = set()
    for tokens in recorded:
        index.record("a", chain(tokens))
        held.update(chain(tokens))
    walked = 0
    for block_hash in chain(asked):
        if block_hash not in held:
            break
        walked += 1
    assert index.matched_blocks("a", chain(asked)) == walked


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=60), st.integers(0, 1)), max_size=20),
    st.lists(st.integers(0, 1), max_size=40),
    st.integers(1, 24),
)
def test_what_is_held_of_a_chain_is_a_prefix_of_it(
    recorded: list[tuple[list[int], int]], asked: list[int], limit: int
) -> None:
    index = RoutingHistory(4, limit)
    for tokens, shrinks in recorded:
        index.record("a", chain(tokens))
        assert index.num_blocks("a") <= limit
        assert index.matched_blocks("a", chain(tokens)) == min(limit, len(chain(tokens))), "the last one is all there"
        if shrinks:
            limit = max(1, limit - 1)
            index.limit("a", 4 * limit)
            assert index.num_blocks("a") <= limit
    generations = index._held.get("a", [])
    assert len(set().union(*generations)) == index.num_blocks("a"), "a block counts once"
    held = [any(h in generation for generation in generations) for h in chain(asked)]
    depth = held.index(False) if False in held else len(held)
    assert not any(held[depth:]), "a hole"
    assert index.matched_blocks("a", chain(asked)) == depth


def test_a_size_that_makes_no_sense_is_none() -> None:
    index = RoutingHistory(4, 100)
    for nonsense in (-(2**31), -1, 0, 3):
        index.record("a", chain(list(range(16))))
        index.limit("a", nonsense)
        assert index.matched_blocks("a", chain(list(range(16)))) == 4


def test_nothing_new_costs_nothing() -> None:
    """A prompt shorter than a block, or one that is there, pushes nobody out."""
    index = RoutingHistory(4, 1000)
    others, long = [chain([n] * 400) for n in range(3)], chain([9] * 2400)
    for each in (*others, long):
        index.record("a", each)
    for each in (long, [], long, chain([1, 2, 3])):
        index.record("a", each)
    assert [index.matched_blocks("a", each) for each in (*others, long)] == [100, 100, 100, 600]


def test_little_is_lost_against_evicting_block_by_block() -> None:
    rng = Random(1)
    chains = [[rng.randbytes(16) for _ in range(rng.randint(20, 300))] for _ in range(20)]
    index, lru, ours, best = RoutingHistory(4, 1000), OrderedDict[bytes, None](), 0, 0
    for each in rng.choices(chains, [1 / (n + 1) for n in range(20)], k=1000):
        ours += index.matched_blocks("a", each)
        best += next((n for n, block in enumerate(each) if block not in lru), len(each))
        index.record("a", each)
        for block in reversed(each):
            lru[block] = None
            lru.move_to_end(block)
        for _ in range(len(lru) - 1000):
            lru.popitem(last=False)
    assert ours > 0.9 * best > 0


def test_what_is_met_again_stays() -> None:
    index = RoutingHistory(4, 64)
    hot = chain([7] * 32)
    for start in range(1000, 9000, 16):
        index.record("a", chain(list(range(start, start + 16))))
        index.record("a", hot)
        assert index.matched_blocks("a", hot) == 8


def test_a_small_cache_is_not_credited_with_more_than_it_holds() -> None:
    """RT-12: under eviction the oldest prefixes are gone at the worker, so they are gone here."""
    index = RoutingHistory(4, 100)
    index.limit("a", cache_tokens=32)
    for start in range(0, 160, 16):
        index.record("a", chain(list(range(start, start + 16))))
    assert index.num_blocks("a") == 8
    assert index.matched_blocks("a", chain(list(range(16)))) == 0
    assert index.matched_blocks("a", chain(list(range(144, 160)))) == 4
