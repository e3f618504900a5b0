"""How an operator's command reaches the process that keeps a fleet on this machine: a socket of that user, one JSON
line there, one back.

Invariants: the socket lies in a directory that only its user can enter, so what comes through it is that user's word;
every wait has a deadline; a socket whose process is gone is removed when it is met.
Knows nothing about what the commands do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from kvbaton.types import UNREADABLE, LocalError, RemoteError, Role

MAX_LINE_BYTES = 1024 * 1024
Verb = Literal["status", "add", "drain", "role", "restart", "reroute", "rehearse"]


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``reroute``, ``restart`` and ``rehearse`` are for drills: they change no worker's work."""

    verb: Verb
    name: str = ""  # of a worker: drain, role, restart, reroute
    role: Role | None = None  # add, role
    deadline_s: float = 60.0
    force: bool = False
    kv_address: str = ""  # reroute: where peers reach its hand-off server; empty: where it listens
    on: bool = False  # rehearse: deaths are on purpose, nothing is given up for them


class Process(msgspec.Struct, frozen=True):
    """One process of the fleet."""

    name: str
    role: str  # router, or a worker's
    pid: int | None  # None: it is being started
    url: str
    kv_port: int = 0
    kv_address: str = ""  # where peers are sent instead of there
    num_deaths: int = 0


class FleetStatus(msgspec.Struct, frozen=True):
    """What the supervisor knows; ``GET /fleet`` of the router says how its members do."""

    pid: int
    url: str
    model: str
    processes: list[Process]
    log_dir: str
    transport: str
    key: str  # the fleet's internal key, for its own user
    engine: str = "embedded"
    join_s: float = 180.0  # a worker that joins may take so long until it serves


class Refusal(msgspec.Struct, frozen=True):
    message: str
    field: str | None = None
    fix: str | None = None


class Reply(msgspec.Struct, frozen=True):
    status: FleetStatus | None = None
    refusal: Refusal | None = None


def directory() -> Path:
    """Where this user's sockets are; made when missing, refused when somebody else could have made it."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    path = base / f"kvbaton-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise LocalError(f"{path} is not a directory of this user alone", field="XDG_RUNTIME_DIR", fix="remove it")
    return path


def socket_path(pid: int) -> Path:
    return directory() / f"up-{pid}.sock"


async def ask(path: Path, command: Command, timeout_s: float) -> FleetStatus:
    """The fleet after the command. LocalError when it was refused, RemoteError when nobody answers."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_LINE_BYTES)
            try:
                writer.write(msgspec.json.encode(command) + b"\n")
                await writer.drain()
                line = await reader.readline()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        reply = msgspec.json.decode(line, type=Reply)
    except TimeoutError:
        raise RemoteError(f"the fleet did not answer within {timeout_s:g} s", field="fleet") from None
    except (OSError, *UNREADABLE, ValueError) as error:
        raise RemoteError(f"no fleet answers at {path}: {error}", field="fleet") from None
    if reply.refusal is not None:
        raise LocalError(reply.refusal.message, field=reply.refusal.field, fix=reply.refusal.fix)
    assert reply.status is not None
    return reply.status


async def running() -> list[tuple[Path, FleetStatus]]:
    """Every fleet of this user on this machine."""
    found = []
    for path in sorted(directory().glob("up-*.sock")):
        try:
            found.append((path, await ask(path, Command("status"), 5.0)))
        except RemoteError:
            if not _alive(path):
                path.unlink(missing_ok=True)
    return found


async def the_one(pid: int | None = None) -> tuple[Path, FleetStatus]:
    """The fleet with that process id, or the only one there is."""
    fleets = [(path, status) for path, status in await running() if pid in (None, status.pid)]
    if len(fleets) == 1:
        return fleets[0]
    if not fleets:
        what = "no fleet of yours runs on this machine" if pid is None else f"no fleet has process id {pid}"
        raise LocalError(what, field="fleet", fix="start one with `kvbaton up`")
    listed = ", ".join(f"{status.pid} ({status.url})" for _, status in fleets)
    raise LocalError(f"several fleets run here: {listed}", field="pid", fix="name one with --pid")


def _alive(path: Path) -> bool:
    with contextlib.suppress(ValueError, OSError):
        os.kill(int(path.stem.removeprefix("up-")), 0)
        return True
    return False
