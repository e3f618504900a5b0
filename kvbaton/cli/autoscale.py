"""``kvbaton up --autoscale``: looks at the fleet, asks the pure decision, adds and drains workers of this machine.

Invariants: a change is a command like an operator's, one at a time; looking goes on while workers start or drain, and
those count as what they are; what cannot be read is unknown and shrinks nothing; a change that failed is told and the
next look decides anew. Knows nothing about how the decision is made (``plan/control``) or processes are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvbaton.cli.autoscale_options import AutoscaleOptions
from kvbaton.cli.fleet_control import FleetControl
from kvbaton.cli.plan_watch import PlanWatch
from kvbaton.cli.supervisor import Supervisor, Tell
from kvbaton.plan.advise import Scrape, parse_metrics
from kvbaton.plan.autoscale_demand import PoolSeen
from kvbaton.plan.autoscale_seen import PoolCounts, Watched, WorkerCounts, look, mean_wait_s
from kvbaton.plan.control import ScalingDecision, ScalingState, decide
from kvbaton.router.control import Command
from kvbaton.types import KvbatonError, LocalError, Role

ANSWER_S = 5.0
DRAIN_S = 120.0
QUIET_S = 60.0  # a reason that stays the same is told again after so long


@dataclass
class Autoscaler:
    supervisor: Supervisor
    control: FleetControl
    options: AutoscaleOptions
    tell: Tell
    plan: PlanWatch | None = None
    _state: ScalingState = field(default_factory=ScalingState)
    _watched: dict[Role, Watched] = field(default_factory=dict)
    _waits: dict[str, tuple[float, float]] = field(default_factory=dict)
    _starting: Counter[Role] = field(default_factory=Counter)
    _joined: set[str] = field(default_factory=set)  # names that the router has seen up
    _leaving: dict[str, Role] = field(default_factory=dict)
    _told: dict[Role, tuple[float, str]] = field(default_factory=dict)

    async def run(self, ready: asyncio.Event, stop: asyncio.Event) -> None:
        """From when the fleet answers until it is to stop. Changes under way are left to the supervisor's end."""
        await ready.wait()
        changes: set[asyncio.Task[None]] = set()
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as http:
                while not stop.is_set():
                    decision = await self._look(http)
                    for command in self._commands(decision):
                        task = asyncio.create_task(self._change(command))
                        changes.add(task)
                        task.add_done_callback(changes.discard)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(self.options.interval_s):
                            await stop.wait()
        finally:
            for task in changes:
                task.cancel()
            await asyncio.gather(*changes, return_exceptions=True)

    # -- seeing ------------------------------------------------------------------------------------------------------

    async def _look(self, http: aiohttp.ClientSession) -> ScalingDecision:
        now_s = asyncio.get_running_loop().time()
        fleet, scrapes = await self._fleet(http), await self._scrapes(http)
        router = scrapes.pop("router", {})
        if self.plan is not None:
            self.plan.look(router, len(self.supervisor.workers), now_s)
        delays = {name: waits for name, each in scrapes.items() if (waits := _waits(each)) is not None}
        # Those that pull are told how long the prefill side let a prompt wait, and export it.
        delay_s = mean_wait_s(delays, self._waits) if delays else None
        self._waits = {**self._waits, **delays}
        seen: dict[Role, PoolSeen] = {}
        for role in self.options.policy.pools:
            counts = self._counts(role, fleet, delay_s if role != "decode" else None)
            self._watched[role], seen[role] = look(counts, self._watched.get(role, Watched()), now_s)
        decision = decide(self.options.policy, seen, self._state, now_s)
        self._state = decision.state
        return decision

    def _counts(self, role: Role, fleet: dict[str, Any] | None, delay_s: float | None) -> PoolCounts:
        members = {each["name"]: each for each in fleet["members"]} if fleet is not None else {}
        workers: dict[str, WorkerCounts | None] = {}
        starting = 0
        for child in self.supervisor.workers:
            name = child.spec.name
            if child.spec.role != role or name in self._leaving or child.leaving:
                continue
            if members.get(name, {}).get("state") == "up":
                self._joined.add(name)
            if name in self._joined:
                workers[name] = _worker(members.get(name))
            else:
                starting += 1
        return PoolCounts(
            workers=workers,
            starting=max(starting, self._starting[role]),  # those ordered wait for one another
            draining=sum(each == role for each in self._leaving.values()),
            unrouted=float(fleet["queued"]) if fleet is not None and role != "prefill" else 0.0,
            queue_delay_s=delay_s,
        )

    async def _fleet(self, http: aiohttp.ClientSession) -> dict[str, Any] | None:
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
            url, headers = self.supervisor.router.address + "/fleet", self.supervisor.headers
            async with http.get(url, headers=headers) as answer:
                found: dict[str, Any] = await answer.json()
                return found
        return None

    async def _scrapes(self, http: aiohttp.ClientSession) -> dict[str, Scrape]:
        """The router's metrics, and those of the workers that decode."""
        asked = [child for child in self.supervisor.children if child.kind != "prefill" and child.address]

        async def one(url: str) -> Scrape | None:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError, LocalError):
                async with http.get(url + "/metrics", headers=self.supervisor.headers) as answer:
                    return parse_metrics(await answer.text())
            return None

        answers = await asyncio.gather(*(one(child.address) for child in asked))
        return {child.spec.name: each for child, each in zip(asked, answers, strict=True) if each is not None}

    # -- changing ----------------------------------------------------------------------------------------------------

    def _commands(self, decision: ScalingDecision) -> list[Command]:
        now_s, commands = asyncio.get_running_loop().time(), []
        for role, each in decision.pools.items():
            about = f"{each.target} {role} wanted: {each.reason}"
            if each.add or each.drain:
                self.tell("autoscale", about)
            elif not each.known:
                told_s, told = self._told.get(role, (now_s - QUIET_S, ""))
                if told != each.reason or now_s - told_s >= QUIET_S:
                    self.tell("autoscale", f"{role} keeps its workers: {each.reason}")
                    self._told[role] = (now_s, each.reason)
            for _ in range(each.add):
                self._starting[role] += 1
                commands.append(Command("add", role=role))
            for _ in range(each.drain):
                if (name := self._idlest(role)) is not None:
                    self._leaving[name] = role
                    commands.append(Command("drain", name, role, DRAIN_S))
        return commands

    def _idlest(self, role: Role) -> str | None:
        """Of those that may go, the one with the least running."""
        before = self._watched[role].before
        free = [name for name in before if name not in self._leaving]
        return min(free, key=lambda name: (before[name].running + before[name].waiting, name), default=None)

    async def _change(self, command: Command) -> None:
        assert command.role is not None
        try:
            await self.control.change(command)
        except KvbatonError as error:
            self.tell("autoscale", f"{command.verb} {command.name or command.role} failed: {error}")
        finally:
            if command.verb == "add":
                self._starting[command.role] -= 1
            else:
                self._leaving.pop(command.name, None)


def _worker(member: dict[str, Any] | None) -> WorkerCounts | None:
    stats = member["stats"] if member is not None and member["state"] == "up" else None
    if stats is None:
        return None
    return WorkerCounts(
        waiting_prompt_tokens=stats["waiting_prompt_tokens"],
        running=stats["num_running"],
        waiting=stats["num_waiting"],
        receiving=max(0, stats["num_active"] - stats["num_running"] - stats["num_waiting"]),
        num_blocks=stats["num_blocks"],
        num_blocks_free=stats["num_blocks_free"],
        computed_tokens=stats["num_prompt_tokens"],
        prefill_busy_s=stats["prefill_busy_s"],
    )


def _waits(scrape: Scrape) -> tuple[float, float] | None:
    """(sum, number) of the waits for a first step elsewhere, or here where there is one pool."""
    totals = []
    for suffix in ("_sum", "_count"):
        series = scrape.get("kvbaton_worker_queue_seconds" + suffix, {})
        totals.append(sum(value for labels, value in series.items()
                          if ("path", "remote") in labels or ("role", "both") in labels))  # fmt: skip
    return (totals[0], totals[1])
