"""How many bytes the cache of a model takes: per token, per sequence, per rank, per block, and over a link at best.

Every figure has its basis in its name: *logical* counts what attention still needs (window layers stop at the
window); *unified* counts what an engine with one block table for all layers allocates, which is what our own pool does
(kv/layout has no per-layer block count).

Knows nothing about config files (model_shape) or measured links (link).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvbaton.plan.model_shape import LayerKV, ModelShape
from kvbaton.types import LocalError

Basis = Literal["unified", "logical"]


class KVFormat(msgspec.Struct, frozen=True):
    """How cached numbers are stored, scales included."""

    name: str
    data_bits: int
    scale_bytes: int = 0  # for each group of numbers, or for each head and token where group is 0
    group_elements: int = 0

    def bytes_for(self, elements: int, head_vectors: int) -> int:
        """Bytes of ``elements`` numbers that form ``head_vectors`` per-head key or value vectors."""
        data = -(-elements * self.data_bits // 8)
        if not self.scale_bytes:
            return data
        groups = head_vectors if self.group_elements == 0 else -(-elements // self.group_elements)
        return data + groups * self.scale_bytes


FORMATS = {
    each.name: each
    for each in (
        KVFormat("float32", 32),
        KVFormat("bfloat16", 16),
        KVFormat("float16", 16),
        KVFormat("fp8", 8),  # per-tensor scales are a few bytes a layer, not a token
        KVFormat("int8", 8),
        KVFormat("mxfp8", 8, scale_bytes=1, group_elements=32),
        KVFormat("int8_token_head", 8, scale_bytes=4),
        KVFormat("nvfp4", 4, scale_bytes=1, group_elements=16),
        KVFormat("int4_g32", 4, scale_bytes=2, group_elements=32),
    )
}
FORMAT_ALIASES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8_e4m3": "fp8", "float8_e4m3fn": "fp8", "fp8_block32": "mxfp8",
}  # fmt: skip


def kv_format(name: str, shape: ModelShape) -> KVFormat:
    """The effective format: ``auto`` is the checkpoint's declared KV scheme, else its activation dtype.

    The weights' quantisation never decides it: a 4-bit checkpoint keeps a 16-bit cache.
    """
    if name == "auto":
        name = shape.kv_scheme or shape.dtype
    return _form(name, "kv_dtype")


def _form(name: str, field: str) -> KVFormat:
    name = FORMAT_ALIASES.get(name.lower(), name.lower())
    if name not in FORMATS:
        raise LocalError(f"unknown dtype {name!r}", field=field, fix=f"use one of {', '.join(FORMATS)}")
    return FORMATS[name]


class Sharding(msgspec.Struct, frozen=True):
    """How one worker spreads one sequence. Data parallelism is not here: it never divides a request."""

    tp: int = 1
    pp: int = 1
    cp: int = 1  # context parallel: tokens of one sequence spread over ranks
    dp: int = 1  # replicas inside one worker: multiplies how many requests fit

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "dp"):
            if getattr(self, name) < 1:
                raise LocalError(f"{name} must be at least 1, got {getattr(self, name)}", field=name)

    @property
    def num_gpus(self) -> int:
        """GPUs of one worker: every kind of parallelism multiplies it."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def label(self) -> str:
        return f"tp{self.tp} pp{self.pp} cp{self.cp} dp{self.dp}"


def rank_heads(num_kv_heads: int, tp: int) -> int:
    """KV heads one rank holds: split evenly, or replicated when there are more ranks than heads."""
    if tp <= num_kv_heads:
        if num_kv_heads % tp:
            raise LocalError(f"{num_kv_heads} KV heads cannot be split over tp {tp}", field="tp")
        return num_kv_heads // tp
    if tp % num_kv_heads:
        raise LocalError(f"tp {tp} is no multiple of {num_kv_heads} KV heads, so they cannot be replicated", field="tp")
    return 1


def layer_token_bytes(layer: LayerKV, form: KVFormat, tp: int = 1) -> int:
    """Bytes one token adds to one layer on one rank, while the layer grows."""
    if layer.kind in ("state", "reused", "none"):
        return 0
    if layer.kind == "latent":  # one latent for all heads: tensor parallelism replicates it
        return form.bytes_for(layer.elements, 1) + layer.extra_token_bytes
    heads = rank_heads(layer.num_kv_heads, tp)
    vectors = heads * ((layer.key_dim > 0) + (layer.value_dim > 0))
    return form.bytes_for(heads * (layer.key_dim + layer.value_dim), vectors) + layer.extra_token_bytes


