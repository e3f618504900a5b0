"""Equal arguments give equal bytes in any process: two fresh interpreters whose string hashes differ."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys
from random import Random
from kvbaton.plan.link import LinkModel
from kvbaton.plan.sim import simulate
from kvbaton.plan.sim_spec import FleetSpec, HandoffSpec, Incidents, Outage, PoolSpec, Scaling, WorkerSpec
from kvbaton.plan.autoscale_demand import PoolPolicy
from kvbaton.plan.autoscale_sim import PolicyScaler
from kvbaton.plan.control import ScalingPolicy
from kvbaton.plan.step_time import StepModel
from kvbaton.plan.workload import synthetic
from kvbaton.plan.scenario import with_prefixes

rng = Random(int(sys.argv[1]))
step = StepModel(0.010, 100e-6, 2e-9, 100e-6, 1e-7, source="test")
worker = WorkerSpec(step=step, num_blocks=600, block_size=64, max_batch_tokens=512, max_running=16)
trace = with_prefixes(synthetic(300, 6.0, (1200, 40), rng, 0.5), 0.4, rng)
incidents = Incidents(
    outages=(Outage("decode-0", 5.0, 4.0), Outage("prefill-1", 12.0, 3.0)),
    scaling=Scaling(
        lambda: PolicyScaler(ScalingPolicy({"decode": PoolPolicy(maximum=4, sequences_per_worker=8)}, start_s=2.0)),
        interval_s=3.0, startup_s=2.0,
    ),
    give_up_s=30.0,
)
handoff = HandoffSpec(LinkModel(1e-3, 2e9), 20_000, 30)
split = FleetSpec((PoolSpec("prefill", 2, worker), PoolSpec("decode", 2, worker)), handoff)
single = FleetSpec((PoolSpec("both", 4, worker),))
results = [simulate(split, trace, incidents), simulate(split, trace), simulate(single, trace)]
print(f"hash {hash('kvbaton')}", file=sys.stderr)
sys.stdout.buffer.write(b"\\n".join(result.encode() for result in results))
"""


def run(seed: int, hash_seed: str) -> tuple[bytes, bytes]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(seed)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout, done.stderr


def test_two_interpreters_give_the_same_bytes() -> None:
    first, one_hash = run(7, "1")
    second, other_hash = run(7, "4242")
    assert one_hash != other_hash, "the string hashes did not differ, so nothing was shown"
    assert len(first) > 10_000
    assert first == second
    assert run(8, "1")[0] != first
