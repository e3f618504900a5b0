"""A prefill worker or the way to it fails, at any point of a hand-off: the answer is right all the same.

The hand-off goes over tcp through a proxy, so that a fault can strike at every byte of it: of the control connection
(handshake, offer, progress, first token) and of the data connection (headers, KV).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from router.rig import BRISK, Rig, Told, make_rig, read_stream

from kvbaton.bench.fault_proxy import Path as ProxyPath
from kvbaton.transfer.options import HandoffOptions

PROMPT = "the quick brown fox and the lazy dog, " * 8
SPLIT: Any = {"p0": "prefill", "d0": "decode"}
BODY = {"prompt": PROMPT, "temperature": 1, "seed": 5, "max_tokens": 12}


def fresh(number: int) -> dict[str, Any]:
    """A prompt that no cache holds, so that every one moves its KV."""
    return {**BODY, "prompt": f"{number} {PROMPT}"}


async def sweep(rig: Rig, strike: Callable[[ProxyPath, int], None], num_points: int = 24) -> list[Told]:
    """The same fault at ``num_points`` places of a hand-off, each on a hand-off of its own."""
    kv, told = rig.kv_proxies["p0"].to_client, []
    before = kv.num_bytes
    assert (await rig.ask(fresh(0))).answer == (await rig.expected(fresh(0))).answer
    num_bytes = kv.num_bytes - before
    assert num_bytes > 10_000
    for number in range(1, num_points + 1):
        expected = await rig.expected(fresh(number))
        # Control messages come first and are few: half of the places are among the first two thousand bytes.
        at = number * 2000 * 2 // num_points if number % 2 else number * num_bytes // (num_points + 1)
        strike(kv, at)
        answer = await rig.ask(fresh(number))
        assert answer.status == 200, (at, answer.error)
        assert answer.answer == expected.answer, at
        told.append(answer)
        rig.heal()
        await rig.fleet.poll()
    await rig.check_empty()
    return told


async def test_prefill_is_cut_off_at_any_byte_of_a_hand_off(tiny_model_dir: Path) -> None:
    """Before its first token the request is tried again elsewhere; after it the stream is continued."""

    def strike(path: ProxyPath, at: int) -> None:
        path.cut_after_bytes = at

    async with make_rig(tiny_model_dir, SPLIT) as rig:
        await sweep(rig, strike)
        num_cut = rig.kv_proxies["p0"].to_client.num_cut
        assert num_cut >= 20
        assert rig.retries("prefill_failed") + rig.replays("prefill_failed") >= num_cut
        assert rig.fleet.counter("kvbaton_router_broken_streams_total") == 0


async def test_prefill_is_cut_off_before_and_after_its_first_token(tiny_model_dir: Path) -> None:
    """On a link so narrow that the first token is with the client long before the KV is with the decode worker."""
    async with make_rig(tiny_model_dir, SPLIT) as rig:
        kv = rig.kv_proxies["p0"]
        kv.to_client.cut_after_bytes = 1
        assert (await rig.ask(fresh(1))).answer == (await rig.expected(fresh(1))).answer
        assert (rig.retries("prefill_failed"), rig.replays("prefill_failed")) == (1, 0)
        await rig.fleet.poll()
        kv.to_client.bytes_per_s = 20_000
        raw, body = b"", {**fresh(2), "stream": True, "stream_options": {"include_usage": True}}
        async with rig.fleet.http.post(f"{rig.fleet.url}/v1/completions", json=body) as response:
            async for part in response.content.iter_any():
                if not raw:
                    kv.cut()
                    kv.heal()
                raw += part
            told = read_stream(raw, response.status, response.headers)
        assert told.answer == (await rig.expected(fresh(2))).answer
        assert (rig.retries("prefill_failed"), rig.replays("prefill_failed")) == (1, 1)


async def test_damaged_bytes_are_never_decoded_from(tiny_model_dir: Path) -> None:
    def strike(path: ProxyPath, at: int) -> None:
        path.corrupt_after_bytes = at

    async with make_rig(tiny_model_dir, SPLIT, BRISK) as rig:
        await sweep(rig, strike)
        num_corrupted = rig.kv_proxies["p0"].to_client.num_corrupted
        assert num_corrupted >= 20
        assert rig.retries("prefill_failed") + rig.replays("prefill_failed") >= num_corrupted


async def test_a_stalled_transfer_is_given_up(tiny_model_dir: Path) -> None:
    def strike(path: ProxyPath, at: int) -> None:
        path.stall_after_bytes = at

    async with make_rig(tiny_model_dir, SPLIT, BRISK) as rig:
        await sweep(rig, strike, num_points=8)
        num_stalled = rig.kv_proxies["p0"].to_client.num_stalled
        assert rig.retries("prefill_failed") + rig.replays("prefill_failed") >= num_stalled >= 6


@pytest.mark.parametrize("stream", [True, False])
async def test_case_fl_07_one_lost_copy_fails_or_is_computed_again(tiny_model_dir: Path, stream: bool) -> None:
    """FL-07: of all copies one is cut short. Never 200 with other text, and no cache holds what arrived."""
    for policy in ("error", "local"):
        async with make_rig(tiny_model_dir, SPLIT, on_prefill_failure=policy) as rig:
            body = {**fresh(1), "temperature": 0}
            expected = await rig.expected(body)
            rig.kv_proxies["p0"].to_client.cut_after_bytes = 20_000
            if stream:
                told = await rig.ask(body)
                text, status = told.texts.get(0, ""), told.status
                error = told.error
            else:
                status, answer, _ = await rig.fleet.post(body)
                error = answer.get("error")
                text = answer["choices"][0]["text"] if error is None else ""
            if policy == "local":
                assert (status, error, text) == (200, None, expected.texts[0])
                assert rig.retries("prefill_failed") + rig.replays("prefill_failed") == 1
            else:
                assert error is not None and error["code"] == "prefill_failed"
                assert status == (200 if text else 502) and expected.texts[0].startswith(text)
            rig.heal()
            await rig.fleet.poll()
            again = await rig.ask(body)
            assert again.answer == expected.answer, "what was received by halves is in a cache"


async def test_prefill_that_cannot_be_reached_is_gone_around(tiny_model_dir: Path) -> None:
    """It died before it heard of the request: its port refuses. Another prefill worker computes the prompt."""
    roles: Any = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
    async with make_rig(tiny_model_dir, roles) as rig:
        await rig.kv_proxies["p0"].refuse()
        for number in range(4):
            told = await rig.ask(fresh(number))
            assert told.answer == (await rig.expected(fresh(number))).answer
            assert told.headers["x-kvbaton-decision"] == "remote"
            assert told.headers["x-kvbaton-prefill"] == "p1"
            await rig.fleet.poll()
        assert rig.retries("prefill_failed") >= 1


async def test_without_a_prefill_pool_decode_computes_prompts_itself(tiny_model_dir: Path) -> None:
    async with make_rig(tiny_model_dir, SPLIT) as rig:
        await rig.kv_proxies["p0"].refuse()
        await rig.http_proxies["p0"].refuse()
        told = await rig.ask(fresh(1))  # nobody knows yet
        assert told.answer == (await rig.expected(fresh(1))).answer
        assert told.headers["x-kvbaton-decision"] == "fallback_prefill_failed"
        await rig.fleet.poll()
        told = await rig.ask(fresh(2))
        assert told.answer == (await rig.expected(fresh(2))).answer
        assert told.headers["x-kvbaton-decision"] == "fallback_no_prefill"
        await rig.http_proxies["p0"].listen()
        await rig.kv_proxies["p0"].listen()
        await rig.fleet.poll()
        assert (await rig.ask(fresh(3))).headers["x-kvbaton-decision"] == "remote", "no blacklist"


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_a_one_way_partition_between_decode_and_prefill(tiny_model_dir: Path, direction: Any) -> None:
    """Whoever is not heard is taken for dead after ``silence_s``, by both; then the request is computed elsewhere."""
    async with make_rig(tiny_model_dir, SPLIT, BRISK) as rig:
        assert (await rig.ask(fresh(0))).answer == (await rig.expected(fresh(0))).answer
        rig.kv_proxies["p0"].partition(direction)
        told = await rig.ask(fresh(1))
        assert told.answer == (await rig.expected(fresh(1))).answer
        assert rig.retries("prefill_failed") == 1
        rig.heal()
        await rig.check_empty()
        await rig.fleet.poll()
        told = await rig.ask(fresh(2))
        assert told.answer == (await rig.expected(fresh(2))).answer
        assert told.headers["x-kvbaton-decision"] == "remote"


async def test_case_kv_07_a_lease_that_ran_out_is_never_read_from(tiny_model_dir: Path) -> None:
    """KV-07: the reader's renewals do not arrive, the lease ends under its transfer, others reuse the blocks."""
    handoff = HandoffOptions(
        transport="tcp", lease_s=2.0, connect_s=1.0, heartbeat_s=0.1, silence_s=30.0, stall_s=30.0, streaming=False
    )
    async with make_rig(tiny_model_dir, SPLIT, handoff, first_token_min_s=60.0) as rig:
        prefill = rig.workers["p0"]
        await rig.ask(fresh(0))
        expected = await rig.expected(fresh(1))
        kv = rig.kv_proxies["p0"]
        kv.to_client.stall_after_bytes = 3000  # somewhere in the data: the reader waits
        asking = asyncio.ensure_future(rig.ask(fresh(1)))
        while not kv.to_client.stalled:  # noqa: ASYNC110
            await asyncio.sleep(0)
        kv.partition("to_server")
        async with asyncio.timeout(30):
            while prefill.stats().num_leases or prefill.stats().num_blocks_pinned:  # noqa: ASYNC110 (the engine's thread has no event for us)
                await asyncio.sleep(0.01)
        prefill.engine.call(lambda engine: engine.clear_cache()).result(30)
        # What was sent whole before the lease ended is good; so the reader must have given up before it may arrive.
        reader = rig.workers["d0"]
        async with asyncio.timeout(30):
            while reader.stats().num_transfer_failures == 0:  # noqa: ASYNC110
                await asyncio.sleep(0)
        rig.heal()
        told = await asking
        assert told.answer == expected.answer
        assert rig.retries("prefill_failed") + rig.replays("prefill_failed") == 1
