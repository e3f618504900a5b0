"""What each rank of a tensor-parallel worker computes: which heads, which part of the MLP, which slices of the weights.

    q, k, v, gate, up    cut by rows: each rank has its heads, and its part of the MLP's inner dimension
    o, down              cut by columns: each rank's product is a part of a sum
    everything else      whole on every rank

Query heads go with the KV head that they share. KV heads that do not divide evenly are spread as evenly as they can be;
with more ranks than KV heads each is held by several ranks, which share its query heads. Invariant: the parts of every
cut tensor, put together, are the tensor, each number once (but for KV heads held several times).

Knows nothing about processes or how the sums come about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvbaton.engine.model_config import ModelConfig
from kvbaton.kv.reshard import HeadRange, even_ranges, head_ranges
from kvbaton.types import LocalError


@dataclass(frozen=True)
class Share:
    """Of one rank. All ranges are of the whole model's."""

    rank: int
    kv_heads: HeadRange
    heads: HeadRange
    inner: range  # of the MLP's inner dimension

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The model that this rank computes, but for the sums over all ranks."""
        return replace(
            whole,
            num_heads=self.heads.num_heads,
            num_kv_heads=self.kv_heads.num_heads,
            intermediate_size=len(self.inner),
        )


def shares(config: ModelConfig, tp_size: int) -> list[Share]:
    """One for each rank. LocalError with the field ``tp`` when the heads cannot be shared by so many."""
    group = config.num_heads // config.num_kv_heads
    ranks_per_head = max(1, tp_size // config.num_kv_heads)
    if ranks_per_head > group or tp_size > config.intermediate_size:
        raise LocalError(
            f"{config.num_heads} heads cannot be shared by {tp_size} ranks",
            field="tp",
            fix=f"use up to {config.num_heads}",
        )
    try:
        kv_heads = head_ranges(config.num_kv_heads, tp_size)
    except LocalError as error:
        raise LocalError(f"tensor parallelism of {tp_size}: {error}", field="tp") from None
    within = even_ranges(group, ranks_per_head)  # which of a KV head's query heads, where several ranks hold it
    inner = even_ranges(config.intermediate_size, tp_size)
    found = []
    for rank, held in enumerate(kv_heads):
        heads = HeadRange(held.start * group, held.stop * group)
        if ranks_per_head > 1:
            part = within[rank % ranks_per_head]
            heads = HeadRange(held.start * group + part.start, held.start * group + part.stop)
        found.append(Share(rank, held, heads, inner[rank]))
    return found


class ShareWeights(Mapping[str, np.ndarray]):
    """The whole model's tensors as one rank needs them; each is cut when it is asked for."""

    def __init__(self, whole: Mapping[str, np.ndarray], config: ModelConfig, share: Share) -> None:
        self._whole = whole
        self._first = share.rank == 0
        query, key = _vectors(share.heads, config.head_dim), _vectors(share.kv_heads, config.head_dim)
        inner = slice(share.inner.start, share.inner.stop)
        self._rows = {"q_proj": query, "k_proj": key, "v_proj": key, "gate_proj": inner, "up_proj": inner}
        self._columns = {"o_proj": query, "down_proj": inner}

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._whole[name]
        *_, module, kind = name.split(".")
        if module in self._rows:
            return tensor[self._rows[module]]
        if module in self._columns:
            if kind == "weight":
                return tensor[:, self._columns[module]]
            return tensor if self._first else np.zeros_like(tensor)  # a sum has its bias once
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def _vectors(heads: HeadRange, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)
