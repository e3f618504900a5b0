"""The level of the shared KV tier that hosts share: blocks in a Mooncake store, memory that workers lend to it.

    write: blocks -> shared memory -> put, unless there already
    read:  get -> shared memory -> the pool's block -> verify

Invariants: what does not verify is not used, and removed; no call waits longer than its deadline, whatever the store
or its master does, and after one that failed nobody waits for the store for some seconds; nothing is raised. What
leaves the store is the store's own choice. Knows nothing about engines, or how the store works.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from kvbaton.clock import Clock
from kvbaton.kv.tier_block import (
    HEADER_BYTES,
    BlockToWrite,
    LevelCounts,
    LevelName,
    Pieces,
    ReadResult,
    header_of,
    num_bytes_of,
)
from kvbaton.kv.tier_store_link import FIELD, FIX, Exist, Get, Put, Question, Remove, StoreLink, Way
from kvbaton.types import LocalError, RemoteError

log = logging.getLogger(__name__)

DEFAULT_SEGMENT_MIB = 256
_MIB = 1 << 20
_BATCH_BYTES = 8 << 20  # put at once
_KEYS_AT_ONCE = 1000  # a question that always fits what a socket holds: sending it waits for nobody
_MOST_SEGMENT_MIB = 1 << 24
_READ_S = 1.0  # of the two that a prompt waits for the tier
_WRITE_S = 4.0  # less than the wait for the writing thread when the worker ends
# Of Mooncake's codes, what is no fault: of the object, the room and the size given.
_MISSING, _NO_ROOM, _WRONG_SIZE = -704, -200, -600


@dataclass(frozen=True)
class StoreAddress:
    """Of the store's master, as every host reaches it; ``segment_bytes``: what each worker lends to the store."""

    host: str
    port: int
    segment_bytes: int = DEFAULT_SEGMENT_MIB * _MIB


def parse_store(text: str) -> StoreAddress | None:
    """``mooncake://HOST:PORT[?segment_mib=N]``; empty is none."""
    if not text:
        return None
    try:
        url = urlsplit(text)
        options = dict(parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query)))
        segment = options.pop("segment_mib", str(DEFAULT_SEGMENT_MIB))
        segment_mib = int(segment) if re.fullmatch(r"[0-9]{1,9}", segment) else 0
        host, port = url.hostname, url.port
        fits = re.fullmatch(r"mooncake://[A-Za-z0-9_.-]+:[0-9]{1,5}/?(\?.*)?", text) is not None
    except ValueError:
        host, port, segment_mib, options, fits = None, None, 0, {}, False
    if not fits or not host or not port or not 0 < segment_mib <= _MOST_SEGMENT_MIB or options:
        fix = "for example mooncake://10.0.0.1:50051?segment_mib=1024"
        raise LocalError(f"{text!r} is not mooncake://HOST:PORT", field=FIELD, fix=fix)
    return StoreAddress(host, port, segment_mib * _MIB)


def require_store() -> None:
    """LocalError when the package is not there: before a model is loaded. The process that uses it tells the rest."""
    if importlib.util.find_spec("mooncake") is None:
        raise LocalError("the Mooncake store's package is not installed", field=FIELD, fix=FIX)


