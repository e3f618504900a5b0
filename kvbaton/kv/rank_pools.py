"""The pools of a worker whose KV heads are shared by several ranks: one pool for each rank, all with the same blocks.

    block 7 of the worker  =  block 7 of rank 0 | block 7 of rank 1 | ...        heads [first, first + n) of each

Invariants: every rank's pool has the same number of blocks of the same size, and a block has the same generation in all
of them; ``layout`` is that of the whole model, as if one rank held every head once. The process that made the pools
owns them all. Knows nothing about who computes into them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvbaton.kv.layout import KVLayout
from kvbaton.kv.reshard import HeadRange
from kvbaton.kv.shared_pool import SharedPool, segment_name


def rank_layout(whole: KVLayout, heads: HeadRange) -> KVLayout:
    """Of the pool of a rank that holds these heads."""
    return msgspec.structs.replace(whole, num_kv_heads=heads.num_heads)


class RankPools:
    """Where it stands for a ``SharedPool``, it offers what can be said of all ranks at once."""

    def __init__(self, whole: KVLayout, pools: Sequence[SharedPool], heads: Sequence[HeadRange], lent: bool) -> None:
        """``lent``: whether peers are told the names."""
        assert len(pools) == len(heads) > 0
        for pool, held in zip(pools, heads, strict=True):
            assert pool.layout == rank_layout(whole, held) and pool.num_blocks == pools[0].num_blocks
        self.layout = whole
        self.pools = tuple(pools)
        self.heads = tuple(heads)
        self.num_blocks = pools[0].num_blocks
        self.incarnation = pools[0].incarnation
        self.lent = lent

    @classmethod
    def create(
        cls, whole: KVLayout, num_blocks: int, heads: Sequence[HeadRange], incarnation: str, lent: bool = True
    ) -> RankPools:
        """Named segments that this process owns. LocalError when memory is short; then nothing is left of them."""
        pools: list[SharedPool] = []
        try:
            for rank, held in enumerate(heads):
                name = segment_name(incarnation, rank)
                pools.append(SharedPool.create(rank_layout(whole, held), num_blocks, name, incarnation))
        except BaseException:
            for pool in pools:
                pool.unlink()
                pool.close()
            raise
        return cls(whole, pools, heads, lent)

    @property
    def name(self) -> str | None:
        """As peers may learn it."""
        return self.pools[0].name if self.lent else None

    @property
    def generations(self) -> np.ndarray:
        return self.pools[0].generations

    def publish_generation(self, block: int, generation: int) -> None:
        """In every rank's pool, before anybody can overwrite the block in any of them."""
        for pool in self.pools:
            pool.generations[block] = generation

    def unlink(self) -> None:
        for pool in self.pools:
            pool.unlink()

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


AnyPool = SharedPool | RankPools
