"""What every level of the shared KV tier has in common: what a block says of itself, and what a level can do.

A stored block begins with a header: magic, key, length, checksum of key and bytes; then the block, layer after layer.
So a reader that has key and size can tell whether what it got is that block, whoever stored it. Knows nothing about
files, networks, or what is in a block.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import xxhash

LevelName = Literal["memory", "disk", "store"]
ReadResult = Literal["read", "missing", "wrong"]
Pieces = Sequence[Any]  # buffers of one block, in layer order; writable where they are read into
_HEADER = struct.Struct("<8s16sQ16s")
HEADER_BYTES = _HEADER.size
_MAGIC = b"KVTIER01"


@dataclass(frozen=True)
class BlockToWrite:
    key: bytes
    pieces: Pieces
    is_valid: Callable[[], bool]  # asked after it was copied: whether the bytes were still those of the key


@dataclass
class LevelCounts:
    num_read: int = 0
    num_written: int = 0
    num_written_bytes: int = 0
    num_refused: int = 0  # no room, or its bytes changed under the copy
    num_evicted: int = 0
    num_wrong: int = 0
    num_errors: int = 0  # the file system, the index or the store did not do what was asked


class Level(Protocol):
    """None of these raises for what happens to the level, and ``may_have`` waits for nobody."""

    @property
    def name(self) -> LevelName: ...

    @property
    def counts(self) -> LevelCounts: ...

    def may_have(self, key: bytes) -> bool:
        """Whether a look is worth while; no promise."""
        ...

    def find(self, chain: Sequence[bytes], now_s: float, pin_s: float) -> int:
        """How many leading keys are here."""
        ...

    def read(self, key: bytes, pieces: Pieces) -> ReadResult:
        """Fill ``pieces``. Unless it says "read", what is in them then means nothing."""
        ...

    def write(self, blocks: Sequence[BlockToWrite], now_s: float) -> list[bytes]:
        """Hold what is whole of ``blocks``, in chain order; the keys that had to go and can still be saved."""
        ...

    def close(self) -> None: ...


def num_bytes_of(pieces: Pieces) -> int:
    return sum(len(piece) for piece in pieces)


def header_of(key: bytes, pieces: Pieces) -> bytes:
    checksum = xxhash.xxh3_128(key)
    for piece in pieces:
        checksum.update(piece)
    return _HEADER.pack(_MAGIC, key, num_bytes_of(pieces), checksum.digest())
