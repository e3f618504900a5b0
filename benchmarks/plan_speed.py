"""How fast the planner is: one Mooncake replay, and a search of 200 configurations. One core, CPU seconds.

    python -m benchmarks.plan_speed replay [--prefill 4 --decode 4]    12,031 requests, one configuration: under 10 s
    python -m benchmarks.plan_speed search [--configurations 200]      under 5 minutes, with progress

CPU seconds of this process are what one idle core takes; wall seconds are printed beside them. Exit code 1 if over.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from itertools import product
from pathlib import Path
from random import Random

from kvbaton.plan.kv_math import Sharding
from kvbaton.plan.scenario import Engine, parse
from kvbaton.plan.sim import simulate
from kvbaton.plan.sizing import Layout, Sizer, settled_attainment
from kvbaton.plan.workload import Trace, read_trace

REPLAY_LIMIT_S, SEARCH_LIMIT_S = 10.0, 300.0


def sizer_for(trace: Trace) -> Sizer:
    """Llama-3.1-70B in 16 bits on H100s, KV blocks as large as the trace's."""
    scenario = parse({
        "workload": {"prompt_tokens": 1, "output_tokens": 1}, "model": {"preset": "Llama-3.1-70B"},
        "hardware": {"max_gpus": 64, "fabric": "400G"}, "slo": {"ttft_ms": 5000, "tpot_ms": 50},
    })  # fmt: skip
    return Sizer(scenario, trace, Engine(scenario), lambda line: None)


def timed(what: str, limit_s: float, work: object) -> bool:
    gc.collect()
    gc.disable()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    text = work()  # type: ignore[operator]
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    gc.enable()
    print(f"{what}: {cpu_s:.1f} CPU seconds ({wall_s:.1f} s wall), limit {limit_s:g}: {text}")
    return cpu_s <= limit_s


def replay(trace: Trace, prefill: int, decode: int) -> bool:
    tp8, sizer = Sharding(tp=8), sizer_for(trace)
    good = True
    for layout in (Layout(0, prefill + decode, tp8, tp8, 8192, 8192), Layout(prefill, decode, tp8, tp8, 8192, 8192)):

        def run(layout: Layout = layout) -> str:
            result = simulate(sizer.fleet(layout), trace)
            return f"{result.outcomes}, TTFT p90 {result.ttft.p90:.2f} s, hit {result.token_hit:.1%}"

        good &= timed(f"replay of {len(trace.requests):,} requests, {layout.label}", REPLAY_LIMIT_S, run)
    return good


def search(trace: Trace, configurations: int) -> bool:
    """Pool ratios, parallelism, chunk budgets and thresholds, each simulated on the first 600 requests."""
    sizer, sample = sizer_for(trace), trace.head(600)
    layouts = []
    for tp, budget, threshold in product((4, 8), (2048, 4096, 8192, 16384), (0, 2048, 8192)):
        most = 64 // tp
        shape = Sharding(tp=tp)
        layouts += [Layout(n, most - n, shape, shape, budget, budget, threshold) for n in range(1, most)]
        layouts.append(Layout(0, most, shape, shape, budget, budget))
    step = max(1, len(layouts) // configurations)
    chosen = layouts[::step][:configurations]

    def run() -> str:
        best, best_share = "", -1.0
        for number, layout in enumerate(chosen, 1):
            share = settled_attainment(simulate(sizer.fleet(layout), sample), sizer.scenario.slo)
            if share > best_share:
                best, best_share = layout.label, share
            print(f"\r{number}/{len(chosen)} best {best_share:.1%}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return f"{len(chosen)} configurations, best {best}: {best_share:.1%} within the limits"

    return timed("search", SEARCH_LIMIT_S, run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("replay", "search"))
    default = os.environ.get("KVBATON_SHARED") or Path(__file__).resolve().parents[2] / "shared"
    parser.add_argument("--shared", type=Path, default=Path(default))
    parser.add_argument("--prefill", type=int, default=4)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--configurations", type=int, default=200)
    options = parser.parse_args()
    trace = read_trace(options.shared / "data" / "mooncake-fast25" / "conversation_trace.jsonl", Random(0))
    if options.what == "replay":
        return int(not replay(trace, options.prefill, options.decode))
    return int(not search(trace, options.configurations))


if __name__ == "__main__":
    sys.exit(main())
