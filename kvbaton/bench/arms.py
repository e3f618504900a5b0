"""The two sides of a comparison: addresses of running deployments, or fleets that are started for each run.

Invariants: a started fleet is ended with the run that used it, however the run ended; every wait for it has a
deadline; what a fleet says of itself is compared field by field before anything is measured.

Knows nothing about load or statistics.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.bench.cost import Fleet
from kvbaton.bench.http_stream import HttpPool
from kvbaton.bench.runner import origin_of
from kvbaton.types import UNREADABLE, LocalError, RemoteError

START_DEADLINE_S = 180.0
ENGINE_START_DEADLINE_S = 900.0  # of servers that are started behind our workers: they compile, or load for minutes
STOP_DEADLINE_S = 30.0
# Flags that say which arm it is; everything else must be equal in both.
ARM_FLAGS = frozenset(("--prefill", "--decode", "--colocated", "--transport", "--port"))


class Arm(msgspec.Struct, frozen=True):
    """``url`` of a running deployment, or ``up`` arguments of one to start (``kvbaton up`` is put before them)."""

    name: str
    style: str  # "a" colocated, "b" disaggregated
    fleet: Fleet
    url: str = ""
    up: tuple[str, ...] = ()
    metrics_urls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.url) == bool(self.up):
            raise LocalError(f"arm {self.name} is either an address or a fleet to start", field="arm")

    def with_flags(self, flags: Sequence[str]) -> Arm:
        """The same fleet with flags of the tuning added."""
        return msgspec.structs.replace(self, up=(*self.up, *flags)) if self.up else self

    @property
    def describe(self) -> str:
        return self.url or f"kvbaton up {shlex.join(self.up)}".replace(str(Path.home()), "~")


class Running(msgspec.Struct, frozen=True):
    """Where an arm answers, and where its processes export metrics (KV transfers are known to the workers)."""

    url: str
    metrics_urls: tuple[str, ...] = ()
    pid: int | None = None  # of the fleet that was started; None: it runs elsewhere


class _UpProcess(msgspec.Struct):
    url: str | None = None
    role: str = ""
    engine_url: str = ""  # of the server behind a worker, where there is one


class _UpReady(msgspec.Struct):
    """The line that ``kvbaton up --json`` prints when everything answers."""

    url: str
    processes: list[_UpProcess] = []


@asynccontextmanager
async def running(arm: Arm, log_path: Path) -> AsyncIterator[Running]:
    """The arm's addresses; a fleet is started and, on the way out, stopped."""
    if arm.url:
        yield Running(arm.url, arm.metrics_urls)
        return
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvbaton.cli.main",
            "up",
            "--json",
            "--tied",  # a comparison that is killed takes its fleet along
            *arm.up,
            *(() if "--port" in arm.up else ("--port", "0")),  # any free one: two arms may stand side by side
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # its workers are stopped with it, as one group
        )
        try:
            yield await _address(process, arm, log_path)
        finally:
            await _stop(process)


async def _address(process: asyncio.subprocess.Process, arm: Arm, log_path: Path) -> Running:
    assert process.stdout is not None
    try:
        deadline_s = ENGINE_START_DEADLINE_S if "vllm" in arm.up else START_DEADLINE_S
        async with asyncio.timeout(deadline_s):
            line = await process.stdout.readline()
    except TimeoutError:
        raise RemoteError(
            f"{arm.describe} was not ready within {deadline_s:g} s", field="arm", fix=f"see {log_path}"
        ) from None
    if not line:
        raise RemoteError(f"{arm.describe} ended before it was ready", field="arm", fix=f"see {log_path}")
    try:
        ready = msgspec.json.decode(line, type=_UpReady)
    except UNREADABLE as error:
        raise RemoteError(f"{arm.describe} said {line[:200]!r} instead of its address", field="arm") from error
    workers = tuple(found.url for found in ready.processes if found.url)
    workers += tuple(found.engine_url for found in ready.processes if found.engine_url)
    return Running(ready.url, workers or (ready.url,), process.pid)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_DEADLINE_S):
                # The pipe is read to its end: a full one would keep the fleet from ending.
                await asyncio.gather(process.wait(), _drain(process))
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    while await process.stdout.read(65536):
        pass


class Difference(msgspec.Struct, frozen=True):
    """Something the arms do not share. ``allowed`` differences are what is being compared."""

    field: str
    a: str
    b: str
    allowed: bool


async def describe_endpoint(url: str, headers: dict[str, str]) -> dict[str, str]:
    """What a deployment says of itself: its model list, and kvbaton's own description where there is one."""
    pool = HttpPool(origin_of(url), time.monotonic, headers)
    found: dict[str, str] = {}
    try:
        for path in ("/v1/models", "/fleet"):
            try:
                status, body = await pool.get(path)
            except RemoteError:
                continue
            if status == 200:
                _flatten(path.rsplit("/", 1)[1], body, found)
    finally:
        pool.close()
    # Instants and ports differ between any two starts of the same thing.
    return {
        name: value for name, value in found.items() if not name.endswith(("created", "url", "port", "incarnation"))
    }


def _flatten(prefix: str, body: bytes, found: dict[str, str]) -> None:
    try:
        stack: list[tuple[str, Any]] = [(prefix, msgspec.json.decode(body))]
    except UNREADABLE:
        return
    while stack:
        name, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{name}.{key}", inner) for key, inner in value.items()]
        elif isinstance(value, list):
            stack += [(f"{name}[{number}]", inner) for number, inner in enumerate(value[:16])]
        else:
            found[name] = str(value)


def parity(a: Arm, b: Arm, says_a: dict[str, str], says_b: dict[str, str]) -> list[Difference]:
    """Every field in which the arms differ, those that make the comparison unfair marked as not allowed."""
    found = []
    if a.fleet.total_gpus != b.fleet.total_gpus:
        found.append(Difference("GPUs", f"{a.fleet.total_gpus:g}", f"{b.fleet.total_gpus:g}", False))
    for name in sorted(says_a.keys() | says_b.keys()):
        one, two = says_a.get(name, "(absent)"), says_b.get(name, "(absent)")
        if one != two:
            # The models must be the same; how an endpoint describes its own build is for the reader to judge.
            found.append(Difference(name, one, two, not name.endswith((".id", ".root", ".max_model_len", ".revision"))))
    flags_a, flags_b = flags_of(a.up), flags_of(b.up)
    for flag in sorted(flags_a.keys() | flags_b.keys()):
        one, two = flags_a.get(flag, "(default)"), flags_b.get(flag, "(default)")
        if one != two:
            found.append(Difference(flag, one, two, flag in ARM_FLAGS or not (a.up and b.up)))
    return found


def flags_of(arguments: Sequence[str]) -> dict[str, str]:
    """Flags by name with their values."""
    found: dict[str, str] = {}
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            found[name] = value or "on"
        elif name:
            found[name] = word
    return found
