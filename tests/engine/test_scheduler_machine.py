"""The scheduler and its blocks under every order of events, driven the way the engine and the hand-off drive them.

The model of these tests is a hash chain: the "KV" of a token names every token up to it, and the next token is a
function of that. Each step verifies that the blocks of each sequence really hold the KV of its own tokens before it
uses them, so a block reused under its owner, a wrong prefix hit, or a token computed at the wrong place changes an
output. Outputs are compared with the chain itself: preempted, imported, cached or plain, a request gets the same
tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbaton.engine.scheduler import Scheduler, SchedulerConfig, StepPlan
from kvbaton.engine.sequence import Mode, Sequence
from kvbaton.kv.blocks import BlockManager
from kvbaton.types import CapacityError, GenerateRequest, LocalError, SamplingParams, TokenOutput

BLOCK_SIZE = 4
VOCABULARY = 3
Slot = tuple[int, int]


def next_kv(before: int, token: int) -> int:
    return hash((before, token))


def expected_output(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    state, output = 0, []
    for token in prompt:
        state = next_kv(state, token)
    for _ in range(num_tokens):
        output.append(state % VOCABULARY)
        state = next_kv(state, output[-1])
    return output


@dataclass
class Pool:
    """Slots of one worker. A slot holds the chain up to its token."""

    kv: dict[Slot, int] = field(default_factory=dict)

    def state_after(self, seq: Sequence, tokens: list[int], num_tokens: int) -> int:
        """The chain over the first tokens, read from the pool and verified token by token."""
        state = 0
        for position in range(num_tokens):
            state = next_kv(state, tokens[position])
            slot = (seq.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE)
            assert self.kv.get(slot) == state, f"{seq}: the KV of token {position} is not its own"
        return state

    def write(self, seq: Sequence, tokens: list[int], start: int, stop: int) -> None:
        state = 0
        for position in range(stop):
            state = next_kv(state, tokens[position])
            if position >= start:
                self.kv[(seq.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE)] = state


def all_tokens(seq: Sequence) -> list[int]:
    return [*seq.request.prompt_token_ids, *seq.output_token_ids]


def finish_reason(seq: Sequence, num_output: int) -> str | None:
    return "length" if num_output >= seq.request.sampling.max_tokens else None


class Worker:
    """Scheduler, blocks and pool, stepped like the engine steps them."""

    def __init__(self, config: SchedulerConfig, num_blocks: int) -> None:
        self.pool = Pool()
        self.generations: dict[int, int] = {}
        self.blocks = BlockManager(num_blocks, BLOCK_SIZE, on_generation=self.generations.__setitem__)
        self.scheduler = Scheduler(config, self.blocks)

    def run(self, plan: StepPlan) -> None:
        sampled = {}
        for item in plan.items:
            seq, tokens, stop = item.seq, all_tokens(item.seq), item.start + item.num_tokens
            assert item.samples == (stop == len(tokens)) and item.num_tokens >= 1
            self.pool.state_after(seq, tokens, item.start)
            self.pool.write(seq, tokens, item.start, stop)
        for item in plan.items:  # after all writes: no two sequences may write one slot
            seq, tokens = item.seq, all_tokens(item.seq)
            state = self.pool.state_after(seq, tokens, item.start + item.num_tokens)
            if item.samples:
                reason = finish_reason(seq, seq.num_output_tokens + 1)
                sampled[seq.request_id] = TokenOutput(state % VOCABULARY, finish_reason=reason)
        self.scheduler.complete(plan, sampled)
        self.scheduler.check()

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        self.check_plan(plan)
        self.run(plan)
        return plan

    def check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        assert sum(item.num_tokens for item in plan.items) == plan.num_tokens <= config.max_batch_tokens
        assert len(plan.items) <= config.max_running
        assert len({id(item.seq) for item in plan.items}) == len(plan.items)
        for index, item in enumerate(plan.items):
            assert item.seq.state == "running"
            assert item.start + item.num_tokens <= len(item.seq.blocks) * BLOCK_SIZE
            assert index >= plan.num_decodes or (item.num_tokens == 1 and item.samples)
        assert all(seq.state == "waiting" and seq.mode != "prefill_only" for seq in plan.preempted)


MAX_CONTEXT = 64
prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30)
shared_prefixes = st.sampled_from([(), (1,) * 8, (1,) * 16, (2, 0, 1, 1) * 5])


@dataclass
class Reader:
    """Somebody elsewhere who was offered the blocks of a prefill."""

    seq: Sequence
    blocks: tuple[int, ...]
    generations: tuple[int, ...]
    num_ready: int = 0  # tokens computed so far


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.set_up(max_running=6, spare_tokens=6, max_chunk_tokens=None, num_blocks=14)
        self.now_s = 0.0
        self.num_made = 0
        self.live: dict[str, Sequence] = {}
        self.readers: dict[str, Reader] = {}
        self.arrived: dict[str, int] = {}  # tokens of imports that were written
        self.index: set[bytes] = set()

    @initialize(
        max_running=st.integers(1, 6),
        spare_tokens=st.integers(0, 12),
        max_chunk_tokens=st.sampled_from([None, 1, 3, 8]),
        num_blocks=st.sampled_from([12, 14, 20, 120]),  # from 100 on, room to grow is kept
    )
    def set_up(self, max_running: int, spare_tokens: int, max_chunk_tokens: int | None, num_blocks: int) -> None:
        self.config = SchedulerConfig(max_running + spare_tokens, max_running, MAX_CONTEXT, 8, max_chunk_tokens)
        self.worker = Worker(self.config, num_blocks)
        self.scheduler, self.blocks, self.pool = self.worker.scheduler, self.worker.blocks, self.worker.pool

    def make(self, prompt: list[int], prefix: tuple[int, ...], max_tokens: int, mode: Mode, options: tuple) -> Sequence:
        self.num_made += 1
        salt, priority = options
        tokens = (*prefix, *prompt)[: MAX_CONTEXT - max_tokens]
        sampling = SamplingParams(max_tokens=max_tokens)
        request = GenerateRequest(f"r{self.num_made}", tokens, sampling, cache_salt=salt, priority=priority)
        return Sequence(request, mode)

    options = st.tuples(st.sampled_from(["", "tenant"]), st.sampled_from([0, 0, 0, 1]))

    @rule(
        prompt=prompts,
        prefix=shared_prefixes,
        max_tokens=st.integers(1, 12),
        mode=st.sampled_from(["full", "full", "prefill_only"]),
        options=options,
    )
    def add(self, prompt: list[int], prefix: tuple[int, ...], max_tokens: int, mode: Mode, options: tuple) -> None:
        seq = self.make(prompt, prefix, max_tokens, mode, options)
        try:
            self.scheduler.add(seq)
        except CapacityError:
            assert self.scheduler.num_waiting >= self.config.max_waiting
        except LocalError:
            self.cannot_fit(seq)
        else:
            self.live[seq.request_id] = seq

    @rule(prompt=prompts, prefix=shared_prefixes, max_tokens=st.integers(1, 12), options=options)
    def reserve(self, prompt: list[int], prefix: tuple[int, ...], max_tokens: int, options: tuple) -> None:
        seq = self.make(prompt, prefix, max_tokens, "import", options)
        before = (self.blocks.num_used, self.blocks.num_free, self.blocks.num_cached)
        try:
            num_cached = self.scheduler.reserve_import(seq)
        except CapacityError:
            assert before == (self.blocks.num_used, self.blocks.num_free, self.blocks.num_cached)
            return
        except LocalError:
            self.cannot_fit(seq)
            return
        assert num_cached % BLOCK_SIZE == 0 and num_cached < seq.num_prompt_tokens
        self.pool.state_after(seq, all_tokens(seq), num_cached)
        self.live[seq.request_id] = seq
        self.arrived[seq.request_id] = num_cached

    def cannot_fit(self, seq: Sequence) -> None:
        num_tokens = seq.num_prompt_tokens + (seq.request.sampling.max_tokens - 1) * (seq.mode != "prefill_only")
        assert num_tokens > self.blocks.num_blocks * BLOCK_SIZE

    @precondition(lambda self: self.arrived)
    @rule(data=st.data(), num_tokens=st.integers(1, 40))
    def receive(self, data: st.DataObject, num_tokens: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.arrived)))
        seq, start = self.live[request_id], self.arrived[request_id]
        stop = min(seq.num_prompt_tokens, start + num_tokens)
        self.pool.write(seq, all_tokens(seq), start, stop)
        self.arrived[request_id] = stop

    @precondition(lambda self: self.arrived)
    @rule(data=st.data(), fails=st.booleans())
    def end_import(self, data: st.DataObject, fails: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.arrived)))
        seq = self.live[request_id]
        if self.arrived[request_id] < seq.num_prompt_tokens or fails:
            del self.arrived[request_id]
            self.scheduler.import_failed(request_id)
            self.forget(seq)
            return
        del self.arrived[request_id]
        first = self.pool.state_after(seq, all_tokens(seq), seq.num_prompt_tokens) % VOCABULARY
        self.scheduler.import_done(request_id, TokenOutput(first, finish_reason=finish_reason(seq, 1)))

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            plan = self.scheduler.schedule()
            self.worker.check_plan(plan)
            self.offer(plan)
            self.worker.run(plan)
            for item in plan.items:
                reader = self.readers.get(item.seq.request_id)
                if reader is not None:
                    reader.num_ready = item.start + item.num_tokens

    def offer(self, plan: StepPlan) -> None:
        """As the engine: a prefill is pinned and offered when it is first scheduled."""
        for item in plan.items:
            seq = item.seq
            if seq.mode == "prefill_only" and seq.request_id not in self.readers:
                assert len(seq.blocks) * BLOCK_SIZE >= seq.num_prompt_tokens
                self.blocks.pin(seq.request_id, seq.blocks, self.now_s + 5.0)
                generations = tuple(self.blocks.generation(block) for block in seq.blocks)
                self.readers[seq.request_id] = Reader(seq, tuple(seq.blocks), generations, item.start)

    @rule()
    def a_step_fails(self) -> None:
        """The engine fails the requests that were in it and no others."""
        plan = self.scheduler.schedule()
        self.offer(plan)
        for item in plan.items:
            self.end(item.seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(self.live[data.draw(st.sampled_from(sorted(self.live)))])

    @rule(data=st.data())
    def abort_during_a_step(self, data: st.DataObject) -> None:
        plan = self.scheduler.schedule()
        self.offer(plan)
        if plan.items:
            self.end(data.draw(st.sampled_from([item.seq for item in plan.items])))
            survivors = [item for item in plan.items if item.seq.state == "running"]
            sampled = {}
            for item in survivors:
                seq, tokens, stop = item.seq, all_tokens(item.seq), item.start + item.num_tokens
                self.pool.write(seq, tokens, item.start, stop)
                state = self.pool.state_after(seq, tokens, stop)
                if item.samples:
                    reason = finish_reason(seq, seq.num_output_tokens + 1)
                    sampled[seq.request_id] = TokenOutput(state % VOCABULARY, finish_reason=reason)
            self.scheduler.complete(plan, sampled)

    @precondition(lambda self: any(reader.seq.state == "held" for reader in self.readers.values()))
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        held = sorted(name for name, reader in self.readers.items() if reader.seq.state == "held")
        self.end(self.readers[data.draw(st.sampled_from(held))].seq)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        self.blocks.renew(data.draw(st.sampled_from(sorted(self.readers))), self.now_s, self.now_s + 5.0)

    @rule(seconds=st.floats(0.0, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for name in self.blocks.expire(self.now_s):
            self.end(self.readers[name].seq)

    @rule()
    def readers_crash(self) -> None:
        """Every connection dies: all leases and what they offered go, and all imports with them."""
        for reader in list(self.readers.values()):
            self.end(reader.seq)
        for request_id in sorted(self.arrived):
            self.end(self.live[request_id])

    @rule()
    def clear_cache(self) -> None:
        self.blocks.clear_cache()

    @rule()
    def follow_events(self) -> None:
        events = self.blocks.drain_events()
        if events.cleared:
            self.index.clear()
        assert self.index.issuperset(events.removed)
        self.index.difference_update(events.removed)
        self.index.update(events.stored)
        assert self.index == set(self.blocks.cached_hashes())

    def end(self, seq: Sequence) -> None:
        """What the engine does when a request is released, aborted or failed."""
        if seq.state == "held":
            assert self.scheduler.hold_released(seq.request_id)
        else:
            assert self.scheduler.abort(seq.request_id)
        self.blocks.unpin(seq.request_id)
        self.arrived.pop(seq.request_id, None)
        self.forget(seq)

    def forget(self, seq: Sequence) -> None:
        assert seq.state == "finished" and seq.blocks == []
        self.live.pop(seq.request_id)
        self.readers.pop(seq.request_id, None)

    @invariant()
    def everything_adds_up(self) -> None:
        self.scheduler.check()
        for request_id, seq in list(self.live.items()):
            assert seq.output_token_ids == expected_output(seq.request.prompt_token_ids, seq.num_output_tokens)
            if seq.state == "finished":
                assert seq.num_output_tokens == seq.request.sampling.max_tokens
                del self.live[request_id]

    @invariant()
    def whoever_was_offered_blocks_reads_the_right_thing(self) -> None:
        for reader in self.readers.values():
            assert tuple(self.blocks.generation(block) for block in reader.blocks) == reader.generations
            state = 0
            for position, token in enumerate(reader.seq.request.prompt_token_ids[: reader.num_ready]):
                state = next_kv(state, token)
                assert self.pool.kv[(reader.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE)] == state

    def teardown(self) -> None:
        for request_id in sorted(self.arrived):
            self.end(self.live[request_id])
        for _ in range(2000):
            self.step(num_steps=1)
            for reader in [reader for reader in self.readers.values() if reader.seq.state == "held"]:
                self.end(reader.seq)
            self.everything_adds_up()
            if not self.live:
                break
        assert not self.live, f"never finished: {list(self.live.values())}"
        assert self.scheduler.num_waiting == self.scheduler.num_running == self.scheduler.waiting_prompt_tokens == 0
        assert (self.blocks.num_used, self.blocks.num_pinned, self.blocks.num_leases) == (0, 0, 0)
        self.scheduler.check()


class TestScheduler(SchedulerMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestSchedulerLong(SchedulerMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=100, deadline=None)


# -- every workload ends ---------------------------------------------------------------------------------------------

workloads = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 16), st.integers(0, 12), st.integers(0, 2)), min_size=1, max_size=24
)


@given(
    workload=workloads,
    limits=st.tuples(st.integers(1, 8), st.integers(0, 30), st.sampled_from([None, 1, 5])),
    num_blocks=st.integers(14, 40),
)
@settings(max_examples=80, deadline=None)
def test_every_workload_finishes_and_nobody_starves(
    workload: list[tuple[int, int, int, int]], limits: tuple[int, int, int | None], num_blocks: int
) -> None:
    """(prompt, output, shared prefix, priority) all at once: the first of the order always advances, so all finish."""
    max_running, spare_tokens, max_chunk_tokens = limits
    config = SchedulerConfig(max_running + spare_tokens, max_running, 64, len(workload), max_chunk_tokens)
    worker = Worker(config, num_blocks)
    seqs = []
    for index, (num_prompt, num_output, num_shared, priority) in enumerate(workload):
        prompt = tuple([1] * min(num_shared, num_prompt) + [index % VOCABULARY] * max(0, num_prompt - num_shared))
        sampling = SamplingParams(max_tokens=num_output)
        seqs.append(Sequence(GenerateRequest(f"r{index}", prompt, sampling, priority=priority)))
        worker.scheduler.add(seqs[-1])
    while any(seq.state != "finished" for seq in seqs):
        first = min((seq for seq in seqs if seq.state != "finished"), key=lambda seq: seq.order)
        before = (first.num_output_tokens, first.num_computed)
        plan = worker.step()
        assert first not in plan.preempted, "the first of the order is never preempted"
        assert first.state == "finished" or (first.num_output_tokens, first.num_computed) > before
    for seq in seqs:
        assert seq.output_token_ids == expected_output(seq.request.prompt_token_ids, seq.request.sampling.max_tokens)
    assert worker.blocks.num_used == 0


@pytest.mark.parametrize("seed", range(3))
def test_under_overload_each_request_is_served_in_its_turn(seed: int) -> None:
    """Arrivals faster than service: nobody of equal priority is overtaken to its first token."""
    chance = random.Random(seed)
    worker = Worker(SchedulerConfig(16, 6, 64, 10_000), num_blocks=20)
    seqs: list[Sequence] = []
    served: list[Sequence] = []
    for step in range(400):
        if step < 200:
            num_prompt, max_tokens = chance.randint(1, 40), chance.randint(1, 16)
            prompt = tuple(chance.randrange(VOCABULARY) for _ in range(num_prompt))
            seqs.append(Sequence(GenerateRequest(f"r{step}", prompt, SamplingParams(max_tokens=max_tokens))))
            worker.scheduler.add(seqs[-1])
        plan = worker.step()
        served.extend(item.seq for item in plan.items if item.samples and item.seq.num_output_tokens == 1)
    while worker.scheduler.num_running or worker.scheduler.num_waiting:
        plan = worker.step()
        served.extend(item.seq for item in plan.items if item.samples and item.seq.num_output_tokens == 1)
    assert served == seqs
    assert all(seq.state == "finished" for seq in seqs)


@pytest.mark.parametrize("seed", range(2))
def test_imports_do_not_starve_what_waits(seed: int) -> None:
    """A decode worker offered more hand-offs than it can hold still finishes the local and preempted ones."""
    chance = random.Random(seed)
    worker = Worker(SchedulerConfig(16, 6, 64, 100), num_blocks=16)
    local: list[Sequence] = []
    num_refused = num_imported = 0
    for step in range(600):
        sampling = SamplingParams(max_tokens=chance.randint(2, 16))
        prompt = tuple(chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 40)))
        if step % 25 == 0:
            local.append(Sequence(GenerateRequest(f"local-{step}", prompt, sampling)))
            worker.scheduler.add(local[-1])
        seq = Sequence(GenerateRequest(f"import-{step}", prompt, sampling), "import")
        try:
            start = worker.scheduler.reserve_import(seq)
        except CapacityError:
            num_refused += 1
        else:
            num_imported += 1
            worker.pool.write(seq, list(prompt), start, len(prompt))
            worker.scheduler.import_done(seq.request_id, TokenOutput(expected_output(prompt, 1)[0]))
        worker.step()
        assert all(seq.state == "finished" for seq in local[:-3]), "local requests wait for ever behind imports"
    assert num_refused > 0 and num_imported > 0
