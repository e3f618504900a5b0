"""Reading a peer's pool by NIXL: one-sided reads of memory that both sides registered once, over whatever UCX finds
between them (RDMA, shared memory of the kernel's, TCP).

    peer's pool, registered     | block | block | ...        our pool, registered
    peer's generations          | u64   | u64   | ...        a small buffer of ours

Invariants: a copy counts only if every block it touched has, read after its last byte, the generation it was offered
with (the peer changes the generation before it reuses a block); blocks that have to be converted go through a buffer of
our own and reach the destination after that check; when a copy has reported, nothing of it lands any more, because a
read that stalls is ended with all that connects us to its peer. Every wait is bounded by ``stall_s``.

Knows nothing about the control connection, which says when layers are ready.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from kvbaton.kv.shared_pool import SharedPool
from kvbaton.transfer.copying import CopyingSource, require_unchanged
from kvbaton.transfer.errors import HandoffError, PeerUnreachable
from kvbaton.transfer.placement import Placement
from kvbaton.transfer.ranges import Region, runs
from kvbaton.transfer.wire import Identity, NixlMemory, Offer
from kvbaton.types import KvbatonError, LocalError

_SPIN_S = 0.001  # a read of a few MiB inside a host or over RDMA is over by then
_POLL_S = 0.0001
_PROGRESS_WAIT_US = 1000  # of NIXL's own thread, which what arrives wakes anyway
_GENERATION_BYTES = 8
_MAKING_AGENTS = threading.Lock()

Descriptor = tuple[int, int, int]  # address, bytes, device


class NixlPool:
    """One for a worker: its NIXL agent, and its pool as registered there. Thread-safe. LocalError without NIXL."""

    def __init__(self, pool: SharedPool, name: str) -> None:
        try:
            from nixl import _api as nixl
        except ImportError as error:
            raise LocalError(
                f"transport nixl needs NIXL, which cannot be imported: {error}",
                field="transport",
                fix="pip install 'kvbaton[nixl]', or use --transport auto",
            ) from error
        _log_like_the_rest()
        config = nixl.nixl_agent_config(
            # Where reads are not one-sided by themselves (TCP), the side that is read has to take part.
            enable_prog_thread=True,
            backends=["UCX"],
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self.pool = pool
        with _progress_waits(nixl):
            self._agent: Any = nixl.nixl_agent(name, config)
        self.data_address = pool.buffer.ctypes.data
        self._generations = pool.generations.ctypes.data
        self._registered = self._agent.register_memory(
            [
                (self.data_address, pool.buffer.nbytes, 0, "pool"),
                (self._generations, pool.generations.nbytes, 0, "generations"),
            ],
            "DRAM",
        )
        self._lock = threading.Lock()
        self._num_connected: dict[str, int] = {}

    @property
    def memory(self) -> NixlMemory:
        """What a peer needs in order to read from here."""
        return NixlMemory(self._agent.get_agent_metadata(), self.data_address, self._generations)

    def connect(self, peer: NixlMemory) -> str:
        """The peer's name at our agent. Connections to one life of a peer share it."""
        with self._lock:
            try:
                name = self._agent.add_remote_agent(peer.agent)
            except Exception as error:  # NIXL's own kinds, which have no common base
                raise PeerUnreachable(f"NIXL does not take the peer's metadata: {error}") from error
            name = name.decode() if isinstance(name, bytes) else str(name)
            self._num_connected[name] = self._num_connected.get(name, 0) + 1
            return name

    def disconnect(self, name: str) -> None:
        with self._lock:
            self._num_connected[name] -= 1
            if self._num_connected[name] == 0:
                del self._num_connected[name]
                self._cut(name)

    def cut(self, name: str) -> None:
        """End every read from this peer, whatever else uses it: nothing of them lands after this."""
        with self._lock:
            self._cut(name)

    def register(self, buffer: np.ndarray) -> Any:
        return self._agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "buffer")], "DRAM")

    def deregister(self, registered: Any) -> None:
        self._agent.deregister_memory(registered)

    def read(self, name: str, ours: list[Descriptor], theirs: list[Descriptor], stall_s: float) -> None:
        """Returns when all of it is here. PeerUnreachable when it failed or took longer; nothing lands after either."""
        agent = self._agent
        handle = None
        try:
            handle = agent.initialize_xfer(
                "READ", agent.get_xfer_descs(ours, "DRAM"), agent.get_xfer_descs(theirs, "DRAM"), name
            )
            state = agent.transfer(handle)
            begun_s = time.monotonic()
            while state == "PROC":
                waited_s = time.monotonic() - begun_s
                if waited_s > stall_s:
                    raise PeerUnreachable(f"a read by NIXL brought nothing for {stall_s:.0f} s")
                if waited_s > _SPIN_S:
                    time.sleep(_POLL_S)  # NIXL has nothing that could be waited on
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise PeerUnreachable(f"a read by NIXL ended in state {state}")
        except HandoffError:
            self.cut(name)
            raise
        except Exception as error:
            self.cut(name)
            raise PeerUnreachable(f"a read by NIXL failed: {error}") from error
        finally:
            if handle is not None:
                self._release(handle)

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)

    def _cut(self, name: str) -> None:
        with contextlib.suppress(Exception):  # gone already
            self._agent.remove_remote_agent(name)

    def _release(self, handle: Any) -> None:
        with contextlib.suppress(Exception):  # it was cut off, and its agent frees it
            self._agent.release_xfer_handle(handle)


