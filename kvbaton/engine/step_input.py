"""A step's plan as the arrays that a model takes. Knows nothing about models, and changes nothing."""

from __future__ import annotations

import numpy as np

from kvbaton.engine.model import StepInput
from kvbaton.engine.sequence import Sequence
from kvbaton.engine.step_plan import StepPlan


def step_input(plan: StepPlan) -> StepInput:
    items = plan.items
    num_rows = sum(item.num_tokens for item in items)
    token_ids = np.empty(num_rows, dtype=np.int32)
    positions = np.empty(num_rows, dtype=np.int32)
    seq_starts = np.zeros(len(items) + 1, dtype=np.int32)
    context_lens = np.empty(len(items), dtype=np.int32)
    most_blocks = max(len(item.seq.blocks) for item in items)
    block_table = np.zeros((len(items), most_blocks), dtype=np.int32)
    sample_rows = []
    row = 0
    for i, item in enumerate(items):
        stop = item.start + item.num_tokens
        token_ids[row : row + item.num_tokens] = _tokens(item.seq, item.start, stop)
        positions[row : row + item.num_tokens] = np.arange(item.start, stop, dtype=np.int32)
        block_table[i, : len(item.seq.blocks)] = item.seq.blocks
        context_lens[i] = stop
        row += item.num_tokens
        seq_starts[i + 1] = row
        if item.samples:
            sample_rows.append(row - 1)
    rows = np.asarray(sample_rows, dtype=np.int32)
    return StepInput(token_ids, positions, seq_starts, context_lens, block_table, rows)


def _tokens(seq: Sequence, start: int, stop: int) -> list[int] | tuple[int, ...]:
    """Token ids of positions [start, stop) of prompt followed by output."""
    prompt = seq.request.prompt_token_ids
    num_prompt = len(prompt)
    if stop <= num_prompt:
        return prompt[start:stop]
    if start >= num_prompt:
        return seq.output_token_ids[start - num_prompt : stop - num_prompt]
    return [*prompt[start:], *seq.output_token_ids[: stop - num_prompt]]
