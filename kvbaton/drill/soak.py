"""A long run: the traffic of traces on a fleet that is broken again and again, and what must hold of it.

In turn: a fleet of our own; answers of some prompts recorded; what its processes hold at rest; its goodput for this
traffic; then, at a share of that, the long part with faults, clients that hang up, and autoscaling; rest; verdict.
Invariants: every request is in the record with one ending; the same seed asks and breaks the same in the same order.
Knows nothing about how faults are carried out or records are shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kvbaton.bench.goodput import GoodputSearch, fewest_requests
from kvbaton.bench.prompts import PromptBuilder
from kvbaton.drill import resources
from kvbaton.drill.fleet import Target
from kvbaton.drill.resources import Held, Watch
from kvbaton.drill.run import Tell, held, machine_of_the_drill, whole_at_first
from kvbaton.drill.samples import FleetSeen
from kvbaton.drill.soak_faults import Faults
from kvbaton.drill.soak_load import Builder, Letters, Mixture, Sent, TraceLoad
from kvbaton.drill.soak_verdict import Seen, SoakRecord, counted, latencies, problems_of, router_count
from kvbaton.drill.stage import Stage, Unfinished
from kvbaton.drill.traffic import Traffic, make_prompts
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.kv.shared_pool import SHM_DIR, segment_name
from kvbaton.plan.advise import parse_metrics
from kvbaton.plan.workload import Trace
from kvbaton.router.control import Command
from kvbaton.types import KvbatonError, LocalError, RemoteError

LOOK_EVERY_S = 2.0
REST_S = 200.0  # connections that are kept for a while are closed by then
NUM_CANARIES = 12


@dataclass(frozen=True)
class Settings:
    minutes: float = 30.0
    seed: int = 0
    load: float = 0.8  # of goodput
    rate_per_s: float = 0.0  # instead of a share of goodput, which is then not measured; 0: measure
    first_rate_per_s: float = 2.0  # where the search for goodput begins
    ttft_slo_s: float = 2.0
    tpot_slo_s: float = 0.15
    attainment: float = 0.9
    max_trials: int = 8
    swing: float = 0.25  # the rate rises and falls by so much of itself
    abort_share: float = 0.1
    fault_every_s: float = 25.0
    canary_every_s: float = 1.0
    deadline_s: float = 120.0  # of one request; one that takes longer is lost
    longest_prompt_tokens: int = 768
    longest_output_tokens: int = 96


@dataclass
class Soak:
    target: Target
    settings: Settings
    mixture: Mixture
    tell: Tell
    watch: Watch = field(default_factory=Watch)
    lives: set[str] = field(default_factory=set)  # incarnations of workers
    joined: Counter[str] = field(default_factory=Counter)
    pids: set[int] = field(default_factory=set)
    canary_counts: Counter[str] = field(default_factory=Counter)  # of the router's own canary, over its lives
    router_requests: float = 0.0  # that the present router counts
    sent: Sequence[Sent] = ()  # of traces, as they end
    _canary_before: dict[str, float] = field(default_factory=dict)
    _members: set[str] = field(default_factory=set)

    # -- looking

    async def look(self, stage: Stage) -> None:
        """Once: the fleet's page, its processes, the router's counters."""
        seen = await stage.look()
        del stage.looks[:-20]
        self._note_members(seen)
        with contextlib.suppress(KvbatonError):
            self.watch.look(await self.processes(), stage.now_s(), self._num_answered(stage))
        await self._scrape()

    def _note_members(self, seen: FleetSeen) -> None:
        members = seen.members
        if not members:  # a router that has just begun knows nobody
            return
        self.lives |= {member.incarnation for member in members.values() if member.incarnation}
        if self._members:
            self.joined["joined"] += len(members.keys() - self._members)
            self.joined["left"] += len(self._members - members.keys())
        self._members = set(members)

    def _num_answered(self, stage: Stage) -> int:
        """By the fleet, until now: of traces and canaries."""
        return len(self.sent) + len(stage.traffic.samples)

    async def processes(self) -> list[tuple[str, str, int]]:
        status = await self.target.command(Command("status"))
        found = [(each.name, each.role, each.pid) for each in status.processes if each.pid is not None]
        found.append(("up", "up", status.pid))
        self.pids |= {pid for _, _, pid in found}
        return found

    async def _scrape(self) -> None:
        text = await self.target.text("/metrics")
        if text is None:
            return
        try:
            scrape = parse_metrics(text)
        except KvbatonError:  # one that has just begun has nothing to tell
            return
        self.router_requests = sum(scrape.get("kvbaton_router_requests_total", {}).values())
        now = {dict(labels)["result"]: value for labels, value in scrape.get("kvbaton_router_canary_total", {}).items()}
        for result, value in now.items():
            before = self._canary_before.get(result, 0.0)
            self.canary_counts[result] += round(value - before if value >= before else value)
        self._canary_before = now

    async def keep_looking(self, stage: Stage) -> None:
        while True:
            await self.look(stage)
            await asyncio.sleep(LOOK_EVERY_S)

    # -- parts of a run

    async def at_rest(self, stage: Stage) -> tuple[dict[str, Held], dict[str, str]]:
        """What each process holds now, and of which kind it is."""
        processes = await self.processes()
        return self.watch.look(processes, stage.now_s()), {name: kind for name, kind, _ in processes}

    async def goodput(self, load: TraceLoad) -> float:
        """The highest rate at which enough requests meet both limits, on the healthy fleet."""
        settings = self.settings
        search = GoodputSearch(settings.attainment, settings.first_rate_per_s, 0.15, settings.max_trials, 2)
        while (rate := search.next_rate()) is not None:
            first = len(load.sent)
            lasts_s = max(MIN_TRIAL_S, ceil_requests(settings.attainment) / rate)
            await load.flow(random.Random(f"{settings.seed}-goodput-{rate}-{first}"), rate, lasts_s)
            await load.ended()
            met = [self._met(each) for each in load.sent[first:]]
            verdict = search.record(rate, sum(met) / max(1, len(met)), len(met))
            self.tell(f"goodput: {rate:.3g}/s: {sum(met)} of {len(met)} within both limits: {verdict}")
        found = search.result()
        if not found.rate_per_s:
            raise RemoteError(f"no rate was clearly good: {found.note}", field="rate", fix="give --rate")
        return found.rate_per_s

    def _met(self, sent: Sent) -> bool:
        settings = self.settings
        slow = sent.ttft_s is None or sent.ttft_s > settings.ttft_slo_s or (sent.tpot_s or 0.0) > settings.tpot_slo_s
        return sent.ending == "whole" and not slow

    async def storm(self, stage: Stage, load: TraceLoad, faults: Faults, rate_per_s: float) -> None:
        settings, rng = self.settings, random.Random(f"{self.settings.seed}-storm")
        lasts_s = 60 * settings.minutes
        watching = asyncio.ensure_future(self.keep_looking(stage))
        stage.traffic.begin(random.Random(f"{settings.seed}-canaries"), 1 / settings.canary_every_s, canary_every_s=4.0)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    load.flow(rng, rate_per_s, lasts_s, settings.abort_share, settings.swing, min(600.0, lasts_s / 3))
                )
                group.create_task(faults.run(max(0.0, lasts_s - 15.0), settings.fault_every_s))
                group.create_task(self._report(stage, load, faults, lasts_s))
            await stage.traffic.end()
            await load.ended()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await self.look(stage)

    async def _report(self, stage: Stage, load: TraceLoad, faults: Faults, lasts_s: float) -> None:
        began_s = stage.now_s()
        while (left_s := began_s + lasts_s - stage.now_s()) > 0:
            await asyncio.sleep(min(30.0, left_s))
            endings = Counter(each.ending for each in load.sent)
            told = ", ".join(f"{number} {ending}" for ending, number in sorted(endings.items()))
            left_s = max(0.0, began_s + lasts_s - stage.now_s())
            self.tell(f"{left_s:5.0f} s left, {sum(faults.struck.values())} faults, {told}")

    async def rest(self, stage: Stage, before: dict[str, Held]) -> list[str]:
        """What is still held after long enough; empty as soon as nothing is."""
        problem: list[str] = []

        async def nothing_held() -> bool:
            await self.look(stage)
            seen = stage.looks[-1]
            problem[:] = self._not_whole(seen) + held(seen) + self._orphans(seen)
            if not problem:
                now, kinds = await self.at_rest(stage)
                problem[:] = resources.left_over(before, now, kinds)
            await asyncio.sleep(0.5)
            return not problem

        with contextlib.suppress(Unfinished):
            await stage.until(nothing_held, "the fleet to be at rest", REST_S)
        return problem

    def record(self, rate_per_s: float, seen: Seen, faults: Faults) -> SoakRecord:
        settings, sent = self.settings, seen.sent
        ours = {"joined": faults.num_joined_by_us, "left": faults.num_left_by_us}
        return SoakRecord(
            settings={name: getattr(settings, name) for name in settings.__dataclass_fields__},
            machine=machine_of_the_drill(),
            sources=self.mixture.notes,
            rate_per_s=rate_per_s,
            minutes=settings.minutes,
            trace=counted(each.ending for each in sent),
            canaries=counted(each.outcome for each in seen.canaries),
            router_canaries=dict(sorted(seen.router_canaries.items())),
            errors=counted(each.code for each in sent if each.ending in ("refused", "failed")),
            latency_s=latencies([each for each in sent if each.ending == "whole"]),
            within_limits=sum(map(self._met, sent)) / max(1, len(sent)),
            router=seen.router,
            faults=seen.struck,
            not_carried_out=faults.not_carried_out,
            scaled={what: self.joined[what] - number for what, number in ours.items()},
            lives=counted(life.kind for life in self.watch.lives.values()),
            slopes=list(seen.slopes),
            memory=[resources.thinned(life) for life in self.watch.lives.values()],
            left_over=list(seen.left_over),
            problems=problems_of(seen),
        )

    def _not_whole(self, seen: FleetSeen) -> list[str]:
        if seen.members is None:
            return ["the router does not answer"]
        lacking = {"prefill", "decode"} - {member.role for member in seen.members.values()}
        ill = [f"{name} is {member.state}" for name, member in seen.members.items() if member.state != "up"]
        return ill + [f"there is no {role} worker" for role in sorted(lacking)]

    def _orphans(self, seen: FleetSeen) -> list[str]:
        alive = {member.incarnation for member in (seen.members or {}).values()}
        return segments_of(self.lives - alive)


# A fleet takes any rate for a moment: 50 requests in a tenth of a second showed 512 a second, and most were refused at
# four fifths of that.
MIN_TRIAL_S = 15.0


def ceil_requests(attainment: float) -> int:
    """For one trial: arrivals are random, so a few more than the fewest that could show it."""
    return round(1.3 * fewest_requests(attainment))


def segments_of(lives: set[str]) -> list[str]:
    names = sorted(segment_name(life) for life in lives if life)
    return [f"shared memory {name} of a worker that is gone" for name in names if (SHM_DIR / name).exists()]


@dataclass
class Ended:
    """A record, and what must be gone when the fleet is."""

    record: SoakRecord
    pids: set[int]
    lives: set[str]

    def after_the_fleet(self) -> SoakRecord:
        """Called when the fleet has ended."""
        found = [f"process {pid} is left" for pid in sorted(self.pids) if psutil.pid_exists(pid)]
        found += segments_of(self.lives)
        self.record.left_over += found
        self.record.problems += found
        return self.record


def builders(tokenizer: Tokenizer, seed: int) -> tuple[Builder, Builder | None]:
    """For completions and for chat."""
    try:
        plain = PromptBuilder(tokenizer, seed)
    except LocalError:  # a tokenizer without words
        return Letters(tokenizer, seed), None
    if not tokenizer.has_chat_template:
        return plain, None
    return plain, PromptBuilder(tokenizer, seed, lambda text: len(tokenizer.chat([{"role": "user", "content": text}])))


async def soak(target: Target, traces: Sequence[Trace], model_dir: Path, settings: Settings, tell: Tell) -> Ended:
    """Everything but what is seen only when the fleet has ended."""
    first = await whole_at_first(target)
    context = await target.max_context()
    mixture = Mixture(
        traces,
        min(settings.longest_prompt_tokens, context // 2),
        min(settings.longest_output_tokens, context // 4),
    )
    tokenizer = Tokenizer.load(model_dir)
    run = Soak(target, settings, mixture, tell)
    roles = Counter(member.role for member in (first.members or {}).values())
    prompts = make_prompts(settings.seed, NUM_CANARIES, min(1600, context), min(40, settings.longest_output_tokens))
    async with AsyncExitStack() as stack:
        told = (settings.deadline_s, target.client_headers)
        traffic = await stack.enter_async_context(Traffic(target.url, prompts, Stage.now_s, *told))
        load = await stack.enter_async_context(
            TraceLoad(target.url, mixture, builders(tokenizer, settings.seed), *told)
        )
        run.sent = load.sent
        stage = Stage(target, traffic, random.Random(f"{settings.seed}-stage"), roles)
        doubtful = await traffic.learn()
        before = resources.most_of(*await run.at_rest(stage))
        rate = settings.rate_per_s or settings.load * await run.goodput(load)
        num_before = len(load.sent)
        tell(f"{settings.minutes:g} minutes at {rate:.3g} requests/s of {'; '.join(mixture.notes)}")
        faults = Faults(stage, load, random.Random(f"{settings.seed}-faults"), tell)
        await target.command(Command("rehearse", on=True))
        try:
            await run.storm(stage, load, faults, rate)
        finally:
            await target.command(Command("rehearse", on=False))
        ended_s = stage.now_s()
        tell("the load has ended; waiting for everything to come to rest")
        left_over = await run.rest(stage, before)
        await run.look(stage)
        slopes = resources.slopes(run.watch.lives.values(), ended_s)
        router = router_count(
            round(run.router_requests), load.sent, traffic.samples, faults.router_down, 2 * len(prompts)
        )
        sent = load.sent[num_before:]
        seen = Seen(
            settings.minutes, sent, load.num_started - num_before, traffic.samples, dict(run.canary_counts),
            faults.router_down, router, dict(faults.struck), faults.never_struck, left_over, slopes, doubtful,
        )  # fmt: skip
        return Ended(run.record(rate, seen, faults), run.pids, run.lives)
