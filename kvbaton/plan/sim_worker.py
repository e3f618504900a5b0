"""One simulated worker: the real scheduler and the real block manager under a virtual clock.

A step takes what the step model says of the scheduler's plan. When the plan is nothing but decodes, all steps until the
scheduler would plan anything else are taken at once; a touch in between (``settle``) takes only those that are over by
then and leaves the one under way, so the outcome is that of single steps.

Knows nothing about routing, links or arrivals.
"""

from __future__ import annotations

from kvbaton.engine.scheduler import Scheduler, SchedulerConfig, StepPlan
from kvbaton.engine.sequence import Sequence
from kvbaton.kv.blocks import BlockManager
from kvbaton.plan.sim_host import SharedMachine
from kvbaton.plan.sim_record import GapHistogram, Record
from kvbaton.plan.sim_spec import WorkerSpec
from kvbaton.plan.sim_tier import HostStore, HostTier
from kvbaton.plan.step_time import StepWork, pairs
from kvbaton.router.sent import Sent
from kvbaton.types import Role, TokenOutput

TOKEN = TokenOutput(0)
LAST_TOKEN = TokenOutput(0, finish_reason="length")
MAX_WAITING = 1 << 30  # the router's queue is the limit


class _Tokens(dict[str, TokenOutput]):
    """A token for every sequence; only those that finish are stored."""

    def __missing__(self, key: str) -> TokenOutput:
        return TOKEN


class Chunk:
    """A prefill chunk that ran: what the hand-off may send."""

    __slots__ = ("end_s", "num_tokens", "record", "seq", "start", "start_s")

    def __init__(self, record: Record, seq: Sequence, start: int, num_tokens: int, span_s: tuple[float, float]) -> None:
        self.record, self.seq, self.start, self.num_tokens = record, seq, start, num_tokens
        self.start_s, self.end_s = span_s


class StepOutcome:
    """What the simulation must react to after a step."""

    __slots__ = ("chunks", "finished", "prefilled")

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []  # of prefill_only sequences
        self.prefilled: list[tuple[Record, Sequence]] = []  # held now
        self.finished: list[Record] = []


