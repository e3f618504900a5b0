"""How many weights a model has, and how many one token uses: what the roofline needs besides the cache.

Covers decoders with gated MLPs, mixtures of experts and latent attention. Where a layer kind is not covered the answer
is an error that asks for ``num_params``; biases and norms (below 0.1%) are left out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.plan.model_shape import LayerKV, ModelShape
from kvbaton.types import LocalError


class Weights(msgspec.Struct, frozen=True):
    """Counts of weights, not bytes."""

    total: int
    active: int  # that one token multiplies, output head included, embedding table not
    attention_width: int  # sum over layers of query heads x head dim: scores and values cost 4 x width x context FLOPs
    moe_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_weights: int = 0  # of one routed expert in one layer

    def touched(self, num_tokens: float) -> float:
        """Expected weights read by a step of ``num_tokens`` tokens: experts are drawn, the rest is always read."""
        if not self.experts or num_tokens <= 0:
            return float(self.active)
        hit = 1.0 - (1.0 - self.experts_per_token / self.experts) ** num_tokens
        routed = self.moe_layers * self.expert_weights
        return self.active - routed * self.experts_per_token + routed * self.experts * hit


def count_weights(shape: ModelShape, num_params: int | None = None, active_params: int | None = None) -> Weights:
    """Weights of the model; given counts win."""
    try:
        return _count(shape, num_params, active_params)
    except (TypeError, ValueError, ArithmeticError, LookupError):  # a field that only weights depend on is odd
        raise LocalError("the weights cannot be counted", field="model.num_params", fix="state num_params") from None


def _count(shape: ModelShape, num_params: int | None, active_params: int | None) -> Weights:
    config = shape.config
    width = sum(_query_width(layer, shape) for layer in shape.layers)
    if num_params is not None:
        return Weights(num_params, active_params or num_params, width)
    hidden = shape.hidden_size
    vocab = _whole(config, "vocab_size")
    if not vocab or not hidden:
        raise LocalError("the weights cannot be counted", field="model.num_params", fix="state num_params")
    table = vocab * hidden
    mixers = sum(_mixer_weights(layer, shape) for layer in shape.layers)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((count for name in names if (count := _whole(config, name))), 0)
    top = _whole(config, "num_experts_per_tok")
    embeddings = table if config.get("tie_word_embeddings") else 2 * table
    if not experts:
        inner = _whole(config, "intermediate_size")
        if not inner:
            raise LocalError("the weights cannot be counted", field="model.num_params", fix="state num_params")
        mlp = 3 * hidden * inner * sum(layer.kind != "none" for layer in shape.layers)
        return Weights(embeddings + mixers + mlp, table + mixers + mlp, width)
    return _moe(shape, config, (table, embeddings, mixers, width), experts, top)


def _moe(shape: ModelShape, config: dict[str, Any], parts: tuple[int, int, int, int], experts: int,
         top: int) -> Weights:  # fmt: skip
    table, embeddings, mixers, width = parts
    hidden, dense_inner = shape.hidden_size, _whole(config, "intermediate_size")
    inner = _whole(config, "moe_intermediate_size") or dense_inner
    period = _whole(config, "expert_layer_period") or 1
    dense_first = _whole(config, "first_k_dense_replace")
    moe_layers = (shape.num_layers - dense_first) // period
    one = 3 * hidden * inner
    shared = 3 * hidden * _whole(config, "shared_expert_intermediate_size")
    shared += one * _whole(config, "n_shared_experts")
    always = mixers + (shape.num_layers - moe_layers) * 3 * hidden * dense_inner
    always += moe_layers * (shared + hidden * experts)
    return Weights(
        total=embeddings + always + moe_layers * experts * one,
        active=table + always + moe_layers * top * one,
        attention_width=width,
        moe_layers=moe_layers,
        experts=experts,
        experts_per_token=top,
        expert_weights=one,
    )


def _whole(config: dict[str, Any], name: str) -> int:
    """A count; 0 where there is none. Anything else is no model whose weights can be counted."""
    value = config.get(name) or 0
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} = {value!r}")
    return value


def _query_width(layer: LayerKV, shape: ModelShape) -> int:
    """Query heads x head dim of a layer whose cost grows with the context (windows are left out: they are bounded)."""
    if layer.kind not in ("full", "latent", "reused"):
        return 0
    return shape.num_heads * (layer.key_dim or _first_dim(shape))


def _first_dim(shape: ModelShape) -> int:
    return next((layer.key_dim for layer in shape.layers if layer.key_dim), 0)


def _mixer_weights(layer: LayerKV, shape: ModelShape) -> int:
    """Weights of the token mixer of one layer."""
    hidden, heads, config = shape.hidden_size, shape.num_heads, shape.config
    if layer.kind == "none":
        return 0
    if layer.kind == "latent":
        rope, nope = config["qk_rope_head_dim"], config.get("qk_nope_head_dim", 128)
        value, rank, q_rank = config.get("v_head_dim", 128), config["kv_lora_rank"], config.get("q_lora_rank")
        query = (hidden * q_rank + q_rank * heads * (nope + rope)) if q_rank else hidden * heads * (nope + rope)
        return query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    if layer.kind == "state":
        return _state_weights(shape)
    key_dim = layer.key_dim or _first_dim(shape)
    value_dim = layer.value_dim or key_dim
    query = hidden * heads * key_dim + heads * value_dim * hidden
    return query + hidden * layer.num_kv_heads * (key_dim + layer.value_dim)


def _state_weights(shape: ModelShape) -> int:
    hidden, config = shape.hidden_size, shape.config
    if config.get("linear_num_value_heads"):
        key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        return hidden * (2 * key + 2 * value + 2 * config["linear_num_value_heads"]) + value * hidden
    if config.get("mamba_expand"):
        inner = config["mamba_expand"] * hidden
        return 3 * hidden * inner
    raise LocalError(
        "the weights of this model's state layers cannot be counted", field="model.num_params", fix="state num_params"
    )
