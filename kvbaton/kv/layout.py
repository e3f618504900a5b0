"""Where each byte of the KV cache lives.

A pool is one contiguous buffer, indexed ``[layer][block][K=0,V=1][kv_head][token in block][head_dim]`` for order
``HND`` (what the engine uses) or ``[layer][block][K,V][token in block][kv_head][head_dim]`` for ``NHD``. So one
(layer, block) is one contiguous region, and a run of adjacent blocks of one layer is one copy.

    layer 0                                   layer 1
    | block 0 K | block 0 V | block 1 K | ... | block 0 K | ...

Knows nothing about torch, sequences or who owns a block.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvbaton.types import LocalError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}


class KVLayout(msgspec.Struct, frozen=True):
    """Shape of one worker's KV pool. All sizes in bytes unless the name says otherwise."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens per block
    dtype: str
    order: Literal["HND", "NHD"] = "HND"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise LocalError(f"{name} must be at least 1, got {getattr(self, name)}", field=name)
        if self.dtype not in DTYPE_BYTES:
            raise LocalError(
                f"unknown KV dtype {self.dtype!r}", field="dtype", fix=f"use one of {', '.join(DTYPE_BYTES)}"
            )

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers: 2 (K and V) x layers x KV heads x head dim x itemsize."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer, K and V together."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.layer_block_bytes * self.num_layers

    def pool_bytes(self, num_blocks: int) -> int:
        return self.block_bytes * num_blocks

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """Array shape of the whole pool."""
        inner = (self.num_kv_heads, self.block_size) if self.order == "HND" else (self.block_size, self.num_kv_heads)
        return (self.num_layers, num_blocks, 2, *inner, self.head_dim)

    def offset(self, layer: int, block: int, num_blocks: int) -> int:
        """Byte offset of (layer, block) in a pool of ``num_blocks``."""
        assert 0 <= layer < self.num_layers and 0 <= block < num_blocks
        return (layer * num_blocks + block) * self.layer_block_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens, the last one maybe partly."""
        return -(-num_tokens // self.block_size)
