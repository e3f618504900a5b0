"""What was sent where before: matches, bounds, and agreement with a naive one."""

from __future__ import annotations

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
@given(st.lists(st.lists(st.integers(0, 1), max_size=40), max_size=20), st.lists(st.integers(0, 1), max_size=40))
def test_what_is_held_of_a_chain_is_a_prefix_of_it(recorded: list[list[int]], asked: list[int]) -> None:
    index = RoutingHistory(4, 6)
    for tokens in recorded:
        index.record("a", chain(tokens))
        assert index.num_blocks("a") <= 6
        assert index.matched_blocks("a", chain(tokens)) == min(6, len(chain(tokens))), "the last one is all there"
    hashes = chain(asked)
    depths = []
    for generation in index._held.get("a", ()):
        held = [h in generation for h in hashes]
        depths.append(held.index(False) if False in held else len(held))
        assert not any(held[depths[-1] :]), "a hole"
    assert index.matched_blocks("a", hashes) == max(depths, default=0)


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
