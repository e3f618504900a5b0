"""How many workers each pool should have now: the autoscaling decision, as a pure function.

Prefill follows waiting prompt tokens, queue delay and arriving uncached tokens; decode follows sequences and free
blocks (``autoscale_demand``). Utilisation is not an input. What the function does about a demand:

1. the shortage is attributed: while decode has no room, prompts wait for decode and more prefill workers would only
   wait with them; while prompts wait for prefill, the blocks they hold on the decode side are prefill's shortage;
2. growth is at once, by at most as many as there are; those that start count, and load that grows is met as it will be
   when a worker ordered now serves;
3. shrinking needs a whole window whose most would have been served by fewer. Sequences leave the dead band between the
   two; of prompts a part of a worker is rounded up, when shrinking by the slow mean.
   Then half of what is too much drains, and after a pause half of the rest;
4. the ratio of the pools stays in its band to within one worker, by growing the other pool or by not shrinking this.

Invariants: targets stay within bounds; a pool of which something is not known keeps its workers and is said so; no
traffic is a load of zero. State goes in and comes out as a value. Knows nothing about who starts workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Literal

import msgspec

from kvbaton.plan.autoscale_demand import (
    PoolPolicy,
    PoolSeen,
    complete,
    decode_workers,
    load,
    prefill_workers,
    queue_delay_s,
)
from kvbaton.plan.autoscale_memory import ARRIVALS, SEQUENCES, PoolMemory
from kvbaton.types import LocalError, Role

Bottleneck = Literal["none", "prefill", "decode"]
WAITING_SHARE = 0.05  # decode is short of room when more than this share of what it is to hold waits
_ROUNDING = 1e-9


class ScalingPolicy(msgspec.Struct, frozen=True):
    pools: dict[Role, PoolPolicy]
    dead_band: float = 0.05  # sequences this near to what the workers hold change nothing
    shrink_after_s: float = 300.0  # for so long fewer must have been enough
    drain_pause_s: float = 30.0  # between two drains of one pool
    start_s: float = 60.0  # from ordering a worker until it serves
    trust_in_trend: float = 0.0  # 0: only what is there now counts; 1: growth is expected to go on as it is
    ratio_band: tuple[float, float] | None = None  # prefill workers for each decode worker

    def __post_init__(self) -> None:
        if not self.pools:
            raise LocalError("no pool to scale", field="scaling.pools")
        if not 0 <= self.dead_band < 1 or self.shrink_after_s < 0 or self.start_s < 0 or self.drain_pause_s < 0:
            raise LocalError("dead_band lies in [0, 1), times are 0 or more", field="scaling.dead_band")
        if not 0 <= self.trust_in_trend <= 1:
            raise LocalError("trust_in_trend lies in [0, 1]", field="scaling.trust_in_trend")
        if self.ratio_band is not None and not 0 < self.ratio_band[0] <= self.ratio_band[1]:
            raise LocalError("0 < low <= high is needed", field="scaling.ratio_band")


class PoolDecision(msgspec.Struct, frozen=True):
    target: int  # where the pool is heading
    add: int  # workers to start now
    drain: int  # to send away now
    reason: str
    known: bool = True  # False: held because something is missing; the caller should warn


class ScalingState(msgspec.Struct, frozen=True):
    """What must be remembered between decisions."""

    pools: dict[Role, PoolMemory] = {}


class ScalingDecision(msgspec.Struct, frozen=True):
    pools: dict[Role, PoolDecision]
    bottleneck: Bottleneck
    state: ScalingState


class _Want(msgspec.Struct, frozen=True):
    """Of one pool, before the other one is looked at."""

    grow: int  # below this it is too few
    most: int | None  # of the window; None: shrinking is not allowed
    reason: str
    known: bool = True


def decide(
    policy: ScalingPolicy, seen: Mapping[Role, PoolSeen], state: ScalingState, now_s: float
) -> ScalingDecision:  # fmt: skip
    """What to start and what to drain. Pools without a policy are only looked at."""
    bottleneck = _bottleneck(policy, seen)
    wants: dict[Role, _Want] = {}
    memories = dict(state.pools)
    for role, pool in policy.pools.items():
        if role not in seen:
            raise LocalError(f"nothing is said of the {role} pool", field="scaling.pools")
        memory = memories.get(role, PoolMemory(horizon=SEQUENCES if role == "decode" else ARRIVALS))
        memories[role], wants[role] = _want(policy, pool, role, seen[role], memory, now_s, bottleneck)
    targets = {role: _target(policy.pools[role], seen[role], want) for role, want in wants.items()}
    in_band = _in_band(policy, seen, targets)
    decisions = {}
    for role, want in wants.items():
        decisions[role] = _step(policy, role, seen, (targets[role], in_band[role]), want, memories[role], now_s)
        if decisions[role].drain:
            memories[role] = msgspec.structs.replace(memories[role], drained_s=now_s)
    return ScalingDecision(_drains_within_band(policy, seen, decisions), bottleneck, ScalingState(memories))


# -- whose shortage it is ------------------------------------------------------------------------------------------


def _bottleneck(policy: ScalingPolicy, seen: Mapping[Role, PoolSeen]) -> Bottleneck:
    prefill, decode = seen.get("prefill"), seen.get("decode")
    if decode is not None and complete("decode", decode) and "decode" in policy.pools:
        late = prefill is not None and _late(policy, prefill)
        assert decode.running is not None and decode.waiting is not None and decode.free_share is not None
        used = (1.0 - min(1.0, decode.free_share)) * _own_blocks(decode, late)
        if 1.0 - used < policy.pools["decode"].min_free_share or _queue_stands(policy.pools["decode"], decode):
            return "decode"
    return "prefill" if prefill is not None and _late(policy, prefill) else "none"


def _queue_stands(pool: PoolPolicy, decode: PoolSeen) -> bool:
    assert decode.waiting is not None
    return decode.waiting > max(1.0, WAITING_SHARE * decode.serving * pool.sequences_per_worker)


def _late(policy: ScalingPolicy, prefill: PoolSeen) -> bool:
    own = policy.pools.get("prefill")
    return own is not None and complete("prefill", prefill) and queue_delay_s(prefill) > own.max_queue_delay_s


def _own_blocks(decode: PoolSeen, prefill_late: bool) -> float:
    """Blocks of sequences that wait for a late prefill are not decode's need."""
    running = decode.running or 0.0
    return running / (running + decode.receiving) if prefill_late and running + decode.receiving else 1.0


