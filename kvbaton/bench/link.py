"""How long KV takes between two workers: the real hand-off, with a real layout and real blocks, but no model.

A lender process fills a pool and offers blocks at once, so what is measured is the control messages, the reads and the
verification, and not prefill. Sizes give alpha (what any transfer costs) and beta (what large ones reach); repeats give
p99; concurrency and background pulls give what is left of it under traffic.

Knows nothing about tokens' values; a pulled byte is checked by the transfer itself (generations, checksums).
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from kvbaton.config import internal_key
from kvbaton.kv.compat import fingerprint_of
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.shared_pool import SharedPool, segment_name
from kvbaton.plan.link import LinkFit, LinkRow, fit_link
from kvbaton.transfer.client import Completed, HandoffClient, pull_all
from kvbaton.transfer.identity import TransportChoice, host_identity
from kvbaton.transfer.lending import PrefillSink
from kvbaton.transfer.nixl_source import NixlPool
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.server import HandoffServer
from kvbaton.transfer.wire import Identity
from kvbaton.types import GenerateRequest, LocalError, RemoteError, SamplingParams, TokenOutput

# One revision for every link probe: a worker that serves a model has another and refuses it, as it should.
REVISION = "link-probe"
START_DEADLINE_S = 60.0
PULL_DEADLINE_S = 120.0
_OPTIONS = HandoffOptions(secret=internal_key().encode())  # between hosts both ends need the same one


@dataclass(frozen=True)
class LinkSpec:
    layout: KVLayout
    prompt_tokens: tuple[int, ...] = (256, 1024, 4096)
    repeats: int = 30
    concurrency: int = 1
    run_blocks: int = 0  # blocks that lie side by side; 0: all of them. 1 is one descriptor a block and layer
    background: int = 0  # pulls of the largest size that go on all the while
    transport: TransportChoice = "auto"
    address: tuple[str, int] | None = None  # a lender elsewhere; None starts one here


class LinkSize(msgspec.Struct, frozen=True):
    """One size. ``bytes_per_s`` is of the median."""

    prompt_tokens: int
    num_bytes: int
    num_blocks: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    bytes_per_s: float


class LinkResult(msgspec.Struct, frozen=True):
    layout: KVLayout
    transport: str
    concurrency: int
    run_blocks: int
    background: int
    repeats: int
    sizes: tuple[LinkSize, ...]
    startup_ms: float | None  # alpha; None with a single size
    gb_per_s: float | None  # beta, 1e9 bytes a second
    worst_fit_error: float | None
    nominal_gb_per_s: float | None = None


class Lender:
    """A prefill backend whose KV is there already: offers, reports and samples at once."""

    def __init__(self, pool: SharedPool, run_blocks: int, seed: int = 0) -> None:
        self._pool = pool
        self._free = _block_order(pool.num_blocks, run_blocks, Random(seed))
        self._lent: dict[str, list[int]] = {}

    def start(self, request: GenerateRequest, have_tokens: int, sink: PrefillSink) -> None:
        num_tokens = len(request.prompt_token_ids)
        num_blocks = self._pool.layout.blocks_for(num_tokens + 1)
        if num_blocks > len(self._free):
            sink.on_error(LocalError(f"the lender's pool has no {num_blocks} blocks left", field="prompt"))
            return
        blocks, self._free = self._free[:num_blocks], self._free[num_blocks:]
        self._lent[request.request_id] = blocks
        sink.on_offer(tuple(blocks), num_tokens, 0)
        sink.on_progress(num_tokens, self._pool.layout.num_layers)
        sink.on_first(TokenOutput(0))

    def release(self, request_id: str) -> None:
        # To the front: the same blocks again and again would sit in the CPU's cache, so they queue up at the back.
        self._free += self._lent.pop(request_id, [])

    def abort(self, request_id: str) -> None:
        self.release(request_id)

    async def renew(self, request_id: str, lease_s: float) -> bool:
        return request_id in self._lent


def _block_order(num_blocks: int, run_blocks: int, random: Random) -> list[int]:
    """Block ids in runs of ``run_blocks`` neighbours, the runs shuffled; in plain order for 0."""
    if run_blocks <= 0:
        return list(range(num_blocks))
    runs = [list(range(start, min(start + run_blocks, num_blocks))) for start in range(0, num_blocks, run_blocks)]
    random.shuffle(runs)
    return [block for run in runs for block in run]


def pool_blocks(spec: LinkSpec) -> int:
    """Enough for every pull that may be open, twice, so that released blocks rest before they are lent again."""
    largest = spec.layout.blocks_for(max(spec.prompt_tokens) + 1)
    return max(64, largest * (spec.concurrency + spec.background) * 2)


def _registered(pool: SharedPool, transport: TransportChoice) -> NixlPool | None:
    return NixlPool(pool, pool.incarnation) if transport == "nixl" else None


def identity_of(pool: SharedPool, nixl: NixlPool | None) -> Identity:
    return Identity(
        fingerprint=fingerprint_of(pool.layout, REVISION, "none"),
        layout=pool.layout,
        num_blocks=pool.num_blocks,
        incarnation=pool.incarnation,
        host=host_identity(),
        shm_name=pool.name,
        nixl=None if nixl is None else nixl.memory,
    )


def make_pool(layout: KVLayout, num_blocks: int, named: bool) -> SharedPool:
    incarnation = uuid.uuid4().hex
    return SharedPool.create(layout, num_blocks, segment_name(incarnation) if named else None, incarnation)


async def lend(
    layout: KVLayout,
    num_blocks: int,
    run_blocks: int,
    transport: TransportChoice,
    address: tuple[str, int],
    until: Awaitable[object],
) -> None:
    """Serves until ``until`` is over; prints the port first."""
    pool = make_pool(layout, num_blocks, named=True)
    # Every page is touched now; a first read must not pay for the kernel's zeroing.
    pool.buffer.view(np.uint64)[:] = np.arange(pool.buffer.nbytes // 8, dtype=np.uint64)
    nixl = _registered(pool, transport)
    server = HandoffServer(identity_of(pool, nixl), pool, Lender(pool, run_blocks), _OPTIONS)
    try:
        print(await server.start(*address), flush=True)
        await until
    finally:
        await server.stop()
        if nixl is not None:
            nixl.close()
        pool.unlink()


async def measure_link(spec: LinkSpec) -> LinkResult:
    """Pulls every size ``repeats`` times; medians are fitted, tails are reported as they are."""
    if min(spec.prompt_tokens) < 1 or spec.repeats < 2:
        raise LocalError("sizes are at least 1 token and repeats at least 2", field="tokens")
    async with lender(spec) as address:
        pool = make_pool(spec.layout, pool_blocks(spec), named=False)
        pool.buffer[:] = 0
        nixl = _registered(pool, spec.transport)
        client = HandoffClient(identity_of(pool, nixl), pool, replace(_OPTIONS, transport=spec.transport), nixl=nixl)
        try:
            puller = _Puller(client, address, pool)
            transport = ""
            sizes = []
            async with _background(puller, spec):
                for tokens in spec.prompt_tokens:
                    await puller.pull(tokens)  # connects, and warms both pools
                    done = await puller.many(tokens, spec.repeats, spec.concurrency)
                    transport = done[0].transport
                    sizes.append(_size(spec.layout, tokens, done))
        finally:
            await client.close()
            if nixl is not None:
                nixl.close()
            pool.close()
    return _result(spec, transport, sizes)


def _size(layout: KVLayout, tokens: int, done: Sequence[Completed]) -> LinkSize:
    times = np.array([one.transfer_s for one in done]) * 1e3
    p50, p90, p99 = (float(np.percentile(times, percent)) for percent in (50, 90, 99))
    return LinkSize(
        prompt_tokens=tokens,
        num_bytes=done[0].num_bytes,
        num_blocks=layout.blocks_for(tokens),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        max_ms=float(times.max()),
        bytes_per_s=done[0].num_bytes / (p50 / 1e3),
    )


def _result(spec: LinkSpec, transport: str, sizes: Sequence[LinkSize]) -> LinkResult:
    fit: LinkFit | None = None
    if len(sizes) > 1:
        try:
            fit = fit_link([LinkRow(size.num_bytes, size.p50_ms / 1e3) for size in sizes], "kvbaton link")
        except LocalError:
            fit = None  # noise larger than the difference between the sizes; the rows speak for themselves
    return LinkResult(
        layout=spec.layout,
        transport=transport,
        concurrency=spec.concurrency,
        run_blocks=spec.run_blocks,
        background=spec.background,
        repeats=spec.repeats,
        sizes=tuple(sizes),
        startup_ms=fit.model.startup_s * 1e3 if fit else None,
        gb_per_s=fit.model.bytes_per_s / 1e9 if fit else None,
        worst_fit_error=fit.worst_relative_error if fit else None,
    )


class _Puller:
    """Pulls into one pool; blocks are handed out like the lender's, oldest first."""

    def __init__(self, client: HandoffClient, address: tuple[str, int], pool: SharedPool) -> None:
        self._client, self._address, self._pool = client, address, pool
        self._free = list(range(pool.num_blocks))

    async def pull(self, tokens: int) -> Completed:
        num_blocks = self._pool.layout.blocks_for(tokens + 1)
        blocks, self._free = self._free[:num_blocks], self._free[num_blocks:]
        request = GenerateRequest(uuid.uuid4().hex, (0,) * tokens, SamplingParams(max_tokens=2))
        try:
            return (await pull_all(self._client.pull(self._address, request, 0, blocks, PULL_DEADLINE_S)))[1]
        finally:
            self._free += blocks

    async def many(self, tokens: int, repeats: int, concurrency: int) -> list[Completed]:
        done: list[Completed] = []

        async def one_after_another() -> None:
            while len(done) + concurrency - 1 < repeats or not done:
                done.append(await self.pull(tokens))

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one_after_another())
        return done


