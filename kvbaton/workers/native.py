"""The joint: one worker process's engine and its side of the hand-off.

The engine knows nothing of peers, the transfer knows nothing of models; this module is the only one that knows both.
A prefill worker serves hand-offs (``HandoffServer``), a decode worker pulls them (``HandoffClient``), a ``both`` worker
does either. Invariant: leaving ``generate`` by any way, an error and a cancellation included, frees everything the
request held here and tells the peer. Knows nothing about HTTP or text.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from kvbaton.clock import Clock, MonotonicClock
from kvbaton.engine.engine import Engine, EngineConfig
from kvbaton.engine.events import Event, Failed, Progress, Scheduled, Token
from kvbaton.engine.loader import LoadedModel, LoadOptions, Shared, load
from kvbaton.kv.tier import TierOptions, open_tier
from kvbaton.transfer.client import ClientStats, Completed, FirstToken, HandoffClient, Moved
from kvbaton.transfer.identity import host_identity
from kvbaton.transfer.lending import PrefillSink
from kvbaton.transfer.nixl_source import NixlPool
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.server import HandoffServer, ServerStats
from kvbaton.transfer.sharding import rank_pools_of
from kvbaton.transfer.wire import Identity
from kvbaton.types import CapacityError, GenerateRequest, LocalError, Role, TokenOutput
from kvbaton.workers.kv_events import KVEventLog, hashes_worth_keeping
from kvbaton.workers.protocol import Admitted, Finished, PeerAddress, WorkerEvent, WorkerStats
from kvbaton.workers.traced import traced

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class WorkerOptions:
    role: Role = "both"
    host: str = "127.0.0.1"
    kv_port: int = 0  # 0: any free port
    handoff: HandoffOptions = field(default_factory=HandoffOptions)
    tier: TierOptions = field(default_factory=TierOptions)


class _Bridge:
    """From the engine thread to the event loop: one wake-up however many events are under way."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._pending: list[tuple[_Mailbox, Event]] = []

    def post(self, mailbox: _Mailbox, event: Event) -> None:
        with self._lock:
            self._pending.append((mailbox, event))
            if len(self._pending) > 1:
                return  # the loop is on its way
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop is closed, and with it everybody who could listen
            log.debug("an event came after the end of the loop")

    def _deliver(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, []
        for mailbox, event in pending:
            mailbox.put(event)


class _Mailbox:
    """Events of one request, in order, for one coroutine."""

    def __init__(self, bridge: _Bridge) -> None:
        self._bridge = bridge
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def sink(self, event: Event) -> None:
        """Called on the engine thread."""
        self._bridge.post(self, event)

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    async def get(self) -> Event:
        """The next event; a failure is raised. The caller bounds the wait."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Failed):
            raise event.error
        return event


class _Backend:
    """The engine as the hand-off server sees it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def start(self, request: GenerateRequest, have_tokens: int, sink: PrefillSink) -> None:
        num_tokens = len(request.prompt_token_ids)

        def forward(event: Event) -> None:  # on the engine thread
            match event:
                case Scheduled():
                    sink.on_offer(event.block_ids, num_tokens, event.num_cached_tokens)
                case Progress():
                    sink.on_progress(event.tokens_ready, event.layers_ready)
                case Token():
                    sink.on_first(event.output)
                case Failed():
                    sink.on_error(event.error)

        self._engine.prefill(request, traced(request, forward) if request.traceparent else forward)

    def release(self, request_id: str) -> None:
        self._engine.release(request_id)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def renew(self, request_id: str, lease_s: float) -> Awaitable[bool]:
        return asyncio.wrap_future(self._engine.renew(request_id, lease_s))


@dataclass
class _Moved:
    """Totals of the hand-off, which outlive the server and the client of a role."""

    num_bytes_sent: int = 0
    num_bytes_received: int = 0
    num_done: int = 0
    num_failed: int = 0

    def add(self, client: ClientStats) -> None:
        self.num_bytes_received += client.num_bytes
        self.num_done += client.num_done
        self.num_failed += client.num_failed

    def lent(self, server: ServerStats) -> None:
        self.num_bytes_sent += server.num_bytes_sent
        self.num_done += server.num_released
        self.num_failed += server.num_failed


class NativeWorker:
    """Load in the constructor (slow), then ``await start()`` ... ``await stop()``. Implements ``protocol.Worker``."""

    disconnected = False  # its engine is in this process
    serves_alone = True

    def __init__(
        self, load_options: LoadOptions, config: EngineConfig, options: WorkerOptions, clock: Clock | None = None
    ) -> None:
        if options.handoff.lease_s != config.lease_s:
            raise LocalError(
                "the engine's lease and the hand-off's lease differ", field="lease_s", fix="set both alike"
            )
        if load_options.tp > 1:
            _check_one_rank_only(options)
        self.options = options
        self.role: Role = options.role
        self.incarnation = secrets.token_hex(8)
        # One that only decodes gets a named pool too where there is room: it may be told to prefill later.
        shared: Shared = "wanted" if options.role == "decode" else "needed"
        if options.handoff.transport == "tcp":
            shared = ""
        self.loaded: LoadedModel = load(load_options, self.incarnation, shared=shared)
        self.model_id = self.loaded.model_id
        self.tokenizer = self.loaded.tokenizer
        self.max_context = min(self.loaded.max_context, config.scheduler.max_context)
        self.fingerprint = self.loaded.fingerprint
        self.layout = self.loaded.pool.whole.layout
        self.kv_port = 0
        self._nixl = (
            NixlPool(self.loaded.pool.shared, self.incarnation) if options.handoff.transport == "nixl" else None
        )
        computed_by = f"{load_options.dtype}, weights {load_options.weights}"
        tier = open_tier(options.tier, self.fingerprint, self.layout, computed_by)
        self.engine = Engine(self.loaded.model, self.loaded.pool, config, clock or MonotonicClock(), tier)
        self.kv_events = KVEventLog(
            *(self.incarnation, self.layout.block_size, self._take_kv_snapshot, clock or MonotonicClock()),
            hashes_worth_keeping(self.loaded.pool.num_blocks),
        )
        self.engine.on_block_events = self.kv_events.append
        self._bridge: _Bridge | None = None
        self._server: HandoffServer | None = None
        self._client: HandoffClient | None = None
        self._past = _Moved()

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self.engine.alive

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(self.loaded.config.eos_token_ids)

    @property
    def backend(self) -> str:
        return self.loaded.backend

    @property
    def identity(self) -> Identity:
        pool = self.loaded.pool.whole
        return Identity(
            incarnation=self.incarnation,
            host=host_identity(),
            shm_name=pool.name,
            layout=pool.layout,
            num_blocks=pool.num_blocks,
            fingerprint=self.fingerprint,
            nixl=None if self._nixl is None else self._nixl.memory,
            ranks=rank_pools_of(pool),
        )

    async def start(self) -> None:
        self._bridge = _Bridge(asyncio.get_running_loop())
        self.engine.start()
        if self.loaded.ranks is not None:
            self.loaded.ranks.watch(on_lost=self.engine.stop)
        if self.role != "decode":
            await self._start_lending()
        if self.role != "prefill":
            self._client = self._new_client()

    def _new_client(self) -> HandoffClient:
        return HandoffClient(self.identity, self.loaded.pool.whole, self.options.handoff, nixl=self._nixl)

    async def _start_lending(self) -> None:
        options = self.options
        server = HandoffServer(self.identity, self.loaded.pool.whole, _Backend(self.engine), options.handoff)
        self.kv_port = await server.start(options.host, options.kv_port)
        self._server = server

    async def switch_role(self, role: Role, deadline_s: float) -> bool:
        """What the new role needs comes first, so that a failure changes nothing. Engine, blocks and cache stay."""
        if role != "decode" and self._server is None:
            await self._start_lending()
        if role != "prefill" and self._client is None:
            self._client = self._new_client()
        if role == "decode" and self._server is not None:
            if not await self._server.quiet(deadline_s):
                self._server.resume()
                if self.role == "prefill":
                    await self._stop_pulling()
                return False
            self._past.lent(self._server.stats())
            server, self._server, self.kv_port = self._server, None, 0
            await server.stop()
        elif role == "prefill":
            await self._stop_pulling()
        self.role = role
        return True

    async def _stop_pulling(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            self._past.add(client.stats())
            await client.close()

    async def drain(self, deadline_s: float) -> bool:
        """Let peers finish reading what they were offered. True if nobody had to be dropped."""
        return await self._server.stop(drain_s=deadline_s) if self._server is not None else True

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._server is not None:
            await self._server.stop()
        await asyncio.to_thread(self.engine.stop)
        if self.loaded.ranks is not None:
            await asyncio.to_thread(self.loaded.ranks.close)
        if self._nixl is not None:
            self._nixl.close()
        self.loaded.pool.whole.unlink()
        self.loaded.pool.close()

    def generate(
        self, request: GenerateRequest, prefill: PeerAddress | None = None, deadline_s: float = 600.0
    ) -> AsyncGenerator[WorkerEvent, bool | None]:
        """See ``protocol.Worker.generate``. Close the iterator (``aclose``) to abort."""
        if not self.engine.alive:
            raise CapacityError("the engine of this worker is not running", fix="retry on another worker")
        if prefill is None:
            return self._generate_here(request, deadline_s)
        if self._client is None:
            raise LocalError("a prefill worker does not decode", field="prefill", fix="send this to a decode worker")
        return self._generate_remote(request, prefill, deadline_s)

    async def _generate_here(
        self, request: GenerateRequest, deadline_s: float
    ) -> AsyncGenerator[WorkerEvent, bool | None]:
        mailbox = self._mailbox()
        deadline = _Deadline(deadline_s)
        self.engine.generate(request, mailbox.sink)
        try:
            scheduled = await deadline.bound(mailbox.get())
            assert isinstance(scheduled, Scheduled)
            yield Admitted(len(request.prompt_token_ids), scheduled.num_cached_tokens)
            times = _Times(deadline.elapsed_s())
            async with contextlib.aclosing(self._tokens(mailbox, deadline, times)) as outputs:
                async for output in outputs:
                    if (yield output):
                        self.engine.abort(request.request_id)
                        break
            yield Finished(
                queue_s=scheduled.queue_s,
                prefill_s=times.token_s[0] - times.started_s,
                first_step_s=times.token_s[1] - times.token_s[0] if len(times.token_s) > 1 else 0.0,
            )
        finally:
            self.engine.abort(request.request_id)

    async def _generate_remote(
        self, request: GenerateRequest, prefill: PeerAddress, deadline_s: float
    ) -> AsyncGenerator[WorkerEvent, bool | None]:
        """Reserve here, then let the peer compute and pull; decode once everything is in place."""
        mailbox = self._mailbox()
        deadline = _Deadline(deadline_s)
        num_prompt = len(request.prompt_token_ids)
        reserving = self.engine.reserve(request, mailbox.sink)
        try:
            reservation = await deadline.bound(asyncio.wrap_future(reserving))
            first, enough, moved = None, False, Moved()
            assert self._client is not None
            pull = self._client.pull(
                (prefill.host, prefill.port),
                request,
                reservation.num_cached_tokens,
                reservation.block_ids,
                deadline.remaining_s(),
                moved,
            )
            async with contextlib.aclosing(pull):
                async for event in pull:
                    if isinstance(event, Completed):
                        continue
                    first = event
                    num_remote = num_prompt - reservation.num_cached_tokens
                    yield Admitted(num_prompt, first.cached_tokens, num_remote, path="remote")
                    if first.output.finish_reason is not None:
                        break  # nobody will decode: what is still on its way is called off
                    if (yield first.output):
                        enough = True
                        break
            assert isinstance(first, FirstToken)
            if first.output.finish_reason is not None:
                yield first.output
            if enough or first.output.finish_reason is not None:
                yield _finished(first, moved)
                return
            self.engine.start_import(request.request_id, first.output)
            times = _Times(deadline.elapsed_s())
            async with contextlib.aclosing(self._tokens(mailbox, deadline, times)) as outputs:
                async for output in outputs:
                    if (yield output):
                        self.engine.abort(request.request_id)
                        break
            yield _finished(first, moved, times)
        finally:
            # Nothing writes into the blocks any more: the pull has ended, whichever way this is left.
            self.engine.abort(request.request_id)

    async def _tokens(self, mailbox: _Mailbox, deadline: _Deadline, times: _Times) -> AsyncGenerator[TokenOutput, None]:
        while True:
            event = await deadline.bound(mailbox.get())
            if isinstance(event, Scheduled):  # an imported request is announced when its first decode step is planned
                times.scheduled_s = deadline.elapsed_s()
                continue
            assert isinstance(event, Token)
            if len(times.token_s) < 2:
                times.token_s.append(deadline.elapsed_s())
            yield event.output
            if event.output.finish_reason is not None:
                return

    async def check_empty(self) -> None:
        """Assert that nothing is held once every request has ended. For tests and drills."""

        def check(engine: Engine) -> None:
            engine.check()
            stats = engine.stats()
            held = (stats.num_active, stats.num_blocks_used, stats.num_blocks_pinned, stats.num_leases)
            assert held == (0, 0, 0, 0), f"requests, blocks, pins, leases: {held}"

        await asyncio.wrap_future(self.engine.call(check))

    async def _take_kv_snapshot(self) -> tuple[int, list[bytes]]:
        def take(engine: Engine) -> tuple[int, list[bytes]]:
            engine.publish_block_events()  # so that the log and the hashes speak of one moment
            return self.kv_events.next_sequence, engine.cached_hashes()

        return await asyncio.wrap_future(self.engine.call(take))

    def stats(self) -> WorkerStats:
        totals = dataclasses.asdict(self.engine.stats())
        if self.engine.tiering is not None:
            totals |= dataclasses.asdict(self.engine.tiering.stats())
        moved = dataclasses.replace(self._past)
        if self._server is not None:
            moved.lent(self._server.stats())
        if self._client is not None:
            moved.add(self._client.stats())
        totals["transfer_bytes_sent"] = moved.num_bytes_sent
        totals["transfer_bytes_received"] = moved.num_bytes_received
        totals["num_transfers"] = moved.num_done
        totals["num_transfer_failures"] = moved.num_failed
        known = WorkerStats.__struct_fields__
        return WorkerStats(**{name: value for name, value in totals.items() if name in known})

    def _mailbox(self) -> _Mailbox:
        assert self._bridge is not None, "start the worker first"
        return _Mailbox(self._bridge)


def _check_one_rank_only(options: WorkerOptions) -> None:
    """What a worker of several ranks cannot do, by name."""
    if options.handoff.transport == "nixl":
        raise LocalError("several ranks do not hand off by NIXL", field="transport", fix="use auto, shm or tcp")
    if (field := options.tier.asked_by) is not None:
        raise LocalError("several ranks have no KV tier", field=field, fix="leave it out, or use one rank")


@dataclass
class _Times:
    """When the engine got to one sequence, in seconds since it was asked for."""

    started_s: float  # the wait for the next token begins
    scheduled_s: float | None = None
    token_s: list[float] = field(default_factory=list)  # of the first two that come after


def _finished(first: FirstToken, moved: Moved, times: _Times | None = None) -> Finished:
    finished = Finished(
        queue_s=first.queue_s,
        prefill_s=first.prefill_s,
        transfer_bytes=moved.num_bytes,
        transfer_s=moved.transfer_s,
        copying_s=moved.copying_s,
        exposed_s=moved.exposed_s,
    )
    if times is not None and times.scheduled_s is not None and times.token_s:
        finished = msgspec.structs.replace(
            finished,
            decode_queue_s=times.scheduled_s - times.started_s,
            first_step_s=times.token_s[0] - times.scheduled_s,
        )
    return finished


class _Deadline:
    """A point in time that every wait of one request shares."""

    def __init__(self, deadline_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._at_s = self._started_s + deadline_s

    def elapsed_s(self) -> float:
        return self._loop.time() - self._started_s

    def remaining_s(self) -> float:
        return max(0.0, self._at_s - self._loop.time())

    async def bound(self, wait: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(self._at_s):
                return await wait
        except TimeoutError:
            raise CapacityError(
                f"the request's deadline of {self._at_s - self._started_s:.0f} s has passed", fix="retry later"
            ) from None
