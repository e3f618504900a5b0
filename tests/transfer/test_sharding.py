"""Hand-offs between unequal numbers of ranks, over real sockets and shared memory; the KV is the fake engine's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from prefill_process import FakePrefill, expected_kv, make_identity, make_pool, make_request, read_kv

from kvbaton.kv.layout import KVLayout
from kvbaton.kv.rank_pools import RankPools
from kvbaton.kv.reshard import HeadRange, head_ranges
from kvbaton.transfer.auth import TICKET_BYTES
from kvbaton.transfer.client import HandoffClient, pull_all
from kvbaton.transfer.errors import LeaseLost, PeerRefused, TransferCorrupt
from kvbaton.transfer.identity import refusals
from kvbaton.transfer.lent import lent_pieces
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.server import HandoffServer
from kvbaton.transfer.sharding import place
from kvbaton.transfer.tcp import DataSender
from kvbaton.transfer.wire import RankPool, Read

LAYOUT = KVLayout(num_layers=3, num_kv_heads=6, head_dim=8, block_size=16, dtype="bfloat16")
NUM_BLOCKS = 48


async def until(condition: Callable[[], bool]) -> None:
    """Wait for another thread."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


class Pools:
    """A lender with ``tp[0]`` ranks and a reader with ``tp[1]``."""

    def __init__(self, source: KVLayout, destination: KVLayout, tp: tuple[int, int], options: HandoffOptions) -> None:
        self.source = make_pool(source, NUM_BLOCKS, tp=tp[0])
        self.pool = make_pool(destination, NUM_BLOCKS, tp=tp[1])
        self.own = self.pool.pools if isinstance(self.pool, RankPools) else (self.pool,)
        for pool in self.own:
            pool.buffer[:] = 0xEE
        self.heads = head_ranges(destination.num_kv_heads, tp[1])
        self.backend = FakePrefill(self.source, lease_s=options.lease_s, chunk_tokens=50)
        self.server = HandoffServer(make_identity(self.source), self.source, self.backend, options)
        self.client = HandoffClient(make_identity(self.pool), self.pool, options)
        self.port = 0

    def blocks_of(self, num_tokens: int) -> list[int]:
        return list(range(3, 3 + self.pool.layout.blocks_for(num_tokens + 1)))

    def pull(self, request, have_tokens: int = 0):
        blocks = self.blocks_of(len(request.prompt_token_ids))
        return self.client.pull(("127.0.0.1", self.port), request, have_tokens, blocks, 30.0)

    def assert_arrived(self, request, have_tokens: int = 0) -> None:
        """Each rank has its heads, and nothing else was written."""
        num_tokens = len(request.prompt_token_ids)
        blocks = self.blocks_of(num_tokens)
        want = expected_kv(request.prompt_token_ids, self.pool.layout)
        for pool, held in zip(self.own, self.heads, strict=True):
            got = read_kv(pool, blocks, num_tokens)
            assert np.array_equal(got[:, have_tokens:], want[:, have_tokens:, :, held.start : held.stop])
            assert (got[:, :have_tokens].view(np.uint8) == 0xEE).all()
            untouched = [block for block in range(NUM_BLOCKS) if block not in blocks]
            assert (pool.view()[:, untouched] == 0xEE).all()

    async def settled(self) -> None:
        await until(lambda: not self.server.stats().num_sessions and not self.backend.num_used())
        assert self.server.stats().num_tickets == 0


@pytest.fixture
async def make_pools():
    made: list[Pools] = []

    async def make(tp, source=LAYOUT, destination=None, **options) -> Pools:
        pools = Pools(source, destination or source, tp, replace(HandoffOptions(transport="shm"), **options))
        pools.port = await pools.server.start()
        made.append(pools)
        return pools

    yield make
    for pools in made:
        pools.backend.before_layer = lambda *_: None
        await pools.client.close()
        await pools.server.stop()
        pools.backend.stop()
        for pool in (pools.source, pools.pool):
            pool.unlink()
            pool.close()


