"""Server and client over real sockets, real shared memory and real threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import numpy as np
import pytest
from prefill_process import expected_kv, make_request, read_kv

from kvbaton.kv.layout import KVLayout
from kvbaton.transfer.client import Completed, FirstToken, Moved
from kvbaton.transfer.errors import DeadlineExceeded, HandoffError, LeaseLost, PeerUnreachable, PrefillFailed
from kvbaton.types import CapacityError, LocalError

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")


class Gate:
    """Holds the prefill thread before a layer until the test opens it."""

    def __init__(self, pair, chunk: int, layer: int):
        self._at = (chunk, layer)
        self._open = threading.Event()
        self._loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()
        pair.backend.before_layer = self

    def __call__(self, request_id: str, chunk: int, layer: int) -> None:
        if (chunk, layer) == self._at and not self._open.is_set():
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()


async def until(condition, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def everything_promised_is_sent(pair, transport: str, num_layer_blocks: int) -> None:
    """While the prefill thread is held: no read over tcp is under way.

    One that is may learn of the end before the control connection says why, or send bytes that change under its
    checksum; both are failures too, with another name.
    """
    num_bytes = num_layer_blocks * LAYOUT.layer_block_bytes
    if transport == "tcp":
        await until(lambda: pair.server.stats().num_bytes_sent == num_bytes)


# -- what arrives


async def test_what_a_pull_took_is_told_and_copying_is_a_part_of_it(make_pair, transport):
    pair, moved = await make_pair(), Moved()
    _, completed = await pair.pull_all(make_request("r", 160), moved=moved)
    assert moved.num_bytes == completed.num_bytes > 0 and moved.transfer_s == completed.transfer_s
    assert 0 < moved.copying_s <= moved.transfer_s
    nothing = Moved()
    await pair.pull_all(make_request("s", 64), have_tokens=64, moved=nothing)
    assert (nothing.num_bytes, nothing.copying_s) == (0, 0.0)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 160, 333])
async def test_every_byte_arrives_and_bytes_are_the_layouts_arithmetic(make_pair, num_tokens, transport):
    pair = await make_pair()
    request = make_request("r", num_tokens)
    blocks = pair.dst_blocks(num_tokens)
    first, completed = await pair.pull_all(request, blocks=blocks)
    assert first.output.token_id == sum(request.prompt_token_ids) % 1000
    assert completed.num_bytes == LAYOUT.blocks_for(num_tokens) * LAYOUT.block_bytes
    assert completed.num_remote_tokens == num_tokens and completed.transport == transport
    pair.assert_arrived(request, blocks)
    await pair.settled()
    await until(lambda: pair.server.stats().num_bytes_sent == completed.num_bytes > 0)  # counted behind the last byte
    assert ("release", "r") in pair.backend.calls


@pytest.mark.parametrize("have_tokens", [16, 160, 192])
async def test_a_partial_hit_moves_the_rest_only(make_pair, have_tokens):
    pair = await make_pair()
    request = make_request("r", 200)
    blocks = pair.dst_blocks(200)
    pair.pool.buffer[:] = 0xEE
    _, completed = await pair.pull_all(request, blocks=blocks, have_tokens=have_tokens)
    assert completed.num_bytes == (13 - have_tokens // 16) * LAYOUT.block_bytes
    assert completed.num_remote_tokens == 200 - have_tokens
    pair.assert_arrived(request, blocks, have_tokens)
    assert (read_kv(pair.pool, blocks, have_tokens) == 0xEEEE).all(), "blocks shared with others were written"


async def test_zero_blocks_to_move_moves_nothing_and_completes(make_pair):
    pair = await make_pair()
    request = make_request("r", 64)
    pair.pool.buffer[:] = 0xEE
    first, completed = await pair.pull_all(request, have_tokens=64)
    assert completed.num_bytes == 0 and completed.num_remote_tokens == 0 and first.output.finish_reason is None
    assert (pair.pool.buffer == 0xEE).all()
    await pair.settled()


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"block_size": 32}, {"block_size": 16}),
        ({"block_size": 16}, {"block_size": 32}),
        ({"block_size": 12}, {"block_size": 16}),
        ({"order": "NHD"}, {"order": "HND"}),
        ({"order": "NHD", "block_size": 8}, {"order": "HND", "block_size": 24}),
    ],
)
@pytest.mark.parametrize("have_blocks", [0, 2])
async def test_other_block_sizes_and_orders_are_converted(make_pair, prefill, decode, have_blocks):
    base = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "block_size": 16, "dtype": "float32"}
    source, destination = KVLayout(**{**base, **prefill}), KVLayout(**{**base, **decode})
    pair = await make_pair(source, destination, backend={"chunk_tokens": 50})
    request = make_request("r", 203)
    blocks = pair.dst_blocks(203)
    have_tokens = have_blocks * destination.block_size
    pair.pool.buffer[:] = 0xEE
    _, completed = await pair.pull_all(request, blocks=blocks, have_tokens=have_tokens)
    pair.assert_arrived(request, blocks, have_tokens)
    num_source = source.blocks_for(203) - have_tokens // source.block_size
    assert completed.num_bytes == num_source * source.block_bytes
    assert (read_kv(pair.pool, blocks, have_tokens) == 0xEEEEEEEE).all()
    untouched = [block for block in range(pair.pool.num_blocks) if block not in blocks]
    assert (pair.pool.view()[:, untouched] == 0xEE).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
async def test_the_dtype_decides_the_payload(make_pair, dtype):
    layout = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, dtype=dtype)
    pair = await make_pair(layout)
    request = make_request("r", 100)
    blocks = pair.dst_blocks(100)
    _, completed = await pair.pull_all(request, blocks=blocks)
    assert completed.num_bytes == 7 * 16 * 2 * 2 * 2 * 8 * layout.itemsize
    pair.assert_arrived(request, blocks)


async def test_scattered_blocks_on_both_sides(make_pair):
    pair = await make_pair(num_blocks=96)
    pair.backend.num_blocks_moved_apart = 1
    request = make_request("r", 300)
    blocks = pair.dst_blocks(300)[::-1][:7] + [60, 40, 61, 41, 62, 42, 63, 43, 64, 44, 65, 45]
    await pair.pull_all(request, blocks=blocks)
    pair.assert_arrived(request, blocks)


async def test_small_copies_and_many_in_flight(make_pair):
    pair = await make_pair(max_copy_bytes=3 * LAYOUT.layer_block_bytes, max_copies=5)
    request = make_request("r", 333)
    blocks = pair.dst_blocks(333)
    _, completed = await pair.pull_all(request, blocks=blocks)
    assert completed.num_bytes == 21 * LAYOUT.block_bytes
    pair.assert_arrived(request, blocks)


# -- when it arrives


async def test_layers_are_read_while_later_ones_are_not_computed(make_pair):
    pair = await make_pair()
    gate = Gate(pair, chunk=1, layer=2)
    request = make_request("r", 128)
    blocks = pair.dst_blocks(128)
    events = pair.pull(request, blocks=blocks)
    first = asyncio.ensure_future(anext(events))
    await gate.reached.wait()
    want = expected_kv(request.prompt_token_ids, LAYOUT)
    # The first chunk in all layers and the second one in two of them arrive though the gate is shut.
    await until(lambda: np.array_equal(read_kv(pair.pool, blocks, 64), want[:, :64]))
    await until(lambda: np.array_equal(read_kv(pair.pool, blocks, 128, slice(0, 2)), want[:2]))
    assert not first.done()
    gate.open()
    assert isinstance(await first, FirstToken) and isinstance(await anext(events), Completed)
    pair.assert_arrived(request, blocks)


async def test_without_streaming_nothing_is_read_before_the_last_layer(make_pair):
    pair = await make_pair(streaming=False)
    gate = Gate(pair, chunk=1, layer=3)
    request = make_request("r", 128)
    blocks = pair.dst_blocks(128)
    task = asyncio.ensure_future(pair.pull_all(request, blocks=blocks))
    await gate.reached.wait()
    assert not pair.pool.buffer.any()
    gate.open()
    await task
    pair.assert_arrived(request, blocks)


@pytest.mark.parametrize("max_tokens", [1, 8])
async def test_a_request_that_ends_at_its_first_token_waits_for_no_transfer(make_pair, max_tokens):
    pair = await make_pair(backend={"finish": "stop"})
    request = make_request("r", 100, max_tokens=max_tokens)
    first, completed = await pair.pull_all(request)
    assert first.output.finish_reason == "stop"
    assert completed.num_bytes == 0 or max_tokens > 1
    await pair.settled()
    assert ("release", "r") in pair.backend.calls


async def test_many_at_once_share_one_connection(make_pair):
    pair = await make_pair(num_blocks=256)
    requests = [make_request(f"r{i}", 20 + 29 * i, seed=i) for i in range(12)]
    blocks, taken = {}, 0
    for request in requests:
        needed = LAYOUT.blocks_for(len(request.prompt_token_ids))
        blocks[request.request_id] = list(range(taken, taken + needed))
        taken += needed
    await asyncio.gather(*(pair.pull_all(r, blocks=blocks[r.request_id]) for r in requests))
    for request in requests:
        pair.assert_arrived(request, blocks[request.request_id])
    assert pair.server.stats().num_connections == 1 and pair.server.stats().num_released == 12
    await pair.settled()


# -- aborts


@pytest.mark.parametrize("at", ["start", "offer", "middle", "first"])
async def test_leaving_early_frees_everything_on_both_sides(make_pair, at):
    pair = await make_pair()
    chunk, layer = {"start": (0, 0), "offer": (0, 0), "middle": (1, 2), "first": (9, 9)}[at]
    gate = Gate(pair, chunk, layer)
    request = make_request("r", 128)
    blocks = pair.dst_blocks(128)
    task = asyncio.ensure_future(pair.pull_all(request, blocks=blocks))
    if at == "first":
        await until(lambda: pair.server.stats().num_sessions == 1 or task.done())
    elif at != "start":
        await gate.reached.wait()
    else:
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    pair.pool.buffer[:] = 0xEE  # the blocks are somebody else's now
    gate.open()
    await pair.settled()
    await pair.pull_all(make_request("probe", 40), blocks=[50, 51, 52])
    others = [block for block in range(pair.pool.num_blocks) if block not in (50, 51, 52)]
    assert (pair.pool.view()[:, others] == 0xEE).all(), "something landed after the pull had ended"
    await pair.settled()


async def test_aborts_at_random_leave_nothing_and_the_next_request_is_served(make_pair):
    pair = await make_pair(num_blocks=512)
    rng = np.random.default_rng(7)
    blocks = iter(range(0, 500, 9))

    async def one(index: int, patience_s: float) -> None:
        start = next(blocks)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await pair.pull_all(make_request(f"r{index}", 130, seed=index), blocks=list(range(start, start + 9)))

    for _ in range(3):
        blocks = iter(range(0, 500, 9))
        await asyncio.gather(*(one(i, float(p)) for i, p in enumerate(rng.uniform(0, 0.06, 40))))
        await pair.settled()
    request = make_request("probe", 130)
    await pair.pull_all(request)
    pair.assert_arrived(request, pair.dst_blocks(130))
    stats = pair.client.stats()
    assert stats.num_pulls == 0 and stats.num_connections == 1 and stats.num_failed == 0


async def test_the_same_id_again_after_an_abort_is_served(make_pair):
    pair = await make_pair()
    gate = Gate(pair, 0, 1)
    request = make_request("r", 128)
    task = asyncio.ensure_future(pair.pull_all(request))
    await gate.reached.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    gate.open()
    await until(lambda: ("abort", "r") in pair.backend.calls)
    await pair.pull_all(request)
    pair.assert_arrived(request, pair.dst_blocks(128))


async def test_an_id_in_use_is_refused_and_the_first_user_is_not_harmed(make_pair):
    pair = await make_pair()
    gate = Gate(pair, 0, 1)
    request = make_request("r", 128)
    task = asyncio.ensure_future(pair.pull_all(request))
    await gate.reached.wait()
    with pytest.raises(PrefillFailed, match="in use"):
        await pair.pull_all(request, blocks=list(range(40, 50)))
    gate.open()
    await task
    pair.assert_arrived(request, pair.dst_blocks(128))
    await pair.settled()


# -- failures


async def test_no_room_on_the_prefill_side_is_a_capacity_error(make_pair):
    pair = await make_pair(num_blocks=16)
    with pytest.raises(CapacityError, match="KV blocks are needed"):
        await pair.pull_all(make_request("r", 16 * 16), blocks=list(range(16)))
    await pair.settled()


async def test_a_request_the_prefill_side_finds_invalid_is_a_local_error_with_its_field(make_pair):
    pair = await make_pair()
    pair.backend.max_prompt_tokens = 50
    with pytest.raises(LocalError, match="too long") as caught:
        await pair.pull_all(make_request("r", 51))
    assert caught.value.field == "prompt" and not isinstance(caught.value, CapacityError)


async def test_a_step_that_fails_is_reported_at_once_and_is_retryable(make_pair, transport):
    pair = await make_pair()
    gate = Gate(pair, 1, 1)

    def fail(request_id, chunk, layer):
        gate(request_id, chunk, layer)
        if (chunk, layer) == (1, 1):
            raise RuntimeError("bad kernel")

    pair.backend.before_layer = fail
    task = asyncio.ensure_future(pair.pull_all(make_request("r", 128)))
    await gate.reached.wait()
    await everything_promised_is_sent(pair, transport, num_layer_blocks=4 * 4 + 4)
    gate.open()
    with pytest.raises(PrefillFailed, match="bad kernel") as caught:
        await task
    assert caught.value.retryable
    await pair.settled()


async def test_a_deadline_ends_a_pull_and_tells_the_prefill_side(make_pair):
    pair = await make_pair()
    gate = Gate(pair, 0, 2)
    await pair.client.connect(pair.address)
    with pytest.raises(DeadlineExceeded):
        await pair.pull_all(make_request("r", 128), deadline_s=1.0)  # time to ask, and the gate is shut
    gate.open()
    await pair.settled()
    assert ("abort", "r") in pair.backend.calls


async def test_a_lease_is_renewed_for_as_long_as_the_reader_lives(make_pair):
    pair = await make_pair(lease_s=5.0)
    gate = Gate(pair, 9, 9)
    request = make_request("r", 128)
    events = pair.pull(request)
    # The engine is busy with nothing here, so it answers renewals; the consumer is what is slow.
    assert isinstance(await anext(events), FirstToken)
    gate.open()
    assert isinstance(await anext(events), Completed)
    await events.aclose()
    pair.assert_arrived(request, pair.dst_blocks(128))


async def test_a_slow_engine_is_outlived_by_renewals(make_pair):
    """Renewals are answered between steps, so the steps here are chunks posted one at a time."""
    pair = await make_pair(lease_s=1.5)
    held = asyncio.Event()
    loop = asyncio.get_running_loop()
    original = pair.backend.start

    def start_without_first(request, have_tokens, sink):
        class Silent:
            def __getattr__(self, name):
                return getattr(sink, name)

            def on_first(self, output):
                self.output = output
                loop.call_soon_threadsafe(held.set)
                pair.late = lambda: sink.on_first(output)

        original(request, have_tokens, Silent())

    pair.backend.start = start_without_first
    task = asyncio.ensure_future(pair.pull_all(make_request("r", 128)))
    await held.wait()
    await until(lambda: [name for name, _ in pair.backend.calls].count("renew") >= 5)
    pair.late()
    await task
    pair.assert_arrived(make_request("r", 128), pair.dst_blocks(128))


async def test_a_lease_that_is_not_renewed_fails_loudly(make_pair):
    pair = await make_pair(lease_s=0.3)
    pair.backend.renews = False
    gate = Gate(pair, 9, 9)
    original = pair.backend.start
    pair.backend.start = lambda request, have, sink: original(request, have, _WithoutFirst(sink))
    with pytest.raises(LeaseLost):
        await pair.pull_all(make_request("r", 128))
    gate.open()
    await pair.settled()


class _WithoutFirst:
    def __init__(self, sink):
        self._sink = sink

    def __getattr__(self, name):
        return getattr(self._sink, name)

    def on_first(self, output):
        pass


async def test_blocks_reused_behind_the_readers_back_are_never_taken_for_kv(make_pair, transport):
    """The engine loses the lease without anybody noticing; only generations can tell."""
    pair = await make_pair()
    gate = Gate(pair, 1, 2)
    request = make_request("r", 128)
    task = asyncio.ensure_future(pair.pull_all(request))
    await gate.reached.wait()
    await everything_promised_is_sent(pair, transport, num_layer_blocks=4 * 4 + 2 * 4)
    pair.source.generations[:] += np.uint64(1)  # what the block manager does before it hands them out
    pair.source.buffer[:] = 0x55
    gate.open()
    with pytest.raises(LeaseLost):
        await task
    await pair.settled()


async def test_a_pull_from_nobody_is_unreachable_and_the_next_try_is_made_afresh(make_pair):
    pair = await make_pair(connect_s=1.0)
    address, pair.address = pair.address, ("127.0.0.1", 1)
    for _ in range(2):
        with pytest.raises(PeerUnreachable, match="127.0.0.1:1"):
            await pair.pull_all(make_request("r", 30))
    pair.address = address
    await pair.pull_all(make_request("r", 30))


async def test_a_server_that_stops_fails_its_readers_and_drains_when_asked(make_pair):
    pair = await make_pair()
    gate = Gate(pair, 1, 2)
    request = make_request("r", 128)
    task = asyncio.ensure_future(pair.pull_all(request))
    await gate.reached.wait()
    draining = asyncio.ensure_future(pair.server.stop(drain_s=20.0))
    await asyncio.sleep(0)
    with pytest.raises((CapacityError, HandoffError)):
        await pair.pull_all(make_request("late", 20), blocks=[40, 41])
    gate.open()
    await task
    assert await draining is True
    pair.assert_arrived(request, pair.dst_blocks(128))


async def test_a_server_that_does_not_drain_in_time_drops_its_readers(make_pair):
    pair = await make_pair()
    gate = Gate(pair, 1, 2)
    task = asyncio.ensure_future(pair.pull_all(make_request("r", 128)))
    await gate.reached.wait()
    assert await pair.server.stop(drain_s=0.05) is False
    with pytest.raises(PeerUnreachable):
        await task
    gate.open()


async def test_a_client_that_closes_fails_its_pulls_and_frees_the_prefill_side(make_pair):
    pair = await make_pair()
    gate = Gate(pair, 1, 2)
    task = asyncio.ensure_future(pair.pull_all(make_request("r", 128)))
    await gate.reached.wait()
    await pair.client.close()
    with pytest.raises(PeerUnreachable):
        await task
    gate.open()
    await pair.settled()
    with pytest.raises(PeerUnreachable, match="closed"):
        await pair.pull_all(make_request("s", 20))


@pytest.mark.parametrize(
    ("blocks", "have_tokens", "field"),
    [
        ([1, 2], 0, "dst_block_ids"),
        ([1, 1, 2], 0, "dst_block_ids"),
        ([1, 2, 99], 0, "dst_block_ids"),
        ([1, 2, 3], 5, "have_tokens"),
    ],
)
async def test_destinations_without_sense_are_refused_before_anything_is_asked(make_pair, blocks, have_tokens, field):
    pair = await make_pair()
    with pytest.raises(LocalError) as caught:
        await pair.pull_all(make_request("r", 40), blocks=blocks, have_tokens=have_tokens)
    assert caught.value.field == field
    assert pair.backend.calls == []


@pytest.mark.slow
async def test_hundreds_cancelled_at_once_again_and_again_leave_a_working_channel(make_pair):
    """More than the pool holds, so some are refused, some wait, some are computing and some are being read."""
    pair = await make_pair(num_blocks=400)
    rng = np.random.default_rng(3)
    for round_index in range(4):
        tasks = [
            asyncio.ensure_future(
                pair.pull_all(
                    make_request(f"{round_index}-{i}", 500, seed=i),
                    blocks=list(range(32 * (i % 12), 32 * (i % 12) + 32)),
                )
            )
            for i in range(300)
        ]
        await asyncio.sleep(float(rng.uniform(0.05, 0.5)))
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        bad = [o for o in outcomes if isinstance(o, Exception) and not isinstance(o, CapacityError)]
        assert not bad, bad[:3]
        await pair.settled()
    request = make_request("probe", 500)
    await pair.pull_all(request)
    pair.assert_arrived(request, pair.dst_blocks(500))
    assert pair.client.stats().num_connections == 1, "the channel survived all of it"
