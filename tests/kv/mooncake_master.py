"""A real Mooncake master as a process, and a client of its own that knows nothing of kvbaton."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kv.store_blocks import until

_PUT = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
store.remove(sys.argv[2], True)
assert store.put(sys.argv[2], sys.stdin.buffer.read()) == 0
store.close()
os._exit(0)
"""


def require_mooncake() -> None:
    """Skip when the package, or what it needs of the system, is not here."""
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("needs pip install 'kvbaton[mooncake]'")
    tried = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True, timeout=120)
    if tried.returncode:
        pytest.skip(f"mooncake.store cannot be imported: {tried.stderr.strip().splitlines()[-1]}")


class Master:
    """``start`` again after ``kill``: the same address, and nothing of what was stored."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with socket.socket() as one, socket.socket() as other:
            for taken in (one, other):
                taken.bind(("127.0.0.1", 0))
            self.port, self._admin_port = one.getsockname()[1], other.getsockname()[1]
        self.start()

    @property
    def flag(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}?segment_mib=64"

    def start(self) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.origin is not None
        program = Path(spec.origin).with_name("mooncake_master")
        ports = [f"--rpc_port={self.port}", f"--metrics_port={self._admin_port}"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([program, *ports], stdout=log, stderr=log)
        until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def put(self, key: str, value: bytes) -> None:
        """Instead of what is there."""
        command = [sys.executable, "-c", _PUT, f"127.0.0.1:{self.port}", key]
        subprocess.run(command, input=value, check=True, capture_output=True, timeout=120)


@contextmanager
def master_of(directory: Path) -> Iterator[Master]:
    require_mooncake()
    master = Master(directory / "master.log")
    try:
        yield master
    finally:
        master.kill()
