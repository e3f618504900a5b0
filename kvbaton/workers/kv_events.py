"""What a worker tells routers about its prefix cache: numbered batches of events, and snapshots.

Invariants: batches of one life (incarnation) are numbered from 0 without holes, in the order the cache changed; the
log keeps the last of them, at most ``max_hashes`` hashes; whoever asks for one that is gone is told so (a gap) and
takes a snapshot, which says the number of the first batch it does not contain. A batch is in the log before any token
that was computed after it is sent, so whoever saw an answer end can read every change that the request made.
``append`` is called on the engine's thread, everything else on the event loop. Knows nothing about routers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

import msgspec

from kvbaton.clock import Clock
from kvbaton.kv.blocks import HASH_BYTES, BlockEvents
from kvbaton.workers.http import Exchange
from kvbaton.workers.openai_errors import bad_request, unavailable

EVENTS_PATH, SNAPSHOT_PATH = "/internal/kv-events", "/internal/kv-snapshot"
LIFE_HEADER, SEQUENCE_HEADER = b"x-kvbaton-incarnation", b"x-kvbaton-sequence"
# How hashes are made and what a batch means. Another version's hashes would be names of nothing: nobody reads across.
KV_EVENTS_VERSION, VERSION_HEADER = 1, b"x-kvbaton-kv-version"
MAX_ANSWER_HASHES = 32768  # of one answer: half a MiB
MAX_BATCH_HASHES = 8192  # larger changes become several batches, so that an answer can always hold one
MAX_WAIT_S = 20.0
MOST_KEPT_HASHES = 1 << 18  # of a log: about 20 MiB
MAX_READERS = 64  # waiting or reading at once; more are refused
SNAPSHOT_TIMEOUT_S = 60.0
_PART_HASHES = 4096  # of a snapshot, in one write
_MSGPACK = msgspec.msgpack.Encoder()


def hashes_worth_keeping(num_blocks: int) -> int:
    """Of a cache of so many blocks: who is further behind than it has been filled a few times is better off with a
    snapshot, and what nobody will read should not fill memory for an hour."""
    return min(MOST_KEPT_HASHES, max(4096, 8 * num_blocks))


class KVEventsAnswer(msgspec.Struct, frozen=True):
    """Batches ``first``, ``first`` + 1, ... of this life; none when nothing happened, or when ``gap``."""

    incarnation: str
    block_size: int
    first: int
    end: int  # the number that the next batch of this life will have
    gap: bool = False  # the batch asked for is gone, or never was: take a snapshot
    batches: tuple[BlockEvents, ...] = ()
    age_s: float = 0.0  # how long ago the oldest of ``batches`` happened
    version: int = 1


class KVEventLog:
    """The last batches of one life. ``take_snapshot`` runs between two steps of the engine; see ``snapshot``."""

    def __init__(
        self,
        incarnation: str,
        block_size: int,
        take_snapshot: Callable[[], Awaitable[tuple[int, list[bytes]]]],
        clock: Clock,
        max_hashes: int = MOST_KEPT_HASHES,
    ) -> None:
        self.incarnation = incarnation
        self.block_size = block_size
        self._take_snapshot = take_snapshot
        self._clock = clock
        self._max_hashes = max_hashes
        self._lock = threading.Lock()
        self._batches: deque[tuple[float, BlockEvents]] = deque()
        self._first = 0  # number of the oldest batch kept
        self._num_hashes = 0
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @property
    def next_sequence(self) -> int:
        """The number the next batch will have."""
        with self._lock:
            return self._first + len(self._batches)

    def append(self, events: BlockEvents) -> None:
        now_s = self._clock.now_s()
        with self._lock:
            for part in split_events(events, MAX_BATCH_HASHES):
                self._batches.append((now_s, part))
                self._num_hashes += part.num_hashes
            # An empty batch costs memory too: each counts as one hash.
            while self._batches and self._num_hashes + len(self._batches) > self._max_hashes:
                self._num_hashes -= self._batches.popleft()[1].num_hashes
                self._first += 1
            waiting, self._waiting = self._waiting, []
        for loop, arrived in waiting:
            with contextlib.suppress(RuntimeError):  # that loop is closed, and nobody waits on it any more
                loop.call_soon_threadsafe(arrived.set)

    def read(self, first: int, max_hashes: int = MAX_ANSWER_HASHES) -> KVEventsAnswer:
        """Batches from number ``first`` on, as many as an answer holds, at least one if there is one."""
        with self._lock:
            skip, end = first - self._first, self._first + len(self._batches)
            if not 0 <= skip <= len(self._batches):
                return KVEventsAnswer(
                    self.incarnation, self.block_size, first, end, gap=True, version=KV_EVENTS_VERSION
                )
            chosen: list[BlockEvents] = []
            num_hashes, oldest_s = 0, None
            for index in range(skip, len(self._batches)):
                at_s, batch = self._batches[index]
                num_hashes += batch.num_hashes + 1
                if chosen and num_hashes > max_hashes:
                    break
                oldest_s = at_s if oldest_s is None else oldest_s
                chosen.append(batch)
        age_s = 0.0 if oldest_s is None else max(0.0, self._clock.now_s() - oldest_s)
        said = (False, tuple(chosen), age_s, KV_EVENTS_VERSION)
        return KVEventsAnswer(self.incarnation, self.block_size, first, end, *said)

    async def wait_for(self, sequence: int, timeout_s: float) -> None:
        """Until batch ``sequence`` is there, or the time is up."""
        arrived = asyncio.Event()
        entry = (asyncio.get_running_loop(), arrived)
        with self._lock:
            if self._first + len(self._batches) != sequence:
                return  # it is there, or never will be: the answer says which
            self._waiting.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await arrived.wait()
        except TimeoutError:
            pass
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._waiting.remove(entry)

    async def snapshot(self) -> tuple[int, list[bytes]]:
        """Every hash that is cached, and the number of the first batch that is not contained in them."""
        return await self._take_snapshot()


def split_events(events: BlockEvents, max_hashes: int) -> list[BlockEvents]:
    """The same change as several batches of at most ``max_hashes``. No hash is named twice, so their order is free."""
    if events.num_hashes <= max_hashes:
        return [events]
    parts = [BlockEvents(events.cleared)] if events.cleared else []
    for start in range(0, len(events.removed), max_hashes):
        parts.append(BlockEvents(removed=events.removed[start : start + max_hashes]))
    for start in range(0, len(events.stored), max_hashes):
        parts.append(BlockEvents(stored=events.stored[start : start + max_hashes]))
    return parts


class KVEventsEndpoint:
    """``GET /internal/kv-events?from=N&wait_s=S`` and ``GET /internal/kv-snapshot``. The caller checked the key."""

    def __init__(self, log: KVEventLog) -> None:
        self._log = log
        self._num_readers = 0
        self._snapshotting = asyncio.Lock()  # one at a time: each is a copy of the whole list

    async def answer(self, exchange: Exchange) -> None:
        if self._num_readers >= MAX_READERS:
            raise unavailable("too many readers of KV events", "too_many_readers")
        self._num_readers += 1
        try:
            if exchange.path == SNAPSHOT_PATH:
                await self._answer_snapshot(exchange)
            else:
                await self._answer_events(exchange)
        finally:
            self._num_readers -= 1

    async def _answer_events(self, exchange: Exchange) -> None:
        first, wait_s = _query(exchange.query)
        if wait_s > 0:
            await exchange.until_disconnect(self._log.wait_for(first, wait_s))
        body = _MSGPACK.encode(self._log.read(first))
        async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
            await exchange.start(200, [(b"content-type", b"application/msgpack"), _length(len(body))])
            await exchange.end(body)

    async def _answer_snapshot(self, exchange: Exchange) -> None:
        """The hashes one after the other, in parts. Their number is known by the length, so a cut shows."""
        async with asyncio.timeout(SNAPSHOT_TIMEOUT_S), self._snapshotting:
            sequence, hashes = await self._log.snapshot()
            await exchange.start(
                200,
                [
                    (b"content-type", b"application/octet-stream"),
                    _length(len(hashes) * HASH_BYTES),
                    (LIFE_HEADER, self._log.incarnation.encode()),
                    (SEQUENCE_HEADER, b"%d" % sequence),
                    (VERSION_HEADER, b"%d" % KV_EVENTS_VERSION),
                ],
            )
            for start in range(0, len(hashes), _PART_HASHES):
                await exchange.write(b"".join(hashes[start : start + _PART_HASHES]))
            await exchange.end()


def _length(num_bytes: int) -> tuple[bytes, bytes]:
    return (b"content-length", b"%d" % num_bytes)


def _query(raw: bytes) -> tuple[int, float]:
    fields = parse_qs(raw.decode("latin-1"))
    first, wait = fields.get("from", ["0"])[-1], fields.get("wait_s", ["0"])[-1]
    if not first.isascii() or not first.isdigit() or len(first) > 18:
        raise bad_request("from must be the number of a batch, 0 or above", "from")
    try:
        wait_s = float(wait)
    except ValueError:
        wait_s = -1.0
    if not 0.0 <= wait_s <= MAX_WAIT_S:
        raise bad_request(f"wait_s must be a number of seconds between 0 and {MAX_WAIT_S:g}", "wait_s")
    return int(first), wait_s
