"""The fleet under drill: its router's page, its processes, and what changes it.

Two kinds: one that ``kvbaton up`` keeps on this machine, reached by its socket, where everything can be rehearsed; and
any other, reached by its router's address and a killer, where only what those can do is. Invariant: every wait has a
deadline. Knows nothing about scenarios.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvbaton.drill.killer import Killer, LocalProcesses
from kvbaton.drill.samples import FleetSeen, MemberSeen
from kvbaton.router import control
from kvbaton.router.control import Command, FleetStatus
from kvbaton.types import UNREADABLE, LocalError, RemoteError
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER, WorkerInfo, WorkerStats

LOOK_S = 2.0  # one look at the fleet page
CHANGE_S = 60.0  # beyond what a worker may take to start
START_S = 240.0
STOP_S = 90.0
GAUGES = ("num_active", "num_blocks_used", "num_blocks_pinned", "num_leases", "num_running", "num_waiting")


@dataclass
class Target:
    """``control_path`` is there only for a fleet of ``kvbaton up``."""

    url: str
    killer: Killer
    control_path: Path | None = None
    key: str = ""
    urls: dict[str, str] = field(default_factory=dict)  # of the workers, where a fleet file names them
    transport: str = "auto"
    engine: str = "embedded"
    join_s: float = 180.0  # as the fleet says
    api_key: str = ""  # where the router asks its clients for one

    @property
    def own_wire(self) -> bool:
        """KV goes by our own hand-off, and not by a way of the engine's where nothing can be put between."""
        return self.engine == "embedded"

    @property
    def wire(self) -> str:
        """What KV goes over, in words."""
        return self.transport if self.own_wire else f"what {self.engine} has for it"

    @property
    def client_headers(self) -> dict[str, str]:
        """What its clients are known by."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def _headers(self) -> dict[str, str]:
        return {INTERNAL_KEY_HEADER.decode(): self.key} if self.key else {}

    async def page(self) -> dict[str, Any] | None:
        """``GET /fleet``; None when the router does not answer."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
            status, answer = await _get(self.url + "/fleet", self._headers, LOOK_S)
            return msgspec.json.decode(answer) if status == 200 else None
        return None

    async def text(self, path: str) -> str | None:
        """What the router answers there; None when it does not."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            status, answer = await _get(self.url + path, self._headers, LOOK_S)
            return answer.decode(errors="replace") if status == 200 else None
        return None

    async def look(self, at_s: float) -> FleetSeen:
        page = await self.page()
        if page is None:
            return FleetSeen(at_s, None)
        members = {member["name"]: _member(member) for member in page["members"]}
        return FleetSeen(at_s, members, page["inflight"])

    async def reported(self) -> dict[str, WorkerStats]:
        """What each worker last told the router."""
        page = await self.page() or {"members": []}
        return {m["name"]: msgspec.convert(m["stats"], WorkerStats) for m in page["members"] if m["stats"]}

    async def command(self, command: Command) -> FleetStatus:
        assert self.control_path is not None
        return await control.ask(self.control_path, command, self.join_s + CHANGE_S)

    async def pid_of(self, name: str) -> int | None:
        """Of a process of ``kvbaton up``, or as the worker itself says."""
        if self.control_path is not None:
            status = await self.command(Command("status"))
            return next((process.pid for process in status.processes if process.name == name), None)
        info = await self.info(name)
        return info.pid or None if info is not None else None

    async def info(self, name: str) -> WorkerInfo | None:
        """What the worker says of itself now; None when it does not answer."""
        url = self.urls.get(name)
        if self.control_path is not None:
            status = await self.command(Command("status"))
            url = next((process.url for process in status.processes if process.name == name), None)
        return await self.info_at(url) if url else None

    async def info_at(self, url: str) -> WorkerInfo | None:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, *UNREADABLE):
            headers = self._headers
            status, answer = await _get(url + "/internal/info", headers, LOOK_S)
            return msgspec.json.decode(answer, type=WorkerInfo) if status == 200 else None
        return None

    async def max_context(self) -> int:
        try:
            _, answer = await _get(self.url + "/v1/models", self.client_headers, LOOK_S)
            return int(msgspec.json.decode(answer)["data"][0]["max_model_len"])
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, IndexError) as error:
            raise RemoteError(f"{self.url} lists no model: {error or type(error).__name__}", field="url") from None


def _member(member: dict[str, Any]) -> MemberSeen:
    stats = member["stats"] or {}
    return MemberSeen(
        role=member["role"],
        state=member["state"],
        incarnation=member["incarnation"] or "",
        failures=member["failures"],
        computed_tokens=stats.get("num_prompt_tokens", 0),
        held={name: stats[name] for name in GAUGES if stats.get(name)},
        received_bytes=stats.get("transfer_bytes_received", 0),
    )


async def _get(url: str, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(url, headers=headers) as response,
    ):
        return response.status, await response.read()


def of_up(path: Path, status: FleetStatus) -> Target:
    """A fleet of ``kvbaton up`` on this machine."""

    async def unknown(name: str) -> int | None:
        return await target.pid_of(name)

    target = Target(
        *(status.url, LocalProcesses(unknown), path, status.key),
        transport=status.transport,
        engine=status.engine,
        join_s=status.join_s,
    )
    return target


def of_router(url: str, killer: Killer | None, urls: dict[str, str], key: str) -> Target:
    """A fleet that somebody else keeps. Without a killer its processes must be on this machine."""

    async def pid_of(name: str) -> int | None:
        return await target.pid_of(name)

    target = Target(url.rstrip("/"), killer or LocalProcesses(pid_of), None, key, urls)
    return target


@asynccontextmanager
async def started(flags: Sequence[str], log_dir: Path, start_s: float = START_S) -> AsyncIterator[Target]:
    """A fleet of our own by ``kvbaton up`` and these flags; it is ended on the way out, however that is reached."""
    errors = log_dir / "up.log"
    with errors.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "kvbaton.cli.main",
                "up",
                "--json",
                "--tied",
                "--port",
                "0",
                "--log-dir",
                str(log_dir),
            ),
            *flags,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(start_s):
                line = await process.stdout.readline()
        except TimeoutError:
            raise RemoteError(f"the fleet was not ready within {start_s:g} s", fix=f"see {errors}") from None
        if not line:
            said = [text for text in errors.read_text(errors="replace").splitlines() if text.startswith("kvbaton: ")]
            why = said[-1].removeprefix("kvbaton: ") if said else "it ended before it was ready"
            kind = LocalError if await process.wait() == 2 else RemoteError
            raise kind(f"the fleet did not start: {why}", fix=f"see {errors}")
        assert json.loads(line)["url"]
        path = control.socket_path(process.pid)
        yield of_up(path, await control.ask(path, Command("status"), 10.0))
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
