"""Clients that do to the router's sockets what no friend would, and clients whose habits are only uncommon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from router.fleet import LONG, Fleet, RawWorker, running_fleet
from workers.scripted import serving, until

from kvbaton.config import MemberSettings
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.workers.http import FREE_BYTES, BodyBudget, Bound, Claim, Exchange, OpenRequests
from kvbaton.workers.http_client import HttpClient
from kvbaton.workers.http_head import MAX_WAITING
from kvbaton.workers.openai_errors import ApiError

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@asynccontextmanager
async def connected(
    url: str, receive_bytes: int | None = None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = url.removeprefix("http://").partition(":")
    if receive_bytes is None:
        reader, writer = await asyncio.open_connection(host, int(port))
    else:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=sock, limit=receive_bytes)
    try:
        async with asyncio.timeout(30):
            yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def request(head: bytes = HEAD, **body: Any) -> bytes:
    raw = json.dumps({"prompt": "short", **body}).encode()
    return head + b"content-length: %d\r\n\r\n" % len(raw) + raw


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The next answer of a connection that is kept: status, and the body that its head measures."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


# -- clients that offer another protocol --------------------------------------------------------------------------

OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("step", [1, 1 << 16])
async def test_an_offer_of_http_2_is_declined_and_the_request_served(split: Fleet, chunked: bool, step: int) -> None:
    """As some clients make it with every request over plain text: Java's own among them, and curl --http2."""
    plain = request(HEAD + OFFER)
    if chunked:
        _, _, body = plain.partition(b"\r\n\r\n")
        head = HEAD + OFFER + b"transfer-encoding: chunked\r\n\r\n"
        plain = head + b"5\r\n" + body[:5] + b"\r\n%x\r\n" % (len(body) - 5) + body[5:] + b"\r\n0\r\n\r\n"
    sent = plain + b"GET /health HTTP/1.1\r\nhost: x\r\n" + OFFER + b"\r\n" + plain
    async with connected(split.url) as (reader, writer):
        for at in range(0, len(sent), step):
            writer.write(sent[at : at + step])
            await asyncio.sleep(0)
        status, body = await answer(reader)
        assert status == 200 and b"hello from d0" in body, body
        assert await answer(reader) == (200, b'{"status":"ok"}')
        status, body = await answer(reader)
        assert status == 200 and b"hello from d0" in body, body


async def test_a_stream_to_a_client_of_http_1_0_is_not_in_chunks(split: Fleet) -> None:
    async with connected(split.url) as (reader, writer):
        writer.write(request(HEAD.replace(b"HTTP/1.1", b"HTTP/1.0"), stream=True))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")


async def test_a_body_that_breaks_its_frames_is_told_so_though_more_of_it_comes(split: Fleet) -> None:
    """Closing under bytes that nobody read would reset the connection, and the answer with it."""
    async with connected(split.url) as (reader, writer):
        writer.write(HEAD + b'transfer-encoding: chunked\r\n\r\n5\r\n{"pro\r\nnonsense\r\n')
        await until(lambda: split.gateway.open.num == 0)
        for _ in range(40):
            writer.write(b"x" * 65536)
            await asyncio.sleep(0)
        status, body = await answer(reader)
        assert status == 400 and b"not a valid HTTP request" in body
    await split.settled()


# -- clients that do not read -------------------------------------------------------------------------------------


async def test_a_client_that_does_not_read_holds_nothing_beyond_its_deadline(tokenizer: Tokenizer, info: bytes) -> None:
    event = b'data: {"choices":[],"x":"' + b"a" * 65_000 + b'"}\n\n'
    worker = RawWorker(info, [event] * 1000)
    async with running_fleet(tokenizer, {}) as fleet, serving(worker) as address:
        fleet.registry.set_members([MemberSettings(address, "both", "raw")])
        await fleet.poll()
        async with connected(fleet.url, receive_bytes=4096) as (_, writer):
            writer.write(request(HEAD + b"x-request-timeout-ms: 300\r\n", stream=True))
            await until(lambda: fleet.gateway.open.num == 1)
            await until(lambda: fleet.gateway.open.num == 0)
        fleet.check_idle()


# -- several requests on one connection, and what follows them ----------------------------------------------------


