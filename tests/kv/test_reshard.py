"""Copies between layouts, against a plain gather and scatter of every (token, K or V, head)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.kv.layout import KVLayout
from kvbaton.kv.reshard import (
    Copy,
    HeadRange,
    Side,
    StridedCopy,
    head_ranges,
    num_copy_bytes,
    plan_copies,
    ranks_to_read,
    run_copies,
)
from kvbaton.types import LocalError

ORDERS = ("HND", "NHD")
BLOCK_SIZES = (8, 16, 24, 32)
UNTOUCHED = 255


def layout(block_size: int = 16, order: str = "HND", heads: int = 2, head_dim: int = 4, dtype: str = "bfloat16"):
    return KVLayout(
        num_layers=1, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, order=order
    )


def num_pool_blocks(side: Side) -> int:
    return max(side.block_ids, default=0) + 1


def as_tokens(side: Side, layer: np.ndarray) -> np.ndarray:
    """The sequence of one layer as [token][K, V][head][byte of the vector]."""
    size = side.layout.block_size
    inner = (side.layout.num_kv_heads, size) if side.layout.order == "HND" else (size, side.layout.num_kv_heads)
    blocks = layer.reshape(-1, 2, *inner, side.vector_bytes)[list(side.block_ids)]
    if side.layout.order == "HND":
        blocks = blocks.swapaxes(2, 3)  # [block][half][token][head][byte]
    return blocks.swapaxes(1, 2).reshape(-1, 2, side.layout.num_kv_heads, side.vector_bytes)


def expected_layer(source: Side, source_layer: np.ndarray, destination: Side, start: int, stop: int) -> np.ndarray:
    """Scatter token by token and head by head, the way the definition of a layout says."""
    tokens = as_tokens(source, source_layer)
    size = destination.layout.block_size
    inner = (
        (destination.layout.num_kv_heads, size)
        if destination.layout.order == "HND"
        else (size, destination.layout.num_kv_heads)
    )
    pool = np.full((num_pool_blocks(destination), 2, *inner, destination.vector_bytes), UNTOUCHED, dtype=np.uint8)
    shared = source.heads.overlap(destination.heads)
    for token in range(start, stop):
        block, slot = destination.block_ids[token // size], token % size
        for head in range(shared.start, shared.stop):
            vector = tokens[token, :, head - source.first_head]
            local = head - destination.first_head
            if destination.layout.order == "HND":
                pool[block, :, local, slot] = vector
            else:
                pool[block, :, slot, local] = vector
    return pool.reshape(-1)


def random_layer(side: Side, seed: int) -> np.ndarray:
    num_bytes = num_pool_blocks(side) * side.layout.layer_block_bytes
    return np.random.default_rng(seed).integers(0, UNTOUCHED, num_bytes, dtype=np.uint8)


def assert_copies_right(source: Side, destination: Side, start: int, stop: int, seed: int = 0) -> list:
    copies = plan_copies(source, destination, start, stop)
    source_layer = random_layer(source, seed)
    got = np.full(num_pool_blocks(destination) * destination.layout.layer_block_bytes, UNTOUCHED, dtype=np.uint8)
    run_copies(copies, source_layer, got)
    assert np.array_equal(got, expected_layer(source, source_layer, destination, start, stop))
    shared = source.heads.overlap(destination.heads).num_heads
    assert num_copy_bytes(copies) == max(0, stop - start) * 2 * shared * source.vector_bytes, "each byte exactly once"
    return copies


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Side, Side, int, int]:
    num_heads = draw(st.integers(1, 4))
    head_dim, dtype = draw(st.sampled_from([1, 4])), draw(st.sampled_from(["float8_e4m3", "bfloat16", "float32"]))
    num_tokens = draw(st.integers(0, 140))
    sides = []
    for _ in range(2):
        size = draw(st.sampled_from(BLOCK_SIZES))
        first = draw(st.integers(0, num_heads - 1))
        held = draw(st.integers(1, num_heads - first))
        num_blocks = -(-num_tokens // size)
        if draw(st.booleans()):
            first_id = draw(st.integers(0, 5))
            ids = list(range(first_id, first_id + num_blocks))
        else:
            ids = draw(st.permutations(range(num_blocks + 4)))[:num_blocks]
        sides.append(Side(layout(size, draw(st.sampled_from(ORDERS)), held, head_dim, dtype), ids, first))
    start = draw(st.integers(0, num_tokens))
    return sides[0], sides[1], start, draw(st.integers(start, num_tokens))


@given(transfers(), st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_any_transfer_equals_gather_and_scatter(transfer: tuple[Side, Side, int, int], seed: int) -> None:
    assert_copies_right(*transfer, seed=seed)


@pytest.mark.parametrize("src_order", ORDERS)
@pytest.mark.parametrize("dst_order", ORDERS)
@pytest.mark.parametrize("src_size", BLOCK_SIZES)
@pytest.mark.parametrize("dst_size", BLOCK_SIZES)
def test_every_pair_of_order_and_block_size(src_order: str, dst_order: str, src_size: int, dst_size: int) -> None:
    source = Side(layout(src_size, src_order), list(range(3, 3 + -(-101 // src_size))))
    destination = Side(layout(dst_size, dst_order), list(range(-(-101 // dst_size)))[::-1])
    for start in (0, 16, 100):
        assert_copies_right(source, destination, start, 101)


@pytest.mark.parametrize("prefill_tp, decode_tp", [(2, 1), (1, 2), (4, 2), (2, 4), (8, 2), (2, 8), (3, 3)])
@pytest.mark.parametrize("orders", [("NHD", "HND"), ("HND", "NHD"), ("HND", "HND"), ("NHD", "NHD")])
def test_ranks_are_split_and_joined(prefill_tp: int, decode_tp: int, orders: tuple[str, str]) -> None:
    """Case KV-01: every decode rank ends up with exactly its heads of every token."""
    num_heads, num_tokens = (3, 37) if prefill_tp == 3 else (4, 37)
    whole = Side(layout(16, "HND", num_heads), [2, 0, 1])
    whole_layer = random_layer(whole, 7)
    sources, source_layers = [], []
    for heads in head_ranges(num_heads, prefill_tp):
        rank = Side(layout(16, orders[0], heads.num_heads), [0, 2, 1], heads.start)
        sources.append(rank)
        source_layers.append(expected_layer(whole, whole_layer, rank, 0, num_tokens))
    for heads in head_ranges(num_heads, decode_tp):
        destination = Side(layout(32, orders[1], heads.num_heads), [1, 0], heads.start)
        got = np.full(2 * destination.layout.layer_block_bytes, UNTOUCHED, dtype=np.uint8)
        for rank, _ in ranks_to_read(heads, [source.heads for source in sources]):
            run_copies(plan_copies(sources[rank], destination, 0, num_tokens), source_layers[rank], got)
        assert np.array_equal(got, expected_layer(whole, whole_layer, destination, 0, num_tokens))


def test_equal_layouts_with_adjacent_ids_are_one_copy() -> None:
    side = layout()
    copies = plan_copies(Side(side, [5, 6, 7, 8]), Side(side, [1, 2, 3, 4]), 0, 64)
    block = side.layer_block_bytes
    assert copies == [Copy(5 * block, block, 4 * block)]


def test_equal_layouts_merge_where_both_sides_are_adjacent() -> None:
    side = layout()
    block = side.layer_block_bytes
    copies = plan_copies(Side(side, [0, 1, 2, 9]), Side(side, [4, 5, 0, 1]), 0, 64)
    assert copies == [Copy(0, 4 * block, 2 * block), StridedCopy(2 * block, 0, block, 7 * block, block, 2)]


def test_a_partial_last_block_copies_only_what_counts() -> None:
    side = layout(16, "NHD", heads=2, head_dim=4, dtype="bfloat16")
    copies = plan_copies(Side(side, [0, 1]), Side(side, [3, 4]), 0, 21)
    block, half, five_tokens = side.layer_block_bytes, side.layer_block_bytes // 2, 5 * 2 * 4 * 2
    assert copies == [Copy(0, 3 * block, block), StridedCopy(block, 4 * block, five_tokens, half, half, 2)]


def test_a_known_prefix_is_skipped() -> None:
    """Case KV-05: decode has 160 of 200 tokens; three blocks move, mapped by position and not by index in the rest."""
    side = layout()
    source, destination = Side(side, list(range(13))), Side(side, [*range(20, 30), 3, 4, 5])
    copies = assert_copies_right(source, destination, 160, 200)
    block = side.layer_block_bytes
    assert copies[0] == Copy(10 * block, 3 * block, 2 * block)
    assert num_copy_bytes(copies) == 40 * side.token_bytes


def test_smaller_blocks_into_larger_ones_use_long_strides() -> None:
    """16 into 32, HND: one piece per head, half and parity, however long the sequence is."""
    source, destination = Side(layout(16), list(range(64))), Side(layout(32), list(range(32)))
    copies = assert_copies_right(source, destination, 0, 1024)
    assert len(copies) == 2 * 2 * 2 and all(isinstance(copy, StridedCopy) and copy.count == 32 for copy in copies)


def test_nothing_to_move_is_no_copy() -> None:
    assert plan_copies(Side(layout(), [0]), Side(layout(), [1]), 16, 16) == []
    assert plan_copies(Side(layout(heads=1), [0], 0), Side(layout(heads=1), [1], 1), 0, 16) == []


@pytest.mark.parametrize(
    "field, source, destination, start, stop",
    [
        ("dtype", Side(layout(dtype="float32"), [0]), Side(layout(), [0]), 0, 8),
        ("head_dim", Side(layout(head_dim=8), [0]), Side(layout(), [0]), 0, 8),
        ("stop", Side(layout(), [0]), Side(layout(), [0, 1]), 0, 17),
        ("stop", Side(layout(), [0, 1]), Side(layout(), [0]), 0, 17),
        ("start", Side(layout(), [0]), Side(layout(), [0]), -1, 8),
        ("order", Side(layout(order="DNH"), [0]), Side(layout(), [0]), 0, 8),
    ],
)
def test_what_cannot_be_copied_is_refused_by_name(
    field: str, source: Side, destination: Side, start: int, stop: int
) -> None:
    with pytest.raises(LocalError) as caught:
        plan_copies(source, destination, start, stop)
    assert caught.value.field == field


def test_head_ranges() -> None:
    assert head_ranges(4, 2) == [HeadRange(0, 2), HeadRange(2, 4)]
    assert head_ranges(2, 4) == [HeadRange(0, 1), HeadRange(0, 1), HeadRange(1, 2), HeadRange(1, 2)]
    assert head_ranges(3, 2) == [HeadRange(0, 2), HeadRange(2, 3)]
    assert [held.num_heads for held in head_ranges(8, 3)] == [3, 3, 2]
    for tp_size in (0, 4, 5):
        with pytest.raises(LocalError, match="3 KV heads"):
            head_ranges(3, tp_size)
    assert ranks_to_read(HeadRange(1, 4), head_ranges(4, 2)) == [(0, HeadRange(1, 2)), (1, HeadRange(2, 4))]
    with pytest.raises(LocalError):
        ranks_to_read(HeadRange(0, 4), [HeadRange(0, 2), HeadRange(3, 4)])
