"""The directory of one level of the shared KV tier: who uses it, who may read it, and when it goes.

    lock          whoever uses the directory holds a shared ``flock`` on it; the kernel frees it with the process
    index.sqlite  ``kv/tier_index``
    new/          files that are being written, or being taken out
    ab/abcd...    the block of that key, never changed once it is there

Invariants: directory 0700 and files 0600, of this user, or it is refused; only a process that has the directory to
itself removes anything that an index does not name. A level in memory is a directory in ``/dev/shm``: its last user
removes it, and ``sweep_tiers`` those that killed ones left. Knows nothing about blocks or indices.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvbaton.kv.shared_pool import SHM_DIR
from kvbaton.types import LocalError

PREFIX = "kvbaton-tier-"
_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{8,64}")
_LOCK = "lock"
OPEN_WAIT_S = 30.0  # for another process that begins or ends the same directory
_POLL_S = 0.02


class TierDirectory:
    """``alone``: nobody else used it when it was opened. ``passing``: it goes with its last user."""

    def __init__(self, path: Path, passing: bool) -> None:
        self.path = path
        self.passing = passing
        self._lock_fd, self.alone = _enter(path)
        (path / "new").mkdir(mode=0o700, exist_ok=True)

    def settle(self) -> None:
        """What only a lone opener does is done: others may come in."""
        fcntl.flock(self._lock_fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Leave; the last user of one that is ``passing`` takes it away."""
        if self._lock_fd < 0:
            return
        if self.passing:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)
        self._lock_fd = -1

    def block_path(self, key: bytes) -> Path:
        name = key.hex()
        return self.path / name[:2] / name

    def new_path(self, name: str) -> Path:
        return self.path / "new" / name

    def block_files(self) -> Iterator[Path]:
        for entry in os.scandir(self.path):
            if len(entry.name) == 2 and entry.is_dir(follow_symlinks=False):
                for found in os.scandir(entry.path):
                    yield Path(found.path)

    def clear_new(self) -> None:
        for found in os.scandir(self.path / "new"):
            os.unlink(found.path)

    def clear(self) -> None:
        """Everything but the lock."""
        for entry in os.scandir(self.path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != _LOCK:
                os.unlink(entry.path)
        (self.path / "new").mkdir(mode=0o700)


def memory_directory(name: str) -> Path:
    """Where the level in memory of that name is; whoever knows the name and is this user shares it."""
    path = SHM_DIR / f"{PREFIX}{name}"
    if _NAME.fullmatch(path.name) is None:
        raise LocalError(f"bad name {name!r} of a KV tier", field="kv_tier_memory_mib", fix="use 8 to 64 hex digits")
    return path


def sweep_tiers() -> list[str]:
    """Remove levels in memory whose users are all dead. Names of those removed."""
    removed: list[str] = []
    for path in sorted(SHM_DIR.glob(f"{PREFIX}*")):
        if _NAME.fullmatch(path.name) is None or path.is_symlink():
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it is in use
                shutil.rmtree(path)
                removed.append(path.name)
            finally:
                os.close(fd)
    return removed


def _enter(path: Path) -> tuple[int, bool]:
    """A descriptor that holds the lock, and whether we are alone; the lock is then exclusive until ``settle``."""
    deadline_s = time.monotonic() + OPEN_WAIT_S
    while True:
        _make_private(path)
        try:
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # its last user has just removed it
            continue
        for mode in (fcntl.LOCK_EX, fcntl.LOCK_SH):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, mode | fcntl.LOCK_NB)
                if _is_there(path / _LOCK, fd):
                    return fd, mode == fcntl.LOCK_EX
                break
        os.close(fd)
        if time.monotonic() > deadline_s:
            raise LocalError(f"another process keeps {path} locked", field="kv_tier_disk", fix="end it, or wait")
        time.sleep(_POLL_S)


def _is_there(path: Path, fd: int) -> bool:
    """Whether what we locked still has its name: its last user may have removed it meanwhile."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise LocalError(
            f"cannot make {path}: {error.strerror}", field="kv_tier_disk", fix="choose a directory that can be written"
        ) from error
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not private:
        raise LocalError(
            f"{path} is not a directory of this user's alone", field="kv_tier_disk", fix=f"chmod 700 {path}, or remove"
        )
