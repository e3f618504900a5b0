"""Processes that can die: a worker (its real server, joint, engine and hand-off) and a router (its real gateway).

A process that dies runs nothing any more: its engine stands still, its wires are reset, its tasks are cancelled, and
what they still try to say reaches nobody. Each life has an incarnation and a clock of its own, skewed in offset and
rate.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvbaton.clock import Clock
from kvbaton.config import RouterSettings
from kvbaton.engine.engine import EngineConfig
from kvbaton.engine.scheduler import SchedulerConfig
from kvbaton.observe.metrics import Metrics
from kvbaton.router.dispatch import Dispatcher
from kvbaton.router.gateway import Gateway, Served
from kvbaton.router.monitor import Monitor
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.router.registry import Registry
from kvbaton.transfer.client import HandoffClient
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.wire import HostIdentity, Identity
from kvbaton.types import Fingerprint, Role
from kvbaton.workers.kv_events import KVEventLog
from kvbaton.workers.native import NativeWorker, WorkerOptions, _Backend, _Bridge, _Moved
from kvbaton.workers.server import ServerOptions, WorkerServer

from .engine import BLOCK_SIZE, LAYOUT, SimEngine
from .handoff import SimServer, SimSource
from .http import Caller
from .loop import VirtualLoop

if TYPE_CHECKING:
    from .world import World

KEY, MODEL = "k" * 20, "tiny"
FINGERPRINT = Fingerprint(1, "r", LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, LAYOUT.dtype, "")
LEASE_S = 2.0
HANDOFF = HandoffOptions(
    transport="tcp", lease_s=LEASE_S, connect_s=1.0, frame_s=1.0, heartbeat_s=0.5, silence_s=3.5, stall_s=1.5,
    max_copy_bytes=LAYOUT.layer_block_bytes * 3,
)  # fmt: skip
SETTINGS = RouterSettings(
    threshold_tokens=5, queue_timeout_s=4.0, first_token_min_s=1.5, stream_stall_s=2.5, connect_timeout_s=1.0,
    request_timeout_s=12.0, stall_timeout_s=6.0, poll_interval_s=0.7, poll_timeout_s=1.0, kv_events_interval_s=0.3,
    ui=False,
)  # fmt: skip
MAX_CONTEXT = 64


class SkewedClock:
    """Seconds of one process: monotonic, but neither from the same start nor at the same rate as others'.

    It may stand still for a while, as that of a machine that is suspended does.
    """

    def __init__(self, loop: VirtualLoop, offset_s: float, rate: float) -> None:
        self._loop, self._offset_s, self._rate = loop, offset_s, rate
        self._stands_until_s = 0.0

    def now_s(self) -> float:
        return self._offset_s + max(0.0, self._loop.now_s - self._stands_until_s) * self._rate

    def stand_still(self, lasts_s: float) -> None:
        self._offset_s = self.now_s()
        self._stands_until_s = self._loop.now_s + lasts_s


class Process:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive = True
        self.tasks: dict[asyncio.Task[Any], None] = {}

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        task = self.world.loop.create_task(work)
        self.tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)
        if self.alive:
            self.world.loop.watch(task)

    def die(self) -> None:
        self.alive = False
        self.world.network.process_died(self)
        for task in list(self.tasks):
            task.cancel()


class WorkerProcess(Process):
    """One life of one worker at one address."""

    def __init__(self, world: World, name: str, host: str, role: Role, life: str) -> None:
        super().__init__(world, name)
        self.host, self.role, self.life = host, role, life
        rng, plan = world.rng, world.plan
        self.clock = SkewedClock(world.loop, rng.uniform(0, 1000), rng.uniform(1 - plan.skew, 1 + plan.skew))
        self.sources: list[SimSource] = []  # of those that read from here
        # A decode worker has room for few, so that blocks change hands all the time.
        scheduler = SchedulerConfig(max_batch_tokens=8, max_running=6, max_context=MAX_CONTEXT, max_waiting=6)
        config = EngineConfig(scheduler, prefix_caching=plan.prefix_caching, lease_s=LEASE_S)
        self.engine = SimEngine(name, plan.num_blocks, config, self.clock, world.loop, world.story)
        self.engine.on_release = self._on_release
        self.native = self._joint()
        self.server = WorkerServer(
            self.native, ServerOptions(BLOCK_SIZE, internal_key=KEY, chunk_tokens=8, max_running=6), self.clock
        )
        self.draining = False

    def _joint(self) -> NativeWorker:
        """The joint as its constructor leaves it, around our engine."""
        native: Any = object.__new__(NativeWorker)
        native.options = WorkerOptions(role=self.role, handoff=HANDOFF)
        native.role, native.incarnation, native.model_id = self.role, self.life, MODEL
        native.tokenizer, native.max_context = self.world.tokenizer, MAX_CONTEXT
        native.fingerprint, native.layout, native.kv_port = FINGERPRINT, LAYOUT, 0
        native.engine = self.engine
        native.kv_events = KVEventLog(
            self.life, BLOCK_SIZE, native._take_kv_snapshot, self.clock, self.world.plan.event_log_hashes
        )
        self.engine.on_block_events = native.kv_events.append
        native._nixl = None
        native._bridge, native._server, native._client, native._past = _Bridge(self.world.loop), None, None, _Moved()
        pool: Any = self.engine.pool
        identity = Identity(FINGERPRINT, LAYOUT, pool.num_blocks, self.life, HostIdentity("boot", 1))
        if self.role != "decode":
            native._server = SimServer(identity, pool, _Backend(self.engine), HANDOFF, self.clock)
            native.kv_port = 1
        if self.role != "prefill":
            native._client = HandoffClient(identity, pool, HANDOFF, self.clock)
        joint: NativeWorker = native
        return joint

    def _on_release(self, request_id: str) -> None:
        seq = self.engine._scheduler.get(request_id)
        if seq is not None:
            offered = seq.blocks[: self.native.layout.blocks_for(seq.num_prompt_tokens)]
            self.world.check_unread(self, request_id, tuple(offered))

    def die(self) -> None:
        self.engine.stop()
        super().die()
        server = self.native._server
        if server is not None:
            for task in list(server._tasks):
                task.cancel()

    def problem(self) -> str | None:
        """What is held although nothing is under way."""
        server, client = self.native._server, self.native._client
        if self.server.open.num:
            return f"{self.name}: {self.server.open.num} requests are open"
        if client is not None and client.stats().num_pulls:
            return f"{self.name}: {client.stats().num_pulls} pulls are in progress"
        if server is not None:
            stats = server.stats()
            if stats.num_sessions or stats.num_tickets:
                return f"{self.name}: {stats.num_sessions} sessions and {stats.num_tickets} tickets are live"
        if any(source.busy for source in self.sources):
            return f"{self.name}: somebody still reads from it"
        return self.engine.problem()


class RouterProcess(Process):
    """One life of the router."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "router")
        self.metrics = Metrics("router")
        self.clock: Clock = SkewedClock(world.loop, world.rng.uniform(0, 1000), 1.0)
        self.index = PrefixIndex(SETTINGS.index_block_tokens, SETTINGS.index_blocks, world.plan.index_blocks)
        self.registry = Registry([], MODEL, self.index, self.metrics)
        caller: Any = Caller(world, self, SETTINGS.connect_timeout_s, SETTINGS.stall_timeout_s)
        settings = world.settings
        self.dispatcher = Dispatcher(self.registry, self.index, caller, settings, KEY, self.metrics, self.clock)
        served = Served(MODEL, world.tokenizer)
        self.gateway = Gateway(self.registry, self.dispatcher, served, settings, KEY, self.metrics, self.clock)
        self.monitor = Monitor(self.registry, self.index, caller, settings, KEY, self.metrics)
        self.spawn(self.monitor.run())

    def problem(self) -> str | None:
        if self.gateway.open.num or self.dispatcher.num_queued:
            return f"the router: {self.gateway.open.num} open, {self.dispatcher.num_queued} queued"
        for member in self.registry.members:
            counts = (member.own_requests, member.own_sequences, member.own_tokens, len(member.expected))
            if any(counts):
                return f"the router still counts {counts} on {member.name}"
        if self.index.exact._num_expected:
            return f"the index still expects {self.index.exact._num_expected} blocks"
        return None
