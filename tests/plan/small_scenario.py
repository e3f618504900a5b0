"""A scenario of one small measured worker, so that a whole plan takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

from kvbaton.plan.link import LinkModel
from kvbaton.plan.profile_file import Origin, ProfileFile, WorkerLimits, write_profile
from kvbaton.plan.step_time import StepModel


def profile_scenario(folder: Path, link: float = 2e10, max_gpus: int = 3, **workload: object) -> Path:
    """A small measured worker, so that a whole plan takes seconds."""
    profile = ProfileFile(
        origin=Origin(engine="kvbaton", engine_version="1", model_id="m", model_revision="r", hardware="test"),
        worker=WorkerLimits(num_blocks=2_000, block_size=64, max_batch_tokens=512, max_running=8, max_context=16_384,
                            token_bytes=20_000, num_layers=30),
        step=StepModel(0.010, 100e-6, 2e-9, 100e-6, 1e-7, source="measured: test"),
        link=LinkModel(1e-3, link),
    )  # fmt: skip
    write_profile(profile, folder / "profile.json")
    terms = {"prompt_tokens": 1500, "output_tokens": 20, "requests": 40, **workload}
    wanted = "\n".join(f"{key} = {json.dumps(value)}" for key, value in terms.items())
    text = f"""name = "small"
[workload]
{wanted}
[slo]
ttft_ms = 1500
tpot_ms = 25
[engine]
profile = "profile.json"
engine_version = "2"
uncertainty = 0.1
[hardware]
max_gpus = {max_gpus}
[search]
chunk_budgets = [512]
thresholds = [0]
verify = 1
sensitivity = false
precision = 0.2
"""
    (folder / "scenario.toml").write_text(text)
    return folder / "scenario.toml"
