"""The router over real sockets, in front of workers that fail on request."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from typing import Any

import openai
import pytest
from router.fleet import KEY, LONG, SHORT, Fleet, RawWorker, ask_raw, running_fleet
from workers.scripted import sse_events, until

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.router.flight import AttemptFailed, Flight
from kvbaton.types import CapacityError
from kvbaton.workers.http_cycle import Cycle
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.protocol import WorkerStats

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


# -- what was decided ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_prompt_is_split_and_the_answer_says_so(
    split: Fleet, tokenizer: Tokenizer, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kvbaton.router.gateway"):
        status, answer, headers = await split.post({"prompt": LONG, "stream": stream, "max_tokens": 100})
        await split.settled()
    assert status == 200
    assert headers["x-kvbaton-decision"] == "remote"
    assert (headers["x-kvbaton-prefill"], headers["x-kvbaton-decode"]) == ("p0", "d0")
    assert "x-kvbaton-report" not in headers
    request, prefill = split.workers["d0"].requests[0]
    assert list(request.prompt_token_ids) == tokenizer.encode(LONG)
    assert prefill is not None and (prefill.host, prefill.port) == ("127.0.0.1", 7)
    if stream:
        assert b"kvbaton" not in answer and sse_events(answer)[-1] == "[DONE]"
        text = "".join(json.loads(e)["choices"][0]["text"] for e in sse_events(answer)[:-1])
    else:
        text = answer["choices"][0]["text"]
    assert text == "hello from d0"
    record = next(r for r in caplog.records if r.message == "request").fields  # type: ignore[attr-defined]
    assert record["request_id"] == headers["x-kvbaton-request-id"]
    assert (record["decision"], record["outcome"], record["error"]) == ("remote", "ok", None)
    assert record["terms"]["prefill:p0"] == len(request.prompt_token_ids)
    assert record["report"]["transfer_bytes"] == 64
    assert split.counter("kvbaton_router_disaggregated_requests_total") == 1
    assert split.counter('kvbaton_router_ttft_seconds_count{decision="remote"}') == int(stream)


async def test_reasons_over_a_life(split: Fleet) -> None:
    reasons = []
    for prompt in (SHORT, LONG, LONG, LONG + " and more " * 20):
        _, _, headers = await split.post({"prompt": prompt, "max_tokens": 4})
        reasons.append(headers["x-kvbaton-decision"])
    assert reasons == ["local_short", "remote", "local_cached", "remote"]


async def test_token_ids_and_text_share_the_index(split: Fleet, tokenizer: Tokenizer) -> None:
    first = await split.post({"prompt": [tokenizer.encode(LONG)], "max_tokens": 4})
    second = await split.post({"prompt": LONG, "max_tokens": 4})
    assert [h["x-kvbaton-decision"] for _, _, h in (first, second)] == ["remote", "local_cached"]
    salted = await split.post({"prompt": LONG, "max_tokens": 4, "cache_salt": "tenant"})
    assert salted[2]["x-kvbaton-decision"] == "remote"


async def test_a_burst_is_spread_over_both_pairs(pairs: Fleet) -> None:
    for worker in pairs.workers.values():
        worker.gate.clear()
    posts = [asyncio.ensure_future(pairs.post({"prompt": f"{i} {LONG}", "max_tokens": 4})) for i in range(8)]
    await until(lambda: sum(w.num_open for w in pairs.workers.values()) == 8)
    assert [len(pairs.workers[name].requests) for name in ("d0", "d1")] == [4, 4]
    assert [pairs.registry.get(name).num_dispatched for name in ("p0", "p1")] == [4, 4]  # type: ignore[union-attr]
    for worker in pairs.workers.values():
        worker.gate.set()
    assert all(status == 200 for status, _, _ in await asyncio.gather(*posts))


async def test_the_official_client_works_unchanged(split: Fleet) -> None:
    async with openai.AsyncOpenAI(base_url=f"{split.url}/v1", api_key="secret", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        messages: Any = [{"role": "user", "content": LONG}]
        whole = await client.chat.completions.create(model=model, messages=messages, max_completion_tokens=30)
        stream = await client.chat.completions.create(
            model=model, messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert whole.choices[0].message.content == "hello from d0"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello from d0"
        assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens  # type: ignore[union-attr]


# -- clients -------------------------------------------------------------------------------------------------------


async def test_only_listed_headers_reach_a_worker(tokenizer: Tokenizer, info: bytes) -> None:
    """SE-09"""
    worker = RawWorker(info, [b"data: [DONE]\n\n"])
    headers = {
        "authorization": "Bearer user-secret",
        "cookie": "a=b",
        "x-forwarded-for": "1.2.3.4",
        "x-prefiller-host-port": "169.254.169.254:80",
        "x-kvbaton-key": "guess",
        "x-request-id": "abc",
        "traceparent": "00-aa-bb-01",
    }
    await ask_raw(tokenizer, worker, {"prompt": SHORT, "stream": True}, **headers)
    seen = {name.decode(): value.decode() for name, value in worker.seen[0].items()}
    assert seen.pop("x-kvbaton-key") == KEY and seen.pop("traceparent") == "00-aa-bb-01"
    assert set(seen) <= {"host", "content-type", "content-length", "accept", "accept-encoding", "user-agent"}


@pytest.mark.parametrize(
    "extra",
    [
        b'"kvbaton":{"request_id":"x","prompt_token_ids":[[1]]}',
        b'"\\u006bvbaton":{"request_id":"x","prompt_token_ids":[[1]],"prefill":{"host":"10.0.0.1","port":1}}',
        b'"kvbaton":{}',
        b'"kv_transfer_params":{"remote_host":"10.0.0.1"}',
    ],
)
async def test_clients_cannot_steer_a_hand_off(split: Fleet, extra: bytes) -> None:
    status, answer, _ = await split.post(b'{"prompt":"x",' + extra + b"}")
    assert status == 400 and not split.workers["d0"].requests
    assert "is not accepted from clients" in answer["error"]["message"]  # and nothing of what it would have to be


async def test_a_wrong_method_is_told_the_right_one(split: Fleet) -> None:
    for method, path, allow in (("GET", "/v1/chat/completions", "POST"), ("POST", "/v1/models", "GET, HEAD")):
        async with split.http.request(method, split.url + path) as response:
            assert (response.status, response.headers["allow"]) == (405, allow)


async def test_a_null_of_ours_does_not_hide_the_routers_own(split: Fleet) -> None:
    status, _, _ = await split.post(b'{"kvbaton":null,"prompt":"' + LONG.encode() + b'","kvbaton":null}  ')
    assert status == 200 and split.workers["d0"].requests[0][1] is not None


async def test_bad_requests_never_reach_a_worker(split: Fleet) -> None:
    bodies: list[Any] = [
        b"{",
        b"",
        {"prompt": []},
        {"prompt": [-1]},
        {"prompt": [99999999]},
        {"prompt": "x", "n": 0, "stream": True},
        {"prompt": "x", "max_tokens": 600},
        {"prompt": "", "max_tokens": 1},
        {"prompt": "x", "unknown": 1},
        {"prompt": "x", "logit_bias": {"99999999": 1}},
        {"prompt": "x", "stop_token_ids": [99999999]},
    ]
    for body in bodies:
        status, answer, headers = await split.post(body)
        assert status == 400 and answer["error"]["message"] and "x-kvbaton-request-id" in headers, body
    status, answer, _ = await split.post({"prompt": "x", "model": "other"})
    assert status == 404 and "'tiny'" in answer["error"]["message"]
    assert (await split.post(b"x" * (9 * 1024 * 1024)))[0] == 413
    assert not split.workers["d0"].requests and not split.workers["p0"].requests
    await split.settled()
    line = 'kvbaton_router_requests_total{decision="none",endpoint="completions",outcome="rejected"}'
    assert split.counter(line) == len(bodies) + 2


async def test_invented_models_make_no_new_series(split: Fleet) -> None:
    """MT-07"""
    await split.post({"prompt": "x", "model": "m"})
    before = len(split.metrics.exposition().splitlines())
    for i in range(50):
        await split.post({"prompt": "x", "model": f"invented-{i}", "user": str(i)}, **{"x-request-id": f"r{i}"})
    assert len(split.metrics.exposition().splitlines()) == before


@pytest.mark.parametrize("gate_at", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_everything(split: Fleet, gate_at: int, stream: bool) -> None:
    worker = split.workers["d0"]
    worker.gate.clear()
    worker.gate_at = gate_at
    host, port = split.url.removeprefix("http://").split(":")
    writers = []
    body = json.dumps({"prompt": LONG, "stream": stream}).encode()
    for _ in range(5):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writers.append(writer)
    await until(lambda: worker.num_open == 5)
    for writer in writers:
        writer.close()
    await until(lambda: worker.num_open == 0 and split.gateway.open.num == 0)
    split.check_idle()
    line = 'kvbaton_router_requests_total{decision="remote",endpoint="completions",outcome="cancelled"}'
    assert split.counter(line) == 5 or gate_at  # once tokens came, the prefix is known and may be used


async def test_many_large_bodies_do_not_add_up(tokenizer: Tokenizer) -> None:
    """SE-14, of many at once."""
    settings = {"max_body_bytes": 400_000, "max_total_body_bytes": 500_000}
    async with running_fleet(tokenizer, {"b0": "both"}, **settings) as fleet:
        large = b"[" + b" " * 300_000
        host, port = fleet.url.removeprefix("http://").split(":")
        writers = []
        for _ in range(2):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 399999\r\n\r\n" + large)
            writers.append(writer)
        await until(lambda: fleet.gateway._bodies.left_bytes < 80_000)
        status, answer, headers = await fleet.post(large)
        assert (status, answer["error"]["code"]) == (503, "too_many_bytes") and headers["retry-after"]
        assert (await fleet.post({"prompt": SHORT}))[0] == 200
        for writer in writers:
            writer.close()
        await until(lambda: fleet.gateway._bodies.left_bytes == 500_000)


class Forward:
    """The real clock, and what it was set forward."""

    def __init__(self, real: Any) -> None:
        self._real, self.ahead_s = real, 0.0

    def now_s(self) -> float:
        return float(self._real.now_s() + self.ahead_s)


async def test_a_slow_upload_is_not_a_slow_fleet(split: Fleet) -> None:
    """Neither a time to first token nor what the cost model learns from."""
    clock = Forward(split.gateway._clock)
    split.gateway._clock = split.dispatcher._clock = clock  # type: ignore[assignment]
    body = json.dumps({"prompt": LONG, "stream": True, "max_tokens": 2}).encode()
    host, _, port = split.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body[:20])
    await until(lambda: split.gateway.open.num == 1)
    clock.ahead_s = 5000.0
    writer.write(body[20:])
    await reader.readuntil(b"[DONE]")
    writer.close()
    await split.settled()
    text = split.metrics.exposition().decode()
    sums = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "_seconds_sum" in line]
    assert sums and max(sums) < 5000


async def test_too_many_at_once_are_told_to_come_back(tokenizer: Tokenizer) -> None:
    async with running_fleet(tokenizer, {"b0": "both"}, max_inflight=2) as fleet:
        fleet.workers["b0"].gate.clear()
        open_ = [asyncio.ensure_future(fleet.post({"prompt": SHORT})) for _ in range(2)]
        await until(lambda: fleet.workers["b0"].num_open == 2)
        status, answer, headers = await fleet.post({"prompt": SHORT})
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "too_many_requests", "1")
        fleet.workers["b0"].gate.set()
        assert [status for status, _, _ in await asyncio.gather(*open_)] == [200, 200]


@pytest.mark.parametrize("served", [True, False])
async def test_requests_leave_nothing_for_the_garbage_collector(tokenizer: Tokenizer, served: bool) -> None:
    """What refers to itself, as an error held by a frame of its traceback, stays until a full collection: rarely."""
    kinds = (Flight, Cycle) if served else (Flight, AttemptFailed, ApiError)
    async with running_fleet(tokenizer, {"b0": "both"}, queue_timeout_s=0.01) as fleet:
        fleet.workers["b0"].error = None if served else CapacityError("full")
        await fleet.post({"prompt": SHORT})
        gc.collect()
        gc.disable()
        try:
            found = {(await fleet.post({"prompt": SHORT, "stream": i % 2 == 1}))[0] for i in range(6)}
            assert found == {200 if served else 429}
            await fleet.settled()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            ours = [each for each in gc.garbage if isinstance(each, kinds)]
            left = [each for each in ours if not isinstance(each, ApiError) or each.status == 429]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert not left, "of the router; the worker's own errors have another status"


async def send_slowly(fleet: Fleet, num_bytes: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The beginning of a request whose body will not be complete."""
    host, port = fleet.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (num_bytes + 1))
    writer.write(b" " * num_bytes)
    return reader, writer


