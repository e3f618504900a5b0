"""Stands for the engine in the tests of the hand-off: real blocks, a real pool, a real thread, and KV that is a
function of the tokens, so that every byte on the other side can be checked. Run as a script it is a prefill process.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import numpy as np

from kvbaton.clock import MonotonicClock
from kvbaton.kv.blocks import BlockManager
from kvbaton.kv.compat import fingerprint_of
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.rank_pools import AnyPool, RankPools
from kvbaton.kv.reshard import head_ranges
from kvbaton.kv.shared_pool import SharedPool, segment_name
from kvbaton.transfer.identity import host_identity
from kvbaton.transfer.nixl_source import NixlPool
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.server import HandoffServer
from kvbaton.transfer.sharding import rank_pools_of
from kvbaton.transfer.wire import Identity
from kvbaton.types import GenerateRequest, LocalError, SamplingParams, TokenOutput

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def make_identity(pool: AnyPool, revision: str = "tiny", host=None, nixl=None) -> Identity:
    ranks = rank_pools_of(pool)
    fingerprint = fingerprint_of(pool.layout, revision, "rope")
    return Identity(
        fingerprint=msgspec.structs.replace(fingerprint, tp_size=max(1, len(ranks))),
        layout=pool.layout,
        num_blocks=pool.num_blocks,
        incarnation=pool.incarnation,
        host=host or host_identity(),
        shm_name=pool.name,
        nixl=None if nixl is None else nixl.memory,
        ranks=ranks,
    )


def make_pool(layout: KVLayout, num_blocks: int, named: bool = True, tp: int = 1) -> AnyPool:
    incarnation = uuid.uuid4().hex
    if tp > 1:
        return RankPools.create(layout, num_blocks, head_ranges(layout.num_kv_heads, tp), incarnation)
    return SharedPool.create(layout, num_blocks, segment_name(incarnation) if named else None, incarnation)


def make_request(request_id: str, num_tokens: int, max_tokens: int = 8, seed: int = 0) -> GenerateRequest:
    rng = np.random.default_rng(seed + num_tokens)
    tokens = tuple(int(t) for t in rng.integers(0, 50_000, num_tokens))
    return GenerateRequest(request_id, tokens, SamplingParams(max_tokens=max_tokens))


def expected_kv(token_ids, layout: KVLayout) -> np.ndarray:
    """[layer, token, K and V, head, dim] of what the fake computes; every element differs from its neighbours."""
    tokens = np.asarray(token_ids, dtype=np.uint64)
    shape = (layout.num_layers, len(tokens), 2, layout.num_kv_heads, layout.head_dim)
    layer, position, kv, head, dim = np.ogrid[tuple(slice(0, n) for n in shape)]
    mixed = (
        tokens[position] * 2654435761
        + position.astype(np.uint64) * 40503
        + (layer * 7919 + kv * 104729 + head * 1299709 + dim * 15485863).astype(np.uint64)
    )
    return (mixed ^ (mixed >> np.uint64(13))).astype(UNSIGNED[layout.itemsize])


def _typed(pool: SharedPool) -> np.ndarray:
    """[layer, block, K and V, head, token, dim] view, whatever the order in memory."""
    array = pool.buffer.view(UNSIGNED[pool.layout.itemsize]).reshape(pool.layout.shape(pool.num_blocks))
    return array if pool.layout.order == "HND" else array.transpose(0, 1, 2, 4, 3, 5)


def read_kv(pool: SharedPool, block_ids, num_tokens: int, layers: slice = slice(None)) -> np.ndarray:
    """The same shape as ``expected_kv``, from the pool."""
    blocks = _typed(pool)[layers][:, list(block_ids)]  # [layer, block, kv, head, token, dim]
    by_token = blocks.transpose(0, 1, 4, 2, 3, 5)
    joined = by_token.reshape(by_token.shape[0], -1, *by_token.shape[3:])
    return joined[:, :num_tokens]


def write_kv(pool: SharedPool, block_ids, values: np.ndarray, layer: int, start: int) -> None:
    """Write ``values`` [token, kv, head, dim] of one layer to tokens from ``start`` on; each rank gets its heads."""
    if isinstance(pool, RankPools):
        for own, held in zip(pool.pools, pool.heads, strict=True):
            write_kv(own, block_ids, values[:, :, held.start : held.stop], layer, start)
        return
    typed, size = _typed(pool), pool.layout.block_size
    positions = np.arange(start, start + len(values))
    blocks = np.asarray(block_ids)[positions // size]
    typed[layer, blocks, :, :, positions % size] = values


class FakePrefill:
    """A PrefillBackend. ``before_layer(request_id, chunk, layer)`` runs on the engine thread and may wait or raise."""

    def __init__(self, pool: SharedPool, lease_s: float = 30.0, chunk_tokens: int = 64, finish: str | None = None):
        self.pool = pool
        self.lease_s = lease_s
        self.chunk_tokens = chunk_tokens
        self.finish = finish
        self.max_prompt_tokens = 1 << 20
        self.renews = True
        self.num_blocks_moved_apart = 0  # blocks allocated between any two, so that runs are short
        self.before_layer: Callable[[str, int, int], None] = lambda *_: None
        self.blocks = BlockManager(
            pool.num_blocks, pool.layout.block_size, prefix_caching=False, on_generation=self._publish
        )
        self.held: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.calls: list[tuple[str, str]] = []
        self._clock = MonotonicClock()
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _publish(self, block: int, generation: int) -> None:
        for pool in self.pool.pools if isinstance(self.pool, RankPools) else (self.pool,):
            pool.generations[block] = generation

    # -- PrefillBackend

    def start(self, request, have_tokens, sink) -> None:
        self.calls.append(("start", request.request_id))
        self.aborted.discard(request.request_id)
        self._commands.put(lambda: self._prefill(request, sink))

    def release(self, request_id) -> None:
        self.calls.append(("release", request_id))
        self._commands.put(lambda: self._forget(request_id))

    def abort(self, request_id) -> None:
        self.calls.append(("abort", request_id))
        self.aborted.add(request_id)
        self._commands.put(lambda: self._forget(request_id))

    def renew(self, request_id, lease_s):
        self.calls.append(("renew", request_id))
        future: Future = Future()
        now_s = self._clock.now_s()
        self._commands.put(
            lambda: future.set_result(self.renews and self.blocks.renew(request_id, now_s, now_s + lease_s))
        )
        return asyncio.wrap_future(future)

    # -- for the tests

    def call(self, function):
        """Run on the engine thread and wait for it: everything posted before has been done then."""
        future: Future = Future()
        self._commands.put(lambda: future.set_result(function()))
        return future.result(30)

    def num_used(self) -> int:
        self.call(self.blocks.check)
        return self.call(lambda: self.blocks.num_used)

    def stop(self) -> None:
        self._commands.put(None)
        self._thread.join(30)

    # -- engine thread

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            command()

    def _forget(self, request_id) -> None:
        self.blocks.unpin(request_id)
        blocks = self.held.pop(request_id, None)
        if blocks is not None:
            self.blocks.release(blocks)

    def _prefill(self, request, sink) -> None:
        try:
            if len(request.prompt_token_ids) > self.max_prompt_tokens:
                raise LocalError("the prompt is too long", field="prompt")
            self._compute(request, sink)
        except Exception as error:
            self._forget(request.request_id)
            sink.on_error(error)

    def _allocate(self, num_blocks: int) -> list[int]:
        blocks, gaps = [], []
        for _ in range(num_blocks if self.num_blocks_moved_apart else 1):
            blocks += self.blocks.allocate(1 if self.num_blocks_moved_apart else num_blocks)
            gaps += self.blocks.allocate(self.num_blocks_moved_apart)
        self.blocks.release(gaps)
        return blocks

    def _compute(self, request, sink) -> None:
        num_tokens, layout = len(request.prompt_token_ids), self.pool.layout
        blocks = self.held[request.request_id] = self._allocate(layout.blocks_for(num_tokens + 1))
        self.blocks.pin(request.request_id, blocks, self._clock.now_s() + self.lease_s)
        sink.on_offer(tuple(blocks), num_tokens, 0)
        kv = expected_kv(request.prompt_token_ids, layout)
        for chunk, start in enumerate(range(0, num_tokens, self.chunk_tokens)):
            stop = min(num_tokens, start + self.chunk_tokens)
            for layer in range(layout.num_layers):
                self.before_layer(request.request_id, chunk, layer)
                if request.request_id in self.aborted:
                    return
                write_kv(self.pool, blocks, kv[layer, start:stop], layer, start)
                sink.on_progress(stop, layer + 1)
        sink.on_first(TokenOutput(sum(request.prompt_token_ids) % 1000, finish_reason=self.finish))


async def _serve(layout: KVLayout, num_blocks: int, port: int, transport: str = "auto") -> None:
    pool = make_pool(layout, num_blocks)
    backend = FakePrefill(pool)
    nixl = NixlPool(pool, pool.incarnation) if transport == "nixl" else None
    options = HandoffOptions(connect_s=60.0, frame_s=60.0, silence_s=120.0, stall_s=120.0)  # it may starve, not hang
    server = HandoffServer(make_identity(pool, nixl=nixl), pool, backend, options)
    print(await server.start("127.0.0.1", port), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop()
    backend.stop()
    pool.unlink()


if __name__ == "__main__":
    given, num_blocks, port, *transport = sys.argv[1:]
    asyncio.run(_serve(msgspec.json.decode(given, type=KVLayout), int(num_blocks), int(port), *transport))
