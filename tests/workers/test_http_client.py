"""The router's client for workers, against sockets that do what we tell them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kvbaton.workers.http_client import HIGH_WATER_BYTES, HttpClient

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[str]:
    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(guarded, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    async with HttpClient(2.0, 30.0) as made:
        yield made


async def request_of(reader: asyncio.StreamReader) -> bytes:
    """Head and body of one request; nothing when the connection ended."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def test_answers_follow_each_other_on_one_connection(client: HttpClient) -> None:
    seen: list[bytes] = []
    num_connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while request := await request_of(reader):
            seen.append(request)
            if len(seen) % 2:
                writer.write(
                    HEAD + b"transfer-encoding: chunked\r\nX-Mixed: Yes\r\n\r\n" + chunk(b"one") + chunk(b"two")
                )
                await writer.drain()
                writer.write(b"0\r\n\r\n")
            else:
                writer.write(b"HTTP/1.1 503 no\r\ncontent-length: 5\r\n\r\nsorry")

    async with listening(handler) as url:
        for number in range(3):
            async with client.post(url + "/a?b", data=b"x" * number, headers={"k": "v"}) as response:
                assert (response.status, response.headers["x-mixed"]) == (200, "Yes")
                assert b"".join([part async for part in response.content.iter_any()]) == b"onetwo"
            async with client.post(url + "/", data=b"", headers={}) as response:
                assert (response.status, await response.read()) == (503, b"sorry")
        client.close()
    assert num_connections == 1
    assert (
        seen[2].startswith(b"POST /a?b HTTP/1.1\r\n") and seen[2].endswith(b"\r\n\r\nx") and b"\r\nk: v\r\n" in seen[2]
    )


async def test_leaving_early_closes_the_connection(client: HttpClient) -> None:
    ended = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"one"))
        await reader.read()
        ended.set()

    async with listening(handler) as url:
        async with client.post(url + "/", data=b"", headers={}) as response:
            async for part in response.content.iter_any():
                assert part == b"one"
                break
        async with asyncio.timeout(20):
            await ended.wait()


@pytest.mark.parametrize("answer", [b"", HEAD, HEAD + b"content-length: 9\r\n\r\nabc", b"nonsense\r\n\r\n"])
async def test_an_answer_that_is_cut_is_an_error(client: HttpClient, answer: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(answer)

    async with listening(handler) as url:
        with pytest.raises(aiohttp.ClientError):
            async with client.post(url + "/", data=b"", headers={}) as response:
                await response.read()


async def test_a_worker_that_says_nothing_is_not_waited_for() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"one"))
        await reader.read()

    async with HttpClient(2.0, 0.5) as client, listening(handler) as url:
        parts = []
        with pytest.raises(TimeoutError):
            async with client.post(url + "/", data=b"", headers={}) as response:
                async for part in response.content.iter_any():
                    parts.append(part)
        assert parts == [b"one"]


async def test_nobody_there(client: HttpClient) -> None:
    async with listening(lambda *_: asyncio.sleep(0)) as url:
        pass
    with pytest.raises(aiohttp.ClientConnectorError):
        async with client.post(url + "/", data=b"", headers={}):
            pass


async def test_what_nobody_takes_is_not_read(client: HttpClient) -> None:
    """A slow client holds its worker back; our memory does not grow."""
    num_sent = 0
    stuck = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await request_of(reader)
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(1000):
            writer.write(chunk(b"x" * 65536))
            num_sent += 65536
            if writer.transport.get_write_buffer_size() > 1 << 20:
                stuck.set()
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async with listening(handler) as url, client.post(url + "/", data=b"", headers={}) as response:
        async with asyncio.timeout(20):
            while num_sent < 4 * HIGH_WATER_BYTES:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert sum(map(len, response.content._connection.parts)) <= HIGH_WATER_BYTES + (1 << 19)
        total = 0
        async for part in response.content.iter_any():
            total += len(part)
        assert total == 1000 * 65536


@pytest.mark.parametrize(("said", "asked_again"), [(b"", True), (b"HTTP/1.1 2", False)])
async def test_a_kept_connection_that_was_closing_costs_nothing(
    client: HttpClient, said: bytes, asked_again: bool
) -> None:
    """The worker closes it as the next call comes. A call of which a byte was answered is not made again."""
    bodies: list[list[bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append([])
        while request := await request_of(reader):
            bodies[-1].append(request.partition(b"\r\n\r\n")[2])
            if len(bodies) == 1 and len(bodies[-1]) == 2:
                writer.write(said)
                return
            writer.write(HEAD + b"content-length: 2\r\n\r\nok")

    async def ask(url: str, body: bytes) -> bytes:
        async with client.post(url + "/", data=body, headers={}) as response:
            return await response.read()

    async with listening(handler) as url:
        assert await ask(url, b"one") == b"ok"
        if asked_again:
            assert await ask(url, b"two") == b"ok"
            assert bodies == [[b"one", b"two"], [b"two"]]
        else:
            with pytest.raises(aiohttp.ClientError):
                await ask(url, b"two")
            assert bodies == [[b"one", b"two"]]
        client.close()


async def test_a_worker_that_died_of_a_call_is_not_asked_again(client: HttpClient) -> None:
    """Its connection was lost, and nobody listens any more: the call failed, it is not one that never came."""
    server: asyncio.Server | None = None
    num_calls = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_calls
        while await request_of(reader):
            num_calls += 1
            if num_calls == 2:
                assert server is not None
                server.close()
                break
            writer.write(HEAD + b"content-length: 2\r\n\r\nok")
        writer.close()

    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with client.post(url, data=b"", headers={}) as response:
        assert await response.read() == b"ok"
    with pytest.raises(aiohttp.ServerDisconnectedError):
        async with client.post(url, data=b"", headers={}):
            pass
    assert num_calls == 2
    await server.wait_closed()


@pytest.mark.parametrize("who_closes", ["we", "the worker"])
async def test_nothing_is_left_of_idle_connections(who_closes: str) -> None:
    """Of a burst, and of a worker that is gone and is never called again."""
    ended: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        if who_closes == "we":
            ended.append(await reader.read(1))

    async with HttpClient(2.0, 30.0, keep_alive_s=0.2) as client, listening(handler) as url:

        async def call() -> bytes:
            async with client.post(url + "/", data=b"", headers={}) as response:
                await all_met.wait()  # so that each has a connection of its own
                return await response.read()

        all_met = asyncio.Barrier(5)
        assert await asyncio.gather(*[call() for _ in range(5)]) == [b"ok"] * 5
        assert client.num_idle or who_closes == "the worker"
        async with asyncio.timeout(20.0):
            while client.num_idle or (who_closes == "we" and len(ended) < 5):  # noqa: ASYNC110 (a clock does it)
                await asyncio.sleep(0.02)
    assert ended == ([b""] * 5 if who_closes == "we" else [])


async def test_a_call_that_ends_after_close_leaves_nothing() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await reader.read(1)

    async with HttpClient(2.0, 30.0) as client, listening(handler) as url:
        async with client.post(url + "/", data=b"", headers={}) as response:
            client.close()
            assert await response.read() == b"ok"
        assert client.num_idle == 0
