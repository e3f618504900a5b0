"""Where a request goes, and why: remote prefill, or prefill where it decodes, and on which workers.

Pure: a view of the fleet in, a decision with every term it compared out. The same arguments give the same decision;
ties are broken by ``turn``, which the caller advances. Knows nothing about sockets, clocks or how views come to be.

Scores are in prompt tokens, lower is better:

    prefill worker   tokens it still has to compute + uncached tokens of this prompt + request_cost x requests on it
    decode worker    the same when it prefills itself; else tokens to move count a sixteenth of tokens to compute
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvbaton.types import Role

Reason = Literal[
    "remote",
    "local_short",
    "local_cached",
    "local_colocated",
    "fallback_no_prefill",
    "fallback_prefill_failed",
    "fallback_prompt_too_long",
    "fallback_no_decode",
]
REASONS: dict[Reason, str] = {
    "remote": "a prefill worker computes the prompt, a decode worker pulls its KV",
    "local_short": "too few uncached tokens for a hand-off to pay",
    "local_cached": "the decode worker already holds the prefix, and too few tokens are left to compute",
    "local_colocated": "the fleet has no prefill pool",
    "fallback_no_prefill": "the fleet has a prefill pool, but none of it takes requests now",
    "fallback_prefill_failed": "the hand-off failed, and no other prefill worker is left to try",
    "fallback_prompt_too_long": "no prefill worker can hold the prompt",
    "fallback_no_decode": "no decode worker takes requests; a prefill worker serves the whole request",
}


_MOVE_WEIGHT = 1 / 16


@dataclass(frozen=True)
class MemberView:
    """One worker that takes requests, as the router sees it now."""

    name: str
    role: Role
    num_requests: int  # reported, corrected by what this router sent and got back since
    queued_tokens: int  # prompt tokens still to be computed
    max_context: int
    cached_tokens: int = 0  # of this prompt, by the prefix index


@dataclass(frozen=True)
class RequestView:
    num_prompt_tokens: int  # of all prompts together
    num_prompts: int
    longest_prompt_tokens: int
    max_total_tokens: int  # prompt and output of the longest sequence


@dataclass(frozen=True)
class PolicyConfig:
    threshold_tokens: int = 64
    request_cost_tokens: int = 256


@dataclass(frozen=True)
class Decision:
    reason: Reason
    decode: str
    prefill: str | None
    foretold_cached_tokens: int  # on the worker that will prefill
    terms: dict[str, float] = field(default_factory=dict)  # everything that was compared

    @property
    def remote(self) -> bool:
        return self.prefill is not None


class NoWorker(Exception):
    """Nobody can take the request now."""


def decide(
    request: RequestView,
    members: Sequence[MemberView],
    config: PolicyConfig,
    turn: int,
    has_prefill_pool: bool,
    prefill_failed: bool = False,
) -> Decision:
    """``members`` are those that take requests now and were not tried before; ``has_prefill_pool`` speaks of the whole
    fleet, healthy or not; ``prefill_failed`` is set when a hand-off of this request failed already."""
    able = [m for m in members if m.max_context >= request.max_total_tokens]
    decodes = [m for m in able if m.role == "decode"]
    locals_ = [m for m in able if m.role != "prefill"]
    prefills = [m for m in members if m.role == "prefill"]
    roomy = [m for m in prefills if m.max_context > request.longest_prompt_tokens]
    terms: dict[str, float] = {}
    if not locals_:
        last_resort = [m for m in able if m.role == "prefill"]
        if not last_resort:
            raise NoWorker
        return _local("fallback_no_decode", last_resort, request, config, turn, terms)
    if not has_prefill_pool:
        return _local("local_colocated", locals_, request, config, turn, terms)
    if not decodes or not roomy:
        reason: Reason = "fallback_no_prefill"
        if not decodes:
            reason = "local_colocated"
        elif prefill_failed:
            reason = "fallback_prefill_failed"
        elif prefills:
            reason = "fallback_prompt_too_long"
        return _local(reason, locals_, request, config, turn, terms)
    here = _best("local", locals_, request, config, turn, terms)
    uncached = _uncached(request, here) / request.num_prompts
    terms["uncached_tokens"] = uncached
    terms["threshold_tokens"] = config.threshold_tokens
    if uncached < config.threshold_tokens:
        reason = "local_cached" if request.longest_prompt_tokens >= config.threshold_tokens else "local_short"
        return Decision(reason, here.name, None, here.cached_tokens, terms)
    prefill = _best("prefill", roomy, request, config, turn, terms)
    decode = _best("decode", decodes, request, config, turn, terms)
    return Decision("remote", decode.name, prefill.name, prefill.cached_tokens, terms)


def _uncached(request: RequestView, member: MemberView) -> int:
    """At least one prompt token is always computed."""
    return max(1, request.num_prompt_tokens - member.cached_tokens)


def _local(
    reason: Reason,
    members: Sequence[MemberView],
    request: RequestView,
    config: PolicyConfig,
    turn: int,
    terms: dict[str, float],
) -> Decision:
    best = _best("local", members, request, config, turn, terms)
    return Decision(reason, best.name, None, best.cached_tokens, terms)


def _best(
    label: Literal["local", "prefill", "decode"],
    members: Sequence[MemberView],
    request: RequestView,
    config: PolicyConfig,
    turn: int,
    terms: dict[str, float],
) -> MemberView:
    """The lowest score; among equals the one whose turn it is."""
    # Blocks a decode worker has already need not be moved, but a moved token costs far less than a computed one.
    weight = _MOVE_WEIGHT if label == "decode" else 1.0
    scores = [
        m.queued_tokens + weight * _uncached(request, m) + config.request_cost_tokens * m.num_requests for m in members
    ]
    for member, score in zip(members, scores, strict=True):
        terms[f"{label}:{member.name}"] = score
    count = len(members)
    return members[min(range(count), key=lambda i: (scores[i], (i - turn) % count))]
