"""The router over real sockets, in front of workers that fail on request."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from router.fleet import KEY, Fleet, running_fleet
from workers.scripted import ScriptedWorker, serving, sse_events, until

from kvbaton.config import MemberSettings
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import CapacityError, RemoteError
from kvbaton.workers.http import HttpServer, bind
from kvbaton.workers.protocol import RequestReport, WorkerStats
from kvbaton.workers.server import ServerOptions, WorkerServer

LONG = "a prompt of many tokens " * 8
SHORT = "short"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


@pytest.fixture
async def split(tokenizer: Tokenizer) -> AsyncIterator[Fleet]:
    async with running_fleet(tokenizer, {"p0": "prefill", "d0": "decode"}) as fleet:
        yield fleet


@pytest.fixture
async def pairs(tokenizer: Tokenizer) -> AsyncIterator[Fleet]:
    roles: Any = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    async with running_fleet(tokenizer, roles) as fleet:
        yield fleet


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


# -- failures before the first byte --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_hand_off_is_tried_once_more(split: Fleet, stream: bool) -> None:
    worker = split.workers["d0"]
    worker.remote_error = RemoteError("10.0.0.7 went away")
    status, _, headers = await split.post({"prompt": LONG, "stream": stream})
    assert (status, headers["x-kvbaton-decision"]) == (200, "fallback_prefill_failed")
    assert [prefill is not None for _, prefill in worker.requests] == [True, False]
    assert len({request.request_id for request, _ in worker.requests}) == 2, "an id of its own for each attempt"
    assert split.counter('kvbaton_router_retries_total{cause="prefill_failed"}') == 1
    assert split.counter('kvbaton_router_member_failures_total{cause="prefill_failed",member="p0"}') == 1


async def test_the_other_prefill_worker_is_tried_first(pairs: Fleet) -> None:
    pairs.servers["d1"].state = "draining"
    await pairs.poll()
    pairs.workers["d0"].remote_error = RemoteError("dead")
    pairs.workers["d0"].remote_errors_left = 1
    status, _, headers = await pairs.post({"prompt": LONG})
    assert status == 200
    assert headers["x-kvbaton-decision"] == "remote"
    assert pairs.counter('kvbaton_router_retries_total{cause="prefill_failed"}') == 1


async def test_an_error_instead_of_local_work_when_told_so(tokenizer: Tokenizer) -> None:
    roles: Any = {"p0": "prefill", "d0": "decode"}
    async with running_fleet(tokenizer, roles, on_prefill_failure="error") as fleet:
        fleet.workers["d0"].remote_error = RemoteError("10.0.0.7 went away")
        status, answer, _ = await fleet.post({"prompt": LONG})
        assert (status, answer["error"]["code"]) == (502, "prefill_failed")
        assert "10.0" not in json.dumps(answer)


async def test_a_dead_worker_is_left_out_and_nobody_notices(pairs: Fleet) -> None:
    await pairs.kill("d0")
    answers = [await pairs.post({"prompt": SHORT, "max_tokens": 4}) for _ in range(6)]
    assert all(status == 200 and headers["x-kvbaton-decode"] == "d1" for status, _, headers in answers)
    assert pairs.counter('kvbaton_router_retries_total{cause="unreachable"}') <= 1
    await pairs.poll()
    member = pairs.registry.get("d0")
    assert member is not None and member.state == "down"


async def test_no_capacity_is_tried_elsewhere_and_then_waits_its_turn(tokenizer: Tokenizer) -> None:
    roles: Any = {"p0": "prefill", "d0": "decode", "d1": "decode"}
    async with running_fleet(tokenizer, roles, queue_timeout_s=0.6) as fleet:
        fleet.workers["d0"].error = fleet.workers["d1"].error = CapacityError("full")
        status, answer, headers = await fleet.post({"prompt": SHORT})
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "no_capacity", "1")
        assert fleet.workers["d0"].requests and fleet.workers["d1"].requests
        assert not fleet.workers["p0"].requests, "decode workers that are only full are not replaced"
        await fleet.settled()
        line = 'kvbaton_router_requests_total{decision="none",endpoint="completions",outcome="rejected"}'
        assert fleet.counter(line) == 1 and fleet.counter("kvbaton_router_queue_seconds_count") > 0
        fleet.workers["d1"].error = None
        assert (await fleet.post({"prompt": SHORT}))[0] == 200


async def test_a_full_fleet_serves_in_turn(tokenizer: Tokenizer) -> None:
    async with running_fleet(tokenizer, {"b0": "both"}) as fleet:
        worker = fleet.workers["b0"]
        worker.gate.clear()
        worker.max_open = 2
        posts = [asyncio.ensure_future(fleet.post({"prompt": f"{i} {SHORT}"})) for i in range(12)]
        await until(lambda: fleet.dispatcher.num_queued == 10)
        worker.gate.set()
        assert [status for status, _, _ in await asyncio.gather(*posts)] == [200] * 12


async def test_the_queue_is_bounded_and_lets_go_of_those_that_leave(tokenizer: Tokenizer) -> None:
    async with running_fleet(tokenizer, {"b0": "both"}, max_queued=2) as fleet:
        worker = fleet.workers["b0"]
        worker.gate.clear()
        worker.max_open = 1
        posts = [asyncio.ensure_future(fleet.post({"prompt": SHORT})) for _ in range(3)]
        await until(lambda: fleet.dispatcher.num_queued == 2)
        assert (await fleet.post({"prompt": SHORT}))[0] == 503
        for post in posts[1:]:
            post.cancel()
        await until(lambda: fleet.dispatcher.num_queued == 0 and fleet.gateway.open.num == 1)
        worker.gate.set()
        assert (await posts[0])[0] == 200


async def test_without_prefill_pool_decode_does_it_all(split: Fleet) -> None:
    await split.kill("p0")
    await split.poll()
    status, _, headers = await split.post({"prompt": LONG})
    assert (status, headers["x-kvbaton-decision"]) == (200, "fallback_no_prefill")


async def test_without_decode_pool_prefill_does_it_all(split: Fleet) -> None:
    await split.kill("d0")
    await split.poll()
    status, _, headers = await split.post({"prompt": LONG})
    assert (status, headers["x-kvbaton-decision"]) == (200, "fallback_no_decode")


async def test_without_anybody_the_answer_is_503(split: Fleet) -> None:
    await split.kill("d0")
    await split.kill("p0")
    await split.poll()
    status, answer, headers = await split.post({"prompt": LONG})
    assert (status, answer["error"]["code"]) == (503, "no_workers") and headers["retry-after"]
    async with split.http.get(split.url + "/ready") as response:
        assert response.status == 503
    async with split.http.get(split.url + "/health") as response:
        assert response.status == 200


async def test_a_worker_restarted_at_its_address_is_found_again(split: Fleet) -> None:
    await split.post({"prompt": LONG})
    host, port = split.urls["p0"].removeprefix("http://").split(":")
    await split.kill("p0")
    await split.poll()
    split.workers["p0"].incarnation = "p0-2"
    server = HttpServer(split.servers["p0"])
    task = asyncio.ensure_future(server.serve(sockets=[bind(host, int(port))]))
    await until(lambda: server.started)
    await split.poll()
    _, _, headers = await split.post({"prompt": "new " + LONG})
    assert headers["x-kvbaton-decision"] == "remote"
    assert split.counter('kvbaton_router_member_restarts_total{member="p0"}') == 1
    server.end()
    await task


# -- failures after the first byte ---------------------------------------------------------------------------------


async def test_a_stream_that_breaks_ends_with_an_error_event(pairs: Fleet) -> None:
    for worker in pairs.workers.values():
        worker.gate_at = 3
        worker.error = RemoteError("gone")
    status, raw, _ = await pairs.post({"prompt": SHORT, "stream": True})
    events = sse_events(raw)
    assert status == 200 and len(events) > 1 and "error" in json.loads(events[-1])
    assert all(json.loads(e)["choices"][0]["finish_reason"] is None for e in events[:-1])
    assert sum(len(w.requests) for w in pairs.workers.values()) == 1
    await pairs.settled()
    assert pairs.counter("kvbaton_router_broken_streams_total") == 1
    line = 'kvbaton_router_requests_total{decision="local_short",endpoint="completions",outcome="error"}'
    assert pairs.counter(line) == 1


class RawWorker:
    """An ASGI app that says it is a worker and then answers with the bytes it was given."""

    def __init__(self, info: bytes, parts: list[bytes], status: int = 200, headers: Any = ()) -> None:
        self.info, self.parts, self.status, self.extra = info, parts, status, list(headers)
        self.seen: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/internal/info":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": self.info})
            return
        self.seen.append(dict(scope["headers"]))
        while (await receive()).get("more_body"):
            pass
        kind = b"text/event-stream" if self.status == 200 else b"application/json"
        await send(
            {"type": "http.response.start", "status": self.status, "headers": [(b"content-type", kind), *self.extra]}
        )
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture
async def info(tokenizer: Tokenizer) -> bytes:
    return msgspec.json.encode(WorkerServer(ScriptedWorker(tokenizer), ServerOptions(block_size=16)).info())


async def ask_raw(tokenizer: Tokenizer, worker: RawWorker, body: Any, **headers: str) -> tuple[int, Any, Any]:
    async with running_fleet(tokenizer, {}, queue_timeout_s=0.3) as fleet, serving(worker) as address:
        fleet.registry.set_members([MemberSettings(address, "both", "raw")])
        await fleet.poll()
        return await fleet.post(body, **headers)


async def test_a_stream_cut_inside_an_event_still_ends_with_a_readable_error(tokenizer: Tokenizer, info: bytes) -> None:
    worker = RawWorker(info, [b'data: {"choices":[]}\n\n', b'data: {"choi'])
    _, raw, _ = await ask_raw(tokenizer, worker, {"prompt": SHORT, "stream": True})
    events = sse_events(raw)
    assert [list(json.loads(e)) for e in events] == [["choices"], ["error"]]


async def test_events_pass_unchanged_however_they_are_cut(tokenizer: Tokenizer, info: bytes) -> None:
    report = b": kvbaton " + msgspec.json.encode(RequestReport("remote", 1, 0, 1, 2)) + b"\n\n"
    text = 'data: {"choices":[{"text":": kvbaton {} \\n\\n \u00e9"}]}\n\n'.encode()
    whole = text * 3 + report + b"data: [DONE]\n\n"
    for size in (1, 7, 40, len(whole)):
        parts = [whole[i : i + size] for i in range(0, len(whole), size)]
        _, raw, _ = await ask_raw(tokenizer, RawWorker(info, parts), {"prompt": SHORT, "stream": True})
        assert raw == text * 3 + b"data: [DONE]\n\n", size


@pytest.mark.parametrize(
    ("status", "expected"), [(400, 400), (401, 401), (404, 404), (413, 413), (429, 429), (500, 500), (503, 503)]
)
async def test_a_workers_refusal_keeps_its_status_and_message(
    tokenizer: Tokenizer, info: bytes, status: int, expected: int
) -> None:
    body = b'{"error":{"message":"told by the worker","type":"t","param":"p","code":"c"}}'
    worker = RawWorker(info, [body], status, [(b"retry-after", b"7")])
    for stream in (False, True):
        got, answer, headers = await ask_raw(tokenizer, worker, {"prompt": SHORT, "stream": stream})
        assert (got, answer["error"]["message"]) == (expected, "told by the worker")
        assert headers["retry-after"] == "7"


async def test_an_answer_that_is_not_an_error_object_is_not_shown(tokenizer: Tokenizer, info: bytes) -> None:
    worker = RawWorker(info, [b"<html>Traceback at 10.0.0.7"], 500)
    _, answer, _ = await ask_raw(tokenizer, worker, {"prompt": SHORT})
    assert "Traceback" not in json.dumps(answer) and "10.0.0.7" not in json.dumps(answer)


class SilentWorker(RawWorker):
    """Takes a call and never answers."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/internal/info":
            await super().__call__(scope, receive, send)
            return
        self.seen.append({})
        while (await receive())["type"] != "http.disconnect":
            pass


