"""Reading a peer's pool on the same host: map its segment, copy, and make sure that it was still what was offered.

Invariants: the peer's memory is mapped read-only; a copy counts only if every block it touched has, after its last byte
was read, the generation it was offered with (the peer changes the generation before it reuses a block); a copy that was
begun runs to its end, so it is short (``max_copy_bytes``) and its blocks are not released before.

Knows nothing about the control connection.
"""

from __future__ import annotations

from concurrent.futures import Executor

import numpy as np

from kvbaton.kv.shared_pool import SharedPool
from kvbaton.transfer.copying import CopyingSource
from kvbaton.transfer.errors import LeaseLost, PeerRefused
from kvbaton.transfer.placement import Placement
from kvbaton.transfer.ranges import Region
from kvbaton.transfer.wire import Identity, Offer


class ShmSource(CopyingSource):
    """One peer's pool. ``executor``: threads to copy in, shared by all peers."""

    def __init__(self, peer: Identity, executor: Executor) -> None:
        super().__init__(executor, "copying out of shared memory failed")
        assert peer.shm_name is not None
        self._pool = SharedPool.attach(peer.shm_name)
        found = (self._pool.layout, self._pool.num_blocks, self._pool.incarnation)
        if found != (peer.layout, peer.num_blocks, peer.incarnation):
            self._pool.close()
            raise PeerRefused(f"shared memory {peer.shm_name} is not the pool of peer {peer.incarnation}")

    def _end(self) -> None:
        self._pool.close()

    def _copy(self, offer: Offer, region: Region, placement: Placement) -> None:
        blocks = np.array(offer.block_ids[region.block_start : region.block_stop], dtype=np.int64)
        offered = np.array(offer.generations[region.block_start : region.block_stop], dtype=np.uint64)
        self._require(blocks, offered)  # spares the copy
        placement.copy_region(self._pool, offer.block_ids, region)
        self._require(blocks, offered)

    def _require(self, blocks: np.ndarray, offered: np.ndarray) -> None:
        changed = np.flatnonzero(self._pool.generations[blocks] != offered)
        if changed.size:
            raise LeaseLost(f"{changed.size} of {blocks.size} blocks were reused by the prefill side while being read")
