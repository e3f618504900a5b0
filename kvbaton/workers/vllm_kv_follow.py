"""Follows the KV events that a vLLM server publishes over ZeroMQ, and writes them to this worker's log of events.

Two sockets: a subscription to what happens, and a new one for each replay of what was missed. Invariants: whatever the
server sends or fails to send, nothing raises out of ``run``; a server that went away is taken for a new one when it is
back; every wait on a replay has a deadline. Knows nothing about requests or routers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbaton.types import LocalError
from kvbaton.workers.kv_events import KVEventLog
from kvbaton.workers.vllm_kv_events import EngineBlocks, UnreadableEvents, decode_batch
from kvbaton.workers.vllm_kv_order import Batch, BatchOrder, Step

if TYPE_CHECKING:
    from zmq.asyncio import Context, Socket

log = logging.getLogger(__name__)
REPLAY_STEP_S = 5.0  # between two parts of a replay
LOOK_AGAIN_S = 10.0  # of silence, until the server is asked whether its last batches were lost
_RETRY_S = 1.0
_REPLAY_TRIES = 3
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_NO_NUMBER = (-1).to_bytes(8, "big", signed=True)  # instead of one: the end of a replay
_YIELD_EVERY = 64


@dataclass(frozen=True)
class EventEndpoints:
    """ZeroMQ addresses of one server; without ``replay`` what is missed is lost."""

    live: str
    replay: str = ""


def parse_endpoints(text: str) -> EventEndpoints:
    """``LIVE`` or ``LIVE,REPLAY``, such as tcp://10.0.0.7:5557,tcp://10.0.0.7:5558."""
    parts = [part.strip() for part in text.split(",")]
    good = all(part.startswith(("tcp://", "ipc://")) and "*" not in part and len(part) > 6 for part in parts)
    if not good or len(parts) > 2:
        fix = "use tcp://HOST:PORT of the events, a comma, and tcp://HOST:PORT of the replays"
        raise LocalError(f"{text!r} does not say where KV events come from", field="engine_events", fix=fix)
    return EventEndpoints(parts[0], parts[1] if len(parts) == 2 else "")


def can_follow() -> bool:
    """Whether the library is here (the extra ``vllm``)."""
    return importlib.util.find_spec("zmq") is not None


class KVEventFollower:
    def __init__(
        self, endpoints: EventEndpoints, blocks: EngineBlocks, events: KVEventLog, engine: str = "vllm"
    ) -> None:
        self._endpoints = endpoints
        self._blocks = blocks
        self._events = events
        self._engine = engine
        self.order = BatchOrder()
        self.synced = asyncio.Event()  # everything that was published before we listened has been asked for
        self._replay_wanted = asyncio.Event()
        self.num_batches = 0
        self.num_unreadable = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._follow()
            except* Exception as group:
                for error in group.exceptions:
                    log.warning("KV events of the server: %s: %s; starting over", type(error).__name__, error)
            self._take(self.order.restarted())
            await asyncio.sleep(_RETRY_S)

    async def _follow(self) -> None:
        import zmq
        import zmq.asyncio

        context = zmq.asyncio.Context()
        try:
            live = context.socket(zmq.SUB)
            live.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            live.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            live.setsockopt(zmq.IPV6, 1)
            live.subscribe(b"")
            changes = live.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            live.connect(self._endpoints.live)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen(live))
                group.create_task(self._watch_connection(changes))
                group.create_task(self._replay_when_wanted(context))
        finally:
            context.destroy(linger=0)

    async def _listen(self, live: Socket) -> None:
        while True:
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    frames = await live.recv_multipart()
            except TimeoutError:
                self.order.look_again()
                self._replay_wanted.set()
                continue
            if len(frames) >= 2 and len(frames[-2]) == 8:  # [topic, number, payload]
                self._take(self.order.live(int.from_bytes(frames[-2], "big"), frames[-1]))
            if self.order.wants_replay is not None:
                self._replay_wanted.set()

    async def _watch_connection(self, changes: Socket) -> None:
        import zmq
        from zmq.utils.monitor import parse_monitor_message

        while True:
            event = parse_monitor_message(await changes.recv_multipart())["event"]
            if event == zmq.EVENT_DISCONNECTED:
                log.warning("the server's KV events broke off")
                self._take(self.order.restarted())
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._replay_wanted.set()

    async def _replay_when_wanted(self, context: Context) -> None:
        while True:
            await self._replay_wanted.wait()
            self._replay_wanted.clear()
            first = self.order.wants_replay
            if first is None:
                continue
            for _ in range(_REPLAY_TRIES if self._endpoints.replay else 0):
                try:
                    await self._replay(context, first)
                    break
                except TimeoutError:
                    log.warning("the server does not replay its KV events")
            self._take(self.order.replay_ended())
            self.synced.set()

    async def _replay(self, context: Context, first: int) -> None:
        """A socket of its own each time: what comes late of an earlier one must not be taken for this one's."""
        import zmq

        asking = context.socket(zmq.DEALER)
        try:
            asking.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            asking.setsockopt(zmq.RCVHWM, 0)  # else the server would drop what does not fit
            asking.setsockopt(zmq.IPV6, 1)
            asking.connect(self._endpoints.replay)
            await asking.send_multipart([b"", first.to_bytes(8, "big")])
            for index in range(1 << 62):
                async with asyncio.timeout(REPLAY_STEP_S):
                    frames = await asking.recv_multipart()  # [empty, (topic,) number, payload]
                if len(frames) < 2 or frames[-2] == _NO_NUMBER:
                    return
                self._take(self.order.replayed(int.from_bytes(frames[-2], "big"), frames[-1]))
                if index % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)
        finally:
            asking.close(linger=0)

    def _take(self, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Batch):
                self._apply(step.payload)
                continue
            if step.why == "gap":
                log.warning("KV events of the server were lost; its cache is learnt anew")
            self._events.append(self._blocks.clear())

    def _apply(self, payload: bytes) -> None:
        self.num_batches += 1
        try:
            change = self._blocks.apply(decode_batch(payload, self._engine))
        except UnreadableEvents as error:
            self.num_unreadable += 1
            if self.num_unreadable == 1:
                log.warning("%s; its cache is learnt anew", error)
            change = self._blocks.clear()
        if change:
            self._events.append(change)
