"""A model in plain torch over the paged pool: any device, and the reference that the native kernels are tested against.

Follows transformers' order of rounding (norms and rotary angles in float32, results in the compute dtype), so that its
logits can be compared with theirs. Clarity first: one attention call per sequence and layer over that sequence's own
keys, gathered from its blocks; never a key of another sequence, so one sequence's bad numbers cannot reach another.

Not batch-invariant: a library product may round a row differently when the batch grows. Differences stay at the last
bits (float32: about 1e-5 in logits). The native kernels give the stronger promise.

Knows nothing about requests, sampling or who owns a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kvbaton.engine.model import StepInput
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.pool import KVPool
from kvbaton.kv.layout import KVLayout
from kvbaton.types import LocalError

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
}
Weights = Mapping[str, np.ndarray]
FLOAT8_LARGEST = 448.0  # torch turns what is larger into NaN; we saturate


@dataclass(frozen=True)
class Linear:
    weight: Tensor  # [rows, columns]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    qkv: Linear  # query, key and value rows in one product
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class _Span:
    """One sequence's part of a step."""

    rows: slice  # of the step
    blocks: Tensor  # its blocks, enough for its context
    start: int  # position of its first row
    context: int  # tokens in the pool once the step has run


class TorchModel:
    """``engine.model.Model`` in plain torch."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        layout: KVLayout,
        dtype: str = "bfloat16",
        device: str = "cpu",
    ) -> None:
        if dtype not in COMPUTE_DTYPES:
            raise LocalError(
                f"compute dtype {dtype!r} is unknown", field="dtype", fix=f"use {', '.join(COMPUTE_DTYPES)}"
            )
        self.config = config
        self.layout = layout
        self._dtype = COMPUTE_DTYPES[dtype]
        self._device = torch.device(device)
        self._inv_freq = torch.from_numpy(config.inv_freq).to(self._device)
        with torch.inference_mode():
            self._embedding = self._tensor(weights, "model.embed_tokens.weight")
            self._layers = [self._layer(weights, layer) for layer in range(config.num_layers)]
            self._final_norm = self._tensor(weights, "model.norm.weight")
            self._head = self._embedding if config.tie_embeddings else self._tensor(weights, "lm_head.weight")

    def _tensor(self, weights: Weights, name: str) -> Tensor:
        return torch.from_numpy(weights[name]).to(self._device, self._dtype)

    def _linear(self, weights: Weights, prefix: str, names: tuple[str, ...], bias: bool) -> Linear:
        """One product out of several that share their input: their rows, stacked."""
        weight = torch.cat([self._tensor(weights, f"{prefix}{name}.weight") for name in names])
        if not bias:
            return Linear(weight, None)
        return Linear(weight, torch.cat([self._tensor(weights, f"{prefix}{name}.bias") for name in names]))

    def _layer(self, weights: Weights, layer: int) -> Layer:
        config, prefix = self.config, f"model.layers.{layer}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return Layer(
            input_norm=self._tensor(weights, f"{prefix}input_layernorm.weight"),
            qkv=self._linear(weights, attention, ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
            query_norm=self._tensor(weights, f"{attention}q_norm.weight") if config.qk_norm else None,
            key_norm=self._tensor(weights, f"{attention}k_norm.weight") if config.qk_norm else None,
            output=self._linear(weights, attention, ("o_proj",), config.o_bias),
            mlp_norm=self._tensor(weights, f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._linear(weights, mlp, ("gate_proj", "up_proj"), config.mlp_bias),
            down=self._linear(weights, mlp, ("down_proj",), config.mlp_bias),
        )

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: KVPool, on_layer: Callable[[int], None] | None = None) -> np.ndarray:
        pool = self._pool_view(kv)
        spans = self._spans(step)
        slots = self._slots(step)
        cos, sin = self._rotary(step)
        hidden = self._embedding[self._indices(step.token_ids)]
        for index, layer in enumerate(self._layers):
            query, key, value = self._query_key_value(layer, hidden, cos, sin)
            self._store(pool[index], slots, key, value)
            if on_layer is not None:
                on_layer(index)
            mixed = self._attention(pool[index], spans, query, self.config.sliding_window[index])
            hidden = hidden + layer.output(mixed)
            gate, up = layer.gate_up(self._norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(functional.silu(gate) * up)
        last = self._norm(hidden[self._indices(step.sample_rows)], self._final_norm)
        return functional.linear(last, self._head).float().cpu().numpy()

    def _indices(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _pool_view(self, kv: KVPool) -> Tensor:
        """The pool's bytes as [layer, block, K or V, head, token, dim] (order HND), or token before head (NHD).

        float8 stays bytes: torch moves it but cannot index into it on every device.
        """
        assert kv.layout == self.layout, "the pool must have the layout the model was built for"
        flat = kv.device_tensor if kv.device_tensor is not None else torch.from_numpy(kv.buffer)
        if self.layout.dtype != "float8_e4m3":
            flat = flat.view(KV_DTYPES[self.layout.dtype])
        return flat.view(self.layout.shape(kv.num_blocks))

    def _spans(self, step: StepInput) -> list[_Span]:
        table = self._indices(step.block_table)
        spans = []
        for s, context in enumerate(step.context_lens.tolist()):
            first, stop = int(step.seq_starts[s]), int(step.seq_starts[s + 1])
            blocks = table[s, : self.layout.blocks_for(context)]
            spans.append(_Span(slice(first, stop), blocks, int(step.positions[first]), context))
        return spans

    def _slots(self, step: StepInput) -> tuple[Tensor, Tensor]:
        """Block and place in the block of each row."""
        sequence_of_row = np.repeat(np.arange(len(step.context_lens)), np.diff(step.seq_starts))
        blocks = step.block_table[sequence_of_row, step.positions // self.layout.block_size]
        return self._indices(blocks), self._indices(step.positions % self.layout.block_size)

    def _rotary(self, step: StepInput) -> tuple[Tensor, Tensor]:
        """cos and sin of each row's angles, [T, 1, head_dim / 2], computed in float32."""
        positions = torch.from_numpy(step.positions.astype(np.float32)).to(self._device)
        angles = (positions[:, None] * self._inv_freq[None, :])[:, None, :]
        factor = self.config.rope_attention_factor
        return (angles.cos() * factor).to(self._dtype), (angles.sin() * factor).to(self._dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_eps)
        return weight * scaled.to(x.dtype)

    def _query_key_value(self, layer: Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """[T, heads, head_dim] each; query and key normed (Qwen3) and rotated."""
        config = self.config
        projected = layer.qkv(self._norm(hidden, layer.input_norm)).view(len(hidden), -1, config.head_dim)
        query, key, value = projected.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        return _rotate(query, cos, sin), _rotate(key, cos, sin), value

    def _store(self, pool: Tensor, slots: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
        blocks, places = slots
        for which, rows in enumerate((key, value)):
            if self.layout.dtype == "float8_e4m3":
                saturated = rows.float().clamp(-FLOAT8_LARGEST, FLOAT8_LARGEST)
                rows = saturated.to(torch.float8_e4m3fn).view(torch.uint8)
            else:
                rows = rows.to(pool.dtype)
            if self.layout.order == "HND":
                pool[blocks, which, :, places] = rows
            else:
                pool[blocks, which, places] = rows

    def _gather(self, pool: Tensor, blocks: Tensor) -> Tensor:
        """[K or V, head, token, head_dim] of one sequence's ``blocks``, in the compute dtype."""
        found = pool[blocks]
        if self.layout.dtype == "float8_e4m3":
            found = found.view(torch.float8_e4m3fn)
        # Bring (block, token) together, whichever order the layout has.
        order = (1, 2, 0, 3, 4) if self.layout.order == "HND" else (1, 3, 0, 2, 4)
        return found.to(self._dtype).permute(order).reshape(2, self.config.num_kv_heads, -1, self.config.head_dim)

    def _attention(self, pool: Tensor, spans: list[_Span], query: Tensor, window: int | None) -> Tensor:
        mixed = torch.empty_like(query)
        for span in spans:
            oldest = 0 if window is None else max(0, span.start - window + 1)
            first_block = oldest // self.layout.block_size
            first_key = first_block * self.layout.block_size
            found = self._gather(pool, span.blocks[first_block:])[:, :, : span.context - first_key]
            attended = functional.scaled_dot_product_attention(
                query[span.rows].transpose(0, 1)[None],
                found[0][None],
                found[1][None],
                attn_mask=self._mask(span, first_key, window),
                is_causal=_is_plainly_causal(span, window),
                enable_gqa=self.config.num_heads != self.config.num_kv_heads,
            )
            mixed[span.rows] = attended[0].transpose(0, 1)
        return mixed.reshape(len(query), -1)

    def _mask(self, span: _Span, first_key: int, window: int | None) -> Tensor | None:
        """[rows, keys], True where a row may look; None where no mask is needed: everything gathered, or causal."""
        num_rows = span.rows.stop - span.rows.start
        if (num_rows == 1 and window is None) or _is_plainly_causal(span, window):
            return None
        rows = torch.arange(span.start, span.start + num_rows, device=self._device)[:, None]
        keys = torch.arange(first_key, span.context, device=self._device)[None, :]
        allowed = keys <= rows
        return allowed if window is None else allowed & (keys > rows - window)


def _is_plainly_causal(span: _Span, window: int | None) -> bool:
    """A prompt from its start: rows and keys are the same, which attention kernels know without a mask."""
    return span.start == 0 and window is None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) of every head by its row's angles."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
