"""One rank's part of a model in plain torch: its heads, its part of the MLP, and a sum over all ranks after each.

Invariants: every rank has the same hidden state, for it has the same embedding and adds the same sums; ``on_layer`` is
called when *every* rank has the layer's K and V in its pool, since each stores them before it joins the layer's first
sum. Sums are made in float32, whatever the compute dtype.

Knows nothing about processes or how steps are agreed on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from kvbaton.engine.model import StepInput
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.pool import KVPool
from kvbaton.engine.shares import Share, ShareWeights
from kvbaton.engine.torch_model import Layer, Linear, TorchModel, Weights
from kvbaton.kv.layout import KVLayout


class SumsOverRanks(Protocol):
    def add(self, tensor: Tensor) -> None:
        """``tensor``, float32, becomes the sum of those of all ranks."""
        ...


@dataclass(frozen=True)
class _SummedLinear(Linear):
    """A product whose columns are shared by the ranks."""

    model: RankModel
    layer: int | None = None  # whose attention this ends

    def __call__(self, x: Tensor) -> Tensor:
        part = super().__call__(x)
        whole = part.float().contiguous()
        self.model.add(whole, self.layer)
        return whole.to(part.dtype)


class RankModel(TorchModel):
    """``layout`` is that of this rank's pool; ``config`` and ``weights`` are the whole model's. Set ``sums``, then run.

    ``sums`` comes late because ranks should not wait for each other while they read weights.
    """

    def __init__(self, config: ModelConfig, weights: Weights, share: Share, layout: KVLayout, dtype: str) -> None:
        self.sums: SumsOverRanks | None = None
        self._on_layer: Callable[[int], None] | None = None
        super().__init__(share.config(config), ShareWeights(weights, config, share), layout, dtype)

    def _layer(self, weights: Weights, layer: int) -> Layer:
        part = super()._layer(weights, layer)
        return replace(
            part,
            output=_SummedLinear(part.output.weight, part.output.bias, self, layer),
            down=_SummedLinear(part.down.weight, part.down.bias, self),
        )

    def add(self, tensor: Tensor, layer: int | None) -> None:
        assert self.sums is not None, "set them before the first step"
        self.sums.add(tensor)
        if layer is not None and self._on_layer is not None:
            self._on_layer(layer)

    def forward(self, step: StepInput, kv: KVPool, on_layer: Callable[[int], None] | None = None) -> np.ndarray:
        self._on_layer = on_layer
        return super().forward(step, kv)
