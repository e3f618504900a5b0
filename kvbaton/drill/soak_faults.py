"""What a soak breaks, in an order that its seed decides, while its load goes on.

Every fault ends before the next begins; each kind comes once before any comes again. Invariants: what was bent is
straight again when a fault is over; a fault that could not be carried out is told as such and counts for nothing.
Knows nothing about what becomes of requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

from kvbaton.bench.fault_proxy import FaultProxy
from kvbaton.drill.soak_load import TraceLoad
from kvbaton.drill.stage import Stage, Unfinished
from kvbaton.router.control import Command
from kvbaton.types import KvbatonError, Role

LONGEST_S = 240.0  # of one fault, beginning to end
DRAIN_S = 30.0
ROUTER_KILLED = "router killed"
ROUTER_SHARE = 0.25  # of the run; later its memory is to be watched in one life


class Faults:
    def __init__(self, stage: Stage, load: TraceLoad, rng: Random, tell: Callable[[str], None]) -> None:
        self.struck: Counter[str] = Counter()
        self.not_carried_out: list[str] = []
        self.router_down: list[tuple[float, float]] = []  # from when to when its connections may have broken
        self.num_joined_by_us = self.num_left_by_us = 0
        self._stage, self._load, self._rng, self._tell = stage, load, rng, tell
        self._deck: list[str] = []
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "worker killed": self._kill,
            "worker restarted in place": self._restart,
            "worker frozen": self._freeze,
            "clients hang up": self._hang_up,
            "slow way between workers": self._slow,
            "way between workers broken": self._broken_way,
            "rolling drain": self._roll,
        }

    async def run(self, lasts_s: float, every_s: float) -> None:
        """Until the time is up; the router dies once, early."""
        began_s = self._stage.now_s()
        router_died = False
        while (gone_s := self._stage.now_s() - began_s) < lasts_s:
            pause_s = every_s * self._rng.uniform(0.5, 1.5)
            await asyncio.sleep(min(pause_s, lasts_s - gone_s))
            if self._stage.now_s() - began_s >= lasts_s:
                return
            if not router_died and self._stage.now_s() - began_s > lasts_s * ROUTER_SHARE * 0.5:
                router_died = True
                await self._carry_out(ROUTER_KILLED, self._kill_router)
                continue
            kind = self._next()
            await self._carry_out(kind, self._kinds[kind])

    @property
    def never_struck(self) -> list[str]:
        return [kind for kind in (*self._kinds, ROUTER_KILLED) if not self.struck[kind]]

    def _next(self) -> str:
        if not self._deck:
            self._deck = list(self._kinds)
            self._rng.shuffle(self._deck)
        return self._deck.pop()

    async def _carry_out(self, kind: str, act: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(LONGEST_S):
                await act()
        except (Unfinished, KvbatonError, TimeoutError) as error:
            self.not_carried_out.append(f"{kind}: {error or type(error).__name__}")
            self._tell(f"{kind}: not carried out: {error or type(error).__name__}")
        else:
            self.struck[kind] += 1
            self._tell(kind)
        finally:
            await self._stage.put_right()

    # -- processes

    async def _kill(self) -> None:
        await self._stage.kill(await self._stage.pick())

    async def _restart(self) -> None:
        name = await self._stage.pick()
        await self._stage.doom(name)
        await self._stage.target.command(Command("restart", name))

    async def _freeze(self) -> None:
        name = await self._stage.pick()
        await self._stage.freeze(name)
        await self._stage.pause(2.0, 9.0)
        await self._stage.thaw(name)

    async def _kill_router(self) -> None:
        from_s = self._stage.now_s()
        await self._stage.kill("router")

        async def back() -> bool:
            page = await self._stage.target.page()
            return page is not None and any(member["state"] == "up" for member in page["members"])

        try:
            await self._stage.until(back, "the router to be back")
        finally:
            self.router_down.append((from_s, self._stage.now_s()))

    # -- clients

    async def _hang_up(self) -> None:
        self._load.burst(self._rng, self._rng.randint(6, 16))
        await self._stage.pause(2.0, 2.5)

    # -- the way between workers

    async def _slow(self) -> None:
        async with self._stage.through_proxies() as proxies:
            for proxy in proxies.values():
                for path in (proxy.to_server, proxy.to_client):
                    path.delay_s = self._rng.uniform(0.0, 0.05)
                proxy.to_client.bytes_per_s = self._rng.uniform(1e6, 20e6)
            await self._until_used(proxies)
            await self._stage.pause(5.0, 10.0)

    async def _broken_way(self) -> None:
        async with self._stage.through_proxies() as proxies:
            await self._until_used(proxies)
            proxy = proxies[self._rng.choice(sorted(proxies))]
            path, after_bytes = proxy.to_client, self._rng.randint(1, 100_000)
            match self._rng.randrange(4):
                case 0:
                    path.cut_after_bytes = after_bytes
                case 1:
                    path.corrupt_after_bytes = after_bytes
                case 2:
                    path.stall_after_bytes = after_bytes
                case _:
                    proxy.partition(self._rng.choice(("to_server", "to_client")))
            await self._stage.pause(3.0, 8.0)

    async def _until_used(self, proxies: dict[str, FaultProxy]) -> None:
        async def used() -> bool:
            return any(proxy.to_client.num_bytes > 4096 for proxy in proxies.values())

        await self._stage.until(used, "KV to go through a proxy", 30.0)

    # -- the fleet

    async def _roll(self) -> None:
        """A new worker for each of one pool that was there, and then the old one leaves: a rollout."""
        role: Role = self._rng.choice(("prefill", "decode"))
        for name in list(await self._stage.members(role)):
            await self._stage.target.command(Command("add", role=role))
            self.num_joined_by_us += 1
            await self._stage.target.command(Command("drain", name, deadline_s=DRAIN_S))
            self.num_left_by_us += 1
