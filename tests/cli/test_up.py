"""``kvbaton up`` as a user runs it: real processes, a tiny model, and deaths of every kind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import psutil
from cli.up_process import up

from kvbaton.kv.shared_pool import SHM_DIR

LONG = "a prompt of many tokens " * 8


def segments_of(pids: set[int]) -> list[str]:
    """Shared-memory segments that belong to these processes."""
    from kvbaton.kv.shared_pool import SharedPool

    found = []
    for path in SHM_DIR.glob("kvbaton-*"):
        try:
            pool = SharedPool.attach(path.name)
        except Exception:
            continue  # another test's, gone meanwhile
        pool.close()
        if owner_of(path) in pids:
            found.append(path.name)
    return found


def owner_of(path: Path) -> int:
    import msgspec

    from kvbaton.kv.shared_pool import SegmentHeader

    page = path.read_bytes()[:4096]
    return msgspec.msgpack.decode(page[12 : 12 + int.from_bytes(page[8:12], "little")], type=SegmentHeader).owner_pid


async def gone(pids: set[int]) -> None:
    async with asyncio.timeout(60):
        while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_split_fleet_answers_heals_and_leaves_nothing_behind(tiny_model_dir: Path, tmp_path: Path) -> None:
    split = ("--prefill", "1", "--decode", "1", "--threshold-tokens", "0")  # however small the model
    async with up(tiny_model_dir, tmp_path, *split) as fleet:
        pids = set(fleet.pids.values())
        assert set(fleet.pids) == {"router", "prefill-0", "decode-0"}
        status, remote, headers = await fleet.post(prompt=LONG, max_tokens=8, ignore_eos=True)
        assert (status, headers["x-kvbaton-decision"]) == (200, "remote")
        usage = remote["usage"]
        assert usage["completion_tokens"] == 8 and usage["prompt_tokens_details"]["cached_tokens"] == 0
        if len(os.sched_getaffinity(0)) >= 2:
            cores = [os.sched_getaffinity(fleet.pids[name]) for name in ("prefill-0", "decode-0")]
            assert not cores[0] & cores[1]

        os.kill(fleet.pids["prefill-0"], signal.SIGKILL)
        status, local, headers = await fleet.post(prompt=LONG + "!", max_tokens=8, ignore_eos=True)
        assert status == 200 and headers["x-kvbaton-decision"] != "remote"
        first = (await fleet.members())["prefill-0"]["incarnation"]
        await fleet.until(lambda m: m["prefill-0"]["state"] == "up" and m["prefill-0"]["incarnation"] != first)
        status, again, headers = await fleet.post(prompt="Z" + LONG, max_tokens=8, ignore_eos=True)
        assert (status, headers["x-kvbaton-decision"]) == (200, "remote")

        first = (await fleet.members())["decode-0"]["incarnation"]
        os.kill(fleet.pids["decode-0"], signal.SIGKILL)
        status, _, headers = await fleet.post(prompt="Y" + LONG, max_tokens=8, ignore_eos=True)
        assert (status, headers["x-kvbaton-decision"]) == (200, "fallback_no_decode")
        await fleet.until(lambda m: m["decode-0"]["state"] == "up" and m["decode-0"]["incarnation"] != first)
        # The same prompt as the first time: another decode process, the same tokens.
        status, same, _ = await fleet.post(prompt=LONG, max_tokens=8, ignore_eos=True)
        assert status == 200 and same["choices"][0]["text"] == remote["choices"][0]["text"]

        os.kill(fleet.pids["router"], signal.SIGKILL)
        await fleet.until(lambda m: len(m) == 2 and all(member["state"] == "up" for member in m.values()))
        status, same, _ = await fleet.post(prompt=LONG, max_tokens=8, ignore_eos=True)
        assert status == 200 and same["choices"][0]["text"] == remote["choices"][0]["text"]

        pids |= {child.pid for child in psutil.Process(fleet.process.pid).children(recursive=True)}
        async with fleet.http.post(
            fleet.url + "/v1/completions", json={"prompt": LONG, "max_tokens": 60, "ignore_eos": True, "stream": True}
        ) as response:
            await response.content.readuntil(b"\n\n")
            fleet.process.send_signal(signal.SIGINT)
            rest = await response.content.read()
        assert rest.endswith(b"data: [DONE]\n\n"), "an open stream ends before the fleet does"
        assert await fleet.process.wait() == 0
        await gone(pids)
        assert segments_of(pids) == []


async def test_when_up_is_killed_everything_goes_with_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with up(tiny_model_dir, tmp_path, "--colocated", "1") as fleet:
        status, _, headers = await fleet.post(prompt=LONG, max_tokens=4)
        assert (status, headers["x-kvbaton-decision"]) == (200, "local_colocated")
        pids = set(fleet.pids.values())
        fleet.process.kill()
        await gone(pids)


async def failing_up(tmp_path: Path, *flags: str) -> str:
    """The one line that ``up`` ends with when it cannot start, having started nothing."""
    logs = tmp_path / "logs"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvbaton.cli.main", "up", "--kv-blocks", "8", "--log-dir", str(logs), *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 2 and out == b""
    assert not logs.exists(), "refused before anything was started"
    (line,) = err.decode().splitlines()
    assert line.startswith("kvbaton: ")
    return line


async def test_a_fleet_that_cannot_start_says_why(tmp_path: Path, tiny_model_dir: Path) -> None:
    line = await failing_up(tmp_path, "--model", str(tmp_path), "--port", "0")
    assert f"no config.json in {tmp_path}" in line and "--model" in line
    assert "no config.json in /nope" in await failing_up(tmp_path, "--model", "/nope", "--port", "0")
    for missing in ("model.safetensors", "tokenizer.json"):
        partial = tmp_path / f"without-{missing}"
        shutil.copytree(tiny_model_dir, partial, ignore=shutil.ignore_patterns(missing))
        assert f"no {missing}" in await failing_up(tmp_path, "--model", str(partial), "--port", "0")


async def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path: Path, tiny_model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = await failing_up(tmp_path, "--model", str(tiny_model_dir), "--port", port)
    assert f"127.0.0.1:{port}" in line and "--port" in line
    assert "--host" in await failing_up(tmp_path, "--model", str(tiny_model_dir), "--host", "192.0.2.1")


async def test_a_start_can_be_broken_off(tmp_path: Path, tiny_model_dir: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvbaton.cli.main", "up", "--model", str(tiny_model_dir), "--port", "0",
        "--kv-blocks", "8", "--log-dir", str(tmp_path / "logs"),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    while b"loading the model" not in await process.stderr.readline():
        assert process.returncode is None
    pids = {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert process.returncode == 0
    await gone(pids)
    assert segments_of(pids) == []


PARENT = """
import subprocess, sys, time
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""


async def test_a_tied_fleet_ends_with_the_program_that_started_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    """However that one ends: a comparison that is killed leaves no workers to disturb the next."""
    command = [sys.executable, "-m", "kvbaton.cli.main", "up", "--tied", "--json", "--port", "0"]
    flags = ["--model", str(tiny_model_dir), "--colocated", "1", "--kv-blocks", "64", "--log-dir", str(tmp_path)]
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, *command, *flags), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(60):
        fleet = psutil.Process(int(await parent.stdout.readline()))
        assert b'"url"' in await parent.stdout.readline()  # it inherits the pipe
    pids = {fleet.pid, *(child.pid for child in fleet.children(recursive=True))}
    assert len(pids) == 3
    parent.kill()
    await parent.wait()
    await gone(pids)
    assert not segments_of(pids)
