"""What a model is, read from a Hugging Face ``config.json``: shapes, biases, rotary frequencies, attention windows.

Invariants: a config that this engine would compute wrongly is refused by name (architecture, activation, rope type,
quantisation), never approximated; ``inv_freq`` and ``rope_attention_factor`` are computed here and nowhere else.
Knows nothing about weights, tensors or tokenizers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvbaton.engine.json_object import read_object
from kvbaton.types import LocalError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ACTIVATIONS = ("silu", "swish")  # two names of one function
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_MOST = 2**31 - 1  # of any size that is read
_MOST_LAYERS = 10_000  # of each layer something is kept: a number out of nowhere must not take all memory

QWEN3_DEFAULT_HEAD_DIM = 128  # transformers' Qwen3Config writes it always, hand-written configs may not
MISTRAL_DEFAULT_WINDOW = 4096  # what MistralConfig means when the key is absent; ``null`` means no window
DEFAULT_ROPE_THETA = 10_000.0

JsonObject = Mapping[str, Any]


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model. Immutable and complete: nothing here is looked up again in the JSON."""

    arch: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # not necessarily hidden_size / num_heads
    intermediate_size: int
    vocab_size: int
    rms_eps: float
    inv_freq: np.ndarray = field(repr=False, compare=False)  # float32 [head_dim / 2]; rope_text stands for it
    rope_attention_factor: float  # multiplies cos and sin
    rope_text: str  # canonical text of every rope parameter, for the fingerprint
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm over head_dim of each query and key head, before rope
    sliding_window: tuple[int | None, ...]  # per layer: a query sees itself and the window - 1 keys before it
    max_context: int
    eos_token_ids: tuple[int, ...]
    revision: str  # hash of what is computed; load_model_dir adds the weights' content

    @classmethod
    def from_dict(cls, config: JsonObject, generation_config: JsonObject | None = None) -> ModelConfig:
        """Read the content of ``config.json`` (and ``generation_config.json``, for the ids that end a text)."""
        arch = _architecture(config)
        _refuse_unsupported(config)
        num_heads = _positive_int(config, "num_attention_heads")
        num_layers = _positive_int(config, "num_hidden_layers", _MOST_LAYERS)
        hidden_size = _positive_int(config, "hidden_size")
        num_kv_heads = _num_kv_heads(config, arch, num_heads)
        head_dim = _head_dim(config, arch, hidden_size, num_heads)
        rope = _Rope.read(config, head_dim)
        llama_bias = arch in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bool(config.get("attention_bias", False))
        built = cls(
            arch=arch,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=_positive_int(config, "intermediate_size"),
            vocab_size=_positive_int(config, "vocab_size"),
            rms_eps=_positive_number(config, "rms_norm_eps"),
            inv_freq=rope.inv_freq,
            rope_attention_factor=rope.attention_factor,
            rope_text=rope.text,
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=llama_bias or arch == "Qwen2ForCausalLM",
            o_bias=llama_bias,
            mlp_bias=arch == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
            qk_norm=arch == "Qwen3ForCausalLM",
            sliding_window=_sliding_windows(config, arch, num_layers),
            max_context=rope.max_context,
            eos_token_ids=_eos_token_ids(config, generation_config or {}),
            revision="",
        )
        return replace(built, revision=built.content_hash())

    @classmethod
    def from_dir(cls, path: Path) -> ModelConfig:
        """Read a model directory. The revision covers the config only; ``weights.load_model_dir`` adds the weights."""
        config_path = config_file(path)
        generation_path = path / "generation_config.json"
        generation = read_object(generation_path, str(generation_path)) if generation_path.is_file() else {}
        return cls.from_dict(read_object(config_path, str(config_path)), generation)

    def content_hash(self, *more: bytes) -> str:
        """Hash of everything that decides the values computed, and of ``more``.

        Not covered, because two sides that differ in it still exchange KV safely: the context limit and the ids that
        end a text. Formatting and unknown keys of the JSON do not matter either.
        """
        digest = hashlib.blake2b(digest_size=16)
        skipped = ("inv_freq", "max_context", "eos_token_ids", "revision")
        content = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in skipped}
        digest.update(json.dumps(content, sort_keys=True).encode())
        for item in more:
            digest.update(item)
        return digest.hexdigest()


def config_file(path: Path) -> Path:
    """``config.json`` of a model directory; LocalError when there is none."""
    file = path / "config.json"
    if not file.is_file():
        fix = "give a Hugging Face model directory as --model"
        raise LocalError(f"no config.json in {path}", field="model", fix=fix)
    return file


def _required(config: JsonObject, name: str, where: str = "config.json") -> Any:
    value = config.get(name)
    if value is None:
        raise LocalError(f"{where} has no {name!r}", field=name)
    return value


