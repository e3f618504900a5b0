"""The exact index: lookups against a naive one, expectations, trust, memory, forgetting."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.kv.blocks import BlockEvents, block_hashes
from kvbaton.router.kv_index import KVIndex
from kvbaton.router.prefix_index import PrefixIndex, PromptChains

BLOCK = 4


def chain(tokens: list[int], block: int = BLOCK) -> tuple[bytes, ...]:
    return tuple(block_hashes(tokens, block))


def fresh(index: KVIndex, worker: str, block: int = BLOCK) -> None:
    index.join(worker, block)
    index.end_round(worker, 0)


def stored(*hashes: bytes) -> BlockEvents:
    return BlockEvents(stored=hashes)


def naive(held: set[bytes], hashes: tuple[bytes, ...]) -> int:
    depth = 0
    while depth < len(hashes) and hashes[depth] in held:
        depth += 1
    return depth


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 40), st.integers(0, 3)), max_size=20), st.data())
def test_one_walk_finds_what_a_walk_for_each_worker_finds(
    parts: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """Holes included: what is held behind one is of no use, and is not counted."""
    long = chain([n // 8 for n in range(40 * BLOCK)])
    index = KVIndex(10_000)
    held: dict[str, set[bytes]] = {}
    for worker, stop, step in parts:
        if worker not in held:
            fresh(index, worker)
        part = long[0 : stop : step + 1]
        index.apply(worker, stored(*[name for name in part if name not in held.get(worker, set())]))
        held.setdefault(worker, set()).update(part)
    asked = long[: data.draw(st.integers(0, len(long)))]
    expected = {worker: naive(names, asked) for worker, names in held.items()}
    assert index.matched(asked, BLOCK) == {worker: depth for worker, depth in expected.items() if depth}
    index.check()


def test_chains_longer_than_one_part() -> None:
    index = KVIndex(100_000)
    long = chain([n % 251 for n in range(9000 * BLOCK)])
    ends = (1, 31, 32, 33, 511, 512, 513, 527, 528, 529, 540, 541, 4444, 8976, 8977, 8999, 9000)
    depths = {f"w{end}": end for end in ends}
    for worker, depth in depths.items():
        fresh(index, worker)
        index.apply(worker, stored(*long[:depth]))
    for length in (9000, 8990, 4443, 541, 528, 512, 40):
        assert index.matched(long[:length], BLOCK) == {name: min(end, length) for name, end in depths.items()}
    assert index.num_hashes == 9000


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 2000), min_size=1, max_size=12), st.integers(0, 2000))
def test_any_ends_are_found_whatever_lies_between(ends: list[int], length: int) -> None:
    index = KVIndex(100_000)
    long = chain([n % 7 for n in range(2000 * BLOCK)])
    for number, end in enumerate(ends):
        fresh(index, str(number))
        index.apply(str(number), stored(*long[:end]))
    expected = {str(number): min(end, length) for number, end in enumerate(ends) if min(end, length)}
    assert index.matched(long[:length], BLOCK) == expected


def test_workers_of_different_block_sizes_each_match_their_own_chains() -> None:
    tokens = list(range(64))
    index = PrefixIndex(32, 100)
    index.heard_of("small", "1", 4, True, 1000)
    index.heard_of("large", "1", 16, True, 1000)
    index.heard_of("silent", "1", 16, False, 1000)
    index.exact.apply("small", stored(*chain(tokens[:20], 4)))
    index.exact.apply("large", stored(*chain(tokens, 16)))
    prompts = PromptChains([tokens])
    index.record("silent", prompts)
    found = index.cached_tokens(prompts, ["small", "large", "silent", "unknown"])
    assert found == {"small": 20, "large": 48, "silent": 32, "unknown": 0}, "the last token is always computed"
    assert index.chain_sizes() == {4, 16, 32}
    two = PromptChains([tokens, tokens[:20]])
    assert index.cached_tokens(two, ["small"]) == {"small": 20 + 16}


def test_what_is_under_way_counts_until_the_events_of_a_later_round_are_in() -> None:
    index = KVIndex(1000)
    fresh(index, "a")
    hashes = chain(list(range(40)))
    index.apply("a", stored(*hashes[:2]))
    first, second = index.expect("a", hashes), index.expect("a", hashes)
    assert index.matched(hashes, BLOCK) == {"a": 10}
    under_way = index.begin_round("a")
    first.settle()
    index.end_round("a", under_way)  # began before the end: its answer may not know
    assert index.matched(hashes, BLOCK) == {"a": 10}
    second.settle()
    second.settle()  # on two ways out: counts once
    index.end_round("a", index.begin_round("a"))
    assert index.matched(hashes, BLOCK) == {"a": 2}, "it was never stored after all"
    index.check()


def test_an_expectation_of_a_dead_life_means_nothing() -> None:
    index = KVIndex(1000)
    fresh(index, "a")
    hashes = chain(list(range(40)))
    expected = index.expect("a", hashes)
    fresh(index, "a")  # it restarted
    assert index.matched(hashes, BLOCK) == {}
    again = index.expect("a", hashes)
    expected.settle()
    index.end_round("a", index.begin_round("a"))
    assert index.matched(hashes, BLOCK) == {"a": 10}, "that of the new life still does"
    again.settle()
    index.end_round("a", index.begin_round("a"))
    assert index.matched(hashes, BLOCK) == {}
    index.check()


def test_without_events_what_is_sent_there_counts_until_a_snapshot_sets_it_right() -> None:
    """RT-06: the event channel breaks while the workers are healthy; what was known stays of use, and grows."""
    index = KVIndex(1000)
    fresh(index, "a")
    old, new = chain(list(range(40))), chain(list(range(100, 140)))
    index.apply("a", stored(*old))
    index.used("a", new)
    assert index.matched(new, BLOCK) == {}, "while events come, only they count"
    index.lost("a")
    index.used("a", new)
    assert index.matched(new, BLOCK) == index.matched(old, BLOCK) == {"a": 10}
    assert index.needs_snapshot("a")
    snapshot = index.stage("a")
    snapshot.add(new[:5])
    assert index.matched(old, BLOCK) == {"a": 10}, "until it is complete the old knowledge stands"
    snapshot.commit()
    index.end_round("a", index.begin_round("a"))
    assert index.matched(new, BLOCK) == {"a": 5} and index.matched(old, BLOCK) == {}
    assert not index.needs_snapshot("a") and index.trust("a") == "fresh"
    index.check()


def test_a_snapshot_that_is_cut_or_outlived_leaves_nothing() -> None:
    index = KVIndex(1000)
    fresh(index, "a")
    hashes = chain(list(range(40)))
    index.apply("a", stored(*hashes[:1]))
    cut = index.stage("a")
    cut.add(hashes)
    cut.discard()
    late = index.stage("a")
    late.add(hashes)
    fresh(index, "a")
    late.commit()
    assert index.matched(hashes, BLOCK) == {} and index.num_blocks("a") == 0
    index.check()


def test_memory_is_bounded_and_heads_of_used_chains_go_last() -> None:
    index = KVIndex(64)
    chains = [chain([seed] * 40) for seed in range(20)]
    for worker in ("a", "b"):
        fresh(index, worker)
    for number, each in enumerate(chains):
        index.apply("a", stored(*each))
        index.apply("b", stored(*each[:5]))
        index.used("a", chains[0])
        index.check()
        assert index.num_hashes <= 64
        assert index.matched(chains[0], BLOCK)["a"] == 10, f"used all the time, dropped at {number}"
    assert index.num_dropped == 20 * 10 - 64
    assert index.matched(chains[1], BLOCK) == {}
    for each in chains:  # of chains that were cut, the head was kept
        assert all(depth == naive(index.held(name), each) for name, depth in index.matched(each, BLOCK).items())


def test_bits_are_used_again_however_often_workers_come_and_go() -> None:
    index = KVIndex(20_000)
    rng = Random(3)
    for life in range(200):
        worker = f"w{life % 5}"
        fresh(index, worker)
        hashes = chain([rng.randrange(50) for _ in range(400)])
        index.apply(worker, stored(*hashes))
        assert index.held(worker) == set(hashes)
        if life % 3 == 0:
            index.apply(worker, BlockEvents(cleared=True, stored=hashes[:3]))
            assert index.held(worker) == set(hashes[:3])
        index.check()
    assert index._num_bits < 40
    for number in range(5):
        index.forget(f"w{number}")
    assert index.matched(hashes, BLOCK) == {}
