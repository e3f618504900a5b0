"""Parsers of HTTP and of what it carries: heads, bodies of requests, answers of workers, streams on both sides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import httptools

from .model_targets import byte_tokenizer
from .target import Run, Target

CHAT = {
    "model": "m",
    "messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}],
    "max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 2, "stream": True, "logprobs": True,
    "top_logprobs": 2, "stream_options": {"include_usage": True}, "stop": ["x"], "logit_bias": {"5": -10}, "seed": 3,
    "response_format": {"type": "text"}, "user": "u", "tools": [], "cache_salt": "s", "priority": 1,
}  # fmt: skip
COMPLETION = {
    "model": "m", "prompt": ["ab", "cd"], "max_tokens": 3, "logprobs": 1, "echo": False, "best_of": 1, "stop": "x",
    "stop_token_ids": [1], "min_tokens": 1, "ignore_eos": True, "presence_penalty": 0.1, "repetition_penalty": 1.1,
}  # fmt: skip
IDS = {"prompt": [[1, 2, 3], [4]], "kv_transfer_params": None, "kvbaton": None, "metadata": {"a": "b"}}


def request_seeds() -> list[bytes]:
    return [json.dumps(each).encode() for each in (CHAT, COMPLETION, IDS, {"prompt": "x"}, {"prompt": [1, 2]})]


def _body(folder: Path) -> Run:
    """Any bytes become a request or a 4xx that names the field; the internal object as routers send it, too."""
    from kvbaton.types import LocalError
    from kvbaton.workers.openai_errors import ApiError, from_exception
    from kvbaton.workers.openai_request import RequestLimits, parse, resolve, tokenize

    tokenizer, limits = byte_tokenizer(folder), RequestLimits()

    def run(data: bytes) -> None:
        for endpoint in ("chat", "completions"):
            for from_router in (False, True):
                try:
                    request = parse(endpoint, data, limits, from_router)  # type: ignore[arg-type]
                    prompts = tokenize(request, tokenizer, 64, limits)
                    resolve(request, prompts, tokenizer, 64, "r", (258,))
                except (ApiError, LocalError) as failure:
                    error = from_exception(failure)
                    assert 400 <= error.status < 500 and error.message
                    assert error.param is not None or "the body" in error.message, error.message
                    json.loads(error.body())

    return run


# -- a connection of the router


class Wire(asyncio.Transport):
    """What a connection writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closing = False
        self.on_close: Callable[[], object] = lambda: None

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        for each in list_of_data:
            self.write(each)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self.on_close()

    abort = close


class _Answers:
    """The answers on one connection, by a parser that is not ours."""

    def __init__(self) -> None:
        self.found: list[tuple[int, bytes]] = []
        self._body = b""
        self._parser = httptools.HttpResponseParser(self)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:  # 100 Continue is none
            self.found.append((status, self._body))
        self._body = b""

    def read(self, data: bytes) -> list[tuple[int, bytes]]:
        self._parser.feed_data(data)
        return self.found


def gateway(folder: Path) -> Any:
    """The router's app; no worker is there to answer."""
    from kvbaton.clock import MonotonicClock
    from kvbaton.config import RouterSettings
    from kvbaton.observe.metrics import Metrics
    from kvbaton.router.dispatch import Dispatcher
    from kvbaton.router.gateway import Gateway, Served
    from kvbaton.router.prefix_index import PrefixIndex
    from kvbaton.router.registry import Registry

    settings, metrics, clock, index = RouterSettings(), Metrics("router"), MonotonicClock(), PrefixIndex(16, 100, 100)
    registry, client, key = Registry([], "m", index, metrics), object(), "k" * 20
    dispatcher = Dispatcher(registry, index, client, settings, key, metrics, clock)  # type: ignore[arg-type]
    return Gateway(registry, dispatcher, Served("m", byte_tokenizer(folder)), settings, key, metrics, clock)


