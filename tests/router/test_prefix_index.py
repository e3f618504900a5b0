"""The approximate prefix index: matches, bounds, and agreement with a naive one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.kv.blocks import block_hashes
from kvbaton.router.prefix_index import PrefixIndex


def chain(tokens: list[int], salt: str = "") -> list[bytes]:
    return block_hashes(tokens, 4, salt)


def test_longest_prefix_by_worker() -> None:
    index = PrefixIndex(block_tokens=4, max_blocks=100)
    index.record("a", chain(list(range(16))))
    assert index.matched_tokens("a", chain(list(range(16)))) == 16
    assert index.matched_tokens("a", chain([*range(8), 99, 98, 97, 96])) == 8
    assert index.matched_tokens("a", chain([99, *range(15)])) == 0
    assert index.matched_tokens("b", chain(list(range(16)))) == 0
    assert index.matched_tokens("a", chain(list(range(3)))) == 0
    assert index.matched_tokens("a", chain(list(range(16)), salt="tenant")) == 0


def test_a_restart_forgets() -> None:
    index = PrefixIndex(4, 100)
    index.record("a", chain(list(range(16))))
    index.forget("a")
    assert index.matched_tokens("a", chain(list(range(16)))) == 0 and index.num_blocks("a") == 0


def test_memory_is_bounded_and_what_was_used_last_stays() -> None:
    index = PrefixIndex(4, 8)
    for start in range(0, 1000, 16):
        index.record("a", chain(list(range(start, start + 16))))
        assert index.num_blocks("a") <= 8
    assert index.matched_tokens("a", chain(list(range(992, 1008)))) == 16
    assert index.matched_tokens("a", chain(list(range(16)))) == 0


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=24), max_size=12), st.lists(st.integers(0, 1), max_size=24))
def test_bisection_finds_what_a_walk_finds(recorded: list[list[int]], asked: list[int]) -> None:
    index = PrefixIndex(4, 10_000)
    held: set[bytes] = set()
    for tokens in recorded:
        index.record("a", chain(tokens))
        held.update(chain(tokens))
    walked = 0
    for block_hash in chain(asked):
        if block_hash not in held:
            break
        walked += 4
    assert index.matched_tokens("a", chain(asked)) == walked


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), max_size=40), max_size=20), st.lists(st.integers(0, 1), max_size=40))
def test_eviction_leaves_no_holes(recorded: list[list[int]], asked: list[int]) -> None:
    """Later blocks of a chain go first, so whatever is held of a chain is a prefix of it."""
    index = PrefixIndex(4, 6)
    for tokens in recorded:
        index.record("a", chain(tokens)[:6])
    hashes = chain(asked)
    held = [h in index._held.get("a", {}) for h in hashes]
    assert index.matched_tokens("a", hashes) == 4 * (held.index(False) if False in held else len(held))
