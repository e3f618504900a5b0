"""Reading a peer's pool on the same host: map its segment, copy, and make sure that it was still what was offered.

Invariants: the peer's memory is mapped read-only; a copy counts only if every block it touched has, after its last byte
was read, the generation it was offered with (the peer changes the generation before it reuses a block); a copy that was
begun runs to its end, so it is short (``max_copy_bytes``) and its blocks are not released before.

Knows nothing about the control connection.
"""

from __future__ import annotations

from concurrent.futures import Executor

import msgspec
import numpy as np

from kvbaton.kv.layout import KVLayout
from kvbaton.kv.shared_pool import SharedPool
from kvbaton.transfer.copying import CopyingSource, OnCopied, require_unchanged
from kvbaton.transfer.errors import PeerRefused
from kvbaton.transfer.placement import Placement, ShardedPlacement
from kvbaton.transfer.ranges import Region
from kvbaton.transfer.wire import Identity, Offer


class ShmSource(CopyingSource):
    """One peer's pool, or those of its ranks. ``executor``: threads to copy in, shared by all peers."""

    def __init__(self, peer: Identity, executor: Executor) -> None:
        super().__init__(executor, "copying out of shared memory failed")
        self._pools: list[SharedPool] = []
        try:
            for name, layout in _segments(peer):
                self._attach(peer, name, layout)
        except BaseException:
            self._end()
            raise

    def _attach(self, peer: Identity, name: str | None, layout: KVLayout) -> None:
        if name is None:
            raise PeerRefused(f"peer {peer.incarnation} does not name the pool of each rank")
        self._pools.append(SharedPool.attach(name))
        pool = self._pools[-1]
        if (pool.layout, pool.num_blocks, pool.incarnation) != (layout, peer.num_blocks, peer.incarnation):
            raise PeerRefused(f"shared memory {name} is not the pool of peer {peer.incarnation}")

    def _end(self) -> None:
        for pool in self._pools:
            pool.close()

    def _copy(self, offer: Offer, region: Region, placement: Placement) -> None:
        _copy_from(self._pools[0], offer, region, placement)

    def start_copies(self, offer: Offer, region: Region, placement: ShardedPlacement, on_copied: OnCopied) -> None:
        """All parts of a region, as one copy."""
        self._run(on_copied, self._copy_parts, offer, region, placement)

    def _copy_parts(self, offer: Offer, region: Region, placement: ShardedPlacement) -> None:
        for part in placement.parts:
            _copy_from(self._pools[part.shard.rank], offer, region, part)


def _segments(peer: Identity) -> list[tuple[str | None, KVLayout]]:
    """Name and layout of each pool."""
    if not peer.ranks:
        return [(peer.shm_name, peer.layout)]
    return [(rank.shm_name, msgspec.structs.replace(peer.layout, num_kv_heads=rank.num_heads)) for rank in peer.ranks]


def _copy_from(pool: SharedPool, offer: Offer, region: Region, placement: Placement) -> None:
    blocks = np.array(offer.block_ids[region.block_start : region.block_stop], dtype=np.int64)
    offered = np.array(offer.generations[region.block_start : region.block_stop], dtype=np.uint64)
    require_unchanged(pool.generations[blocks], offered)  # spares the copy
    placement.copy_region(pool, offer.block_ids, region)
    require_unchanged(pool.generations[blocks], offered)
