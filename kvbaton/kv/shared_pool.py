"""The bytes of one KV pool: anonymous memory, or a named segment that a process on the same host can map.

A named segment is a file in ``/dev/shm`` (what POSIX shared memory is on Linux), mode 0600:

    page 0: magic | header length | msgpack header (layout, number of blocks, incarnation, owner)
    generations: one uint64 per block, padded to a page
    data: the pool, as kv/layout draws it

Invariants: the magic is written last, so a segment is attached complete or not at all; its memory is reserved when it
is made, so a full ``/dev/shm`` is an error at start and never a SIGBUS later; the owner holds an exclusive ``flock`` on
it until it dies, so whether an owner lives is asked of the kernel, not guessed from a pid (which means nothing across
containers); a peer maps it read-only, and its mapping stays valid after the owner is gone. A block's generation
changes before its content may: a reader that finds the generation it was offered after its copy has copied what it was
offered.

Knows nothing about who owns a block, torch, or how a peer learned the name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
from pathlib import Path

import msgspec
import numpy as np

from kvbaton.kv.layout import KVLayout
from kvbaton.types import UNREADABLE, LocalError, RemoteError

SHM_DIR = Path("/dev/shm")
PREFIX = "kvbaton-"
_NAME = re.compile(r"kvbaton-[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")  # also what keeps a peer's name inside SHM_DIR
_MAGIC = b"KVBATON1"
_PAGE_BYTES = 4096
_HEADER_START = len(_MAGIC) + 4


class SegmentHeader(msgspec.Struct, frozen=True):
    """What page 0 says. ``owner_pid`` is for people; liveness is the lock."""

    layout: KVLayout
    num_blocks: int
    incarnation: str
    owner_pid: int

    @property
    def data_offset(self) -> int:
        return _PAGE_BYTES + _round_up(8 * self.num_blocks)

    @property
    def total_bytes(self) -> int:
        return self.data_offset + self.layout.pool_bytes(self.num_blocks)


def segment_name(incarnation: str, rank: int = 0) -> str:
    """The name under which the pool of one life of one worker (of one of its ranks) is found."""
    return f"{PREFIX}{incarnation}-kv{f'-{rank}' if rank else ''}"


class SharedPool:
    """``buffer``: uint8 [pool bytes]; ``generations``: uint64 [num_blocks]. ``name`` is None for anonymous memory."""

    def __init__(self, header: SegmentHeader, name: str | None, memory: mmap.mmap, owned: bool) -> None:
        self.layout = header.layout
        self.num_blocks = header.num_blocks
        self.incarnation = header.incarnation
        self.name = name
        self.owned = owned
        self._memory = memory
        self.generations: np.ndarray = np.frombuffer(
            memory, dtype=np.uint64, count=header.num_blocks, offset=_PAGE_BYTES
        )
        self.buffer: np.ndarray = np.frombuffer(
            memory,
            dtype=np.uint8,
            count=header.layout.pool_bytes(header.num_blocks),
            offset=header.data_offset,
        )

    @classmethod
    def create(cls, layout: KVLayout, num_blocks: int, name: str | None = None, incarnation: str = "") -> SharedPool:
        """A zeroed pool that this process owns. LocalError when the name is taken or memory is short."""
        if num_blocks < 1:
            raise LocalError(f"a pool needs at least one block, got {num_blocks}", field="num_blocks")
        header = SegmentHeader(layout, num_blocks, incarnation, os.getpid())
        if name is None:
            memory = mmap.mmap(-1, header.total_bytes)
            _prefer_huge_pages(memory)
            return cls(header, None, memory, owned=True)
        path = _path_of(name)
        fd = _create_locked(path)
        try:
            _reserve(fd, header.total_bytes)
            memory = mmap.mmap(fd, header.total_bytes)  # keeps its own duplicate of fd, and with it the lock
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        _prefer_huge_pages(memory)
        encoded = msgspec.msgpack.encode(header)
        assert _HEADER_START + len(encoded) <= _PAGE_BYTES
        memory[len(_MAGIC) : _HEADER_START] = len(encoded).to_bytes(4, "little")
        memory[_HEADER_START : _HEADER_START + len(encoded)] = encoded
        memory[: len(_MAGIC)] = _MAGIC
        return cls(header, name, memory, owned=True)

    @classmethod
    def attach(cls, name: str, writable: bool = False) -> SharedPool:
        """Map a peer's pool read-only; ``writable`` is for a process that computes into its owner's pool.

        RemoteError when there is no whole segment of that name that we may read.
        """
        path = _path_of(name)
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise RemoteError(f"cannot open shared memory {name}: {error.strerror}", field="shm_name") from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size < _PAGE_BYTES:
                raise RemoteError(f"{name} is not a KV segment", field="shm_name")
            header = _read_header(os.pread(fd, _PAGE_BYTES, 0), name)
            if status.st_size != header.total_bytes:
                raise RemoteError(
                    f"{name} has {status.st_size} bytes, its header asks for {header.total_bytes}", field="shm_name"
                )
            protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
            memory = mmap.mmap(fd, header.total_bytes, prot=protection)
        finally:
            os.close(fd)
        return cls(header, name, memory, owned=False)

    def view(self) -> np.ndarray:
        """The pool as bytes [layer][block][bytes of one block in one layer]."""
        return self.buffer.reshape(self.layout.num_layers, self.num_blocks, self.layout.layer_block_bytes)

    def close(self) -> None:
        """Drop our views and unmap; while somebody else still holds a view the memory stays until that one goes."""
        self.buffer = self.buffer[:0].copy()
        self.generations = self.generations[:0].copy()
        with contextlib.suppress(BufferError):
            self._memory.close()

    def unlink(self) -> None:
        """Remove the name; mappings stay valid. Harmless when it is gone, or when there never was a name."""
        if self.owned and self.name is not None:
            _path_of(self.name).unlink(missing_ok=True)


def sweep_stale() -> list[str]:
    """Remove segments whose owner is dead (``kill -9`` leaves them behind). Names of those removed."""
    removed: list[str] = []
    if not SHM_DIR.is_dir():
        return removed
    for path in sorted(SHM_DIR.glob(f"{PREFIX}*")):
        if _NAME.fullmatch(path.name) is None:
            continue
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(fd)
    return removed


def unlink_own() -> None:
    """Remove the names of every segment that this process owns: for one that ends at once, without an orderly stop.

    Asked of the kernel, so that a pool still being made on another thread is found too: an owner's descriptor stays
    open for as long as it maps the segment, and can write; a reader's cannot.
    """
    for entry in list(Path("/proc/self/fd").glob("*")):
        with contextlib.suppress(OSError):
            path = Path(os.readlink(entry))
            writes = fcntl.fcntl(int(entry.name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            if writes and path.parent == SHM_DIR and _NAME.fullmatch(path.name) is not None:
                path.unlink(missing_ok=True)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _path_of(name: str) -> Path:
    if _NAME.fullmatch(name) is None:
        raise LocalError(
            f"bad shared memory name {name!r}", field="shm_name", fix=f"it starts with {PREFIX}, no slashes"
        )
    return SHM_DIR / name


def _create_locked(path: Path) -> int:
    """A new file with our lock on it. A sweep may catch it between the two steps; then it has no name: try again."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileExistsError as error:
            raise LocalError(
                f"shared memory {path.name} exists already",
                field="shm_name",
                fix="sweep stale segments, or use another",
            ) from error
        except OSError as error:
            raise LocalError(f"cannot make shared memory {path.name}: {error.strerror}", field="shm_name") from error
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink == 1:
            return fd
        os.close(fd)


def _reserve(fd: int, num_bytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        raise LocalError(
            f"shared memory is too small for a KV pool of {num_bytes / 2**20:.0f} MiB",
            field="num_blocks",
            fix="lower the pool size, or give the container more (docker run --shm-size)",
        ) from error


def _read_header(page: bytes, name: str) -> SegmentHeader:
    if page[: len(_MAGIC)] != _MAGIC:
        raise RemoteError(f"{name} is not a KV segment, or not complete yet", field="shm_name")
    length = int.from_bytes(page[len(_MAGIC) : _HEADER_START], "little")
    try:
        header = msgspec.msgpack.decode(page[_HEADER_START : _HEADER_START + length], type=SegmentHeader)
    except (*UNREADABLE, LocalError) as error:
        raise RemoteError(f"the header of {name} makes no sense: {error}", field="shm_name") from error
    if header.num_blocks < 1:
        raise RemoteError(f"the header of {name} says {header.num_blocks} blocks", field="shm_name")
    return header


def _prefer_huge_pages(memory: mmap.mmap) -> None:
    """Fewer page faults and TLB misses in a pool of gigabytes; a wish, not a need."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
