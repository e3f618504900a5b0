"""Simulator against two recorded vLLM runs: in-sample, and fitted on the first 100 requests for the other 200.

    python -m benchmarks.plan_vllm [--model NAME] [--shared DIR]     about two minutes of one core for both models

Each fit has four constants, printed. Exit code 1 if an error exceeds 4% in-sample or 10% out of sample.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec

from kvbaton.plan import calibrate
from kvbaton.plan.hardware import gpu
from kvbaton.plan.kv_math import KVCost, Sharding, kv_format
from kvbaton.plan.model_presets import preset
from kvbaton.plan.model_weights import count_weights
from kvbaton.plan.sim_spec import FleetSpec, PoolSpec, WorkerSpec
from kvbaton.plan.step_time import Efficiency, StepModel, kv_budget_bytes, roofline

RUNS = {"RTXPRO6000_Llama-3.1-8B": ("Llama-3.1-8B", 1), "RTXPRO6000_Qwen3-32B": ("Qwen3-32B", 2)}
START = Efficiency(mfu=0.6, mbu=0.9, mbu_kv=0.9, fixed_ms=3.0, sequence_us=15.0, all_reduce_us=0.0,
                   link_efficiency=1e6)  # fmt: skip


def worker_of(model_name: str, tp: int) -> WorkerSpec:
    """The engine arguments of the runs: budget 2,048, at most 128 sequences, 90% of memory."""
    shape, device = preset(model_name), gpu("RTX-PRO-6000")
    cost, weights = KVCost(shape, kv_format("auto", shape), Sharding(tp=tp)), count_weights(shape)
    blocks = kv_budget_bytes(device, cost, weights) // (cost.token_bytes * 16)
    start = roofline(cost, weights, device, START)
    return WorkerSpec(start, blocks, 16, 2048, 128, prefix_caching=False, num_gpus=tp)


def fleet(worker: WorkerSpec, model: StepModel) -> FleetSpec:
    return FleetSpec((PoolSpec("both", 1, msgspec.structs.replace(worker, step=model)),))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("KVBATON_SHARED") or Path(__file__).resolve().parents[2] / "shared"
    parser.add_argument("--shared", type=Path, default=Path(default))
    parser.add_argument("--model", choices=[model for model, _ in RUNS.values()], help="one of the two; default both")
    options = parser.parse_args()
    root = options.shared / "data" / "llmservingsim-vllm"
    failed = False
    for name, (model_name, tp) in RUNS.items():
        if options.model not in (None, model_name):
            continue
        run = calibrate.read_vllm_run(root / name)
        worker = worker_of(model_name, tp)
        for label, part in (("all 300", slice(None)), ("first 100", slice(0, 100))):
            found = calibrate.fit(run, lambda model, worker=worker: fleet(worker, model), worker.step, part)
            constants = ", ".join(f"{key} {value * 1e6:.4g} us" for key, value in found.constants.items())
            print(f"{name}, fitted on {label} ({found.simulations} simulations): {constants}")
            print("  in-sample     " + row(found.errors.values()), flush=True)
            failed |= label == "all 300" and found.worst_error > 0.04
            if label != "all 300":
                rest = slice(100, None)
                result = calibrate.replay(run, lambda model, worker=worker: fleet(worker, model), found.model)
                unseen = calibrate.errors_of(run, result, rest)
                print("  other 200     " + row(unseen), flush=True)
                failed |= abs(unseen).max() > 0.10
    return int(failed)


def row(errors: object) -> str:
    values = list(errors)  # type: ignore[call-overload]
    return "  ".join(f"{name} {error * 100:+.1f}%" for name, error in zip(calibrate.STATISTICS, values, strict=True))


if __name__ == "__main__":
    sys.exit(main())