async def test_a_worker_that_never_answers_costs_a_deadline_not_a_client(tokenizer: Tokenizer, info: bytes) -> None:
    for settings, code in (
        ({"stall_timeout_s": 0.3}, "worker_timeout"),
        ({"request_timeout_s": 0.3}, "deadline_exceeded"),
    ):
        worker = SilentWorker(info, [])
        async with serving(worker) as address, running_fleet(tokenizer, {}, **settings) as fleet:
            fleet.registry.set_members([MemberSettings(address, "both", "raw")])
            await fleet.poll()
            status, answer, _ = await fleet.post({"prompt": SHORT})
            assert (status, answer["error"]["code"]) == (504, code)
            assert len(worker.seen) == 1


async def test_a_worker_that_hangs_up_is_not_asked_twice(tokenizer: Tokenizer) -> None:
    """A listener that closes every connection at once: the other worker answers."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with running_fleet(tokenizer, {"b1": "both"}) as fleet:
        await fleet.post({"prompt": SHORT})  # b1 had its turn
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            known = [member.settings for member in fleet.registry.members]
            fleet.registry.set_members([*known, MemberSettings(f"http://127.0.0.1:{port}", "both", "b2")])
            liar, honest = fleet.registry.get("b2"), fleet.registry.get("b1")
            assert liar is not None and honest is not None and honest.reported is not None
            fleet.registry.answered(liar, honest.reported.info)
            answers = [await fleet.post({"prompt": SHORT}) for _ in range(4)]
        assert all(status == 200 and headers["x-kvbaton-decode"] == "b1" for status, _, headers in answers)
        assert fleet.counter('kvbaton_router_retries_total{cause="worker_error"}') == 1


# -- clients -------------------------------------------------------------------------------------------------------


async def test_only_listed_headers_reach_a_worker(tokenizer: Tokenizer, info: bytes) -> None:
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
        b'"kv_transfer_params":{"remote_host":"10.0.0.1"}',
    ],
)
async def test_clients_cannot_steer_a_hand_off(split: Fleet, extra: bytes) -> None:
    status, _, _ = await split.post(b'{"prompt":"x",' + extra + b"}")
    assert status == 400 and not split.workers["d0"].requests


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
    ]
    for body in bodies:
        status, answer, headers = await split.post(body)
        assert status == 400 and answer["error"]["message"] and "x-kvbaton-request-id" in headers, body
    assert (await split.post({"prompt": "x", "model": "other"}))[0] == 404
    assert (await split.post(b"x" * (9 * 1024 * 1024)))[0] == 413
    assert not split.workers["d0"].requests and not split.workers["p0"].requests
    await split.settled()
    line = 'kvbaton_router_requests_total{decision="none",endpoint="completions",outcome="rejected"}'
    assert split.counter(line) == len(bodies) + 2


async def test_invented_models_make_no_new_series(split: Fleet) -> None:
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


async def test_too_many_at_once_are_told_to_come_back(tokenizer: Tokenizer) -> None:
    async with running_fleet(tokenizer, {"b0": "both"}, max_inflight=2) as fleet:
        fleet.workers["b0"].gate.clear()
        open_ = [asyncio.ensure_future(fleet.post({"prompt": SHORT})) for _ in range(2)]
        await until(lambda: fleet.workers["b0"].num_open == 2)
        status, answer, headers = await fleet.post({"prompt": SHORT})
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "too_many_requests", "1")
        fleet.workers["b0"].gate.set()
        assert [status for status, _, _ in await asyncio.gather(*open_)] == [200, 200]


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
