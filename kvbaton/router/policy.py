"""Where a request goes, and why: remote prefill, or prefill where it decodes, and on which workers.

Pure: a view of the fleet in, a decision out that keeps everything it was made from, so that ``explain`` can replay it.
The same arguments give the same decision; ties are broken by ``turn``, which the caller advances. Knows nothing about
sockets, clocks, how views come to be, or how costs are learned.

Policies:

    cost         the placement of least estimated cost among those that keep both SLOs, or else of all (see ``cost``)
    static       a threshold of uncached tokens, as other routers have; workers by a score in prompt tokens, below
    least_load   the same threshold of prompt tokens; the workers with the fewest requests, whatever they have cached
    round_robin  the same threshold of prompt tokens; workers in turn

Scores of ``static``, lower is better:

    prefill worker   tokens it still has to compute + uncached tokens of this prompt + request_cost x requests on it
    decode worker    the same when it prefills itself; else tokens to move count a sixteenth of tokens to compute
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvbaton.router.cost import (
    Candidate,
    FleetCosts,
    Limits,
    best_local,
    best_pair,
    landings_on,
    locals_,
    pairs,
    uncached,
)
from kvbaton.router.views import MemberView, RequestView

__all__ = ["REASONS", "Decision", "MemberView", "NoWorker", "PolicyConfig", "RequestView", "decide"]

PolicyKind = Literal["cost", "static", "least_load", "round_robin"]
Arm = Literal["split", "single", "none"]
Reason = Literal[
    "remote",
    "local_cheaper",
    "local_short",
    "local_cached",
    "local_colocated",
    "local_rollout",
    "fallback_no_prefill",
    "fallback_prefill_failed",
    "fallback_prompt_too_long",
    "fallback_no_decode",
]
REASONS: dict[Reason, str] = {
    "remote": "a prefill worker computes the prompt, a decode worker pulls its KV",
    "local_cheaper": "prefill where it decodes is estimated to cost less than any hand-off",
    "local_short": "fewer uncached tokens than the static threshold",
    "local_cached": "the decode worker holds the prefix: fewer tokens are left to compute than the static threshold",
    "local_colocated": "the fleet has no prefill pool",
    "local_rollout": "it would have been handed over, but belongs to the share that `disagg_percent` keeps local",
    "fallback_no_prefill": "the fleet has a prefill pool, but none of it takes requests now",
    "fallback_prefill_failed": "the hand-off failed, and no other prefill worker is left to try",
    "fallback_prompt_too_long": "no prefill worker can hold the prompt",
    "fallback_no_decode": "no decode worker takes requests; a prefill worker serves the whole request",
}
_MOVE_WEIGHT = 1 / 16
COLD = FleetCosts()


class PolicyConfig(msgspec.Struct, frozen=True):
    threshold_tokens: int | None = None  # set: a static policy; None: the break-even is computed
    request_cost_tokens: int = 256
    kind: PolicyKind = "cost"
    ttft_slo_s: float = 2.0
    tpot_slo_s: float = 0.1
    disagg_percent: float = 100.0  # of requests that would go remote, those whose bucket is below do

    @property
    def by_cost(self) -> bool:
        return self.kind == "cost" and self.threshold_tokens is None

    @property
    def threshold(self) -> int:
        """Of the policies that have one; unset: everything is handed over."""
        return self.threshold_tokens or 0

    @property
    def limits(self) -> Limits:
        return Limits(self.ttft_slo_s, self.tpot_slo_s)


class Case(msgspec.Struct, frozen=True):
    """Everything a decision depends on."""

    request: RequestView
    members: tuple[MemberView, ...]
    config: PolicyConfig
    turn: int
    has_prefill_pool: bool
    prefill_failed: bool
    costs: FleetCosts


class Decision(msgspec.Struct, frozen=True):
    reason: Reason
    decode: str
    prefill: str | None
    foretold_cached_tokens: int  # on the worker that will prefill
    terms: dict[str, float]  # of the placement that was chosen, and what it was measured against
    case: Case
    arm: Arm = "none"  # of the rollout; none: not eligible

    @property
    def remote(self) -> bool:
        return self.prefill is not None

    @property
    def ttft_s(self) -> float | None:
        """The estimate, if the policy made one."""
        return self.terms.get("ttft_s")


class NoWorker(Exception):
    """Nobody can take the request now; says why."""


class _Pools:
    """The members that can take the request, by what they can do, in the order of this turn."""

    def __init__(self, case: Case) -> None:
        request, turn = case.request, case.turn
        prompt_tokens, total_tokens = request.longest_prompt_tokens, request.max_total_tokens
        self.prefills: list[MemberView] = []
        roomy: list[MemberView] = []
        able: list[MemberView] = []  # of those that decode
        for member in case.members:
            if member.role != "prefill":
                if member.max_context >= total_tokens:
                    able.append(member)
                continue
            self.prefills.append(member)
            if member.max_context > prompt_tokens:
                roomy.append(member)
        self.roomy, self.able = _rotated(roomy, turn), _rotated(able, turn)
        self.decodes = [m for m in self.able if m.role == "decode"]
        self.locals = [m for m in self.able if m.serves_alone]
        self.has_pair = case.has_prefill_pool and bool(self.decodes) and bool(self.roomy)
        self.last_resort: list[MemberView] = []
        if not self.locals and not self.has_pair:
            whole = [m for m in self.prefills if m.serves_alone and m.max_context >= total_tokens]
            self.last_resort = _rotated(whole, turn)

    @property
    def alone(self) -> list[MemberView]:
        """Those that may be given the whole request; none where only a pair can serve it."""
        return self.locals or self.last_resort

    def only_local(self, case: Case) -> Reason | None:
        """Why no pair comes into question; None when one does. NoWorker when nobody alone does either."""
        if not self.locals:
            if self.has_pair:
                return None
            if not self.last_resort:
                raise NoWorker(self._why_nobody())
            return "fallback_no_decode"
        if not case.has_prefill_pool or not self.decodes:
            return "local_colocated"
        if self.roomy:
            return None
        if case.prefill_failed:
            return "fallback_prefill_failed"
        return "fallback_prompt_too_long" if self.prefills else "fallback_no_prefill"

    def _why_nobody(self) -> str:
        if self.able:
            return "no prefill worker takes this prompt now, and the decode workers compute none"
        if any(not member.serves_alone for member in self.prefills):
            return "no decode worker takes requests now, and the prefill workers answer none by themselves"
        return "no worker takes requests now"


def decide(
    request: RequestView,
    members: Sequence[MemberView],
    config: PolicyConfig,
    turn: int,
    has_prefill_pool: bool,
    prefill_failed: bool = False,
    costs: FleetCosts = COLD,
) -> Decision:
    """``members`` are those that take requests now and were not tried before; ``has_prefill_pool`` speaks of the whole
    fleet, healthy or not; ``prefill_failed`` is set when a hand-off of this request failed already."""
    return decide_case(Case(request, tuple(members), config, turn, has_prefill_pool, prefill_failed, costs))


def decide_case(case: Case) -> Decision:
    return _by_cost(case) if case.config.by_cost else _by_rule(case)


# -- by estimated cost ---------------------------------------------------------------------------------------------


def _by_cost(case: Case) -> Decision:
    pools, limits, request, costs = _Pools(case), case.config.limits, case.request, case.costs
    forced = pools.only_local(case)
    if not (alone := pools.alone):
        landings = landings_on(request, pools.decodes, costs, limits)
        return _placed(case, "remote", best_pair(request, pools.roomy, landings, costs, limits), None)
    landings = landings_on(request, alone, costs, limits)
    here = best_local(request, alone, landings, costs, limits)
    if forced is not None:
        return _placed(case, forced, here, None)
    if len(alone) < len(pools.able):  # some decode workers were not looked at yet
        landings = landings_on(request, pools.decodes, costs, limits)
    elif len(pools.decodes) < len(alone):  # colocated workers take no hand-offs
        landings = [each for each, member in zip(landings, alone, strict=True) if member.role == "decode"]
    away = best_pair(request, pools.roomy, landings, costs, limits)
    if here.rank <= away.rank:  # equal ones stay: no bytes need to move
        return _placed(case, "local_cheaper", here, away)
    if request.bucket >= case.config.disagg_percent:
        return _placed(case, "local_rollout", here, away, "single")
    return _placed(case, "remote", away, here, "split")


def _placed(
    case: Case, reason: Reason, chosen: Candidate, rival: Candidate | None, arm: Arm = "none"
) -> Decision:  # fmt: skip
    terms = chosen.terms
    if rival is not None:
        terms["rival_cost_s"], terms["rival_violation"] = rival.cost_s, rival.violation
    where = chosen.prefill or chosen.decode
    cached = 0
    for member in case.members:
        if member.name == where:
            cached = member.cached_tokens
            break
    return Decision(reason, chosen.decode, chosen.prefill, cached, terms, case, arm)


# -- by rule -------------------------------------------------------------------------------------------------------


def _by_rule(case: Case) -> Decision:
    pools, request, config = _Pools(case), case.request, case.config
    forced = pools.only_local(case)
    terms: dict[str, float] = {}
    if not pools.alone:
        return _handed_over(case, pools, terms, "none")
    here = _best("local", pools.alone, case, terms)
    if forced is not None:
        return Decision(forced, here.name, None, here.cached_tokens, terms, case)
    counts = uncached(request, here) if config.kind in ("cost", "static") else request.num_prompt_tokens
    each = counts / request.num_prompts
    terms["uncached_tokens"] = each
    terms["threshold_tokens"] = config.threshold
    if each < config.threshold:
        short = request.longest_prompt_tokens < config.threshold
        return Decision("local_short" if short else "local_cached", here.name, None, here.cached_tokens, terms, case)
    if request.bucket >= config.disagg_percent:
        return Decision("local_rollout", here.name, None, here.cached_tokens, terms, case, "single")
    return _handed_over(case, pools, terms, "split")


def _handed_over(case: Case, pools: _Pools, terms: dict[str, float], arm: Arm) -> Decision:
    prefill = _best("prefill", pools.roomy, case, terms)
    decode = _best("decode", pools.decodes, case, terms)
    return Decision("remote", decode.name, prefill.name, prefill.cached_tokens, terms, case, arm)


def _best(
    label: Literal["local", "prefill", "decode"], members: Sequence[MemberView], case: Case, terms: dict[str, float]
) -> MemberView:  # fmt: skip
    """The lowest score; among equals the first, whose turn it is."""
    # Blocks a decode worker has already need not be moved, but a moved token costs far less than a computed one.
    weight = _MOVE_WEIGHT if label == "decode" else 1.0
    request, config = case.request, case.config
    best, lowest = members[0], float("inf")
    for member in members:
        if config.kind == "round_robin":
            score = 0.0
        elif config.kind == "least_load":
            score = float(member.num_requests)
        else:
            score = (
                member.queued_tokens
                + weight * uncached(request, member)
                + config.request_cost_tokens * member.num_requests
            )
        terms[f"{label}:{member.name}"] = score
        if score < lowest:
            best, lowest = member, score
    return best


# -- to look at a decision again -----------------------------------------------------------------------------------


def candidates(case: Case) -> tuple[list[Candidate], list[Candidate]]:
    """(local, remote) placements that were compared, in no order. None for a policy that goes by a rule."""
    if not case.config.by_cost:
        return [], []
    pools, limits = _Pools(case), case.config.limits
    here = locals_(case.request, pools.alone, case.costs, limits)
    if pools.only_local(case) is not None:
        return here, []
    return here, pairs(case.request, pools.roomy, pools.decodes, case.costs, limits)


def in_turn(case: Case) -> list[MemberView]:
    """The members in an order that makes ``turn`` 0 what the turn of this case was."""
    pools = _Pools(case)
    first = [*pools.able, *(pools.last_resort or pools.roomy)]
    names = {member.name for member in first}
    return [*first, *(member for member in case.members if member.name not in names)]


def _rotated(members: list[MemberView], turn: int) -> list[MemberView]:
    if len(members) < 2:
        return members
    start = turn % len(members)
    return members[start:] + members[:start]
