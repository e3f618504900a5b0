"""One level of the shared KV tier: a file for each block, in memory or on disk, and the index of them.

    write: new/ file -> renamed to its key inside the index's transaction      read: open, copy, verify

Each file says of itself whose it is (``tier_block``). Invariants: a file is whole before it has its name, and never
changes afterwards; so a reader that has opened it reads that block whatever happens to the name. What does not verify
is not used, and removed. The bytes of the files are bounded (rounded up to pages), up to what one batch writes before
it is let in. Knows nothing about engines, or what is in a block; time is an argument.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import sqlite3
from collections.abc import Sequence
from functools import partial
from pathlib import Path

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
from kvbaton.kv.tier_directory import TierDirectory
from kvbaton.kv.tier_index import TierIndex, Undo
from kvbaton.types import LocalError

log = logging.getLogger(__name__)

_PAGE_BYTES = 4096
_FILE_ERRORS = (OSError, sqlite3.Error)


class TierLevel:
    def __init__(self, name: LevelName, directory: TierDirectory, max_bytes: int) -> None:
        self.name = name
        self.directory = directory
        self.counts = LevelCounts()
        self._writer = secrets.token_hex(4)
        try:
            self._check_room(max_bytes)
            self.index = self._open_index(max_bytes)
        except BaseException:
            directory.close()
            raise
        directory.settle()

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self.index.close()
        self.directory.close()

    @property
    def num_bytes(self) -> int:
        return self.index.num_bytes

    def may_have(self, key: bytes) -> bool:
        """Whether there is a file of that name: cheap, and no promise."""
        return self.directory.block_path(key).exists()

    def find(self, chain: Sequence[bytes], now_s: float, pin_s: float) -> int:
        try:
            return self.index.find(chain, now_s, pin_s)
        except sqlite3.Error as error:
            self._tell("look", error)
            return 0

    def read(self, key: bytes, pieces: Pieces) -> ReadResult:
        """Fill ``pieces``. Unless it says "read", what is in them then means nothing."""
        path = self.directory.block_path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            if key in self.index:
                self._forget(key)
            return "missing"
        except OSError as error:
            self._tell("read", error)
            return "missing"
        try:
            header = bytearray(HEADER_BYTES)
            num_read = os.preadv(fd, [header, *pieces], 0)
        except OSError as error:
            self._tell("read", error)
            num_read = 0
        finally:
            os.close(fd)
        if num_read == HEADER_BYTES + num_bytes_of(pieces) and bytes(header) == header_of(key, pieces):
            return "read"
        log.warning("the KV tier's block %s (%s) is torn or not what it says; it is removed", key.hex(), self.name)
        self.counts.num_wrong += 1
        self._forget(key)
        return "wrong"

    def write(self, blocks: Sequence[BlockToWrite], now_s: float) -> list[bytes]:
        """Hold what is whole of ``blocks``, in chain order. Victims lie in ``new/`` then: ``let_go`` them."""
        written = [block for block in blocks if self._write_new(block)]
        if not written:
            return []
        return self._admit([(block.key, file_bytes(num_bytes_of(block.pieces))) for block in written], now_s)

    def let_go(self, key: bytes) -> None:
        """The last of a victim."""
        self._unlink(self._retired(key))

    def take_over(self, key: bytes, source: TierLevel, now_s: float) -> list[bytes]:
        """Hold a victim of ``source``'s too; our own victims are returned as ``write`` does."""
        old, new = source._retired(key), self._new(key)
        try:
            with old.open("rb") as reading, open(new, "wb", opener=_open_private) as writing:
                shutil.copyfileobj(reading, writing, 1 << 20)
                num_bytes = writing.tell()
        except FileNotFoundError:  # it was found to be wrong meanwhile
            return []
        except OSError as error:
            self._tell("write", error)
            self._unlink(new)
            return []
        self.counts.num_written_bytes += num_bytes
        return self._admit([(key, _held_bytes(num_bytes))], now_s)

    # -- files ---------------------------------------------------------------------------------------------------

    def _write_new(self, block: BlockToWrite) -> bool:
        path = self._new(block.key)
        num_bytes = HEADER_BYTES + num_bytes_of(block.pieces)
        try:
            fd = _open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                whole = os.writev(fd, [header_of(block.key, block.pieces), *block.pieces]) == num_bytes
            finally:
                os.close(fd)
        except OSError as error:
            self._tell("write", error)
            whole = False
        if whole and block.is_valid():
            self.counts.num_written_bytes += num_bytes
            return True
        self.counts.num_refused += 1
        self._unlink(path)
        return False

    def _admit(self, sizes: list[tuple[bytes, int]], now_s: float) -> list[bytes]:
        try:
            added = self.index.add(sizes, now_s, self._publish, self._retire)
        except _FILE_ERRORS as error:
            self._tell("add", error)
            self.counts.num_refused += len(sizes)
            victims: list[bytes] = []
        else:
            victims = list(added.victims)
            self.counts.num_refused += added.num_refused
            self.counts.num_written += len(sizes) - added.num_refused
            self.counts.num_evicted += len(victims)
        for key, _ in sizes:  # of those that were not let in, or were there already
            self._unlink(self._new(key))
        return victims

    def _publish(self, key: bytes) -> Undo:
        path = self.directory.block_path(key)
        try:
            os.rename(self._new(key), path)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.rename(self._new(key), path)
        return partial(self._unlink, path)

    def _retire(self, key: bytes) -> Undo:
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.directory.block_path(key), self._retired(key))
        return partial(self._restore, key)

    def _restore(self, key: bytes) -> None:
        """The index did not let it go. Without a file it is forgotten when it is read."""
        try:
            os.rename(self._retired(key), self.directory.block_path(key))
        except FileNotFoundError:  # it had none
            return
        except OSError as error:
            self._tell("restore", error)
            self._unlink(self._retired(key))

    def _forget(self, key: bytes) -> None:
        try:
            self.index.remove([key], self._retire)
        except _FILE_ERRORS as error:
            self._tell("forget", error)
            self._unlink(self.directory.block_path(key))  # the next who reads it finds it missing, and tries again
        self._unlink(self._retired(key))

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._tell("remove", error)

    def _new(self, key: bytes) -> Path:
        return self.directory.new_path(f"{self._writer}-{key.hex()}")

    def _retired(self, key: bytes) -> Path:
        return self.directory.new_path(f"{self._writer}-{key.hex()}-out")

    def _tell(self, what: str, error: Exception) -> None:
        self.counts.num_errors += 1
        log.warning("the KV tier (%s) did not %s: %s", self.name, what, error)

    # -- the beginning -------------------------------------------------------------------------------------------

    def _check_room(self, max_bytes: int) -> None:
        held = sum(path.stat().st_size for path in self.directory.block_files())
        free = shutil.disk_usage(self.directory.path).free
        if free + held < max_bytes:
            raise LocalError(
                f"{self.directory.path} has room for {(free + held) >> 20} MiB of KV, not {max_bytes >> 20}",
                field="kv_tier_disk" if self.name == "disk" else "kv_tier_memory_mib",
                fix="ask for less, or free some",
            )

    def _open_index(self, max_bytes: int) -> TierIndex:
        path = self.directory.path / "index.sqlite"
        index = None
        try:
            index = _private_index(path, max_bytes)
            if self.directory.alone:
                index.begin(self._retire)
                index.check()
                self._remove_unknown(index)
            return index
        except (sqlite3.DatabaseError, AssertionError) as error:
            if index is not None:
                index.close()
            if not self.directory.alone:
                raise LocalError(f"the index of {self.directory.path} cannot be read: {error}") from error
            log.warning("the KV tier (%s) begins empty, its index is damaged: %s", self.name, error)
            self.directory.clear()
            return _private_index(path, max_bytes)

    def _remove_unknown(self, index: TierIndex) -> None:
        """What writers that were killed left behind."""
        self.directory.clear_new()
        known = {key.hex() for key in index.held_keys()}
        for path in self.directory.block_files():
            if path.name not in known:
                path.unlink(missing_ok=True)


def file_bytes(block_bytes: int) -> int:
    """What the file of a block takes."""
    return _held_bytes(HEADER_BYTES + block_bytes)


def _held_bytes(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _private_index(path: Path, max_bytes: int) -> TierIndex:
    """SQLite gives its side files the mode of the file."""
    os.close(_open_private(path, os.O_WRONLY | os.O_CREAT))
    return TierIndex(path, max_bytes)


def _open_private(path: str | Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
