"""The same hand-off on uvloop, which the servers run on, and deadlines on a loop that was away."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import uvloop
from prefill_process import expected_kv, make_identity, make_pool, make_request, read_kv

from kvbaton.kv.layout import KVLayout
from kvbaton.transfer.client import HandoffClient, pull_all
from kvbaton.transfer.options import HandoffOptions

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
SCRIPT = Path(__file__).with_name("prefill_process.py")


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def new_loop(request):
    return asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop


@pytest.fixture
def address(transport):
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), msgspec.json.encode(LAYOUT).decode(), "64", "0", transport],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=SCRIPT.parents[2],
        env={"PYTHONPATH": str(SCRIPT.parents[2])},
    )
    with process:
        yield ("127.0.0.1", int(process.stdout.readline()))
        process.stdin.close()


def run(new_loop, transport, work):
    pool = make_pool(LAYOUT, 64, named=False)

    async def main():
        client = HandoffClient(make_identity(pool), pool, HandoffOptions(transport=transport))
        try:
            await work(client, pool)
        finally:
            await client.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    pool.close()


def test_pulls_and_aborts_on_either_loop(new_loop, address, transport):
    async def work(client, pool):
        request = make_request(f"whole {transport} {new_loop}", 200)
        await pull_all(client.pull(address, request, 0, list(range(13))))
        assert (read_kv(pool, range(13), 200) == expected_kv(request.prompt_token_ids, LAYOUT)).all()
        for patience_s in (0.0, 0.001, 0.003, 0.01):
            try:
                async with asyncio.timeout(patience_s):
                    again = make_request(f"left {patience_s} {transport} {new_loop}", 200)
                    await pull_all(client.pull(address, again, 0, list(range(20, 33))))
            except TimeoutError:
                pass
        await pull_all(client.pull(address, make_request(f"after {transport} {new_loop}", 50), 0, [1, 2, 3, 4]))

    run(new_loop, transport, work)


def test_what_has_arrived_is_taken_in_before_the_deadline_is_judged(new_loop, address, transport):
    """The loop is away while the peer finishes, until after the deadline; there is nothing to copy."""

    async def work(client, _pool):
        await client.connect(address)
        request = make_request(f"late {transport} {new_loop}", 64)
        pull = client.pull(address, request, 64, [1, 2, 3, 4], 0.5)
        task = asyncio.ensure_future(pull_all(pull))
        while client.stats().num_pulls == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(1.0)  # noqa: ASYNC251 - the point of the test
        first, completed = await task
        assert completed.num_bytes == 0 and first.output.token_id == sum(request.prompt_token_ids) % 1000

    run(new_loop, transport, work)
