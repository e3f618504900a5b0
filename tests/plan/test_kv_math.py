"""Exact KV sizes: the numbers of the design, and the sizing mistakes other tools made (PL-01 to PL-20)."""

from __future__ import annotations

import pytest

from kvbaton.kv.layout import KVLayout
from kvbaton.plan.hardware import FABRICS, gpu
from kvbaton.plan.kv_math import KVCost, KVFormat, Sharding, kv_format, rank_heads
from kvbaton.plan.kv_report import describe
from kvbaton.plan.model_presets import MODEL_PRESETS, preset
from kvbaton.plan.model_shape import ModelShape, parse_config
from kvbaton.types import LocalError

GIB = 1 << 30


def config(layers: int = 32, kv_heads: int = 8, head_dim: int = 128, **more: object) -> dict[str, object]:
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        **more,
    }


def cost(shape: ModelShape, dtype: str = "auto", **sharding: int) -> KVCost:
    return KVCost(shape, kv_format(dtype, shape), Sharding(**sharding))


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("Llama-3.1-70B", 327_680),
        ("Llama-3.1-8B", 131_072),
        ("Qwen3-8B", 147_456),
        ("Qwen3-32B", 262_144),
        ("Qwen3-30B-A3B", 98_304),
        ("DeepSeek-V3", 70_272),
        ("SmolLM2-135M", 23_040),
    ],
)
def test_bytes_a_token_of_the_presets(name: str, token_bytes: int) -> None:
    assert cost(preset(name)).token_bytes == token_bytes


def test_prompt_sizes_of_llama_70b() -> None:
    bf16, fp8 = cost(preset("Llama-3.1-70B")), cost(preset("Llama-3.1-70B"), "fp8")
    assert bf16.sequence_bytes(8_192) == 2.5 * GIB
    assert bf16.sequence_bytes(32_768) == 10 * GIB
    assert bf16.sequence_bytes(131_072) == 40 * GIB
    assert fp8.sequence_bytes(8_192) == 1.25 * GIB


@pytest.mark.parametrize(
    ("fabric", "floor_ms"),
    [("100G", 215), ("200G", 107), ("400G", 54), ("800G", 27), ("8x400G", 6.7), ("25G-tcp", 859)],
)
def test_transfer_floors_of_8192_tokens(fabric: str, floor_ms: float) -> None:
    num_bytes = cost(preset("Llama-3.1-70B")).wire_bytes(8_192)
    assert FABRICS[fabric].floor_s(num_bytes) * 1e3 == pytest.approx(floor_ms, abs=0.5 if floor_ms > 10 else 0.05)


def test_agrees_with_the_layout_our_pool_uses() -> None:
    shape = preset("SmolLM2-135M")
    for dtype in ("bfloat16", "float32"):
        layout = KVLayout(30, 3, 64, 16, dtype)
        assert cost(shape, dtype).token_bytes == layout.token_bytes
        assert cost(shape, dtype).wire_bytes(17, 16) == layout.pool_bytes(layout.blocks_for(17))


def test_declared_head_dim_wins_pl_01() -> None:
    first = parse_config(config(36, hidden_size=2560))
    second = parse_config(config(42, head_dim=256, hidden_size=3584, num_attention_heads=16))
    assert cost(first, "bf16").token_bytes == 147_456
    assert cost(second, "bf16").token_bytes == 344_064


@pytest.mark.parametrize(("kv_heads", "token_bytes"), [(32, 524_288), (8, 131_072), (1, 16_384)])
def test_heads_are_counted_once_pl_03(kv_heads: int, token_bytes: int) -> None:
    assert cost(parse_config(config(kv_heads=kv_heads)), "bf16").token_bytes == token_bytes


@pytest.mark.parametrize("tp", [1, 8])
def test_latent_is_neither_doubled_nor_split_pl_04(tp: int) -> None:
    shape = parse_config({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
                          "num_attention_heads": 128})  # fmt: skip
    assert cost(shape, "bf16", tp=tp).token_bytes == 70_272


