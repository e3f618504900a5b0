"""What planning costs: CPU time of schedule() and complete() with a model that takes no time.

    python -m benchmarks.scheduler [--sequences 256] [--steps 400] [--json]

Three loads: every sequence decoding (token ids hashed and published as blocks fill), 2,048-token prefill chunks of real
token ids, and a replay in which prompts are lengths and hashes, at a pool so full that prompts wait and cached
blocks are evicted. CPU time and not wall time, so that a neighbour on the core does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from hashlib import blake2b

from kvbaton.engine.scheduler import Scheduler, SchedulerConfig, StepPlan
from kvbaton.engine.sequence import Sequence
from kvbaton.kv.blocks import BlockManager
from kvbaton.types import GenerateRequest, SamplingParams, TokenOutput

GOES_ON = TokenOutput(5)
ENDS = TokenOutput(5, finish_reason="length")
CHUNK_TOKENS = 2048


def sample(plan: StepPlan) -> dict[str, TokenOutput]:
    return {
        item.seq.request_id: ENDS if item.seq.num_tokens + 1 == item.seq.max_num_tokens else GOES_ON
        for item in plan.items
        if item.samples
    }


def timed_steps(scheduler: Scheduler, num_steps: int) -> tuple[list[float], list[float], int]:
    """CPU seconds of schedule() and of complete() for each step, and the items of all steps."""
    schedule_s, complete_s, num_items = [], [], 0
    for _ in range(num_steps):
        start_s = time.process_time()
        plan = scheduler.schedule()
        planned_s = time.process_time()
        if not plan.items:
            break
        sampled = sample(plan)
        ran_s = time.process_time()
        scheduler.complete(plan, sampled)
        complete_s.append(time.process_time() - ran_s)
        schedule_s.append(planned_s - start_s)
        num_items += len(plan.items)
    return schedule_s, complete_s, num_items


def row(name: str, schedule_s: list[float], complete_s: list[float], num_items: int) -> dict[str, object]:
    def figures(samples_s: list[float]) -> dict[str, float]:
        ordered = sorted(samples_s)
        return {
            "median_us": round(statistics.median(ordered) * 1e6, 1),
            "p99_us": round(ordered[int(0.99 * (len(ordered) - 1))] * 1e6, 1),
        }

    total_s = sum(schedule_s) + sum(complete_s)
    return {
        "load": name,
        "steps": len(schedule_s),
        "schedule": figures(schedule_s),
        "complete": figures(complete_s),
        "us_per_item": round(total_s / num_items * 1e6, 3),
        "total_s": round(total_s, 3),
    }


def decode_and_prefill(num_sequences: int, num_steps: int) -> list[dict[str, object]]:
    num_prompt = 512
    config = SchedulerConfig(CHUNK_TOKENS + num_sequences, num_sequences, 1 << 20, num_sequences)
    scheduler = Scheduler(config, BlockManager(num_sequences * (num_prompt + num_steps) // 8, 16))
    chance = random.Random(0)
    for index in range(num_sequences):
        prompt = tuple(chance.randrange(50_000) for _ in range(num_prompt))
        sampling = SamplingParams(max_tokens=num_steps + 4 * num_sequences)
        scheduler.add(Sequence(GenerateRequest(f"r{index}", prompt, sampling)))
    num_prefill_steps = num_sequences * num_prompt // CHUNK_TOKENS
    prefill = row(f"prefill {CHUNK_TOKENS} tokens", *timed_steps(scheduler, num_prefill_steps))
    while scheduler.waiting_prompt_tokens:
        timed_steps(scheduler, 1)
    return [prefill, row(f"decode {num_sequences}", *timed_steps(scheduler, num_steps))]


def replay(num_requests: int, block_size: int) -> dict[str, object]:
    """Prompts of 12,000 tokens on average, a third of them shared, 340 tokens of output."""
    chance = random.Random(1)
    scheduler = Scheduler(
        SchedulerConfig(8192, 256, 1 << 20, num_requests), BlockManager(1_500_000 // block_size, block_size)
    )
    for index in range(num_requests):
        num_prompt = int(min(120_000, chance.expovariate(1 / 12_000))) + 100
        family = chance.randrange(200)
        hashes = [
            blake2b(f"{family if block * block_size < 4000 else index}.{block}".encode(), digest_size=16).digest()
            for block in range(num_prompt // block_size)
        ]
        sampling = SamplingParams(max_tokens=int(chance.expovariate(1 / 340)) + 1)
        request = GenerateRequest(f"r{index}", (), sampling)
        scheduler.add(Sequence(request, num_prompt_tokens=num_prompt, block_hashes=hashes))
    return row(f"replay {num_requests} requests, block {block_size}", *timed_steps(scheduler, 1 << 30))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    rows = decode_and_prefill(args.sequences, args.steps)
    rows += [replay(args.requests, block_size) for block_size in (512, 16)]
    if args.json:
        json.dump({"rows": rows}, sys.stdout, indent=1)
        print()
        return
    print(f"{'load':34} {'steps':>6} {'schedule us':>18} {'complete us':>18} {'us/item':>8} {'total s':>8}")
    for entry in rows:
        cells = [
            f"{entry[phase]['median_us']:.0f} (p99 {entry[phase]['p99_us']:.0f})" for phase in ("schedule", "complete")
        ]
        print(
            f"{entry['load']:34} {entry['steps']:6} {cells[0]:>18} {cells[1]:>18} "
            f"{entry['us_per_item']:8.2f} {entry['total_s']:8.2f}"
        )


if __name__ == "__main__":
    main()