async def test_what_is_no_request_never_lands_in_an_answer(split: Fleet) -> None:
    worker = split.workers["d0"]
    worker.gate.clear()
    worker.gate_at = 2
    async with connected(split.url) as (reader, writer):
        writer.write(request(stream=True))
        begun = await reader.readuntil(b"data: ")
        writer.write(request() + b"nonsense\r\n\r\n")
        await until(lambda: worker.num_open == 1)
        more = asyncio.ensure_future(reader.read())
        await asyncio.wait((more,), timeout=0.1)  # were something said now, it would be said in the middle
        worker.gate.set()
        text = begun + await more
    stream, _, rest = text.partition(b"0\r\n\r\n")
    assert stream.count(b"HTTP/1.1") == 1 and stream.endswith(b"data: [DONE]\n\n\r\n")
    assert rest.count(b"HTTP/1.1 200 OK") == 1 and b"hello from d0" in rest
    assert rest.count(b"HTTP/1.1 400 Bad Request") == 1 and b"connection: close" in rest


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_is_noticed_though_it_asked_for_more(split: Fleet, stream: bool) -> None:
    worker = split.workers["d0"]
    worker.gate.clear()
    async with connected(split.url) as (_, writer):
        writer.write(request(prompt=LONG, stream=stream))
        await until(lambda: worker.num_open == 1)
        writer.write(request())
        await asyncio.sleep(0)
    await until(lambda: worker.num_open == 0 and split.gateway.open.num == 0)
    split.check_idle()


async def test_requests_beyond_measure_on_one_connection_are_refused(split: Fleet) -> None:
    """Each that waits costs far more memory than its few bytes."""
    worker = split.workers["d0"]
    worker.gate.clear()
    async with connected(split.url) as (reader, writer):
        writer.write(request())
        await until(lambda: worker.num_open == 1)
        writer.write(b"GET /health HTTP/1.1\r\n\r\n" * 5000)
        more = asyncio.ensure_future(reader.read())
        await asyncio.wait((more,), timeout=0.1)
        worker.gate.set()
        text = await more
    assert b"hello from d0" in text and 2 <= text.count(b"HTTP/1.1 200 OK") <= 1 + MAX_WAITING
    assert text.count(b"HTTP/1.1 400 ") == 1


# -- what may happen in the same moment -----------------------------------------------------------------------------


async def test_a_bound_that_is_cut_by_the_clock_and_by_a_drain_is_a_timeout() -> None:
    cut = Bound(None)

    async def work() -> None:
        with cut:
            await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    cut.cut()
    cut.cut()
    with pytest.raises(TimeoutError):
        await task
    assert not task.cancelling()


async def test_an_upload_whose_time_is_up_is_not_ended_again() -> None:
    """By one that wants its room just then, and is not to suffer for it."""
    loop = asyncio.get_running_loop()
    budget = BodyBudget(100)
    never: asyncio.Future[Any] = loop.create_future()

    async def receive() -> Any:
        return await never

    slow, claim, other = Exchange(SCOPE, receive, nobody), Claim(budget), Claim(budget)
    claim.take(FREE_BYTES, 0.0)
    claim.take(100, 0.0)
    reading = asyncio.ensure_future(slow.read_body(1000, 0.01, claim))
    await asyncio.sleep(0)
    other.take(FREE_BYTES, 0.0)
    done: asyncio.Future[None] = loop.create_future()

    def at_that_moment() -> None:  # behind the timer, before the task that it cancels
        try:
            other.take(50, loop.time() + 10)
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)

    loop.call_later(0.01, at_that_moment)
    loop.call_soon(time.sleep, 0.05)  # both are due in the same round
    await done
    with pytest.raises(ApiError):
        await reading
    claim.release()
    other.release()
    assert budget.left_bytes == 100


SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": []}


async def nobody(_: Any) -> None:
    raise AssertionError("nothing is said")


async def test_a_second_answer_is_no_part_of_the_first() -> None:
    one = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"
    num_connections = num_ended = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections, num_ended
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(one + b"abc" + one + b"xyz")
        with contextlib.suppress(OSError):
            await reader.read()
            writer.close()
            await writer.wait_closed()
        num_ended += 1

    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    async with server, HttpClient(2.0, 30.0) as client:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        for number in (1, 2):
            async with client.post(url, data=b"", headers={}) as response:
                assert await response.read() == b"abc"
            assert num_connections == number
        await until(lambda: num_ended == 2)


async def test_a_long_deadline_ends_a_request_though_it_has_no_timer_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbaton.workers.http.LONG_S", 0.01)
    monkeypatch.setattr("kvbaton.workers.http.LOOK_S", 0.005)
    requests = OpenRequests()
    for _ in range(2):  # looking ends with the last one, and begins again
        longer = requests.bound(3600.0)
        with longer:
            with pytest.raises(TimeoutError), requests.bound(0.02):
                await asyncio.Event().wait()
            assert requests._bounds == {longer}
        while requests._timer is not None:  # noqa: ASYNC110
            await asyncio.sleep(0)
