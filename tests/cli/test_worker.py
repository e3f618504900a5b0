"""``kvbaton worker`` by itself: what it does before it serves."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import sys
import uuid
from pathlib import Path

import pytest

from kvbaton.engine import gguf_model
from kvbaton.kv import shared_pool
from kvbaton.kv.layout import KVLayout

LAYOUT = KVLayout(1, 1, 8, 8, "float32")
OWNER = """
import signal, sys
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.shared_pool import SharedPool
pool = SharedPool.create(KVLayout(1, 1, 8, 8, "float32"), 2, sys.argv[1])
print("made", flush=True)
signal.pause()
"""


async def start(*flags: str, **environ: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvbaton.cli.main", "worker", *flags, env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def leave_behind() -> str:
    """The name of a segment whose owner was killed."""
    left = shared_pool.segment_name(uuid.uuid4().hex)
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, left, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None and await owner.stdout.readline() == b"made\n"
    owner.kill()
    await owner.wait()
    return left


async def test_a_worker_removes_what_dead_ones_left_and_nothing_of_the_living() -> None:
    living = shared_pool.segment_name(uuid.uuid4().hex)
    pool = shared_pool.SharedPool.create(LAYOUT, 1, living)
    for _ in range(10):  # a worker that another test starts at that moment may be the one to remove it
        left = await leave_behind()
        process = await start("--model", "/nope")
        _, err = await process.communicate()
        assert process.returncode == 2 and "no config.json in /nope" in err.decode()
        assert not (shared_pool.SHM_DIR / left).exists() and (shared_pool.SHM_DIR / living).exists()
        if "shared-memory segment(s) of processes that died" in err.decode():
            break
    else:
        raise AssertionError("ten times somebody else removed it")
    pool.unlink()
    pool.close()


async def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(tiny_model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = await start("--model", str(tiny_model_dir), "--port", port)
        _, err = await process.communicate()
    (line,) = err.decode().splitlines()
    assert process.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in line and "--port" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_worker_that_is_still_loading_ends_when_told(
    tmp_path: Path, default_model_path: Path, number: signal.Signals
) -> None:
    """It loads the default model, and we hold the lock that its conversion waits for."""
    held = gguf_model.cache_place(gguf_model.packaged_gguf(), tmp_path)
    held.mkdir(parents=True)
    with (held / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = await start("--json", KVBATON_CACHE=str(tmp_path))
        assert process.stderr is not None
        while b"loading the model" not in await process.stderr.readline():
            assert process.returncode is None
        process.send_signal(number)
        out, _ = await process.communicate()
    assert (process.returncode, out) == (0, b""), "it never was ready"