@asynccontextmanager
async def _background(puller: _Puller, spec: LinkSpec) -> AsyncIterator[None]:
    async def pull_on() -> None:
        while True:
            await puller.pull(max(spec.prompt_tokens))

    tasks = [asyncio.ensure_future(pull_on()) for _ in range(spec.background)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def lender(spec: LinkSpec) -> AsyncIterator[tuple[str, int]]:
    """The address of a lender; one is started in a process of its own when none was given."""
    if spec.address is not None:
        yield spec.address
        return
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvbaton.bench.link",
        msgspec.json.encode(spec.layout).decode(),
        str(pool_blocks(spec)),
        str(spec.run_blocks),
        spec.transport,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        async with asyncio.timeout(START_DEADLINE_S):
            line = await process.stdout.readline()
        if not line:
            raise RemoteError("the lender ended before it listened", field="link")
        yield "127.0.0.1", int(line)
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def lend_forever(spec: LinkSpec) -> None:
    """Lends on the specification's address until the command is ended."""
    assert spec.address is not None
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    await lend(spec.layout, pool_blocks(spec), spec.run_blocks, spec.transport, spec.address, ended.wait())


def layout_of(model: Path, block_size: int, kv_dtype: str) -> KVLayout:
    """The layout that our engine gives this model."""
    from kvbaton.engine.model_config import ModelConfig

    config = ModelConfig.from_dir(model)
    return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, kv_dtype)


async def _serve(layout: KVLayout, num_blocks: int, run_blocks: int, transport: TransportChoice) -> None:
    loop = asyncio.get_running_loop()
    # The end of standard input ends the lender: it never outlives the command that started it.
    ended = loop.run_in_executor(None, sys.stdin.read)
    await lend(layout, num_blocks, run_blocks, transport, ("127.0.0.1", 0), ended)


def main() -> None:
    parser = argparse.ArgumentParser(description="A lender of KV blocks, for kvbaton link.")
    parser.add_argument("layout", type=lambda text: msgspec.json.decode(text, type=KVLayout))
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("run_blocks", type=int)
    parser.add_argument("transport")
    given = parser.parse_args()
    asyncio.run(_serve(given.layout, given.num_blocks, given.run_blocks, given.transport))


if __name__ == "__main__":
    main()