class MooncakeLevel:
    """One thread reads, another writes; ``may_have`` is for any."""

    name: LevelName = "store"

    def __init__(self, address: StoreAddress, block_bytes: int, clock: Clock | None = None) -> None:
        self.counts = LevelCounts()
        self._value_bytes = HEADER_BYTES + block_bytes
        self._write_bytes = max(_BATCH_BYTES, self._value_bytes)
        room: dict[Way, int] = {"read": self._value_bytes, "write": self._write_bytes}
        self.link = StoreLink(address.host, address.port, address.segment_bytes, room, clock)

    def close(self) -> None:
        self.link.close()

    @property
    def is_up(self) -> bool:
        return self.link.is_up()

    def may_have(self, key: bytes) -> bool:
        """Whether the store can be asked."""
        return self.link.is_up()

    def find(self, chain: Sequence[bytes], now_s: float, pin_s: float) -> int:
        """The store keeps what was looked at for as long as its master says, 10 s unless it was told otherwise."""
        for start in range(0, len(chain), _KEYS_AT_ONCE):
            part = chain[start : start + _KEYS_AT_ONCE]
            here = self._ask("read", Exist([_name(key) for key in part]), _READ_S, fine=()) or []
            num_here = next((index for index, found in enumerate(here) if found != 1), len(here))
            if num_here < len(part):
                return start + num_here
        return len(chain)

    def read(self, key: bytes, pieces: Pieces) -> ReadResult:
        offset = self.link.offsets["read"]
        question = Get(_name(key), offset, self._value_bytes)
        found = self._ask("read", question, _READ_S, fine=(_MISSING, _WRONG_SIZE))
        if found is None or found[0] == _MISSING:
            return "missing"
        if found[0] == self._value_bytes and self._take(key, offset, pieces):
            self.counts.num_read += 1
            return "read"
        log.warning("the KV tier's block %s (store) is torn or not what it says; it is removed", key.hex())
        self.counts.num_wrong += 1
        self._ask("read", Remove(_name(key)), _READ_S, fine=(_MISSING,))
        return "wrong"

    def write(self, blocks: Sequence[BlockToWrite], now_s: float) -> list[bytes]:
        """Nothing can be saved of what goes for them."""
        for part in self._parts(blocks):
            here = self._ask("write", Exist([_name(block.key) for block in part]), _WRITE_S, fine=())
            if here is None:
                break
            self._put([block for block, found in zip(part, here, strict=True) if found != 1])
        return []

    # -- the memory that is shared with the other process ----------------------------------------------------------

    def _take(self, key: bytes, offset: int, pieces: Pieces) -> bool:
        """Copy first and verify the copy: nobody else can change it."""
        memory = self.link.memory
        header = bytes(memory[offset : offset + HEADER_BYTES])
        offset += HEADER_BYTES
        for piece in pieces:
            piece[:] = memory[offset : offset + len(piece)]
            offset += len(piece)
        return header == header_of(key, pieces)

    def _put(self, blocks: Sequence[BlockToWrite]) -> None:
        keys: list[str] = []
        offsets: list[int] = []
        offset = self.link.offsets["write"]
        memory = self.link.memory
        for block in blocks:
            end = offset
            for piece in (header_of(block.key, block.pieces), *block.pieces):
                memory[end : end + len(piece)] = piece
                end += len(piece)
            if block.is_valid():
                keys.append(_name(block.key))
                offsets.append(offset)
                offset = end
            else:
                self.counts.num_refused += 1
        if not keys:
            return
        put = self._ask("write", Put(keys, offsets, [self._value_bytes] * len(keys)), _WRITE_S, fine=(_NO_ROOM,))
        num_put = sum(code == 0 for code in put or ())
        self.counts.num_written += num_put
        self.counts.num_written_bytes += num_put * self._value_bytes
        self.counts.num_refused += len(keys) - num_put

    def _parts(self, blocks: Sequence[BlockToWrite]) -> Iterator[Sequence[BlockToWrite]]:
        """As many as there is room for at once."""
        most = self._write_bytes // self._value_bytes
        for start in range(0, len(blocks), most):
            part = blocks[start : start + most]
            assert all(HEADER_BYTES + num_bytes_of(block.pieces) == self._value_bytes for block in part)
            yield part

    def _ask(self, way: Way, question: Question, deadline_s: float, fine: tuple[int, ...]) -> list[int] | None:
        """None: it was not asked, or could not do it, which is counted. ``fine``: codes that are no errors here."""
        if not self.link.is_up() or not self.link.is_settled(way):
            return None
        try:
            codes = self.link.ask(way, question, deadline_s)
        except RemoteError as error:
            self._fail(str(error))
            return None
        errors = {code for code in codes if code < 0 and code not in fine}
        if errors or not codes:
            self._fail(f"has errors {sorted(errors)} in {type(question).__name__.lower()}")
            return None
        return codes

    def _fail(self, what: str) -> None:
        self.counts.num_errors += 1
        self.link.rest()
        log.warning("the KV tier's store %s; it is not asked for a while", what)


def _name(key: bytes) -> str:
    return f"kvbaton-{key.hex()}"
