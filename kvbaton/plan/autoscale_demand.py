"""How many workers the work of one pool asks for, as a number that need not be whole.

    prefill  r = uncached tokens that arrive a second / tokens a second of one worker;   r + spare_workers + backlog
    decode   sequences running and waiting / sequences of one worker;  blocks in use / blocks that may be in use
    both     the sum of r and the decode part: one pool does both

All of it is work that came or stands, never the share of time a worker was busy: a full worker looks the same whether
one prompt waits behind it or a hundred. What is spare grows with the square root of r, as chance does: two small pools
need more room for their size than one large pool. Prompts that may wait long need less of it.

Invariant: more arrivals, waiting tokens, delay, sequences or used blocks never ask for fewer workers. Knows nothing
about bounds, other pools, or what was decided before.
"""

from __future__ import annotations

from math import isfinite, sqrt

import msgspec

from kvbaton.types import LocalError, Role

MOST_WORKERS = 1e6  # that any work asks for: a speed next to zero is no reason to overflow


class PoolPolicy(msgspec.Struct, frozen=True):
    """What one pool may be and what it owes. Fields that are not of its role are not looked at."""

    minimum: int = 1
    maximum: int = 64
    max_queue_delay_s: float = 0.5  # prefill: a prompt may wait so long for its first step
    spare: float = 0.75  # prefill: workers beyond the mean load, times its square root
    least_spare: float = 0.25  # prefill: workers beyond the mean load at least, however much may wait
    # Too few cost requests and too many only money: so little of a worker is not worth a start, and one of whom no more
    # than that is needed may go. What lies between the two is the dead band; with none, pools follow noise.
    least_growth: float = 0.3  # prefill
    least_kept: float = 0.0  # prefill
    catch_up_s: float = 30.0  # prefill: a queue that stands too long is to be worked off within this time
    sequences_per_worker: int = 64  # decode: as many as keep the gap between tokens within its limit
    min_free_share: float = 0.1  # decode: of the blocks
    shrink_after_s: float | None = None  # in place of that of all pools

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum:
            raise LocalError(f"1 <= minimum <= maximum is needed, got {self.minimum} and {self.maximum}",
                             field="scaling.minimum")  # fmt: skip
        for name in ("max_queue_delay_s", "catch_up_s", "sequences_per_worker"):
            if not getattr(self, name) > 0:
                raise LocalError(f"{name} must be positive", field=f"scaling.{name}")
        if self.shrink_after_s is not None and self.shrink_after_s < 0:
            raise LocalError("shrink_after_s is 0 or more", field="scaling.shrink_after_s")
        if self.spare < 0 or self.least_spare < 0 or not 0 <= self.min_free_share < 1:
            raise LocalError("spare is 0 or more, min_free_share in [0, 1)", field="scaling.spare")


class PoolSeen(msgspec.Struct, frozen=True):
    """One pool now and over the last interval. None, or a number that is none: not known. No traffic is 0, not None."""

    serving: int
    starting: int = 0
    draining: int = 0
    waiting_prompt_tokens: float | None = None  # not yet computed, of prompts in the workers' queues
    arrived_tokens_per_s: float | None = None  # uncached prompt tokens that came
    tokens_per_s: float | None = None  # one worker while it prefills, as measured; None: it has not prefilled yet
    queue_delay_s: float | None = None  # of prompts that were waited for; None: nobody measures it
    running: float | None = None  # sequences
    waiting: float | None = None  # sequences, those the router holds for want of room included
    receiving: float = 0.0  # sequences that hold blocks while somebody else prefills them
    free_share: float | None = None  # of the blocks, evictable ones counted as free

    @property
    def have(self) -> int:
        """Those that serve or will: a worker that starts is not asked for twice."""
        return self.serving + self.starting


def known(value: float | None) -> bool:
    return value is not None and isfinite(value) and value >= 0


def complete(role: Role, seen: PoolSeen) -> bool:
    """Whether a decision can be made at all. A worker's speed may be unknown: it has not prefilled yet."""
    prefill = known(seen.waiting_prompt_tokens) and known(seen.arrived_tokens_per_s)
    decode = known(seen.running) and known(seen.waiting) and known(seen.free_share) and known(seen.receiving)
    return {"prefill": prefill, "decode": decode, "both": prefill and decode}[role]


def queue_delay_s(seen: PoolSeen) -> float:
    """How long a prompt that comes now will wait: what was measured, or what stands before it, whichever is more."""
    standing_s = 0.0
    if known(seen.tokens_per_s) and seen.tokens_per_s and known(seen.waiting_prompt_tokens):
        assert seen.waiting_prompt_tokens is not None
        standing_s = seen.waiting_prompt_tokens / (seen.tokens_per_s * max(1, seen.serving))
    measured_s = seen.queue_delay_s if seen.queue_delay_s is not None and known(seen.queue_delay_s) else 0.0
    return max(standing_s, measured_s)


def load(role: Role, seen: PoolSeen) -> float:
    """What is followed over time: uncached tokens a second where prompts are computed, else sequences."""
    if role == "decode":
        return (seen.running or 0.0) + (seen.waiting or 0.0)
    return seen.arrived_tokens_per_s or 0.0


def spare_workers(policy: PoolPolicy, mean: float, lead_s: float) -> float:
    """Beyond ``mean``: what may come until a worker ordered now serves, less what may wait so long and be in time."""
    may_wait = mean * min(1.0, policy.max_queue_delay_s / lead_s) if lead_s else mean
    return max(policy.least_spare, policy.spare * sqrt(mean) - may_wait) if mean else 0.0


def prefill_workers(policy: PoolPolicy, seen: PoolSeen, tokens_per_s: float, lead_s: float) -> float:
    """``tokens_per_s``: arrivals to be ready for; ``lead_s``: how long a start takes."""
    late = queue_delay_s(seen) > policy.max_queue_delay_s
    if seen.tokens_per_s is None or not known(seen.tokens_per_s) or not seen.tokens_per_s:
        # Nobody has prefilled yet, so nobody knows how fast it goes: one more if they are late, none fewer if not idle.
        idle = not tokens_per_s and not seen.waiting_prompt_tokens
        return float(seen.serving + 1) if late else 0.0 if idle else float(seen.serving)
    mean = min(MOST_WORKERS, tokens_per_s / seen.tokens_per_s)
    wanted = mean + spare_workers(policy, mean, lead_s)
    if late:
        assert seen.waiting_prompt_tokens is not None
        wanted += min(MOST_WORKERS, seen.waiting_prompt_tokens / seen.tokens_per_s / policy.catch_up_s)
    return wanted


def decode_workers(policy: PoolPolicy, seen: PoolSeen, sequences: float, own_blocks: float = 1.0) -> float:
    """``sequences`` to be ready for; ``own_blocks``: share of the used blocks that decoding itself needs."""
    assert seen.free_share is not None
    by_blocks = seen.serving * (1.0 - min(1.0, seen.free_share)) * own_blocks / (1.0 - policy.min_free_share)
    return max(sequences / policy.sequences_per_worker, by_blocks)
