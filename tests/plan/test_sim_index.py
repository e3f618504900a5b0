"""The live prefix index and policy over simulated workers: hot prefixes, eviction, restarts."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import numpy as np

from kvbaton.plan.sim import Simulation, simulate
from kvbaton.plan.sim_spec import FleetSpec, Incidents, Outage, PoolSpec, WorkerSpec
from kvbaton.plan.step_time import StepModel
from kvbaton.plan.workload import Trace, TraceRequest
from kvbaton.router.policy import PolicyConfig

STEP = StepModel(0.008, 40e-6, 1e-9, 15e-6, 0.05e-6)
BLOCK = 64


def fleet(count: int, kind: str = "cost", num_blocks: int = 2000) -> FleetSpec:
    worker = WorkerSpec(STEP, num_blocks, BLOCK, max_batch_tokens=512, max_running=64)
    threshold = None if kind == "cost" else 0
    return FleetSpec((PoolSpec("both", count, worker),), policy=PolicyConfig(threshold, kind=kind))  # type: ignore[arg-type]


def hot(count: int, rate: float, seed: int = 1) -> Trace:
    """Every prompt begins with the same 2,048 tokens and ends with 512 of its own."""
    rng, now_s, requests = Random(seed), 0.0, []
    for number in range(count):
        now_s += rng.expovariate(rate)
        own = range(1000 + 8 * number, 1008 + 8 * number)
        requests.append(TraceRequest(now_s, 2560, 32, (*range(32), *own)))
    return Trace("hot", tuple(requests), BLOCK)


def sessions(num_sessions: int, num_turns: int, rate: float, seed: int = 1) -> Trace:
    """Conversations whose prompt grows by 512 tokens a turn, in turns of random sessions."""
    rng, now_s, requests = Random(seed), 0.0, []
    turns = Counter[int]()
    while len(requests) < num_sessions * num_turns:
        session = rng.randrange(num_sessions)
        if turns[session] == num_turns:
            continue
        turns[session] += 1
        now_s += rng.expovariate(rate)
        num_blocks = 8 * turns[session]
        ids = tuple(10_000 * (session + 1) + number for number in range(num_blocks))
        requests.append(TraceRequest(now_s, num_blocks * BLOCK, 16, ids))
    return Trace("sessions", tuple(requests), BLOCK)


def test_one_hot_prefix_spreads_when_its_holder_saturates() -> None:
    """RT-09: three times what one worker can take; nobody queues behind the first holder for the prefix's sake."""
    alone_s = STEP.prefill_s(512, 0, 512) + 32 * STEP.tpot_s(8, 2560) / 8
    trace = hot(200, 3 / alone_s)
    run = Simulation(fleet(4), trace)
    result = run.run()
    assert result.outcomes == {"ok": 200}
    per_worker = Counter(record.decode for record in run.records.values())
    assert len(per_worker) == 4 and max(per_worker.values()) / (200 / 4) <= 1.5
    least = simulate(fleet(4, "least_load"), trace)
    assert np.percentile(result.ttft_s, 99) <= np.percentile(least.ttft_s, 99)
    assert result.token_hit >= 0.75, "each worker computes it once"


def test_conversations_stay_where_their_prefix_is() -> None:
    trace = sessions(20, 6, rate=2.0)
    infinite = sum(8 * BLOCK * turn for turn in range(6)) / sum(8 * BLOCK * (turn + 1) for turn in range(6))
    ours = simulate(fleet(4), trace)
    assert ours.token_hit >= 0.9 * infinite
    assert simulate(fleet(4, "round_robin"), trace).token_hit < 0.5 * ours.token_hit


def test_what_is_foretold_is_found_under_eviction_and_after_a_restart() -> None:
    """RT-12: caches too small for all sessions, and a worker that comes back empty."""
    outage = Outage("both-0", at_s=30.0, down_s=1.0)
    spec = msgspec.structs.replace(fleet(2, num_blocks=300), kv_lag_s=0.0)
    run = Simulation(spec, sessions(30, 6, rate=1.0), Incidents((outage,)))
    foretold: dict[str, int] = {}
    index = run._index
    cached_tokens = index.cached_tokens

    def remember(record, workers, now_s):  # type: ignore[no-untyped-def]
        found = cached_tokens(record, workers, now_s)
        foretold[record.request_id] = found
        return found

    index.cached_tokens = remember  # type: ignore[method-assign]
    result = run.run()
    assert result.outcomes == {"ok": 180}
    assert any(worker.blocks.num_cached < 30 * 48 for worker in run.fleet.workers.values())
    errors = [
        abs(foretold[record.request_id][record.decode or ""] - record.cached_tokens) / record.prompt_tokens
        for record in run.records.values()
    ]
    assert sum(errors) / len(errors) <= 0.05
