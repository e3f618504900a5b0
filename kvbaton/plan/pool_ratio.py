"""The same workers divided into pools in every way: what share of the requests meets both limits at each division.

Limits are those of the Mooncake paper: TTFT, and TBT as the mean of the longest tenth of a request's token intervals
(the first one, which the hand-off delays, included). At a given rate the divisions that keep nearly all requests within
the limits are a plateau; the rate may be raised until one is left. Pure; knows nothing about files or hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil

import msgspec
import numpy as np

from kvbaton.plan.sim import Simulation
from kvbaton.plan.sim_record import Record
from kvbaton.plan.sim_spec import FleetSpec
from kvbaton.plan.sim_worker import SimWorker
from kvbaton.plan.workload import Trace
from kvbaton.types import LocalError

PLATEAU = 0.01  # of all requests: divisions this close to the best are as good as it


class Limits(msgspec.Struct, frozen=True):
    ttft_s: float
    tbt_s: float


class Division(msgspec.Struct, frozen=True):
    prefill: int
    decode: int
    effective: float  # share of all requests that ended well within both limits
    mean_ttft_s: float
    mean_tbt_s: float

    @property
    def label(self) -> str:
        return f"{self.prefill}P{self.decode}D"


def divide(fleet: FleetSpec, prefill: int, trace: Trace, limits: Limits) -> Division:
    """``fleet`` has a prefill and a decode pool; their workers together are divided anew and the trace is run."""
    total = sum(pool.count for pool in fleet.pools)
    counts = {"prefill": prefill, "decode": total - prefill}
    pools = tuple(msgspec.structs.replace(pool, count=counts[pool.role]) for pool in fleet.pools)
    simulation = Simulation(msgspec.structs.replace(fleet, pools=pools), trace)
    for worker in simulation.fleet.workers.values():
        worker.step_log = []
    simulation.run()
    steps = {name: _Steps(worker) for name, worker in simulation.fleet.workers.items()}
    ttft, tbt = [], []
    for record in simulation.records.values():
        if record.finish_s is None or record.ttft_s is None or record.decode is None:
            continue
        ttft.append(record.ttft_s)
        tbt.append(steps[record.decode].tbt_s(record))
    good = sum(first <= limits.ttft_s and gap <= limits.tbt_s for first, gap in zip(ttft, tbt, strict=True))
    share = good / len(trace.requests) if trace.requests else 0.0
    return Division(prefill, total - prefill, share, float(np.mean(ttft or [0.0])), float(np.mean(tbt or [0.0])))


class _Steps:
    """Durations of every step of a worker, to read off the intervals of those it decoded."""

    def __init__(self, worker: SimWorker) -> None:
        log = worker.step_log or []
        counts = np.array([steps for _, _, steps in log], dtype=np.int64)
        self._ends = np.array([end for _, end, _ in log])
        self._last = np.cumsum(counts)
        self._each_s = np.repeat([(end - start) / steps for start, end, steps in log], counts)

    def tbt_s(self, record: Record) -> float:
        """Mean of the longest tenth of its intervals; 0 for one token. It was in every step until its end."""
        number = record.output_tokens - 1
        if number < 1:
            return 0.0
        assert record.finish_s is not None and record.first_token_s is not None
        stop = int(self._last[int(np.searchsorted(self._ends, record.finish_s - 1e-9))])
        gaps = self._each_s[stop - number : stop].copy()
        gaps[0] = record.finish_s - record.first_token_s - gaps[1:].sum()
        tenth = ceil(number / 10)
        return float(np.partition(gaps, number - tenth)[number - tenth :].mean())


def plateau(divisions: Iterable[Division]) -> tuple[Division, ...]:
    """Those that are as good as the best."""
    found = tuple(divisions)
    best = max(each.effective for each in found)
    return tuple(each for each in found if each.effective >= best - PLATEAU)


def prefill_share(divisions: Iterable[Division]) -> float:
    """Of the workers, in the middle of the plateau: 0.5 is 1:1."""
    good = plateau(divisions)
    return sum(each.prefill / (each.prefill + each.decode) for each in good) / len(good)


def last_standing(
    at: Callable[[int, float], Division], counts: Iterable[int], rate: float, wanted: float, precision: float = 0.05
) -> tuple[float, Division]:
    """The highest rate at which some division still has the ``wanted`` share effective, and the best division there."""
    carried, refused, trial = 0.0, float("inf"), rate
    alive, found = list(counts), None
    while found is None or refused / carried > 1.0 + precision:
        tried = [at(count, trial) for count in alive]
        best = max(tried, key=lambda each: each.effective)
        if best.effective >= wanted:
            carried, found = trial, best
            alive = [each.prefill for each in tried if each.effective >= wanted]  # more load helps nobody
        else:
            refused = trial
        trial = carried * 1.5 if refused == float("inf") else (max(carried, refused / 4) * refused) ** 0.5
        if refused < rate / 1e4:
            raise LocalError(f"no division serves even {refused:g} requests/s within the limits", field="limits")
    return carried, found
