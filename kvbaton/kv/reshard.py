"""From one paged KV layout to another: which bytes of a source layer go where in a destination layer.

Source and destination may differ in block size, order, block ids and in the KV heads they hold (tensor-parallel ranks).
A transfer is cut into boxes of head vectors, [run of blocks][K, V][head][token], each axis with one stride per side;
axes that are contiguous on both sides are absorbed into longer copies, so equal layouts with adjacent ids become one
copy.
Offsets are in bytes inside one layer, and the same for every layer: plan once per request, use for each layer.

Invariants: every byte of (token, K and V, shared head) is copied exactly once, and no other byte of the destination is
touched. Knows nothing about layers' progress, transport or the values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import lcm

import msgspec
import numpy as np

from kvbaton.kv.layout import KVLayout
from kvbaton.types import LocalError


class HeadRange(msgspec.Struct, frozen=True):
    """KV heads [start, stop) of the model."""

    start: int
    stop: int

    @property
    def num_heads(self) -> int:
        return max(0, self.stop - self.start)

    def overlap(self, other: HeadRange) -> HeadRange:
        return HeadRange(max(self.start, other.start), min(self.stop, other.stop))


class Copy(msgspec.Struct, frozen=True):
    """``num_bytes`` from ``src_offset`` to ``dst_offset``."""

    src_offset: int
    dst_offset: int
    num_bytes: int


class StridedCopy(msgspec.Struct, frozen=True):
    """``count`` copies of ``num_bytes``, each ``src_stride`` and ``dst_stride`` bytes after the one before."""

    src_offset: int
    dst_offset: int
    num_bytes: int
    src_stride: int
    dst_stride: int
    count: int


@dataclass(frozen=True)
class Side:
    """One pool of a transfer. ``block_ids[i]`` holds tokens [i, i + 1) x block size of the sequence."""

    layout: KVLayout  # its ``num_kv_heads`` are those of this rank
    block_ids: Sequence[int]
    first_head: int = 0  # of the model, where this rank's heads begin

    @property
    def heads(self) -> HeadRange:
        return HeadRange(self.first_head, self.first_head + self.layout.num_kv_heads)

    @property
    def vector_bytes(self) -> int:
        """One head of one token."""
        return self.layout.head_dim * self.layout.itemsize

    @property
    def half_bytes(self) -> int:
        """K or V of one block."""
        return self.layout.layer_block_bytes // 2

    @property
    def head_stride(self) -> int:
        return self.vector_bytes * (self.layout.block_size if self.layout.order == "HND" else 1)

    @property
    def token_stride(self) -> int:
        return self.vector_bytes * (1 if self.layout.order == "HND" else self.layout.num_kv_heads)


def head_ranges(num_kv_heads: int, tp_size: int) -> list[HeadRange]:
    """The KV heads of each tensor-parallel rank.

    Where they do not divide evenly, the first ranks have one more; with more ranks than heads, each head is held by
    several ranks, equally many.
    """
    if tp_size < 1 or (tp_size > num_kv_heads and tp_size % num_kv_heads):
        raise LocalError(
            f"{num_kv_heads} KV heads cannot be shared by {tp_size} ranks",
            field="tp_size",
            fix=f"use up to {num_kv_heads} ranks, or a multiple of {num_kv_heads}",
        )
    if tp_size >= num_kv_heads:
        firsts = [rank * num_kv_heads // tp_size for rank in range(tp_size)]
        return [HeadRange(first, first + 1) for first in firsts]
    return [HeadRange(part.start, part.stop) for part in even_ranges(num_kv_heads, tp_size)]


def even_ranges(total: int, num_parts: int) -> list[range]:
    """[0, total) in neighbouring parts that differ by one at most, the larger ones first."""
    per_part, rest = divmod(total, num_parts)
    starts = [part * per_part + min(part, rest) for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def ranks_to_read(wanted: HeadRange, sources: Sequence[HeadRange]) -> list[tuple[int, HeadRange]]:
    """Which source ranks hold ``wanted``, and what to read of each: every head once, even if several hold it."""
    parts = []
    position = wanted.start
    for rank, held in sorted(enumerate(sources), key=lambda entry: (entry[1].start, entry[0])):
        if held.start <= position < held.stop and position < wanted.stop:
            part = HeadRange(position, min(held.stop, wanted.stop))
            parts.append((rank, part))
            position = part.stop
    if position < wanted.stop:
        raise LocalError(f"no source rank holds KV head {position}", field="tp_size")
    return parts


def plan_copies(source: Side, destination: Side, start: int, stop: int) -> list[Copy | StridedCopy]:
    """Copies that bring tokens [start, stop) of the heads that both sides hold, in order of source offset."""
    _validate(source, destination, start, stop)
    heads = source.heads.overlap(destination.heads)
    if heads.num_heads == 0 or start >= stop:
        return []
    copies: list[Copy | StridedCopy] = []
    for box in _boxes(source, destination, heads, start, stop):
        copies.extend(_flatten(_collapse(box)))
    copies.sort(key=lambda copy: copy.src_offset)
    return copies


def num_copy_bytes(copies: Iterable[Copy | StridedCopy]) -> int:
    return sum(copy.num_bytes * (copy.count if isinstance(copy, StridedCopy) else 1) for copy in copies)


def run_copies(copies: Iterable[Copy | StridedCopy], source_layer: np.ndarray, destination_layer: np.ndarray) -> None:
    """Carry the copies out between two uint8 arrays, each one whole layer of its pool."""
    for copy in copies:
        if isinstance(copy, Copy):
            destination_layer[copy.dst_offset : copy.dst_offset + copy.num_bytes] = source_layer[
                copy.src_offset : copy.src_offset + copy.num_bytes
            ]
        else:
            shape = (copy.count, copy.num_bytes)
            pieces = _view(source_layer, copy.src_offset, shape, copy.src_stride)
            _view(destination_layer, copy.dst_offset, shape, copy.dst_stride)[:] = pieces


def _view(layer: np.ndarray, offset: int, shape: tuple[int, int], stride: int) -> np.ndarray:
    last = offset + (shape[0] - 1) * stride
    assert layer.dtype == np.uint8 and layer.ndim == 1 and layer.flags.c_contiguous
    assert min(offset, last) >= 0 and max(offset, last) + shape[1] <= layer.size, "a copy leaves its layer"
    return np.lib.stride_tricks.as_strided(layer[offset:], shape=shape, strides=(stride, 1))


# -- boxes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
    count: int
    src_stride: int
    dst_stride: int


@dataclass(frozen=True)
class _Box:
    """Pieces of ``num_bytes`` at every combination of the axes."""

    src_offset: int
    dst_offset: int
    num_bytes: int
    axes: tuple[_Axis, ...]


def _validate(source: Side, destination: Side, start: int, stop: int) -> None:
    for field in ("head_dim", "dtype"):
        ours, theirs = getattr(destination.layout, field), getattr(source.layout, field)
        if ours != theirs:
            raise LocalError(f"{field} differs: source {theirs}, destination {ours}", field=field)
    if start < 0:
        raise LocalError(f"the first token must not be negative, got {start}", field="start")
    for name, side in (("source", source), ("destination", destination)):
        if side.layout.order not in ("HND", "NHD"):
            raise LocalError(f"unknown {name} order {side.layout.order!r}", field="order", fix="use HND or NHD")
        num_held = len(side.block_ids) * side.layout.block_size
        if stop > num_held:
            raise LocalError(f"the {name} blocks hold {num_held} tokens, not {stop}", field="stop")


def _boxes(source: Side, destination: Side, heads: HeadRange, start: int, stop: int) -> Iterator[_Box]:
    """Pieces that lie in one block on each side, those of equal shape gathered along the sequence."""
    head_axis = _Axis(heads.num_heads, source.head_stride, destination.head_stride)
    half_axis = _Axis(2, source.half_bytes, destination.half_bytes)
    src_block_bytes, dst_block_bytes = source.layout.layer_block_bytes, destination.layout.layer_block_bytes
    src_head = (heads.start - source.first_head) * source.head_stride
    dst_head = (heads.start - destination.first_head) * destination.head_stride
    src_size, dst_size = source.layout.block_size, destination.layout.block_size
    period = lcm(src_size, dst_size)
    unit = (period // src_size, period // dst_size)  # ids between neighbours of one shape in adjacent blocks
    for (src_token, dst_token, num_tokens), blocks in _pieces(source, destination, start, stop).items():
        token_axis = _Axis(num_tokens, source.token_stride, destination.token_stride)
        src_inner = src_head + src_token * source.token_stride
        dst_inner = dst_head + dst_token * destination.token_stride
        for (src_block, dst_block), steps in _runs(blocks, unit):
            run_axes = (_Axis(count, src * src_block_bytes, dst * dst_block_bytes) for count, src, dst in steps)
            yield _Box(
                src_offset=src_block * src_block_bytes + src_inner,
                dst_offset=dst_block * dst_block_bytes + dst_inner,
                num_bytes=source.vector_bytes,
                axes=(token_axis, head_axis, half_axis, *run_axes),
            )


def _pieces(
    source: Side, destination: Side, start: int, stop: int
) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
    """(first token in source block, in destination block, tokens) -> the (source, destination) ids it occurs in."""
    src_size, dst_size = source.layout.block_size, destination.layout.block_size
    pieces: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    token = start
    while token < stop:
        src_index, src_token = divmod(token, src_size)
        dst_index, dst_token = divmod(token, dst_size)
        num_tokens = min(src_size - src_token, dst_size - dst_token, stop - token)
        ids = (source.block_ids[src_index], destination.block_ids[dst_index])
        pieces.setdefault((src_token, dst_token, num_tokens), []).append(ids)
        token += num_tokens
    return pieces


_Ids = tuple[int, int]
_Run = tuple[_Ids, list[tuple[int, int, int]]]  # first ids; axes of (count, source step, destination step) in blocks


def _runs(blocks: Sequence[_Ids], unit: _Ids) -> Iterator[_Run]:
    """Longest runs of adjacent blocks first, then equally long runs at equal distances taken together."""
    adjacent: list[tuple[_Ids, int]] = []
    for ids in blocks:
        if adjacent:
            first, count = adjacent[-1]
            if ids == (first[0] + count * unit[0], first[1] + count * unit[1]):
                adjacent[-1] = (first, count + 1)
                continue
        adjacent.append((ids, 1))
    index = 0
    while index < len(adjacent):
        first, length = adjacent[index]
        num_equal, step = 1, (0, 0)
        while index + num_equal < len(adjacent):
            previous, following = adjacent[index + num_equal - 1], adjacent[index + num_equal]
            next_step = (following[0][0] - previous[0][0], following[0][1] - previous[0][1])
            if following[1] != length or (num_equal > 1 and next_step != step):
                break
            num_equal, step = num_equal + 1, next_step
        yield first, [(length, *unit), (num_equal, *step)]
        index += num_equal


def _collapse(box: _Box) -> _Box:
    """Absorb axes that are contiguous on both sides, and join axes that continue one another."""
    num_bytes = box.num_bytes
    axes = [axis for axis in box.axes if axis.count > 1]
    changed = True
    while changed:
        changed = False
        for axis in axes:
            if axis.src_stride == axis.dst_stride == num_bytes:
                num_bytes *= axis.count
                axes.remove(axis)
                changed = True
                break
        for inner, outer in product(axes, axes):
            src_end, dst_end = inner.src_stride * inner.count, inner.dst_stride * inner.count
            if inner is not outer and (outer.src_stride, outer.dst_stride) == (src_end, dst_end):
                axes[axes.index(inner)] = _Axis(inner.count * outer.count, inner.src_stride, inner.dst_stride)
                axes.remove(outer)
                changed = True
                break
    return _Box(box.src_offset, box.dst_offset, num_bytes, tuple(axes))


def _flatten(box: _Box) -> Iterator[Copy | StridedCopy]:
    """The longest axis becomes the stride, the others are spelled out."""
    if not box.axes:
        yield Copy(box.src_offset, box.dst_offset, box.num_bytes)
        return
    *others, longest = sorted(box.axes, key=lambda axis: axis.count)
    for indices in product(*(range(axis.count) for axis in others)):
        src_offset = box.src_offset + sum(i * axis.src_stride for i, axis in zip(indices, others, strict=True))
        dst_offset = box.dst_offset + sum(i * axis.dst_stride for i, axis in zip(indices, others, strict=True))
        yield StridedCopy(src_offset, dst_offset, box.num_bytes, longest.src_stride, longest.dst_stride, longest.count)
