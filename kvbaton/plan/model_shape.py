"""What a model's config.json says about its cache: one ``LayerKV`` for each layer.

Reads the field names of Hugging Face configs (and the older aliases). The rule that holds everything: a number comes
from the file or from a rule its own model class documents; a field that looks as if it shaped the cache and that is
not understood is an error that names it. Multimodal models are read from their text section only.

Knows nothing about bytes, dtypes, sharding (kv_math) or weights (model_weights).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvbaton.plan.config_fields import HEAD_DIM_IS_CONSTANT, MHA_BY_DEFINITION, SLIDES_EVERYWHERE, Fields
from kvbaton.types import LocalError

Kind = Literal["full", "sliding", "chunked", "latent", "state", "reused", "none"]


class LayerKV(msgspec.Struct, frozen=True):
    """What one layer keeps for one sequence."""

    kind: Kind
    num_kv_heads: int = 0
    key_dim: int = 0  # per head; for "latent" the whole latent plus its rotary part
    value_dim: int = 0  # per head; 0 for "latent" and where the value equals the key
    window: int | None = None  # tokens kept by "sliding" and "chunked"
    recurrent_elements: int = 0  # constant state of one sequence, in the state dtype
    conv_elements: int = 0  # constant state of one sequence, in the model dtype
    state_bytes: int = 0  # constant state given in bytes
    extra_token_bytes: int = 0  # bytes a token outside the KV dtype (sparse-attention indexer keys)

    @property
    def elements(self) -> int:
        """Cached numbers of one token in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class ModelShape(msgspec.Struct, frozen=True):
    """The cache side of a model."""

    name: str
    layers: tuple[LayerKV, ...]
    num_heads: int
    hidden_size: int
    max_context: int | None
    dtype: str  # of the checkpoint's activations; "auto" KV means this
    kv_scheme: str | None  # a KV cache scheme the checkpoint declares
    state_dtype: str
    config: dict[str, Any]  # the section the numbers came from
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def count(self, *kinds: str) -> int:
        return sum(layer.kind in kinds for layer in self.layers)


TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
FULL = ("full_attention", "attention", "global", "*")
MOST_LAYERS = 10_000  # a typing error beyond it
STATE = ("linear_attention", "mamba", "recurrent", "conv", "M")


def read_model(source: str | Path) -> ModelShape:
    """A config.json, or a directory that holds one."""
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise LocalError(f"no such file {path}", field="MODEL", fix="give a config.json, its directory, or a preset")
    try:
        config = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise LocalError(f"{path} is not JSON: {error}", field="MODEL") from None
    if not isinstance(config, dict):
        raise LocalError(f"{path} holds no JSON object", field="MODEL")
    return parse_config(config, name=str(config.get("_name_or_path") or path.parent.name or path))


def parse_config(config: Mapping[str, Any], name: str = "config") -> ModelShape:
    """The cache side of a Hugging Face style config."""
    section, where = _text_section(config)
    fields = Fields(section, where)
    try:
        return _parse(fields, section, config, name)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        raise fields.nonsense() from error


def _parse(fields: Fields, section: Mapping[str, Any], config: Mapping[str, Any], name: str) -> ModelShape:
    layers = _layers(fields)
    for known in ("hidden_size", "num_attention_heads", "sliding_window_pattern", "_sliding_window_pattern"):
        fields.get(known)
    notes = list(fields.notes)
    lengths = [fields.maybe_int(each) for each in ("max_position_embeddings", "n_positions", "seq_length")]
    dtype = str(section.get("dtype") or section.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
                or "bfloat16").removeprefix("torch.")  # fmt: skip
    state_dtype = str(fields.get("mamba_ssm_dtype") or fields.get("mamba_ssm_cache_dtype") or "float32")
    fields.check_rest()
    return ModelShape(
        name=name,
        layers=layers,
        num_heads=fields.count("num_attention_heads"),
        hidden_size=fields.count("hidden_size"),
        max_context=next((each for each in lengths if each is not None), None),
        dtype=dtype,
        kv_scheme=_declared_scheme(section, config),
        state_dtype=state_dtype,
        config=dict(section),
        notes=tuple(notes),
    )


def _text_section(config: Mapping[str, Any], depth: int = 0) -> tuple[Mapping[str, Any], str]:
    for key in TEXT_SECTIONS:
        inner = config.get(key)
        if isinstance(inner, Mapping):
            if depth > 8:
                raise LocalError(f"{key} in {key} and so on: no model nests so deep", field=key)
            section, where = _text_section(inner, depth + 1)
            return section, key if where == "config" else f"{key}.{where}"
    return config, "config"


