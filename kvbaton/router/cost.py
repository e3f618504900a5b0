"""What each placement of a request would cost: the time to its running stream, and the harm to streams that run.

    remote(p, d) = overhead + queue wait on p + prefill of the tokens p has not cached
                   + transfer that prefill does not hide + wait for d's next step + first step
    local(d)     = overhead + queue wait on d + prefill in chunks beside d's streams + first step

    exposed transfer = alpha + max(bytes/beta/layers, bytes/beta - prefill x (layers-1)/layers)
    prefill          = chunks x (fixed + what the worker's streams add to a step) + tokens x (a token + its context)
    TTFT             = overhead + queue + prefill: whoever prefills sends the first token; the rest delays the second

Time is priced in shares of its limit, and shown in seconds of TTFT: a second of TTFT costs 1, a second of somebody's
TPOT costs ``ttft_slo_s / tpot_slo_s``.

    cost = remote or local + price x own TPOT + price x streams on d x (what the request adds to each of their steps
           + what its chunks hold each of them up, spread over the mean output)

A placement violates by how far TTFT, or the slower of own and others' TPOT, exceeds its limit, as a share, plus 1 when
the worker says it has no room for the prompt. Prompts are served in the order they come, so nobody's TTFT is harmed.

Invariants: pure; every estimate is finite and not negative; more work queued never makes a placement cheaper.
Knows nothing about how its parameters were learned (``learning``) or what is done with the result (``policy``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvbaton.router.views import MemberView, RequestView

# Cold start, before a first sample and without a profile: a small model on a modest machine. They only have to be of
# the right order until the first few requests are back: 4,000 prompt tokens/s, 16 ms for a step of 16 streams, 1 GB/s.
COLD_OVERHEAD_LOCAL_S = 0.002
COLD_OVERHEAD_REMOTE_S = 0.004
COLD_OUTPUT_TOKENS = 128.0
COLD_TOKEN_BYTES = 65_536
COLD_LAYERS = 32
MOST_LEGS = 8  # of each pool are paired; the others are worse on their own before any link is looked at


class WorkerCost(msgspec.Struct, frozen=True, gc=False):
    """Times of one worker. ``slowdown`` multiplies all of them: how much slower it is just now than it used to be."""

    prefill_fixed_s: float = 0.008  # for each chunk
    prefill_token_s: float = 250e-6
    prefill_pair_s: float = 0.0  # for each uncached token and each token it looks at
    step_fixed_s: float = 0.008
    step_sequence_s: float = 0.5e-3  # for each stream of the batch
    step_context_s: float = 0.1e-6  # for each KV token the batch reads
    queue_scale: float = 1.0  # measured wait over the wait foretold from the tokens queued
    slowdown: float = 1.0


class LinkCost(msgspec.Struct, frozen=True, gc=False):
    startup_s: float = 0.002  # alpha
    byte_s: float = 1e-9  # 1/beta


class FleetCosts(msgspec.Struct, frozen=True):
    """Parameters of a fleet. Workers and links that are not listed have those of ``worker`` and ``link``."""

    workers: dict[str, WorkerCost] = {}
    links: dict[str, dict[str, LinkCost]] = {}  # prefill worker, decode worker
    worker: WorkerCost = WorkerCost()
    link: LinkCost = LinkCost()
    token_bytes: int = COLD_TOKEN_BYTES  # KV of one token
    num_layers: int = COLD_LAYERS  # the transfer goes layer by layer; 1: after prefill, in one piece
    overhead_local_s: float = COLD_OVERHEAD_LOCAL_S  # of TTFT, neither queue nor prefill: HTTP, tokenizer, messages
    overhead_remote_s: float = COLD_OVERHEAD_REMOTE_S
    output_tokens: float = COLD_OUTPUT_TOKENS  # mean of a request


class Limits(NamedTuple):
    ttft_slo_s: float
    tpot_slo_s: float


class Candidate(NamedTuple):
    """One placement with every term of its cost. Sorts by what is best."""

    violation: float  # 0: keeps both limits
    cost_s: float
    order: int  # among equals, whose turn it is
    prefill: str | None
    decode: str
    overhead_s: float
    queue_s: float
    prefill_s: float
    exposed_s: float
    admission_s: float
    first_step_s: float
    ttft_s: float
    tpot_s: float
    harm_s: float

    @property
    def terms(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in TERMS}


TERMS: dict[str, str] = {
    "overhead_s": "routing and messages: TTFT that is neither queue nor prefill",
    "queue_s": "wait before the first prefill step",
    "prefill_s": "prefill of the uncached tokens",
    "exposed_s": "transfer that prefill does not hide",
    "admission_s": "wait for the next step of the decode worker",
    "first_step_s": "first decode step",
    "ttft_s": "overhead, queue and prefill",
    "tpot_s": "own time per output token",
    "harm_s": "price of what streams on the decode worker lose",
    "cost_s": "all of it in seconds of TTFT; the least wins",
    "violation": "share by which limits are exceeded; 0 keeps them",
}


class _Landing(NamedTuple):
    """What decoding on a worker costs, whoever prefills."""

    member: MemberView
    admission_s: float
    step_s: float  # with the request in the batch
    harm_s: float
    moved_bytes: int
    no_room: float


class _Source(NamedTuple):
    name: str
    queue_s: float
    prefill_s: float


def uncached(request: RequestView, member: MemberView) -> int:
    """At least one prompt token is always computed."""
    return max(1, request.num_prompt_tokens - member.cached_tokens)


def _alone_s(request: RequestView, tokens: int, cost: WorkerCost) -> float:
    """What ``tokens`` uncached ones add to the steps they are in."""
    each_looks_at = (request.num_prompt_tokens - tokens / 2) / request.num_prompts
    return cost.slowdown * tokens * (cost.prefill_token_s + cost.prefill_pair_s * each_looks_at)


def _no_room(request: RequestView, member: MemberView) -> float:
    free = member.free_tokens
    return 1.0 if free is not None and uncached(request, member) + request.num_sequences > free else 0.0


def _source(request: RequestView, member: MemberView, cost: WorkerCost) -> _Source:
    queued, tokens, budget = member.queued_tokens, uncached(request, member), member.chunk_tokens
    queue_s = cost.queue_scale * (-(-queued // budget) * cost.prefill_fixed_s + queued * cost.prefill_token_s)
    fixed_s = -(-tokens // budget) * cost.prefill_fixed_s
    return _Source(
        member.name,
        cost.slowdown * queue_s + member.overdue_s,
        cost.slowdown * fixed_s + _alone_s(request, tokens, cost),
    )


def _landing(request: RequestView, member: MemberView, costs: FleetCosts, price: float) -> _Landing:
    cost = costs.workers.get(member.name, costs.worker)
    streams = min(member.num_requests, member.max_running)
    step_s = cost.step_fixed_s
    if streams:
        step_s += cost.step_sequence_s * streams + cost.step_context_s * member.context_tokens
    admission_s = 0.0
    if streams or member.queued_tokens:  # on average it comes in the middle of a step, which may hold a chunk
        chunk = min(member.queued_tokens, max(1, member.chunk_tokens - streams))
        admission_s = cost.slowdown * (step_s + chunk * cost.prefill_token_s) / 2
    added_s = cost.step_sequence_s * request.num_sequences + cost.step_context_s * request.num_prompt_tokens
    moved = max(0, request.num_prompt_tokens - member.cached_tokens) * costs.token_bytes
    harm_s = price * streams * cost.slowdown * added_s
    return _Landing(
        member, admission_s, cost.slowdown * (step_s + added_s), harm_s, moved, _no_room(request, member)
    )  # fmt: skip


def local(
    request: RequestView, member: MemberView, costs: FleetCosts, limits: Limits, order: int = 0
) -> Candidate:  # fmt: skip
    """Prefill where it decodes."""
    cost = costs.workers.get(member.name, costs.worker)
    price = limits.ttft_slo_s / limits.tpot_slo_s
    landing = _landing(request, member, costs, price)
    streams = min(member.num_requests, member.max_running)
    chunk_s = cost.prefill_fixed_s
    if streams:
        chunk_s += cost.step_sequence_s * streams + cost.step_context_s * member.context_tokens
    budget = max(1, member.chunk_tokens - streams)
    queued, tokens = member.queued_tokens, uncached(request, member)
    queue_s = cost.queue_scale * (queued * cost.prefill_token_s + -(-queued // budget) * chunk_s)
    queue_s = cost.slowdown * queue_s + member.overdue_s
    if streams and not queued:
        queue_s += landing.admission_s  # the step under way
    held_up_s = _alone_s(request, tokens, cost)
    prefill_s = cost.slowdown * -(-tokens // budget) * chunk_s + held_up_s
    ttft_s = costs.overhead_local_s + queue_s + prefill_s
    added_tpot_s = held_up_s / costs.output_tokens
    harm_s = landing.harm_s + price * streams * added_tpot_s
    worst_tpot_s = landing.step_s + (added_tpot_s if streams else 0.0)
    violation = landing.no_room
    if ttft_s > limits.ttft_slo_s:
        violation += ttft_s / limits.ttft_slo_s - 1.0
    if worst_tpot_s > limits.tpot_slo_s:
        violation += worst_tpot_s / limits.tpot_slo_s - 1.0
    total_s = ttft_s + landing.step_s + price * landing.step_s + harm_s
    return Candidate(
        violation, total_s, order, None, member.name, costs.overhead_local_s, queue_s, prefill_s, 0.0, 0.0,
        landing.step_s, ttft_s, landing.step_s, harm_s,
    )  # fmt: skip


def locals_(
    request: RequestView, members: Sequence[MemberView], costs: FleetCosts, limits: Limits
) -> list[Candidate]:  # fmt: skip
    return [local(request, member, costs, limits, order) for order, member in enumerate(members)]


def pairs(
    request: RequestView,
    prefills: Sequence[MemberView],
    decodes: Sequence[MemberView],
    costs: FleetCosts,
    limits: Limits,
) -> list[Candidate]:
    """Every pair of the most promising workers of either pool."""
    ttft_slo_s, tpot_slo_s = limits
    price = ttft_slo_s / tpot_slo_s
    overhead_s, output_tokens = costs.overhead_remote_s, costs.output_tokens
    last_layer = 1.0 / costs.num_layers
    hidden_share = 1.0 - last_layer
    sources = [_source(request, m, costs.workers.get(m.name, costs.worker)) for m in prefills]
    landings = [_landing(request, m, costs, price) for m in decodes]
    if len(sources) > MOST_LEGS:
        sources = sorted(sources, key=lambda s: s.queue_s + s.prefill_s)[:MOST_LEGS]
    if len(landings) > MOST_LEGS:
        landings = sorted(landings, key=_landing_cost(price))[:MOST_LEGS]
    found = []
    order = 0
    for name, queue_s, prefill_s in sources:
        links = costs.links.get(name, {})
        ttft_s = overhead_s + queue_s + prefill_s
        late = ttft_s / ttft_slo_s - 1.0 if ttft_s > ttft_slo_s else 0.0
        hidden_s = prefill_s * hidden_share
        for landing in landings:
            member, admission_s, step_s, harm_s, moved_bytes, no_room = landing
            link = links.get(member.name, costs.link)
            carry_s = moved_bytes * link.byte_s
            exposed_s = link.startup_s + max(carry_s * last_layer, carry_s - hidden_s)
            tpot_s = step_s + (exposed_s + admission_s) / output_tokens
            violation = late + no_room
            if tpot_s > tpot_slo_s:
                violation += tpot_s / tpot_slo_s - 1.0
            cost_s = ttft_s + exposed_s + admission_s + step_s + price * tpot_s + harm_s
            found.append(
                Candidate(
                    violation,
                    cost_s,
                    order,
                    name,
                    member.name,
                    overhead_s,
                    queue_s,
                    prefill_s,
                    exposed_s,
                    admission_s,
                    step_s,
                    ttft_s,
                    tpot_s,
                    harm_s,
                )  # fmt: skip
            )
            order += 1
    return found


def _landing_cost(price: float):  # type: ignore[no-untyped-def]
    return lambda leg: (leg.no_room, leg.admission_s + leg.step_s * (1.0 + price) + leg.harm_s)
