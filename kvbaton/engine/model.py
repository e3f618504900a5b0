"""What runs one step: the input of a step, and the protocol its implementations share.

Two implementations: ``torch_model.TorchModel`` (any device, plain torch) and ``native.NativeModel`` (C++ kernels, CPU).
Knows nothing about requests, sampling or who owns a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.pool import KVPool
from kvbaton.kv.layout import KVLayout


@dataclass(frozen=True)
class StepInput:
    """One batch, its rows grouped by sequence. T rows in all, S sequences, R rows whose logits are wanted."""

    token_ids: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T], 0-based position of each row in its sequence
    seq_starts: np.ndarray  # int32 [S + 1], rows of sequence s are seq_starts[s] .. seq_starts[s + 1]
    context_lens: np.ndarray  # int32 [S], tokens of the sequence in the pool once this step has run
    block_table: np.ndarray  # int32 [S, most blocks of one sequence], rows padded with 0
    sample_rows: np.ndarray  # int32 [R], rows that yield logits


class Model(Protocol):
    config: ModelConfig
    layout: KVLayout

    def forward(self, step: StepInput, kv: KVPool, on_layer: Callable[[int], None] | None = None) -> np.ndarray:
        """Compute the step, write its K and V into ``kv``, and return float32 logits ``[R, vocab]``.

        ``on_layer(l)`` is called as soon as layer l's K and V of this step are in the pool.
        """
        ...