def _positive_int(config: JsonObject, name: str, most: int = _MOST) -> int:
    value = _required(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise LocalError(f"{name} must be a positive integer of at most {most}, got {value!r:.60}", field=name)
    return value


def _whole_number(config: JsonObject, name: str) -> int:
    value = _required(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise LocalError(f"{name} must be a whole number, got {value!r:.60}", field=name)
    return value


def _positive_number(config: JsonObject, name: str, where: str = "config.json") -> float:
    value = _required(config, name, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise LocalError(f"{name} must be a positive number, got {value!r}", field=name)
    return float(value)


def _architecture(config: JsonObject) -> str:
    supported = f"this engine supports {', '.join(ARCHITECTURES)}"
    names = _required(config, "architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise LocalError(f"architectures must name one class, got {names!r}", field="architectures", fix=supported)
    if names[0] not in ARCHITECTURES:
        raise LocalError(f"architecture {names[0]!r} is not supported", field="architectures", fix=supported)
    return names[0]


def _refuse_unsupported(config: JsonObject) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        fix = f"this engine supports {', '.join(ACTIVATIONS)}"
        raise LocalError(f"activation {activation!r} is not supported", field="hidden_act", fix=fix)
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise LocalError(
            f"weights quantised by {method!r} are not supported",
            field="quantization_config",
            fix="give the unquantised model; this engine quantises with weights=int8 or int4",
        )


def _num_kv_heads(config: JsonObject, arch: str, num_heads: int) -> int:
    # An absent key means "as many as heads" for Llama only; the other families' own defaults fit no small model.
    if config.get("num_key_value_heads") is None and (arch == "LlamaForCausalLM" or "num_key_value_heads" in config):
        return num_heads
    num_kv_heads = _positive_int(config, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise LocalError(
            f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly", field="num_key_value_heads"
        )
    return num_kv_heads


def _head_dim(config: JsonObject, arch: str, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        head_dim = _positive_int(config, "head_dim")
    elif arch == "Qwen3ForCausalLM":
        head_dim = QWEN3_DEFAULT_HEAD_DIM
    elif hidden_size % num_heads:
        raise LocalError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}", field="head_dim"
        )
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise LocalError(f"head_dim must be even for rotary positions, got {head_dim}", field="head_dim")
    return head_dim


def _sliding_windows(config: JsonObject, arch: str, num_layers: int) -> tuple[int | None, ...]:
    if arch == "LlamaForCausalLM":
        return (None,) * num_layers
    window: int | None
    if arch == "MistralForCausalLM":
        window = config.get("sliding_window", MISTRAL_DEFAULT_WINDOW)
        first_layer = 0
    else:
        window = config.get("sliding_window") if config.get("use_sliding_window", False) else None
        first_layer = num_layers
        if window is not None and config.get("max_window_layers") is not None:
            first_layer = _whole_number(config, "max_window_layers")
    if window is not None:
        window = _positive_int({"sliding_window": window}, "sliding_window")
    layer_types = config.get("layer_types")
    if layer_types is None:
        return tuple(window if layer >= first_layer else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or not all(isinstance(kind, str) for kind in layer_types):
        raise LocalError(f"layer_types must be a list of names, got {layer_types!r}", field="layer_types")
    if len(layer_types) != num_layers:
        raise LocalError(f"layer_types names {len(layer_types)} layers of {num_layers}", field="layer_types")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        fix = "this engine supports full_attention, sliding_attention"
        raise LocalError(f"layer type {unknown[0]!r} is not supported", field="layer_types", fix=fix)
    if window is None and "sliding_attention" in layer_types:
        raise LocalError("layer_types has sliding_attention but no window is set", field="sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _eos_token_ids(config: JsonObject, generation_config: JsonObject) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in (config, generation_config):
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in values):
            raise LocalError(f"eos_token_id must be token ids, got {value!r}", field="eos_token_id")
        ids.update(values)
    return tuple(sorted(ids))


@dataclass(frozen=True)
class _Rope:
    """Rotary positions of one model, whichever way the config spells them."""

    inv_freq: np.ndarray
    attention_factor: float
    text: str
    max_context: int

    @classmethod
    def read(cls, config: JsonObject, head_dim: int) -> _Rope:
        try:
            with np.errstate(all="ignore"):
                found = cls._read(config, head_dim)
            sound = np.isfinite(found.inv_freq).all() and (found.inv_freq > 0).all()
        except (ArithmeticError, ValueError):  # of a logarithm or a quotient
            sound = False
        if not sound or not math.isfinite(found.attention_factor):
            fix = "one of them is far too large or small"
            raise LocalError("the rope parameters give no frequencies", field="rope_parameters", fix=fix)
        return found

    @classmethod
    def _read(cls, config: JsonObject, head_dim: int) -> _Rope:
        parameters = _rope_parameters(config)
        kind = parameters["rope_type"]
        theta = _rope_number(parameters, "rope_theta")
        if theta <= 1.0:  # its powers would not be waves of different lengths
            raise LocalError(f"rope_theta must exceed 1, got {theta:g}", field="rope_theta")
        max_positions = _positive_int(config, "max_position_embeddings")
        if kind in ("llama3", "yarn"):
            # An outer key wins over the inner one, as in transformers.
            original = config.get("original_max_position_embeddings")
            parameters["original_max_position_embeddings"] = (
                original or parameters.get("original_max_position_embeddings") or max_positions
            )
        plain = _plain_inv_freq(theta, head_dim)
        attention_factor = 1.0
        max_context = max_positions
        match kind:
            case "default":
                inv_freq = plain
            case "linear":
                factor = _rope_number(parameters, "factor")
                inv_freq = plain / np.float32(factor)
                max_context = _stretched(max_positions, factor)  # linear configs state the length before scaling
            case "llama3":
                inv_freq = _llama3_inv_freq(plain, parameters)
            case "yarn":
                original = _rope_number(parameters, "original_max_position_embeddings")
                if parameters.get("factor") is None:
                    parameters["factor"] = max_positions / original
                inv_freq = _yarn_inv_freq(theta, head_dim, parameters)
                attention_factor = _yarn_attention_factor(parameters)
                stretched = _stretched(original, _rope_number(parameters, "factor"))
                max_context = max(max_positions, stretched)  # Qwen states the length before, others after scaling
            case _:
                fix = f"this engine supports {', '.join(ROPE_TYPES)}"
                raise LocalError(f"rope type {kind!r} is not supported", field="rope_type", fix=fix)
        text = json.dumps({**parameters, "head_dim": head_dim}, sort_keys=True)
        return cls(inv_freq.astype(np.float32), attention_factor, text, max_context)


def _rope_parameters(config: JsonObject) -> dict[str, Any]:
    """``rope_parameters`` of transformers 5, or ``rope_scaling`` and ``rope_theta`` of before, as one dict."""
    raw = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(raw, Mapping):
        raise LocalError(f"rope parameters must be an object, got {raw!r}", field="rope_parameters")
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise LocalError("different rope parameters per layer type are not supported", field="rope_parameters")
    parameters = dict(raw)
    old_kind = parameters.pop("type", None)
    parameters["rope_type"] = parameters.get("rope_type") or old_kind or "default"
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = config.get("rope_theta") or DEFAULT_ROPE_THETA
    # One spelling of a number, so that 10000 and 10000.0 give one fingerprint.
    parameters = {
        name: float(value) if isinstance(value, int) and not isinstance(value, bool) else value
        for name, value in parameters.items()
        if value is not None
    }
    partial = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and partial != 1.0:
        raise LocalError(f"partial_rotary_factor {partial} is not supported", field="partial_rotary_factor")
    return parameters


def _rope_number(parameters: JsonObject, name: str) -> float:
    return _positive_number(parameters, name, where="the rope parameters")


def _stretched(num_positions: float, factor: float) -> int:
    if num_positions * factor > _MOST:
        raise LocalError(f"factor {factor:g} makes {num_positions * factor:.3g} positions", field="factor")
    return int(num_positions * factor)


def _wave_powers(theta: float, head_dim: int) -> np.ndarray:
    """theta ** (2i / head_dim), rounded once: float32 exponents as in the reference, the power itself in float64.

    Library powf differs by a last bit between machines; hand-off needs both sides to rotate alike.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def _plain_inv_freq(theta: float, head_dim: int) -> np.ndarray:
    return np.float32(1.0) / _wave_powers(theta, head_dim)


def _llama3_inv_freq(plain: np.ndarray, parameters: JsonObject) -> np.ndarray:
    """Llama 3.1: long waves are stretched by ``factor``, short ones kept, those between blended."""
    factor = np.float32(_rope_number(parameters, "factor"))
    low = _rope_number(parameters, "low_freq_factor")
    high = _rope_number(parameters, "high_freq_factor")
    original = _rope_number(parameters, "original_max_position_embeddings")
    if high <= low:
        raise LocalError(f"high_freq_factor {high} must exceed low_freq_factor {low}", field="high_freq_factor")
    wavelength = np.float32(2 * math.pi) / plain
    blend = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * plain / factor + blend * plain
    long_or_kept = np.where(wavelength > original / low, plain / factor, plain)
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(between, blended, long_or_kept)


def _yarn_inv_freq(theta: float, head_dim: int, parameters: JsonObject) -> np.ndarray:
    """YaRN: a ramp over the dimensions from kept (fast) to interpolated by ``factor`` (slow) frequencies."""
    factor = _rope_number(parameters, "factor")
    original = _rope_number(parameters, "original_max_position_embeddings")

    def dimension_of(num_rotations: float) -> float:
        return head_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (
        dimension_of(_rope_number(parameters, name) if parameters.get(name) else usual)
        for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the reference's guard against a division by zero
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = 1 - np.clip(ramp, 0, 1)
    powers = _wave_powers(theta, head_dim)
    return (1 / (np.float32(factor) * powers)) * (1 - kept) + (1 / powers) * kept


def _yarn_attention_factor(parameters: JsonObject) -> float:
    if parameters.get("attention_factor") is not None:
        return _rope_number(parameters, "attention_factor")
    factor = _rope_number(parameters, "factor")

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all:
        return magnitude(_rope_number(parameters, "mscale")) / magnitude(_rope_number(parameters, "mscale_all_dim"))
    return magnitude(1.0)
