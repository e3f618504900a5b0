"""Follows one worker's KV events over HTTP and keeps the prefix index in step with them.

A round is one question with a deadline: for the events behind those that are known, which the worker answers when there
are some or after a short wait; or for a snapshot, when some are missing. Invariants: no answer is applied that belongs
to a life the registry does not count; when no events come the index is told so, and goes on by what is sent there; all
sizes are bounded. Knows nothing about routing.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

from kvbaton.config import RouterSettings
from kvbaton.kv.blocks import HASH_BYTES, BlockEvents
from kvbaton.observe.metrics import Metrics
from kvbaton.router.kv_feed import KVFeed
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.router.registry import Member
from kvbaton.types import UNREADABLE
from kvbaton.workers.kv_events import (
    EVENTS_PATH,
    KV_EVENTS_VERSION,
    LIFE_HEADER,
    SEQUENCE_HEADER,
    SNAPSHOT_PATH,
    VERSION_HEADER,
    KVEventsAnswer,
)

log = logging.getLogger(__name__)
WAIT_S = 1.0  # what the worker may wait for an event; also how long what is under way may outlive its request here
SNAPSHOT_TIMEOUT_S = 60.0
FAILURES_UNTIL_LOST = 2  # in a row: one may be a hiccup
MAX_BACKOFF_S = 2.0
_MAX_ANSWER_BYTES = 4 * 1024 * 1024
_DECODER = msgspec.msgpack.Decoder(KVEventsAnswer)
Errors = (aiohttp.ClientError, OSError, TimeoutError, ValueError, *UNREADABLE)


class KVFollower:
    def __init__(
        self,
        member: Member,
        index: PrefixIndex,
        session: aiohttp.ClientSession,
        settings: RouterSettings,
        headers: dict[str, str],
        metrics: Metrics,
    ) -> None:
        self._member = member
        self._index = index
        self._session = session
        self._settings = settings
        self._headers = headers
        self._metrics = metrics
        self._feed: KVFeed | None = None
        self._failures_in_row = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            pause_s = await self.round()
            await asyncio.sleep(pause_s)

    async def round(self, wait_s: float = WAIT_S) -> float:
        """One question. Seconds until the next should be asked."""
        name = self._member.name
        life = self._index.life(name)
        if life is None or not self._index.exact.knows(name):
            return self._settings.poll_interval_s
        if self._feed is None or self._feed.life != life:
            self._feed = KVFeed(self._index, name, life)
        feed, interval_s = self._feed, self._settings.kv_events_interval_s
        try:
            if feed.wants_snapshot:
                await self._ask_snapshot(feed)
            else:
                await self._ask_events(feed, wait_s)
        except Errors as error:
            self._failed(feed, error)
            return min(MAX_BACKOFF_S, interval_s * 2**self._failures_in_row)
        if self._failures_in_row >= FAILURES_UNTIL_LOST:
            log.warning("worker %s: its KV events are back", name)
        self._failures_in_row = 0
        return interval_s

    def _failed(self, feed: KVFeed, error: Exception) -> None:
        name = self._member.name
        self._failures_in_row = min(self._failures_in_row + 1, 16)
        self._metrics.add("kvbaton_router_kv_failures_total", name)
        if self._failures_in_row == FAILURES_UNTIL_LOST:
            log.warning(
                "worker %s: no KV events (%s: %s); what is sent there counts", name, type(error).__name__, error
            )
        if self._failures_in_row >= FAILURES_UNTIL_LOST and feed.counts:
            self._index.exact.lost(name)

    async def _ask_events(self, feed: KVFeed, wait_s: float) -> None:
        began = self._index.exact.begin_round(self._member.name)
        url = f"{self._member.settings.url}{EVENTS_PATH}?from={feed.next}&wait_s={wait_s:g}"
        async with (
            asyncio.timeout(wait_s + self._settings.poll_timeout_s),
            self._session.get(url, headers=self._headers, allow_redirects=False) as response,
        ):
            _expect_ok(response)
            raw = await _read_all(response, _MAX_ANSWER_BYTES)
        answer = _DECODER.decode(raw)
        _expect_version(answer.version)
        result = feed.on_events(answer, began)
        if result == "gap":
            self._metrics.add("kvbaton_router_kv_gaps_total", self._member.name)
        elif result == "applied":
            self._metrics.observe("kvbaton_router_kv_lag_seconds", value=answer.age_s)
            for batch in answer.batches:
                self._count(batch)

    def _count(self, batch: BlockEvents) -> None:
        name = self._member.name
        for kind, amount in (
            ("stored", len(batch.stored)),
            ("removed", len(batch.removed)),
            ("cleared", batch.cleared),
        ):
            if amount:
                self._metrics.add("kvbaton_router_kv_events_total", name, kind, amount=amount)

    async def _ask_snapshot(self, feed: KVFeed) -> None:
        url = self._member.settings.url + SNAPSHOT_PATH
        async with (
            asyncio.timeout(SNAPSHOT_TIMEOUT_S),
            self._session.get(url, headers=self._headers, allow_redirects=False) as response,
        ):
            _expect_ok(response)
            num_bytes = response.content_length
            sequence = response.headers.get(SEQUENCE_HEADER.decode(), "")
            if num_bytes is None or num_bytes % HASH_BYTES or not sequence.isdigit():
                raise ValueError("a snapshot without length or sequence number")
            _expect_version(int(response.headers.get(VERSION_HEADER.decode(), "1")))
            staged = feed.on_snapshot(response.headers.get(LIFE_HEADER.decode(), ""), int(sequence))
            if staged is None:
                return
            complete = False
            try:
                held = b""
                async for arrived in response.content.iter_any():
                    held += arrived
                    whole = len(held) - len(held) % HASH_BYTES
                    staged.add([held[i : i + HASH_BYTES] for i in range(0, whole, HASH_BYTES)])
                    held = held[whole:]
                complete = not held
            finally:
                if not complete:
                    staged.discard()
            if complete:
                staged.commit()
                self._metrics.add("kvbaton_router_kv_resyncs_total", self._member.name)


def _expect_version(version: int) -> None:
    """Events of another version are not taken: what is sent to that worker counts instead."""
    if version != KV_EVENTS_VERSION:
        raise ValueError(f"its KV events have version {version}, not {KV_EVENTS_VERSION}")


def _expect_ok(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise ValueError(f"it answers {response.status}")


async def _read_all(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    parts, num_bytes = [], 0
    async for part in response.content.iter_any():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise ValueError(f"an answer of more than {max_bytes} bytes")
        parts.append(part)
    return b"".join(parts)
