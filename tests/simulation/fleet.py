"""The cluster around the processes: pods that come and go, the router's follower of them, and the autoscaler.

The follower's rules and the registry are the product's, and so are ``look`` and ``decide``; replaced are the API server
(whose events may be late, lost or in disorder, while a listing always tells the truth) and the scrape (which may fail).
Checked at each decision: targets within bounds, a pause between two drains, and never the last worker of a pool.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvbaton.plan.autoscale_demand import PoolPolicy, PoolSeen
from kvbaton.plan.autoscale_seen import PoolCounts, Watched, WorkerCounts, look
from kvbaton.plan.control import ScalingDecision, ScalingPolicy, ScalingState, decide
from kvbaton.router.discovery import ROLE_LABEL, PodFollower
from kvbaton.types import Role

from .process import RouterProcess, WorkerProcess
from .story import Violation

if TYPE_CHECKING:
    from .world import World

MOST = 3  # workers of one pool
START_S = 0.8
DRAIN_S = 4.0
LOOK_S = 1.0
LIST_S = 3.0
POLICY = ScalingPolicy(
    {"prefill": PoolPolicy(1, MOST, catch_up_s=2.0), "decode": PoolPolicy(1, MOST, sequences_per_worker=3)},
    shrink_after_s=4.0, drain_pause_s=1.0, start_s=START_S,
)  # fmt: skip


class Namespace:
    """A pod as its client's library shows it."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Pod:
    """A place for one worker: its name and address stay, its process may be replaced."""

    def __init__(self, name: str, host: str, role: Role) -> None:
        self.name, self.host, self.role = name, host, role
        self.process: WorkerProcess | None = None
        self.leaving = False
        self.num_lives = 0

    def shown(self) -> Namespace:
        return Namespace(
            metadata=Namespace(name=self.name, labels={ROLE_LABEL: self.role}),
            status=Namespace(pod_ip=self.host, phase="Running"),
        )


class Cluster:
    def __init__(self, world: World) -> None:
        self._world = world
        self.pods: dict[str, Pod] = {}
        self._by_host: dict[str, Pod] = {}
        self._num_made: dict[Role, int] = {"prefill": 0, "decode": 0, "both": 0}
        self._follower: PodFollower | None = None

    # -- pods

    def make(self, role: Role) -> Pod:
        number = self._num_made[role]
        self._num_made[role] += 1
        host = f"10.0.0.{len(self._by_host) + 1}"
        pod = Pod(f"{role[0].upper()}{number}", host, role)
        self.pods[pod.name] = self._by_host[host] = pod
        self.start(pod)
        self._changed(pod)
        return pod

    def start(self, pod: Pod) -> None:
        """A new life at the same address."""
        if pod.name not in self.pods or pod.leaving or (pod.process is not None and pod.process.alive):
            return
        pod.num_lives += 1
        process = WorkerProcess(self._world, pod.name, pod.host, pod.role, f"{pod.name}-life-{pod.num_lives}")
        pod.process = process
        self._world.processes_by_life[process.life] = process
        self._world.story.tell("{}: starts, life {}", pod.name, pod.num_lives)

    def process_at(self, host: str) -> WorkerProcess:
        process = self._by_host[host].process
        assert process is not None
        return process

    @property
    def processes(self) -> list[WorkerProcess]:
        return [pod.process for pod in self.pods.values() if pod.process is not None and pod.process.alive]

    def staying(self, role: Role) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.role == role and not pod.leaving]

    async def drain(self, pod: Pod) -> None:
        """As an operator's command: nothing new, what is open may end, then the process exits and the pod is gone."""
        world, process = self._world, pod.process
        pod.leaving = True
        world.story.tell("{}: drains", pod.name)
        member = world.router.registry.get(pod.name)
        if member is not None:
            world.router.registry.hold_back(member, "told to drain")
        if process is not None and process.alive:
            await process.server.drain(DRAIN_S)
            if process.alive:
                process.die()
        self.remove(pod)

    def remove(self, pod: Pod) -> None:
        self._world.story.tell("{}: is gone", pod.name)
        self.pods.pop(pod.name, None)
        self._changed(pod)

    # -- who is told

    def follow(self, router: RouterProcess) -> None:
        """A new life of the router lists everything and follows what comes."""
        self._follower = PodFollower("kvbaton=1", "default", 8101, router.registry.set_members)
        self._list(self._follower)

    def _changed(self, pod: Pod) -> None:
        world, follower = self._world, self._follower
        if follower is None:
            return
        shown, gone = pod.shown(), pod.name not in self.pods
        if not world.calm and world.rng.random() < world.plan.lose_events:
            world.story.tell("the event that {} {} is lost", pod.name, "left" if gone else "came")
            return
        delay_s = world.rng.uniform(0.01, 1.0)
        if gone and world.rng.random() < 0.2:
            shown.status.pod_ip = ""  # an update without address, where a deletion was due
            gone = False
        world.loop.call_later(delay_s, self._event, follower, shown, gone)

    def _event(self, follower: PodFollower, shown: Namespace, gone: bool) -> None:
        if follower is self._follower:
            follower._take(shown, gone)
            follower._say()

    def _list(self, follower: PodFollower) -> None:
        """As ``PodFollower`` does it: what the cluster says is taken whole."""
        if follower is not self._follower or not self._world.router.alive:
            return
        follower._members = {}
        for pod in self.pods.values():
            follower._take(pod.shown())
        follower._say()
        self._world.loop.call_later(LIST_S, self._list, follower)


