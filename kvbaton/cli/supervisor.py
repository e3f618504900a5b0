"""Keeps the processes of one machine's fleet alive, and ends them in the right order.

Invariants: a child never outlives us (it holds our pipe, and the kernel tells it); a child that dies is started again
with a growing pause, and given up after ``MAX_RESTARTS`` in a row; the router is told of every address that changed;
nothing is started while we are stopping. Knows nothing about flags, models or requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvbaton.config import MemberSettings
from kvbaton.kv.shared_pool import sweep_stale
from kvbaton.types import LocalError, RemoteError, Role
from kvbaton.workers.process import first_of
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER

MAX_RESTARTS = 6
LONGEST_PAUSE_S = 10.0
STEADY_S = 60.0  # after so long alive, earlier deaths are forgiven
Tell = Callable[[str, str], None]  # (name of the child, what happens to it)


@dataclass(frozen=True)
class ChildSpec:
    name: str
    verb: str  # worker or router
    environ: dict[str, str]
    log_path: Path
    drain_s: float
    role: Role = "both"


@dataclass(eq=False)
class Child:
    spec: ChildSpec
    process: asyncio.subprocess.Process | None = None
    address: str = ""  # http://host:port once it was ready
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    num_deaths: int = 0

    @property
    def kind(self) -> str:
        return self.spec.role if self.spec.verb == "worker" else "router"

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.returncode is None else None


class Supervisor:
    def __init__(self, router: ChildSpec, workers: Sequence[ChildSpec], key: str, tell: Tell) -> None:
        self.router = Child(router)
        self.workers = [Child(spec) for spec in workers]
        self._key = key
        self._tell = tell
        self._came_up = False
        self._died_early = asyncio.Event()
        self._stopping = asyncio.Event()
        self._members_lock = asyncio.Lock()

    @property
    def children(self) -> list[Child]:
        return [self.router, *self.workers]

    async def run(self, ready_timeout_s: float, on_ready: Callable[[], None], stop: asyncio.Event) -> None:
        """Start everything, call ``on_ready`` once the fleet answers, keep it so until ``stop``; ends with all ended.

        Raises LocalError or RemoteError when the fleet does not come up.
        """
        failure: LocalError | RemoteError | None = None
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(self._keep(child, group))
            try:
                await self._come_up(ready_timeout_s, stop)
                if not stop.is_set():
                    on_ready()
                    await stop.wait()
            except (LocalError, RemoteError) as error:
                failure = error
            finally:
                self._stopping.set()
                await self._end()
        sweep_stale()
        if failure is not None:
            raise failure

    async def _come_up(self, timeout_s: float, stop: asyncio.Event) -> None:
        coming = asyncio.ensure_future(self._all_ready(timeout_s))
        try:
            await first_of(coming, self._died_early.wait(), stop.wait())
            if coming.done():
                coming.result()
                self._came_up = True
            elif not stop.is_set():
                raise self._why_not()
        finally:
            coming.cancel()

    # -- one child -----------------------------------------------------------------------------------------------

    async def _keep(self, child: Child, group: asyncio.TaskGroup) -> None:
        """Start, wait, start again."""
        while not self._stopping.is_set():
            started_s = asyncio.get_running_loop().time()
            process = await self._start(child, group)
            if self._stopping.is_set():
                _signal(child, signal.SIGTERM)
            code = await process.wait()
            child.ready.clear()
            if self._stopping.is_set():
                return
            if asyncio.get_running_loop().time() - started_s > STEADY_S:
                child.num_deaths = 0
            child.num_deaths += 1
            died = f"ended with {_describe(code)}"
            if not self._came_up:  # no early death is forgiven: the cause is the same the second time
                self._died_early.set()
                return
            if child.num_deaths > MAX_RESTARTS:
                self._tell(child.spec.name, f"{died}; given up after {MAX_RESTARTS} restarts")
                return
            pause_s = min(LONGEST_PAUSE_S, 0.25 * 2 ** (child.num_deaths - 1))
            self._tell(child.spec.name, f"{died}; starting it again in {pause_s:g} s")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            sweep_stale()

    async def _start(self, child: Child, group: asyncio.TaskGroup) -> asyncio.subprocess.Process:
        reading, writing = os.pipe()
        with child.spec.log_path.open("ab") as log:
            try:
                child.process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "kvbaton.cli.main",
                    child.spec.verb,
                    "--tied",
                    "--report-fd",
                    str(writing),
                    stdin=asyncio.subprocess.PIPE,  # never written: its end tells the child that we are gone
                    stdout=log,
                    stderr=log,
                    env=_environ(child),
                    pass_fds=(writing,),
                    start_new_session=True,  # Ctrl-C in the terminal is for us; children are ended in order
                )
            finally:
                os.close(writing)
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
        )
        group.create_task(self._listen(child, reader))
        return child.process

    async def _listen(self, child: Child, reader: asyncio.StreamReader) -> None:
        """Reports of one life of a child, until its pipe closes."""
        while line := await reader.readline():
            report: dict[str, Any] = json.loads(line)
            if report["event"] == "ready":
                host = f"[{report['host']}]" if ":" in report["host"] else report["host"]
                child.address = f"http://{host}:{report['port']}"
                self._tell(child.spec.name, "ready")
                child.ready.set()
                await self._send_members()
            else:
                self._tell(child.spec.name, str(report.get("message", report["event"])))

    # -- the fleet -----------------------------------------------------------------------------------------------

    async def _all_ready(self, timeout_s: float) -> None:
        """Every child is ready and the router takes requests to every worker."""
        try:
            async with asyncio.timeout(timeout_s):
                for child in self.children:
                    await child.ready.wait()
                await self._send_members()
                self._tell("router", "waiting for the workers to answer it")
                while not await self._router_sees_all():  # noqa: ASYNC110 (it polls them; nobody could wake us)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            late = [child.spec.name for child in self.children if not child.ready.is_set()] or ["the router"]
            raise RemoteError(
                f"not ready within {timeout_s:g} s: {', '.join(late)}", fix=f"see {self.router.spec.log_path.parent}"
            ) from None

    def _why_not(self) -> LocalError | RemoteError:
        dead = next(child for child in self.children if child.num_deaths)
        assert dead.process is not None and dead.process.returncode is not None
        code = dead.process.returncode
        lines = [line for line in dead.spec.log_path.read_text(errors="replace").splitlines() if line.strip()]
        told = next((line.removeprefix("kvbaton: ") for line in reversed(lines) if line.startswith("kvbaton: ")), "")
        if code == 2 and told:
            return LocalError(told)
        last = told or (lines[-1] if lines else _describe(code))
        return RemoteError(f"{dead.spec.name} did not start: {last}", fix=f"see {dead.spec.log_path}")

    async def _router_sees_all(self) -> bool:
        fleet = await self._ask("GET", "/fleet")
        members = fleet.get("members", []) if fleet is not None else []
        return len(members) == len(self.workers) and all(member["state"] == "up" for member in members)

    async def _send_members(self) -> None:
        """The router's members are the workers that have an address; it may have lost them in a restart."""
        if not self.router.ready.is_set():
            return
        async with self._members_lock:
            members = [
                MemberSettings(url=worker.address, role=worker.spec.role, name=worker.spec.name)
                for worker in self.workers
                if worker.address
            ]
            await self._ask("PUT", "/internal/members", msgspec.json.encode(members))

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any] | None:
        headers = {INTERNAL_KEY_HEADER.decode(): self._key}
        try:
            async with (
                asyncio.timeout(5.0),
                aiohttp.ClientSession() as session,
                session.request(method, self.router.address + path, data=body, headers=headers) as response,
            ):
                answer: dict[str, Any] = await response.json()
                return answer if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def _end(self) -> None:
        """Router first, so that nothing new begins; then those that decode, which may still read; then prefill."""
        await self._end_all([self.router], "draining")
        await self._end_all([w for w in self.workers if w.spec.role != "prefill"], "stopping")
        await self._end_all([w for w in self.workers if w.spec.role == "prefill"], "stopping")

    async def _end_all(self, children: list[Child], what: str) -> None:
        alive = [c for c in children if c.process is not None and c.process.returncode is None]
        for child in alive:
            self._tell(child.spec.name, what)
            _signal(child, signal.SIGTERM)
        patience_s = max((child.spec.drain_s for child in alive), default=0.0) + 15
        try:
            async with asyncio.timeout(patience_s):
                for child in alive:
                    assert child.process is not None
                    await child.process.wait()
        except TimeoutError:
            self.kill()

    def kill(self) -> None:
        """At once, all of them."""
        self._stopping.set()
        for child in self.children:
            _signal(child, signal.SIGKILL)


def _environ(child: Child) -> dict[str, str]:
    """A router that is started again takes the port its clients know; workers may move, the router is told."""
    if child.spec.verb != "router" or not child.address:
        return child.spec.environ
    return {**child.spec.environ, "KVBATON_ROUTER_PORT": child.address.rsplit(":", 1)[1]}


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)


def _describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