class SimWorker:
    """Scheduler, blocks, and the step under way."""

    def __init__(
        self,
        name: str,
        role: Role,
        spec: WorkerSpec,
        records: dict[str, Record],
        gaps: GapHistogram,
        pooled: HostStore | None = None,
        machine: SharedMachine | None = None,
    ) -> None:
        """``pooled``: the host memory it shares with others, ``machine``: the cores; None: its own."""
        self.name = name
        self.role: Role = role
        self.spec = spec
        self.active: dict[str, Record] = {}
        self.in_link_free_s = 0.0
        self.out_link_free_s = 0.0
        self.accepting = True  # False while down, starting or draining
        self.born_s = 0.0
        self.gone_s: float | None = None
        self.prefill_busy_s = 0.0
        self.prefill_tokens = 0  # computed, in the time above
        self.decode_busy_s = 0.0
        self.num_steps = 0
        self.num_preemptions = 0
        self.peak_blocks = 0
        self.link_busy_s = 0.0
        self.num_lives = 0
        self.incarnation = 0  # stale events carry an older number
        self.end_s = 0.0
        self._records = records
        self._gaps = gaps
        self._pooled = pooled
        self._machine = machine
        self.step_log: list[tuple[float, float, int]] | None = None  # if wanted: (start, end, equal steps in between)
        self.reset()

    def reset(self) -> None:
        """An empty worker, as after a restart."""
        spec = self.spec
        self.blocks = BlockManager(spec.num_blocks, spec.block_size, spec.prefix_caching)
        config = SchedulerConfig(
            max(spec.max_batch_tokens, spec.max_running), spec.max_running, spec.max_context, MAX_WAITING,
            spec.max_chunk_tokens,
        )  # fmt: skip
        self.scheduler = Scheduler(config, self.blocks)
        self.sent = Sent()  # the router's own account of this worker
        self.tier = HostTier(spec, self._pooled)
        if self._machine is not None:
            self._machine.idle(self.name)
        self.active.clear()
        self.num_lives += 1
        self.incarnation += 1
        self._plan: StepPlan | None = None
        self._steps = 1
        self._start_s = 0.0
        self._context_tokens = 0

    @property
    def busy(self) -> bool:
        return self._plan is not None

    # -- time ------------------------------------------------------------------------------------------------------

    def begin(self, now_s: float, single: bool = False) -> bool:
        """Plan and start the next step, or the next run of equal steps. False when nothing can run."""
        plan = self.scheduler.schedule()
        self.num_preemptions += len(plan.preempted)
        if not plan.items:
            if self._machine is not None:
                self._machine.idle(self.name)
            return False
        self._plan, self._start_s, self._steps = plan, now_s, 1
        self.incarnation += 1
        used = self.blocks.num_used
        if used > self.peak_blocks:
            self.peak_blocks = used
        count = plan.num_decodes
        items = plan.items
        self._context_tokens = context = sum([item.start for item in items[:count]]) + count
        if len(items) == count and not plan.preempted:
            if not single and self._machine is None:  # beside others no two steps are alike
                self._steps = self.scheduler.steps_alike(plan)
            step_s = self.spec.step.decode_run_s(count, context, self._steps)
        else:
            step_s = self._mixed_s(plan, count, context)
        if self._machine is not None:
            outputs = sum(item.samples for item in items)
            step_s = self._machine.step_s(self.name, step_s, outputs, prefill=len(items) > count)
        self.end_s = now_s + step_s
        return True

    def _mixed_s(self, plan: StepPlan, count: int, context: int) -> float:
        step = self.spec.step
        looked_at = sum([pairs(item.start, item.num_tokens) for item in plan.items[count:]])
        chunks = len(plan.items) - count
        prefill = StepWork(plan.num_prefill_tokens, looked_at, num_chunks=chunks)
        self.prefill_tokens += plan.num_prefill_tokens
        if not count:
            duration_s = step.step_s(prefill)
            self.prefill_busy_s += duration_s
            return duration_s
        decode_s = step.step_s(StepWork(0, 0.0, count, context))
        if self.spec.mixed_batches:
            duration_s = step.step_s(StepWork(plan.num_prefill_tokens, looked_at, count, context, chunks))
        else:
            duration_s = decode_s + step.step_s(prefill)
        self.decode_busy_s += decode_s
        self.prefill_busy_s += duration_s - decode_s
        return duration_s

    def settle(self, now_s: float) -> bool:
        """Before anybody touches the scheduler: bring a run of decode steps up to now. True if its end moved."""
        plan = self._plan
        if plan is None or self._steps == 1 or now_s >= self.end_s:
            return False
        step, count = self.spec.step, plan.num_decodes
        over = step.decode_steps_within(count, self._context_tokens, now_s - self._start_s)
        over = min(over, self._steps - 1)
        if over:
            boundary_s = self._start_s + step.decode_run_s(count, self._context_tokens, over)
            outcome = StepOutcome()
            self._complete(over, boundary_s, outcome)
            assert not outcome.finished, "only the last step of a run finishes sequences"
            begun = self.begin(boundary_s, single=True)
            assert begun, "a running sequence goes on"
        else:
            self._steps = 1
            self.end_s = self._start_s + step.decode_run_s(count, self._context_tokens, 1)
            self.incarnation += 1
        return True

    def finish_step(self) -> StepOutcome:
        """The step, or run of steps, is over."""
        outcome = StepOutcome()
        self._complete(self._steps, self.end_s, outcome)
        self._plan = None
        return outcome

    def _complete(self, steps: int, end_s: float, outcome: StepOutcome) -> None:
        plan = self._plan
        assert plan is not None
        self.num_steps += steps
        if self.step_log is not None:
            self.step_log.append((self._start_s, end_s, steps))
        sampled = _Tokens()
        count = plan.num_decodes
        if count:
            self._decoded(plan, steps, end_s, sampled, outcome)
        if len(plan.items) == count and not plan.preempted:
            self.decode_busy_s += end_s - self._start_s
            if steps > 1:
                self.scheduler.complete_alike(plan, steps, sampled)
            else:
                self.scheduler.complete(plan, sampled)
            return
        for item in plan.items[count:]:
            if item.seq.state == "finished":  # aborted while the step ran; its request may be on its way again
                continue
            self._prefilled(item.seq, item.start, item.num_tokens, item.samples, end_s, sampled, outcome)
        self.scheduler.complete(plan, sampled)

    def _decoded(self, plan: StepPlan, steps: int, end_s: float, sampled: _Tokens, outcome: StepOutcome) -> None:
        """Book ``steps`` tokens of each decoding sequence."""
        records, count, start_s = self._records, plan.num_decodes, self._start_s
        step = self.spec.step
        first_s = end_s if steps == 1 else start_s + step.decode_run_s(count, self._context_tokens, 1)
        smooth = 0
        for item in plan.items[:count]:
            seq = item.seq
            record = records[seq.request_id]
            if record.last_token_s == start_s:
                smooth += 1
            else:
                self._gaps.add(first_s - record.last_token_s, 1)
                if first_s - record.last_token_s > record.max_gap_s:
                    record.max_gap_s = first_s - record.last_token_s
            record.last_token_s = end_s
            if seq.num_tokens + steps >= seq.max_num_tokens:
                sampled[seq.request_id] = LAST_TOKEN
                outcome.finished.append(record)
        self._gaps.add(first_s - start_s, smooth)
        if steps > 1:
            self._gaps.add((end_s - first_s) / (steps - 1), (steps - 1) * count)

    def _prefilled(self, seq: Sequence, start: int, num_tokens: int, samples: bool, end_s: float, sampled: _Tokens,
                   outcome: StepOutcome) -> None:  # fmt: skip
        record = self._records[seq.request_id]
        if seq.mode == "prefill_only":
            outcome.chunks.append(Chunk(record, seq, start, num_tokens, (self._start_s, end_s)))
        if not samples:
            return
        self.sent.computed(record.request_id)
        self.tier.keep(record)
        if seq.mode == "prefill_only":
            outcome.prefilled.append((record, seq))
            return
        if not record.replayed_tokens:
            record.cached_tokens = seq.num_cached_tokens
        record.got_token(end_s, self._gaps)
        if seq.num_tokens + 1 >= seq.max_num_tokens:
            sampled[seq.request_id] = LAST_TOKEN
            outcome.finished.append(record)
