"""The directory of a server's sockets: gone with its maker, or swept after it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from kvbaton.workers.socket_directory import SocketDirectory, sweep

KILLED = """
import os, signal, sys
from pathlib import Path
from kvbaton.workers.socket_directory import SocketDirectory
print(SocketDirectory(Path(sys.argv[1])).path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_of_a_maker_that_was_killed_it_is_swept_and_of_a_living_one_it_is_not(tmp_path: Path) -> None:
    living = SocketDirectory(tmp_path)
    assert stat.S_IMODE(living.path.stat().st_mode) == 0o700
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sweep(tmp_path) == [Path(killed.stdout.strip())]
    assert sweep(tmp_path) == [] and living.path.exists()
    living.close()
    living.close()
    assert not list(tmp_path.iterdir())


def test_one_that_is_being_made_stays_and_an_old_one_without_a_lock_goes(tmp_path: Path) -> None:
    new, old = tmp_path / "kvbaton-vllm-new", tmp_path / "kvbaton-vllm-old"
    new.mkdir()
    old.mkdir()
    os.utime(old, (1, 1))
    (tmp_path / "kvbaton-vllm-link").symlink_to(new)
    (tmp_path / "another").mkdir()
    assert sweep(tmp_path) == [old]
    assert new.exists() and (tmp_path / "another").exists()
