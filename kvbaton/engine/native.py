"""The model on native CPU kernels: one C call per step (or per layer), AMX where the processor has it.

Invariants: a row's logits and KV depend on that row's own sequence only, bit for bit, never on the rest of the batch,
the chunking of the prompt, the block size or the number of threads. Every index is checked here before the call, so a
wrong block table raises and never touches memory outside the pool. The kernels release the GIL; a ``NativeModel`` runs
one step at a time.

Knows nothing about requests, sampling policy or who owns a block.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbaton.kv.layout import KVLayout
from kvbaton.native_library import native_library
from kvbaton.types import LocalError

if TYPE_CHECKING:
    from kvbaton.engine.model import StepInput
    from kvbaton.engine.model_config import ModelConfig
    from kvbaton.engine.pool import KVPool

ABI_VERSION = 3
PANEL_COLUMNS = 32
ENGINES = ("portable", "avx512", "avx512_bf16", "amx")
FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
KV_TYPES = {"float32": 0, "bfloat16": 1, "float8_e4m3": 2}
QKV, O_PROJ, GATE_UP, DOWN, LM_HEAD = range(5)
INPUT_NORM, POST_NORM, Q_NORM, K_NORM, FINAL_NORM = range(5)

Array = np.ndarray


class _Config(ctypes.Structure):
    """Mirrors ``Config`` in _native/model.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("intermediate", "vocab", "qk_norm", "bf16", "block_size", "kv_type")),
        *((name, ctypes.c_int32) for name in ("num_threads", "engine")),
        *((name, ctypes.c_float) for name in ("eps", "attention_scale", "rope_factor")),
    ]


class _Step(ctypes.Structure):
    """Mirrors ``Step`` in _native/model.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_rows", "num_seqs", "max_blocks", "num_samples")),
        ("num_blocks", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "seq_starts", "block_table", "sample_rows")),
        ("kv", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The loaded kernels, or why there are none."""
    path = native_library(__file__, "_kernels")
    if path is None:
        return "the kernels were not built (no C++ compiler at installation?)"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the kernels cannot be loaded: {error}"
    library.kvb_abi_version.restype = ctypes.c_int
    if library.kvb_abi_version() != ABI_VERSION:
        return "the kernels were built from another version of the sources; build them again"
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.kvb_create.argtypes = [pointer, pointer]
    library.kvb_create.restype = pointer
    library.kvb_destroy.argtypes = [pointer]
    library.kvb_destroy.restype = None
    library.kvb_set_linear.argtypes = [pointer, *[integer] * 5, pointer, pointer, integer, pointer]
    library.kvb_set_norm.argtypes = [pointer, integer, integer, pointer, integer]
    library.kvb_set_embedding.argtypes = [pointer, pointer]
    library.kvb_set_window.argtypes = [pointer, integer, integer]
    library.kvb_set_window.restype = None
    library.kvb_begin.argtypes = [pointer, pointer]
    library.kvb_layers.argtypes = [pointer, pointer, integer, integer]
    library.kvb_logits.argtypes = [pointer, pointer]
    library.kvb_products.argtypes = [pointer, integer]
    library.kvb_weight_bytes.argtypes = [pointer]
    library.kvb_weight_bytes.restype = ctypes.c_int64
    library.kvb_read_weights.argtypes = [pointer]
    library.kvb_read_weights.restype = ctypes.c_uint64
    library.kvb_argmax.argtypes = [pointer, integer, integer, pointer]
    library.kvb_argmax.restype = None
    return library


def available() -> str | None:
    """None when the kernels can run here, else the reason why not."""
    library = _library()
    return library if isinstance(library, str) else None


def unsupported(config: ModelConfig, layout: KVLayout) -> str | None:
    """None when these kernels compute such a model over such a pool, else what of it they do not."""
    if config.head_dim % 16:
        return f"head_dim {config.head_dim} is no multiple of 16"
    if layout.dtype not in KV_TYPES:
        return f"KV dtype {layout.dtype} is none of {', '.join(KV_TYPES)}"
    if layout.order != "HND":
        return f"KV order {layout.order} is not HND"
    return None


def best_engine(dtype: str) -> str:
    """Which of ``ENGINES`` this processor would use."""
    return ENGINES[_loaded().kvb_best_engine(int(dtype == "bfloat16"))]


def greedy(logits: Array) -> Array:
    """Index of the largest logit of each row, int32 [R]; the first one of equals."""
    logits = np.ascontiguousarray(logits, dtype=np.float32)
    out = np.empty(len(logits), dtype=np.int32)
    if logits.size:
        _loaded().kvb_argmax(logits.ctypes.data, *logits.shape, out.ctypes.data)
    return out


