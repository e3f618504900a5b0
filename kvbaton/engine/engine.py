"""The engine loop: one thread that owns the scheduler, the block manager, the samplers and the model.

Everybody else talks to it by posting commands; it answers by events handed to each request's sink. Invariants: only the
engine thread touches the scheduler and the blocks; a request gets exactly one terminal event (a ``Token`` with a finish
reason, or ``Failed``), except that an aborted one gets none; a failed step fails the requests that were in it and
no others. Knows nothing about asyncio, HTTP, text or how KV crosses to a peer.

Sinks are called on the engine thread, so they must be cheap and must not raise.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import numpy as np

from kvbaton.clock import Clock
from kvbaton.engine.events import EngineStats, Event, Failed, Progress, Reservation, Scheduled, Sink, Token
from kvbaton.engine.model import Model
from kvbaton.engine.pool import KVPool
from kvbaton.engine.sampler import SequenceSampler, check_sampling
from kvbaton.engine.scheduler import Scheduler, SchedulerConfig, StepItem, StepPlan
from kvbaton.engine.sequence import Mode, Sequence
from kvbaton.engine.step_input import step_input
from kvbaton.kv.blocks import BlockEvents, BlockManager
from kvbaton.kv.tier import Tier
from kvbaton.kv.tiering import Tiering
from kvbaton.types import CapacityError, GenerateRequest, KvbatonError, LocalError, TokenOutput

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineConfig:
    scheduler: SchedulerConfig
    prefix_caching: bool = True
    lease_s: float = 30.0  # how long offered blocks stay pinned without a sign of life from the reader


@dataclass
class _Active:
    """What the engine keeps of one request until its terminal event."""

    seq: Sequence
    sampler: SequenceSampler
    sink: Sink
    arrived_s: float
    leased: bool = False  # its blocks are pinned for a reader
    announced: bool = False  # Scheduled was sent


@dataclass
class _Counters:
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_lease_expiries: int = 0
    num_failed_steps: int = 0
    num_reservations_refused: int = 0
    prefill_busy_s: float = 0.0
    decode_busy_s: float = 0.0


@dataclass(frozen=True)
class _Stop:
    done: threading.Event = field(default_factory=threading.Event)


class Engine:
    """Runs ``model`` over ``pool``. Call ``start`` once, ``stop`` once."""

    def __init__(
        self, model: Model, pool: KVPool, config: EngineConfig, clock: Clock, tier: Tier | None = None
    ) -> None:
        self.model = model
        self.pool = pool
        self.config = config
        self._clock = clock
        self._blocks = BlockManager(
            pool.num_blocks,
            pool.layout.block_size,
            prefix_caching=config.prefix_caching,
            on_generation=pool.publish_generation,
        )
        self._scheduler = Scheduler(config.scheduler, self._blocks)
        self._active: dict[str, _Active] = {}
        self._commands: queue.SimpleQueue[Callable[[], None] | _Stop] = queue.SimpleQueue()
        self.tiering = Tiering(tier, self._blocks, pool, self._commands.put, clock) if tier is not None else None
        self._outbox: list[tuple[Sink, Event]] = []
        self._counters = _Counters()
        self._thread = threading.Thread(target=self._run, name="kvbaton-engine", daemon=True)
        self._stopped = False
        self._stalled = False  # there is work, but no room for it until somebody gives blocks back
        self._idle_poll_s = max(0.05, min(1.0, config.lease_s / 4))
        # Told on the engine thread what changed in the prefix cache; set it before ``start``. Cheap, and never raises.
        self.on_block_events: Callable[[BlockEvents], None] | None = None

    # -- called from any thread ----------------------------------------------------------------------------------

    def start(self) -> None:
        if self.tiering is not None:
            self.tiering.start()
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the loop; requests still active get ``Failed``. The step that is running is finished first."""
        if self._stopped or not self._thread.is_alive():
            self._stopped = True
            return
        stop = _Stop()
        self._commands.put(stop)
        stop.done.wait(timeout_s)
        self._thread.join(timeout_s)
        self._stopped = True

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopped

    def generate(self, request: GenerateRequest, sink: Sink) -> None:
        """Prefill and decode here. Events: Scheduled, then Token ... until one carries a finish reason; or Failed."""
        self._commands.put(lambda: self._add(request, sink, "full"))

    def prefill(self, request: GenerateRequest, sink: Sink) -> None:
        """Prefill for a reader elsewhere: Scheduled (with blocks), Progress ..., one Token; or Failed.

        The blocks stay pinned until ``release`` or ``abort``, or until ``lease_s`` passed without ``renew``.
        """
        self._commands.put(lambda: self._add(request, sink, "prefill_only"))

    def reserve(self, request: GenerateRequest, sink: Sink) -> Future[Reservation]:
        """Take blocks for a prompt whose KV a hand-off will write. CapacityError when there is no room."""
        future: Future[Reservation] = Future()
        self._commands.put(lambda: self._reserve(request, sink, future))
        return future

    def start_import(self, request_id: str, first: TokenOutput) -> None:
        """The reserved blocks are filled: decode from ``first`` on (``first`` itself is not sent to the sink again)."""
        self._commands.put(lambda: self._start_import(request_id, first))

    def renew(self, request_id: str, lease_s: float) -> Future[bool]:
        future: Future[bool] = Future()

        def renew() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(self._renew(request_id, lease_s))

        self._commands.put(renew)
        return future

    def release(self, request_id: str) -> None:
        """The reader has everything: unpin and drop the blocks of a prefill."""
        self._commands.put(lambda: self._forget(request_id))

    def abort(self, request_id: str) -> None:
        """Forget a request at any point; harmless if it is gone. No event follows.

        A receiving request must be aborted only when nothing writes into its blocks any more.
        """
        self._commands.put(lambda: self._forget(request_id))

    def call(self, function: Callable[[Engine], object]) -> Future:
        """Run ``function`` on the engine thread between two steps (stats, checks, cache clearing)."""
        future: Future = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever asked went away
            try:
                future.set_result(function(self))
            except Exception as error:
                future.set_exception(error)

        self._commands.put(run)
        return future

    def stats(self) -> EngineStats:
        """A snapshot without a trip through the loop: single reads of integers, each exact on its own."""
        blocks, counters = self._blocks, self._counters
        return EngineStats(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            waiting_prompt_tokens=self._scheduler.waiting_prompt_tokens,
            num_active=len(self._active),
            num_blocks=blocks.num_blocks,
            num_blocks_used=blocks.num_used,
            num_blocks_free=blocks.num_free,
            num_blocks_cached=blocks.num_cached,
            num_blocks_pinned=blocks.num_pinned,
            num_leases=blocks.num_leases,
            num_steps=counters.num_steps,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_output_tokens=counters.num_output_tokens,
            num_preemptions=counters.num_preemptions,
            num_lease_expiries=counters.num_lease_expiries,
            num_failed_steps=counters.num_failed_steps,
            prefill_busy_s=counters.prefill_busy_s,
            decode_busy_s=counters.decode_busy_s,
            num_receiving=self._scheduler.num_receiving,
            num_held=self._scheduler.num_held,
            num_reservations_refused=counters.num_reservations_refused,
        )

    # -- engine thread -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant of the state the loop owns. Engine thread only (``call(Engine.check)``)."""
        self._scheduler.check()
        self._blocks.check()

    def publish_block_events(self) -> None:
        """Tell what changed in the prefix cache since the last time."""
        if events := self._blocks.drain_events():
            if self.tiering is not None:
                self.tiering.offer(events.stored)
            if self.on_block_events is not None:
                self.on_block_events(events)

    def cached_hashes(self) -> list[bytes]:
        return self._blocks.cached_hashes()

    def clear_cache(self) -> None:
        self._blocks.clear_cache()

    def _run(self) -> None:
        stop: _Stop | None = None
        try:
            while stop is None:
                stop = self._handle_commands()
                self._expire_leases()
                if stop is None:
                    self._step()
                self.publish_block_events()  # before the tokens: whoever saw an answer end can read what it changed
                self._flush()
        finally:
            if self.tiering is not None:
                self.tiering.stop()
            for request_id in list(self._active):
                self._fail(request_id, LocalError("the engine stopped"))
            self._flush()
            if stop is not None:
                stop.done.set()

    def _has_work(self) -> bool:
        return self._scheduler.num_waiting > 0 or self._scheduler.num_running > 0

    def _handle_commands(self) -> _Stop | None:
        """Run what was posted; wait for something when there is nothing to compute."""
        block = self._stalled or not self._has_work()
        try:
            command = self._commands.get(block=block, timeout=self._idle_poll_s if block else None)
            while True:
                if isinstance(command, _Stop):
                    return command
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return None

    def _flush(self) -> None:
        if self._outbox:
            batch, self._outbox = self._outbox, []
            for sink, event in batch:
                sink(event)

    def _add(self, request: GenerateRequest, sink: Sink, mode: Mode) -> None:
        try:
            self._check_request(request)
            seq = Sequence(request=request, mode=mode)
            self._active[request.request_id] = self._make_active(request, seq, sink)
        except KvbatonError as error:
            self._outbox.append((sink, Failed(error)))
            return
        self._once_fetched(seq, lambda: self._enqueue(seq))

    def _once_fetched(self, seq: Sequence, go_on: Callable[[], None]) -> None:
        """At once, unless the shared tier may have some of its prefix."""
        size = self.pool.layout.block_size
        num_matchable = (seq.num_tokens - 1) // size  # the last token is always computed
        chain = seq.hashes_of(num_matchable, size)[:num_matchable] if self.tiering is not None else []
        if self.tiering is None or not self.tiering.fetch(seq.request_id, chain, go_on):
            go_on()

    def _enqueue(self, seq: Sequence) -> None:
        try:
            self._scheduler.add(seq)
        except KvbatonError as error:
            self._fail(seq.request_id, error)

    def _check_request(self, request: GenerateRequest) -> None:
        """Refuse here what would otherwise be an error of every sequence in its step."""
        if request.request_id in self._active:
            raise LocalError(f"request id {request.request_id} is already in use", field="request_id")
        vocab_size = self.model.config.vocab_size
        ids = request.prompt_token_ids
        if not ids or min(ids) < 0 or max(ids) >= vocab_size:
            raise LocalError(f"the prompt must be token ids in 0 .. {vocab_size - 1}, at least one", field="prompt")
        check_sampling(request.sampling, vocab_size)
        if not 0 <= request.num_resumed_tokens < len(ids):
            raise LocalError(
                f"num_resumed_tokens {request.num_resumed_tokens} must leave a prompt", field="num_resumed_tokens"
            )

    def _make_active(self, request: GenerateRequest, seq: Sequence, sink: Sink) -> _Active:
        sampler = make_sampler(request)
        return _Active(seq=seq, sampler=sampler, sink=sink, arrived_s=self._clock.now_s())

    def _reserve(self, request: GenerateRequest, sink: Sink, future: Future[Reservation]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            self._check_request(request)
            seq = Sequence(request=request, mode="import")
            self._active[request.request_id] = self._make_active(request, seq, sink)
        except Exception as error:
            future.set_exception(error)
            return
        self._once_fetched(seq, lambda: self._take_reservation(seq, future))

    def _take_reservation(self, seq: Sequence, future: Future[Reservation]) -> None:
        try:
            num_cached = self._scheduler.reserve_import(seq)
            self._counters.num_cached_tokens += num_cached
            future.set_result(Reservation(block_ids=tuple(seq.blocks), num_cached_tokens=num_cached))
        except Exception as error:
            self._counters.num_reservations_refused += isinstance(error, CapacityError)
            del self._active[seq.request_id]
            future.set_exception(error)

    def _start_import(self, request_id: str, first: TokenOutput) -> None:
        active = self._active.get(request_id)
        if active is None:
            return  # aborted meanwhile
        # What the prefix cache had is on the device already, and the host's copy of it may be old.
        self.pool.stage_in(active.seq.blocks[active.seq.num_cached_tokens // self.pool.layout.block_size :])
        active.sampler.resume([*resumed_token_ids(active.seq.request), first.token_id])
        self._scheduler.import_done(request_id, first)
        if first.finish_reason is not None:
            self._active.pop(request_id, None)

    def _renew(self, request_id: str, lease_s: float) -> bool:
        now_s = self._clock.now_s()
        return self._blocks.renew(request_id, now_s, now_s + lease_s)

    def _forget(self, request_id: str) -> None:
        active = self._active.pop(request_id, None)
        if active is None:
            return
        if self.tiering is not None:
            self.tiering.forget(request_id)
        if active.seq.state == "held":
            self._scheduler.hold_released(request_id)
        else:
            self._scheduler.abort(request_id)
        if active.leased:
            self._blocks.unpin(request_id)

    def _fail(self, request_id: str, error: KvbatonError) -> None:
        active = self._active.get(request_id)
        if active is not None:
            self._outbox.append((active.sink, Failed(error)))
            self._forget(request_id)

    def _expire_leases(self) -> None:
        now_s = self._clock.now_s()
        if self.tiering is not None:
            self.tiering.expire(now_s)
        for request_id in self._blocks.expire(now_s):
            self._counters.num_lease_expiries += 1
            active = self._active.get(request_id)
            if active is not None:
                active.leased = False
                log.warning("lease of %s expired: its reader showed no sign of life; blocks are freed", request_id)
                self._fail(request_id, CapacityError("the lease on the offered blocks expired"))

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        self._counters.num_preemptions += len(plan.preempted)
        self._stalled = not plan.items and not plan.preempted
        if not plan.items:
            return
        started_s = self._clock.now_s()
        self._announce(plan, started_s)
        try:
            logits = self.model.forward(step_input(plan), self.pool, self._layer_hook(plan))
            sampled = self._sample(plan, logits)
        except Exception as error:  # one bad step must not end the loop
            log.exception("step failed")
            self._counters.num_failed_steps += 1
            for item in plan.items:
                self._fail(item.seq.request_id, LocalError(f"the engine step failed: {error}"))
            return
        self._scheduler.complete(plan, sampled)
        self._account(plan, self._clock.now_s() - started_s)
        for request_id, output in sampled.items():
            self._emit(request_id, output)

    def _announce(self, plan: StepPlan, now_s: float) -> None:
        """Tell each sink when its request is first scheduled; pin what a reader was offered."""
        for item in plan.items:
            request_id = item.seq.request_id
            active = self._active[request_id]
            if active.announced:
                continue
            active.announced = True
            self._counters.num_cached_tokens += item.seq.num_cached_tokens
            if item.seq.mode == "prefill_only":
                self._blocks.pin(request_id, item.seq.blocks, now_s + self.config.lease_s)
                active.leased = True
                cached_blocks = item.seq.blocks[: item.start // self.pool.layout.block_size]
                for layer in range(self.pool.layout.num_layers if self.pool.device_tensor is not None else 0):
                    self.pool.stage_out(layer, cached_blocks)
            event = Scheduled(
                block_ids=tuple(item.seq.blocks),
                num_cached_tokens=item.seq.num_cached_tokens,
                queue_s=now_s - active.arrived_s,
            )
            self._outbox.append((active.sink, event))
        self._flush()

    def _layer_hook(self, plan: StepPlan) -> Callable[[int], None] | None:
        """Progress for readers after each layer; None when nobody in this step has one."""
        offered: list[tuple[StepItem, Sink]] = [
            (item, self._active[item.seq.request_id].sink) for item in plan.items if item.seq.mode == "prefill_only"
        ]
        if not offered:
            return None
        block_size = self.pool.layout.block_size

        def on_layer(layer: int) -> None:
            for item, sink in offered:
                stop = item.start + item.num_tokens
                if self.pool.device_tensor is not None:
                    self.pool.stage_out(layer, item.seq.blocks[item.start // block_size : -(-stop // block_size)])
                self._outbox.append((sink, Progress(tokens_ready=stop, layers_ready=layer + 1)))
            self._flush()

        return on_layer

    def _sample(self, plan: StepPlan, logits: np.ndarray) -> dict[str, TokenOutput]:
        sampling = [item.seq.request_id for item in plan.items if item.samples]
        assert logits.shape[0] == len(sampling), "one row of logits for each sequence that samples"
        return {request_id: self._sample_one(request_id, logits[i]) for i, request_id in enumerate(sampling)}

    def _sample_one(self, request_id: str, logits_row: np.ndarray) -> TokenOutput:
        """What one request asked for may end it, and nobody else in its batch."""
        try:
            return self._active[request_id].sampler.sample(logits_row)
        except Exception:
            log.exception("sampling failed")
            return TokenOutput(0, None, "error")

    def _emit(self, request_id: str, output: TokenOutput) -> None:
        active = self._active[request_id]
        self._counters.num_output_tokens += 1
        self._outbox.append((active.sink, Token(output)))
        if active.seq.mode == "prefill_only":
            return  # stays until its reader is done with the blocks
        if output.finish_reason is not None:
            del self._active[request_id]

    def _account(self, plan: StepPlan, step_s: float) -> None:
        """Share a step's time between the phases by rows."""
        self._counters.num_steps += 1
        self._counters.num_prompt_tokens += plan.num_prefill_tokens
        self._counters.prefill_busy_s += step_s * plan.num_prefill_tokens / plan.num_tokens
        self._counters.decode_busy_s += step_s * plan.num_decodes / plan.num_tokens


def resumed_token_ids(request: GenerateRequest) -> tuple[int, ...]:
    """The output at the end of the prompt of a request that is continued here."""
    return request.prompt_token_ids[len(request.prompt_token_ids) - request.num_resumed_tokens :]


def make_sampler(request: GenerateRequest) -> SequenceSampler:
    """It counts what was sampled before as its own; so its limits count from there too."""
    num_resumed, sampling = request.num_resumed_tokens, request.sampling
    if not num_resumed:
        return SequenceSampler(sampling, request.prompt_token_ids, request.eos_token_ids)
    min_tokens = sampling.min_tokens + num_resumed if sampling.min_tokens else 0
    whole = msgspec.structs.replace(sampling, max_tokens=sampling.max_tokens + num_resumed, min_tokens=min_tokens)
    sampler = SequenceSampler(whole, request.prompt_token_ids[:-num_resumed], request.eos_token_ids)
    sampler.resume(resumed_token_ids(request))
    return sampler
