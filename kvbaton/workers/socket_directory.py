"""A private directory for the sockets of a server that we start: ours alone, and swept when we were killed.

Invariants: 0700; whoever made it holds a lock in it until it ends, however it ends, so what nobody holds is nobody's.
Knows nothing about what is put there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "kvbaton-vllm-"
_LOCK = "lock"
_UNFINISHED_S = 3600.0  # one without a lock is being made, or was when its maker was killed


class SocketDirectory:
    def __init__(self, root: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        self._fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def close(self) -> None:
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1


def sweep(root: Path | None = None) -> list[Path]:
    """Remove those whose makers are dead. Returns what was removed."""
    removed = []
    for path in sorted((root or Path(tempfile.gettempdir())).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):  # gone meanwhile, another user's, or held (BlockingIOError)
            if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.geteuid():
                continue
            if not (path / _LOCK).exists():
                if time.time() - path.stat().st_mtime < _UNFINISHED_S:
                    continue
            else:
                fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                finally:
                    os.close(fd)
            shutil.rmtree(path)
            removed.append(path)
    return removed
