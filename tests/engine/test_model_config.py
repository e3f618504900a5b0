from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.engine.model_config import ModelConfig
from kvbaton.types import LocalError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 100000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3_large_factor": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "yarn_set_factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
    "yarn_mscale_untruncated": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
}


def build(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**BASE, **changes})


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", sorted(ROPES))
def test_rope_equals_transformers(name: str, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = ROPES[name]
    reference_config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=dict(rope),
    )
    if rope["rope_type"] == "default":
        reference, attention_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(reference_config)
    else:
        reference, attention_factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](reference_config, "cpu")
    config = build(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=rope)
    assert config.inv_freq.dtype == np.float32
    assert config.rope_attention_factor == pytest.approx(attention_factor, abs=1e-12)
    # Both are float32; torch's own power is only good to the last bit or two, ours is rounded once.
    np.testing.assert_allclose(config.inv_freq, reference.numpy(), rtol=5e-7)


@pytest.mark.parametrize("name", sorted(ROPES))
def test_old_and_new_rope_keys_mean_the_same(name: str) -> None:
    rope = dict(ROPES[name])
    new = build(rope_parameters=rope)
    theta = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    old = build(rope_theta=theta, rope_scaling={"type": kind, **rope} if kind != "default" else None)
    assert old == new
    assert old.rope_text == new.rope_text
    np.testing.assert_array_equal(old.inv_freq, new.inv_freq)


def test_whole_numbers_and_floats_give_one_fingerprint() -> None:
    assert build(rope_theta=10000).rope_text == build(rope_theta=10000.0).rope_text
    assert build(rope_theta=10000).rope_text != build(rope_theta=20000).rope_text
    linear = [build(rope_scaling={"type": "linear", "factor": factor}).rope_text for factor in (2, 2.0, 4)]
    assert linear[0] == linear[1] != linear[2]


def test_stated_context_is_stretched_by_scaling_that_states_the_length_before_it() -> None:
    assert build().max_context == 512
    assert build(rope_scaling={"type": "linear", "factor": 4.0}).max_context == 2048
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert build(rope_scaling=yarn, max_position_embeddings=32768).max_context == 131072
    assert build(rope_scaling=yarn, max_position_embeddings=131072).max_context == 131072
    assert build(rope_parameters=ROPES["llama3"], max_position_embeddings=131072).max_context == 131072


@pytest.mark.parametrize(
    "missing",
    [
        "architectures",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
def test_missing_field_is_named(missing: str) -> None:
    config = {name: value for name, value in BASE.items() if name != missing}
    with pytest.raises(LocalError, match=missing) as error:
        ModelConfig.from_dict(config)
    assert error.value.field == missing


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            "architectures",
            "MixtralForCausalLM.*Llama.*Mistral.*Qwen2.*Qwen3",
        ),
        ({"architectures": []}, "architectures", "LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act", "gelu.*silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config", "awq"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type", "dynamic.*default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope_type", "mrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor", "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor", "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters", "per layer type"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "4 attention heads"),
        ({"num_attention_heads": 0}, "num_attention_heads", "positive"),
        ({"num_attention_heads": "4"}, "num_attention_heads", "positive"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "head_dim", "multiple"),
        ({"head_dim": 15}, "head_dim", "even"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id", "token ids"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window", "positive"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types", "1 layers of 4"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear"] * 4}, "layer_types", "linear"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "layer_types": ["sliding_attention"] * 4},
            "sliding_window",
            "no window",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(LocalError, match=said) as error:
        build(**changes)
    assert error.value.field == field


def test_biases_and_norms_of_each_family() -> None:
    def flags(arch: str, **changes: Any) -> tuple[bool, bool, bool, bool]:
        config = build(architectures=[arch], **changes)
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert flags("LlamaForCausalLM") == (False, False, False, False)
    assert flags("LlamaForCausalLM", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags("MistralForCausalLM") == (False, False, False, False)
    assert flags("Qwen2ForCausalLM") == (True, False, False, False)
    assert flags("Qwen3ForCausalLM") == (False, False, False, True)
    assert flags("Qwen3ForCausalLM", attention_bias=True) == (True, True, False, True)


def test_head_dim_and_kv_heads() -> None:
    assert build().head_dim == 16
    assert build(head_dim=32).head_dim == 32
    assert build(head_dim=None).head_dim == 16
    assert build(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    llama = {name: value for name, value in BASE.items() if name != "num_key_value_heads"}
    assert ModelConfig.from_dict(llama).num_kv_heads == 4
    with pytest.raises(LocalError, match="num_key_value_heads"):
        ModelConfig.from_dict({**llama, "architectures": ["Qwen2ForCausalLM"]})


def test_sliding_windows() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert build(**mistral, sliding_window=8).sliding_window == (8,) * 4
    assert build(**mistral, sliding_window=None).sliding_window == (None,) * 4
    assert build(**mistral).sliding_window == (4096,) * 4
    assert build(sliding_window=8).sliding_window == (None,) * 4
    for arch in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        qwen = {"architectures": [arch], "sliding_window": 8, "max_window_layers": 3}
        assert build(**qwen).sliding_window == (None,) * 4
        assert build(**qwen, use_sliding_window=True).sliding_window == (None, None, None, 8)
        layer_types = ["full_attention", "sliding_attention"] * 2
        mixed = build(**qwen, use_sliding_window=True, layer_types=layer_types)
        assert mixed.sliding_window == (None, 8, None, 8)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(2, None, (2,)), (None, [5, 3], (3, 5)), (2, [7, 2], (2, 7)), ([4], 9, (4, 9)), (None, None, ())],
)
def test_eos_token_ids(in_config: Any, in_generation: Any, expected: tuple[int, ...]) -> None:
    config = ModelConfig.from_dict({**BASE, "eos_token_id": in_config}, {"eos_token_id": in_generation})
    assert config.eos_token_ids == expected


def test_revision_follows_what_is_computed_and_nothing_else() -> None:
    config = build()
    assert build(transformers_version="9.9", torch_dtype="float16", bos_token_id=7).revision == config.revision
    assert build(eos_token_id=9, max_position_embeddings=1024).revision == config.revision
    for changes in (
        {"rms_norm_eps": 1e-6},
        {"rope_theta": 5e5},
        {"tie_word_embeddings": True},
        {"num_hidden_layers": 3},
    ):
        assert build(**changes).revision != config.revision
    assert config.content_hash(b"weights") != config.revision
    assert replace(config, revision="x").content_hash() == config.revision


def test_from_dir(tmp_path) -> None:
    with pytest.raises(LocalError, match="config.json"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (0, 2)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(LocalError, match="not valid JSON"):
        ModelConfig.from_dir(tmp_path)


@settings(deadline=None)
@given(
    name=st.sampled_from([*sorted(BASE), "rope_scaling", "rope_parameters", "layer_types", "eos_token_id"]),
    value=st.one_of(st.none(), st.integers(-3, 3), st.text(max_size=3), st.lists(st.integers(0, 3), max_size=2)),
    arch=st.sampled_from(["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]),
)
def test_a_wrong_value_gives_a_named_error_or_a_config(name: str, value: Any, arch: str) -> None:
    try:
        config = ModelConfig.from_dict({**BASE, "architectures": [arch], name: value})
    except LocalError as error:
        assert error.field
    else:
        assert len(config.sliding_window) == config.num_layers and config.inv_freq.shape == (config.head_dim // 2,)
