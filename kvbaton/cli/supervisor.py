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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvbaton.config import MemberSettings
from kvbaton.kv.shared_pool import sweep_stale
from kvbaton.transfer.reach import in_url
from kvbaton.types import LocalError, RemoteError, Role
from kvbaton.workers.process import first_of
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER

MAX_RESTARTS = 6
LONGEST_PAUSE_S = 10.0
STEADY_S = 60.0  # after so long alive, earlier deaths are forgiven
ROLE_VARIABLE = "KVBATON_WORKER_ROLE"
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
    kv_port: int = 0
    kv_address: str = ""  # where peers are sent instead of its hand-off server
    leaving: bool = False  # on its way out of the fleet: not started again
    in_place: bool = False  # its next start takes the ports it has now
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def kind(self) -> str:
        return self.spec.role if self.spec.verb == "worker" else "router"

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.returncode is None else None


class Supervisor:
    def __init__(
        self,
        router: ChildSpec,
        workers: Sequence[ChildSpec],
        key: str,
        tell: Tell,
        make_spec: Callable[[Role, str], ChildSpec] | None = None,
    ) -> None:
        """``make_spec``: role and name to what to start, for workers that join later."""
        self.router = Child(router)
        self.rehearsing = False  # deaths are on purpose: nothing is given up for them
        self._make_spec = make_spec
        self._group: asyncio.TaskGroup | None = None
        self.workers = [Child(spec) for spec in workers]
        self._key = key
        self._tell = tell
        self._came_up = False
        self._died_early = asyncio.Event()
        self._stopping = asyncio.Event()
        self._members_lock = asyncio.Lock()

    @property
    def headers(self) -> dict[str, str]:
        """What opens the router's doors."""
        return {INTERNAL_KEY_HEADER.decode(): self._key}

    @property
    def children(self) -> list[Child]:
        return [self.router, *self.workers]

    async def run(self, ready_timeout_s: float, on_ready: Callable[[], None], stop: asyncio.Event) -> None:
        """Start everything, call ``on_ready`` once the fleet answers, keep it so until ``stop``; ends with all ended.

        Raises LocalError or RemoteError when the fleet does not come up.
        """
        failure: LocalError | RemoteError | None = None
        async with asyncio.TaskGroup() as group:
            self._group = group
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
        while not self._stopping.is_set() and not child.leaving:
            started_s = asyncio.get_running_loop().time()
            process = await self._start(child, group)
            if self._stopping.is_set():
                _signal(child, signal.SIGTERM)
            code = await process.wait()
            child.ready.clear()
            child.ended.set()
            if self._stopping.is_set() or child.leaving:
                return
            if self.rehearsing:
                child.num_deaths = 0
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
                host = in_url(report["host"])
                child.address = f"http://{host}:{report['port']}"
                child.kv_port = report.get("kv_port", 0)
                self._tell(child.spec.name, "ready")
                child.ready.set()
                await self.send_members()
            else:
                self._tell(child.spec.name, str(report.get("message", report["event"])))

    # -- the fleet -----------------------------------------------------------------------------------------------

    async def _all_ready(self, timeout_s: float) -> None:
        """Every child is ready and the router takes requests to every worker."""
        try:
            async with asyncio.timeout(timeout_s):
                for child in self.children:
                    await child.ready.wait()
                await self.send_members()
                self._tell("router", "waiting for the workers to answer it")
                while not await self._router_sees_all():  # noqa: ASYNC110 (it polls them; nobody could wake us)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            late = [child.spec.name for child in self.children if not child.ready.is_set()] or ["the router"]
            raise RemoteError(
                f"not ready within {timeout_s:g} s: {', '.join(late)}", fix=f"see {self.router.spec.log_path.parent}"
            ) from None

    def _why_not(self, dead: Child | None = None) -> LocalError | RemoteError:
        dead = dead or next(child for child in self.children if child.num_deaths)
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

    async def send_members(self) -> None:
        """The router's members are the workers that have an address; it may have lost them in a restart."""
        if not self.router.ready.is_set():
            return
        async with self._members_lock:
            members = [
                MemberSettings(worker.address, worker.spec.role, worker.spec.name, worker.kv_address)
                for worker in self.workers
                if worker.address
            ]
            await self._ask("PUT", "/internal/members", msgspec.json.encode(members))

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any] | None:
        with contextlib.suppress(RemoteError):
            status, answer = await self._call(method, path, body, 5.0)
            return answer if status == 200 else None
        return None

    async def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Of the router. RemoteError when it does not answer."""
        headers = self.headers
        try:
            async with (
                asyncio.timeout(timeout_s),
                aiohttp.ClientSession() as session,
                session.request(method, self.router.address + path, data=body, headers=headers) as response,
            ):
                return response.status, await response.json()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise RemoteError(f"the router did not answer: {error or type(error).__name__}", field="router") from None

    # -- changes while it runs -----------------------------------------------------------------------------------

    async def add(self, role: Role, name: str, timeout_s: float) -> None:
        """One more worker; returns when the router sends requests to it. One that does not come up is gone again."""
        assert self._make_spec is not None and self._group is not None
        child = Child(self._make_spec(role, name))
        self.workers.append(child)
        self._group.create_task(self._keep(child, self._group))
        try:
            async with asyncio.timeout(timeout_s):
                await first_of(child.ready.wait(), child.ended.wait())
                if not child.ready.is_set():
                    raise self._why_not(child)
                await self._until_up(child)
        except (TimeoutError, LocalError, RemoteError) as error:
            child.leaving = True
            self.workers.remove(child)
            _signal(child, signal.SIGKILL)
            await self.send_members()
            if isinstance(error, TimeoutError):
                fix = f"see {child.spec.log_path}"
                raise RemoteError(f"{name} did not come up within {timeout_s:g} s", field="add", fix=fix) from None
            raise

    async def leave(self, child: Child, body: dict[str, Any], patience_s: float) -> None:
        """The router stops sending, the worker ends what is open and then itself; after ``patience_s`` it is ended."""
        child.leaving = True  # first: it may end before the router's answer is here
        try:
            if child.pid is not None:
                await self._change("drain", body)
        except (LocalError, RemoteError):
            child.leaving = False
            raise
        try:
            async with asyncio.timeout(patience_s):
                while child.pid is not None:
                    child.ended.clear()
                    await child.ended.wait()
        except TimeoutError:
            self._tell(child.spec.name, f"did not end within {patience_s:g} s and is ended")
            _signal(child, signal.SIGKILL)
        self.workers.remove(child)
        self._tell(child.spec.name, "has left")
        await self.send_members()
        sweep_stale()

    async def change_role(self, child: Child, role: Role, deadline_s: float, force: bool) -> None:
        """Without a restart. If it dies later it is started again as what it is now."""
        body = {"name": child.spec.name, "role": role, "deadline_s": deadline_s, "force": force}
        await self._change("role", body, deadline_s)
        child.spec = replace(child.spec, role=role, environ={**child.spec.environ, ROLE_VARIABLE: role})
        self._tell(child.spec.name, f"is now {role}")

    async def restart_in_place(self, child: Child, timeout_s: float) -> None:
        """SIGKILL, and another life at the same addresses."""
        child.in_place = True
        child.ready.clear()
        _signal(child, signal.SIGKILL)
        try:
            async with asyncio.timeout(timeout_s):
                await child.ready.wait()
                await self._until_up(child)
        except TimeoutError:
            raise RemoteError(f"{child.spec.name} did not come back within {timeout_s:g} s", field="restart") from None

    async def _change(self, verb: str, body: dict[str, Any], deadline_s: float = 0.0) -> None:
        encoded = msgspec.json.encode(body)
        status, answer = await self._call("POST", f"/internal/members/{verb}", encoded, deadline_s + 30.0)
        if status != 200:
            error = answer.get("error", {})
            raise LocalError(str(error.get("message", f"the router answered {status}")), field=error.get("param"))

    async def _until_up(self, child: Child) -> None:
        while True:
            fleet = await self._ask("GET", "/fleet") or {}
            states = {member["name"]: member["state"] for member in fleet.get("members", [])}
            if states.get(child.spec.name) == "up":
                return
            await asyncio.sleep(0.05)

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
    if child.in_place:
        child.in_place = False  # once: if somebody has taken a port meanwhile, the start after that one is free
        ports = {"KVBATON_WORKER_PORT": child.address.rsplit(":", 1)[1], "KVBATON_WORKER_KV_PORT": str(child.kv_port)}
        return {**child.spec.environ, **ports}
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
