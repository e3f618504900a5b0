"""One run of one seed: a whole fleet, its clients and its faults on a virtual clock, judged at every step.

First a storm: requests come and faults strike. Then all is well again, and within ``CALM_S`` everything must come to
rest: every request has its answer or its error, no worker holds anything, the router counts nothing, its members are
the cluster's, and its index is exactly what the workers hold. Requests that come after that must succeed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from kvbaton.drill.tiny_model import _write_tokenizer
from kvbaton.engine.tokenizer import Tokenizer

from .client import ClientRequest
from .faults import strike
from .fleet import Autoscaler, Cluster
from .handoff import on_wires
from .loop import VirtualLoop
from .network import Network
from .plan import STORM_S, Plan
from .process import SETTINGS, RouterProcess, WorkerProcess
from .story import Story, Violation

CALM_S = 40.0
LOOK_S = 0.5


@cache
def byte_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        _write_tokenizer(Path(folder))
        return Tokenizer.load(folder)


class World:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = VirtualLoop()
        self.loop.world = self  # type: ignore[attr-defined]
        self.rng = Random(plan.seed ^ 0x5EED)
        self.story = Story(lambda: self.loop.now_s)
        self.network = Network(self.loop, plan.seed, self.story, plan.weather)
        self.settings = dataclasses.replace(SETTINGS, threshold_tokens=plan.threshold_tokens)
        self.tokenizer = byte_tokenizer()
        self.processes_by_life: dict[str, WorkerProcess] = {}
        self.requests: list[ClientRequest] = []
        self.calm = False
        self.standing_until_s: dict[str, float] = {}  # readers whose copies stand still, and until when
        self._tasks: dict[asyncio.Task[Any], None] = {}

    # -- for everybody

    def spawn(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        self.loop.watch(task)

    def process_at(self, host: str) -> WorkerProcess:
        return self.cluster.process_at(host)

    def check_unread(self, lender: WorkerProcess, request_id: str, block_ids: tuple[int, ...]) -> None:
        """Blocks are released on an acknowledgement: whoever sent it must not be reading them."""
        for source in lender.sources:
            for offer in source.reading:
                if offer.block_ids == block_ids and _still_offered(lender, offer):
                    raise Violation(f"{lender.name} frees {request_id} under its reader {source.reader.name}")

    # -- the run

    def run(self) -> None:
        try:
            with on_wires():
                self.loop.run(self._main())
        finally:
            self._end()

    async def _main(self) -> None:
        self.cluster = Cluster(self)
        for _ in range(self.plan.num_prefill):
            self.cluster.make("prefill")
        for _ in range(self.plan.num_decode):
            self.cluster.make("decode")
        self.start_router()
        self.autoscaler = Autoscaler(self, self.cluster) if self.plan.autoscale else None
        for number, asked in enumerate(self.plan.requests):
            request = ClientRequest(self, f"r{number}", asked.prompt, asked.max_tokens, asked.stream)
            self.requests.append(request)
            self.loop.call_at(asked.at_s, self._ask, request)
        for fault in self.plan.faults:
            self.loop.call_at(fault.at_s, strike, self, fault)
        await asyncio.sleep(STORM_S + 0.5)
        self._calm_down()
        await self._come_to_rest()
        await self._probe()

    def start_router(self) -> None:
        self.router = RouterProcess(self)
        self.cluster.follow(self.router)

    def _ask(self, request: ClientRequest) -> None:
        if self.router.alive:
            request.send_to(self.router)
        else:
            request.outcome = "reset"

    def burst(self, number: int) -> None:
        """Requests that share nothing, at once."""
        for _ in range(number if not self.calm else 0):
            prompt = tuple(self.rng.randrange(64, 90) for _ in range(self.rng.randint(12, 24)))
            request = ClientRequest(self, f"r{len(self.requests)}", prompt, self.rng.choice((2, 6)), True)
            self.requests.append(request)
            self._ask(request)

    def _calm_down(self) -> None:
        """The network heals, what was slow is fast, who is down comes back; what was lost on the way stays lost."""
        self.story.tell("all is well again")
        self.calm = True
        self.network.calm_down()
        if self.autoscaler is not None:
            self.autoscaler.on = False
        for pod in list(self.cluster.pods.values()):
            self.cluster.start(pod)
        for process in self.cluster.processes:
            process.engine.slowness, process.engine.breaks_next = 1.0, False
        if not self.router.alive:
            self.start_router()

    async def _come_to_rest(self) -> None:
        until_s = self.loop.time() + CALM_S
        while (problem := self.problem()) is not None:
            if self.loop.time() > until_s:
                raise Violation(f"{CALM_S:.0f} s after all is well again: {problem}")
            await asyncio.sleep(LOOK_S)
        self.check()
        self.story.tell("everything is at rest")

    async def _probe(self) -> None:
        """Nobody is shut out for what is past."""
        for number in range(4):
            prompt = tuple(self.rng.randrange(64, 90) for _ in range(5 + number))
            probe = ClientRequest(self, f"probe{number}", prompt, 4, bool(number % 2))
            probe.must_succeed = True
            self.requests.append(probe)
            probe.send_to(self.router)
        await self._come_to_rest()

    # -- what must hold

    def problem(self) -> str | None:
        """Why the fleet is not at rest."""
        for request in self.requests:
            if request.task is not None and not request.outcome:
                return f"{request.name} has neither answer nor error"
        for process in self.cluster.processes:
            if (found := process.problem()) is not None:
                return found
        for process in self.processes_by_life.values():
            if process.alive and process not in self.cluster.processes:
                return f"a process of {process.name} runs that the cluster does not know"
        return self.router.problem() or self._unknown_member() or self._index_problem()

    def _unknown_member(self) -> str | None:
        known = {member.name: member for member in self.router.registry.members}
        if set(known) != set(self.cluster.pods):
            return f"the router knows {sorted(known)}, the cluster has {sorted(self.cluster.pods)}"
        for name, pod in self.cluster.pods.items():
            member, life = known[name], pod.process.life if pod.process is not None else ""
            if pod.leaving:
                return f"{name} still drains"
            if member.state != "up":
                return f"the router thinks that {name} is {member.state}: {member.reason}"
            if member.reported is None or member.reported.info.incarnation != life:
                return f"the router speaks with an older life of {name}"
        return None

    def _index_problem(self) -> str | None:
        """What is foretold is what is there, unless the index had to drop something for want of memory."""
        exact = self.router.index.exact
        for process in self.cluster.processes:
            name, cached = process.name, set(process.engine.cached_hashes())
            if not exact.knows(name) or exact.trust(name) != "fresh" or exact.needs_snapshot(name):
                return f"the index does not follow {name}"
            held = exact.held(name)
            if held - cached:
                return f"the index claims {len(held - cached)} blocks that {name} does not hold"
            if cached - held and not exact.num_dropped:
                return f"the index misses {len(cached - held)} blocks of {name}"
        return None

    def check(self) -> None:
        self.router.registry.check()
        self.router.index.exact.check()
        for process in self.cluster.processes:
            process.engine.check()

    def _end(self) -> None:
        """Nothing of a run is left for the next one."""
        loop = self.loop
        loop.ending = True
        for process in [*self.processes_by_life.values(), getattr(self, "router", None)]:
            if process is not None:
                process.alive = False
        pending = [task for task in asyncio.all_tasks(loop) if not task.done()]
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(asyncio.wait(pending, timeout=60.0))
        loop.close()


def _still_offered(lender: WorkerProcess, offer: Any) -> bool:
    """Whether the reader's offer is of the present life of these blocks; an older one reads what is lost already."""
    generations = lender.engine.pool.generations
    return all(generations[block] == was for block, was in zip(offer.block_ids, offer.generations, strict=True))
