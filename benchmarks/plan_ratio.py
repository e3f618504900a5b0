"""How many prefill nodes for each decode node: Mooncake's synthetic trace, and Splitwise's coding and conversation.

    python -m benchmarks.plan_ratio [--quick] [--shared DIR]      some ten minutes of one core; --quick: three

Sixteen nodes of eight A800 (A100 with the same figures), Llama 70B, one pool of host memory for all caches, and the
limits of the paper's Figure 15: TTFT 10 s, TBT 100 ms. Two step models go through the same simulations:

    roofline    the planner's round constants
    as printed  the same, but the fixed time of a step and the time of each decoding sequence are fitted to the mean TBT
                that the figure prints for two of its seven divisions; everything else is then foretold

Exit code 1 if what the documentation says of them does not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from kvbaton.plan.kv_math import Sharding
from kvbaton.plan.pool_ratio import Division, Limits, divide, last_standing, plateau, prefill_share
from kvbaton.plan.published import MOONCAKE_FIGURE_15
from kvbaton.plan.scenario import Engine, parse
from kvbaton.plan.sim_spec import FleetSpec, PoolSpec
from kvbaton.plan.step_time import StepModel
from kvbaton.plan.workload import Trace, read_trace
from kvbaton.router.policy import PolicyConfig

NODES = 16
LIMITS = Limits(ttft_s=10.0, tbt_s=0.1)
FITTED = ("fixed_s", "per_sequence_s")
FITTED_AT = (8, 11)  # prefill nodes: as many points as constants
WANTED = 0.9  # of the requests, when the rate is raised
BLOCK_TOKENS = 512


def nodes() -> FleetSpec:
    """Halved; ``divide`` counts anew. 1 TB of host memory a node, and 128 GB/s from it, as the paper says."""
    scenario = parse({
        "workload": {"prompt_tokens": 1, "output_tokens": 1},
        "model": {"preset": "Llama-3.1-70B"},
        "hardware": {"gpu": "A100-80G", "fabric": "800G", "host_gb_per_s": 16.0},
    })  # fmt: skip
    engine, eight = Engine(scenario), Sharding(tp=8)
    prefill = engine.worker(eight, 8192, BLOCK_TOKENS, tier_gb=125.0)
    decode = engine.worker(eight, 8192, BLOCK_TOKENS, decode=True)
    pools = (PoolSpec("prefill", NODES // 2, prefill), PoolSpec("decode", NODES // 2, decode))
    return FleetSpec(pools, engine.handoff(), PolicyConfig(threshold_tokens=0), pooled_tier=True)


def with_step(fleet: FleetSpec, step: StepModel) -> FleetSpec:
    """Both pools alike."""
    pools = (
        msgspec.structs.replace(pool, worker=msgspec.structs.replace(pool.worker, step=step)) for pool in fleet.pools
    )
    return msgspec.structs.replace(fleet, pools=tuple(pools))


def fit(fleet: FleetSpec, trace: Trace, rounds: int = 3) -> StepModel:
    """The two constants that bring the mean TBT to the printed ones, by Gauss-Newton on their logarithms."""
    start = fleet.pools[0].worker.step
    printed = {row.prefill: row.mean_tbt_s for row in MOONCAKE_FIGURE_15}

    def model(logs: np.ndarray) -> StepModel:
        values = dict(zip(FITTED, map(float, np.exp(logs)), strict=True))
        return msgspec.structs.replace(start, **values, source="two constants fitted to Mooncake's Figure 15b")

    def errors(logs: np.ndarray) -> np.ndarray:
        tried = with_step(fleet, model(logs))
        return np.array([divide(tried, n, trace, LIMITS).mean_tbt_s / printed[n] - 1.0 for n in FITTED_AT])

    logs = np.log([0.020, 0.005])  # below the printed TBT of hardly any load; what TBT grows by with each sequence
    for _ in range(rounds):
        found = errors(logs)
        slope = np.stack([(errors(logs + 0.1 * unit) - found) / 0.1 for unit in np.eye(len(FITTED))], axis=1)
        logs = logs + np.clip(np.linalg.lstsq(slope, -found, rcond=None)[0], -0.5, 0.5)
    return model(logs)


def sweep(fleet: FleetSpec, trace: Trace, counts: Sequence[int]) -> list[Division]:
    return [divide(fleet, count, trace, LIMITS) for count in counts]


def most(fleet: FleetSpec, trace: Trace, counts: Sequence[int], rate: float) -> tuple[float, Division]:
    """The highest rate that some division carries, and that division."""
    return last_standing(
        lambda count, each: divide(fleet, count, trace.at_rate(each), LIMITS), counts, rate, WANTED, precision=0.08
    )


def show(name: str, divisions: Sequence[Division]) -> None:
    print(f"\n{name}\n  {'':8} {'effective':>10} {'TTFT s':>8} {'TBT ms':>8}")
    for each in divisions:
        print(f"  {each.label:8} {each.effective:10.1%} {each.mean_ttft_s:8.2f} {each.mean_tbt_s * 1e3:8.1f}")
    good = plateau(divisions)
    print(f"  within a point of the best: {good[0].label} to {good[-1].label}, middle {prefill_share(divisions):.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("KVBATON_SHARED") or Path(__file__).resolve().parents[2] / "shared"
    parser.add_argument("--shared", type=Path, default=Path(default))
    parser.add_argument("--quick", action="store_true", help="at the trace's own rate only")
    options = parser.parse_args()
    data = options.shared / "data"
    trace = read_trace(data / "mooncake-fast25" / "synthetic_trace.jsonl")
    counts = [row.prefill for row in MOONCAKE_FIGURE_15]
    plain = nodes()
    fitted = with_step(plain, fit(plain, trace))
    step = fitted.pools[0].worker.step
    print(f"fixed {step.fixed_s * 1e3:.1f} ms, a sequence {step.per_sequence_s * 1e3:.2f} ms; by roofline "
          + " and ".join(f"{getattr(plain.pools[0].worker.step, name):.3g} s" for name in FITTED))  # fmt: skip
    printed = [Division(r.prefill, NODES - r.prefill, r.effective, r.mean_ttft_s, r.mean_tbt_s)
               for r in MOONCAKE_FIGURE_15]  # fmt: skip
    found = sweep(fitted, trace, counts)
    show("printed", printed)
    show("as printed", found)
    show("roofline", sweep(plain, trace, [*counts, 12, 13]))
    failed = not abs(prefill_share(found) - prefill_share(printed)) <= 1 / NODES
    if options.quick:
        return int(failed)
    shares = {}
    for name, fleet in (("as printed", fitted), ("roofline", plain)):
        for what, requests, rate in (
            ("synthetic", trace, trace.rate_per_s),
            ("coding", azure(data, "code"), 20.0),
            ("conversation", azure(data, "conv"), 20.0),
        ):
            top, best = most(fleet, requests, range(2, NODES - 1), rate)
            shares[name, what] = best.prefill / NODES
            print(f"{name}: {what} up to {top:.1f} requests/s, as {best.label}", flush=True)
        failed |= shares[name, "coding"] <= shares[name, "conversation"]
    failed |= abs(shares["as printed", "synthetic"] - 0.5) > 1.5 / NODES
    return int(failed)


def azure(data: Path, name: str) -> Trace:
    return read_trace(data / "azure-llm-2023" / f"AzureLLMInferenceTrace_{name}.csv").head(2_000)


if __name__ == "__main__":
    sys.exit(main())
