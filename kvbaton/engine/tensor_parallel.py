"""A worker of several ranks: rank 0 plans, samples and has a part of the model; the others are processes of their own.

    scheduler -> step -> rank 0: send it to all, compute a part --sum-- ... --> logits
                           `---> rank n:        compute a part --sum-- ...

Every rank computes over a pool of its own, all with the same block tables: a step names blocks, and they mean the same
everywhere. The pools are shared memory that rank 0 made, so hand-offs, generations and prefix cache are its own affair.

Invariants: a step is computed by all ranks or the worker is lost; nothing waits for a rank longer than its deadline.
Knows nothing about requests or peers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvbaton.engine.model import StepInput
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.pool import KVPool
from kvbaton.engine.rank_group import RankGroup
from kvbaton.engine.rank_link import Setup, Sums
from kvbaton.engine.rank_model import RankModel
from kvbaton.engine.shares import shares
from kvbaton.engine.torch_model import Weights
from kvbaton.kv.rank_pools import RankPools
from kvbaton.types import LocalError


@dataclass(frozen=True)
class RankOptions:
    """``deadline_s``: how long a rank may keep the others waiting within a step."""

    tp_size: int
    deadline_s: float
    dtype: str
    num_threads: int  # of each rank


class RankKVPool(KVPool):
    """Rank 0's pool for its part of the model; what concerns blocks as such concerns the pools of all ranks."""

    def __init__(self, ranks: RankPools) -> None:
        super().__init__(ranks.pools[0])
        self.whole = ranks
        self._ranks = ranks

    def publish_generation(self, block: int, generation: int) -> None:
        self._ranks.publish_generation(block, generation)


class TensorParallelModel:
    """``engine.model.Model`` of rank 0, over the pool that ``load_ranks`` gives with it."""

    def __init__(self, config: ModelConfig, part: RankModel, ranks: RankGroup) -> None:
        self.config = config
        self.layout = part.layout
        self.ranks = ranks
        self._part = part

    def forward(self, step: StepInput, kv: KVPool, on_layer: Callable[[int], None] | None = None) -> np.ndarray:
        self.ranks.send(step)
        try:
            return self._part.forward(step, kv, on_layer)
        except BaseException as error:  # whatever it is, the others wait within a step that we have left
            self.ranks.fail(f"rank 0 failed within a step: {error}")
            raise

    def close(self) -> None:
        """Between steps only."""
        self.ranks.close()


def load_ranks(
    options: RankOptions,
    model_dir: Path,
    model: tuple[ModelConfig, Weights],
    pools: RankPools,
) -> tuple[TensorParallelModel, KVPool]:
    """Start the ranks and wait until each has its part. LocalError when one does not come up; then none is left."""
    config, weights = model
    torch.set_num_threads(options.num_threads)
    with tempfile.TemporaryDirectory(prefix="kvbaton-ranks-") as directory:
        meeting = str(Path(directory) / "meeting")

        def setup(rank: int) -> Setup:
            name = pools.pools[rank].name
            assert name is not None, "ranks find their pool by its name"
            return Setup(
                rank,
                options.tp_size,
                str(model_dir),
                options.dtype,
                name,
                options.num_threads,
                meeting,
                options.deadline_s,
            )

        group = RankGroup([setup(rank) for rank in range(1, options.tp_size)])
        try:
            share = shares(config, options.tp_size)[0]
            part = RankModel(config, weights, share, pools.pools[0].layout, options.dtype)
            group.wait_ready(options.deadline_s)
            try:
                part.sums = Sums(meeting, 0, options.tp_size, options.deadline_s)
            except RuntimeError as error:
                raise LocalError(f"the ranks of this worker do not find each other: {error}", field="tp") from error
            return TensorParallelModel(config, part, group), RankKVPool(pools)
        except BaseException:
            group.close()
            raise
