"""Failures that users of such systems met elsewhere, each named by its case id, against a whole fleet."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from router.fleet import LONG, SHORT, Fleet, RawWorker, ask_raw, running_fleet
from router.gates import until_empty
from router.rig import BRISK, Rig, make_rig, read_stream
from workers.scripted import until

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import CapacityError, RemoteError
from kvbaton.workers.protocol import WorkerStats

PROMPT = "the quick brown fox and the lazy dog, " * 8
SPLIT: Any = {"p0": "prefill", "d0": "decode"}


def fresh(number: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"{number} {PROMPT}", "temperature": 0, "max_tokens": 8, **more}


@pytest.mark.parametrize("fault", ["refused", "reset", "hangs"])
async def test_case_fl_01_prefill_that_fails_at_once_or_hangs(tiny_model_dir: Path, fault: str) -> None:
    """FL-01: the client of a stream gets its answer by another way, or with ``error`` one 502; never a wait."""
    for policy in ("local", "error"):
        async with make_rig(tiny_model_dir, SPLIT, BRISK, on_prefill_failure=policy) as rig:
            kv = rig.kv_proxies["p0"]
            if fault == "refused":
                await kv.refuse()
            elif fault == "reset":
                kv.to_client.cut_after_bytes = 1
            else:
                kv.stall()
            told = await rig.ask(fresh(1, max_tokens=200))
            if policy == "local":
                assert told.answer == (await rig.expected(fresh(1, max_tokens=200))).answer
            else:
                assert told.status == 502 and told.error is not None and told.error["code"] == "prefill_failed"
            await until(lambda: rig.workers["d0"].stats().num_blocks_used == 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_case_fl_02_the_status_of_decode_is_the_status(tokenizer: Tokenizer, info: bytes, stream: bool) -> None:
    """FL-02: 400, then 503: never 200 with an empty body. After the first byte: an error event."""
    for status in (400, 503):
        body = b'{"error":{"message":"said by decode","type":"t","param":"p","code":"c"}}'
        got, answer, _ = await ask_raw(tokenizer, RawWorker(info, [body], status), {"prompt": SHORT, "stream": stream})
        assert (got, answer["error"]["message"], answer["error"]["param"]) == (status, "said by decode", "p")
    if stream:
        event = b'data: {"id":"i","created":1,"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
        error = b'data: {"error":{"message":"said by decode","type":"t","param":null,"code":"c"}}\n\n'
        got, raw, headers = await ask_raw(tokenizer, RawWorker(info, [event, error]), {"prompt": SHORT, "stream": True})
        told = read_stream(raw, got, headers)
        assert told.error is not None and told.error["message"] == "said by decode"
        assert not told.finish and not told.done


async def test_case_fl_06_a_bad_link_heals(tiny_model_dir: Path) -> None:
    """FL-06: nothing passes for a while. Requests go other ways meanwhile, and hand-offs come back by themselves."""
    async with make_rig(tiny_model_dir, SPLIT, BRISK) as rig:
        assert (await rig.ask(fresh(0))).headers["x-kvbaton-decision"] == "remote"
        rig.kv_proxies["p0"].stall()
        for number in range(1, 4):
            told = await rig.ask(fresh(number))
            assert told.answer == (await rig.expected(fresh(number))).answer
        assert rig.retries("prefill_failed") >= 1
        rig.heal()
        await rig.fleet.poll()
        for number in range(4, 7):
            told = await rig.ask(fresh(number))
            assert told.answer == (await rig.expected(fresh(number))).answer
            assert told.headers["x-kvbaton-decision"] == "remote"
        failures = rig.fleet.counter('kvbaton_router_member_failures_total{cause="prefill_failed",member="p0"}')
        assert failures == rig.retries("prefill_failed")


@pytest.mark.parametrize("stream", [True, False])
async def test_case_fl_12_a_deadline_during_the_transfer_is_named(tiny_model_dir: Path, stream: bool) -> None:
    """FL-12: not 200 with ``finish_reason`` length."""
    async with make_rig(tiny_model_dir, SPLIT, request_timeout_s=0.6) as rig:
        kv = rig.kv_proxies["p0"]
        kv.to_client.stall_after_bytes = 20_000 if stream else 2_000
        status, answer, headers = await rig.fleet.post(fresh(1, stream=stream, max_tokens=50))
        assert kv.to_client.num_stalled <= 1, "on a slow machine the deadline comes before that byte"
        if stream and status == 200:  # the first token was out
            told = read_stream(answer, status, headers)
            assert told.error is not None and told.error["code"] == "deadline_exceeded" and not told.finish
        else:
            assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
            assert "deadline" in answer["error"]["message"]
        await until(lambda: rig.workers["d0"].stats().num_active == 0)
        rig.heal()


async def test_case_fl_14_an_error_ends_the_answer(tokenizer: Tokenizer) -> None:
    """FL-14: n = 0 is a plain 400; an error in the middle is an event, and then the answer is over."""
    async with running_fleet(tokenizer, {"b0": "both"}) as fleet:
        status, answer, _ = await fleet.post({"prompt": SHORT, "n": 0, "stream": True})
        assert (status, answer["error"]["param"]) == (400, "n")
        fleet.workers["b0"].gate_at, fleet.workers["b0"].error = 3, RemoteError("gone")
        host, port = fleet.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": SHORT, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        raw = await reader.read()  # to the end of the connection
        writer.close()
        assert raw.endswith(b"0\r\n\r\n") and b'data: {"error":' in raw and b"[DONE]" not in raw


async def leave_early(rig: Rig, count: int, tag: str) -> list[asyncio.Task[Any]]:
    """Clients whose hand-offs are all under way."""
    sent = rig.fleet.counter('kvbaton_router_decisions_total{decision="remote"}')
    asking = [asyncio.ensure_future(rig.ask({**fresh(i), "prompt": f"{tag} {i} {PROMPT}"})) for i in range(count)]
    line = 'kvbaton_router_decisions_total{decision="remote"}'
    await until(lambda: rig.fleet.counter(line) >= sent + count or all(task.done() for task in asking))
    return asking


async def leave(asking: list[asyncio.Task[Any]]) -> None:
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_case_lk_01_clients_that_leave_before_decode_has_room(tiny_model_dir: Path) -> None:
    """LK-01: prefill is done, its KV cannot be taken over yet, and the client goes: P is told, and frees."""
    async with make_rig(tiny_model_dir, SPLIT) as rig:
        assert (await rig.ask(fresh(0))).done
        prefill, kv = rig.workers["p0"], rig.kv_proxies["p0"]
        for round_number in range(5):
            kv.partition("to_client")
            asking = await leave_early(rig, 6, f"round {round_number}")
            await until(lambda: prefill.stats().num_leases > 0)
            await leave(asking)
            await until_empty(prefill)
            kv.heal()
        assert prefill.stats().num_lease_expiries == 0, "freed because it was told, not by time"
        assert (await rig.ask(fresh(1))).answer == (await rig.expected(fresh(1))).answer


async def test_case_lk_02_many_clients_leave_in_the_middle_of_transfers(tiny_model_dir: Path) -> None:
    """LK-02: transfers on a narrow link, all clients killed, again and again; then one request as if nothing was."""
    async with make_rig(tiny_model_dir, SPLIT) as rig:
        assert (await rig.ask(fresh(0))).done
        for round_number in range(4):
            rig.kv_proxies["p0"].to_client.bytes_per_s = 200_000
            moved = rig.kv_proxies["p0"].to_client.num_bytes
            asking = await leave_early(rig, 12, f"killed {round_number}")
            await until(lambda n=moved: rig.kv_proxies["p0"].to_client.num_bytes > n + 20_000)  # type: ignore[misc]
            await leave(asking)
            rig.heal()
            await rig.check_empty()
        told = await rig.ask(fresh(1))
        assert told.answer == (await rig.expected(fresh(1))).answer
        assert told.headers["x-kvbaton-decision"] == "remote"


async def test_case_rt_01_what_was_just_sent_counts_as_load(tokenizer: Tokenizer) -> None:
    """RT-01: polls lie far apart; a burst is not sent to whoever looked idle."""
    roles: Any = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    async with running_fleet(tokenizer, roles) as fleet:
        fleet.workers["p1"].reported = WorkerStats(num_blocks=1000, num_active=1, num_running=1)
        await fleet.poll()
        for worker in fleet.workers.values():
            worker.gate.clear()
        posts = [asyncio.ensure_future(fleet.post({"prompt": f"{i} {LONG}"})) for i in range(8)]
        await until(lambda: sum(len(fleet.workers[d].requests) for d in ("d0", "d1")) == 8)
        for worker in fleet.workers.values():
            worker.gate.set()
        chosen = Counter(headers["x-kvbaton-prefill"] for _, _, headers in await asyncio.gather(*posts))
        assert max(chosen.values()) <= 5 and sum(chosen.values()) == 8


async def test_case_rt_02_counts_go_back_when_clients_leave(tokenizer: Tokenizer) -> None:
    """RT-02: 400 requests aborted while they wait for headers; one worker restarts; what follows spreads evenly."""
    async with running_fleet(tokenizer, {"b0": "both", "b1": "both", "b2": "both"}) as fleet:
        for worker in fleet.workers.values():
            worker.gate.clear()
        for _ in range(4):
            posts = [asyncio.ensure_future(fleet.post({"prompt": SHORT})) for _ in range(100)]
            await until(lambda: fleet.gateway.open.num == 100)
            await leave(posts)
            await fleet.settled()
            await until(lambda: not any(worker.num_open for worker in fleet.workers.values()))
            fleet.check_idle()
        fleet.workers["b1"].incarnation = "b1-2"
        await fleet.poll()
        served = await spread(fleet, 60)
        assert all(14 <= served[name] <= 26 for name in fleet.workers), served


async def spread(fleet: Fleet, count: int) -> Counter[str]:
    """That many at once: how many each worker had."""
    for worker in fleet.workers.values():
        worker.gate.clear()
        worker.requests.clear()
    posts = [asyncio.ensure_future(fleet.post({"prompt": SHORT})) for _ in range(count)]
    await until(lambda: sum(len(w.requests) for w in fleet.workers.values()) == count)
    for worker in fleet.workers.values():
        worker.gate.set()
    assert [status for status, _, _ in await asyncio.gather(*posts)] == [200] * count
    return Counter({name: len(worker.requests) for name, worker in fleet.workers.items()})


async def test_case_rt_08_prompts_shorter_than_a_block_spread_too(tokenizer: Tokenizer) -> None:
    """RT-08: no block of them is hashed, and still they are load."""
    async with running_fleet(tokenizer, {"b0": "both", "b1": "both"}, index_block_tokens=768) as fleet:
        served = await spread(fleet, 12)
        assert all(5 <= count <= 7 for count in served.values()), served


@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 500])
async def test_case_fl_15_a_workers_status_and_words_pass(tokenizer: Tokenizer, info: bytes, status: int) -> None:
    """FL-15: 4xx as they are, Retry-After too; 5xx as 502 or 503; nothing of our network."""
    body = b'{"error":{"message":"said by the worker","type":"t","param":"p","code":"c"}}'
    worker = RawWorker(info, [body], status, [(b"retry-after", b"7")])
    got, answer, headers = await ask_raw(tokenizer, worker, {"prompt": SHORT})
    assert got == (502 if status == 500 else status)
    assert answer["error"] == {"message": "said by the worker", "type": "t", "param": "p", "code": "c"}
    assert headers["retry-after"] == "7"
    leak = RawWorker(info, [b"Traceback (most recent call last): at 10.0.0.7:8101"], status)
    _, answer, _ = await ask_raw(tokenizer, leak, {"prompt": SHORT})
    assert "Traceback" not in json.dumps(answer) and "10.0.0.7" not in json.dumps(answer)


async def test_case_lk_04_a_prompt_that_every_cache_has_is_not_held(tiny_model_dir: Path) -> None:
    """LK-04: the same prompt again and again. What it held is free each time, and nothing adds up."""
    async with make_rig(tiny_model_dir, SPLIT) as rig:
        expected, used = await rig.expected(fresh(1)), []
        for _ in range(30):
            told = await rig.ask(fresh(1))
            assert told.answer == expected.answer
            await rig.check_empty()
            used.append([rig.workers[name].stats().num_blocks_cached for name in ("p0", "d0")])
        assert used[1:] == [used[1]] * 29


async def test_case_lk_06_a_prefix_that_decode_has_needs_no_receiving_blocks(tiny_model_dir: Path) -> None:
    """LK-06: many warm requests with one prefix; all end, and nothing of what was reserved for them stays."""
    async with make_rig(tiny_model_dir, SPLIT) as rig:
        bodies = [{**fresh(0), "prompt": f"{PROMPT} and then {i}", "max_tokens": 4} for i in range(60)]
        assert (await rig.ask(bodies[0])).done
        told = await asyncio.gather(*(rig.ask(body) for body in bodies))
        assert all(one.done and one.error is None for one in told)
        await rig.check_empty()


async def test_case_lk_12_without_room_nobody_spins(tokenizer: Tokenizer) -> None:
    """LK-12: three requests and no room: they wait in a queue that can be seen, are tried now and then, and end."""
    async with running_fleet(tokenizer, {"b0": "both"}, queue_timeout_s=2.0) as fleet:
        worker = fleet.workers["b0"]
        worker.error = CapacityError("full")
        posts = [asyncio.ensure_future(fleet.post({"prompt": f"{i} {SHORT}"})) for i in range(3)]
        await until(lambda: fleet.dispatcher.num_queued == 3)
        fleet.dispatcher.export()
        assert fleet.counter("kvbaton_router_queued_requests") == 3
        answers = await asyncio.gather(*posts)
        assert [status for status, _, _ in answers] == [429] * 3
        assert {answer["error"]["code"] for _, answer, _ in answers} <= {"no_capacity", "queue_full"}
        assert len(worker.requests) <= 3 + 3 * (2.0 / 0.25 + 1), "tried in a loop"


async def test_case_kv_16_an_answer_alone_proves_no_hand_off(tiny_model_dir: Path) -> None:
    """KV-16: P computed the prompt, D did not, and exactly its blocks moved."""
    async with make_rig(tiny_model_dir, SPLIT) as rig:
        prefill, decode = rig.workers["p0"], rig.workers["d0"]
        told = await rig.ask(fresh(1))
        assert told.done and told.usage is not None
        num_prompt = told.usage["prompt_tokens"]
        assert prefill.stats().num_prompt_tokens == num_prompt
        assert decode.stats().num_prompt_tokens == 0
        num_blocks = -(-num_prompt // 16)
        layout = decode.layout
        assert decode.stats().transfer_bytes_received == num_blocks * layout.num_layers * layout.layer_block_bytes
