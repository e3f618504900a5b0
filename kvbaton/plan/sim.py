"""The event simulator: the live router's policy and lifecycle, the live scheduler and block manager, a virtual clock.

    arrival -> (queue at the router while nobody has room) -> decide -> local:  worker's queue
                                                                     -> remote: decode reserves, prefill computes chunk
                                                                        by chunk, links carry them, decode goes on

Nothing that decides is written here again: ``policy.decide`` routes, ``Lifecycle`` allows or forbids, ``Scheduler``
batches, ``BlockManager`` caches and evicts, a ``Scaler`` scales. Time comes from step and link models only.
Links serve chunks first come, first served; each worker has one in and one out, and there may be one shared by all.

Invariants: the same arguments give the same bytes; events at one time run in the order they were made; every request
ends in a terminal state. Knows nothing about files, hardware names or SLOs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from kvbaton.engine.sequence import Mode, Sequence
from kvbaton.plan.sim_costs import exact_costs, worker_cost
from kvbaton.plan.sim_incidents import Fleet
from kvbaton.plan.sim_index import SimIndex
from kvbaton.plan.sim_record import GapHistogram, Record
from kvbaton.plan.sim_result import SimResult, collect
from kvbaton.plan.sim_spec import FleetSpec, Incidents
from kvbaton.plan.sim_worker import TOKEN, Chunk, SimWorker
from kvbaton.plan.workload import Trace, TraceRequest
from kvbaton.router.cost import FleetCosts
from kvbaton.router.lifecycle import Event, State
from kvbaton.router.policy import Decision, NoWorker, RequestView, decide
from kvbaton.types import CapacityError, GenerateRequest, LocalError, SamplingParams

CALM = Incidents()


class Simulation:
    """One fleet, one trace, one run."""

    def __init__(
        self, fleet: FleetSpec, trace: Trace, incidents: Incidents = CALM, costs: FleetCosts | None = None
    ) -> None:
        """``costs``: what the router believes; None: what is true."""
        self.spec = fleet
        self.incidents = incidents
        self.records: dict[str, Record] = {}
        self.gaps = GapHistogram()
        self.now_s = 0.0
        self.num_unfinished = 0
        self._events: list[tuple[float, int, str, tuple]] = []
        self._order = count()
        self._turn = 0
        self._queue: deque[Record] = deque()
        self._shared_free_s = 0.0
        self.wire_bytes = 0
        self.fleet = Fleet(fleet, incidents, self.records, self.gaps)
        self.fleet.num_unrouted = lambda: len(self._queue)
        self._index = SimIndex(self._block_size, self._index_blocks, fleet.kv_lag_s)
        self._costs = costs or FleetCosts()
        if costs is None and fleet.policy.by_cost:
            mean = sum(each.output_tokens for each in trace.requests) / max(1, len(trace.requests))
            self._costs = exact_costs(fleet, {name: w.spec for name, w in self.fleet.workers.items()}, mean)
        self._load(trace)

    @property
    def _block_size(self) -> int:
        sizes = {pool.worker.block_size for pool in self.spec.pools}
        if len(sizes) != 1:
            raise LocalError(f"pools with different block sizes {sorted(sizes)}", field="block_size")
        return sizes.pop()

    @property
    def _index_blocks(self) -> int:
        return max(pool.worker.num_blocks + pool.worker.tier_blocks for pool in self.spec.pools)

    def _load(self, trace: Trace) -> None:
        """All arrivals as events. Trace blocks become hashes of the workers' own block size."""
        size = self._block_size
        per_block = 0
        if trace.block_tokens is not None:
            if trace.block_tokens % size:
                raise LocalError(
                    f"trace blocks of {trace.block_tokens} tokens are no multiple of the block size {size}",
                    field="block_size",
                    fix="choose a divisor",
                )
            per_block = trace.block_tokens // size
        cache: dict[int, bytes] = {}
        for index, request in enumerate(trace.requests):
            record = Record(
                f"r{index}", request.arrival_s, request.prompt_tokens, request.output_tokens,
                _hashes(request, per_block, size, cache),
            )  # fmt: skip
            self.records[record.request_id] = record
            self._push(request.arrival_s + self.spec.admission_s, "heard", record)
        self.num_unfinished = len(self.records)

    def _push(self, at_s: float, kind: str, *what: object) -> None:
        heappush(self._events, (at_s, next(self._order), kind, what))

    # -- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> SimResult:
        """Until every request has ended."""
        for at_s, kind, what in self.fleet.first_events():
            self._push(at_s, kind, *what)
        handlers: dict[str, Callable[..., None]] = {
            "heard": self._heard, "arrive": self._arrive, "step": self._step_over, "landed": self._landed,
            "down": self._down, "up": self._up, "scale": self._scale, "give_up": self._give_up, "loaded": self._loaded,
            "read": self._was_read,
        }  # fmt: skip
        while self._events and self.num_unfinished:
            self.now_s, _, kind, what = heappop(self._events)
            handlers[kind](*what)
        for record in self.records.values():
            if not record.lifecycle.ended:  # nobody is left who could serve it
                self._refuse(record)
        return collect(self.spec, self.records.values(), self.fleet, self.gaps, self.now_s, self.wire_bytes)

    def _heard(self, record: Record) -> None:
        """On a machine whose cores are all busy the request is not read at once."""
        machine = self.fleet.machine
        wait_s = machine.router_wait_s if machine is not None else 0.0
        if wait_s:
            self._push(self.now_s + wait_s, "arrive", record)
        else:
            self._arrive(record)

    def _arrive(self, record: Record) -> None:
        record.lifecycle.on(Event.ACCEPT)
        if self.incidents.give_up_s is not None:
            self._push(record.arrival_s + self.incidents.give_up_s, "give_up", record)
        if len(self._queue) >= self.spec.max_queued:
            self._end(record, Event.REFUSE)
        elif self._queue or not self._dispatch(record):
            self._queue.append(record)

    def _drain_queue(self) -> None:
        while self._queue:  # only its head is tried: nobody overtakes
            record = self._queue[0]
            if not record.lifecycle.ended and not self._dispatch(record):
                return
            self._queue.popleft()

    # -- routing ---------------------------------------------------------------------------------------------------

    def _dispatch(self, record: Record) -> bool:
        """Route a request. False: it must wait until somebody has room."""
        if record.lifecycle.ended:
            return True
        members = list(self.fleet.views(record, self._index, self.now_s))
        view = RequestView(
            num_prompt_tokens=record.to_prefill,
            num_prompts=1,
            longest_prompt_tokens=record.to_prefill,
            max_total_tokens=record.prompt_tokens + record.output_tokens,
        )
        while True:
            self._turn += 1
            try:
                decision = decide(
                    view, members, self.spec.policy, self._turn, self.spec.split, record.prefill_failed, self._costs
                )
            except NoWorker:
                if self.fleet.anybody_to_come and record.lifecycle.state is State.ADMITTED:
                    return False
                self._refuse(record)  # as live: one that lost its worker is not kept waiting for another to start
                return True
            try:
                self._place(record, decision)
                break
            except CapacityError:  # ask the others that decode, then wait
                members = [each for each in members if each.name != decision.decode]
                if all(each.role == "prefill" for each in members):
                    return False
            except LocalError:
                self._refuse(record)  # it can never fit there
                return True
        record.lifecycle.on(Event.DISPATCH)
        record.attempt += 1
        record.reason = decision.reason
        cached, work_s = decision.foretold_cached_tokens, decision.terms.get("prefill_s", 0.0)
        sent = self.fleet.workers[decision.prefill or decision.decode].sent
        sent.prompt(record.request_id, max(1, record.to_prefill - cached), cached, 1, self.now_s, work_s)
        names = (decision.prefill, decision.decode)
        self._index.dispatched(record, [self.fleet.workers[name] for name in names if name is not None])
        return True

    def _place(self, record: Record, decision: Decision) -> None:
        target = self.fleet.workers[decision.decode]
        record.prefill, record.decode = decision.prefill, decision.decode
        self._settle(target)
        if decision.prefill is None:
            target.active[record.request_id] = record
            self._at_worker(target, record, "full", self._read_at_s(target))
            return
        source = self.fleet.workers[decision.prefill]
        record.have_tokens = target.scheduler.reserve_import(self._sequence(record, "import"))
        self._settle(source)
        record.ready_s = 0.0
        source.active[record.request_id] = target.active[record.request_id] = record
        assert self.spec.handoff is not None
        asked_s = self._read_at_s(target)
        if self.spec.handoff.reserves_between_steps and target.busy:
            asked_s = max(asked_s, target.end_s)
        self._at_worker(source, record, "prefill_only", asked_s + self._read_at_s(source) - self.now_s)

    def _read_at_s(self, worker: SimWorker) -> float:
        """When a worker that is sent something now has read it."""
        machine = self.fleet.machine
        return self.now_s + (machine.worker_wait_s(worker.name) if machine is not None else 0.0)

    def _at_worker(self, worker: SimWorker, record: Record, mode: Mode, at_s: float) -> None:
        attempt = record.attempt + 1  # dispatch is about to count it
        if at_s > self.now_s:
            self._push(at_s, "read", worker, record, mode, attempt)
        else:
            self._enqueue(worker, record, mode, attempt)

    def _was_read(self, worker: SimWorker, record: Record, mode: Mode, attempt: int) -> None:
        if record.lifecycle.ended or attempt != record.attempt:
            return
        self._settle(worker)
        try:
            self._enqueue(worker, record, mode, attempt)
        except LocalError:
            self._refuse(record)

    def _enqueue(self, worker: SimWorker, record: Record, mode: Mode, attempt: int) -> None:
        """To the scheduler, at once or when what the worker's host tier holds of the prompt is loaded."""
        ready_s = worker.tier.load_until_s(record, worker.blocks, self.now_s)
        if ready_s is not None:
            self._push(ready_s, "loaded", worker, record, mode, attempt)
            return
        try:
            worker.scheduler.add(self._sequence(record, mode))
        except LocalError:
            self._release(record)
            raise
        self._kick(worker)

    def _loaded(self, worker: SimWorker, record: Record, mode: Mode, attempt: int) -> None:
        if record.lifecycle.ended or attempt != record.attempt:
            return
        self._settle(worker)
        worker.tier.install(record, worker.blocks)
        try:
            worker.scheduler.add(self._sequence(record, mode))
        except LocalError:
            self._release(record)
            self._refuse(record)
            return
        self._kick(worker)

    def _sequence(self, record: Record, mode: Mode) -> Sequence:
        request = GenerateRequest(record.request_id, (), SamplingParams(max_tokens=record.to_generate))
        return Sequence(request, mode, record.to_prefill, record.hashes)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _settle(self, worker: SimWorker) -> None:
        if worker.settle(self.now_s):
            self._push(worker.end_s, "step", worker, worker.incarnation)

    def _kick(self, worker: SimWorker) -> None:
        if not worker.busy and worker.begin(self.now_s):
            self._push(worker.end_s, "step", worker, worker.incarnation)

    def _step_over(self, worker: SimWorker, incarnation: int) -> None:
        if incarnation != worker.incarnation:
            return
        outcome = worker.finish_step()
        self._index.worked(worker, self.now_s)
        for record in outcome.finished:
            worker.active.pop(record.request_id, None)
            record.finish_s = self.now_s
            self._end(record, Event.COMPLETE)
        for chunk in outcome.chunks:
            self._send(worker, chunk)
        for record, seq in outcome.prefilled:
            self._first_token(worker, record, seq)
        self._kick(worker)
        if self._queue and (outcome.finished or outcome.prefilled):
            self._drain_queue()
        self.fleet.retire_if_idle(worker, self.now_s)

    # -- hand-off --------------------------------------------------------------------------------------------------

    def _send(self, source: SimWorker, chunk: Chunk) -> None:
        """The links carry what the chunk made ready: layer by layer while it was computed, or all of it now."""
        record, handoff = chunk.record, self.spec.handoff
        assert handoff is not None and record.decode is not None
        stop = chunk.start + chunk.num_tokens
        first = record.ready_s == 0.0
        # What the prefill side found in its own cache is ready as soon as the first chunk starts.
        start = record.have_tokens if first else max(chunk.start, record.have_tokens)
        if stop == record.to_prefill:
            size = source.spec.block_size
            stop = -(-stop // size) * size
        num_bytes = max(0, stop - start) * handoff.token_bytes
        if first:
            num_bytes += handoff.fixed_bytes
        if not num_bytes:
            record.ready_s = max(record.ready_s, chunk.end_s)
            return
        target = self.fleet.workers[record.decode]
        free_s = max(source.out_link_free_s, target.in_link_free_s)
        rate = handoff.link.bytes_per_s
        if handoff.shared_link is not None:
            free_s = max(free_s, self._shared_free_s)
            rate = min(rate, handoff.shared_link.bytes_per_s)
        carry_s, layers = num_bytes / rate, handoff.num_layers
        if handoff.layer_wise:
            ready_s = chunk.start_s + (chunk.end_s - chunk.start_s) / layers
            done_s = max(chunk.end_s + carry_s / layers, max(ready_s, free_s) + carry_s)
        else:
            done_s = max(chunk.end_s, free_s) + carry_s
        source.out_link_free_s = target.in_link_free_s = done_s
        if handoff.shared_link is not None:
            self._shared_free_s = done_s
        source.link_busy_s += carry_s
        record.ready_s = done_s + handoff.link.startup_s
        record.wire_bytes += num_bytes
        self.wire_bytes += num_bytes

    def _first_token(self, source: SimWorker, record: Record, seq: Sequence) -> None:
        handoff = self.spec.handoff
        assert handoff is not None
        if not record.replayed_tokens:
            record.cached_tokens = seq.num_cached_tokens
        record.got_token(self.now_s + handoff.control_s, self.gaps)
        record.lifecycle.on(Event.FIRST_BYTES)
        if record.to_generate == 1:  # answered at once, and nothing needs to arrive
            self._release(record)
            record.finish_s = record.last_token_s
            self._end(record, Event.COMPLETE)
            return
        landed_s = max(record.ready_s, self.now_s) + handoff.control_s
        record.exposed_s = landed_s - self.now_s
        self._push(landed_s, "landed", record, record.attempt)

    def _landed(self, record: Record, attempt: int) -> None:
        """The last byte is in place: decode goes on, and prefill lets go."""
        if record.lifecycle.ended or attempt != record.attempt:
            return
        assert record.decode is not None and record.prefill is not None
        target, source = self.fleet.workers[record.decode], self.fleet.workers[record.prefill]
        self._settle(source)
        source.scheduler.hold_released(record.request_id)
        source.active.pop(record.request_id, None)
        self._settle(target)
        target.scheduler.import_done(record.request_id, TOKEN)
        self._index.worked(target, self.now_s)
        self._kick(target)
        self._kick(source)
        self.fleet.retire_if_idle(source, self.now_s)
        if self._queue:
            self._drain_queue()

    # -- endings and incidents -------------------------------------------------------------------------------------

    def _end(self, record: Record, event: Event) -> None:
        lifecycle = record.lifecycle
        self._index.over(record, self.now_s)
        if event is Event.COMPLETE and lifecycle.state is State.DISPATCHED:
            lifecycle.on(Event.FIRST_BYTES)
        lifecycle.on(event)
        self.num_unfinished -= 1

    def _refuse(self, record: Record) -> None:
        """Nobody serves it; of one that a worker failed that is a failure."""
        lifecycle = record.lifecycle
        if record.first_token_s is not None and lifecycle.state is State.DISPATCHED:
            lifecycle.on(Event.FIRST_BYTES)
        failed = record.first_token_s is not None or lifecycle.state is State.RETRYING
        self._end(record, Event.FAIL if failed else Event.REFUSE)

    def _release(self, record: Record) -> None:
        """Free everything the request holds anywhere."""
        for name in dict.fromkeys((record.prefill, record.decode)):
            if name is None:
                continue
            worker = self.fleet.workers[name]
            worker.sent.computed(record.request_id)
            if worker.active.pop(record.request_id, None) is not None:
                self._settle(worker)
                if not worker.scheduler.hold_released(record.request_id):
                    worker.scheduler.abort(record.request_id)
                self._kick(worker)

    def _give_up(self, record: Record) -> None:
        """The client leaves if it has no first token yet."""
        if record.lifecycle.ended or record.first_token_s is not None:
            return
        self._release(record)
        self._end(record, Event.CLIENT_GONE)
        self._drain_queue()

    def _down(self, worker: SimWorker, down_s: float) -> None:
        """A worker dies: its requests go on elsewhere, before the first token from the prompt, later behind it."""
        self._settle(worker)
        victims = [(record, self._num_generated(record)) for record in worker.active.values()]
        worker.active.clear()
        worker.accepting = False
        worker.reset()
        self._index.forget(worker)
        for record, generated in victims:
            self._release(record)
            self._lost(record, worker, generated)
        self._push(self.now_s + down_s, "up", worker)

    def _num_generated(self, record: Record) -> int:
        """Output tokens the client has."""
        seq = self.fleet.workers[record.decode].scheduler.get(record.request_id) if record.decode is not None else None
        fresh = seq.num_output_tokens if seq is not None else 0
        if record.prefill is not None and record.lifecycle.state is State.STREAMING:
            fresh = max(fresh, 1)  # the prefill side's, which the decode side learns of with the last byte
        return record.replayed_tokens + fresh

    def _lost(self, record: Record, worker: SimWorker, generated: int) -> None:
        """What the router does about a request whose worker died."""
        lifecycle = record.lifecycle
        streamed = record.first_token_s is not None
        if streamed and lifecycle.state is State.DISPATCHED:
            lifecycle.on(Event.FIRST_BYTES)
        if not (lifecycle.may_resume if streamed else lifecycle.may_retry):
            self._end(record, Event.FAIL)
            return
        self._index.over(record, self.now_s)
        if lifecycle.state is State.STREAMING:  # it went well for a while: others may be back
            record.tried.clear()
        lifecycle.on(Event.RESUME if streamed else Event.RETRY)
        record.replayed_tokens = generated
        record.attempt += 1
        record.tried.add(worker.name)
        record.prefill_failed = worker.name == record.prefill
        if self._queue or not self._dispatch(record):
            self._queue.append(record)

    def _up(self, worker: SimWorker) -> None:
        worker.accepting = True
        self._drain_queue()

    def _scale(self) -> None:
        at_s, started = self.fleet.scale(self.now_s)
        for ready_s, worker in started:
            self._costs.workers.setdefault(worker.name, worker_cost(worker.spec))
            self._push(ready_s, "up", worker)
        self._push(at_s, "scale")


def _hashes(request: TraceRequest, per_block: int, size: int, cache: dict[int, bytes]) -> list[bytes]:
    """Hashes of the full blocks of a prompt, ``per_block`` of them for each block of the trace."""
    if not per_block:
        return []
    hashes = []
    known = len(request.block_ids) * per_block  # a trace may say less than it could
    for number in range(min(request.prompt_tokens // size, known)):
        key = request.block_ids[number // per_block] * per_block + number % per_block
        found = cache.get(key)
        if found is None:
            found = cache[key] = key.to_bytes(16, "big", signed=True)
        hashes.append(found)
    return hashes


def simulate(
    fleet: FleetSpec, trace: Trace, incidents: Incidents = CALM, costs: FleetCosts | None = None
) -> SimResult:  # fmt: skip
    """Run it."""
    return Simulation(fleet, trace, incidents, costs).run()
