"""A profile file as the start of the cost models: the planner's own writer, the router's own reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbaton.plan.link import LinkModel
from kvbaton.plan.profile_file import Origin, ProfileFile, WorkerLimits, write_profile
from kvbaton.plan.sim_costs import worker_cost
from kvbaton.plan.step_time import StepModel
from kvbaton.router.prior import learning_from, read_profile
from kvbaton.types import LocalError

PROFILE = ProfileFile(
    origin=Origin(engine="kvbaton", engine_version="1", model_id="m", model_revision="r", hardware="cpu"),
    worker=WorkerLimits(
        num_blocks=100, block_size=16, max_batch_tokens=512, max_running=64, max_context=4_096, token_bytes=9_216,
        num_layers=30,
    ),
    step=StepModel(0.02, 900e-6, 5e-9, 200e-6, 70e-9),
    link=LinkModel(0.004, 2e9),
    admission_s=0.006,
    control_s=0.001,
)  # fmt: skip


def test_models_start_from_the_profile(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "profile.json")
    costs = read_profile(tmp_path / "profile.json")
    assert costs.worker == worker_cost(PROFILE.worker_spec()), "the simulator's exact model of the same worker"
    assert (costs.link.startup_s, costs.link.byte_s) == (0.004, pytest.approx(0.5e-9))
    assert (costs.token_bytes, costs.num_layers) == (9_216, 30)
    assert (costs.overhead_local_s, costs.overhead_remote_s) == pytest.approx((0.006, 0.007))
    learning = learning_from(str(tmp_path / "profile.json"))
    learning.model_of("d0")
    assert learning.costs(1.0).workers["d0"].prefill_token_s == pytest.approx(900e-6)


def test_no_profile_is_a_cold_start() -> None:
    assert learning_from("").costs(0.0).worker.prefill_token_s == pytest.approx(250e-6)


@pytest.mark.parametrize("text", ["", "{}", '{"step": {"fixed_s": 0, "per_token_s": 0}}', '{"step": 5}'])
def test_what_is_no_profile_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(LocalError) as caught:
        read_profile(tmp_path / "bad.json")
    assert caught.value.field == "router.profile"
    with pytest.raises(LocalError):
        read_profile(tmp_path / "absent.json")
