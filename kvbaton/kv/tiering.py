"""Between a worker's pool and the shared KV tier: prefixes come in before their prompt is queued, new blocks go out.

    request --first missing block is there--> look --found--> blocks taken --> read --> published --> queued
                 | no                          | nothing        | no room        | deadline: queued, computed anew
                 +-----------------------------+----------------+----> queued at once

Two threads do what waits for files: one reads, one writes. Everything else runs on the engine's thread, which alone
touches blocks and hands over its results as commands. Invariants: what a thread may still write into stays pinned until
that thread says that it is done, whatever became of the request; only verified blocks are published; every request that
was held here goes on exactly once, unless it is forgotten. Writing never holds the engine: a block that is given to
another sequence meanwhile is found by its generation and not kept, and more than ``max_queued_blocks`` are dropped and
counted. Knows nothing about sampling, peers or text.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from kvbaton.clock import Clock
from kvbaton.kv.blocks import BlockManager
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.shared_pool import SharedPool
from kvbaton.kv.tier import Tier
from kvbaton.kv.tier_block import BlockToWrite

log = logging.getLogger(__name__)

_JOIN_S = 10.0
_LAST_WRITES_S = 2.0  # at the end, for what was still to be written
_BATCH_BYTES = 8 << 20  # written before they are let in together
Action = Callable[[], None]


class Pool(Protocol):
    """Of the engine's, what is needed here."""

    layout: KVLayout
    shared: SharedPool
    generations: np.ndarray
    device_tensor: Any  # None: the host's memory is the pool

    def stage_out(self, layer: int, blocks: Sequence[int]) -> None: ...
    def stage_in(self, blocks: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class TieringConfig:
    deadline_s: float = 2.0  # for a prefix to be in place; afterwards it is computed
    min_blocks: int = 1  # fewer missing ones are not looked for
    max_fetches: int = 64  # requests held at once
    max_queued_blocks: int = 4096  # waiting to be written


@dataclass
class TieringStats:
    num_tier_hits: int = 0  # requests with blocks from the tier
    num_tier_tokens: int = 0  # prompt tokens whose KV came from there
    num_tier_fallbacks: int = 0  # requests whose prefix was there and that computed some of it all the same
    num_tier_wrong_blocks: int = 0
    num_tier_dropped_blocks: int = 0  # not written: too many at once, changed meanwhile, or no room
    num_tier_errors: int = 0
    num_tier_evicted_blocks: int = 0
    tier_written_bytes: int = 0
    tier_memory_bytes: int = 0
    tier_disk_bytes: int = 0
    num_tier_store_blocks: int = 0  # read from the store that hosts share
    tier_store_written_bytes: int = 0
    tier_store_up: int = 0  # 1: the store can be asked
    tier_wait_s: float = 0.0  # of all requests that were held


@dataclass
class _Fetch:
    """One request that is held, and after that whatever still reads for it."""

    request_id: str
    name: str  # of its pins
    chain: list[bytes]
    go_on: Action
    started_s: float
    deadline_s: float
    num_found: int = 0  # blocks that the tier had behind those that were here
    blocks: tuple[int, ...] = ()  # taken, to be read into; pinned under ``name``
    first: int = 0  # index in the chain of the first of them
    waiting: bool = True  # the request has not gone on yet


@dataclass(frozen=True)
class _Outgoing:
    block_hash: bytes
    block: int
    generation: int


class Tiering:
    """``post`` gives a command to the engine's thread. ``start`` once, ``stop`` once."""

    def __init__(
        self, tier: Tier, blocks: BlockManager, pool: Pool, post: Callable[[Action], None], clock: Clock,
        config: TieringConfig | None = None,
    ) -> None:  # fmt: skip
        self.tier = tier
        self.config = config or TieringConfig()
        self._blocks = blocks
        self._pool = pool
        self._post = post
        self._clock = clock
        self._stats = TieringStats()
        self._fetches: dict[str, _Fetch] = {}
        self._num_started = 0
        self._jobs: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[list[_Outgoing] | threading.Event | None] = queue.SimpleQueue()
        self._num_queued = 0
        self._write_until_s = float("inf")
        self._lock = threading.Lock()  # over ``_num_queued``
        self._batch_blocks = max(1, _BATCH_BYTES // pool.layout.block_bytes)
        self._threads = [
            threading.Thread(target=self._run_reader, name="kvbaton-tier-read", daemon=True),
            threading.Thread(target=self._run_writer, name="kvbaton-tier-write", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """On the engine's thread, after its last step. Afterwards nothing of ours writes into the pool."""
        for fetch in list(self._fetches.values()):
            self._go_on(fetch)
        self._write_until_s = self._clock.now_s() + _LAST_WRITES_S
        self._jobs.put(None)
        self._outgoing.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)
            if thread.is_alive():
                log.error("%s does not end: the file system hangs", thread.name)
        self.tier.close()

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was offered is written or dropped, and nothing that was asked for is still read into; from
        any thread but the engine's. What the engine is told afterwards, it does after it has let go of those blocks.
        False: not in time."""

        until_s = self._clock.now_s() + timeout_s

        def passes(put: Callable[[threading.Event], None]) -> bool:
            done = threading.Event()
            put(done)
            return done.wait(max(0.0, until_s - self._clock.now_s()))

        return (
            passes(self._outgoing.put)
            and passes(lambda done: self._jobs.put(done.set))
            and passes(lambda done: self._post(done.set))  # what was found by then is to be read now
            and passes(lambda done: self._jobs.put(done.set))
        )

    def stats(self) -> TieringStats:
        """Single reads of counters; from any thread."""
        found, tier = TieringStats(**vars(self._stats)), self.tier.stats()
        found.num_tier_wrong_blocks = tier.num_wrong
        found.num_tier_errors = tier.num_errors
        found.num_tier_evicted_blocks = tier.num_evicted
        found.num_tier_dropped_blocks += tier.num_refused
        found.tier_written_bytes = tier.num_written_bytes
        found.tier_memory_bytes = tier.num_memory_bytes
        found.tier_disk_bytes = tier.num_disk_bytes
        found.num_tier_store_blocks = tier.num_store_read
        found.tier_store_written_bytes = tier.num_store_written_bytes
        found.tier_store_up = int(tier.store_is_up)
        return found

    # -- in: engine thread ---------------------------------------------------------------------------------------

    def fetch(self, request_id: str, chain: list[bytes], go_on: Action) -> bool:
        """``chain``: hashes of what may be found. Whether the request is held: then ``go_on`` runs on the engine's
        thread, once, unless ``forget`` comes first."""
        here = len(self._blocks.match(chain))
        if len(chain) - here < self.config.min_blocks or len(self._fetches) >= self.config.max_fetches:
            return False
        if not self._blocks.prefix_caching or not self.tier.may_have(chain[here]):
            return False
        now_s = self._clock.now_s()
        self._num_started += 1
        name = f"tier {self._num_started} {request_id}"  # an id may come again while its first blocks are read
        fetch = _Fetch(request_id, name, chain, go_on, now_s, now_s + self.config.deadline_s)
        self._fetches[request_id] = fetch
        self._jobs.put(lambda: self._look(fetch, here))
        return True

    def forget(self, request_id: str) -> None:
        """It is not wanted any more. What is being read into stays pinned until that has ended."""
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None:
            fetch.waiting = False

    def expire(self, now_s: float) -> None:
        """Requests that waited long enough are computed instead."""
        for fetch in [each for each in self._fetches.values() if each.deadline_s <= now_s]:
            waited_s = now_s - fetch.started_s
            log.warning("%s: nothing came in %.1f s, the prefix is computed", fetch.name, waited_s)
            self._stats.num_tier_fallbacks += 1
            self._go_on(fetch)

    def _found(self, fetch: _Fetch, there: int) -> None:
        """``there``: leading blocks of the chain that pool and tier have between them."""
        if not fetch.waiting:
            return
        here = len(self._blocks.match(fetch.chain))
        matched = self._blocks.match(fetch.chain[:here])
        wanted = there - here
        count = min(wanted, self._blocks.num_takable(matched) - self._blocks.num_blocks // 100)
        if count <= 0:
            self._stats.num_tier_fallbacks += wanted > 0
            self._go_on(fetch)
            return
        self._blocks.acquire(matched)
        taken = self._blocks.allocate(count)
        self._blocks.pin(fetch.name, [*matched, *taken], float("inf"))
        self._blocks.release([*matched, *taken])
        fetch.blocks, fetch.first, fetch.num_found = tuple(taken), here, wanted
        self._jobs.put(lambda: self._read(fetch))

    def _read_done(self, fetch: _Fetch, num_read: int) -> None:
        """The thread has let go of the blocks; the first ``num_read`` hold what they should."""
        arrived = fetch.blocks[:num_read]
        self._pool.stage_in(arrived)
        for block, block_hash in zip(arrived, fetch.chain[fetch.first :], strict=False):
            self._blocks.publish(block, block_hash)
        self._blocks.unpin(fetch.name)
        if not fetch.waiting:
            return  # they are in the prefix cache all the same
        self._stats.num_tier_hits += num_read > 0
        self._stats.num_tier_tokens += num_read * self._pool.layout.block_size
        self._stats.num_tier_fallbacks += num_read < fetch.num_found
        if num_read < len(fetch.blocks):
            log.warning("%s: %d of %d blocks came, the rest is computed", fetch.name, num_read, len(fetch.blocks))
        self._go_on(fetch)

    def _go_on(self, fetch: _Fetch) -> None:
        fetch.waiting = False
        self._stats.tier_wait_s += self._clock.now_s() - fetch.started_s
        del self._fetches[fetch.request_id]
        fetch.go_on()

    # -- in: reading thread --------------------------------------------------------------------------------------

    def _run_reader(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("looking into the KV tier failed")  # and its request goes on at its deadline

    def _look(self, fetch: _Fetch, here: int) -> None:
        found = 0
        if fetch.waiting:
            found = self.tier.find(fetch.chain[here:], self._clock.now_s(), 2 * self.config.deadline_s)
        self._post(lambda: self._found(fetch, here + found))

    def _read(self, fetch: _Fetch) -> None:
        num_read = 0
        try:
            view = self._pool.shared.view()
            for block, block_hash in zip(fetch.blocks, fetch.chain[fetch.first :], strict=False):
                if not fetch.waiting or self.tier.read(block_hash, [memoryview(row) for row in view[:, block]]) is None:
                    break
                num_read += 1
        except Exception:
            log.exception("reading from the KV tier failed")
        self._post(lambda: self._read_done(fetch, num_read))

    # -- out -----------------------------------------------------------------------------------------------------

    def offer(self, stored: Iterable[bytes]) -> None:
        """Engine thread: these are new in the prefix cache. Cheap; what is too much is dropped."""
        batch = [
            _Outgoing(block_hash, block, self._blocks.generation(block))
            for block_hash in stored
            for block in self._blocks.match((block_hash,))
        ]
        with self._lock:
            room = self.config.max_queued_blocks - self._num_queued
            kept = batch[: max(0, room)]  # heads are worth more than tails
            self._num_queued += len(kept)
        self._stats.num_tier_dropped_blocks += len(batch) - len(kept)
        if self._pool.device_tensor is not None:
            lacking = [each.block for each in kept if self.tier.lacks(each.block_hash)]
            for layer in range(self._pool.layout.num_layers):
                self._pool.stage_out(layer, lacking)
        if kept:
            self._outgoing.put(kept)

    def _run_writer(self) -> None:
        while (batch := self._outgoing.get()) is not None:
            if isinstance(batch, threading.Event):
                batch.set()
                continue
            for start in range(0, len(batch), self._batch_blocks):
                part = batch[start : start + self._batch_blocks]
                try:
                    if self._clock.now_s() <= self._write_until_s:
                        self._write(part)
                except Exception:
                    log.exception("writing to the KV tier failed")
                with self._lock:
                    self._num_queued -= len(part)

    def _write(self, part: Sequence[_Outgoing]) -> None:
        view, generations = self._pool.shared.view(), self._pool.generations
        lacking = [each for each in part if self.tier.lacks(each.block_hash)]

        def is_same(each: _Outgoing) -> bool:
            return int(generations[each.block]) == each.generation

        blocks = [
            BlockToWrite(
                self.tier.key(each.block_hash),
                [memoryview(row) for row in view[:, each.block]],
                partial(is_same, each),
            )
            for each in lacking
        ]
        if blocks:
            self.tier.write(blocks, self._clock.now_s())
