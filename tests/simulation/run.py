"""Seeds in, verdicts out: one seed with its story, or many in several processes.

Invariant: a result depends on the seed only, so a failing one replays wherever it is asked for.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from .plan import draw
from .process import WorkerProcess
from .world import World

_BATCH = 50


@dataclass(frozen=True)
class Result:
    seed: int
    error: str  # empty: every invariant held
    counts: Counter[str]  # of requests by outcome, of faults drawn, and of what they met
    story: tuple[str, ...] = ()
    traceback: str = ""


@dataclass
class Total:
    num_seeds: int = 0
    failed: list[Result] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def run_seed(seed: int, keep_story: bool = True) -> Result:
    world = World(draw(seed))
    error, where = "", []
    with _quiet():
        try:
            world.run()
        except Exception as found:  # whatever it is, it is this seed's verdict
            error = f"{type(found).__name__}: {found}"
            where = traceback.format_exception(found)
    counts = Counter(request.outcome or "unfinished" for request in world.requests)
    counts["faults"] = len(world.plan.faults)
    for process in world.processes_by_life.values():
        _count_handoffs(counts, process)
    return Result(seed, error, counts, tuple(world.story.lines()) if keep_story else (), "".join(where))


def _count_handoffs(counts: Counter[str], process: WorkerProcess) -> None:
    stats = process.engine.stats()
    counts["lives"] += 1
    counts["leases expired"] += stats.num_lease_expiries
    counts["preemptions"] += stats.num_preemptions
    if (client := process.native._client) is not None:
        pulls = client.stats()
        counts["hand-offs"] += pulls.num_done
        counts["hand-offs failed"] += pulls.num_failed
        counts["hand-offs aborted"] += pulls.num_aborted


def run_seeds(first: int, num_seeds: int, processes: int = 1) -> Total:
    total = Total()
    starts = range(first, first + num_seeds, _BATCH)
    sizes = [min(_BATCH, first + num_seeds - start) for start in starts]
    if processes == 1:
        batches: Iterator[list[Result]] = map(_batch, starts, sizes)
        for batch in batches:
            _add(total, batch)
        return total
    with ProcessPoolExecutor(processes) as pool:
        for batch in pool.map(_batch, starts, sizes):
            _add(total, batch)
    return total


def _batch(start: int, size: int) -> list[Result]:
    return [run_seed(seed, keep_story=False) for seed in range(start, start + size)]


def _add(total: Total, batch: list[Result]) -> None:
    for result in batch:
        total.num_seeds += 1
        total.counts.update(result.counts)
        if result.error:
            total.failed.append(result)


@contextmanager
def _quiet() -> Iterator[None]:
    """The product warns of each fault; here they are on purpose."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
