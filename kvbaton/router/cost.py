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
           + prefill x (later + (1 + later) x seconds of prefill that the worker's cache saved per second, lately)

``later`` is what a second of prefill takes from those who come later (``later_price``). Prompts are served in the order
they come, so who waits already is not harmed.

A placement violates by how far TTFT, or the slower of own and others' TPOT, exceeds its limit, as a share, plus 1 when
the worker says it has no room for the prompt. Room comes first, then whether both limits are kept, then cost.

Invariants: pure; every estimate is finite and not negative; more work queued never makes a placement cheaper.
Knows nothing about how its parameters were learned (``learning``) or what is done with the result (``policy``).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import msgspec

from kvbaton.router.views import MemberView, RequestView

# Cold start, before a first sample and without a profile: a small model on a modest machine. They only have to be of
# the right order until the first few requests are back: 4,000 prompt tokens/s, 16 ms for a step of 16 streams, 1 GB/s.
COLD_OVERHEAD_LOCAL_S = 0.002
COLD_OVERHEAD_REMOTE_S = 0.004
COLD_OUTPUT_TOKENS = 128.0
COLD_TOKEN_BYTES = 65_536
COLD_LAYERS = 32
# What a second of prefill takes from those who come later, on workers used to a share u: SPREAD x u / (1 - u)^2, as in
# a queue with random arrivals; SPREAD = (1 + C^2) / 2 of prefill times, with C^2 = 5.6 of prompts of a public trace of
# chats, less what was cached. No more than at MOST_BUSY, because a router sends others where they need not wait.
SPREAD = 3.3
MOST_BUSY = 0.4
MOST_LEGS = 8  # workers of each pool that are paired; the others are worse on their own, before any link is looked at


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


class Limits(msgspec.Struct, frozen=True, gc=False):
    ttft_slo_s: float
    tpot_slo_s: float

    @property
    def price(self) -> float:
        """Seconds of TTFT that a second of TPOT is worth."""
        return self.ttft_slo_s / self.tpot_slo_s


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One placement with every term of its cost."""

    prefill: str | None
    decode: str
    violation: float
    cost_s: float
    overhead_s: float
    queue_s: float
    prefill_s: float
    exposed_s: float
    admission_s: float
    first_step_s: float
    ttft_s: float
    tpot_s: float
    harm_s: float
    later_s: float
    broken: int  # 1: it keeps not both limits, 2 more: it has no room

    @property
    def rank(self) -> tuple[int, float]:
        """Less is better."""
        return self.broken, self.cost_s

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
    "later_s": "price of the prefill to those who come later",
    "cost_s": "all of it in seconds of TTFT; the least wins",
    "violation": "share by which limits are exceeded; 0 keeps them",
}

# Legs are bare tuples, and their loops keep what they need at hand: they run for every worker in every decision.
# (broken, cost, name, queue, prefill, TTFT, late, later) of prefilling on a worker
_Source = tuple[int, float, str, float, float, float, float, float]
# (broken, cost, name, admission, step with the request in the batch, harm, bytes to move, no room)
Landing = tuple[int, float, str, float, float, float, int, float]


def later_price(busy: float) -> float:
    """Seconds that a second of prefill takes from those who come later, on workers that prefill this share of time."""
    share = min(busy, MOST_BUSY)
    return SPREAD * share / (1.0 - share) ** 2


def uncached(request: RequestView, member: MemberView) -> int:
    """At least one prompt token is always computed."""
    return max(1, request.num_prompt_tokens - member.cached_tokens)


def _sources(
    request: RequestView, members: Sequence[MemberView], costs: FleetCosts, limits: Limits
) -> list[_Source]:  # fmt: skip
    workers, usual, overhead_s, slo_s = costs.workers, costs.worker, costs.overhead_remote_s, limits.ttft_slo_s
    prompt, prompts = request.num_prompt_tokens, request.num_prompts
    found, busy, later = [], 0.0, 0.0  # as of workers that were sent nothing
    for member in members:
        cost = workers.get(member.name, usual)
        queued, budget = member.queued_tokens, member.chunk_tokens
        tokens = max(1, prompt - member.cached_tokens)
        slowdown, fixed_s, token_s = cost.slowdown, cost.prefill_fixed_s, cost.prefill_token_s
        pair_s = cost.prefill_pair_s
        queued_s = -(-queued // budget) * fixed_s + queued * token_s + member.queued_pairs * pair_s
        queue_s = slowdown * cost.queue_scale * queued_s + member.overdue_s
        each_s = token_s + pair_s * (prompt - tokens / 2) / prompts
        prefill_s = slowdown * (-(-tokens // budget) * fixed_s + tokens * each_s)
        ttft_s = overhead_s + queue_s + prefill_s
        if member.pool_busy != busy:
            busy = member.pool_busy
            later = later_price(busy)
        later_s = prefill_s * (later + (1.0 + later) * slowdown * token_s * member.reused_tokens_per_s)
        late, broken = (ttft_s / slo_s - 1.0, 1) if ttft_s > slo_s else (0.0, 0)
        found.append((broken, ttft_s + later_s, member.name, queue_s, prefill_s, ttft_s, late, later_s))
    return found


def landings_on(
    request: RequestView, members: Sequence[MemberView], costs: FleetCosts, limits: Limits
) -> list[Landing]:  # fmt: skip
    """Decoding on each worker, whoever prefills."""
    workers, usual, token_bytes, slo_s = costs.workers, costs.worker, costs.token_bytes, limits.tpot_slo_s
    prompt, sequences, price = request.num_prompt_tokens, request.num_sequences, limits.price
    found = []
    for member in members:
        cost = workers.get(member.name, usual)
        streams = min(member.num_requests, member.max_running)
        slowdown, sequence_s, context_s = cost.slowdown, cost.step_sequence_s, cost.step_context_s
        queued, free = member.queued_tokens, member.free_tokens
        step_s, admission_s = cost.step_fixed_s, 0.0
        if streams:
            step_s += sequence_s * streams + context_s * member.context_tokens
        if streams or queued:  # on average it comes in the middle of a step, which may hold a chunk
            chunk = min(queued, max(1, member.chunk_tokens - streams))
            admission_s = slowdown * (step_s + chunk * cost.prefill_token_s) / 2
        added_s = sequence_s * sequences + context_s * prompt
        step_s = slowdown * (step_s + added_s)
        harm_s = price * streams * slowdown * added_s
        missing = max(0, prompt - member.cached_tokens)
        no_room, broken = (1.0, 2) if free is not None and missing + sequences > free else (0.0, 0)
        if step_s > slo_s:
            broken += 1
        cost_s = admission_s + step_s + price * step_s + harm_s
        found.append((broken, cost_s, member.name, admission_s, step_s, harm_s, missing * token_bytes, no_room))
    return found


# The fields of a candidate in their order. Of all that are compared only one becomes a candidate.
_Local = tuple[
    None, str, float, float, float, float, float, float, float, float, float, float, float, float, int
]  # fmt: skip


def _locals(
    request: RequestView,
    members: Sequence[MemberView],
    costs: FleetCosts,
    limits: Limits,
    landings: Sequence[Landing],
) -> list[_Local]:
    workers, usual, overhead_s, output_tokens = costs.workers, costs.worker, costs.overhead_local_s, costs.output_tokens
    ttft_slo_s, tpot_slo_s, price = limits.ttft_slo_s, limits.tpot_slo_s, limits.price
    prompt, prompts = request.num_prompt_tokens, request.num_prompts
    found: list[_Local] = []
    busy = later = 0.0  # as of workers that were sent nothing
    for member, landing in zip(members, landings, strict=True):
        _, _, name, _, step_s, harm_s, _, violation = landing
        cost = workers.get(name, usual)
        streams, queued = min(member.num_requests, member.max_running), member.queued_tokens
        slowdown, token_s, pair_s = cost.slowdown, cost.prefill_token_s, cost.prefill_pair_s
        chunk_s = cost.prefill_fixed_s
        rest_s, broken = member.overdue_s, 2 if violation else 0
        if streams:
            rows_s = cost.step_sequence_s * streams + cost.step_context_s * member.context_tokens
            chunk_s += rows_s
            rest_s += slowdown * (cost.step_fixed_s + rows_s) / 2  # of the step under way
        budget = max(1, member.chunk_tokens - streams)
        tokens = max(1, prompt - member.cached_tokens)
        queued_s = queued * token_s + member.queued_pairs * pair_s + -(-queued // budget) * chunk_s
        queue_s = slowdown * cost.queue_scale * queued_s + rest_s
        held_up_s = slowdown * tokens * (token_s + pair_s * (prompt - tokens / 2) / prompts)
        prefill_s = slowdown * -(-tokens // budget) * chunk_s + held_up_s
        ttft_s = overhead_s + queue_s + prefill_s
        if member.pool_busy != busy:
            busy = member.pool_busy
            later = later_price(busy)
        later_s = prefill_s * (later + (1.0 + later) * slowdown * token_s * member.reused_tokens_per_s)
        worst_tpot_s, kept = step_s, True
        if streams:
            added_tpot_s = held_up_s / output_tokens
            harm_s += price * streams * added_tpot_s
            worst_tpot_s += added_tpot_s
        if ttft_s > ttft_slo_s:
            violation += ttft_s / ttft_slo_s - 1.0
            kept = False
        if worst_tpot_s > tpot_slo_s:
            violation += worst_tpot_s / tpot_slo_s - 1.0
            kept = False
        cost_s = ttft_s + step_s + price * step_s + harm_s + later_s
        found.append(
            (
                None, name, violation, cost_s, overhead_s, queue_s, prefill_s, 0.0, 0.0, step_s, ttft_s, step_s, harm_s,
                later_s, broken if kept else broken + 1,
            )
        )  # fmt: skip
    return found


def locals_(
    request: RequestView, members: Sequence[MemberView], costs: FleetCosts, limits: Limits
) -> list[Candidate]:  # fmt: skip
    """Prefill where it decodes, on each worker."""
    landings = landings_on(request, members, costs, limits)
    return [Candidate(*each) for each in _locals(request, members, costs, limits, landings)]


def best_local(
    request: RequestView,
    members: Sequence[MemberView],
    landings: Sequence[Landing],
    costs: FleetCosts,
    limits: Limits,
) -> Candidate:
    """The first of least rank among ``locals_``; ``landings`` are those on ``members``."""
    found = _locals(request, members, costs, limits, landings)
    return Candidate(*(found[0] if len(found) == 1 else min(found, key=_local_rank)))


_local_rank = itemgetter(14, 3)


def _pair(source: _Source, landing: Landing, costs: FleetCosts, limits: Limits) -> Candidate:
    _, source_s, prefill, queue_s, prefill_s, ttft_s, late, later_s = source
    _, _, decode, admission_s, step_s, harm_s, moved_bytes, no_room = landing
    known = costs.links.get(prefill)
    link = costs.link if known is None else known.get(decode, costs.link)
    carry_s = moved_bytes * link.byte_s
    last_layer_s = carry_s / costs.num_layers
    exposed_s = link.startup_s + max(last_layer_s, carry_s - prefill_s * (1.0 - 1.0 / costs.num_layers))
    tpot_s = step_s + (exposed_s + admission_s) / costs.output_tokens
    violation, broken = late + no_room, 2 if no_room else 0
    if tpot_s > limits.tpot_slo_s:
        violation += tpot_s / limits.tpot_slo_s - 1.0
        broken += 1
    elif late:
        broken += 1
    cost_s = source_s + exposed_s + admission_s + step_s + limits.ttft_slo_s / limits.tpot_slo_s * tpot_s + harm_s
    return Candidate(
        prefill, decode, violation, cost_s, costs.overhead_remote_s, queue_s, prefill_s, exposed_s, admission_s, step_s,
        ttft_s, tpot_s, harm_s, later_s, broken,
    )  # fmt: skip


def _legs(
    request: RequestView,
    prefills: Sequence[MemberView],
    landings: Sequence[Landing],
    costs: FleetCosts,
    limits: Limits,
) -> tuple[list[_Source], list[Landing]]:
    """The best of either pool on their own, best first; among equals those whose turn it is."""
    sources = _sources(request, prefills, costs, limits)
    if len(sources) > 1:
        sources = sorted(sources, key=_leg_rank)[:MOST_LEGS]
    targets = sorted(landings, key=_leg_rank)[:MOST_LEGS] if len(landings) > 1 else list(landings)
    return sources, targets


_leg_rank = itemgetter(0, 1)


def pairs(
    request: RequestView,
    prefills: Sequence[MemberView],
    decodes: Sequence[MemberView],
    costs: FleetCosts,
    limits: Limits,
) -> list[Candidate]:
    """Every pair of the most promising workers of either pool."""
    sources, landings = _legs(request, prefills, landings_on(request, decodes, costs, limits), costs, limits)
    return [_pair(source, landing, costs, limits) for source in sources for landing in landings]


def best_pair(
    request: RequestView,
    prefills: Sequence[MemberView],
    landings: Sequence[Landing],
    costs: FleetCosts,
    limits: Limits,
) -> Candidate:
    """The first of least rank among ``pairs``. A pair is not looked at when its legs alone are worse than the best."""
    sources, targets = _legs(request, prefills, landings, costs, limits)
    best = _pair(sources[0], targets[0], costs, limits)
    if len(sources) == len(targets) == 1:
        return best
    broken, cost_s = best.broken, best.cost_s
    for source in sources:
        source_broken, source_s = source[0], source[1]
        if source_broken > broken:  # and so are those behind it
            break
        for landing in targets:
            landing_broken = landing[0]
            if landing_broken > broken:
                break
            if source_s + landing[1] >= cost_s:
                if landing_broken >= source_broken:
                    if landing_broken == broken:  # those behind it cost more, or break more
                        break
                elif source_broken == broken:
                    continue
            found = _pair(source, landing, costs, limits)
            if found.broken < broken or (found.broken == broken and found.cost_s < cost_s):
                best, broken, cost_s = found, found.broken, found.cost_s
    return best