@contextlib.contextmanager
def _progress_waits(nixl: Any) -> Iterator[None]:
    """Agents made meanwhile have a progress thread that waits.

    The Python package sets its wait to zero, where none of its own settings reaches (1.5): the thread asks without end
    whether something has come, and each worker would take a whole core for that. Where another version makes its agents
    in another way, it stays as it is.
    """
    bindings: Any = getattr(nixl, "nixlBind", None)
    original: Any = getattr(bindings, "nixlAgentConfig", None)
    if not isinstance(original, type):
        yield
        return

    class Waiting(original):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _PROGRESS_WAIT_US if name == "pthrDelay" else value)

    with _MAKING_AGENTS:
        bindings.nixlAgentConfig = Waiting
        try:
            yield
        finally:
            bindings.nixlAgentConfig = original


def _log_like_the_rest() -> None:
    """NIXL's package logs to standard output, where our commands print results; ours goes where the program says."""
    theirs = logging.getLogger("nixl")
    theirs.handlers.clear()
    theirs.propagate = True
    theirs.setLevel(logging.WARNING)


class _Buffer:
    """Where generations land, and blocks that have to be converted."""

    def __init__(self, nixl: NixlPool, num_bytes: int, num_blocks: int) -> None:
        self.staging = np.zeros(num_bytes, dtype=np.uint8)
        self.generations = np.zeros(num_blocks, dtype=np.uint64)
        self.registered = [nixl.register(self.generations)]
        if num_bytes:
            self.registered.append(nixl.register(self.staging))


class NixlSource(CopyingSource):
    """One peer's pool. ``on_broken`` closes the connection that it belongs to; called on the loop."""

    def __init__(
        self,
        nixl: NixlPool,
        peer: Identity,
        executor: Executor,
        max_copy_bytes: int,
        stall_s: float,
        on_broken: Callable[[HandoffError], None],
    ) -> None:
        super().__init__(executor, "reading by NIXL failed")
        assert peer.nixl is not None
        self._nixl = nixl
        self._peer = peer
        self._memory = peer.nixl
        self._stall_s = stall_s
        self._on_broken = on_broken
        equal = peer.layout == nixl.pool.layout
        self._staging_bytes = 0 if equal else max(max_copy_bytes, peer.layout.layer_block_bytes)
        self._buffers: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._name = nixl.connect(peer.nixl)

    def _copied(self, error: KvbatonError | None) -> None:
        if isinstance(error, PeerUnreachable):
            self._on_broken(error)

    def _end(self) -> None:
        self._executor.submit(self._give_up)

    def _give_up(self) -> None:
        while not self._buffers.empty():
            for registered in self._buffers.get().registered:
                self._nixl.deregister(registered)
        self._nixl.disconnect(self._name)

    # -- on a thread of the executor

    def _copy(self, offer: Offer, region: Region, placement: Placement) -> None:
        buffer = self._buffer()
        try:
            own_ids = placement.own_blocks(region.block_start, region.block_stop)
            self._read_blocks(offer, region, own_ids, buffer)
            self._require(offer, region, buffer)
            if own_ids is None:
                self._place(region, placement, buffer)
        finally:
            self._buffers.put(buffer)

    def _buffer(self) -> _Buffer:
        try:
            return self._buffers.get_nowait()
        except queue.Empty:
            return _Buffer(self._nixl, self._staging_bytes, self._peer.num_blocks)

    def _read_blocks(self, offer: Offer, region: Region, own_ids: Sequence[int] | None, buffer: _Buffer) -> None:
        """Into our pool; or, where they have to be converted, side by side into the buffer, layer after layer."""
        ids = offer.block_ids[region.block_start : region.block_stop]
        size = self._peer.layout.layer_block_bytes
        pool, address = self._nixl.pool, buffer.staging.ctypes.data
        ours: list[Descriptor] = []
        theirs: list[Descriptor] = []
        pieces = list(runs(ids) if own_ids is None else runs(ids, own_ids))
        for layer in range(region.layer_start, region.layer_stop):
            for start, stop in pieces:
                if own_ids is None:
                    to = address + ((layer - region.layer_start) * len(ids) + start) * size
                else:
                    to = self._nixl.data_address + (layer * pool.num_blocks + own_ids[start]) * size
                source = self._memory.data_address + (layer * self._peer.num_blocks + ids[start]) * size
                ours.append((to, (stop - start) * size, 0))
                theirs.append((source, (stop - start) * size, 0))
        self._nixl.read(self._name, ours, theirs, self._stall_s)

    def _require(self, offer: Offer, region: Region, buffer: _Buffer) -> None:
        """That the blocks still were what was offered when their last byte had been read."""
        ids = offer.block_ids[region.block_start : region.block_stop]
        to, source = buffer.generations.ctypes.data, self._memory.generations_address
        ours: list[Descriptor] = []
        theirs: list[Descriptor] = []
        for start, stop in runs(ids):
            num_bytes = (stop - start) * _GENERATION_BYTES
            ours.append((to + start * _GENERATION_BYTES, num_bytes, 0))
            theirs.append((source + ids[start] * _GENERATION_BYTES, num_bytes, 0))
        self._nixl.read(self._name, ours, theirs, self._stall_s)
        offered = np.array(offer.generations[region.block_start : region.block_stop], dtype=np.uint64)
        require_unchanged(buffer.generations[: len(ids)], offered)

    def _place(self, region: Region, placement: Placement, buffer: _Buffer) -> None:
        num_bytes = (region.block_stop - region.block_start) * self._peer.layout.layer_block_bytes
        content = memoryview(buffer.staging.data)
        for index, layer in enumerate(range(region.layer_start, region.layer_stop)):
            payload = content[index * num_bytes : (index + 1) * num_bytes]
            placement.place(layer, region.block_start, region.block_stop, payload)
