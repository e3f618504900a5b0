"""Exact behaviour of the scheduler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbaton.engine.scheduler import Scheduler, SchedulerConfig, StepPlan
from kvbaton.engine.sequence import Mode, Sequence
from kvbaton.kv.blocks import BlockManager, OutOfBlocks, block_hashes
from kvbaton.types import CapacityError, GenerateRequest, LocalError, SamplingParams, TokenOutput

CONFIG = SchedulerConfig(max_batch_tokens=64, max_running=8, max_context=4096, max_waiting=16)


class Bench:
    """A scheduler, its blocks, and a model whose every token is 7 and that stops at ``max_tokens``."""

    def __init__(self, num_blocks: int = 64, block_size: int = 16, config: SchedulerConfig = CONFIG) -> None:
        self.blocks = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(config, self.blocks)
        self.num_made = 0

    def sequence(
        self, prompt: int | list[int], max_tokens: int = 4, mode: Mode = "full", priority: int = 0, salt: str = ""
    ) -> Sequence:
        """``prompt``: token ids, or how many tokens of a prompt like no other."""
        self.num_made += 1
        tokens = [1000 + self.num_made] * prompt if isinstance(prompt, int) else prompt
        request = GenerateRequest(
            request_id=f"r{self.num_made}",
            prompt_token_ids=tuple(tokens),
            sampling=SamplingParams(max_tokens=max_tokens),
            cache_salt=salt,
            priority=priority,
        )
        return Sequence(request, mode)

    def add(self, *args, **kwargs) -> Sequence:
        seq = self.sequence(*args, **kwargs)
        self.scheduler.add(seq)
        return seq

    def reserve(self, *args, **kwargs) -> Sequence:
        seq = self.sequence(*args, mode="import", **kwargs)
        self.scheduler.reserve_import(seq)
        return seq

    def complete(self, plan: StepPlan) -> None:
        sampled = {}
        for item in plan.items:
            if item.samples:
                last = item.seq.num_output_tokens + 1 == item.seq.request.sampling.max_tokens
                sampled[item.seq.request_id] = TokenOutput(7, finish_reason="length" if last else None)
        self.scheduler.complete(plan, sampled)
        self.scheduler.check()

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        self.complete(plan)
        return plan

    def run(self) -> Iterator[StepPlan]:
        while (plan := self.step()).items:
            yield plan

    def finish(self) -> int:
        return sum(1 for _ in self.run())


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(item.seq.request_id, item.start, item.num_tokens, item.samples) for item in plan.items]


def test_a_prompt_is_computed_then_decoded_to_its_end() -> None:
    bench = Bench()
    seq = bench.add(20, max_tokens=3)
    assert [shape(plan) for plan in bench.run()] == [
        [("r1", 0, 20, True)],
        [("r1", 20, 1, True)],
        [("r1", 21, 1, True)],
    ]
    assert seq.state == "finished" and seq.output_token_ids == [7, 7, 7] and seq.blocks == []
    assert bench.blocks.num_used == 0 and bench.scheduler.num_running == 0


def test_a_long_prompt_is_cut_to_the_budget_and_samples_only_at_its_end() -> None:
    bench = Bench()
    bench.add(150, max_tokens=1)
    assert [shape(plan) for plan in bench.run()] == [
        [("r1", 0, 64, False)],
        [("r1", 64, 64, False)],
        [("r1", 128, 22, True)],
    ]


def test_decodes_come_first_and_prefill_gets_the_rest() -> None:
    bench = Bench()
    bench.add(10, max_tokens=9)
    bench.add(10, max_tokens=9)
    bench.step()
    bench.add(100)
    plan = bench.step()
    assert shape(plan) == [("r1", 10, 1, True), ("r2", 10, 1, True), ("r3", 0, 62, False)]
    assert (plan.num_decodes, plan.num_prefill_tokens, plan.num_tokens) == (2, 62, 64)


def test_one_step_serves_several_prompts_in_order_of_arrival() -> None:
    bench = Bench()
    for num_tokens in (30, 30, 30):
        bench.add(num_tokens)
    assert shape(bench.step()) == [("r1", 0, 30, True), ("r2", 0, 30, True), ("r3", 0, 4, False)]


def test_priority_comes_before_arrival() -> None:
    bench = Bench()
    bench.add(64, priority=1)
    bench.add(64, priority=0)
    bench.add(64, priority=0)
    assert [shape(bench.step())[-1][0] for _ in range(3)] == ["r2", "r3", "r1"]


def test_a_chunk_limit_lets_short_prompts_run_beside_a_long_one() -> None:
    config = SchedulerConfig(max_batch_tokens=64, max_running=8, max_context=4096, max_chunk_tokens=32)
    bench = Bench(config=config)
    bench.add(300)
    bench.add(20)
    assert shape(bench.step()) == [("r1", 0, 32, False), ("r2", 0, 20, True)]


def test_no_more_than_max_running_sequences_run() -> None:
    bench = Bench(config=SchedulerConfig(max_batch_tokens=64, max_running=2, max_context=4096))
    for _ in range(5):
        bench.add(4, max_tokens=3)
    assert all(len(plan.items) <= 2 for plan in bench.run())


def test_a_plan_that_is_not_completed_is_planned_again() -> None:
    bench = Bench()
    bench.add(100)
    assert shape(bench.scheduler.schedule()) == shape(bench.scheduler.schedule()) == [("r1", 0, 64, False)]


# -- prefix cache --------------------------------------------------------------------------------------------------


def test_a_full_hit_still_computes_one_token() -> None:
    bench = Bench()
    prompt = list(range(48))
    bench.add(prompt, max_tokens=1)
    bench.finish()
    seq = bench.add(prompt, max_tokens=1)
    assert shape(bench.step()) == [("r2", 32, 16, True)]
    assert seq.num_cached_tokens == 32
    longer = bench.add([*prompt, 5], max_tokens=1)
    assert shape(bench.step()) == [("r3", 48, 1, True)]
    assert longer.num_cached_tokens == 48


def test_a_partial_block_is_never_matched() -> None:
    """Case KV-13: 40 tokens, then the same 40 with 24 others: 32 are reused."""
    bench = Bench()
    prompt = list(range(40))
    bench.add(prompt, max_tokens=1)
    bench.finish()
    seq = bench.add([*prompt, *range(100, 124)])
    bench.step()
    assert seq.num_cached_tokens == 32
    assert len(bench.blocks.match(block_hashes(prompt, 16))) == 2


def test_output_is_cached_too() -> None:
    bench = Bench()
    prompt = list(range(20))
    bench.add(prompt, max_tokens=30)
    bench.finish()
    seq = bench.add([*prompt, *[7] * 29, 1, 2, 3], max_tokens=1)
    bench.step()
    assert seq.num_cached_tokens == 48


def test_blocks_are_published_when_they_are_computed_and_not_before() -> None:
    bench = Bench()
    prompt = list(range(100))
    hashes = block_hashes(prompt, 16)
    bench.add(prompt)
    plan = bench.scheduler.schedule()
    assert bench.blocks.match(hashes) == []
    bench.complete(plan)
    assert len(bench.blocks.match(hashes)) == 4
    bench.step()
    assert len(bench.blocks.match(hashes)) == 6


def test_the_same_prompt_several_times_at_once_is_computed_once() -> None:
    """As for ``n`` > 1: the others wait for the first to publish, then compute a token or a block each."""
    bench = Bench()
    prompt = list(range(150))
    seqs = [bench.add(prompt, max_tokens=2) for _ in range(4)]
    other = bench.add(20)
    plans = list(bench.run())
    assert [shape(plan) for plan in plans[:3]] == [
        [("r1", 0, 64, False)],
        [("r1", 64, 64, False)],
        [("r1", 128, 22, True)],
    ]
    assert shape(plans[3])[1:4] == [(f"r{index}", 144, 6, True) for index in (2, 3, 4)]
    assert [seq.num_cached_tokens for seq in seqs] == [0, 144, 144, 144] and other.state == "finished"


def test_a_shared_beginning_is_awaited_only_as_far_as_it_is_shared() -> None:
    bench = Bench()
    bench.add([*[1] * 32, *[2] * 200], max_tokens=1)
    bench.add([*[1] * 32, *[3] * 10], max_tokens=1)
    bench.step()
    bench.add([*[1] * 32, *[3] * 10], max_tokens=1, priority=-1)
    plan = bench.step()
    assert shape(plan) == [("r1", 64, 64, False)], "no place in the budget, whoever waits"
    steps = [shape(plan) for plan in bench.run()]
    assert steps[1] == [("r1", 192, 40, True), ("r3", 32, 10, True), ("r2", 32, 10, True)]


def test_nobody_waits_for_a_prefill_behind_it() -> None:
    bench = Bench(config=SchedulerConfig(max_batch_tokens=64, max_running=8, max_context=4096, max_chunk_tokens=32))
    prompt = list(range(150))
    bench.add(prompt, max_tokens=1, priority=1)
    bench.step()
    bench.add(prompt, max_tokens=1)
    assert shape(bench.step()) == [("r1", 32, 32, False), ("r2", 32, 32, False)]


def test_salts_do_not_share() -> None:
    bench = Bench()
    prompt = list(range(40))
    bench.add(prompt, salt="a", max_tokens=1)
    bench.finish()
    other, same = bench.add(prompt, salt="b", max_tokens=1), bench.add(prompt, salt="a", max_tokens=1)
    bench.step()
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 32)


def test_the_same_prompt_many_times_does_not_fill_the_pool() -> None:
    """Case LK-04: usage after each request is what it was after the first, and so is the work from the second on."""
    bench = Bench(num_blocks=40)
    prompt = list(range(512))
    usage = set()
    for index in range(200):
        seq = bench.add(prompt, max_tokens=2)
        num_steps = bench.finish()
        usage.add((bench.blocks.num_used, bench.blocks.num_cached, bench.blocks.num_free))
        if index > 0:
            assert (seq.num_cached_tokens, num_steps) == (496, 2)
    assert usage == {(0, 32, 40)}


def test_hashes_can_be_given_instead_of_tokens() -> None:
    bench = Bench()
    hashes = [bytes([index]) * 16 for index in range(3)]
    request = GenerateRequest("sim-1", (), SamplingParams(max_tokens=20))
    bench.scheduler.add(Sequence(request, num_prompt_tokens=50, block_hashes=hashes))
    bench.finish()
    assert bench.blocks.num_cached == 3, "blocks of unknown content are not cached"
    again = Sequence(GenerateRequest("sim-2", (), SamplingParams(max_tokens=1)), "full", 48, hashes)
    bench.scheduler.add(again)
    assert shape(bench.step()) == [("sim-2", 32, 16, True)]
    unknown = Sequence(GenerateRequest("sim-3", (), SamplingParams(max_tokens=1)), num_prompt_tokens=48)
    bench.scheduler.add(unknown)
    assert shape(bench.step()) == [("sim-3", 0, 48, True)]


# -- room ------------------------------------------------------------------------------------------------------------


def test_the_last_to_arrive_is_preempted_and_comes_back_with_its_output() -> None:
    bench = Bench(num_blocks=4, block_size=4)
    first, second = bench.add(7, max_tokens=8), bench.add(7, max_tokens=8)
    bench.step()
    bench.step()
    assert len(first.blocks) == len(second.blocks) == 2 and bench.blocks.num_free == 0
    plan = bench.step()
    assert plan.preempted == (second,) and shape(plan) == [("r1", 8, 1, True)]
    assert second.state == "waiting" and second.output_token_ids == [7, 7] and second.num_preemptions == 1
    resumed = next(plan for plan in bench.run() if any(item.seq is second for item in plan.items))
    assert resumed.items[-1].start + resumed.items[-1].num_tokens == 9, "prompt and output are computed anew"
    bench.finish()
    assert first.output_token_ids == second.output_token_ids == [7] * 8


def test_the_lowest_priority_is_preempted_even_if_it_came_first() -> None:
    bench = Bench(num_blocks=4, block_size=4)
    lowest, urgent = bench.add(7, max_tokens=8, priority=1), bench.add(7, max_tokens=8)
    bench.step()
    bench.step()
    assert bench.step().preempted == (lowest,)
    bench.finish()
    assert urgent.state == lowest.state == "finished"


def test_a_sequence_preempts_itself_rather_than_an_offered_one() -> None:
    """The blocks of a prefill_only sequence are being read elsewhere."""
    config = SchedulerConfig(max_batch_tokens=8, max_running=8, max_context=4096)
    bench = Bench(num_blocks=4, block_size=4, config=config)
    full, offered = bench.add(4, max_tokens=6), bench.add(12, mode="prefill_only")
    assert shape(bench.step()) == [("r1", 0, 4, True), ("r2", 0, 4, False)]
    plan = bench.step()
    assert plan.preempted == (full,) and shape(plan) == [("r2", 4, 8, True)]
    assert offered.state == "held" and bench.step().items == ()
    bench.scheduler.hold_released(offered.request_id)
    bench.finish()
    assert full.output_token_ids == [7] * 6 and bench.blocks.num_used == 0


def test_a_refusal_counts_for_the_refused_one_only() -> None:
    bench = Bench(num_blocks=10)
    bench.add(60, max_tokens=50)
    big = bench.add(140)
    for _ in range(3):
        assert shape(bench.step())[0][0] == "r1" and big.state == "waiting"
    bench.add(30, priority=-1, max_tokens=1)
    assert shape(bench.step())[1:] == [("r3", 0, 30, True)], "more urgent and small enough"
    bench.add(30)
    assert len(bench.step().items) == 1, "nobody overtakes the big one"
    bench.scheduler.abort(big.request_id)
    assert shape(bench.step())[1:] == [("r4", 0, 30, True)]


def test_who_can_never_fit_is_refused() -> None:
    bench = Bench(num_blocks=4, block_size=4)
    for kwargs, field in (
        ({"prompt": 4000, "max_tokens": 97}, "max_tokens"),
        ({"prompt": 10, "max_tokens": 8}, "max_tokens"),
        ({"prompt": 17, "max_tokens": 1, "mode": "prefill_only"}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [3, -1]}, "prompt"),
        ({"prompt": [3, 1 << 32]}, "prompt"),
        ({"prompt": 4, "max_tokens": 0}, "max_tokens"),
    ):
        with pytest.raises(LocalError) as caught:
            bench.add(**kwargs)
        assert caught.value.field == field and not isinstance(caught.value, CapacityError)
    fits = bench.add(10, max_tokens=7)  # 16 tokens of KV: the last token's is never needed
    assert bench.finish() == 7 and fits.state == "finished"
    bench.add(16, max_tokens=50, mode="prefill_only")
    bench.scheduler.check()


def test_a_request_id_is_used_once_at_a_time() -> None:
    bench = Bench()
    seq = bench.add(4)
    with pytest.raises(LocalError) as caught:
        bench.scheduler.add(Sequence(seq.request))
    assert caught.value.field == "request_id"
    bench.finish()
    bench.scheduler.add(Sequence(seq.request))


def test_a_full_queue_refuses() -> None:
    bench = Bench()
    for _ in range(16):
        bench.add(4)
    with pytest.raises(CapacityError):
        bench.add(4)
    assert bench.scheduler.num_waiting == 16
    bench.finish()


def test_the_backlog_counts_what_is_left_to_compute() -> None:
    bench = Bench()
    bench.add(100)
    bench.add(30)
    assert bench.scheduler.waiting_prompt_tokens == 130
    bench.step()
    assert bench.scheduler.waiting_prompt_tokens == 66
    bench.finish()
    assert bench.scheduler.waiting_prompt_tokens == 0


def test_the_backlog_leaves_out_what_is_cached() -> None:
    """A router that reads it must not take a queue of follow-up turns for work that nobody has to do."""
    bench = Bench()
    prompt = list(range(1, 101))
    bench.add(prompt)
    bench.finish()
    again = bench.add(prompt)
    num_cached = 99 // bench.blocks.block_size * bench.blocks.block_size
    assert bench.scheduler.waiting_prompt_tokens == 100 - num_cached
    bench.add(50)
    bench.blocks.clear_cache()  # what was foretold does not come true, and still the sums agree
    bench.scheduler.check()
    bench.scheduler.abort(again.request_id)
    assert bench.scheduler.waiting_prompt_tokens == 50
    bench.add(prompt)
    bench.finish()
    assert bench.scheduler.waiting_prompt_tokens == 0


# -- prefill side ----------------------------------------------------------------------------------------------------


def test_prefill_only_is_held_after_its_first_token_until_released() -> None:
    bench = Bench()
    seq = bench.add(20, mode="prefill_only", max_tokens=8)
    bench.step()
    assert seq.state == "held" and seq.output_token_ids == [7] and len(seq.blocks) == 2
    assert bench.step().items == () and bench.blocks.num_used == 2 and bench.scheduler.num_held == 1
    assert bench.scheduler.hold_released("r1") and not bench.scheduler.hold_released("r1")
    assert seq.state == "finished" and bench.blocks.num_used == 0
    bench.scheduler.check()


def test_all_blocks_of_an_offered_prompt_are_there_when_it_is_first_scheduled() -> None:
    bench = Bench()
    seq = bench.add(100, mode="prefill_only")
    plan = bench.scheduler.schedule()
    assert plan.items[0].num_tokens == 64 and len(seq.blocks) == 7
    before = list(seq.blocks)
    bench.complete(plan)
    bench.step()
    assert seq.blocks == before


def test_prompts_over_capacity_wait_until_readers_are_done() -> None:
    """Case KV-09: 64 blocks, four 40-block prompts; a block with a reader is never handed out."""
    bench = Bench(num_blocks=64)
    seqs = [bench.add(640, mode="prefill_only") for _ in range(4)]
    served = []
    while len(served) < 4:
        for plan in bench.run():
            for item in plan.items:
                if item.seq.request_id not in bench.blocks._leases:
                    bench.blocks.pin(item.seq.request_id, item.seq.blocks, expires_at_s=1.0)
        (held,) = [seq for seq in seqs if seq.state == "held"]
        generations = [bench.blocks.generation(block) for block in held.blocks]
        blocks = list(held.blocks)
        bench.scheduler.hold_released(held.request_id)  # the reader's lease still holds them
        assert bench.step().items == ()
        assert [bench.blocks.generation(block) for block in blocks] == generations
        bench.blocks.unpin(held.request_id)
        served.append(held.request_id)
    assert served == ["r1", "r2", "r3", "r4"] and bench.blocks.num_used == 0


# -- decode side -----------------------------------------------------------------------------------------------------


def test_an_import_reserves_the_prompt_and_one_token_more() -> None:
    bench = Bench()
    seq = bench.reserve(32, max_tokens=4)
    assert seq.state == "receiving" and len(seq.blocks) == 3 and seq.num_cached_tokens == 0
    assert bench.step().items == () and bench.scheduler.num_receiving == 1
    assert bench.blocks.num_cached == 0
    bench.scheduler.import_done("r1", TokenOutput(7))
    bench.scheduler.check()
    assert bench.blocks.num_cached == 2, "published only when the KV is in place"
    assert [shape(plan) for plan in bench.run()] == [[("r1", position, 1, True)] for position in (32, 33, 34)]
    assert seq.output_token_ids == [7] * 4


def test_an_import_takes_only_what_is_missing() -> None:
    """Case KV-05: 160 tokens are cached; of 200 + 1, three blocks are new."""
    bench = Bench()
    prompt = list(range(160))
    bench.reserve(prompt)
    bench.scheduler.import_done("r1", TokenOutput(7, finish_reason="stop"))
    seq = bench.sequence([*prompt, *range(500, 540)], mode="import")
    num_free = bench.blocks.num_free
    assert bench.scheduler.reserve_import(seq) == 160
    assert len(seq.blocks) == 13 and seq.blocks[:10] == bench.blocks.match(block_hashes(prompt, 16))
    assert bench.blocks.num_free == num_free - 13  # ten revived, three new
    assert bench.blocks.num_cached == 10
    bench.scheduler.import_done("r2", TokenOutput(7))
    assert bench.blocks.num_cached == 12
    bench.finish()


def test_an_import_with_everything_cached_still_lacks_a_token() -> None:
    bench = Bench()
    prompt = list(range(48))
    bench.add(prompt, max_tokens=1)
    bench.finish()
    assert bench.scheduler.reserve_import(bench.sequence(prompt, mode="import")) == 32


def test_an_import_without_room_is_refused_and_leaves_no_trace() -> None:
    bench = Bench(num_blocks=4)
    bench.reserve(40)
    with pytest.raises(OutOfBlocks):
        bench.reserve(20)
    assert bench.blocks.num_used == 3 and bench.scheduler.num_receiving == 1
    bench.scheduler.check()
    bench.scheduler.import_failed("r1")
    bench.scheduler.check()
    assert bench.blocks.num_used == 0
    bench.reserve(20)


def test_an_import_counts_against_the_places_in_the_batch() -> None:
    bench = Bench(config=SchedulerConfig(max_batch_tokens=64, max_running=2, max_context=4096))
    bench.reserve(4)
    bench.reserve(4)
    with pytest.raises(CapacityError):
        bench.reserve(4)
    bench.add(4)
    assert bench.step().items == ()
    bench.scheduler.import_failed("r1")
    assert shape(bench.step()) == [("r4", 0, 4, True)]


def test_imports_do_not_take_the_blocks_a_waiting_sequence_is_waiting_for() -> None:
    bench = Bench(num_blocks=10)
    bench.reserve(100)  # 7 blocks
    bench.add(64)  # 4 blocks: waits
    assert bench.step().items == ()
    with pytest.raises(OutOfBlocks):
        bench.reserve(16)
    urgent = bench.sequence(16, mode="import", priority=-1)
    bench.scheduler.reserve_import(urgent)
    bench.scheduler.import_failed(urgent.request_id)
    bench.scheduler.import_failed("r1")
    assert shape(bench.step()) == [("r2", 0, 64, True)]


def test_an_import_that_ends_at_its_first_token_never_runs() -> None:
    bench = Bench()
    seq = bench.reserve(32, max_tokens=1)
    assert len(seq.blocks) == 2
    bench.scheduler.import_done("r1", TokenOutput(7, finish_reason="length"))
    assert seq.state == "finished" and bench.step().items == () and bench.blocks.num_used == 0


def test_a_preempted_import_is_computed_here() -> None:
    bench = Bench(num_blocks=4, block_size=4)
    first, second = bench.reserve(7, max_tokens=8), bench.reserve(7, max_tokens=8)
    bench.scheduler.import_done("r1", TokenOutput(7))
    bench.scheduler.import_done("r2", TokenOutput(7))
    bench.step()
    assert bench.step().preempted == (second,)
    bench.finish()
    assert first.output_token_ids == second.output_token_ids == [7] * 8


# -- leaving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding", "held", "receiving"])
def test_abort_in_any_state_gives_everything_back(state: str) -> None:
    bench = Bench()
    if state == "receiving":
        seq = bench.reserve(100)
    else:
        seq = bench.add(100, mode="prefill_only" if state == "held" else "full")
    for _ in range({"prefilling": 1, "decoding": 3, "held": 2}.get(state, 0)):
        bench.step()
    assert bench.scheduler.abort(seq.request_id)
    bench.scheduler.check()
    assert seq.state == "finished" and bench.blocks.num_used == 0
    assert bench.scheduler.waiting_prompt_tokens == 0 and bench.step().items == ()
    assert not bench.scheduler.abort(seq.request_id)


def test_a_sequence_aborted_during_a_step_is_skipped_at_its_end() -> None:
    bench = Bench()
    bench.add(10)
    seq = bench.add(10)
    plan = bench.scheduler.schedule()
    bench.scheduler.abort(seq.request_id)
    bench.complete(plan)
    assert seq.output_token_ids == [] and bench.scheduler.num_running == 1
    assert bench.finish() == 3


@pytest.mark.parametrize("field", ["max_batch_tokens", "max_running", "max_context", "max_waiting", "max_chunk_tokens"])
def test_a_limit_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(LocalError) as caught:
        SchedulerConfig(**{field: 0})
    assert caught.value.field == field


def test_a_budget_that_decodes_alone_could_fill_is_refused() -> None:
    with pytest.raises(LocalError) as caught:
        SchedulerConfig(max_batch_tokens=100, max_running=101)
    assert caught.value.field == "max_batch_tokens"


# -- many steps at once, for simulators --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [6, 9, 40])
def test_steps_taken_together_end_where_single_steps_end(num_blocks: int) -> None:
    """Same outputs, same preemptions, same use of the pool after every stretch."""
    history = []
    for together in (False, True):
        bench = Bench(num_blocks=num_blocks, block_size=4)
        seqs = [bench.add(prompt, max_tokens) for prompt, max_tokens in ((5, 13), (3, 9), (8, 16))]
        seen, num_steps = {}, 0
        while (plan := bench.scheduler.schedule()).items:
            steps = 1
            if together and plan.num_decodes == len(plan.items) and not plan.preempted:
                steps = bench.scheduler.steps_alike(plan)
            if steps > 1:
                ends = {
                    item.seq.request_id: TokenOutput(
                        7, finish_reason="length" if item.seq.num_tokens + steps == item.seq.max_num_tokens else None
                    )
                    for item in plan.items
                }
                bench.scheduler.complete_alike(plan, steps, ends)
                bench.scheduler.check()
            else:
                bench.complete(plan)
            num_steps += steps
            used = bench.blocks.num_used
            seen[num_steps] = (
                used,
                [(seq.state, seq.num_tokens, seq.num_computed, seq.num_preemptions) for seq in seqs],
            )
        history.append(seen)
    single, joined = history
    assert len(joined) < len(single) and joined.items() <= single.items()
