"""Reading a peer's pool on the same host: map its segment, copy, and make sure that it was still what was offered.

Invariants: the peer's memory is mapped read-only; a copy counts only if every block it touched has, after its last byte
was read, the generation it was offered with (the peer changes the generation before it reuses a block); a copy that was
begun runs to its end, so it is short (``max_copy_bytes``) and its blocks are not released before.

Knows nothing about the control connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np

from kvbaton.kv.shared_pool import SharedPool
from kvbaton.transfer.errors import LeaseLost, PeerRefused
from kvbaton.transfer.placement import Placement
from kvbaton.transfer.ranges import Region
from kvbaton.transfer.wire import Identity, Offer
from kvbaton.types import KvbatonError, LocalError

OnCopied = Callable[[KvbatonError | None], None]


class ShmSource:
    """One peer's pool. ``executor``: threads to copy in, shared by all peers."""

    def __init__(self, peer: Identity, executor: Executor) -> None:
        assert peer.shm_name is not None
        self._pool = SharedPool.attach(peer.shm_name)
        found = (self._pool.layout, self._pool.num_blocks, self._pool.incarnation)
        if found != (peer.layout, peer.num_blocks, peer.incarnation):
            self._pool.close()
            raise PeerRefused(f"shared memory {peer.shm_name} is not the pool of peer {peer.incarnation}")
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._num_busy = 0
        self._closing = False

    def start_copy(self, offer: Offer, region: Region, placement: Placement, on_copied: OnCopied) -> None:
        """``on_copied`` is called on the loop, when no byte lands any more."""
        self._num_busy += 1
        future = self._loop.run_in_executor(self._executor, self._copy, offer, region, placement)

        def done(finished: asyncio.Future[None]) -> None:
            self._num_busy -= 1
            error = finished.exception()
            if error is not None and not isinstance(error, KvbatonError):
                error = LocalError(f"copying out of shared memory failed: {error!r}")
            on_copied(error)
            self._close_if_idle()

        future.add_done_callback(done)

    def stop_copies(self, placement: Placement) -> None:
        """A copy of a few MiB is over before it could be stopped."""

    def close(self) -> None:
        self._closing = True
        self._close_if_idle()

    def join(self) -> None:
        """Its copies run on the executor, whose owner waits for them."""

    def _close_if_idle(self) -> None:
        if self._closing and self._num_busy == 0:
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