def _connection(folder: Path) -> Run:
    """Bytes to the router's own HTTP: what it answers is HTTP, and an error is in OpenAI's shape."""
    import uvicorn
    from simulation.loop import VirtualLoop
    from uvicorn.server import ServerState

    from kvbaton.workers.http import HttpServer

    config: uvicorn.Config = HttpServer(gateway(folder), half_closes=True).config
    config.load()

    def run(data: bytes) -> None:
        loop = VirtualLoop()
        try:
            asyncio.set_event_loop(loop)
            wire = Wire()
            protocol: Any = config.http_protocol_class(config, ServerState(), {}, _loop=loop)  # type: ignore[operator]
            wire.on_close = lambda: loop.call_soon(protocol.connection_lost, None)

            async def talk() -> None:
                protocol.connection_made(wire)
                step = 1 + data[0] if data and data[0] % 2 else len(data) or 1
                for start in range(0, len(data), step):
                    if not wire.closing:
                        protocol.data_received(data[start : start + step])
                        await asyncio.sleep(0)
                await asyncio.sleep(200.0)  # virtual: every deadline of a connection has passed
                if not wire.closing:
                    protocol.eof_received()
                wire.close()
                await asyncio.sleep(5.0)

            loop.run(talk())
        finally:
            loop.ending = True
            asyncio.set_event_loop(None)
            loop.close()
        if b"HEAD" in data:
            return  # its answers have no body, which their head does not say
        for status, body in _Answers().read(bytes(wire.written)):
            assert status == 200 or 400 <= status < 500 or status in (503, 504), (status, body[:200])
            if status != 200 and body:  # HEAD has none
                error = json.loads(body)["error"]
                assert error["message"] and error["type"]

    return run


def _heads() -> list[bytes]:
    body = json.dumps({"prompt": "x"}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return [
        b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\nGET /fleet HTTP/1.0\r\n\r\n",
        post + b"content-length: %d\r\n\r\n" % len(body) + body,
        post + b"transfer-encoding: chunked\r\n\r\n4\r\n{\"a\"\r\n1\r\n:\r\n0\r\nx: y\r\n\r\n",
        post + b"expect: 100-continue\r\nx-request-timeout-ms: 50\r\ntraceparent: 00-" + b"a" * 32 + b"\r\n"
        b"x-request-id: i\r\ncontent-length: 2\r\n\r\n{}",
        b"GET /metrics HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\naccept: application/openmetrics-text\r\n\r\n",
        b"PUT /internal/members HTTP/1.1\r\nx-kvbaton-key: " + b"k" * 20 + b"\r\ncontent-length: 2\r\n\r\n[]",
        b"HEAD /ready?x=%00#f HTTP/1.1\r\ncookie: " + b"c" * 200 + b"\r\n\r\n",
    ]  # fmt: skip


HEAD_WORDS = (
    b"\r\n", b"\r\n\r\n", b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"HTTP/1.1", b"HTTP/2.0", b" ",
    b"\t", b":", b"0\r\n\r\n", b"connection: close\r\n", b"%ff", b"%00", b"//", b"?", b"GET / HTTP/1.1\r\n\r\n",
    b"content-encoding: gzip\r\n", b"upgrade: websocket\r\nconnection: upgrade\r\n", b"\x80", b"\0",
)  # fmt: skip


# -- clients: the router's towards workers, the benchmark's towards anybody


def _router_client(folder: Path) -> Run:
    """Bytes of a worker; a call ends with what it said or with an error of the library whose interface is spoken."""
    from kvbaton.router.splice import decode_error, read_report
    from kvbaton.workers.generation import REPORT_HEADER
    from kvbaton.workers.http_client import HIGH_WATER_BYTES, Response, _Connection
    from kvbaton.workers.journal import BadStream

    async def call(data: bytes) -> None:
        connection = _Connection(5.0)
        connection.connection_made(Wire())
        connection.send(b"POST / HTTP/1.1\r\n\r\n", b"")
        step = 1 + data[0] if data and data[0] % 2 else len(data) or 1
        for start in range(0, len(data), step):
            connection.data_received(data[start : start + step])
        connection.connection_lost(None)
        try:
            await connection.head()
            response = Response(connection)
            raw = await response.content.read(HIGH_WATER_BYTES)
            if response.status != 200:
                assert decode_error(response.status, raw).status >= 400
            else:
                read_report(response.header(REPORT_HEADER))
        except (aiohttp.ClientError, BadStream):
            return
        finally:
            connection.end()

    return _on_a_loop(call)


def _on_a_loop(call: Any) -> Run:
    from simulation.loop import VirtualLoop

    def run(data: bytes) -> None:
        loop = VirtualLoop()
        try:
            loop.run(call(data))
        finally:
            loop.ending = True
            loop.close()

    return run


def _bench_client(folder: Path) -> Run:
    from kvbaton.bench.http_stream import MAX_ERROR_BYTES, Response, _Connection
    from kvbaton.bench.sse import StreamReader
    from kvbaton.types import RemoteError

    async def call(data: bytes) -> None:
        connection, response, reader = _Connection(lambda: 1.0), Response(), StreamReader()
        connection.connection_made(Wire())
        done = connection.start(b"", response, reader.feed)
        step = 1 + data[0] if data and data[0] % 2 else len(data) or 1
        for start in range(0, len(data), step):
            connection.data_received(data[start : start + step])
        connection.connection_lost(None)
        try:
            if done.done():
                done.result()
        except RemoteError:
            pass
        reader.close(1.0)
        assert len(response.error_body) <= MAX_ERROR_BYTES

    return _on_a_loop(call)


def _answers() -> list[bytes]:
    stream = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (*_events(), b"data: [DONE]\n\n"))
    error = b'{"error":{"message":"m","type":"server_error","param":null,"code":"no_capacity"}}'
    return [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + stream + b"0\r\n\r\n",
        b"HTTP/1.1 503 x\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n" % len(error) + error,
        b"HTTP/1.1 200 OK\r\nx-kvbaton-report: {\"num_prompt_tokens\": 3}\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n{}",
    ]  # fmt: skip


