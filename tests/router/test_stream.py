"""Streams pass whole and in order, whether their parts go straight from socket to socket or by the request's task."""

from __future__ import annotations

import asyncio
import json
import random

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
