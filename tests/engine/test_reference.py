"""Our logits against transformers' on the same weights: every family, odd chunks, scattered blocks, both backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine.tokenizer import Tokenizer

BACKENDS = ("torch", "native")
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 9}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", {"head_dim": 48}),
    "llama_head_dim_odd_size": ("llama", {"head_dim": 24}),
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama_llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama_yarn": ("llama", {"rope_scaling": YARN}),
    "mistral": ("mistral", {}),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "mistral_head_dim": ("mistral", {"head_dim": 32, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {**WINDOWED, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3_window": ("qwen3", {**WINDOWED, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "qwen3_bias_tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 32}),
}
NATIVE_CANNOT = {"llama_head_dim_odd_size"}  # head_dim no multiple of 16: refused by name, torch runs it

PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List the numbers 1 to 20, then explain photosynthesis to a child. Zähle bis drei: eins, zwei, ...",
)


@cache
def reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")


def reference_logits(path: Path, tokens: Sequence[int], dtype: torch.dtype = torch.float32) -> np.ndarray:
    with torch.inference_mode():
        return reference(path, dtype)(torch.tensor([list(tokens)])).logits[0].float().numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", sorted(CASES))
def test_chunked_prefill_over_scattered_blocks_equals_transformers(
    name: str, backend: str, make_tiny_model: Callable[..., Path], make_runner: Callable[..., Any]
) -> None:
    if backend == "native" and name in NATIVE_CANNOT:
        pytest.skip("not a shape of the native kernels")
    family, changes = CASES[name]
    path = make_tiny_model(family, **changes)
    tokens = np.random.default_rng(3).integers(0, 320, 83).tolist()
    expected = reference_logits(path, tokens)
    assert np.abs(expected).max() > 0.5, "logits so small that anything would agree"
    for chunks in ([83], [1, 7, 13, 29, 31, 1, 1], [50, 33]):
        found = make_runner(path, backend, seed=len(chunks)).run(tokens, chunks)
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_stays_as_near_to_float32_as_transformers_does(
    family: str, backend: str, make_tiny_model: Callable[..., Path], make_runner: Callable[..., Any]
) -> None:
    """Root mean square error, in units of the logits' spread: not above 1.3 times that of transformers in bfloat16."""
    path = make_tiny_model(family)
    tokens = np.random.default_rng(4).integers(0, 320, 120).tolist()
    exact = reference_logits(path, tokens)
    found = make_runner(path, backend, dtype="bfloat16", kv_dtype="bfloat16").run(tokens, [77, 43])

    def error(logits: np.ndarray) -> float:
        return float(np.sqrt(((logits - exact) ** 2).mean()) / exact.std())

    assert error(found) <= 1.3 * error(reference_logits(path, tokens, torch.bfloat16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_default_model_gives_transformers_tokens(
    backend: str, default_model_path: Path, make_runner: Callable[..., Any]
) -> None:
    """Greedy through the paged pool: each token is the one that transformers, shown all before it, finds best."""
    tokenizer = Tokenizer.load(default_model_path)
    runner = make_runner(default_model_path, backend, block_size=16, num_blocks=32)
    for i, text in enumerate(PROMPTS):
        prompt = tokenizer.chat([{"role": "user", "content": text}])
        output = runner.greedy(prompt, 24, name=str(i))
        logits = reference_logits(default_model_path, prompt + output)
        assert output == logits[len(prompt) - 1 : -1].argmax(axis=1).tolist(), text


@pytest.mark.parametrize("backend", BACKENDS)
def test_default_model_logits(backend: str, default_model_path: Path, make_runner: Callable[..., Any]) -> None:
    tokenizer = Tokenizer.load(default_model_path)
    tokens = tokenizer.encode(" ".join(PROMPTS) * 2)
    expected = reference_logits(default_model_path, tokens)
    found = make_runner(default_model_path, backend, block_size=16).run(tokens, [len(tokens) - 41, 40, 1])
    np.testing.assert_allclose(found, expected, atol=2e-3)  # logits reach 30, over 30 layers
