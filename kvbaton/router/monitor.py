"""Looks at every member again and again, and tells the registry what it saw; and follows what each says of its cache.

Invariants: tasks of its own for each member, so a member that hangs delays nobody's poll; every poll has a deadline.
Knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec

from kvbaton.config import RouterSettings
from kvbaton.observe.metrics import Metrics
from kvbaton.router.kv_follow import KVFollower
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.router.registry import Member, Registry
from kvbaton.types import UNREADABLE
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER, WorkerInfo

log = logging.getLogger(__name__)
_DECODER = msgspec.json.Decoder(WorkerInfo)
_MAX_INFO_BYTES = 64 * 1024


class Monitor:
    def __init__(
        self,
        registry: Registry,
        index: PrefixIndex,
        session: aiohttp.ClientSession,
        settings: RouterSettings,
        key: str,
        metrics: Metrics,
    ) -> None:
        self._registry = registry
        self._index = index
        self._metrics = metrics
        self._session = session
        self._settings = settings
        self._headers = {INTERNAL_KEY_HEADER.decode(): key} if key else {}

    async def run(self) -> None:
        """Until cancelled. Members that join get a task, those that left lose theirs."""
        tasks: dict[Member, tuple[asyncio.Task[None], ...]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                members = self._registry.members
                for member in (each for each in members if each not in tasks):
                    follower = self.follower(member)
                    tasks[member] = (group.create_task(self._watch(member)), group.create_task(follower.run()))
                for member in [each for each in tasks if each not in members]:
                    for task in tasks.pop(member):
                        task.cancel()
                await asyncio.sleep(self._settings.poll_interval_s)

    def follower(self, member: Member) -> KVFollower:
        return KVFollower(member, self._index, self._session, self._settings, self._headers, self._metrics)

    async def _watch(self, member: Member) -> None:
        while True:
            before, why = member.state, member.reason
            await self.poll(member)
            if member.state != before or (member.state == "up" and member.reason not in (why, "answers")):
                log.warning("worker %s: %s, was %s: %s", member.name, member.state, before, member.reason)
            await asyncio.sleep(self._settings.poll_interval_s)

    async def poll(self, member: Member) -> None:
        """One look."""
        try:
            async with (
                asyncio.timeout(self._settings.poll_timeout_s),
                self._session.get(
                    f"{member.settings.url}/internal/info", headers=self._headers, allow_redirects=False
                ) as response,
            ):
                raw = await response.content.read(_MAX_INFO_BYTES)
                if response.status != 200:
                    cause = f"answers {response.status}"
                    cause += ": the internal keys differ" if response.status == 403 else ""
                    self._registry.poll_failed(member, cause, unreachable=response.status == 403)
                    return
            self._registry.answered(member, _DECODER.decode(raw))
        except aiohttp.ClientConnectorError as error:
            self._registry.poll_failed(member, f"cannot be reached: {error.os_error.strerror}", unreachable=True)
        except TimeoutError:
            self._registry.poll_failed(member, "does not answer polls in time", unreachable=False)
        except (aiohttp.ClientError, OSError) as error:
            self._registry.poll_failed(member, f"{type(error).__name__}: {error}", unreachable=False)
        except UNREADABLE as error:
            self._registry.poll_failed(member, f"its answer makes no sense: {error}", unreachable=True)
