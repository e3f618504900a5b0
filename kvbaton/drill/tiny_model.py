"""A tiny random model on disk, so that a drill of the machinery costs seconds and no download.

The same seed gives the same bytes. A byte-level tokenizer without merges: every byte is a token, three are special.
Knows nothing about fleets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.weights import expected_tensors, write_safetensors

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTEXT_TOKENS = 2048
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256 + len(SPECIAL_TOKENS),
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 258,
}


def write_tiny_model(path: Path, seed: int = 0) -> Path:
    """A Hugging Face directory at ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    write_random_weights(path, CONFIG, seed)
    _write_tokenizer(path)
    return path


def write_random_weights(path: Path, config: dict[str, Any], seed: int) -> None:
    """``config.json`` and weights for it in the directory ``path``; the same seed gives the same bytes."""
    (path / "config.json").write_text(json.dumps(config))
    shapes = expected_tensors(ModelConfig.from_dict(config))
    rng = np.random.default_rng(seed)

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        # Norms near one, matrices so that activations keep their size: the best token is then clearly the best.
        spread, centre = (0.1, float(name.endswith("norm.weight"))) if len(shape) == 1 else (1.5 / shape[1] ** 0.5, 0.0)
        return (rng.standard_normal(shape) * spread + centre).astype(np.float32)

    write_safetensors(
        path / "model.safetensors",
        {name: ("F32", shape) for name, shape in shapes.items()},
        (values(name, shape) for name, shape in shapes.items()),
    )


def _write_tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate([*alphabet, *SPECIAL_TOKENS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
