"""ShmSource on its own: what changes under a copy makes it void."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from prefill_process import make_identity, make_pool

from kvbaton.kv.layout import KVLayout
from kvbaton.transfer.errors import LeaseLost, PeerRefused
from kvbaton.transfer.placement import Placement
from kvbaton.transfer.ranges import Region
from kvbaton.transfer.shm import ShmSource
from kvbaton.transfer.wire import Offer

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
OFFER = Offer(1, b"t" * 16, (5, 6, 7), (4, 4, 4), 48, 48, 9.0)
REGION = Region(0, 2, 0, 2)


@pytest.fixture
def pools():
    source, destination = make_pool(LAYOUT, 10), make_pool(LAYOUT, 10, named=False)
    source.generations[:] = 4
    source.buffer[:] = np.arange(source.buffer.size, dtype=np.uint64).astype(np.uint8)
    yield source, destination
    for pool in (source, destination):
        pool.unlink()
        pool.close()


class Meddled:
    """A placement during whose copy something happens."""

    def __init__(self, placement, meanwhile):
        self._placement, self._meanwhile = placement, meanwhile

    def copy_region(self, *args):
        self._placement.copy_region(*args)
        self._meanwhile()


async def copy(pools, meanwhile=lambda: None):
    source, destination = pools
    with ThreadPoolExecutor(1) as executor:
        shm = ShmSource(make_identity(source), executor)
        done = asyncio.get_running_loop().create_future()
        placement = Placement(destination, (1, 2, 3), LAYOUT, 0, 48)
        shm.start_copy(OFFER, REGION, Meddled(placement, meanwhile), done.set_result)
        shm.close()  # waits for the copy
        return await done


async def test_a_copy_of_unchanged_blocks_counts(pools):
    source, destination = pools
    assert await copy(pools) is None
    assert (destination.view()[:, [1, 2]] == source.view()[:, [5, 6]]).all()
    assert not destination.view()[:, [0, 3, 4, 5, 6, 7, 8, 9]].any()


@pytest.mark.parametrize(("block", "lost"), [(5, True), (6, True), (7, False), (0, False)])
async def test_blocks_that_are_reused_during_the_copy_make_it_void(pools, block, lost):
    def reuse():
        pools[0].generations[block] += np.uint64(1)

    assert isinstance(await copy(pools, reuse), LeaseLost) == lost


async def test_blocks_reused_before_the_copy_spare_it(pools):
    pools[0].generations[6] = 5
    assert isinstance(await copy(pools), LeaseLost)
    assert not pools[1].buffer.any()


async def test_a_segment_of_another_life_is_refused(pools):
    identity = msgspec.structs.replace(make_identity(pools[0]), incarnation="an earlier one")
    with ThreadPoolExecutor(1) as executor, pytest.raises(PeerRefused, match="not the pool of peer"):
        ShmSource(identity, executor)
