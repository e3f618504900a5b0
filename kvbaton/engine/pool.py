"""The KV pool as the engine sees it: bytes, generations, and on an accelerator the device copy.

On a CPU the shared (or anonymous) host segment *is* the pool. On an accelerator the model works on a device tensor and
the host segment is the window through which a hand-off works: ``stage_out`` after a layer, ``stage_in`` before
the first decode step. Any device name but "cpu" makes such a copy, "cpu:0" too: so the way of an accelerator can be
tested without one. Knows nothing about who owns a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvbaton.kv.layout import KVLayout
from kvbaton.kv.rank_pools import AnyPool
from kvbaton.kv.shared_pool import SharedPool

if TYPE_CHECKING:
    import torch


MIN_STAGED_BLOCKS = 64  # of pinned memory, so that a few long prompts settle its size


class KVPool:
    """``num_blocks`` blocks of ``layout``."""

    def __init__(self, shared: SharedPool, device: str = "cpu") -> None:
        self.shared = shared
        self.whole: AnyPool = shared  # what peers are shown: of several ranks, the pools of all
        self.layout: KVLayout = shared.layout
        self.num_blocks: int = shared.num_blocks
        self.buffer: np.ndarray = shared.buffer  # uint8 [pool bytes], host
        self.generations: np.ndarray = shared.generations  # uint64 [num_blocks]
        self.device = device
        self.device_tensor: torch.Tensor | None = None
        self._staged: torch.Tensor | None = None
        if device != "cpu":
            import torch

            self.device_tensor = torch.zeros(self.layout.pool_bytes(self.num_blocks), dtype=torch.uint8, device=device)

    def publish_generation(self, block: int, generation: int) -> None:
        """Tell readers in other processes that ``block`` no longer holds what they were offered."""
        self.generations[block] = generation

    def stage_out(self, layer: int, blocks: Sequence[int]) -> None:
        """Device to host for one layer of ``blocks``, in place when this returns; nothing to do on a CPU."""
        if self.device_tensor is None or not blocks:
            return
        import torch

        staged = self._staging(len(blocks))
        with torch.inference_mode():  # a step is in it already when it calls this, and the two do not mix
            places = torch.tensor(blocks, device=self.device_tensor.device)
            staged.copy_(self._device_layer(layer).index_select(0, places), non_blocking=True)
        self._wait()
        self.shared.view()[layer, list(blocks)] = staged.numpy()

    def stage_in(self, blocks: Sequence[int]) -> None:
        """Host to device for every layer of ``blocks``; nothing to do on a CPU."""
        if self.device_tensor is None or not blocks:
            return
        import torch

        staged = self._staging(len(blocks))
        with torch.inference_mode():
            places = torch.tensor(blocks, device=self.device_tensor.device)
            for layer in range(self.layout.num_layers):
                np.take(self.shared.view()[layer], blocks, axis=0, out=staged.numpy())
                arrived = staged.to(self.device_tensor.device, non_blocking=True)
                self._device_layer(layer).index_copy_(0, places, arrived)
                self._wait()  # before the staging memory is written again

    def _device_layer(self, layer: int) -> torch.Tensor:
        """One layer of the device's pool as bytes [block, bytes of one block in one layer]."""
        assert self.device_tensor is not None
        return self.device_tensor.view(self.layout.num_layers, self.num_blocks, -1)[layer]

    def _staging(self, num_blocks: int) -> torch.Tensor:
        """Host memory [num_blocks, bytes], pinned for CUDA: a copy out of other memory goes through one the driver has.

        Kept and grown, because pinning takes longer than copying. One engine thread uses it.
        """
        import torch

        if self._staged is None or len(self._staged) < num_blocks:
            size = (max(num_blocks, MIN_STAGED_BLOCKS), self.layout.layer_block_bytes)
            with torch.inference_mode():
                self._staged = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.startswith("cuda"))
        return self._staged[:num_blocks]

    def _wait(self) -> None:
        """Until what was asked of the device is done."""
        assert self.device_tensor is not None
        if self.device_tensor.is_cuda:
            import torch

            torch.cuda.current_stream(self.device_tensor.device).synchronize()

    def close(self) -> None:
        self.device_tensor = self._staged = None
        self.whole.close()
