"""The answer of ``kvbaton kv``: cache bytes of a model and what moving a prompt costs on each fabric.

Knows nothing about the command line; the CLI prints what ``describe`` returns.
"""

from __future__ import annotations

import msgspec

from kvbaton.plan.hardware import FABRICS, Fabric, Gpu
from kvbaton.plan.kv_math import KVCost, grouped, layer_token_bytes
from kvbaton.plan.model_weights import count_weights
from kvbaton.types import LocalError

GIB = 1 << 30


class FabricRow(msgspec.Struct, frozen=True):
    """Moving one prompt over one fabric."""

    fabric: str
    floor_s: float
    expected_s: float
    worst_s: float
    share_of_prefill: float | None
    verdict: str


class PromptRow(msgspec.Struct, frozen=True):
    prompt_tokens: int
    rank_bytes: int  # on the fullest rank, unified pages, block-rounded
    logical_bytes: int  # on the fullest rank, windows stop growing
    wire_bytes: int  # distinct bytes to move, block-rounded
    prefill_s: float | None
    fabrics: tuple[FabricRow, ...]


class KVAnswer(msgspec.Struct, frozen=True):
    model: str
    kv_dtype: str
    basis: str
    token_bytes: int
    steady_token_bytes: int
    fixed_bytes: int
    num_gpus_per_worker: int
    formula: tuple[str, ...]
    notes: tuple[str, ...]
    by_kind: dict[str, int]
    prompts: tuple[PromptRow, ...]


BASIS = "unified pages: every layer keeps every token, as one block table for all layers allocates (ours does)"


def verdict_word(share: float | None) -> str:
    """One transfer as a share of the prefill it follows, in words."""
    if share is None:
        return "unknown: the weights cannot be counted"
    if share <= 0.05:
        return "negligible"
    if share <= 0.5:
        return "hides behind prefill if sent layer by layer"
    if share <= 1.0:
        return "visible: only layer-wise overlap hides it"
    return "dominates: do not split over it"


def prefill_estimate_s(cost: KVCost, gpu: Gpu, prompt_tokens: int, mfu: float = 0.5) -> float | None:
    """A rough prefill time on one worker: products and attention at ``mfu`` of the peak. None if not countable."""
    try:
        weights = count_weights(cost.shape)
    except LocalError:
        return None
    flops = 2.0 * weights.active * prompt_tokens + 2.0 * weights.attention_width * prompt_tokens**2
    ranks = cost.sharding.tp * cost.sharding.pp * cost.sharding.cp
    return flops / (gpu.flops(16) * mfu * ranks)


def describe(cost: KVCost, prompts: tuple[int, ...], gpu: Gpu, block_size: int = 1,
             fabrics: tuple[Fabric, ...] = tuple(FABRICS.values())) -> KVAnswer:  # fmt: skip
    """Everything the command prints."""
    by_kind: dict[str, int] = {}
    for layer, count in grouped(cost.stage_layers()):
        by_kind[layer.kind] = by_kind.get(layer.kind, 0) + count * layer_token_bytes(layer, cost.form, cost.sharding.tp)
    return KVAnswer(
        model=cost.shape.name,
        kv_dtype=cost.form.name,
        basis=BASIS,
        token_bytes=cost.token_bytes,
        steady_token_bytes=cost.steady_token_bytes,
        fixed_bytes=cost.fixed_bytes,
        num_gpus_per_worker=cost.sharding.num_gpus,
        formula=tuple(cost.formula()),
        notes=cost.shape.notes,
        by_kind=by_kind,
        prompts=tuple(_prompt_row(cost, tokens, gpu, block_size, fabrics) for tokens in prompts),
    )


def _prompt_row(cost: KVCost, tokens: int, gpu: Gpu, block_size: int, fabrics: tuple[Fabric, ...]) -> PromptRow:
    wire = cost.wire_bytes(tokens, block_size)
    prefill_s = prefill_estimate_s(cost, gpu, tokens)
    rows = []
    for each in fabrics:
        expected_s = each.expected_s(wire)
        share = None if prefill_s is None else expected_s / prefill_s
        worst_s = each.startup_ms / 1e3 + wire / (each.gb_per_s * 1e9 * each.efficiency_low)
        rows.append(FabricRow(each.name, each.floor_s(wire), expected_s, worst_s, share, verdict_word(share)))
    return PromptRow(
        prompt_tokens=tokens,
        rank_bytes=cost.sequence_bytes(tokens, "unified", block_size),
        logical_bytes=cost.sequence_bytes(tokens, "logical", block_size),
        wire_bytes=wire,
        prefill_s=prefill_s,
        fabrics=tuple(rows),
    )