def test_windows_on_both_bases_pl_05() -> None:
    layer_types = ["sliding_attention", "full_attention"] * 18
    shape = parse_config(config(36, 8, 64, layer_types=layer_types, sliding_window=128))
    bf16 = cost(shape, "bf16")
    assert bf16.sequence_bytes(1, "logical") == 73_728
    assert bf16.sequence_bytes(8_192, "logical") == 306_708_480
    assert bf16.sequence_bytes(8_192, "unified") == 603_979_776
    pool = KVLayout(36, 8, 64, 16, "bfloat16")  # what our worker allocates for the model
    assert bf16.sequence_bytes(8_192, block_size=16) == pool.pool_bytes(pool.blocks_for(8_192))


def test_tensor_parallel_multiplies_capacity_pl_07() -> None:
    shape = parse_config(config(64))
    one, four = cost(shape, "bf16"), cost(shape, "bf16", tp=4)
    assert (one.token_bytes, four.token_bytes) == (262_144, 65_536)
    assert four.capacity_tokens(10 * GIB) == 4 * one.capacity_tokens(10 * GIB)


def test_text_section_is_used_and_nothing_is_guessed_pl_09() -> None:
    whole = {
        "architectures": ["XForConditionalGeneration"],
        "text_config": config(48, 16, hidden_size=5376),
        "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
    }
    assert cost(parse_config(whole), "bf16").token_bytes == 393_216
    for name in ("num_hidden_layers", "num_key_value_heads"):
        broken = {**whole, "text_config": {k: v for k, v in config(48, 16).items() if k != name}}
        with pytest.raises(LocalError, match=f"text_config has no {name}") as caught:
            parse_config(broken)
        assert caught.value.field == f"text_config.{name}"


@pytest.mark.parametrize(
    ("kv_dtype", "quantization", "token_bytes", "effective"),
    [
        ("auto", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 131_072, "bfloat16"),
        ("fp8", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 65_536, "fp8"),
        ("bf16", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, 131_072, "bfloat16"),
        ("auto", {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, 65_536, "fp8"),
        ("auto", {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 65_536, "fp8"),
    ],
)
def test_weights_do_not_decide_the_cache_pl_16(
    kv_dtype: str, quantization: dict[str, object], token_bytes: int, effective: str
) -> None:
    shape = parse_config(config(torch_dtype="bfloat16", quantization_config=quantization))
    sized = cost(shape, kv_dtype)
    assert (sized.token_bytes, sized.form.name) == (token_bytes, effective)


@pytest.mark.parametrize("dtype", ["mxfp8", "int8_token_head"])
def test_scales_are_priced_and_moved_pl_17(dtype: str) -> None:
    sized = cost(parse_config(config()), dtype)
    assert sized.token_bytes == 67_584
    assert sized.wire_bytes(1_000) == 67_584_000


def test_constant_state_is_no_token_capacity_pl_18() -> None:
    layer_types = ["full_attention"] * 8 + ["linear_attention"] * 24
    shape = parse_config(config(32, 2, 256, layer_types=layer_types, state_bytes_per_layer=2_097_152))
    sized = cost(shape, "bf16")
    assert (sized.token_bytes, sized.fixed_bytes) == (16_384, 50_331_648)
    assert sized.capacity_tokens(1_073_741_824, num_sequences=4) == 53_248
    with pytest.raises(LocalError, match="constant state"):
        sized.capacity_tokens(1_073_741_824, num_sequences=22)


def test_data_parallel_divides_no_request_pl_20() -> None:
    sized = cost(parse_config(config()), "bf16", tp=2, dp=4)
    assert sized.sequence_bytes(4_096) == 268_435_456
    assert sized.sharding.num_gpus == 8


def test_replication_and_refusal_when_ranks_exceed_heads() -> None:
    assert [rank_heads(8, tp) for tp in (1, 4, 8, 16)] == [8, 2, 1, 1]
    sized = cost(preset("Llama-3.1-70B"), tp=16)
    assert sized.token_bytes == 327_680 // 8
    assert sized.wire_bytes(100) == 32_768_000  # replicas are read once
    for kv_heads, tp in ((8, 3), (8, 12)):
        with pytest.raises(LocalError):
            rank_heads(kv_heads, tp)


def test_pipeline_stage_with_most_bytes_counts() -> None:
    assert cost(preset("DeepSeek-V3"), pp=4).token_bytes == 16 * 1_152
    with pytest.raises(LocalError, match="exceeds"):
        cost(preset("SmolLM2-135M"), pp=31).token_bytes  # noqa: B018


def test_layer_kinds() -> None:
    kinds = {name: preset(name) for name in MODEL_PRESETS}
    assert kinds["gpt-oss-120b"].count("sliding") == kinds["gpt-oss-120b"].count("full") == 18
    assert (kinds["Gemma-3-27B"].count("sliding"), kinds["Gemma-3-27B"].count("full")) == (52, 10)
    assert (kinds["Qwen3-Next-80B-A3B"].count("state"), kinds["Qwen3-Next-80B-A3B"].count("full")) == (36, 12)
    assert (kinds["Jamba-1.5-Mini"].count("state"), kinds["Jamba-1.5-Mini"].count("full")) == (28, 4)
    # 32 value heads x 128 x 128 in float32, and 3 taps of an 8,192 wide convolution in bfloat16
    assert cost(kinds["Qwen3-Next-80B-A3B"]).fixed_bytes == 36 * (32 * 128 * 128 * 4 + 8_192 * 3 * 2)
    gemma3n = parse_config({"model_type": "gemma3n_text", **config(35, 2, 256), "num_kv_shared_layers": 15})
    assert gemma3n.count("reused") == 15
    assert cost(gemma3n, "bf16").token_bytes == 20 * 2 * 2 * 256 * 2
    shared = parse_config(config(32, use_cla=True, cla_share_factor=2))
    assert cost(shared, "bf16").token_bytes == 65_536


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ({"kv_compression_ratio": 4}, "kv_compression_ratio"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"layer_types": ["full_attention"] * 31 + ["dilated_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 31}, "layer_types"),
        ({"num_layers": 30}, "num_hidden_layers"),
        ({"swa_num_key_value_heads": 4}, "swa_num_key_value_heads"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 3, "type": "int"}}}, "kv_cache_scheme"),
    ],
)
def test_what_is_not_understood_is_named(extra: dict[str, object], name: str) -> None:
    with pytest.raises(LocalError, match=name):
        parse_config(config(**extra))


