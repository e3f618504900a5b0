"""Changes of the fleet while it serves: a worker joins, drains, leaves, or becomes another role.

Invariants: from the moment a change begins nothing new is sent to the worker; it is told only when what was sent is
known to have reached it; a role that could not be changed leaves the worker as it was; the last worker that takes
requests is not taken away unless forced. Knows nothing about processes: whoever started a worker ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import replace

import aiohttp
import msgspec

from kvbaton.clock import Clock
from kvbaton.config import MemberSettings
from kvbaton.router.registry import Member, Registry
from kvbaton.types import UNREADABLE, LocalError, Role
from kvbaton.workers.openai_errors import ApiError, bad_request, not_found_member
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER, WorkerInfo

log = logging.getLogger(__name__)
# A hand-off begins within moments of its dispatch. What takes longer has begun, and the worker itself waits for it.
ON_THE_WAY_S = 2.0
CALL_S = 10.0  # beyond the deadline of the change itself


class Leave(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``drain``: finish what is open, at most so long, then end."""

    name: str
    deadline_s: float = 60.0
    force: bool = False  # even if nobody is left to take requests


class NewRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``role``."""

    name: str
    role: Role
    deadline_s: float = 60.0
    force: bool = False


class Forget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``remove``: it is no member any more. The worker hears nothing of it."""

    name: str


class FleetChanges:
    def __init__(self, registry: Registry, key: str, clock: Clock) -> None:
        self._registry = registry
        self._headers = {INTERNAL_KEY_HEADER.decode(): key}
        self._clock = clock

    async def carry_out(self, verb: str, raw: bytes) -> None:
        """Returns when it is done, for a drain when the worker has been told. Raises ApiError."""
        try:
            match verb:
                case "add":
                    self._add(msgspec.json.decode(raw, type=MemberSettings))
                case "remove":
                    self._remove(msgspec.json.decode(raw, type=Forget))
                case "drain":
                    await self._drain(msgspec.json.decode(raw, type=Leave))
                case "role":
                    await self._role(msgspec.json.decode(raw, type=NewRole))
                case _:
                    raise ApiError(404, f"no such change: {verb[:40]!r}", code="not_found")
        except (*UNREADABLE, LocalError) as error:
            raise bad_request(str(error), verb) from None

    def _add(self, settings: MemberSettings) -> None:
        if self._registry.get(settings.name) is not None:
            raise ApiError(409, f"there is a member {settings.name!r} already", param="name", code="name_taken")
        self._registry.set_members([*self._settings(), settings])

    def _remove(self, change: Forget) -> None:
        self._member(change.name)
        self._registry.set_members([settings for settings in self._settings() if settings.name != change.name])

    async def _drain(self, change: Leave) -> None:
        member = self._begin(change.name, "told to drain", change.force)
        deadline_s = self._clock.now_s() + change.deadline_s
        await self._arrived(member, change.deadline_s)
        body = {"deadline_s": max(0.0, deadline_s - self._clock.now_s())}
        status, raw = await self._tell(member, "/internal/drain", body, CALL_S)
        if status != 202:
            self._registry.let_go(member)
            raise self._refused(member, status, raw)

    async def _role(self, change: NewRole) -> None:
        member = self._member(change.name)
        if member.role == change.role:
            return
        self._begin(change.name, f"becomes {change.role}", change.force)
        deadline_s = self._clock.now_s() + change.deadline_s
        try:
            await self._arrived(member, change.deadline_s)
            body = {"role": change.role, "deadline_s": max(0.0, deadline_s - self._clock.now_s())}
            status, raw = await self._tell(member, "/internal/role", body, change.deadline_s + CALL_S)
        finally:
            self._registry.let_go(member)
        if status != 200:
            raise self._refused(member, status, raw)
        with contextlib.suppress(*UNREADABLE):  # else the next poll tells
            self._registry.answered(member, msgspec.json.decode(raw, type=WorkerInfo))
        log.warning("worker %s is now %s", member.name, member.role)

    # -- parts of a change

    def _member(self, name: str) -> Member:
        member = self._registry.get(name)
        if member is None:
            raise not_found_member(name, [known.name for known in self._registry.members])
        return member

    def _begin(self, name: str, why: str, force: bool) -> Member:
        member = self._member(name)
        if member.held_back:
            raise ApiError(409, f"{name} {member.held_back} already", param="name", code="change_in_progress")
        if not force and not self._registry.usable(self._clock.now_s(), frozenset((name,))):
            fix = "add another first, or force it"
            raise ApiError(409, f"{name} is the last worker that takes requests; {fix}", param="name", code="last_one")
        self._registry.hold_back(member, why)
        return member

    async def _arrived(self, member: Member, deadline_s: float) -> None:
        """Wait until every prompt sent there has reached it."""
        if member.role == "decode":
            return  # it refuses what comes too late, and that goes elsewhere
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(ON_THE_WAY_S, deadline_s)):
                while member.prompts_on_the_way:  # noqa: ASYNC110 (the registry is pure: it wakes nobody)
                    await asyncio.sleep(0.02)

    async def _tell(self, member: Member, path: str, body: Mapping[str, object], timeout_s: float) -> tuple[int, bytes]:
        """Status and body; status 0 when there was no answer."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = member.settings.url + path
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(url, json=body, headers=self._headers, allow_redirects=False) as response,
            ):
                return response.status, await response.content.read(64 * 1024)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return 0, f"{type(error).__name__}: {error}".encode()

    def _refused(self, member: Member, status: int, raw: bytes) -> ApiError:
        """The worker's own words where it had some."""
        try:
            error = msgspec.json.decode(raw)["error"]
            return ApiError(409, f"{member.name}: {error['message']}", param=error["param"], code=error["code"])
        except (*UNREADABLE, KeyError, TypeError):
            what = f"answered {status}" if status else f"did not answer: {raw.decode('utf-8', 'replace')[:200]}"
            return ApiError(502, f"{member.name} {what}", type="server_error", code="worker_error")

    def _settings(self) -> list[MemberSettings]:
        return [replace(member.settings) for member in self._registry.members]