# -- streams


def _events() -> list[bytes]:
    return [
        b':0 r\n:0 c4\ndata: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n',
        b':0 12\ndata: {"choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{}]}}]}\n\n',
        b':0 13 stop\ndata: {"choices":[{"index":0,"text":"b","finish_reason":"stop"}],"usage":null}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n',
        b'data: {"error":{"message":"m","type":"server_error","param":null,"code":"prefill_failed"}}\n\n',
    ]


def _bench_stream(folder: Path) -> Run:
    """Events are the same however the bytes were cut."""
    from kvbaton.bench.sse import SSEParser, StreamReader

    def fed(data: bytes, step: int) -> Any:
        parser, found = SSEParser(), []
        for start in range(0, len(data), step):
            found += parser.feed(data[start : start + step])
        return [*found, None, *parser.close()], parser.num_comments

    def run(data: bytes) -> None:
        assert fed(data, len(data) or 1) == fed(data, 1 + (data[0] % 5 if data else 0))
        reader = StreamReader()
        reader.feed(data, 1.0)
        reader.close(2.0)
        assert reader.done or reader.finish_reason is not None or reader.error is not None

    return run


def _router_stream(folder: Path) -> Run:
    """A worker's stream cut into what is the client's and what is ours: the client never gets a line of ours."""
    from kvbaton.router.replay import Journal
    from kvbaton.router.splice import take_error, take_report, whole_events
    from kvbaton.workers.journal import BadStream
    from kvbaton.workers.openai_response import ERROR_MARK, REPORT_PREFIX

    def run(data: bytes) -> None:
        journal, held, passed = Journal(), b"", b""
        step = 1 + (data[0] if data and data[0] % 2 else len(data))
        try:
            for start in range(0, len(data), step):
                part, held = whole_events(held + data[start : start + step])
                error = None
                if REPORT_PREFIX in part:
                    part, _ = take_report(part, None)
                if ERROR_MARK in part:
                    part, error = take_error(part)
                passed += journal.take(part)
                if error is not None:
                    assert error.status >= 400
                    break
            journal.read(2)
        except BadStream:
            return
        assert not passed or passed.endswith(b"\n\n")
        assert not any(event.startswith(b":") for event in passed.split(b"\n\n"))

    return run


def _stream_seeds() -> list[bytes]:
    from kvbaton.workers.openai_response import REPORT_PREFIX

    report = REPORT_PREFIX + b'{"num_prompt_tokens":3,"num_cached_tokens":1,"num_output_tokens":2}\n\n'
    return [b"".join(_events()), b"".join(_events()[:3]) + report + b"data: [DONE]\n\n", report, _events()[4]]