def test_harmless_fields_and_nulls_pass() -> None:
    extra = {"attention_bias": False, "attention_dropout": 0.0, "sliding_window": None, "use_cache": True,
             "layer_norm_eps": 1e-5, "rope_scaling": {"factor": 8.0}, "max_window_layers": 32}  # fmt: skip
    assert cost(parse_config(config(**extra))).token_bytes == 131_072


def test_unknown_dtype_is_named() -> None:
    with pytest.raises(LocalError, match="int3"):
        kv_format("int3", preset("Llama-3.1-8B"))
    assert KVFormat("x", 4, 1, 16).bytes_for(128, 1) == 64 + 8


NONSENSE = ("abc", -1, 0, 1.5, True, [], [1, "x"], {"a": 1}, 10**12)


@pytest.mark.parametrize("name", ["gpt-oss-120b", "DeepSeek-V3", "Qwen3-Next-80B-A3B", "Jamba-1.5-Mini"])
def test_nonsense_in_any_field_is_an_error_or_harmless(name: str) -> None:
    """Whatever stands in a field: an error that names it, or a whole answer, and never one with other sizes unnamed."""
    good = MODEL_PRESETS[name]
    for field in good:
        for value in NONSENSE:
            try:
                shape = parse_config({**good, field: value})
                answer = describe(cost(shape), (1_000,), gpu("H100"), 16, (FABRICS["100G"],))
            except LocalError as error:
                assert error.field is not None
                continue
            assert answer.token_bytes > 0


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"num_kv_shared_layers": -3}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"full_attention_interval": "4"}, "full_attention_interval"),
        ({"attn_layer_period": 0, "attn_layer_offset": 4}, "attn_layer_period"),
        ({"layer_types": 7}, "layer_types"),
        ({"per_layer_config": [1]}, "per_layer_config"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(extra: dict[str, object], says: str) -> None:
    with pytest.raises(LocalError) as caught:
        parse_config(config(**{"linear_num_value_heads": 4, **extra}))
    assert says in str(caught.value.field)


def test_an_unknown_dtype_of_the_state_is_named() -> None:
    shape = parse_config({**MODEL_PRESETS["Qwen3-Next-80B-A3B"], "mamba_ssm_dtype": "float17"})
    with pytest.raises(LocalError) as caught:
        cost(shape).fixed_bytes  # noqa: B018
    assert caught.value.field == "mamba_ssm_dtype"
