"""Where what is read of an offer goes in our own pool.

    offered blocks   | 0 | 1 | 2 | 3 |      (the peer's block size)
    tokens           0 .............. n     have_tokens of them are here already
    our blocks       |  0  |  1  |  2 |     (ours)

Where several ranks share the KV heads, on either side, a placement is of one rank here and one rank there, and carries
the heads that both hold.

Invariants: no byte outside of tokens [have_tokens, num_tokens), rounded up to our last block, is written; with equal
layouts and heads whole blocks move as they are, else kv/reshard says which bytes go where. Knows nothing about
transports, leases or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbaton.kv.layout import KVLayout
from kvbaton.kv.reshard import Copy, HeadRange, Side, StridedCopy, plan_copies, run_copies
from kvbaton.kv.shared_pool import SharedPool
from kvbaton.transfer.ranges import Region, runs
from kvbaton.types import LocalError

MIN_DIRECT_BYTES = 64 * 1024  # shorter pieces than this cost more in calls than one more copy does


@dataclass(frozen=True)
class Shard:
    """Which rank of the peer is read, and where the heads of either side begin in the model."""

    rank: int = 0
    source_head: int = 0
    own_head: int = 0
    asked: HeadRange | None = None  # the only heads that the source is asked for; None: all that its rank has
    part: int = 0  # of the request: each is read once


WHOLE = Shard()


class Placement:
    """For one request: ``block_ids`` of ``pool`` hold its tokens from the first on."""

    def __init__(
        self,
        pool: SharedPool,
        block_ids: Sequence[int],
        source: KVLayout,
        have_tokens: int,
        num_tokens: int,
        shard: Shard = WHOLE,
    ) -> None:
        """``source``: the layout of what is read: of the rank's pool, or of the heads that are asked for."""
        block_size = pool.layout.block_size
        if len(block_ids) * block_size < num_tokens:
            raise LocalError(f"{len(block_ids)} blocks do not hold {num_tokens} tokens", field="dst_block_ids")
        if any(not 0 <= block < pool.num_blocks for block in block_ids) or len(set(block_ids)) != len(block_ids):
            raise LocalError("destination blocks repeat, or are not in the pool", field="dst_block_ids")
        if have_tokens % block_size and have_tokens < num_tokens:
            raise LocalError(f"{have_tokens} is not a multiple of the block size {block_size}", field="have_tokens")
        self.shard = shard
        self._pool = pool
        self._block_ids = tuple(block_ids)
        self._source = source
        self._have_tokens = have_tokens
        self._num_tokens = num_tokens
        self._equal = source == pool.layout and shard.source_head == shard.own_head
        self._view = pool.view()
        held, wanted = Side(source, (), shard.source_head).heads, Side(pool.layout, (), shard.own_head).heads
        head_bytes = source.layer_block_bytes // source.num_kv_heads
        self.source_block_bytes = head_bytes * held.overlap(wanted).num_heads  # of one block in one layer
        self._copies: dict[tuple[int, int], list[Copy | StridedCopy]] = {}

    def copy_region(self, source: SharedPool, source_ids: Sequence[int], region: Region) -> None:
        """Straight from a mapped pool. Blocks; numpy lets go of the interpreter lock while it copies."""
        source_view = source.view()
        layers = slice(region.layer_start, region.layer_stop)
        if self._equal:
            ids = source_ids[region.block_start : region.block_stop]
            own = self._block_ids[region.block_start : region.block_stop]
            for start, stop in runs(ids, own):
                length = stop - start
                np.copyto(
                    self._view[layers, own[start] : own[start] + length],
                    source_view[layers, ids[start] : ids[start] + length],
                )
            return
        copies = self._plan(source_ids, region.block_start, region.block_stop)
        for layer in range(region.layer_start, region.layer_stop):
            run_copies(copies, source_view[layer].reshape(-1), self._view[layer].reshape(-1))

    def own_blocks(self, block_start: int, block_stop: int) -> Sequence[int] | None:
        """Our blocks for these offered blocks, one for one; None when layouts differ and bytes go through ``place``."""
        return self._block_ids[block_start:block_stop] if self._equal else None

    def direct_views(self, layer: int, block_start: int, block_stop: int) -> list[memoryview] | None:
        """Our own memory for these offered blocks, in order; None when they have to go through ``place``."""
        if not self._equal:
            return None
        own = self._block_ids[block_start:block_stop]
        pieces = list(runs(own))
        size = self._pool.layout.layer_block_bytes
        if len(pieces) > 1 and len(own) * size < len(pieces) * MIN_DIRECT_BYTES:
            return None
        layer_view = self._view[layer]
        return [memoryview(layer_view[own[start] : own[start] + stop - start].reshape(-1)) for start, stop in pieces]

    def place(self, layer: int, block_start: int, block_stop: int, payload: memoryview) -> None:
        """From a buffer that holds these offered blocks of one layer in order."""
        content = np.frombuffer(payload, dtype=np.uint8)
        if self._equal:
            own = list(self._block_ids[block_start:block_stop])
            self._view[layer, own] = content.reshape(len(own), -1)
            return
        # The buffer is a pool in which offered block i is block i - block_start; no earlier one is touched.
        compact = range(-block_start, block_stop - block_start)
        run_copies(self._plan(compact, block_start, block_stop), content, self._view[layer].reshape(-1))

    def _plan(self, source_ids: Sequence[int], block_start: int, block_stop: int) -> list[Copy | StridedCopy]:
        """The same for every layer, so made once. One placement sees one way of naming source blocks."""
        key = (block_start, block_stop)
        if key not in self._copies:
            size = self._source.block_size
            self._copies[key] = plan_copies(
                Side(self._source, source_ids, self.shard.source_head),
                Side(self._pool.layout, self._block_ids, self.shard.own_head),
                max(self._have_tokens, block_start * size),
                min(self._num_tokens, block_stop * size),
            )
        return self._copies[key]


class ShardedPlacement:
    """Where the parts of what is read go: one placement for each pair of ranks that share heads."""

    def __init__(self, parts: Sequence[Placement]) -> None:
        self.parts = tuple(parts)
        self.source_block_bytes = sum(part.source_block_bytes for part in parts)
