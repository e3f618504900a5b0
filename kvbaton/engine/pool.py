"""The KV pool as the engine sees it: bytes, generations, and on an accelerator the device copy.

On a CPU the shared (or anonymous) host segment *is* the pool. On an accelerator the model works on a device tensor and
the host segment is the window through which a hand-off works: ``stage_out`` after a layer, ``stage_in`` before
the first decode step. Knows nothing about who owns a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvbaton.kv.layout import KVLayout
from kvbaton.kv.shared_pool import SharedPool

if TYPE_CHECKING:
    import torch


class KVPool:
    """``num_blocks`` blocks of ``layout``."""

    def __init__(self, shared: SharedPool, device: str = "cpu") -> None:
        self.shared = shared
        self.layout: KVLayout = shared.layout
        self.num_blocks: int = shared.num_blocks
        self.buffer: np.ndarray = shared.buffer  # uint8 [pool bytes], host
        self.generations: np.ndarray = shared.generations  # uint64 [num_blocks]
        self.device = device
        self.device_tensor: torch.Tensor | None = None
        if device != "cpu":
            import torch

            self.device_tensor = torch.zeros(self.layout.pool_bytes(self.num_blocks), dtype=torch.uint8, device=device)

    def publish_generation(self, block: int, generation: int) -> None:
        """Tell readers in other processes that ``block`` no longer holds what they were offered."""
        self.generations[block] = generation

    def _regions(self, layer: int, blocks: Sequence[int]) -> list[tuple[int, int]]:
        size = self.layout.layer_block_bytes
        return [(start, start + size) for start in (self.layout.offset(layer, b, self.num_blocks) for b in blocks)]

    def stage_out(self, layer: int, blocks: Sequence[int]) -> None:
        """Device to host for one layer of ``blocks``; nothing to do on a CPU."""
        if self.device_tensor is None:
            return
        for start, stop in self._regions(layer, blocks):
            self.buffer[start:stop] = self.device_tensor[start:stop].cpu().numpy()

    def stage_in(self, blocks: Sequence[int]) -> None:
        """Host to device for every layer of ``blocks``; nothing to do on a CPU."""
        if self.device_tensor is None:
            return
        import torch

        for layer in range(self.layout.num_layers):
            for start, stop in self._regions(layer, blocks):
                self.device_tensor[start:stop] = torch.from_numpy(self.buffer[start:stop]).to(self.device)

    def close(self) -> None:
        self.device_tensor = None
        self.shared.close()
