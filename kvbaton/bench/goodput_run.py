"""Runs the goodput search against a live endpoint: one load per trial, each with its own seed.

Knows nothing about how rates are chosen (goodput) or requests sent (runner).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvbaton.bench import stats
from kvbaton.bench.client import Progress
from kvbaton.bench.goodput import Goodput, GoodputSearch, fewest_requests
from kvbaton.bench.runner import run_load
from kvbaton.bench.stats import Gates
from kvbaton.bench.workload import LoadSpec
from kvbaton.types import LocalError

# Arrivals are random: a trial planned for just enough requests has too few of them half of the time.
SPARE_REQUESTS = 1.3


def trial_at(spec: LoadSpec, rate_per_s: float, number: int, target: float) -> LoadSpec:
    """A trial long enough to pass. Another seed for each: the same arrivals again would repeat the same luck."""
    steady_s = max(spec.steady_s, SPARE_REQUESTS * fewest_requests(target) / rate_per_s)
    return msgspec.structs.replace(spec, rate_per_s=rate_per_s, steady_s=steady_s, seed=spec.seed + 1000 * number)


async def search_goodput(
    spec: LoadSpec,
    gates: Gates,
    headers: dict[str, str],
    max_trials: int,
    watch: Callable[[Progress], None] = lambda progress: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Goodput:
    """Highest rate at which ``gates.attainment`` of the requests meet both gates, with its bracket."""
    if spec.arrivals in ("closed", "trace"):
        raise LocalError(
            f"goodput is a rate, and {spec.arrivals} arrivals have none", field="arrivals", fix="use poisson or gamma"
        )
    search = GoodputSearch(gates.attainment, spec.rate_per_s, max_trials=max_trials)
    number = 0
    while (rate := search.next_rate()) is not None:
        trial = trial_at(spec, rate, number, gates.attainment)
        number += 1
        run = await run_load(trial, headers, watch=watch)
        cohort = sorted(run.measured(), key=lambda sample: sample.intended_s)
        if not run.footer.client.valid:
            # Beyond here the numbers would be about this client, so the search ends with what it knows.
            reasons = "; ".join(run.footer.client.reasons)
            tell(f"{rate:.3g}/s: the client was the bottleneck ({reasons})")
            found = search.result()
            note = f"ended at {rate:.3g}/s, where the client was the bottleneck: {reasons}"
            return msgspec.structs.replace(found, note="; ".join(filter(None, (found.note, note))))
        met = [gates.met_by(sample) for sample in cohort]
        if not met:
            raise LocalError("no request fell in the steady window", field="duration", fix="raise --duration or --rate")
        share = sum(met) / len(met)
        verdict = search.record(rate, share, stats.effective_count(met))
        tell(f"{rate:.3g}/s: {share:.1%} of {len(met)} in {trial.steady_s:.0f} s in both gates: {verdict}")
    return search.result()