async def test_large_bodies_never_keep_small_ones_out(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 300_000
    async with running_fleet(tokenizer, {"b0": "both"}, max_total_body_bytes=600_000) as fleet:
        budget = fleet.gateway._bodies
        senders = [await send_slowly(fleet, size) for _ in range(2)]
        await until(lambda: budget.left_bytes < size // 2)
        assert (await fleet.post({"prompt": SHORT}))[0] == 200
        large = json.dumps({"prompt": SHORT, "user": "u" * size}).encode()
        status, answer, _ = await fleet.post(large)
        assert (status, answer["error"]["code"]) == (503, "too_many_bytes"), "those that send have some time"
        monkeypatch.setattr("kvbaton.workers.http.PATIENCE_S", 0.0)
        assert (await fleet.post(large))[0] == 200, "the oldest of them gave way"
        async with asyncio.timeout(20):
            assert b" 408 " in (await senders[0][0].readline())
        await until(lambda: fleet.gateway.open.num == 1)  # the other one had no need to
        for _, writer in senders:
            writer.close()
        await fleet.settled()
        assert budget.left_bytes == 600_000


async def test_a_half_closed_client_gets_its_answer(split: Fleet) -> None:
    host, port = split.url.removeprefix("http://").split(":")
    for stream in (False, True):
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": LONG, "stream": stream}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.write_eof()
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        assert b"HTTP/1.1 200 OK\r\n" in answer and (stream or b"hello from d0" in answer)
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


# -- operation -----------------------------------------------------------------------------------------------------


async def test_fleet_page_and_admin_calls(split: Fleet) -> None:
    async with split.http.get(split.url + "/fleet") as response:
        fleet = await response.json()
    assert [m["state"] for m in fleet["members"]] == ["up", "up"] and "127.0.0.1" not in json.dumps(fleet)
    for method, path in (
        ("PUT", "/internal/members"),
        ("POST", "/internal/drain"),
        ("GET", "/internal/members"),
        ("POST", "//internal/drain"),
        ("POST", "/v1/../internal/drain"),
        ("POST", "/flush_cache"),
    ):
        async with split.http.request(method, split.url + path, headers={"authorization": "Bearer x"}) as response:
            assert response.status in (403, 404), path
    headers = {"x-kvbaton-key": KEY}
    members = [{"url": split.urls["d0"], "role": "decode", "name": "d0"}]
    async with split.http.put(split.url + "/internal/members", json=members, headers=headers) as response:
        assert [m["name"] for m in (await response.json())["members"]] == ["d0"]
    for bad in ([{"url": "ftp://x", "name": "a"}], [{"url": "http://x"}], {}):
        async with split.http.put(split.url + "/internal/members", json=bad, headers=headers) as response:
            assert response.status == 400


async def test_a_draining_worker_gets_nothing_new(pairs: Fleet) -> None:
    pairs.servers["d0"].state = "draining"
    for _ in range(4):
        status, _, headers = await pairs.post({"prompt": SHORT})
        assert (status, headers["x-kvbaton-decode"]) == (200, "d1")
    assert pairs.registry.get("d0").state == "draining"  # type: ignore[union-attr]
    assert not pairs.workers["d0"].requests


async def test_draining_the_router(split: Fleet) -> None:
    worker = split.workers["d0"]
    worker.gate_at = 2
    worker.gate.clear()
    open_ = asyncio.ensure_future(split.post({"prompt": LONG, "stream": True}))
    await until(lambda: worker.num_open == 1)
    draining = asyncio.ensure_future(split.gateway.drain(30))
    await until(lambda: split.gateway.state == "draining")
    status, answer, _ = await split.post({"prompt": SHORT})
    assert (status, answer["error"]["code"]) == (503, "draining")
    async with split.http.get(split.url + "/ready") as response:
        assert response.status == 503
    worker.gate.set()
    assert sse_events((await open_)[1])[-1] == "[DONE]"
    assert await draining is True


async def test_at_the_drain_deadline_streams_end_with_an_error(split: Fleet) -> None:
    worker = split.workers["d0"]
    worker.gate_at = 2
    worker.gate.clear()
    open_ = asyncio.ensure_future(split.post({"prompt": LONG, "stream": True}))
    await until(lambda: split.gateway.open.num == 1 and worker.num_open == 1)
    assert await split.gateway.drain(0) is False
    status, answer, _ = await open_
    error = json.loads(sse_events(answer)[-1])["error"] if status == 200 else answer["error"]
    assert error["code"] == "draining"


async def test_reported_load_moves_requests(pairs: Fleet) -> None:
    pairs.workers["d0"].reported = WorkerStats(num_blocks=1000, num_active=40)
    await pairs.poll()
    for _ in range(5):
        assert (await pairs.post({"prompt": SHORT}))[2]["x-kvbaton-decode"] == "d1"