class NativeModel:
    """One model with packed weights, for pools of one layout. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Any],
        layout: KVLayout,
        dtype: str = "bfloat16",
        weights: str = "native",
        num_threads: int = 1,
        engine: str | None = None,
    ) -> None:
        """``weights``: native, int8 or int4 (with an int8 lm head). ``engine`` overrules the choice by processor."""
        self._library = _loaded()
        self._handle: int | None = None
        self.config = config
        self.layout = layout
        self.dtype = dtype
        self.engine = best_engine(dtype) if engine is None else engine
        _check_model(config, layout, dtype, weights, self.engine)
        inv_freq = np.ascontiguousarray(config.inv_freq, dtype=np.float32)
        native_config = _Config(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            qk_norm=config.qk_norm,
            bf16=dtype == "bfloat16",
            block_size=layout.block_size,
            kv_type=KV_TYPES[layout.dtype],
            num_threads=num_threads,
            engine=ENGINES.index(self.engine),
            eps=config.rms_eps,
            attention_scale=config.head_dim**-0.5,
            rope_factor=config.rope_attention_factor,
        )
        self._handle = self._library.kvb_create(ctypes.addressof(native_config), inv_freq.ctypes.data)
        if not self._handle:
            raise MemoryError("no memory for the model")
        native = dtype if weights == "native" else weights
        self._format = FORMATS[native]
        self._head_format = FORMATS["int8" if weights == "int4" else native]
        self._pack(tensors)

    def close(self) -> None:
        """Free the packed weights. The model cannot be used afterwards."""
        if self._handle:
            self._library.kvb_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()

    def forward(self, step: StepInput, kv: KVPool, on_layer: Callable[[int], None] | None = None) -> Array:
        """Compute the step, write its K and V into ``kv``, return float32 logits ``[R, vocab]``."""
        return self.forward_buffer(step, kv.buffer, kv.num_blocks, on_layer)

    def forward_buffer(
        self, step: StepInput, kv_buffer: Array, num_blocks: int, on_layer: Callable[[int], None] | None = None
    ) -> Array:
        """``forward`` on a plain uint8 array that holds a pool of ``num_blocks``."""
        if self._handle is None:
            raise LocalError("the model is closed")
        _check_buffer(kv_buffer, self.layout.pool_bytes(num_blocks))
        arrays = _StepArrays(step, self.config, self.layout, num_blocks)
        logits = np.empty((len(arrays.sample_rows), self.config.vocab_size), dtype=np.float32)
        native_step = arrays.native(kv_buffer, num_blocks, logits)
        address = ctypes.addressof(native_step)
        self._checked(self._library.kvb_begin(self._handle, address))
        if on_layer is None:
            self._checked(self._library.kvb_layers(self._handle, address, 0, self.config.num_layers))
        else:
            for layer in range(self.config.num_layers):
                self._checked(self._library.kvb_layers(self._handle, address, layer, layer + 1))
                on_layer(layer)
        if len(logits):
            self._checked(self._library.kvb_logits(self._handle, address))
        return logits

    # ---- limits, for benchmarks ----

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights that every decode step reads."""
        return int(self._library.kvb_weight_bytes(self._handle))

    def read_weights(self) -> None:
        """Read every packed weight once and do nothing with it: no decode step can be faster."""
        self._library.kvb_read_weights(self._handle)

    def run_products(self, num_rows: int) -> None:
        """Only the layers' products of a step of ``num_rows`` rows, on numbers of no meaning."""
        self._checked(self._library.kvb_products(self._handle, num_rows))

    def _checked(self, status: int) -> None:
        if status:
            raise MemoryError("no memory for the step's activations")

    # ---- packing ----

    def _pack(self, tensors: Mapping[str, Any]) -> None:
        c = self.config
        query_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        for layer in range(c.num_layers):
            prefix = f"model.layers.{layer}."
            attention = f"{prefix}self_attn."
            mlp = f"{prefix}mlp."
            self._linear(
                tensors,
                (layer, QKV),
                [(f"{attention}q_proj", query_size), (f"{attention}k_proj", kv_size), (f"{attention}v_proj", kv_size)],
                c.hidden_size,
                c.qkv_bias,
            )
            self._linear(tensors, (layer, O_PROJ), [(f"{attention}o_proj", c.hidden_size)], query_size, c.o_bias)
            gate_up = [(f"{mlp}gate_proj", c.intermediate_size), (f"{mlp}up_proj", c.intermediate_size)]
            self._linear(tensors, (layer, GATE_UP), gate_up, c.hidden_size, c.mlp_bias)
            self._linear(tensors, (layer, DOWN), [(f"{mlp}down_proj", c.hidden_size)], c.intermediate_size, c.mlp_bias)
            self._norm(tensors, layer, INPUT_NORM, f"{prefix}input_layernorm.weight", c.hidden_size)
            self._norm(tensors, layer, POST_NORM, f"{prefix}post_attention_layernorm.weight", c.hidden_size)
            if c.qk_norm:
                self._norm(tensors, layer, Q_NORM, f"{attention}q_norm.weight", c.head_dim)
                self._norm(tensors, layer, K_NORM, f"{attention}k_norm.weight", c.head_dim)
            self._library.kvb_set_window(self._handle, layer, c.sliding_window[layer] or 0)
        self._norm(tensors, 0, FINAL_NORM, "model.norm.weight", c.hidden_size)
        embedding = _tensor(tensors, "model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
        self._checked(self._library.kvb_set_embedding(self._handle, embedding.ctypes.data))
        head = embedding
        if not c.tie_embeddings:
            head = _tensor(tensors, "lm_head.weight", (c.vocab_size, c.hidden_size))
        self._set_linear((0, LM_HEAD), [head], None)

    def _linear(
        self, tensors: Mapping[str, Any], where: tuple[int, int], parts: list[tuple[str, int]], columns: int, bias: bool
    ) -> None:
        matrices = [_tensor(tensors, f"{name}.weight", (rows, columns)) for name, rows in parts]
        biases = [_tensor(tensors, f"{name}.bias", (rows,)) for name, rows in parts] if bias else None
        self._set_linear(where, matrices, biases)

    def _set_linear(self, where: tuple[int, int], matrices: list[Array], biases: list[Array] | None) -> None:
        layer, which = where
        rows = np.array([len(m) for m in matrices], dtype=np.int32)
        pointers = (ctypes.c_void_p * len(matrices))(*(m.ctypes.data for m in matrices))
        bias = None
        if biases is not None:
            bias = _padded(_interleave(*biases) if which == GATE_UP else np.concatenate(biases))
        self._checked(
            self._library.kvb_set_linear(
                self._handle,
                layer,
                which,
                self._head_format if which == LM_HEAD else self._format,
                int(rows.sum()),
                matrices[0].shape[1],
                ctypes.addressof(pointers),
                rows.ctypes.data,
                len(matrices),
                None if bias is None else bias.ctypes.data,
            )
        )

    def _norm(self, tensors: Mapping[str, Any], layer: int, which: int, name: str, size: int) -> None:
        weight = _tensor(tensors, name, (size,))
        self._checked(self._library.kvb_set_norm(self._handle, layer, which, weight.ctypes.data, size))


class _StepArrays:
    """A step's arrays, checked against the model and the pool, and kept alive during the call."""

    def __init__(self, step: StepInput, config: ModelConfig, layout: KVLayout, num_blocks: int) -> None:
        self.token_ids = _indices(step.token_ids, "token_ids", 1)
        self.positions = _indices(step.positions, "positions", 1)
        self.seq_starts = _indices(step.seq_starts, "seq_starts", 1)
        self.block_table = _indices(step.block_table, "block_table", 2)
        self.sample_rows = _indices(step.sample_rows, "sample_rows", 1)
        num_rows, num_seqs = len(self.token_ids), len(self.seq_starts) - 1
        _require(num_rows > 0 and len(self.positions) == num_rows, "positions", "one for each row, at least one row")
        _require(self.block_table.shape[0] == num_seqs, "block_table", "one row for each sequence")
        starts = self.seq_starts
        good_starts = starts[0] == 0 and starts[-1] == num_rows and bool((np.diff(starts) > 0).all())
        _require(good_starts, "seq_starts", "ascending from 0 to the number of rows, no empty sequence")
        _require(_within(self.token_ids, config.vocab_size), "token_ids", "within the vocabulary")
        _require(_within(self.block_table, num_blocks), "block_table", f"blocks below {num_blocks}")
        _require(_within(self.sample_rows, num_rows), "sample_rows", "rows of this step")
        capacity = self.block_table.shape[1] * layout.block_size
        _require(_within(self.positions, capacity), "positions", "within the blocks of their sequence")
        follows = np.diff(self.positions) == 1
        follows[starts[1:-1] - 1] = True
        _require(bool(follows.all()), "positions", "consecutive within a sequence")

    def native(self, kv_buffer: Array, num_blocks: int, logits: Array) -> _Step:
        return _Step(
            num_rows=len(self.token_ids),
            num_seqs=len(self.seq_starts) - 1,
            max_blocks=self.block_table.shape[1],
            num_samples=len(self.sample_rows),
            num_blocks=num_blocks,
            token_ids=self.token_ids.ctypes.data,
            positions=self.positions.ctypes.data,
            seq_starts=self.seq_starts.ctypes.data,
            block_table=self.block_table.ctypes.data,
            sample_rows=self.sample_rows.ctypes.data,
            kv=kv_buffer.ctypes.data,
            logits=logits.ctypes.data,
        )


def _loaded() -> ctypes.CDLL:
    library = _library()
    if isinstance(library, str):
        raise LocalError(f"the native kernels cannot run: {library}", field="backend", fix="use backend torch")
    return library


def _check_model(config: ModelConfig, layout: KVLayout, dtype: str, weight_format: str, engine: str) -> None:
    if dtype not in ("float32", "bfloat16"):
        raise LocalError(f"dtype {dtype!r} is unknown", field="dtype", fix="use float32 or bfloat16")
    if weight_format not in ("native", "int8", "int4"):
        raise LocalError(f"weights {weight_format!r} are unknown", field="weights", fix="use native, int8 or int4")
    if ENGINES.index(engine) > ENGINES.index(best_engine(dtype)):
        raise LocalError(f"engine {engine} cannot run {dtype} on this processor", field="engine")
    reason = unsupported(config, layout)
    if reason is not None:
        raise LocalError(f"the native kernels cannot run this: {reason}", field="backend", fix="use backend torch")
    if layout.block_size % 8:
        raise LocalError(f"block_size must be a multiple of 8, got {layout.block_size}", field="block_size")
    wanted = (config.num_layers, config.num_kv_heads, config.head_dim)
    if (layout.num_layers, layout.num_kv_heads, layout.head_dim) != wanted:
        raise LocalError(f"the KV layout {layout} is not one of this model", field="layout")


def _check_buffer(buffer: Array, size_bytes: int) -> None:
    if (
        buffer.dtype != np.uint8
        or buffer.nbytes < size_bytes
        or not buffer.flags.c_contiguous
        or not buffer.flags.writeable
    ):
        raise LocalError(f"the pool must be {size_bytes} writable, contiguous bytes", field="kv")


def _indices(array: Array, field: str, ndim: int) -> Array:
    array = np.ascontiguousarray(array)
    if array.ndim != ndim or array.dtype.kind not in "iu":
        raise LocalError(f"{field} must be integers of {ndim} dimension(s)", field=field)
    if array.dtype != np.int32:
        if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
            raise LocalError(f"{field} must fit in 32 bits", field=field)
        array = array.astype(np.int32)
    return array


def _within(array: Array, limit: int) -> bool:
    return not array.size or (int(array.min()) >= 0 and int(array.max()) < limit)


def _require(condition: bool, field: str, what: str) -> None:
    if not condition:
        raise LocalError(f"{field} must be {what}", field=field)


def _tensor(weights: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Array:
    """``weights[name]`` as contiguous float32."""
    if name not in weights:
        raise LocalError(f"the model has no tensor {name}", field="model")
    value = weights[name]
    if not isinstance(value, np.ndarray):  # a torch tensor; numpy knows no bfloat16
        value = value.detach().float().cpu().numpy()
    array = np.ascontiguousarray(value, dtype=np.float32)
    if array.shape != shape:
        raise LocalError(f"tensor {name} has shape {array.shape}, expected {shape}", field="model")
    return array


def _interleave(gate: Array, up: Array) -> Array:
    """Sixteen of the one, sixteen of the other: the column order of the fused gate and up product."""
    tiles = -(-len(gate) // 16)
    out = np.zeros((tiles, 2, 16), dtype=np.float32)
    for part, bias in enumerate((gate, up)):
        padded = np.zeros(tiles * 16, dtype=np.float32)
        padded[: len(bias)] = bias
        out[:, part] = padded.reshape(tiles, 16)
    return out.reshape(-1)


def _padded(array: Array) -> Array:
    out = np.zeros(-(-len(array) // PANEL_COLUMNS) * PANEL_COLUMNS, dtype=np.float32)
    out[: len(array)] = array
    return out
