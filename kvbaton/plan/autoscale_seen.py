"""From what workers count to what a decision is made of: the same arithmetic for live workers and simulated ones.

Arrivals are not counted anywhere: they are what was computed plus what the queues grew by. A worker's speed is what it
computed over the time that took, remembered while nobody prefills. Invariants: a worker of which nothing is known makes
its pool unknown, never smaller; a counter that went back (a restart) counts from zero. Knows nothing about how
counters are fetched.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvbaton.plan.autoscale_demand import PoolSeen

SPEED_MEMORY = 0.3  # weight of an interval's measured speed in the running mean
LEAST_BUSY_S = 0.05  # of an interval: less prefill than that says nothing about speed


class WorkerCounts(msgspec.Struct, frozen=True):
    """One serving worker now. The last two grow for ever."""

    waiting_prompt_tokens: float
    running: float
    waiting: float
    receiving: float
    num_blocks: float
    num_blocks_free: float
    computed_tokens: float
    prefill_busy_s: float


class PoolCounts(msgspec.Struct, frozen=True):
    """``workers``: serving ones by name; None where one did not answer."""

    workers: dict[str, WorkerCounts | None]
    starting: int = 0
    draining: int = 0
    unrouted: float = 0.0  # sequences that the router holds because nobody has room
    queue_delay_s: float | None = None  # mean wait of the interval's prompts for their first step, where it is measured


class Watched(msgspec.Struct, frozen=True):
    """What is remembered of one pool from look to look."""

    before: dict[str, WorkerCounts] = {}
    at_s: float | None = None
    tokens_per_s: float | None = None


def look(counts: PoolCounts, watched: Watched, now_s: float) -> tuple[Watched, PoolSeen]:
    """The pool as decisions see it. All unknown at the first look, and while a worker does not answer."""
    now = {name: each for name, each in counts.workers.items() if each is not None}
    unknown = PoolSeen(len(counts.workers), counts.starting, counts.draining)
    if len(now) < len(counts.workers):
        return watched, unknown  # its last word stays, so that the next interval is as long as the silence
    if watched.at_s is None or now_s <= watched.at_s:
        return msgspec.structs.replace(watched, before=now, at_s=now_s), unknown
    before = watched.before
    computed = sum(_grown(each, before.get(name), "computed_tokens") for name, each in now.items())
    busy_s = sum(_grown(each, before.get(name), "prefill_busy_s") for name, each in now.items())
    waiting = sum(each.waiting_prompt_tokens for each in now.values())
    waited = sum(each.waiting_prompt_tokens for name, each in before.items() if name in now)
    speed = watched.tokens_per_s
    if busy_s > LEAST_BUSY_S and computed > 0:
        fresh = computed / busy_s
        speed = fresh if speed is None else speed + SPEED_MEMORY * (fresh - speed)
    blocks = sum(each.num_blocks for each in now.values())
    seen = PoolSeen(
        serving=len(now),
        starting=counts.starting,
        draining=counts.draining,
        waiting_prompt_tokens=waiting,
        arrived_tokens_per_s=max(0.0, computed + waiting - waited) / (now_s - watched.at_s),
        tokens_per_s=speed,
        queue_delay_s=counts.queue_delay_s,
        running=sum(each.running for each in now.values()),
        waiting=sum(each.waiting for each in now.values()) + counts.unrouted,
        receiving=sum(each.receiving for each in now.values()),
        free_share=sum(each.num_blocks_free for each in now.values()) / blocks if blocks else None,
    )
    return Watched(now, now_s, speed), seen


def mean_wait_s(
    now: Mapping[str, tuple[float, float]], before: Mapping[str, tuple[float, float]]
) -> float:  # fmt: skip
    """Of (sum of waits, number of waits) by worker, both growing: the mean of those since; 0 when there were none."""
    total, number = 0.0, 0.0
    for name, (total_s, count) in now.items():
        was_s, was = before.get(name, (0.0, 0.0))
        if count < was:
            was_s, was = 0.0, 0.0
        total, number = total + total_s - was_s, number + count - was
    return total / number if number else 0.0


def _grown(now: WorkerCounts, before: WorkerCounts | None, name: str) -> float:
    value: float = getattr(now, name)
    was: float = getattr(before, name) if before is not None else 0.0  # who joined meanwhile began at zero
    return value - was if value >= was else value