def _declared_scheme(section: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """The KV scheme the checkpoint itself declares. Weight quantisation says nothing about the cache."""
    for holder in (section, config):
        quantization = holder.get("quantization_config")
        if not isinstance(quantization, Mapping):
            continue
        scheme = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
        if scheme is None:
            continue
        if isinstance(scheme, str) and scheme.lower() in ("fp8", "fp8_e4m3"):
            return "fp8"
        if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float":
            return "fp8"
        raise LocalError(
            f"kv_cache_scheme {scheme!r} is not understood",
            field="quantization_config.kv_cache_scheme",
            fix="name the KV dtype with --kv-dtype",
        )
    return None


def _layers(fields: Fields) -> tuple[LayerKV, ...]:
    kinds = _layer_kinds(fields)
    attention = _attention_layer(fields) if any(kind in FULL + ("sliding", "chunked") for kind in kinds) else None
    state = _state_layer(fields) if any(kind in STATE for kind in kinds) else None
    layers: list[LayerKV] = []
    for index, kind in enumerate(kinds):
        if kind in STATE:
            assert state is not None
            layers.append(state)
            continue
        if kind == "none":
            layers.append(LayerKV("none"))
            continue
        assert attention is not None
        layers.append(_placed(fields, attention, kind, index))
        if fields.get("mamba_d_ssm") is not None and state is None:  # attention and state space side by side
            both = _state_layer(fields)
            layers[-1] = msgspec.structs.replace(
                layers[-1], recurrent_elements=both.recurrent_elements, conv_elements=both.conv_elements
            )
    return tuple(_shared(fields, layers))


def _placed(fields: Fields, layer: LayerKV, kind: str, index: int) -> LayerKV:
    """The attention layer at one place: windows, and global layers with their own head shape."""
    override = _override(fields, index)
    if override:
        dim = override.get("head_dim", layer.key_dim)
        heads = override.get("num_key_value_heads", layer.num_kv_heads)
        layer = msgspec.structs.replace(layer, num_kv_heads=heads, key_dim=dim, value_dim=dim)
    if kind == "sliding":
        return msgspec.structs.replace(layer, kind="sliding", window=fields.need_int("sliding_window"))
    if fields.get("block_types") is not None:  # RecurrentGemma: its attention layers are local
        return msgspec.structs.replace(layer, kind="sliding", window=fields.need_int("attention_window_size"))
    if kind == "chunked":
        return msgspec.structs.replace(layer, kind="chunked", window=fields.need_int("attention_chunk_size"))
    global_heads, global_dim = fields.maybe_int("num_global_key_value_heads"), fields.maybe_int("global_head_dim")
    if global_heads or global_dim:
        layer = msgspec.structs.replace(
            layer, num_kv_heads=global_heads or layer.num_kv_heads, key_dim=global_dim or layer.key_dim,
            value_dim=global_dim or layer.value_dim,
        )  # fmt: skip
    if fields.get("attention_k_eq_v"):
        fields.notes.append("attention_k_eq_v: engines still store K and V of global layers (K after rotary)")
    return layer


def _override(fields: Fields, index: int) -> Mapping[str, int]:
    """What ``per_layer_config`` says about one layer (Gemma 4 gives its global layers another head size there)."""
    overrides = fields.get("per_layer_config") or {}
    for key, value in overrides.items():
        if int(key) == index:
            if set(value) - {"head_dim", "num_key_value_heads"}:
                raise fields.bad("per_layer_config", value, "only head_dim and num_key_value_heads are understood")
            for name in value:
                Fields(value, f"per_layer_config.{key}").need_int(name)
            return value
    return {}


def _layer_kinds(fields: Fields) -> list[str]:
    """For each layer: sliding, chunked, none, or a word of FULL or STATE."""
    listed = _listed_kinds(fields)
    if listed is not None:
        return listed
    num_layers = fields.need_int("num_hidden_layers")
    if num_layers > MOST_LAYERS:
        raise fields.bad("num_hidden_layers", num_layers, f"no model has more than {MOST_LAYERS:,}")
    if fields.get("attn_layer_period") is not None:
        offset, period = fields.need("attn_layer_offset"), fields.need_int("attn_layer_period")
        return ["attention" if index % period == offset else "mamba" for index in range(num_layers)]
    indices = fields.get("attn_layer_indices", fields.get("full_attn_idxs"))
    if indices is not None:
        return ["attention" if index in indices else "mamba" for index in range(num_layers)]
    if fields.get("full_attention_interval") is not None:
        interval = fields.need_int("full_attention_interval")
        return ["attention" if (index + 1) % interval == 0 else "linear_attention" for index in range(num_layers)]
    return _window_kinds(fields, num_layers)


def _listed_kinds(fields: Fields) -> list[str] | None:
    """Kinds from a list with an entry for each layer."""
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern", "attn_type_list", "block_types"):
        listed = fields.get(name)
        if listed is None:
            continue
        num_layers = fields.get("num_hidden_layers", len(listed))
        if name == "block_types":
            listed = [listed[index % len(listed)] for index in range(num_layers)]
        if len(listed) != num_layers:
            raise fields.bad(name, listed, f"it has {len(listed)} entries for {num_layers} layers")
        if name == "attn_type_list":
            listed = ["full_attention" if entry == 1 else "linear_attention" for entry in listed]
        return [_kind_of(fields, name, entry) for entry in listed]
    return None


def _kind_of(fields: Fields, name: str, entry: Any) -> str:
    if entry in FULL or entry in STATE:
        return str(entry)
    if entry in ("sliding_attention", "sliding", "local", "L"):
        return "sliding"
    if entry == "chunked_attention":
        return "chunked"
    if entry in ("-", "mlp", "moe", "E"):
        return "none"
    if entry in ("indexed_attention", "deepseek_sparse_attention"):
        return "attention"
    raise fields.bad(name, entry, "known layer types: full, sliding, chunked, linear attention, mamba, conv, mlp, moe")


def _window_kinds(fields: Fields, num_layers: int) -> list[str]:
    """Kinds for models that say it by a window and a pattern."""
    model_type = str(fields.get("model_type", ""))
    chunk = fields.get("attention_chunk_size")
    window = fields.get("sliding_window")
    if chunk is not None and model_type.startswith("llama4"):
        nope = fields.get("no_rope_layers") or [int((index + 1) % 4 != 0) for index in range(num_layers)]
        return ["chunked" if nope[index] else "attention" for index in range(num_layers)]
    if not window or fields.get("use_sliding_window") is False:
        return ["attention"] * num_layers
    pattern = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern"))
    if isinstance(pattern, str):
        return ["sliding" if pattern[index % len(pattern)] == "L" else "attention" for index in range(num_layers)]
    if isinstance(pattern, int):
        return ["attention" if (index + 1) % pattern == 0 else "sliding" for index in range(num_layers)]
    if model_type in ("gemma2", "gpt_oss"):
        return ["attention" if (index + 1) % 2 == 0 else "sliding" for index in range(num_layers)]
    if fields.get("use_sliding_window") is True and fields.get("max_window_layers") is not None:
        first = fields.count("max_window_layers")
        return ["sliding" if index >= first else "attention" for index in range(num_layers)]
    if model_type in SLIDES_EVERYWHERE:
        return ["sliding"] * num_layers
    raise fields.bad("sliding_window", window, "say which layers slide with layer_types or sliding_window_pattern")


def _attention_layer(fields: Fields) -> LayerKV:
    rank = fields.get("kv_lora_rank")
    if rank is not None:
        for unused in ("num_key_value_heads", "qk_nope_head_dim", "v_head_dim", "qk_head_dim", "head_dim"):
            fields.get(unused)
        index_dim = fields.maybe_int("index_head_dim")
        # Engines keep the indexer's key in 8 bits with one float32 scale for each 128 numbers.
        extra = 0 if index_dim is None else index_dim + 4 * -(-index_dim // 128)
        return LayerKV(
            "latent", 1, key_dim=fields.need_int("kv_lora_rank") + fields.need_int("qk_rope_head_dim"),
            extra_token_bytes=extra,
        )  # fmt: skip
    num_kv_heads = _num_kv_heads(fields)
    head_dim = _head_dim(fields)
    value_dim = fields.maybe_int("v_head_dim") or head_dim
    return LayerKV("full", num_kv_heads, head_dim, value_dim)


def _num_kv_heads(fields: Fields) -> int:
    model_type = str(fields.get("model_type", ""))
    fields.get("num_kv_heads")
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1
    fields.get("multi_query_attention")
    attn_config = fields.get("attn_config")
    if isinstance(attn_config, Mapping) and attn_config.get("kv_n_heads") is not None:
        return Fields(attn_config, "attn_config").need_int("kv_n_heads")
    if fields.get("num_key_value_heads") is None and model_type in MHA_BY_DEFINITION:
        fields.notes.append(f"num_key_value_heads absent: {model_type} then has one KV head for each query head")
        return fields.need_int("num_attention_heads")
    return fields.need_int("num_key_value_heads")


def _head_dim(fields: Fields) -> int:
    if fields.get("head_dim") is not None:
        fields.get("num_attention_heads")
        return fields.need_int("head_dim")
    model_type = str(fields.get("model_type", ""))
    if model_type in HEAD_DIM_IS_CONSTANT:
        return fields.need_int("head_dim")
    hidden, heads = fields.need_int("hidden_size"), fields.need_int("num_attention_heads")
    if hidden % heads:
        raise fields.bad("head_dim", None, f"hidden_size {hidden} is not a multiple of {heads} heads: state head_dim")
    return hidden // heads


def _state_layer(fields: Fields) -> LayerKV:
    """Constant state of one linear-attention, state-space or convolution layer."""
    given = fields.get("state_bytes_per_layer")
    if given is not None:
        return LayerKV("state", state_bytes=fields.need_int("state_bytes_per_layer"))
    if fields.get("linear_num_value_heads") is not None:  # gated delta rule
        key = fields.need_int("linear_num_key_heads") * fields.need_int("linear_key_head_dim")
        value = fields.need_int("linear_num_value_heads") * fields.need_int("linear_value_head_dim")
        kernel = fields.need_int("linear_conv_kernel_dim")
        recurrent = value * fields.need_int("linear_key_head_dim")
        return LayerKV("state", recurrent_elements=recurrent, conv_elements=(2 * key + value) * (kernel - 1))
    if fields.get("linear_num_heads") is not None:  # Kimi delta attention
        heads, dim = fields.need_int("linear_num_heads"), fields.need_int("linear_head_dim")
        conv = 3 * heads * dim * (fields.need_int("linear_conv_kernel_dim") - 1)
        return LayerKV("state", recurrent_elements=heads * dim * dim, conv_elements=conv)
    if fields.get("conv_L_cache") is not None:  # short convolution
        return LayerKV("state", conv_elements=fields.need_int("hidden_size") * fields.need_int("conv_L_cache"))
    if fields.get("lru_width") is not None:
        width = fields.need_int("lru_width")
        return LayerKV("state", recurrent_elements=width, conv_elements=width * (fields.need_int("conv1d_width") - 1))
    if fields.get("attn_type_list") is not None:  # lightning attention: one head_dim x head_dim state a head
        heads, dim = fields.need_int("num_attention_heads"), fields.need_int("head_dim")
        return LayerKV("state", recurrent_elements=heads * dim * dim)
    return _mamba_layer(fields)


def _mamba_layer(fields: Fields) -> LayerKV:
    state = _first(fields, "mamba_d_state", "ssm_state_size") or fields.need_int("mamba_d_state")
    kernel = _first(fields, "mamba_d_conv", "conv_kernel") or fields.need_int("mamba_d_conv")
    expand = _first(fields, "mamba_expand", "expand")
    heads = _first(fields, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    head_dim = _first(fields, "mamba_d_head", "mamba_head_dim", "mamba_headdim")
    if heads is not None and head_dim is not None:
        inner = heads * head_dim
    elif fields.get("mamba_d_ssm") is not None:
        inner = fields.need_int("mamba_d_ssm")
    elif expand is not None:
        inner = expand * fields.need_int("hidden_size")
    else:
        inner = fields.need_int("mamba_expand")
    groups = _first(fields, "mamba_n_groups", "n_groups", "mamba_ngroups") if heads else 0
    conv = (inner + 2 * (groups or 0) * state) * (kernel - 1)
    return LayerKV("state", recurrent_elements=inner * state, conv_elements=conv)


def _first(fields: Fields, *names: str) -> int | None:
    """Families name the same number differently, and some say "auto" for none. All names count as read."""
    found = [None if fields.get(name) == "auto" else fields.maybe_int(name) for name in names]
    return next((each for each in found if each is not None), None)


def _shared(fields: Fields, layers: list[LayerKV]) -> list[LayerKV]:
    """Layers that read another layer's cache keep none of their own."""
    count = fields.count("num_kv_shared_layers")
    if count and count >= len(layers):
        raise fields.bad("num_kv_shared_layers", count, f"of {len(layers)} layers one has to keep a cache")
    first_shared = len(layers) - count
    factor = fields.count("cla_share_factor") or 1
    if not fields.get("use_cla"):
        factor = 1
    reused = LayerKV("reused")
    return [reused if index >= first_shared or index % factor else layer for index, layer in enumerate(layers)]
