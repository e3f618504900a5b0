"""The simulator against our own engine: replay the runs that were measured, from a profile, and state the error.

    python -m benchmarks.plan_own PROFILE.json RUN.jsonl [--prefill 1 --decode 1 | --colocated 2] [--threshold 64]

RUN.jsonl has a request a line with arrival_s, prompt_tokens, output_tokens, ttft_s, tpot_s (0 for one token), e2e_s, as
the raw samples of ``kvbaton bench`` give them. Nothing is fitted here: the profile was measured before the run.
Exit code 1 if TTFT, TPOT or end-to-end mean is off by more than 25%.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvbaton.plan.calibrate import STATISTICS, Run, errors_of
from kvbaton.plan.profile_file import ProfileFile, read_profile
from kvbaton.plan.sim import simulate
from kvbaton.plan.sim_spec import FleetSpec, HandoffSpec, PoolSpec
from kvbaton.plan.workload import Trace, TraceRequest
from kvbaton.router.policy import PolicyConfig
from kvbaton.types import LocalError

LIMIT = 0.25


def read_run(path: Path) -> Run:
    rows = sorted((json.loads(line) for line in path.read_text().splitlines() if line.strip()),
                  key=lambda row: row["arrival_s"])  # fmt: skip
    requests = tuple(TraceRequest(row["arrival_s"], row["prompt_tokens"], row["output_tokens"]) for row in rows)
    ttft, tpot, e2e = (tuple(float(row[name]) for row in rows) for name in ("ttft_s", "tpot_s", "e2e_s"))
    return Run(path.stem, Trace(path.stem, requests), ttft, tpot, e2e)


def fleet_of(profile: ProfileFile, prefill: int, decode: int, threshold: int) -> FleetSpec:
    """The measured workers, split or colocated (``prefill`` 0)."""
    worker = profile.worker_spec()
    if not prefill:
        return FleetSpec((PoolSpec("both", decode, worker),), admission_s=profile.admission_s)
    if profile.link is None:
        raise LocalError("the profile has no link", field="profile.link", fix="run kvbaton profile with two workers")
    handoff = HandoffSpec(profile.link, profile.worker.token_bytes, profile.worker.num_layers,
                          control_s=profile.control_s)  # fmt: skip
    pools = (PoolSpec("prefill", prefill, worker), PoolSpec("decode", decode, worker))
    return FleetSpec(pools, handoff, PolicyConfig(threshold_tokens=threshold), profile.admission_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--colocated", type=int)
    parser.add_argument("--threshold", type=int, default=64)
    options = parser.parse_args()
    profile, run = read_profile(options.profile), read_run(options.run)
    prefill, decode = (0, options.colocated) if options.colocated else (options.prefill, options.decode)
    result = simulate(fleet_of(profile, prefill, decode, options.threshold), run.trace)
    errors = dict(zip(STATISTICS, errors_of(run, result), strict=True))
    print(f"{result.label}, profile of {profile.origin.engine} {profile.origin.engine_version}: "
          + "  ".join(f"{name} {error * 100:+.1f}%" for name, error in errors.items()))  # fmt: skip
    return int(any(abs(errors[f"{what} mean"]) > LIMIT for what in ("TTFT", "TPOT", "E2E")))


if __name__ == "__main__":
    sys.exit(main())
