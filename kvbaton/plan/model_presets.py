"""Configs of known models, as their repositories publish them, cut down to the fields that shape cache and weights.

Knows nothing about how they are read (model_shape).
"""

from __future__ import annotations

from typing import Any

from kvbaton.plan.model_shape import ModelShape, parse_config
from kvbaton.types import LocalError


def _dense(model_type: str, layers: int, hidden: int, inner: int, heads: tuple[int, int, int], vocab: int,
           tied: bool = False, context: int = 131072, **more: Any) -> dict[str, Any]:  # fmt: skip
    """A decoder with a gated MLP. ``heads`` = query heads, KV heads, head dim."""
    return {
        "model_type": model_type, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": heads[2], "vocab_size": vocab,
        "tie_word_embeddings": tied, "max_position_embeddings": context, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


MODEL_PRESETS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _dense("llama", 30, 576, 1536, (9, 3, 64), 49152, tied=True, context=8192),
    "Llama-3.1-8B": _dense("llama", 32, 4096, 14336, (32, 8, 128), 128256),
    "Llama-3.1-70B": _dense("llama", 80, 8192, 28672, (64, 8, 128), 128256),
    "Llama-3-70B": _dense("llama", 80, 8192, 28672, (64, 8, 128), 128256, context=8192),
    "Llama-2-70B": _dense("llama", 80, 8192, 28672, (64, 8, 128), 32000, context=4096),
    "Llama-3.1-405B": _dense("llama", 126, 16384, 53248, (128, 8, 128), 128256),
    "Mistral-7B-v0.3": _dense("mistral", 32, 4096, 14336, (32, 8, 128), 32768, context=32768),
    "Qwen3-8B": _dense("qwen3", 36, 4096, 12288, (32, 8, 128), 151936, context=40960),
    "Qwen3-32B": _dense("qwen3", 64, 5120, 25600, (64, 8, 128), 151936, context=40960),
    "Qwen3-30B-A3B": _dense(
        "qwen3_moe", 48, 2048, 6144, (32, 4, 128), 151936, context=40960, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "Qwen3-Next-80B-A3B": _dense(
        "qwen3_next", 48, 2048, 5120, (16, 2, 256), 151936, context=262144, num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, full_attention_interval=4,
        linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
        linear_num_value_heads=32,
    ),
    "gpt-oss-20b": _dense(
        "gpt_oss", 24, 2880, 2880, (64, 8, 64), 201088, sliding_window=128, num_local_experts=32,
        num_experts_per_tok=4, layer_types=["sliding_attention", "full_attention"] * 12,
    ),
    "gpt-oss-120b": _dense(
        "gpt_oss", 36, 2880, 2880, (64, 8, 64), 201088, sliding_window=128, num_local_experts=128,
        num_experts_per_tok=4, layer_types=["sliding_attention", "full_attention"] * 18,
    ),
    "Gemma-3-27B": {
        "model_type": "gemma3",
        "text_config": _dense(
            "gemma3_text", 62, 5376, 21504, (32, 16, 128), 262208, tied=True, sliding_window=1024,
            sliding_window_pattern=6,
        ),
        "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
    },
    "DeepSeek-V3": _dense(
        "deepseek_v3", 61, 7168, 18432, (128, 128, 64), 129280, context=163840, kv_lora_rank=512, q_lora_rank=1536,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256, num_experts_per_tok=8,
        n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3,
    ),
    "Jamba-1.5-Mini": _dense(
        "jamba", 32, 4096, 14336, (32, 8, 128), 65536, context=262144, attn_layer_period=8, attn_layer_offset=4,
        mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, num_experts=16, num_experts_per_tok=2,
        expert_layer_period=2, expert_layer_offset=1,
    ),
}  # fmt: skip
PRESET_ALIASES = {"llama-3-70b": "Llama-3-70B", "smollm2-135m-instruct": "SmolLM2-135M"}


def find_preset(name: str) -> ModelShape | None:
    """The preset of that name, whatever its case, with or without the owner and ``-Instruct``."""
    short = name.rsplit("/", 1)[-1].lower()
    short = PRESET_ALIASES.get(short, short).lower()
    for key, config in MODEL_PRESETS.items():
        if short in (key.lower(), f"{key.lower()}-instruct", f"meta-{key.lower()}", f"meta-{key.lower()}-instruct"):
            return parse_config(config, name=key)
    return None


def preset(name: str) -> ModelShape:
    found = find_preset(name)
    if found is None:
        raise LocalError(f"no model preset {name!r}", field="model", fix=f"use one of {', '.join(MODEL_PRESETS)}")
    return found