# -- one pool ------------------------------------------------------------------------------------------------------


def _want(policy: ScalingPolicy, pool: PoolPolicy, role: Role, seen: PoolSeen, memory: PoolMemory, now_s: float,
          bottleneck: Bottleneck) -> tuple[PoolMemory, _Want]:  # fmt: skip
    if not complete(role, seen):
        return memory.gap(now_s, policy.shrink_after_s / 2), _Want(0, None, "figures are missing", known=False)
    memory = memory.saw(now_s, load(role, seen))
    ahead = memory.ahead(policy.start_s, policy.trust_in_trend)
    demand, held = _demand(policy, pool, role, seen, memory, bottleneck, ahead)
    if role == "prefill":  # arrivals scatter, and what is spare is there for that; sequences are what stands there
        lasting, _ = _demand(policy, pool, role, seen, memory, bottleneck, memory.slow)
        grow = ceil(demand - pool.least_growth)
        keep = max(grow, ceil(lasting - pool.least_kept))
    else:
        grow = ceil(demand / (1.0 + policy.dead_band) - _ROUNDING)
        keep = ceil(demand * (1.0 + policy.dead_band) - _ROUNDING)
    if bottleneck == role or (
        role == "both" and (_queue_stands(pool, seen) or queue_delay_s(seen) > pool.max_queue_delay_s)
    ):
        # What is short now is proof that those who serve are too few, within the dead band or not.
        grow, keep = max(grow, seen.serving + 1), max(keep, seen.serving + 1)
    window_s = _window_s(policy, role)
    memory = memory.need(now_s, keep, window_s)
    reason = f"{demand:.1f} workers' worth of work"
    if queue_delay_s(seen) > pool.max_queue_delay_s and role != "decode":
        reason += f", prompts wait {queue_delay_s(seen):.1f} s"
    if held and grow > seen.have:
        return memory, _Want(seen.have, None, f"{reason}, but {bottleneck} is what is short")
    # What the router holds back for want of room on the other side has not arrived here, but it will.
    return memory, _Want(grow, None if held else memory.most(now_s, window_s), reason)


def _window_s(policy: ScalingPolicy, role: Role) -> float:
    """For so long fewer must have been enough before one drains."""
    own = policy.pools[role].shrink_after_s
    return policy.shrink_after_s if own is None else own


