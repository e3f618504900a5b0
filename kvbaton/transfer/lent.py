"""What a lender sends for one layer of a read: whole blocks as they lie in memory, or just the heads that are wanted.

Invariants: nothing outside of the blocks, heads and ranks of the read is sent, and a read of heads that its rank does
not hold gets nothing; whole blocks are not copied. Knows nothing about tickets or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbaton.kv.layout import KVLayout
from kvbaton.kv.rank_pools import AnyPool, RankPools
from kvbaton.kv.reshard import HeadRange
from kvbaton.kv.shared_pool import SharedPool
from kvbaton.transfer.ranges import runs
from kvbaton.transfer.wire import Read


def lent_pieces(pool: AnyPool, read: Read, layer: int, blocks: Sequence[int]) -> list[memoryview] | None:
    """``blocks`` of this layer in order; None: there are no such heads here."""
    found = _rank_pool(pool, read.rank)
    if found is None:
        return None
    own, first_head = found
    view = own.view()[layer]
    if not read.head_stop:
        return [
            memoryview(view[blocks[start] : blocks[start] + stop - start].reshape(-1)) for start, stop in runs(blocks)
        ]
    heads = HeadRange(read.head_start - first_head, read.head_stop - first_head)
    if not 0 <= heads.start < heads.stop <= own.layout.num_kv_heads:
        return None
    return [memoryview(_gathered(view, own.layout, heads, blocks).data).cast("B")]


def _rank_pool(pool: AnyPool, rank: int) -> tuple[SharedPool, int] | None:
    """With the head that it begins with."""
    if isinstance(pool, RankPools):
        return (pool.pools[rank], pool.heads[rank].start) if rank < len(pool.pools) else None
    return (pool, 0) if rank == 0 else None


def _gathered(view: np.ndarray, layout: KVLayout, heads: HeadRange, blocks: Sequence[int]) -> np.ndarray:
    """Blocks that have only these heads, in one array: a copy for each run of blocks, which numpy strides through."""
    vector_bytes = layout.head_dim * layout.itemsize
    wanted = slice(heads.start, heads.stop)
    if layout.order == "HND":
        parts = view.reshape(len(view), 2, layout.num_kv_heads, layout.block_size * vector_bytes)[:, :, wanted]
    else:
        parts = view.reshape(len(view), 2, layout.block_size, layout.num_kv_heads, vector_bytes)[:, :, :, wanted]
    gathered = np.empty((len(blocks), *parts.shape[1:]), dtype=np.uint8)
    for start, stop in runs(blocks):
        np.copyto(gathered[start:stop], parts[blocks[start] : blocks[start] + stop - start])
    return gathered
