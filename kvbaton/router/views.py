"""What the policy sees of a request and of a worker: plain values, cheap to make, and all that a decision depends on.

A decision record keeps them, so that the decision can be replayed. Knows nothing about how they come to be.
"""

from __future__ import annotations

import msgspec

from kvbaton.types import Role


class MemberView(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One worker that takes requests, as the router sees it now."""

    name: str
    role: Role
    num_requests: int  # reported, corrected by what this router sent and got back since
    queued_tokens: int  # prompt tokens still to be computed
    max_context: int
    cached_tokens: int = 0  # of this prompt, by the prefix index
    context_tokens: int = 0  # KV its sequences hold, as reported
    free_tokens: int | None = None  # KV it has room for; None: it does not say
    chunk_tokens: int = 512  # prompt tokens and decodes of one engine step
    max_running: int = 64  # sequences in one batch
    overdue_s: float = 0.0  # how much longer than estimated its oldest prompt has been on its way
    queued_pairs: float = 0.0  # what queued tokens look at, summed over them
    pool_busy: float = 0.0  # seconds of prefill per second that workers of its role were sent, lately
    reused_tokens_per_s: float = 0.0  # cached tokens that prompts sent to it found, lately
    serves_alone: bool = True  # False: it prefills or decodes, and does not do the other half for itself


class RequestView(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    num_prompt_tokens: int  # of all prompts together
    num_prompts: int
    longest_prompt_tokens: int
    max_total_tokens: int  # prompt and output of the longest sequence
    num_sequences: int = 1  # choices of all prompts together
    bucket: float = 0.0  # 0 up to 100: where the rollout hash puts it; always the same for the same key