def _engine_streams(folder: Path) -> Run:
    """What servers of other engines send: tokens within what was asked for, or an error that says who is at fault."""
    from kvbaton.types import UNREADABLE, GenerateRequest, LocalError, SamplingParams
    from kvbaton.workers.sglang_stream import PART, PartReader
    from kvbaton.workers.vllm_stream import CHUNK, EventSplitter, TokenReader, message_of, status_of

    request = GenerateRequest("r", (1, 2), SamplingParams(max_tokens=4), eos_token_ids=(7,))

    def vllm(events: list[bytes]) -> None:
        reader, got = TokenReader(request, 100), []
        for event in events:
            chunk = CHUNK.decode(event)
            if chunk.error is not None:
                assert 400 <= status_of(chunk.error) <= 599
            for choice in chunk.choices:
                got += reader.push(choice)
                assert len(got) <= 4 and all(0 <= each.token_id < 100 for each in got)
        reader.close()

    def sglang(events: list[bytes]) -> None:
        reader, got = PartReader(request, 100), []
        for event in events:
            got += reader.push(PART.decode(event))
            assert len(got) <= 4
        reader.close()

    def run(data: bytes) -> None:
        message_of(data)
        splitter = EventSplitter(4096)
        for read in (vllm, sglang):
            try:
                read(list(splitter.push(data)))
            except (LocalError, *UNREADABLE):
                splitter = EventSplitter(4096)

    return run


def _engine_seeds() -> list[bytes]:
    logprobs = {"token_logprobs": [-0.1], "top_logprobs": [{"token_id:5": -0.1}]}
    vllm = [
        {"choices": [{"token_ids": [5], "logprobs": logprobs}]},
        {"choices": [{"token_ids": [6, 7], "finish_reason": "stop"}], "usage": {"prompt_tokens": 2}},
        {"error": {"message": "m", "code": 400}},
    ]  # fmt: skip
    sglang = [
        {"output_ids": [5], "meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-0.1, 5, None]]}},
        {"output_ids": [5, 6], "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "stop", "matched": 7}}},
    ]
    return [b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events) for events in (vllm, sglang)]


# -- headers and queries


def _headers(folder: Path) -> Run:
    from kvbaton.observe.tracing import read_seconds, read_traceparent
    from kvbaton.router.wishes import read_wishes
    from kvbaton.types import LocalError
    from kvbaton.workers.http import clean_request_id
    from kvbaton.workers.kv_events import _query
    from kvbaton.workers.openai_errors import ApiError, from_exception

    def run(data: bytes) -> None:
        read_traceparent(data.decode("latin-1"))
        for read in (
            lambda: read_wishes({b"x-request-timeout-ms": data}, 60.0),
            lambda: read_wishes({b"x-kvbaton-replay": data}, 60.0),
            lambda: clean_request_id(data),
            lambda: _query(data),
            lambda: read_seconds(data),
        ):
            try:
                read()
            except (ApiError, LocalError) as failure:
                error = from_exception(failure)
                assert error.status == 400 and error.param

    return run


TARGETS = (
    Target("bodies of requests", _body, request_seeds, "json", 2.0, (b"\\ud800", b"[" * 60, b"1e999", b'"n":')),
    Target("HTTP to the router", _connection, _heads, "bytes", 1.0, HEAD_WORDS),
    Target("HTTP of workers", _router_client, _answers, "bytes", 0.7, HEAD_WORDS),
    Target("HTTP to the benchmark", _bench_client, _answers, "bytes", 0.7, HEAD_WORDS),
    Target("SSE at the benchmark", _bench_stream, lambda: [b"".join(_events()), b"data:a\r\rdata: b\r\n\r\n"], "bytes",
           1.0, (b"\n", b"\r", b"\r\n", b"data:", b":", b"event: error\n", b"\xef\xbb\xbf", b"[DONE]")),
    Target("SSE at the router", _router_stream, _stream_seeds, "bytes", 1.0,
           (b"\n\n", b"\n", b":0 ", b":1 r\n", b"data: ", b': {"', b'data: {"error":', b":0 c", b"[DONE]")),
    Target("streams of other engines", _engine_streams, _engine_seeds, "bytes", 1.0, (b"data: ", b"\n", b"null")),
    Target("headers", _headers, lambda: [b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"from=3&wait_s=0.5", b"500",
           b"never", b"seconds=2"], "bytes", 0.6, (b"=", b"&", b"%", b"from=", b"wait_s=", b"nan", b"-", b"\xb2")),
)  # fmt: skip
