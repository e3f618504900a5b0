"""What the scheduler hands to whoever runs a step: the rows of one batch.

A plan is a proposal: nothing has advanced until the scheduler is told that it ran. Knows nothing about models.
"""

from __future__ import annotations

import msgspec

from kvbaton.engine.sequence import Sequence


class StepItem(msgspec.Struct, frozen=True, gc=False):
    """``num_tokens`` tokens of ``seq`` from position ``start``; ``samples``: the last one yields logits."""

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool


class StepPlan(msgspec.Struct, frozen=True):
    items: tuple[StepItem, ...]  # decodes first, then prefill chunks
    preempted: tuple[Sequence, ...] = ()
    num_decodes: int = 0  # the first so many items extend an output by one token
    num_prefill_tokens: int = 0  # rows of the others

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prefill_tokens
