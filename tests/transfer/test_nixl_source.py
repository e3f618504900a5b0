"""NixlSource on its own: what changes under a read makes it void, and what is said where NIXL is missing."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from prefill_process import make_identity, make_pool

from kvbaton.kv.layout import KVLayout
from kvbaton.transfer.errors import LeaseLost
from kvbaton.transfer.identity import choose_transport, host_identity
from kvbaton.transfer.nixl_source import NixlPool, NixlSource
from kvbaton.transfer.placement import Placement
from kvbaton.transfer.ranges import Region
from kvbaton.transfer.wire import Offer
from kvbaton.types import LocalError

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs pip install 'kvbaton[nixl]'")
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
OTHER = msgspec.structs.replace(LAYOUT, block_size=8)
OFFER = Offer(1, b"t" * 16, (5, 6, 8), (4, 4, 4), 48, 48, 9.0)
REGION = Region(0, 2, 0, 3)


async def copy(layout, generations):
    """What a read of the offer says, and whether anything of it is in the destination."""
    source, destination = make_pool(LAYOUT, 10, named=False), make_pool(layout, 20, named=False)
    source.buffer[:] = np.arange(source.buffer.size, dtype=np.uint64).astype(np.uint8)
    source.generations[[5, 6, 8]] = generations
    theirs, ours = NixlPool(source, "source"), NixlPool(destination, "destination")
    broken = []
    with ThreadPoolExecutor(2) as executor:
        nixl = NixlSource(ours, make_identity(source, nixl=theirs), executor, 1 << 20, 10.0, broken.append)
        done = asyncio.get_running_loop().create_future()
        placement = Placement(destination, (1, 2, 3, 4, 5, 6), LAYOUT, 0, 48)
        nixl.start_copy(OFFER, REGION, placement, done.set_result)
        error = await done
        nixl.close()
    landed = destination.view()[:, 1:7].copy()
    whole = source.view()[:, [5, 6, 8]].copy()
    for pool in (ours, theirs):
        pool.close()
    assert not broken
    return error, landed, whole


IDLE = """
import os, time
from prefill_process import make_pool
from kvbaton.kv.layout import KVLayout
from kvbaton.transfer.nixl_source import NixlPool
pool = NixlPool(make_pool(KVLayout(2, 2, 8, 16, "bfloat16"), 4, named=False), "idle")
began_s, cpu_s = time.monotonic(), time.process_time()
time.sleep(2)  # what is measured, not waited for
print("share", (time.process_time() - cpu_s) / (time.monotonic() - began_s), flush=True)
os._exit(0)
"""


@pytest.mark.peer
@needs_nixl
def test_an_idle_agent_takes_no_core():
    """One that asks without end takes all it can get; on a busy machine this may pass wrongly, but not fail."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("share")[-1]) < 0.1


@pytest.mark.peer
@needs_nixl
async def test_equal_layouts_move_as_they_are():
    error, landed, whole = await copy(LAYOUT, 4)
    assert error is None
    assert np.array_equal(landed[:, :3], whole)


@pytest.mark.peer
@needs_nixl
@pytest.mark.parametrize("layout", [LAYOUT, OTHER])
async def test_a_block_that_was_reused_voids_the_read(layout):
    error, landed, _ = await copy(layout, [4, 5, 4])
    assert isinstance(error, LeaseLost)
    if layout != LAYOUT:
        assert not landed.any(), "what has to be converted reaches the destination only after the check"


def test_without_nixl_the_option_and_the_fix_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    pool = make_pool(LAYOUT, 2, named=False)
    with pytest.raises(LocalError) as found:
        NixlPool(pool, "x")
    assert found.value.field == "transport" and "kvbaton[nixl]" in (found.value.fix or "")
    pool.close()


def test_a_peer_that_did_not_register_is_refused_by_name():
    pool = make_pool(LAYOUT, 2, named=False)
    identity = make_identity(pool)
    with pytest.raises(LocalError, match=identity.incarnation) as found:
        choose_transport("nixl", identity, host_identity())
    assert found.value.field == "transport"
    pool.close()
