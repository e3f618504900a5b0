"""Runs of scenarios against one fleet: traffic on, fault, recovery, traffic off, verdict.

Invariants: answers are recorded on the healthy fleet before anything is broken; between two scenarios the fleet is
whole and holds nothing, or the drill ends there; the same seed breaks the same things in the same order.
Knows nothing about reports.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from kvbaton.bench.samples import versions
from kvbaton.drill.fleet import Target
from kvbaton.drill.samples import FleetSeen, Story
from kvbaton.drill.scenarios import CONTROL, FREEZE, KILL, NEEDS, ROUTER, SPARE, SPLIT, WIRE, Scenario
from kvbaton.drill.stage import Stage, Unfinished
from kvbaton.drill.traffic import CANARY_EVERY_S, Traffic, make_prompts
from kvbaton.drill.verdict import Result, judge, skipped
from kvbaton.kv.shared_pool import SHM_DIR, segment_name
from kvbaton.router.control import Command
from kvbaton.types import KvbatonError, RemoteError

FIRST_LOOK_S = 10.0
STEADY_CANARIES = 3  # right ones in a row before the fault, and after recovery
STEADY_S = 45.0
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    num_runs: int = 1
    per_run: int = 0  # scenarios in one run; 0: all
    rate_per_s: float = 4.0
    deadline_s: float = 90.0  # of one request; one that takes longer hangs
    longest_prompt_chars: int = 2400
    max_tokens: int = 32
    long_answer_tokens: int = 160
    settle_s: float = 60.0  # until nothing is held any more; longer than a lease
    heal_s: float = 90.0  # for the fleet to be whole again; workers of some engines take minutes to start
    patience: float = 1.0  # what multiplies every other wait
    canary_every_s: float = CANARY_EVERY_S


class DrillRecord(msgspec.Struct, frozen=True):
    """All of a drill."""

    settings: dict[str, float]
    fleet: dict[str, int]  # workers by role
    transport: str  # what KV goes over
    results: list[Result]
    doubtful: list[str]  # prompts that even the healthy fleet answers in two ways
    stopped: str = ""  # why it ended before its time
    machine: dict[str, str] = {}

    @property
    def done(self) -> list[Result]:
        """What was rehearsed."""
        return [result for result in self.results if not result.skipped]

    @property
    def passed(self) -> bool:
        good = all(result.passed for result in self.done) and not self.nothing_moved
        return bool(self.done) and good and not self.stopped and not self.doubtful

    @property
    def nothing_moved(self) -> bool:
        """Two pools, and no KV went from one to the other: whatever was rehearsed, it was not their hand-off."""
        split = bool(self.fleet.get("prefill") and self.fleet.get("decode"))
        return split and bool(self.done) and not any(result.moved_bytes for result in self.done)


async def drill(
    target: Target,
    scenarios: Sequence[Scenario],
    settings: Settings,
    tell: Tell,
    keep: Callable[[DrillRecord], None] = lambda record: None,
) -> DrillRecord:
    """``keep`` gets what there is after each rehearsal, as the record of a drill that was cut there."""
    first = await whole_at_first(target)
    roles = Counter(member.role for member in (first.members or {}).values())
    lacking = _lacking(target, roles)
    prompts = make_prompts(
        settings.seed, 10, min(settings.longest_prompt_chars, (await target.max_context()) // 2), settings.max_tokens
    )
    prompts[-1] = msgspec.structs.replace(prompts[-1], text=prompts[1].text, max_tokens=settings.long_answer_tokens)
    prompts[-2] = msgspec.structs.replace(max(prompts, key=lambda prompt: len(prompt.text)), max_tokens=16)
    results: list[Result] = []
    stopped = ""
    numbers = {name: getattr(settings, name) for name in settings.__dataclass_fields__}

    def record(why: str) -> DrillRecord:
        known = dict(sorted(roles.items()))
        return DrillRecord(numbers, known, target.wire, [*results], doubtful, why, machine_of_the_drill())

    deadline_s = settings.deadline_s * settings.patience
    async with Traffic(target.url, prompts, Stage.now_s, deadline_s, target.client_headers) as traffic:
        doubtful = await traffic.learn()
        if target.control_path is not None:
            await target.command(Command("rehearse", on=True))
        try:
            for run, scenario in _schedule(scenarios, settings):
                seed = f"{settings.seed}-{run}-{scenario.name}"
                missing = sorted(scenario.needs & lacking)
                if missing:
                    results.append(skipped(scenario.name, run, seed, NEEDS[missing[0]]))
                    continue
                stage = Stage(target, traffic, random.Random(seed), roles, settings.patience)
                results.append(await rehearse(stage, scenario, run, seed, settings))
                tell(_line(results[-1], settings.num_runs))
                keep(record("the drill was cut before its end"))
                if not stage.is_whole(await stage.look()):
                    stopped = f"after {scenario.name} in run {run} the fleet did not become whole again"
                    break
        finally:
            if target.control_path is not None:
                with suppress(KvbatonError):
                    await target.command(Command("rehearse", on=False))
    return record(stopped)


def machine_of_the_drill() -> dict[str, str]:
    cores = str(len(os.sched_getaffinity(0)))
    return {**versions(), "cores": cores, "ended": datetime.now(UTC).isoformat(timespec="seconds")}


async def rehearse(stage: Stage, scenario: Scenario, run: int, seed: str, settings: Settings) -> Result:
    traffic, begun_s, problem = stage.traffic, stage.now_s(), ""
    await stage.look()
    traffic.begin(stage.rng, settings.rate_per_s, settings.canary_every_s)
    async with stage.watching():
        try:
            await _canaries(stage, begun_s)
            async with asyncio.timeout(4 * settings.heal_s * settings.patience):
                await scenario.act(stage)
        except (Unfinished, KvbatonError, TimeoutError) as error:
            problem = f"not carried out: {error or type(error).__name__}"
        finally:
            await stage.put_right()
        whole_s = await _healed(stage, settings.heal_s)
        with suppress(Unfinished):
            await _canaries(stage, stage.now_s())
        await traffic.end()
        left_over = await _settled(stage, settings.settle_s)
    story = Story(
        begun_s, stage.fault_s, traffic.samples, stage.looks, stage.marks, whole_s, left_over, problem
    )  # fmt: skip
    return judge(scenario.name, run, seed, scenario.promise, story, settings.patience)


async def _canaries(stage: Stage, since_s: float) -> None:
    """Some canaries in a row are right that were sent since then."""

    async def right() -> bool:
        recent = [s for s in stage.traffic.samples if s.kind == "canary" and s.sent_s >= since_s]
        recent = sorted(recent, key=lambda sample: sample.ended_s)[-STEADY_CANARIES:]
        return len(recent) == STEADY_CANARIES and all(sample.outcome == "right" for sample in recent)

    await stage.until(right, f"{STEADY_CANARIES} right canaries in a row", STEADY_S)


async def _healed(stage: Stage, heal_s: float) -> float | None:
    """Since when the fleet is whole; None when it did not become so."""

    async def whole() -> bool:
        # Twice in a row: one look may be from before the router has noticed.
        return len(stage.looks) > 1 and all(stage.is_whole(seen) for seen in stage.looks[-2:])

    try:
        await stage.until(whole, "the fleet to be whole", heal_s)
    except Unfinished:
        return None
    broken = [i for i, seen in enumerate(stage.looks) if not stage.is_whole(seen)]
    if not broken:
        return stage.fault_s
    return next((seen.at_s for seen in stage.looks[broken[-1] + 1 :]), None)


async def _settled(stage: Stage, settle_s: float) -> list[str]:
    """What is still held when it should not be; empty as soon as nothing is."""

    async def free() -> bool:
        return not held(stage.looks[-1])

    began_s = stage.now_s()

    async def looked_again_and_free() -> bool:
        return stage.looks[-1].at_s > began_s and await free()

    with suppress(Unfinished):
        await stage.until(looked_again_and_free, "nothing to be held", settle_s)
    return held(stage.looks[-1]) + _orphans(stage.looks)


def held(seen: FleetSeen) -> list[str]:
    if seen.members is None:
        return ["the router does not answer"]
    found = [f"router: {seen.inflight} requests in flight"] if seen.inflight else []
    for name, member in seen.members.items():
        found += [f"{name}: {gauge} {number}" for gauge, number in member.held.items()]
    return found


def _orphans(looks: Sequence[FleetSeen]) -> list[str]:
    """Shared memory of lives that are over."""
    lives = {member.incarnation for look in looks for member in (look.members or {}).values()}
    alive = {member.incarnation for member in (looks[-1].members or {}).values()}
    names = sorted(segment_name(life) for life in lives - alive if life)
    return [f"shared memory {name} of a dead worker" for name in names if (SHM_DIR / name).exists()]


async def whole_at_first(target: Target) -> FleetSeen:
    """Waits a little: a router that has just started has not heard of its workers yet."""
    until_s = Stage.now_s() + FIRST_LOOK_S
    while True:
        seen = await target.look(Stage.now_s())
        ill = [f"{name} is {member.state}" for name, member in (seen.members or {}).items() if member.state != "up"]
        if seen.members and not ill:
            return seen
        if Stage.now_s() > until_s:
            break
        await asyncio.sleep(0.2)
    if not seen.members:
        raise RemoteError(f"{target.url} shows no fleet", field="url", fix="give the address of a kvbaton router")
    raise RemoteError(f"the fleet is not healthy: {', '.join(ill)}", field="url", fix="drill a healthy one")


def _lacking(target: Target, roles: Counter[str]) -> frozenset[str]:
    """What scenarios may need and this fleet does not have."""
    local = target.control_path is not None
    reached = local or bool(target.urls)  # its processes are on this machine
    pods = not target.killer.can_freeze
    has = {
        KILL: reached or pods,
        FREEZE: reached and not pods,
        CONTROL: local,
        ROUTER: local or pods,
        SPLIT: bool(roles["prefill"] and roles["decode"]),
        SPARE: roles.total() > 1,
        WIRE: target.own_wire,
    }
    return frozenset(name for name, there in has.items() if not there)


def _schedule(scenarios: Sequence[Scenario], settings: Settings) -> Iterator[tuple[int, Scenario]]:
    """Every run has its own order. With fewer per run than there are, all take their turn over the runs."""
    rng = random.Random(f"order-{settings.seed}")
    waiting: list[Scenario] = []
    per_run = min(settings.per_run or len(scenarios), len(scenarios))
    for run in range(settings.num_runs):
        chosen: list[Scenario] = []
        while len(chosen) < per_run:
            if not waiting:
                waiting = list(scenarios)
                rng.shuffle(waiting)
            following = next((s for s in waiting if s not in chosen), None)
            if following is None:
                waiting = []
                continue
            waiting.remove(following)
            chosen.append(following)
        for scenario in chosen:
            yield run, scenario


def _line(result: Result, num_runs: int) -> str:
    recover = "never" if result.recover_s is None else f"{result.recover_s:.2f} s"
    errors = ", ".join(f"{number} {what}" for what, number in result.errors.items()) or "no errors"
    run = f"run {result.run + 1}/{num_runs}  " if num_runs > 1 else ""
    why = "" if result.passed else f"\n      {result.reasons[0]}"
    return (
        f"{run}{'pass' if result.passed else 'FAIL'}  {result.name:<26} {result.requests:>4} requests, {errors}, "
        f"{result.lost} lost, {result.wrong} wrong, recovered after {recover}{why}"
    )
