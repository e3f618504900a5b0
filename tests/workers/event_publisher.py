"""A publisher of KV events that speaks as vLLM's: a PUB socket, a ROUTER for replays, a bounded buffer of batches."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvbaton.workers.vllm_kv_follow import EventEndpoints

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    def __init__(self, context: zmq.asyncio.Context, buffer_steps: int = 1000, topic_in_replay: bool = True) -> None:
        self._live = context.socket(zmq.XPUB)  # a PUB that also says who subscribed
        self._replay = context.socket(zmq.ROUTER)
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._topic_in_replay = topic_in_replay
        self.number = 0
        self.num_replays = 0
        self.replays = True

    def bind(self, endpoints: EventEndpoints | None = None) -> EventEndpoints:
        if endpoints is not None:
            self._live.bind(endpoints.live)
            self._replay.bind(endpoints.replay)
            return endpoints
        live, replay = (socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self._live, self._replay))
        return EventEndpoints(f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}")

    async def subscribed(self) -> None:
        async with asyncio.timeout(30):
            while not (await self._live.recv()).startswith(b"\x01"):
                pass

    async def publish(self, *events: Any, lost: bool = False) -> None:
        """``lost``: it is buffered, and the subscriber never sees it."""
        await self.publish_raw(msgspec.msgpack.encode([time.time(), list(events), 0]), lost)

    async def publish_raw(self, payload: bytes, lost: bool = False) -> None:
        if not lost:
            await self._live.send_multipart([b"kv@m", self.number.to_bytes(8, "big"), payload])
        self._buffer.append((self.number, payload))
        self.number += 1

    async def serve_replays(self) -> None:
        while True:
            client, _, start = await self._replay.recv_multipart()
            self.num_replays += 1
            if not self.replays:
                continue
            topic = [b"kv@m"] if self._topic_in_replay else []
            for number, payload in list(self._buffer):
                if number >= int.from_bytes(start, "big"):
                    await self._replay.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([client, b"", *([b""] if topic else []), END, b""])


@asynccontextmanager
async def publishing(endpoints: EventEndpoints | None = None, **options: Any) -> AsyncIterator[Any]:
    """The publisher, and where it is."""
    context = zmq.asyncio.Context()
    task = None
    try:
        publisher = Publisher(context, **options)
        bound = publisher.bind(endpoints)
        task = asyncio.create_task(publisher.serve_replays())
        yield publisher, bound
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)
