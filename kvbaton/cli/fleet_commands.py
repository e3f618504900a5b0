"""``kvbaton fleet``: change a fleet while it serves, and see what it is now.

Reaches the fleet that ``kvbaton up`` keeps on this machine through its socket, or any router by ``--url`` and the
fleet's key. Returns when the change is done. Exit codes: 0 done; 1 nobody answered; 2 refused, with the reason.
Knows nothing about how a change is carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import click

from kvbaton.config import INTERNAL_KEY_VARIABLE, internal_key
from kvbaton.router import control
from kvbaton.router.control import Command
from kvbaton.types import LocalError, RemoteError, Role
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER

ROLES = click.Choice(["prefill", "decode", "both"])
ANSWER_S = 10.0
PATIENCE_S = 240.0  # beyond the deadline of the change itself, and what a worker may take to start


def _where(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--json", "as_json", is_flag=True, help="Machine-readable.")(command)
    command = click.option("--pid", type=int, help="Process id of `kvbaton up`, when several fleets run here.")(command)
    return click.option("--url", help="A router, instead of the fleet on this machine; the key is in the environment.")(
        command
    )


def _deadline(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--force", is_flag=True, help="Even if nobody is left to take requests.")(command)
    return click.option(
        "--deadline-s", type=click.FloatRange(0), default=60.0, show_default=True, help="For open work to end."
    )(command)


@click.group("fleet")
def fleet_command() -> None:
    """Change a running fleet: workers join, drain, leave, or become another role. No request fails for it."""


@fleet_command.command("status")
@_where
def status(url: str | None, pid: int | None, as_json: bool) -> int:
    """Members, their roles, states and load."""
    return asyncio.run(_show(Reached(url, pid), as_json))


@fleet_command.command("add")
@click.option("--role", type=ROLES, required=True)
@click.option("--count", type=click.IntRange(1), default=1, show_default=True)
@click.option("--worker-url", help="With --url: the address of a worker that runs already.")
@click.option("--name", help="With --url: its name in logs and metrics.")
@_where
def add(role: Role, count: int, worker_url: str | None, name: str | None, **where: Any) -> int:
    """Start more workers beside those there are; returns when requests go to them."""

    async def change(fleet: Reached) -> None:
        if fleet.url is not None:
            if not worker_url or not name:
                raise LocalError("a router starts no workers", field="worker_url", fix="give --worker-url and --name")
            await fleet.post("add", {"url": worker_url, "role": role, "name": name}, ANSWER_S)
            await fleet.until(lambda members: members.get(name, {}).get("state") == "up", PATIENCE_S, f"{name} up")
            return
        for _ in range(count):
            await fleet.command(Command("add", role=role), PATIENCE_S)

    return _change(change, where)


@fleet_command.command("drain")
@click.argument("name")
@_deadline
@_where
def drain(name: str, deadline_s: float, force: bool, **where: Any) -> int:
    """NAME takes nothing new from now on, finishes what is open, ends, and leaves the fleet.

    A prefill worker stays until its offered blocks are read, a decode worker until its streams end, both at most
    --deadline-s; what is then still open is cut off.
    """
    return _change(lambda fleet: fleet.leave(name, deadline_s, force), where)


@fleet_command.command("remove")
@click.argument("name")
@click.option("--force", is_flag=True, help="Even if nobody is left to take requests.")
@_where
def remove(name: str, force: bool, **where: Any) -> int:
    """NAME leaves at once: a drain whose deadline is now."""
    return _change(lambda fleet: fleet.leave(name, 0.0, force), where)


@fleet_command.command("role")
@click.argument("name")
@click.argument("role", type=ROLES)
@_deadline
@_where
def role(name: str, role: Role, deadline_s: float, force: bool, **where: Any) -> int:
    """NAME becomes ROLE without a restart: nothing new is sent to it, its open work ends, then it changes.

    When its work has not ended by the deadline it stays what it was, and nothing is cut off.
    """

    async def change(fleet: Reached) -> None:
        if fleet.url is None:
            await fleet.command(Command("role", name, role, deadline_s, force), deadline_s + PATIENCE_S)
        else:
            body = {"name": name, "role": role, "deadline_s": deadline_s, "force": force}
            await fleet.post("role", body, deadline_s + PATIENCE_S)

    return _change(change, where)


def _change(change: Callable[[Reached], Any], where: dict[str, Any]) -> int:
    async def main() -> int:
        fleet = Reached(where["url"], where["pid"])
        await change(fleet)
        return await _show(fleet, where["as_json"])

    return asyncio.run(main())


async def _show(fleet: Reached, as_json: bool) -> int:
    found = await fleet.describe()
    if as_json:
        click.echo(json.dumps(found))
        return 0
    click.echo(f"{found['url']}  {found['model']}  {found['state']}")
    for member in found["members"]:
        stats = member["stats"] or {}
        click.echo(
            f"  {member['name']:<14}{member['role']:<9}{member['state']:<10}"
            f"{stats.get('num_active', '?'):>5} requests {stats.get('num_blocks_used', '?'):>7} blocks used "
            f"{stats.get('num_leases', '?'):>4} leases  pid {member.get('pid') or '?'}  {member['reason']}"
        )
    return 0


@dataclass
class Reached:
    """The fleet a command is for: by its socket, or by its router alone."""

    url: str | None
    pid: int | None

    async def command(self, command: Command, timeout_s: float) -> control.FleetStatus:
        path, status = await control.the_one(self.pid)
        return await control.ask(path, command, timeout_s + status.join_s)

    async def leave(self, name: str, deadline_s: float, force: bool) -> None:
        if self.url is None:
            command = Command("drain", name, deadline_s=deadline_s, force=force)
            await self.command(command, deadline_s + PATIENCE_S)
            return
        await self.post("drain", {"name": name, "deadline_s": deadline_s, "force": force}, PATIENCE_S)
        await self.until(
            lambda members: members.get(name, {}).get("state", "down") == "down",
            deadline_s + PATIENCE_S,
            f"{name} down",
        )
        await self.post("remove", {"name": name}, ANSWER_S)

    async def describe(self) -> dict[str, Any]:
        """What the router says, with what the supervisor knows of the processes."""
        if self.url is not None:
            return {"url": self.url, **await self._get(self.url)}
        _, status = await control.the_one(self.pid)
        told = await self._get(status.url, status.key)
        found = {"url": status.url, "pid": status.pid, "log_dir": status.log_dir, **told}
        processes = {process.name: process for process in status.processes}
        for member in found["members"]:
            process = processes.get(member["name"])
            member["pid"], member["url"] = (process.pid, process.url) if process is not None else (None, None)
        return found

    async def until(self, condition: Callable[[dict[str, Any]], bool], timeout_s: float, what: str) -> None:
        assert self.url is not None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    with contextlib.suppress(RemoteError):
                        fleet = await self._get(self.url)
                        if condition({member["name"]: member for member in fleet["members"]}):
                            return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise RemoteError(f"not {what} within {timeout_s:g} s", field="deadline_s") from None

    async def post(self, verb: str, body: dict[str, Any], timeout_s: float) -> None:
        key = internal_key()
        if not key:
            raise LocalError("there is no internal key", field=INTERNAL_KEY_VARIABLE, fix="set the fleet's")
        headers = {INTERNAL_KEY_HEADER.decode(): key}
        status, answer = await _http("POST", f"{self.url}/internal/members/{verb}", timeout_s, body, headers)
        if status != 200:
            error = answer.get("error", {})
            raise LocalError(str(error.get("message", f"the router answered {status}")), field=error.get("param"))

    async def _get(self, url: str, key: str = "") -> dict[str, Any]:
        key = key or internal_key()
        headers = {INTERNAL_KEY_HEADER.decode(): key} if key else None
        status, answer = await _http("GET", f"{url}/fleet", ANSWER_S, headers=headers)
        if status != 200:
            raise RemoteError(f"{url}/fleet answered {status}", field="url")
        return answer


async def _http(
    method: str, url: str, timeout_s: float, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, url, json=body, headers=headers) as response,
        ):
            return response.status, await response.json()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise RemoteError(f"no answer from {url}: {error or type(error).__name__}", field="url") from None