PAIRS = [(2, 1), (1, 2), (2, 2), (1, 3), (3, 1), (2, 3), (3, 2), (4, 6), (12, 4), (1, 12)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("tp", PAIRS)
async def test_each_rank_gets_its_heads_and_bytes_are_arithmetic(make_pools, tp, transport):
    pools = await make_pools(tp, transport=transport)
    request = make_request("r", 203)
    _, completed = await pull_all(pools.pull(request, have_tokens=32))
    pools.assert_arrived(request, have_tokens=32)
    num_heads = sum(held.num_heads for held in pools.heads)
    token_bytes = LAYOUT.token_bytes // LAYOUT.num_kv_heads * num_heads
    assert completed.num_bytes == (13 - 2) * 16 * token_bytes
    assert completed.num_remote_tokens == 203 - 32
    await pools.settled()
    # Over tcp each part is sent; what is lent through shared memory counts once, however many ranks take it.
    lent_bytes = completed.num_bytes if transport == "tcp" else (13 - 2) * LAYOUT.block_bytes
    await until(lambda: pools.server.stats().num_bytes_sent == lent_bytes)
    assert ("release", "r") in pools.backend.calls


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("orders", [("HND", "NHD"), ("NHD", "HND"), ("NHD", "NHD")])
@pytest.mark.parametrize("tp", [(2, 1), (1, 2), (2, 3)])
async def test_ranks_block_sizes_and_orders_at_once(make_pools, tp, orders, transport):
    """Case KV-01: heads before tokens on one side, tokens before heads on the other."""
    source = msgspec.structs.replace(LAYOUT, order=orders[0], block_size=24)
    destination = msgspec.structs.replace(LAYOUT, order=orders[1])
    pools = await make_pools(tp, source, destination, transport=transport)
    request = make_request("r", 203)
    _, completed = await pull_all(pools.pull(request, have_tokens=48))
    pools.assert_arrived(request, have_tokens=48)
    assert completed.num_bytes == (9 - 2) * source.block_bytes
    await pools.settled()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_layers_are_read_by_every_rank_while_later_ones_are_computed(make_pools, transport):
    """The prefill is held before its last layer: what was promised until then arrives, in each rank's pool."""
    pools = await make_pools((2, 3), transport=transport)
    request = make_request("r", 50)
    held, reached = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def before_layer(_request_id: str, _chunk: int, layer: int) -> None:
        if layer == LAYOUT.num_layers - 1:
            loop.call_soon_threadsafe(reached.set)
            asyncio.run_coroutine_threadsafe(held.wait(), loop).result(30)

    pools.backend.before_layer = before_layer
    pulling = asyncio.ensure_future(pull_all(pools.pull(request)))
    await asyncio.wait_for(reached.wait(), 20)
    want = expected_kv(request.prompt_token_ids, LAYOUT)
    whole = slice(0, 48)  # the blocks that are full

    def arrived() -> bool:
        return all(
            np.array_equal(
                read_kv(pool, pools.blocks_of(50), 50)[:2, whole], want[:2, whole, :, held_.start : held_.stop]
            )
            for pool, held_ in zip(pools.own, pools.heads, strict=True)
        )

    await until(arrived)
    assert not pulling.done()
    held.set()
    await asyncio.wait_for(pulling, 20)
    pools.assert_arrived(request)
    await pools.settled()


async def test_one_rank_whose_blocks_were_reused_fails_the_whole(make_pools):
    """Of six parts one sees another generation: nothing counts, and both sides let go."""
    pools = await make_pools((3, 2))

    def reuse(_request_id: str, chunk: int, layer: int) -> None:
        if (chunk, layer) == (1, 0):
            pools.source.pools[2].generations[:] += 7

    pools.backend.before_layer = reuse
    with pytest.raises(LeaseLost):
        await pull_all(pools.pull(make_request("r", 203)))
    await pools.settled()
    pools.backend.before_layer = lambda *_: None
    assert ("abort", "r") in pools.backend.calls


async def test_one_rank_whose_bytes_change_on_the_way_fails_the_whole(make_pools, monkeypatch):
    pools = await make_pools((2, 1), transport="tcp")
    unchanged = DataSender._unchanged

    def overwrite(sender: DataSender, blocks, offered) -> bool:  # between the checksum and the bytes
        pools.source.pools[1].view()[LAYOUT.num_layers - 1] += 1
        return unchanged(sender, blocks, offered)

    monkeypatch.setattr(DataSender, "_unchanged", overwrite)
    with pytest.raises(TransferCorrupt):
        await pull_all(pools.pull(make_request("r", 100)))
    await pools.settled()


async def test_a_reader_that_leaves_ends_every_part(make_pools):
    pools = await make_pools((2, 3))
    request = make_request("r", 203)
    async with contextlib.aclosing(pools.pull(request)) as events:
        async for _ in events:
            break
    await pools.settled()
    await pull_all(pools.pull(make_request("s", 203)))
    pools.assert_arrived(make_request("s", 203))


def identity_with(ranks: tuple[RankPool, ...], tp_size: int):
    pool = make_pool(LAYOUT, 4, named=False)
    identity = make_identity(pool)
    pool.close()
    fingerprint = msgspec.structs.replace(identity.fingerprint, tp_size=tp_size)
    return msgspec.structs.replace(identity, fingerprint=fingerprint, ranks=ranks)


@pytest.mark.parametrize(
    ("ranks", "tp_size", "told"),
    [
        ((), 2, "names 0 ranks"),
        ((RankPool(0, 3), RankPool(3, 3)), 1, "names 2 ranks"),
        ((RankPool(0, 3), RankPool(3, 2)), 2, "no rank with KV head 5"),
        ((RankPool(0, 2), RankPool(3, 3)), 2, "3 KV heads from 3"),
        ((RankPool(0, 3), RankPool(3, 4)), 2, "4 KV heads from 3"),
    ],
)
def test_ranks_that_do_not_hold_every_head_are_refused(ranks, tp_size, told):
    (line,) = refusals(identity_with(ranks, tp_size), identity_with((), 1))
    assert line.startswith("ranks: prefill") and told in line
    (line,) = refusals(identity_with((), 1), identity_with(ranks, tp_size))
    assert line.startswith("ranks: decode") and told in line


def test_how_many_ranks_there_are_refuses_nothing():
    two = identity_with((RankPool(0, 3), RankPool(3, 3)), 2)
    twelve = identity_with(tuple(RankPool(rank // 2, 1) for rank in range(12)), 12)
    assert refusals(two, twelve) == refusals(twelve, two) == refusals(two, identity_with((), 1)) == ()


async def test_a_lender_whose_ranks_do_not_add_up_is_refused_by_the_reader(make_pools):
    pools = await make_pools((2, 1))
    odd = msgspec.structs.replace(pools.server.identity, ranks=pools.server.identity.ranks[:1])
    pools.server.identity = odd
    with pytest.raises(PeerRefused) as caught:
        await pull_all(pools.pull(make_request("r", 20)))
    assert "ranks" in str(caught.value)


def test_equal_ranks_move_whole_blocks_and_unequal_ones_few_strided_copies():
    """Copies of one region of 32 adjacent blocks, by how the heads are shared."""
    source, own = make_pool(LAYOUT, 40, tp=2), make_pool(LAYOUT, 40, tp=2)
    one = make_pool(LAYOUT, 40)
    blocks = list(range(32))
    try:
        equal = place(own, blocks, make_identity(source), (0, 512), mapped=True)
        assert [part.own_blocks(0, 32) for part in equal.parts] == [tuple(blocks)] * 2
        for pool, peer in ((one, source), (own, one)):
            placement = place(pool, blocks, make_identity(peer), (0, 512), mapped=True)
            for part in placement.parts:
                (copy,) = part._plan(blocks, 0, 32)
                assert copy.count == 64 and copy.num_bytes == 3 * 16 * 8 * 2  # K and V of each block: three heads
    finally:
        for pool in (source, own, one):
            pool.unlink()
            pool.close()


def test_heads_that_are_wanted_are_asked_for_where_memory_cannot_be_mapped():
    own, one = make_pool(LAYOUT, 8, tp=3), make_pool(LAYOUT, 8)
    try:
        placement = place(own, [0, 1], make_identity(one), (0, 32), mapped=False)
        assert [part.shard.asked for part in placement.parts] == [HeadRange(0, 2), HeadRange(2, 4), HeadRange(4, 6)]
        assert [part.own_blocks(0, 2) for part in placement.parts] == [(0, 1)] * 3  # they arrive as they will lie
        assert placement.source_block_bytes == LAYOUT.layer_block_bytes
    finally:
        for pool in (own, one):
            pool.unlink()
            pool.close()


@pytest.mark.parametrize(
    "wrong",
    [{"rank": 2}, {"rank": 1, "head_start": 2, "head_stop": 4}, {"head_start": 1, "head_stop": 1}, {"head_stop": 4}],
)
def test_what_a_rank_does_not_hold_is_not_lent(wrong: dict[str, int]) -> None:
    """Rank 0 holds heads 0 to 3, rank 1 heads 3 to 6."""
    pool = make_pool(LAYOUT, 8, tp=2)
    good = Read(1, bytes(TICKET_BYTES), 0, 1, 0, 2, rank=1, head_start=4, head_stop=6)
    try:
        (piece,) = lent_pieces(pool, good, 0, (3, 5))
        assert piece.nbytes == 2 * 2 * 2 * 16 * 8 * 2  # blocks, K and V, heads, tokens, head dim, bytes
        odd = msgspec.structs.replace(good, **{"rank": 0, "head_start": 0, "head_stop": 0, **wrong})
        assert lent_pieces(pool, odd, 0, (3, 5)) is None
    finally:
        pool.unlink()
        pool.close()