def _demand(policy: ScalingPolicy, pool: PoolPolicy, role: Role, seen: PoolSeen, memory: PoolMemory,
            bottleneck: Bottleneck, ahead: float) -> tuple[float, bool]:  # fmt: skip
    """(workers, whether growing would be for nothing)."""
    if role == "prefill":
        return prefill_workers(pool, seen, ahead, policy.start_s), bottleneck == "decode"
    if role == "decode":
        if bottleneck == "prefill":  # it may still follow the sequences that are really there
            return decode_workers(pool, seen, memory.fast, _own_blocks(seen, True)), False
        return decode_workers(pool, seen, ahead), False
    sequences = (seen.running or 0.0) + (seen.waiting or 0.0)
    prompts = prefill_workers(pool, seen, ahead, policy.start_s)
    return prompts + decode_workers(pool, seen, sequences), False


def _target(pool: PoolPolicy, seen: PoolSeen, want: _Want) -> int:
    """Where the pool is heading, without the other one."""
    have = seen.have
    if want.grow > have:
        wanted = min(want.grow, have + max(1, have))
    elif want.most is not None and want.most < have:
        wanted = max(want.most, want.grow)
    else:
        wanted = have
    if not want.known:
        wanted = max(have, pool.minimum)  # also above the maximum: never fewer for want of figures
        return wanted
    return min(pool.maximum, max(pool.minimum, wanted))


# -- both pools ----------------------------------------------------------------------------------------------------


def fits_band(band: tuple[float, float] | None, prefill: int, decode: int) -> bool:
    """To within one worker: pools are whole numbers."""
    return band is None or band[0] * decode - 1 <= prefill <= band[1] * decode + 1


def _in_band(policy: ScalingPolicy, seen: Mapping[Role, PoolSeen], targets: Mapping[Role, int]) -> dict[Role, int]:
    """Targets raised until the ratio fits, as far as bounds allow."""
    raised = dict(targets)
    band = policy.ratio_band
    if band is None or "prefill" not in raised or "decode" not in raised:
        return raised
    while raised["prefill"] > band[1] * raised["decode"] + 1 and raised["decode"] < policy.pools["decode"].maximum:
        raised["decode"] += 1
    while raised["prefill"] < band[0] * raised["decode"] - 1 and raised["prefill"] < policy.pools["prefill"].maximum:
        raised["prefill"] += 1
    return raised


def _step(policy: ScalingPolicy, role: Role, seen: Mapping[Role, PoolSeen], target: tuple[int, int], want: _Want,
          memory: PoolMemory, now_s: float) -> PoolDecision:  # fmt: skip
    """From where the pool is heading to what happens now."""
    alone, wanted = target
    have = seen[role].have
    if wanted > have:
        reason = want.reason if wanted == alone else "the band of the ratio"
        if want.grow <= have and wanted == alone:
            reason = "the minimum"
        return PoolDecision(wanted, wanted - have, 0, reason, want.known)
    if wanted == have:
        reason = "enough" if want.known and want.grow <= have and want.most is not None else want.reason
        return PoolDecision(wanted, 0, 0, reason, want.known)
    paused = memory.drained_s is not None and now_s - memory.drained_s < policy.drain_pause_s
    if seen[role].starting or paused:
        return PoolDecision(wanted, 0, 0, "one change at a time", want.known)
    # Those that drain are still there for the streams they have, and not counted among those that were enough.
    return PoolDecision(
        wanted, 0, max(1, (have - wanted) // 2), f"{wanted} have been enough for {_window_s(policy, role):g} s"
    )


def _drains_within_band(
    policy: ScalingPolicy, seen: Mapping[Role, PoolSeen], decisions: dict[Role, PoolDecision]
) -> dict[Role, PoolDecision]:
    """Drains come in steps, so one may leave a band that the target keeps: then the other pool goes first."""
    if policy.ratio_band is None or not {"prefill", "decode"} <= decisions.keys():
        return decisions
    have = {role: seen[role].have + decisions[role].add for role in decisions}
    for role, decision in list(decisions.items()):
        drain = decision.drain
        while drain and not _fits(policy, {**have, role: have[role] - drain}):
            drain -= 1
        if drain < decision.drain:
            reason = decision.reason if drain else "the band of the ratio"
            decisions = {**decisions, role: msgspec.structs.replace(decision, drain=drain, reason=reason)}
        have[role] -= drain
    return decisions


def _fits(policy: ScalingPolicy, have: Mapping[Role, int]) -> bool:
    return fits_band(policy.ratio_band, have["prefill"], have["decode"])
