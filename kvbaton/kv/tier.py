"""The shared KV tier: blocks that outlive the pool they were computed in, for all workers that may have them.

    write -+-> memory ---victims---> disk ---victims---> gone          read <--- memory, else disk, else store
           +-> store, which other hosts share

Memory and disk are of a host. Each of the three may be left out.

A block's key names what its bytes mean: the hash chain of its tokens (which begins at the tenant's salt) under the
model's fingerprint, the layout, and what computed it. So a key never names two contents, workers need no word with
each other, and a hand-off of a prefix that is here already is its hashes. Invariants: a read is verified or is none;
every level is bounded. Knows nothing about engines, threads or requests; time is an argument.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvbaton.kv.compat import digest
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.tier_block import BlockToWrite, Level, LevelCounts, LevelName, Pieces
from kvbaton.kv.tier_directory import TierDirectory, memory_directory
from kvbaton.kv.tier_level import TierLevel
from kvbaton.kv.tier_store import MooncakeLevel, StoreAddress, parse_store, require_store
from kvbaton.types import Fingerprint, LocalError

_KEY_BYTES = 16
_FORMAT = b"1"  # of keys and files; another one shares nothing
_MAX_PIECES = 1000  # buffers that one call of the kernel takes, less the header
GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class TierOptions:
    """Sizes in bytes; 0 leaves a level out."""

    memory_bytes: int = 0
    memory_name: str = ""  # whoever has the same name shares the memory
    disk_dir: Path | None = None
    disk_bytes: int = 0
    store: StoreAddress | None = None

    @property
    def asked_by(self) -> str | None:
        """The setting that asks for a tier; None: none does."""
        if self.memory_bytes:
            return "kv_tier_memory_mib"
        if self.disk_bytes:
            return "kv_tier_disk"
        return "kv_tier_store" if self.store is not None else None


@dataclass(frozen=True)
class TierStats:
    num_memory_bytes: int = 0
    num_disk_bytes: int = 0
    num_written_bytes: int = 0  # to all levels
    num_store_written_bytes: int = 0
    num_store_read: int = 0  # blocks
    store_is_up: bool = False
    num_refused: int = 0
    num_evicted: int = 0  # by this worker, from memory or disk
    num_wrong: int = 0
    num_errors: int = 0


class Tier:
    """``find``, ``read`` and ``write`` may be called from different threads."""

    def __init__(self, levels: Sequence[TierLevel], namespace: bytes, store: MooncakeLevel | None = None) -> None:
        assert levels or store
        self.levels = tuple(levels)  # of files
        self.store = store
        self._all: tuple[Level, ...] = self.levels if store is None else (*self.levels, store)
        self._namespace = namespace

    def close(self) -> None:
        for level in self._all:
            level.close()

    def key(self, block_hash: bytes) -> bytes:
        return hashlib.blake2b(block_hash, digest_size=_KEY_BYTES, key=self._namespace).digest()

    def may_have(self, block_hash: bytes) -> bool:
        """Whether a look is worth while: a look at a name or two, and no promise."""
        key = self.key(block_hash)
        return any(level.may_have(key) for level in self._all)

    def find(self, chain: Sequence[bytes], now_s: float, pin_s: float) -> int:
        """How many leading blocks are here, in whatever level; they stay for ``pin_s``."""
        keys = [self.key(block_hash) for block_hash in chain]
        count = 0
        while count < len(keys):
            before = count
            for level in self._all:
                count += level.find(keys[count:], now_s, pin_s) if count < len(keys) else 0
            if count == before:
                break
        return count

    def read(self, block_hash: bytes, pieces: Pieces) -> LevelName | None:
        """Fill ``pieces`` and say from where; None: it is not here, or was not what it should be."""
        key = self.key(block_hash)
        for level in self._all:
            if level.read(key, pieces) == "read":
                return level.name
        return None

    def lacks(self, block_hash: bytes) -> bool:
        """Whether it is worth writing: the first level has no such file. What has one went to the store with it; a
        store alone is asked when it is written to."""
        if self.levels:
            return not self.levels[0].may_have(self.key(block_hash))
        return self.store is not None and self.store.is_up

    def write(self, blocks: Sequence[BlockToWrite], now_s: float) -> None:
        """``blocks`` in chain order, ``key`` from ``key()``. What must leave memory for them goes to disk."""
        for victim in self.levels[0].write(blocks, now_s) if self.levels else ():
            self._move_down(victim, now_s)
        if self.store is not None:
            self.store.write(blocks, now_s)

    def _move_down(self, victim: bytes, now_s: float) -> None:
        first, *below = self.levels
        if below and not below[0].may_have(victim):
            for last in below[0].take_over(victim, first, now_s):
                below[0].let_go(last)
        first.let_go(victim)

    def stats(self) -> TierStats:
        counts: list[LevelCounts] = [level.counts for level in self._all]
        store = LevelCounts() if self.store is None else self.store.counts
        held = {level.name: level.num_bytes for level in self.levels}
        return TierStats(
            num_memory_bytes=held.get("memory", 0),
            num_disk_bytes=held.get("disk", 0),
            num_written_bytes=sum(each.num_written_bytes for each in counts),
            num_store_written_bytes=store.num_written_bytes,
            num_store_read=store.num_read,
            store_is_up=self.store is not None and self.store.is_up,
            num_refused=sum(each.num_refused for each in counts),
            num_evicted=sum(each.num_evicted for each in counts),
            num_wrong=sum(each.num_wrong for each in counts),
            num_errors=sum(each.num_errors for each in counts),
        )


def open_tier(options: TierOptions, fingerprint: Fingerprint, layout: KVLayout, computed_by: str) -> Tier | None:
    """None when ``options`` ask for none. ``computed_by``: what else decides the bytes, in words."""
    assert layout.num_layers <= _MAX_PIECES
    if options.asked_by is None:
        return None
    if fingerprint.tp_size > 1:
        fix = "leave the tier or tensor parallelism out"
        raise LocalError("a KV tier does not know of ranks", field=options.asked_by, fix=fix)
    levels: list[TierLevel] = []
    store: MooncakeLevel | None = None
    try:
        if options.memory_bytes:
            directory = TierDirectory(memory_directory(options.memory_name), passing=True)
            levels.append(TierLevel("memory", directory, options.memory_bytes))
        if options.disk_dir is not None and options.disk_bytes:
            directory = TierDirectory(options.disk_dir / "kvbaton-tier", passing=False)
            levels.append(TierLevel("disk", directory, options.disk_bytes))
        if options.store is not None:
            store = MooncakeLevel(options.store, layout.block_bytes)
    except BaseException:
        for level in levels:
            level.close()
        raise
    return Tier(levels, namespace(fingerprint, layout, computed_by), store)


def namespace(fingerprint: Fingerprint, layout: KVLayout, computed_by: str) -> bytes:
    """What blocks of one meaning share. Layouts are not converted here: another block size has other blocks."""
    about = msgspec.json.encode(layout, order="deterministic") + computed_by.encode()
    return hashlib.blake2b(_FORMAT + digest(fingerprint) + about, digest_size=32).digest()


def memory_name(internal_key: str, disk: str) -> str:
    """The workers of one fleet find each other's memory by the fleet's key; without one, by user and disk."""
    secret = internal_key.encode()[:64] or f"user {os.geteuid()}".encode()
    return hashlib.blake2b(b"kv tier" + disk.encode(), key=secret, digest_size=12).hexdigest()


def parse_disk(text: str) -> tuple[Path | None, int]:
    """``DIR:GiB``, or empty."""
    if not text:
        return None, 0
    directory, _, size = text.rpartition(":")
    try:
        num_bytes = int(float(size) * GIB)
    except (ValueError, OverflowError):
        num_bytes = 0
    if not directory or num_bytes <= 0:
        raise LocalError(f"{text!r} is not DIR:GiB", field="kv_tier_disk", fix="for example /var/cache/kv:50")
    return Path(directory), num_bytes


def tier_options(memory_mib: int, disk: str, store: str, internal_key: str) -> TierOptions:
    disk_dir, disk_bytes = parse_disk(disk)
    address = parse_store(store)
    if address is not None:
        require_store()
    return TierOptions(memory_mib * MIB, memory_name(internal_key, disk), disk_dir, disk_bytes, address)
