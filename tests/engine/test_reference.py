"""Our logits against transformers' on the same weights: every family, odd chunks, scattered blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine.model import StepInput
from kvbaton.engine.pool import KVPool
from kvbaton.engine.torch_model import TorchModel
from kvbaton.engine.weights import load_model_dir
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.shared_pool import SharedPool

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", {"head_dim": 24}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama_llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama_yarn": ("llama", {"rope_scaling": YARN}),
    "mistral": ("mistral", {}),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "mistral_head_dim": ("mistral", {"head_dim": 32, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3_window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen3_bias_tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
}


def reference_logits(path: Path, tokens: Sequence[int]) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].numpy()


def make_pool(layout: KVLayout, num_blocks: int) -> KVPool:
    return KVPool(SharedPool.create(layout, num_blocks, None, "test"))


def step_of(parts: list[tuple[Sequence[int], int, list[int]]]) -> StepInput:
    """One step out of (new tokens, position of the first, blocks) per sequence; every row yields logits."""
    counts = [len(tokens) for tokens, _, _ in parts]
    width = max(len(blocks) for _, _, blocks in parts)
    table = np.zeros((len(parts), width), dtype=np.int32)
    for s, (_, _, blocks) in enumerate(parts):
        table[s, : len(blocks)] = blocks
    return StepInput(
        token_ids=np.concatenate([np.asarray(tokens, dtype=np.int32) for tokens, _, _ in parts]),
        positions=np.concatenate(
            [np.arange(start, start + n, dtype=np.int32) for n, (_, start, _) in zip(counts, parts, strict=True)]
        ),
        seq_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context_lens=np.asarray([start + n for n, (_, start, _) in zip(counts, parts, strict=True)], dtype=np.int32),
        block_table=table,
        sample_rows=np.arange(sum(counts), dtype=np.int32),
    )


def build(path: Path, block_size: int = 8, order: str = "HND", dtype: str = "float32", kv_dtype: str = "float32"):
    config, weights = load_model_dir(path)
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, kv_dtype, order)
    return TorchModel(config, weights, layout, dtype=dtype), make_pool(layout, 64)


def run_in_chunks(model: Any, pool: KVPool, tokens: Sequence[int], chunks: Sequence[int], seed: int) -> np.ndarray:
    """Logits of every position, prompt fed in ``chunks``, through randomly scattered blocks."""
    needed = model.layout.blocks_for(len(tokens))
    blocks = np.random.default_rng(seed).permutation(pool.num_blocks)[:needed].tolist()
    found, start = [], 0
    for size in chunks:
        found.append(model.forward(step_of([(tokens[start : start + size], start, blocks)]), pool))
        start += size
    assert start == len(tokens)
    return np.concatenate(found)


@pytest.mark.parametrize("name", sorted(CASES))
def test_chunked_prefill_over_scattered_blocks_equals_transformers(
    name: str, make_tiny_model: Callable[..., Path]
) -> None:
    family, changes = CASES[name]
    path = make_tiny_model(family, **changes)
    tokens = np.random.default_rng(3).integers(0, 320, 83).tolist()
    expected = reference_logits(path, tokens)
    model, pool = build(path)
    for chunks in ([83], [1, 7, 13, 29, 31, 1, 1], [50, 33]):
        np.testing.assert_allclose(run_in_chunks(model, pool, tokens, chunks, seed=len(chunks)), expected, atol=1e-4)
    assert np.abs(expected).max() > 0.5, "logits so small that anything would agree"
