"""Streams pass whole and in order, whether their parts go straight from socket to socket or by the request's task."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from router.fleet import SHORT, Fleet, RawWorker, running_fleet
from workers.scripted import serving, until

from kvbaton.config import MemberSettings
from kvbaton.engine.tokenizer import Tokenizer

END = b"data: [DONE]\n\n"


def events(count: int, size: int) -> list[bytes]:
    return [b'data: {"choices":[{"index":0,"text":"%06d%b"}]}\n\n' % (i, b"x" * size) for i in range(count)]


async def begin(fleet: Fleet) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = fleet.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 12)
    body = json.dumps({"prompt": SHORT, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    return reader, writer


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """The body, without its chunks' frames."""
    await reader.readuntil(b"\r\n\r\n")
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    return b"".join(parts)


async def test_parts_that_are_cut_anywhere(tokenizer: Tokenizer, info: bytes) -> None:
    rng = random.Random(7)
    whole = b"".join(events(300, 20)) + END
    cuts = sorted(rng.sample(range(1, len(whole)), 200))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    async with running_fleet(tokenizer, {}) as fleet, serving(RawWorker(info, parts)) as address:
        fleet.registry.set_members([MemberSettings(address, "both", "raw")])
        await fleet.poll()
        reader, writer = await begin(fleet)
        async with asyncio.timeout(20):
            assert await rest_of(reader) == whole
        writer.close()


async def test_a_client_that_reads_late_misses_nothing(tokenizer: Tokenizer, info: bytes) -> None:
    """More than sockets and buffers hold: at some point parts have to wait for the client, later they pass again."""
    parts = [*events(3000, 8000), END]
    worker = RawWorker(info, parts)
    async with running_fleet(tokenizer, {}) as fleet, serving(worker) as address:
        fleet.registry.set_members([MemberSettings(address, "both", "raw")])
        await fleet.poll()
        reader, writer = await begin(fleet)
        writer.transport.pause_reading()
        (member,) = fleet.registry.members
        await until(lambda: bool(member.own_requests))
        before, still = -1, 0
        async with asyncio.timeout(30):
            while still < 3:  # until nothing moves any more
                await asyncio.wait((asyncio.ensure_future(asyncio.Event().wait()),), timeout=0.05)
                sent = fleet.metrics.counts("kvbaton_router_itl_seconds")
                still = still + 1 if sum(sent) == before and before > 0 else 0
                before = sum(sent)
            assert before < len(parts) - 1, "the client holds the stream back"
            writer.transport.resume_reading()
            assert await rest_of(reader) == b"".join(parts)
        writer.close()


async def test_what_follows_the_end_mark_is_nobodys(tokenizer: Tokenizer, info: bytes) -> None:
    """In the same part, in a later one, or cut; and the words inside an event are no end mark."""
    text = b'data: {"choices":[{"index":0,"text":": data: [DONE]"}]}\n\n'
    behind = b'data: {"choices":[{"index":0,"text":"more"}]}\n\n'
    for parts in ([text + END + behind], [text, END + behind], [text, END[:9], END[9:] + behind + END]):
        async with running_fleet(tokenizer, {}) as fleet, serving(RawWorker(info, parts)) as address:
            fleet.registry.set_members([MemberSettings(address, "both", "raw")])
            await fleet.poll()
            status, raw, _ = await fleet.post({"prompt": SHORT, "stream": True})
            assert (status, raw) == (200, text + END), parts


@pytest.mark.parametrize("begun", [False, True])
async def test_an_event_without_end_is_not_kept(
    tokenizer: Tokenizer, info: bytes, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr("kvbaton.router.stream.MAX_EVENT_BYTES", 100_000)
    worker = RawWorker(info, [*events(begun, 1), b"data: ", *[b"x" * 10_000] * 50])
    async with running_fleet(tokenizer, {}) as fleet, serving(worker) as address:
        fleet.registry.set_members([MemberSettings(address, "both", "raw")])
        await fleet.poll()
        status, answer, _ = await fleet.post({"prompt": SHORT, "stream": True})
        if begun:
            assert status == 200 and b'"code":"worker_error"' in answer and b"xxx" not in answer
        else:
            assert (status, answer["error"]["code"]) == (502, "worker_error")
        line = 'kvbaton_router_member_failures_total{cause="connection_lost",member="raw"}'
        assert fleet.counter(line) >= 1
