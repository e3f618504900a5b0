"""The worker's HTTP face over real sockets: a scripted worker for faults, the real one for truth."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from workers.scripted import ScriptedWorker, serving, sse_events, until

from kvbaton.config import ModelSettings, WorkerSettings
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import CapacityError, RemoteError
from kvbaton.workers.process import make_worker
from kvbaton.workers.server import ServerOptions, WorkerServer

KEY = "k" * 20
WITH_KEY = {"x-kvbaton-key": KEY}
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


@pytest.fixture
def worker(tokenizer: Tokenizer) -> ScriptedWorker:
    return ScriptedWorker(tokenizer)


@pytest.fixture
async def server(worker: ScriptedWorker) -> AsyncIterator[WorkerServer]:
    server = WorkerServer(worker, ServerOptions(block_size=16, internal_key=KEY, max_body_bytes=100_000))
    yield server
    assert server.open.num == 0 and worker.num_open == 0
    assert not server._internal_ids


@pytest.fixture
async def url(server: WorkerServer) -> AsyncIterator[str]:
    async with serving(server) as address:
        yield address


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def post(http: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(url, data=data, headers=headers) as response:
        raw = await response.read()
        return (
            response.status,
            json.loads(raw) if response.content_type == "application/json" else raw,
            response.headers,
        )


def internal(**changes: Any) -> dict[str, Any]:
    return {"request_id": "r1", "prompt_token_ids": [[1, 2, 3]], **changes}


# -- the real worker, the official client ------------------------------------------------------------------------


@pytest.fixture
async def real_url(tiny_model_dir: Path) -> AsyncIterator[str]:
    model = ModelSettings(dir=str(tiny_model_dir), dtype="float32", kv_blocks=64)
    worker = make_worker(model, WorkerSettings(chunk_tokens=64))
    await worker.start()
    try:
        async with serving(WorkerServer(worker, ServerOptions(block_size=16))) as address:
            yield address
            await worker.check_empty()
    finally:
        await worker.stop()


async def test_the_official_client_gets_the_same_text_whole_and_streamed(real_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{real_url}/v1", api_key="any", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        asked: Any = {"model": model, "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
        messages: Any = HELLO["messages"]
        whole = await client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, **asked)
        stream = await client.chat.completions.create(
            messages=messages, stream=True, stream_options={"include_usage": True}, logprobs=True, **asked
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert whole.choices[0].finish_reason == "length" and whole.choices[0].logprobs is not None
        assert len(whole.choices[0].logprobs.content or []) == 12
        assert chunks[0].choices[0].delta.role == "assistant"
        assert whole.usage is not None and chunks[-1].usage is not None
        assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 12
        assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens

        several = await client.completions.create(
            prompt=["abc", "abd", "abe"], n=2, seed=1, **{**asked, "temperature": 1}
        )
        assert [c.index for c in several.choices] == list(range(6))
        again = await client.completions.create(
            prompt=["abc", "abd", "abe"], n=2, seed=1, **{**asked, "temperature": 1}
        )
        assert [c.text for c in several.choices] == [c.text for c in again.choices]
        ids = await client.completions.create(prompt=[[1, 2], [3, 4, 5]], logprobs=1, **asked)
        assert [len(c.logprobs.tokens or []) for c in ids.choices if c.logprobs] == [12, 12]


async def test_choices_of_one_seed_differ_and_come_again(real_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{real_url}/v1", api_key="any", max_retries=0) as client:
        asked: Any = {"model": "tiny-llama", "max_tokens": 16, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
        runs = [
            [c.text for c in (await client.completions.create(prompt="abc", n=n, seed=seed, **asked)).choices]
            for n, seed in ((4, 1), (4, 1), (1, 1), (4, 2))
        ]
    first, again, alone, other = runs
    assert first == again and len(set(first)) == 4, "each choice draws its own, and the same each time"
    assert alone == first[:1] and other[:3] == first[1:], "choice j is drawn with seed + j, as in vLLM"


@pytest.mark.parametrize("num_top", [0, 1, 20])
async def test_as_many_top_logprobs_as_asked_for(real_url: str, num_top: int) -> None:
    async with openai.AsyncOpenAI(base_url=f"{real_url}/v1", api_key="any", max_retries=0) as client:
        asked: Any = {"model": "tiny-llama", "max_tokens": 4, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
        messages: Any = HELLO["messages"]
        chat = await client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=num_top, **asked)
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        for entry in logprobs.content:
            assert len(entry.top_logprobs) == num_top
            values = [top.logprob for top in entry.top_logprobs]
            assert values == sorted(values, reverse=True) and all(entry.logprob <= value for value in values[:1])
        plain = await client.completions.create(prompt=[1, 2, 3], logprobs=num_top, **asked)
        found = plain.choices[0].logprobs
        assert found is not None and found.tokens is not None and found.top_logprobs is not None
        for token, top in zip(found.tokens, found.top_logprobs, strict=True):
            assert token in top and len(top) <= num_top + 1, "the chosen one is always there"


async def test_cached_tokens_are_the_prefix_cache_and_not_the_prompt(real_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{real_url}/v1", api_key="any", max_retries=0) as client:
        prompt = "a cold prompt of many tokens, " * 8
        cached = []
        for stream in (False, False, True):
            if stream:
                chunks = await client.completions.create(
                    model="tiny-llama", prompt=prompt, max_tokens=2, stream=True, stream_options={"include_usage": True}
                )
                usage = [chunk async for chunk in chunks][-1].usage
            else:
                usage = (await client.completions.create(model="tiny-llama", prompt=prompt, max_tokens=2)).usage
            assert usage is not None and usage.prompt_tokens_details is not None
            cached.append(usage.prompt_tokens_details.cached_tokens)
        assert cached[0] == 0 and cached[1] == cached[2]
        assert cached[1] is not None and 0 < cached[1] < usage.prompt_tokens and cached[1] % 16 == 0


async def test_errors_come_as_the_official_clients_exceptions(real_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{real_url}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny-llama", prompt=[1] * 500, max_tokens=100)
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "max_tokens"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="another", prompt="x")


# -- faults and edges --------------------------------------------------------------------------------------------


async def test_health_ready_metrics_and_models(url: str, http: aiohttp.ClientSession) -> None:
    for path, status in (
        ("/health", 200),
        ("/ready", 200),
        ("/metrics", 200),
        ("/v1/models", 200),
        ("/v1/models/tiny", 200),
        ("/v1/models/other", 404),
        ("//v1/models", 404),
        ("/", 404),
    ):
        async with http.get(url + path) as response:
            assert response.status == status, path
    for method, path, allow in (
        ("DELETE", "/v1/chat/completions", "POST"),
        ("GET", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
    ):
        async with http.request(method, url + path) as response:
            assert (response.status, response.headers["allow"]) == (405, allow)


async def test_internal_calls_need_the_key(url: str, http: aiohttp.ClientSession) -> None:
    for method, path in (("GET", "/internal/info"), ("POST", "/internal/drain"), ("HEAD", "/internal/info")):
        for headers in ({}, {"x-kvbaton-key": "wrong"}, {"authorization": f"Bearer {KEY}"}):
            async with http.request(method, url + path, headers=headers) as response:
                assert response.status == 403
    status, answer, _ = await post(http, url + "/v1/completions", {"prompt": "x", "kvbaton": internal()})
    assert (status, answer["error"]["param"]) == (400, "kvbaton")
    _, unread, _ = await post(http, url + "/v1/completions", {"prompt": "x", "kvbaton": {}}, **{"x-kvbaton-key": "no"})
    assert unread == answer
    async with http.get(url + "/internal/info", headers=WITH_KEY) as response:
        info = await response.json()
    assert info["incarnation"] == "a" and info["state"] == "serving" and info["max_context"] == 512


async def test_the_routers_tokens_are_used_and_its_report_comes_back(
    url: str, worker: ScriptedWorker, http: aiohttp.ClientSession
) -> None:
    body = {"prompt": "text", "kvbaton": internal(prefill={"host": "10.0.0.1", "port": 5}, cache_salt="s")}
    status, _, headers = await post(http, url + "/v1/completions", body, **WITH_KEY)
    request, prefill = worker.requests[0]
    assert status == 200 and request.prompt_token_ids == (1, 2, 3) and request.cache_salt == "s"
    assert prefill is not None and prefill.host == "10.0.0.1"
    report = json.loads(headers["x-kvbaton-report"])
    assert (report["path"], report["num_remote_tokens"], report["transfer_bytes"]) == ("remote", 3, 64)
    _, raw, _ = await post(http, url + "/v1/completions", {**body, "stream": True}, **WITH_KEY)
    assert raw.rstrip().split(b"\n\n")[-2].startswith(b': kvbaton {"path":"remote"')
    assert sse_events(raw)[-1] == "[DONE]"
    status, _, headers = await post(http, url + "/v1/completions", {"prompt": "text"})
    assert status == 200 and "x-kvbaton-report" not in headers


async def test_one_internal_id_twice_at_once_is_refused(
    url: str, worker: ScriptedWorker, http: aiohttp.ClientSession
) -> None:
    worker.gate.clear()
    body = {"prompt": "x", "kvbaton": internal()}
    first = asyncio.ensure_future(post(http, url + "/v1/completions", body, **WITH_KEY))
    await until(lambda: worker.num_open == 1)
    status, answer, _ = await post(http, url + "/v1/completions", body, **WITH_KEY)
    assert (status, answer["error"]["code"]) == (409, "duplicate_request")
    worker.gate.set()
    assert (await first)[0] == 200


@pytest.mark.parametrize("gate_at", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_takes_its_sequences_with_it(
    url: str, server: WorkerServer, worker: ScriptedWorker, gate_at: int, stream: bool
) -> None:
    worker.gate.clear()
    worker.gate_at = gate_at
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": "x", "n": 3, "stream": stream}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await until(lambda: worker.num_open == 3)
    writer.close()
    await until(lambda: worker.num_open == 0 and server.open.num == 0)
    assert worker.num_cancelled == 3
    assert b'kvbaton_worker_requests_total{outcome="cancelled",role="both"} 1.0' in server.metrics.exposition()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (CapacityError("full"), 503, "no_capacity"),
        (RemoteError("10.0.0.7 died"), 502, "prefill_failed"),
        (TimeoutError(), 504, "deadline_exceeded"),
        (ValueError("secret path"), 500, "internal_error"),
    ],
)
async def test_failures_before_and_after_the_first_token(
    url: str, worker: ScriptedWorker, http: aiohttp.ClientSession, error: Exception, status: int, code: str
) -> None:
    worker.error = error
    for stream in (False, True):
        got, answer, headers = await post(http, url + "/v1/chat/completions", {**HELLO, "stream": stream})
        assert (got, answer["error"]["code"]) == (status, code)
        assert "10.0.0.7" not in answer["error"]["message"] and "secret" not in answer["error"]["message"]
        assert ("retry-after" in headers) == (status == 503)
    worker.gate_at = 2
    got, raw, _ = await post(http, url + "/v1/chat/completions", {**HELLO, "stream": True})
    events = [json.loads(event) for event in sse_events(raw)]
    assert got == 200 and events[-1]["error"]["code"] == code
    assert all(c["finish_reason"] is None for event in events[:-1] for c in event["choices"])


async def test_one_failing_choice_ends_its_siblings(
    url: str, worker: ScriptedWorker, http: aiohttp.ClientSession
) -> None:
    worker.gate_at = 1
    worker.error = CapacityError("full")
    status, _, _ = await post(http, url + "/v1/completions", {"prompt": "x", "n": 4})
    assert status == 503 and worker.num_open == 0


async def test_choices_without_room_wait_for_their_siblings(
    url: str, worker: ScriptedWorker, http: aiohttp.ClientSession
) -> None:
    worker.max_open = 2
    for stream in (False, True):
        status, answer, _ = await post(http, url + "/v1/completions", {"prompt": "x", "n": 5, "stream": stream})
        assert status == 200
        if not stream:
            assert [choice["text"] for choice in answer["choices"]] == ["hello world"] * 5
        else:
            ends = [c for e in sse_events(answer)[:-1] for c in json.loads(e)["choices"] if c["finish_reason"]]
            assert sorted(c["index"] for c in ends) == [0, 1, 2, 3, 4]
    worker.max_open = 0
    status, answer, _ = await post(http, url + "/v1/completions", {"prompt": "x", "n": 5})
    assert (status, answer["error"]["code"]) == (503, "no_capacity")


async def test_a_stop_string_ends_the_sequence(url: str, worker: ScriptedWorker, http: aiohttp.ClientSession) -> None:
    worker.gate_at = 6  # "hello " has been sent; the stop string is complete before the gate
    worker.gate.clear()
    for stream in (False, True):
        status, answer, _ = await post(http, url + "/v1/completions", {"prompt": "x", "stop": "lo", "stream": stream})
        assert status == 200
        if not stream:
            choice = answer["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("hel", "stop")
            assert answer["usage"]["completion_tokens"] == 5
        else:
            assert json.loads(sse_events(answer)[-2])["choices"][0]["finish_reason"] == "stop"
    assert worker.num_cancelled == 2


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, b"x" * 100_001, 413),
        ({"content-encoding": "gzip"}, b"{}", 415),
        ({"x-request-id": 'a"b'}, b"{}", 400),
        ({"x-request-id": "a" * 10_000}, b"{}", 400),
        ({}, b"{}", 400),
        ({}, json.dumps({"n": 0, "stream": True, **HELLO}).encode(), 400),
    ],
)
async def test_bad_requests_are_plain_errors(
    url: str, http: aiohttp.ClientSession, headers: dict[str, str], body: bytes, status: int
) -> None:
    got, answer, _ = await post(http, url + "/v1/chat/completions", body, **headers)
    assert got == status and set(answer["error"]) == {"message", "type", "param", "code"}


async def test_a_body_without_end_is_cut_off(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    for _ in range(20):
        writer.write(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
    async with asyncio.timeout(10):
        assert b" 413 " in await reader.readline()
    writer.close()


async def test_an_unknown_model_is_told_which_one_is_served(url: str, http: aiohttp.ClientSession) -> None:
    for status, answer, _ in (
        await post(http, url + "/v1/completions", {"prompt": "x", "model": "other"}),
        await post(http, url + "/v1/chat/completions", {**HELLO, "model": "other"}),
    ):
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "'other'" in answer["error"]["message"] and "'tiny'" in answer["error"]["message"]


async def test_request_ids_are_echoed_and_never_keys(url: str, http: aiohttp.ClientSession) -> None:
    """SE-12"""
    answers = await asyncio.gather(
        *(post(http, url + "/v1/chat/completions", HELLO, **{"x-request-id": "abc"}) for _ in range(20))
    )
    assert all(status == 200 and headers["x-request-id"] == "abc" for status, _, headers in answers)
    assert len({answer["id"] for _, answer, _ in answers}) == 20


async def test_draining_lets_open_requests_end(
    url: str, server: WorkerServer, worker: ScriptedWorker, http: aiohttp.ClientSession
) -> None:
    worker.gate_at = 2
    worker.gate.clear()
    open_ = asyncio.ensure_future(post(http, url + "/v1/chat/completions", {**HELLO, "stream": True}))
    await until(lambda: worker.num_open == 1)
    draining = asyncio.ensure_future(server.drain(30))
    await until(lambda: server.state == "draining")
    status, answer, headers = await post(http, url + "/v1/chat/completions", HELLO)
    assert (status, answer["error"]["code"]) == (503, "draining") and headers["retry-after"]
    async with http.get(url + "/ready") as response:
        assert response.status == 503
    assert not draining.done()
    worker.gate.set()
    assert sse_events((await open_)[1])[-1] == "[DONE]"
    assert await draining is True


async def test_at_the_drain_deadline_streams_end_with_an_error(
    url: str, server: WorkerServer, worker: ScriptedWorker, http: aiohttp.ClientSession
) -> None:
    worker.gate_at = 2
    worker.gate.clear()
    open_ = asyncio.ensure_future(post(http, url + "/v1/chat/completions", {**HELLO, "stream": True}))
    await until(lambda: worker.num_open == 1)
    assert await server.drain(0) is False
    assert json.loads(sse_events((await open_)[1])[-1])["error"]["code"] == "draining"
    assert worker.num_open == 0
