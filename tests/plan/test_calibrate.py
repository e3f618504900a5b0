"""The simulator against recorded vLLM runs, and the fit against a run whose constants are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest

from benchmarks.plan_vllm import RUNS, fleet, worker_of
from kvbaton.plan.calibrate import CONSTANTS, Run, errors_of, fit, read_vllm_run, replay
from kvbaton.plan.sim_spec import FleetSpec, PoolSpec, WorkerSpec
from kvbaton.plan.step_time import StepModel
from kvbaton.plan.workload import synthetic
from kvbaton.types import LocalError

Shared = Callable[[str], Path]
# Four constants each, in microseconds, as benchmarks/plan_vllm.py fits them.
STATED = {
    "RTXPRO6000_Llama-3.1-8B": {"fixed_s": 13_580, "per_token_s": 40.17, "per_sequence_s": 9.34,
                                "per_context_s": 0.05861},
    "RTXPRO6000_Qwen3-32B": {"fixed_s": 24_990, "per_token_s": 144.8, "per_sequence_s": 13.50,
                             "per_context_s": 0.1357},
}  # fmt: skip


@pytest.mark.parametrize("name", list(RUNS))
def test_stated_constants_replay_the_recorded_run_within_4_percent(shared: Shared, name: str) -> None:
    run = read_vllm_run(shared("llmservingsim-vllm") / name)
    worker = worker_of(*RUNS[name])
    constants = {key: value / 1e6 for key, value in STATED[name].items()}
    assert len(constants) == 4
    pair_s = constants["per_token_s"] * worker.step.per_pair_s / worker.step.per_token_s
    model = msgspec.structs.replace(worker.step, **constants, per_pair_s=pair_s)
    errors = errors_of(run, replay(run, lambda step: fleet(worker, step), model))
    assert abs(errors).max() < 0.04


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RUNS))
def test_fits_in_sample_and_predicts_out_of_sample(shared: Shared, name: str) -> None:
    run = read_vllm_run(shared("llmservingsim-vllm") / name)
    worker = worker_of(*RUNS[name])
    assert fit(run, lambda step: fleet(worker, step), worker.step).worst_error < 0.04
    early = fit(run, lambda step: fleet(worker, step), worker.step, slice(0, 100))
    unseen = errors_of(run, replay(run, lambda step: fleet(worker, step), early.model), slice(100, None))
    assert abs(unseen).max() < 0.10


def test_recovers_known_constants() -> None:
    true = StepModel(0.010, 50e-6, 1e-9, 20e-6, 0.05e-6)
    worker = WorkerSpec(true, 10_000, 16, 512, 32, prefix_caching=False)

    def fleet_of(step: StepModel) -> FleetSpec:
        return FleetSpec((PoolSpec("both", 1, msgspec.structs.replace(worker, step=step)),))

    trace = synthetic(60, 6.0, (600, 60), Random(3), spread=0.9)
    measured = replay(Run("true", trace, (), (), ()), fleet_of, true)
    tpot = tuple(pair[1] for pair in measured.paired)
    run = Run("true", trace, measured.ttft_s, tpot, measured.e2e_s)
    wrong = msgspec.structs.replace(true, fixed_s=0.02, per_token_s=80e-6, per_pair_s=1.6e-9, per_sequence_s=10e-6)
    found = fit(run, fleet_of, wrong)
    assert set(found.constants) == set(CONSTANTS)
    assert found.worst_error < 0.05
    assert found.model.fixed_s == pytest.approx(0.010, rel=0.1)
    assert found.model.per_token_s == pytest.approx(50e-6, rel=0.1)
    with pytest.raises(LocalError, match="more than one token"):
        Run("x", trace, (1.0,), (0.0,), (1.0,)).statistics()
