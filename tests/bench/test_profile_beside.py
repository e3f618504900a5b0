"""What workers on shared cores cost each other: the constants that made the rows come back, and what cannot be."""

from __future__ import annotations

import os

import pytest

from kvbaton.bench.profile import ProfileResult, ProfileSpec
from kvbaton.bench.profile_beside import PROBED_BATCH, PROMPT, gaps_beside, measure_beside, settled
from kvbaton.bench.profile_fit import Fit
from kvbaton.bench.samples import RequestSample
from kvbaton.plan.profile_file import BesideRow
from kvbaton.plan.step_time import StepModel, StepWork, pairs
from kvbaton.types import LocalError

STEP = StepModel(0.010, 200e-6, 0.0, 300e-6, 0.0, source="test", per_chunk_s=0.004)
FIT = Fit(STEP, 0.002, 0.0, 0.0, 0.0, ())


def rows(slowdown: float, token_s: float) -> list[BesideRow]:
    found = []
    for streams in (4, 16):
        alone_s = STEP.step_s(StepWork(num_decodes=streams))
        found.append(BesideRow(streams, alone_s, alone_s * (1 + slowdown) + streams * token_s))
    return found


def test_constants_come_back() -> None:
    decode_s = STEP.step_s(StepWork(num_decodes=PROBED_BATCH))
    mixed_s = STEP.step_s(StepWork(PROMPT, pairs(0, PROMPT), PROBED_BATCH, 0, 1))
    idle_s = 0.003 + STEP.prefill_s(PROMPT)
    busy_s = 0.002 + 0.005 + decode_s / 2 + mixed_s
    full_s = 0.003 + 0.005 + 0.004 + 1.1 * (decode_s / 2 + mixed_s) + 1.5 * PROBED_BATCH * 2e-4
    found = settled(rows(0.1, 2e-4), 1.6, FIT, 2, (idle_s, busy_s, full_s), lambda line: None)
    assert found.admission_s == pytest.approx(0.003)
    assert found.cores.slowdown == pytest.approx(0.1, abs=1e-6)
    assert found.cores.prefill_slowdown == pytest.approx(0.6)
    assert found.cores.token_s == pytest.approx(2e-4, rel=1e-4)
    assert found.cores.worker_wait_s == pytest.approx(0.005)
    assert found.cores.full_wait_s == pytest.approx(0.004, rel=1e-3)


def test_company_that_costs_nothing_is_no_gain() -> None:
    faster = [BesideRow(row.streams, row.alone_s, 0.9 * row.alone_s) for row in rows(0.0, 0.0)]
    cores = settled(faster, 0.9, FIT, 2, (0.0, 0.0, 0.0), lambda line: None).cores
    assert (cores.slowdown, cores.prefill_slowdown, cores.token_s) == (0.0, 0.0, 0.0)
    assert (cores.worker_wait_s, cores.full_wait_s) == (0.0, 0.0)


def test_gaps_beside_prompts_are_told_from_those_apart() -> None:
    times = [0.1 * n for n in range(20)] + [2.05, 2.20, 2.35, 2.45, 2.55]
    stream = RequestSample(0, "steady", 0, 0, 8, 8, chunks=[(time, 1, 1.0) for time in times])
    assert gaps_beside([stream], [(2.04, 2.36)]) == pytest.approx([1.5, 1.5])
    assert gaps_beside([stream], []) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one worker is enough for one core")
async def test_fewer_workers_than_cores_are_refused() -> None:
    found = ProfileResult("http://x", "m", (), (), FIT)
    with pytest.raises(LocalError, match="1 workers leave one of"):
        await measure_beside(ProfileSpec("http://x"), "http://y", (), found, lambda line: None)
