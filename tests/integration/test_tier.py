"""The shared KV tier under a split fleet: the same tokens with it, over restarts, and from pool to pool."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.topologies import Fleet, Topology, random_prompts
from kv.tier_memory import assert_goes

from kvbaton.kv.tier import MIB, TierOptions
from kvbaton.kv.tier_directory import TierDirectory, memory_directory
from kvbaton.kv.tiering import TieringConfig
from kvbaton.types import SamplingParams

WAIT_S = 120.0  # a bound on a wait, not a claim about speed
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
ONE = Topology("one worker", num_concurrent=1)
SPLIT = Topology("1P1D", num_prefill=1)
TWO = Topology("2 colocated", num_decode=2)


@pytest.fixture
def tier() -> Iterator[TierOptions]:
    """Memory that outlives the workers, as `kvbaton up` keeps it."""
    name = secrets.token_hex(8)
    directory = TierDirectory(memory_directory(name), passing=True)
    directory.settle()
    yield TierOptions(32 * MIB, name)
    directory.close()
    assert_goes(memory_directory(name))


def patient(fleet: Fleet) -> None:
    """However slow the machine is, nothing is computed for want of time."""
    for worker in (*fleet.prefill, *fleet.decode):
        assert worker.engine.tiering is not None
        worker.engine.tiering.config = TieringConfig(deadline_s=WAIT_S)


async def settle(fleet: Fleet) -> None:
    """Everything computed so far is in the tier."""
    for worker in (*fleet.prefill, *fleet.decode):
        assert worker.engine.tiering is not None
        assert await asyncio.to_thread(worker.engine.tiering.flush, WAIT_S)


def loaded(fleet: Fleet) -> list[int]:
    """Tokens that each worker had from the tier; of the prefill workers first."""
    return [worker.stats().num_tier_tokens for worker in (*fleet.prefill, *fleet.decode)]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
async def test_any_worker_reuses_what_any_computed(tiny_model_dir: Path, tier: TierOptions, dtype: str) -> None:
    prompts = random_prompts(6, longest=200, vocab_size=250, seed=1)
    options = {"dtype": dtype, "num_blocks": 256}
    async with Fleet(ONE, tiny_model_dir, **options) as plain:
        answers = [answer.token_ids for answer in await plain.run(prompts, GREEDY)]
        turns = [[*prompt, *answer, 5, 6, 7] for prompt, answer in zip(prompts, answers, strict=True)]
        expected = [answer.token_ids for answer in await plain.run(turns, GREEDY)]
    async with Fleet(SPLIT, tiny_model_dir, tier=tier, **options) as fleet:
        patient(fleet)
        assert [answer.token_ids for answer in await fleet.run(prompts, GREEDY)] == answers
        await settle(fleet)
        assert loaded(fleet) == [0, 0]
        assert [answer.token_ids for answer in await fleet.run(turns, GREEDY)] == expected
        await settle(fleet)
        assert loaded(fleet)[0] > 0, "the prefill worker has what the decode worker said"
        await fleet.check_empty()
    async with Fleet(SPLIT, tiny_model_dir, tier=tier, **options) as fleet:
        patient(fleet)
        again = await fleet.run(turns, GREEDY)
        assert [answer.token_ids for answer in again] == expected
        prefill, decode = loaded(fleet)
        assert prefill > 0 and decode > 0
        for answer in again:  # of what both have from the tier nothing is handed over
            assert answer.num_remote_tokens <= 16
        await fleet.check_empty()
    async with Fleet(TWO, tiny_model_dir, tier=tier, **options) as fleet:
        patient(fleet)
        assert [answer.token_ids for answer in await fleet.run(turns, GREEDY)] == expected
        assert min(loaded(fleet)) > 0
