"""What comes before a body, over real sockets: bounded, and answered in one shape when it is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from workers.scripted import serving, until

from kvbaton.workers.http import ClientGone, Exchange, Receive, Scope, Send
from kvbaton.workers.http_head import MAX_HEAD_BYTES

GOOD = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    exchange = Exchange(scope, receive, send)
    await exchange.answer(200, await exchange.read_body(1 << 20, 30.0))


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    async with serving(echo) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


async def answer_to(address: tuple[str, int], *parts: bytes) -> bytes:
    """Everything the server says until it closes the connection."""
    reader, writer = await asyncio.open_connection(*address)
    async with asyncio.timeout(20):
        for part in parts:
            writer.write(part)
        answer = await reader.read()
    writer.close()
    return answer


def refusal(answer: bytes) -> tuple[int, str | None]:
    head, body = answer.split(b"\r\n\r\n", 1)
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return int(head.split()[1]), error["code"]


@pytest.mark.parametrize(
    "parts",
    [
        [b"GET / HTTP/1.1\r\nhost: x\r\nx-long: " + b"a" * 200_000 + b"\r\n\r\n"],
        [b"GET / HTTP/1.1\r\nhost: x\r\nx-endless: ", *[b"a" * 10_000] * 20],
        [b"GET / HTTP/1.1\r\n", *[b"x-many: a\r\n"] * 4000, b"\r\n"],
        [b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"],
        [b"GET /endless", *[b"a" * 10_000] * 20],
        [GOOD, b"GET / HTTP/1.1\r\nx-long: " + b"a" * 200_000 + b"\r\n\r\n"],
    ],
    ids=["one-line", "endless-line", "many-lines", "url", "endless-url", "second-request"],
)
async def test_a_head_without_measure_is_refused_with_431(address: tuple[str, int], parts: list[bytes]) -> None:
    answer = await answer_to(address, *parts)
    if parts[0] == GOOD:
        ours, answer = answer.split(b"\r\n\r\nhi", 1)
        assert b"200 OK" in ours
    assert refusal(answer) == (431, "headers_too_large")


async def test_a_head_just_within_the_bound_is_served(address: tuple[str, int]) -> None:
    filler = b"a" * (MAX_HEAD_BYTES - 500)
    request = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-filler: %s\r\ncontent-length: 3\r\n\r\nabc"
    assert (await answer_to(address, request % filler)).endswith(b"\r\n\r\nabc")


async def test_a_long_body_is_no_head(address: tuple[str, int]) -> None:
    body = b"b" * (10 * MAX_HEAD_BYTES)
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert (await answer_to(address, head, body)).endswith(b"\r\n\r\n" + body)
    chunks = [b"8000\r\n" + b"c" * 0x8000 + b"\r\n"] * 10
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert (await answer_to(address, head, *chunks, b"0\r\n\r\n")).endswith(b"c" * 0x8000 * 10)


async def test_an_endless_trailer_ends_the_connection(address: tuple[str, int]) -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nx-trailer: "
    assert refusal(await answer_to(address, head, *[b"a" * 10_000] * 20)) == (431, "headers_too_large")


async def test_what_is_not_http_gets_an_error_like_every_other(address: tuple[str, int]) -> None:
    assert refusal(await answer_to(address, b"\x16\x03\x01 hello\r\n\r\n")) == (400, None)


async def bare(scope: Scope, receive: Receive, send: Send) -> None:
    exchange = Exchange(scope, receive, send)
    await exchange.start(304 if exchange.path == "/same" else 200, [(b"etag", b"1")])
    await exchange.end()


async def test_an_answer_without_a_body_is_followed_by_nothing() -> None:
    get, last = b" / HTTP/1.1\r\nhost: x\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    async with serving(bare) as url:
        host, port = url.removeprefix("http://").split(":")
        for first in (b"GET" + get.replace(b"/ ", b"/same "), b"HEAD" + get):
            answer = await answer_to((host, int(port)), first, last)
            head, _, rest = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 304" if b"/same" in first else b"HTTP/1.1 200")
            assert rest.startswith(b"HTTP/1.1 200 OK\r\n"), answer
            assert b"\r\ndate: " in head  # as of every origin server with a clock
            assert rest.endswith(b"\r\n\r\n0\r\n\r\n")


# -- clients that take their time -------------------------------------------------------------------------------------

BRISK_S = 0.3  # a connection must be able to say something within it


@pytest.mark.parametrize(
    ("sent", "told"), [(b"", None), (b"P", "head_timeout"), (b"POST /echo HTTP/1.1\r\nhost: x\r\n", "head_timeout")]
)
async def test_a_connection_that_sends_no_head_is_ended(sent: bytes, told: str | None) -> None:
    async with serving(echo, head_timeout_s=BRISK_S) as url:
        host, port = url.removeprefix("http://").split(":")
        answer = await answer_to((host, int(port)), sent)
        assert answer == b"" if told is None else refusal(answer) == (408, told)


async def test_a_head_that_trickles_in_is_ended_too_and_a_kept_connection_is_not() -> None:
    async with serving(echo, head_timeout_s=BRISK_S) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            writer.write(GOOD)
            assert (await reader.readuntil(b"\r\n\r\nhi")).startswith(b"HTTP/1.1 200")
            await asyncio.wait((asyncio.ensure_future(reader.read(1)),), timeout=4 * BRISK_S)
            assert not writer.transport.is_closing() and not reader.at_eof(), "an idle connection is no slow head"
        writer.close()
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            writer.write(GOOD)
            await reader.readuntil(b"\r\n\r\nhi")
            answer = asyncio.ensure_future(reader.read())
            writer.write(b"POST /echo HTTP/1.1\r\n")
            while not answer.done():
                writer.write(b"x-slow: a\r\n")
                await asyncio.wait((answer,), timeout=BRISK_S / 5)
        assert refusal(await answer) == (408, "head_timeout")
        writer.close()


async def test_an_answer_that_takes_long_is_not_cut_by_the_deadline_of_heads() -> None:
    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.wait((asyncio.ensure_future(asyncio.Event().wait()),), timeout=4 * BRISK_S)
        await echo(scope, receive, send)

    async with serving(slow, head_timeout_s=BRISK_S) as url:
        host, port = url.removeprefix("http://").split(":")
        request = GOOD.replace(b"host: x", b"host: x\r\nconnection: close")
        assert (await answer_to((host, int(port)), request)).endswith(b"\r\n\r\nhi")


class Waiting:
    """Answers when it may, and knows whether the client left before."""

    def __init__(self, begin_first: bool) -> None:
        self.begin_first = begin_first
        self.may_answer, self.num_open, self.num_gone = asyncio.Event(), 0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        await exchange.read_body(100, 30.0)
        self.num_open += 1
        if self.begin_first:
            await exchange.start(200, [(b"content-type", b"text/event-stream")])
            await exchange.write(b"data: 1\n\n")
        try:
            await exchange.until_disconnect(self.may_answer.wait())
        except ClientGone:
            self.num_gone += 1
            return
        if self.begin_first:
            await exchange.end(b"data: 2\n\n")
        else:
            await exchange.answer(200, b"late")


@pytest.mark.parametrize("begin_first", [False, True])
async def test_a_client_that_only_stopped_sending_gets_its_answer(begin_first: bool) -> None:
    app = Waiting(begin_first)
    async with serving(app, half_closes=True) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            writer.write(GOOD)
            writer.write_eof()
            # What it is asked whether it is there, and may ignore by the standards of HTTP and of event streams.
            await reader.readuntil(b":\n\n\r\n" if begin_first else b"HTTP/1.1 100 Continue\r\n\r\n")
            await until(lambda: app.num_open == 1)
            app.may_answer.set()
            answer = await reader.read()
        writer.close()
        assert app.num_gone == 0
        assert answer.endswith(b"data: 2\n\n\r\n0\r\n\r\n" if begin_first else b"\r\n\r\nlate")


@pytest.mark.parametrize("begin_first", [False, True])
@pytest.mark.parametrize("half_first", [False, True])
async def test_a_client_that_left_is_noticed(begin_first: bool, half_first: bool) -> None:
    app = Waiting(begin_first)
    async with serving(app, half_closes=True) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            writer.write(GOOD)
            if begin_first:
                await reader.readuntil(b"data: 1\n\n\r\n")
            await until(lambda: app.num_open == 1)
            if half_first:
                writer.write_eof()
            writer.close()
            await until(lambda: app.num_gone == 1)


async def test_a_worker_takes_the_end_of_sending_for_the_end() -> None:
    app = Waiting(begin_first=False)
    async with serving(app) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            writer.write(GOOD)
            await until(lambda: app.num_open == 1)
            writer.write_eof()
            assert await reader.read() == b""
            await until(lambda: app.num_gone == 1)
        writer.close()
