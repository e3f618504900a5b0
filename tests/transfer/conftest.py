"""A prefill side and a decode side joined by real sockets and shared memory, checked and closed after each test."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvbaton.kv.layout import KVLayout
from kvbaton.transfer.client import HandoffClient, pull_all
from kvbaton.transfer.nixl_source import NixlPool
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.server import HandoffServer

_PATH = Path(__file__).with_name("prefill_process.py")
_spec = importlib.util.spec_from_file_location("prefill_process", _PATH)
fakes = importlib.util.module_from_spec(_spec)
sys.modules["prefill_process"] = fakes
_spec.loader.exec_module(fakes)

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for a condition of another thread or process."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Pair:
    """One prefill worker and one decode worker."""

    def __init__(self, prefill_layout, decode_layout, options, num_blocks=64, **backend):
        self.options = options
        self.source = fakes.make_pool(prefill_layout, num_blocks)
        self.pool = fakes.make_pool(decode_layout, num_blocks, named=False)
        self.backend = fakes.FakePrefill(self.source, lease_s=options.lease_s, **backend)
        self.nixl = []
        if options.transport == "nixl":
            self.nixl = [NixlPool(pool, pool.incarnation) for pool in (self.source, self.pool)]
        theirs, ours = self.nixl or (None, None)
        self.server = HandoffServer(fakes.make_identity(self.source, nixl=theirs), self.source, self.backend, options)
        self.client = HandoffClient(fakes.make_identity(self.pool, nixl=ours), self.pool, options, nixl=ours)
        self.address = ("127.0.0.1", 0)

    async def start(self):
        self.address = ("127.0.0.1", await self.server.start())
        return self

    def dst_blocks(self, num_tokens, first=3):
        return list(range(first, first + self.pool.layout.blocks_for(num_tokens + 1)))

    def pull(self, request, blocks=None, have_tokens=0, deadline_s=30.0, moved=None):
        blocks = blocks or self.dst_blocks(len(request.prompt_token_ids))
        return self.client.pull(self.address, request, have_tokens, blocks, deadline_s, moved)

    async def pull_all(self, request, **kwargs):
        return await pull_all(self.pull(request, **kwargs))

    def assert_arrived(self, request, blocks, have_tokens=0):
        num_tokens = len(request.prompt_token_ids)
        want = fakes.expected_kv(request.prompt_token_ids, self.pool.layout)
        got = fakes.read_kv(self.pool, blocks, num_tokens)
        assert np.array_equal(got[:, have_tokens:], want[:, have_tokens:])

    async def settled(self):
        """Nothing is held anywhere any more."""
        await until(lambda: self.server.stats().num_sessions == 0)
        assert self.server.stats().num_tickets == 0
        await until(lambda: self.backend.num_used() == 0)

    async def close(self):
        await self.client.close()
        await self.server.stop()
        self.backend.stop()
        for nixl in self.nixl:
            nixl.close()
        for pool in (self.source, self.pool):
            pool.unlink()
            pool.close()


NIXL = pytest.param(
    "nixl",
    marks=[
        pytest.mark.peer,
        pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs pip install 'kvbaton[nixl]'"),
    ],
)


@pytest.fixture(params=["shm", "tcp", NIXL])
def transport(request):
    return request.param


@pytest.fixture
async def make_pair(transport):
    pairs = []

    async def make(prefill_layout=LAYOUT, decode_layout=None, num_blocks=64, backend=None, **options):
        merged = replace(HandoffOptions(transport=transport), **options)
        pair = Pair(prefill_layout, decode_layout or prefill_layout, merged, num_blocks, **(backend or {}))
        pairs.append(pair)
        return await pair.start()

    yield make
    for pair in pairs:
        with contextlib.suppress(Exception):
            pair.backend.before_layer = lambda *_: None
        await pair.close()
        assert pair.backend.blocks.num_used == 0, "the prefill side leaks blocks"
        pair.backend.blocks.check()
        assert len(pair.server.book) == 0 and pair.server.stats().num_connections == 0
