"""The operator's side of ``kvbaton up``: listens on the fleet's socket and carries out what it is asked.

Invariants: one change at a time; a command is answered when it is done, with the fleet as it then is, or with why not;
a worker that was asked to leave is not started again, one that was given another role keeps it when it is.
Knows nothing about how processes are kept (``supervisor``) or what members do (``router/changes``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from kvbaton.cli.supervisor import Child, Supervisor
from kvbaton.router import control
from kvbaton.router.control import Command, FleetStatus, Process, Refusal, Reply
from kvbaton.types import UNREADABLE, KvbatonError, LocalError, Role

READ_S = 10.0
EXIT_GRACE_S = 20.0  # after its deadline a worker that drains has ended, or is ended
JOIN_S = 180.0


class FleetControl:
    def __init__(
        self,
        supervisor: Supervisor,
        about: Callable[[list[Process]], FleetStatus],
        count: dict[str, int],
        join_s: float = JOIN_S,
    ) -> None:
        self._supervisor = supervisor
        self._about = about
        self._count = count  # workers named so far, by role
        self._join_s = join_s
        self._changing = asyncio.Lock()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Path]:
        path = control.socket_path(os.getpid())
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._serve, str(path), limit=control.MAX_LINE_BYTES)
        path.chmod(0o600)  # its directory lets nobody else in either
        try:
            yield path
        finally:
            server.close()
            path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            try:
                reply = await self._answer(reader)
                writer.write(msgspec.json.encode(reply) + b"\n")
                await writer.drain()
            finally:
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> Reply:
        try:
            async with asyncio.timeout(READ_S):
                line = await reader.readline()
            command = msgspec.json.decode(line, type=Command)
            if command.verb == "status":
                return Reply(self.status())
            await self.change(command)
            return Reply(self.status())
        except KvbatonError as error:
            return Reply(refusal=Refusal(error.message, error.field, error.fix))
        except (*UNREADABLE, ValueError, TimeoutError) as error:
            return Reply(refusal=Refusal(f"not a command: {error}"))

    async def change(self, command: Command) -> None:
        """Carry it out, after the change that is under way. KvbatonError: it was not."""
        async with self._changing:
            await self._carry_out(command)

    def status(self) -> FleetStatus:
        return self._about(
            [
                Process(
                    child.spec.name,
                    child.kind,
                    child.pid,
                    child.address,
                    child.kv_port,
                    child.kv_address,
                    child.num_deaths,
                )
                for child in self._supervisor.children
            ]
        )

    async def _carry_out(self, command: Command) -> None:
        supervisor = self._supervisor
        match command.verb:
            case "add":
                await supervisor.add(self._role(command), self._next_name(self._role(command)), self._join_s)
            case "drain":
                child = self._worker(command.name)
                body = {"name": child.spec.name, "deadline_s": command.deadline_s, "force": command.force}
                await supervisor.leave(child, body, command.deadline_s + EXIT_GRACE_S)
            case "role":
                await supervisor.change_role(
                    self._worker(command.name), self._role(command), command.deadline_s, command.force
                )
            case "restart":
                await supervisor.restart_in_place(self._worker(command.name), self._join_s)
            case "reroute":
                self._worker(command.name).kv_address = command.kv_address
                await supervisor.send_members()
            case "rehearse":
                supervisor.rehearsing = command.on

    def _next_name(self, role: Role) -> str:
        """Never one that was used before: a name in a log or a metric means one worker."""
        number = self._count.get(role, 0)
        self._count[role] = number + 1
        return f"{role}-{number}"

    def _worker(self, name: str) -> Child:
        for child in self._supervisor.workers:
            if child.spec.name == name:
                return child
        known = ", ".join(child.spec.name for child in self._supervisor.workers)
        raise LocalError(f"there is no worker {name!r}", field="name", fix=f"one of {known}")

    @staticmethod
    def _role(command: Command) -> Role:
        if command.role is None:
            raise LocalError("the command names no role", field="role", fix="prefill, decode or both")
        return command.role
