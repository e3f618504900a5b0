"""Attempts that fail before and after the first byte: who is asked next, and what the client is told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from router.fleet import LONG, SHORT, Fleet, RawWorker, ask_raw, running_fleet
from workers.scripted import serving, sse_events, until

from kvbaton.bench.fault_proxy import FaultProxy
from kvbaton.clock import MonotonicClock
from kvbaton.config import MemberSettings
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import CapacityError, RemoteError
from kvbaton.workers.http import HttpServer, bind
from kvbaton.workers.protocol import RequestReport

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
        assert (status, answer["error"]["code"], headers["retry-after"]) == (429, "no_capacity", "1")
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


async def test_the_queue_is_bounded_and_lets_go_of_those_that_leave(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton.router.room.LONGEST_NAP_S", 3600.0)  # nobody is tried between two looks at the queue
    async with running_fleet(tokenizer, {"b0": "both"}, max_queued=2) as fleet:
        worker = fleet.workers["b0"]
        worker.gate.clear()
        worker.max_open = 1
        posts = [asyncio.ensure_future(fleet.post({"prompt": SHORT})) for _ in range(3)]
        await until(lambda: fleet.dispatcher.num_queued == 2)
        status, answer, headers = await fleet.post({"prompt": SHORT})
        assert (status, answer["error"]["code"]) == (429, "queue_full") and int(headers["retry-after"]) >= 1
        assert fleet.counter('kvbaton_router_queue_refusals_total{priority="normal"}') == 1
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
    status, raw, _ = await pairs.post({"prompt": SHORT, "stream": True}, **{"x-kvbaton-replay": "never"})
    events = sse_events(raw)
    assert status == 200 and len(events) > 1 and "error" in json.loads(events[-1])
    assert all(json.loads(e)["choices"][0]["finish_reason"] is None for e in events[:-1])
    assert sum(len(w.requests) for w in pairs.workers.values()) == 1
    await pairs.settled()
    assert pairs.counter("kvbaton_router_broken_streams_total") == 1
    line = 'kvbaton_router_requests_total{decision="local_short",endpoint="completions",outcome="error"}'
    assert pairs.counter(line) == 1


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
    ("status", "expected"), [(400, 400), (401, 401), (404, 404), (413, 413), (429, 429), (500, 502), (503, 503)]
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


async def test_a_kept_connection_that_was_closing_is_no_failure(tokenizer: Tokenizer) -> None:
    """A fleet of one behind something that resets a kept connection when it is used again."""
    async with running_fleet(tokenizer, {"b0": "both"}) as fleet:
        host, port = fleet.urls["b0"].removeprefix("http://").split(":")
        async with FaultProxy(host, int(port)) as proxy:
            fleet.registry.set_members([MemberSettings(f"http://127.0.0.1:{proxy.port}", "both", "b0")])
            await fleet.poll()
            for stream in (False, True):
                assert (await fleet.post({"prompt": SHORT, "stream": stream}))[0] == 200
                await fleet.settled()
                proxy.to_server.cut_after_bytes = 1
                status, answer, _ = await fleet.post({"prompt": SHORT, "stream": stream})
                assert status == 200, answer
            assert proxy.to_client.num_cut == 0 and proxy.to_server.num_cut == 2
        member = fleet.registry.get("b0")
        assert member is not None and member.num_failures == 0


class Stopped:
    """A clock."""

    def __init__(self) -> None:
        self._at_s = MonotonicClock().now_s()

    def now_s(self) -> float:
        return self._at_s


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
            fleet.dispatcher._clock = fleet.dispatcher._caller._clock = Stopped()  # its quarantine does not end
            answers = [await fleet.post({"prompt": SHORT}) for _ in range(4)]
        assert all(status == 200 and headers["x-kvbaton-decode"] == "b1" for status, _, headers in answers)
        assert fleet.counter('kvbaton_router_retries_total{cause="worker_error"}') == 1