class Autoscaler:
    """Looks, decides, and carries out by the cluster."""

    def __init__(self, world: World, cluster: Cluster) -> None:
        self._world, self._cluster = world, cluster
        self._state = ScalingState()
        self._watched: dict[Role, Watched] = {}
        self._starting: dict[Role, int] = {"prefill": 0, "decode": 0}
        self._drained_s: dict[Role, float] = {}
        self.on = True
        world.loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        world = self._world
        world.loop.call_later(LOOK_S, self._look)
        if not self.on:
            return
        scraped = world.router.alive and world.rng.random() > world.plan.lose_scrapes
        seen: dict[Role, PoolSeen] = {}
        for role in POLICY.pools:
            counts = self._counts(role, scraped)
            self._watched[role], seen[role] = look(counts, self._watched.get(role, Watched()), world.loop.time())
        decision = decide(POLICY, seen, self._state, world.loop.time())
        self._state = decision.state
        self._check(decision, seen)
        for role, each in decision.pools.items():
            for _ in range(each.add):
                self._starting[role] += 1
                world.story.tell("autoscaler: one more {}: {}", role, each.reason)
                world.loop.call_later(START_S, self._add, role)
            if each.drain:
                self._drain(role)

    def _counts(self, role: Role, scraped: bool) -> PoolCounts:
        workers: dict[str, WorkerCounts | None] = {}
        for pod in self._cluster.staying(role):
            member = self._world.router.registry.get(pod.name)
            reported = member.reported if member is not None and member.state == "up" and scraped else None
            workers[pod.name] = None if reported is None else _counts_of(reported.info.stats)
        draining = sum(pod.role == role and pod.leaving for pod in self._cluster.pods.values())
        return PoolCounts(workers, self._starting[role], draining, float(self._world.router.dispatcher.num_queued))

    def _add(self, role: Role) -> None:
        self._starting[role] -= 1
        self._cluster.make(role)
        if len(self._cluster.staying(role)) > MOST:
            raise Violation(f"there are more than {MOST} {role} workers")

    def _drain(self, role: Role) -> None:
        pod = self._world.rng.choice(self._cluster.staying(role))
        if len(self._cluster.staying(role)) <= 1:
            raise Violation(f"the autoscaler sends away the last {role} worker")
        self._world.spawn(self._cluster.drain(pod))

    def _check(self, decision: ScalingDecision, seen: dict[Role, PoolSeen]) -> None:
        for role, each in decision.pools.items():
            pool, have = POLICY.pools[role], seen[role].have
            if not (pool.minimum <= each.target <= pool.maximum or (not each.known and each.target == have)):
                raise Violation(f"{role}: a target of {each.target} is out of bounds")
            # One that drains may do so for longer than the pause: what is asked is that they do not leave all at once.
            last_s = self._drained_s.get(role, -math.inf)
            soon = self._world.loop.time() - last_s < POLICY.drain_pause_s
            if each.drain > 1 or (each.drain and (each.add or not each.known or seen[role].starting or soon)):
                raise Violation(f"{role}: more than one change at a time: {each}")
            if each.drain:
                self._drained_s[role] = self._world.loop.time()
            if have + each.add - each.drain < pool.minimum <= have:
                raise Violation(f"{role}: {have} workers, and it drains below {pool.minimum}")


def _counts_of(stats: Any) -> WorkerCounts:
    return WorkerCounts(
        stats.waiting_prompt_tokens, stats.num_running, stats.num_waiting,
        max(0, stats.num_active - stats.num_running - stats.num_waiting), stats.num_blocks, stats.num_blocks_free,
        stats.num_prompt_tokens, stats.prefill_busy_s,
    )  # fmt: skip
