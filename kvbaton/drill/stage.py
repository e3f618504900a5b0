"""Where a scenario plays: the fleet, the traffic, the proxies between workers, the watch, and the notes taken.

Invariants: what a scenario bent is straight again when it is left (proxies healed and out of the way, frozen processes
thawed); every wait has a deadline and says what it waited for. Knows nothing about particular faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kvbaton.bench.fault_proxy import FaultProxy
from kvbaton.drill.fleet import Target
from kvbaton.drill.samples import FleetSeen, Mark, MemberSeen, Sample
from kvbaton.drill.traffic import Traffic
from kvbaton.router.control import Command
from kvbaton.types import KvbatonError, RemoteError
from kvbaton.workers.protocol import WorkerStats

LOOK_EVERY_S = 0.1
PATIENCE_S = 60.0  # of one wait inside a scenario


class Unfinished(Exception):
    """The scenario could not be carried out: what it waited for did not come."""


class Stage:
    def __init__(
        self, target: Target, traffic: Traffic, rng: random.Random, roles: Counter[str], patience: float = 1.0
    ) -> None:
        """``patience``: every wait may be so many times longer, on machines and engines that are slow."""
        self.target = target
        self.traffic = traffic
        self.rng = rng
        self.roles = roles  # of the whole fleet: how many of each
        self.patience = patience
        self.marks: list[Mark] = []
        self.looks: list[FleetSeen] = []
        self.fault_s: float | None = None
        self._frozen: set[str] = set()
        self._ended: set[str] = set()  # lives that are over, whatever the fleet page still says

    @staticmethod
    def now_s() -> float:
        return time.monotonic()

    def note(self, what: str) -> None:
        self.marks.append(Mark(self.now_s(), what))

    def strikes(self, what: str) -> None:
        """The fault happens now. Times count from the first."""
        self.note(what)
        if self.fault_s is None:
            self.fault_s = self.marks[-1].at_s

    # -- looking

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look at the fleet page again and again; the looks are kept."""
        task = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> FleetSeen:
        seen = await self.target.look(self.now_s())
        self.looks.append(seen)
        return seen

    def is_whole(self, seen: FleetSeen) -> bool:
        """As many workers of each role as at the beginning, and all of them take requests."""
        members = (seen.members or {}).values()
        if any(member.incarnation in self._ended for member in members):
            return False
        return Counter(m.role for m in members) == self.roles and all(m.state == "up" for m in members)

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, patience_s: float = PATIENCE_S) -> None:
        patience_s *= self.patience
        try:
            async with asyncio.timeout(patience_s):
                while not await condition():  # noqa: ASYNC110 (nobody could wake us)
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise Unfinished(f"waited {patience_s:g} s in vain: {what}") from None

    async def members(self, *roles: str) -> dict[str, MemberSeen]:
        """Those that take requests now, of these roles or of any."""
        seen = await self.look()
        found = {
            name: member
            for name, member in sorted((seen.members or {}).items())
            if member.state == "up" and (not roles or member.role in roles)
        }
        if not found:
            raise Unfinished(f"no worker of role {' or '.join(roles) or 'any'} takes requests")
        return found

    async def pick(self, *roles: str) -> str:
        return self.rng.choice(list(await self.members(*roles)))

    async def caught(self, names: list[str], condition: Callable[[WorkerStats], bool], what: str) -> str:
        """The first of these workers that is in that condition; asked as fast as it answers, or through the router."""
        status = await self.target.command(Command("status")) if self.target.control_path is not None else None
        urls = {p.name: p.url for p in status.processes if p.name in names} if status is not None else self.target.urls
        held: list[str] = []

        async def one_is() -> bool:
            page = {} if urls else await self.target.reported()
            for name in names:
                info = await self.target.info_at(urls[name]) if name in urls else None
                stats = info.stats if info is not None else page.get(name)
                if stats is not None and condition(stats):
                    held.append(name)
                    return True
            return False

        await self.until(one_is, what)
        return held[0]

    # -- doing

    async def kill(self, name: str) -> None:
        await self.doom(name)
        self.strikes(await self.target.killer.kill(name))

    async def doom(self, name: str) -> None:
        """The present life of that worker is about to end: the fleet is whole again only with another one."""
        seen = (await self.look()).members or {}
        if name in seen:
            self._ended.add(seen[name].incarnation)

    async def freeze(self, name: str) -> None:
        self._frozen.add(name)
        self.strikes(await self.target.killer.freeze(name))

    async def thaw(self, name: str) -> None:
        self.note(await self.target.killer.thaw(name))
        self._frozen.discard(name)

    async def pause(self, low_s: float, high_s: float) -> None:
        """As long as the seed says: faults last, and strike at instants that differ from run to run."""
        await asyncio.sleep(self.rng.uniform(low_s, high_s))

    @asynccontextmanager
    async def through_proxies(self) -> AsyncIterator[dict[str, FaultProxy]]:
        """KV of every prefill worker goes through a proxy; healed and gone afterwards."""
        async with AsyncExitStack() as stack:
            proxies: dict[str, FaultProxy] = {}
            for name in await self.members("prefill", "both"):
                info = await self.target.info(name)
                if info is None or not info.kv_port:
                    raise Unfinished(f"{name} does not say where its hand-off server is")
                host = info.kv_host or "127.0.0.1"
                proxies[name] = await stack.enter_async_context(FaultProxy(host, info.kv_port))
                await self.target.command(
                    Command("reroute", name, kv_address=f"{proxies[name].host}:{proxies[name].port}")
                )
            self.note(f"KV of {', '.join(proxies)} goes through proxies")
            try:
                yield proxies
            finally:
                for name, proxy in proxies.items():
                    proxy.heal()
                    with contextlib.suppress(KvbatonError):  # it may have left meanwhile
                        await self.target.command(Command("reroute", name))
                self.note("the proxies are out of the way")
                await self._settle_proxies(proxies)

    async def _settle_proxies(self, proxies: dict[str, FaultProxy]) -> None:
        """Requests that were sent through them may still be on their way: let those end first."""
        before = self.now_s()

        async def ended() -> bool:
            return all(s >= before for s in self.traffic.open_since_s())

        with contextlib.suppress(Unfinished):
            await self.until(ended, "requests through the proxies to end", 30.0)

    async def carried(self, proxies: dict[str, FaultProxy]) -> None:
        """Until KV has gone through every proxy."""

        async def all_carry() -> bool:
            return all(proxy.to_client.num_bytes > 4096 for proxy in proxies.values())

        await self.until(all_carry, "KV to go through every proxy")

    async def put_right(self) -> None:
        for name in list(self._frozen):
            with contextlib.suppress(RemoteError):
                await self.thaw(name)

    def ask(self, index: int, **how: Any) -> asyncio.Task[Sample]:
        return self.traffic.send("trigger", index, stream=how.pop("stream", True), **how)