def layer_fixed_bytes(layer: LayerKV, shape: ModelShape, tp: int = 1) -> int:
    """Bytes one sequence holds in one layer whatever its length."""
    recurrent = conv = 0
    if layer.recurrent_elements:
        recurrent = _form(shape.state_dtype, "mamba_ssm_dtype").bytes_for(layer.recurrent_elements, 1)
    if layer.conv_elements:
        conv = _form(shape.dtype, "torch_dtype").bytes_for(layer.conv_elements, 1)
    return -(-(recurrent + conv + layer.state_bytes) // tp)


class KVCost(msgspec.Struct, frozen=True):
    """The cache of one model in one format, on one rank of one sharding (the fullest pipeline stage)."""

    shape: ModelShape
    form: KVFormat
    sharding: Sharding = Sharding()

    def stage_layers(self) -> tuple[LayerKV, ...]:
        """Layers of the pipeline stage that holds most bytes a token."""
        pp, layers = self.sharding.pp, self.shape.layers
        if pp > len(layers):
            raise LocalError(f"pp {pp} exceeds the {len(layers)} layers", field="pp")
        size, rest = divmod(len(layers), pp)
        stages, start = [], 0
        for stage in range(pp):
            stop = start + size + (stage < rest)
            stages.append(layers[start:stop])
            start = stop
        return max(
            stages, key=lambda stage: sum(layer_token_bytes(each, self.form, self.sharding.tp) for each in stage)
        )

    @property
    def token_bytes(self) -> int:
        """Bytes one more token takes on one rank while no window is full."""
        return sum(layer_token_bytes(layer, self.form, self.sharding.tp) for layer in self.stage_layers())

    @property
    def steady_token_bytes(self) -> int:
        """Bytes one more token takes on one rank once every window is full (logical basis)."""
        grows = (layer for layer in self.stage_layers() if layer.window is None)
        return sum(layer_token_bytes(layer, self.form, self.sharding.tp) for layer in grows)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of constant state of one sequence on one rank."""
        return sum(layer_fixed_bytes(layer, self.shape, self.sharding.tp) for layer in self.stage_layers())

    def sequence_bytes(self, num_tokens: int, basis: Basis = "unified", block_size: int = 1) -> int:
        """Bytes of one sequence on one rank, rounded up to whole blocks."""
        total = self.fixed_bytes
        for layer in self.stage_layers():
            kept = num_tokens
            if basis == "logical" and layer.window is not None:
                kept = min(kept, layer.window)
            kept = -(-kept // self.sharding.cp)
            total += -(-kept // block_size) * block_size * layer_token_bytes(layer, self.form, self.sharding.tp)
        return total

    def capacity_tokens(self, budget_bytes: int, num_sequences: int = 1) -> int:
        """Tokens that fit ``budget_bytes`` of one rank beside the constant state of ``num_sequences``."""
        left = budget_bytes - num_sequences * self.fixed_bytes
        if left < 0:
            raise LocalError(
                f"the constant state of {num_sequences} sequences alone exceeds {budget_bytes} bytes",
                field="budget_bytes",
                fix="fewer sequences or more memory",
            )
        return left // self.token_bytes if self.token_bytes else left

    def wire_bytes(self, num_tokens: int, block_size: int = 1) -> int:
        """Distinct bytes of one prompt that must cross a link once (replicas are read once), block-rounded."""
        return msgspec.structs.replace(self, sharding=Sharding()).sequence_bytes(num_tokens, "unified", block_size)

    def formula(self) -> list[str]:
        """The arithmetic with its numbers, one line for each group of equal layers."""
        lines = []
        for layer, count in grouped(self.stage_layers()):
            lines.append(_formula_line(layer, count, self))
        return lines


def grouped(layers: tuple[LayerKV, ...]) -> list[tuple[LayerKV, int]]:
    """Equal layers with their count, in order of first appearance."""
    counts: dict[LayerKV, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    return list(counts.items())


def _formula_line(layer: LayerKV, count: int, cost: KVCost) -> str:
    tp = cost.sharding.tp
    per_token = layer_token_bytes(layer, cost.form, tp)
    fixed = layer_fixed_bytes(layer, cost.shape, tp)
    bytes_each = cost.form.data_bits / 8
    scales = f" + {cost.form.name} scales" if cost.form.scale_bytes else ""
    if layer.kind in ("reused", "none"):
        word = "share another layer's cache" if layer.kind == "reused" else "have no cache"
        return f"{count} layers {word}: 0"
    if layer.kind == "state":
        return f"{count} state layers x {fixed:,} B = {count * fixed:,} B a sequence, 0 a token"
    if layer.kind == "latent":
        text = f"{count} latent layers x {layer.key_dim} numbers (latent + rotary, once) x {bytes_each:g} B{scales}"
        if layer.extra_token_bytes:
            text += f" + {layer.extra_token_bytes} B indexer key"
        if tp > 1:
            text += f" (tp {tp} does not divide it)"
    else:
        heads = rank_heads(layer.num_kv_heads, tp)
        dims = f"2 x {layer.key_dim}" if layer.key_dim == layer.value_dim else f"({layer.key_dim} + {layer.value_dim})"
        text = f"{count} {layer.kind} layers x {heads} KV heads x {dims} x {bytes_each:g} B{scales}"
        if layer.window is not None:
            text += f" up to {layer.window:,} tokens"
        if tp > layer.num_kv_heads:
            text += f" (each head on {tp // layer.num_kv_heads} ranks)"
    text += f" = {count * per_token:,} B a token"
    return text + (f" + {count * fixed:,} B a sequence" if fixed else "")
