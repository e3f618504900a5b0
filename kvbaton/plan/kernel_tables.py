"""AIConfigurator's measured kernel times, composed into the planner's own step model. Optional.

Reads the Parquet tables inside the package ``aiconfigurator-core`` (matrix products, attention of prompts and of
decodes, all-reduce; by GPU, engine and engine version), adds them up for one dense decoder, and fits the linear form
of ``step_time`` to the sums. What the form cannot follow is reported as the fit's error.

Not in the tables: launching, sampling, norms, activations. ``fixed_ms`` of a scenario stands for them (``FIXED_MS``
where it is not given). Covered: full attention with gated MLPs, 16 and 8 bit weights, tensor parallelism. Anything else
is an error that says so, never an estimate.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvbaton.plan.kv_math import rank_heads
from kvbaton.plan.least_squares import relative_nonnegative
from kvbaton.plan.model_shape import ModelShape
from kvbaton.plan.step_time import StepModel, pairs
from kvbaton.types import LocalError

PACKAGE = "aiconfigurator-core"
SYSTEMS = {
    "a100-80g": "a100_sxm", "h100-sxm": "h100_sxm", "h200-sxm": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}  # fmt: skip
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens of one prompt, fitted
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # decoding sequences, fitted
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)  # cached tokens of each
MS = 1e-3
FIXED_MS = 1.5  # a step, outside the tables: about what vLLM rows of Llama-3.1-70B on H200s need to come out right


class Choice(msgspec.Struct, frozen=True):
    """Which tables: ``engine`` as the package names it, ``version`` None for the newest that has all of them."""

    gpu: str
    engine: str = "vllm"
    version: str | None = None


class TableFit(msgspec.Struct, frozen=True):
    step: StepModel
    num_points: int
    mean_relative_error: float  # of the linear form against the composed times
    worst_relative_error: float


def package_folder() -> Path:
    """The folder with the tables, where the package is installed; the package itself is not imported."""
    found = importlib.util.find_spec("aiconfigurator_core")
    places = list(found.submodule_search_locations or ()) if found else []
    if not places:
        raise LocalError(f"{PACKAGE} is not installed", field="engine.tables", fix=f"pip install {PACKAGE}")
    return Path(places[0]) / "systems" / "data"


class KernelTables:
    """The tables of one GPU and engine. Times in seconds, interpolated between measured points, on log scales."""

    def __init__(self, choice: Choice, folder: Path | None = None) -> None:
        system = SYSTEMS.get(choice.gpu.lower())
        root = folder or package_folder()
        if system is None or not (root / system).is_dir():
            raise LocalError(f"{PACKAGE} has no tables of {choice.gpu}", field="hardware.gpu",
                             fix=f"one of {', '.join(SYSTEMS)}")  # fmt: skip
        self._root, self.choice = root / system, choice
        self.versions: dict[str, str] = {}
        self._gemm: dict[str, _Grid] = {}
        self._rows: dict[str, list[dict[str, Any]]] = {}

    def check(self, shape: ModelShape, weight_bits: int) -> None:
        """``LocalError`` when there is no use in asking for that model, whatever the parallelism."""
        _heads(shape, 1)
        for group, table in (
            ("gemm", "gemm"),
            ("attention", "context_attention"),
            ("attention", "generation_attention"),
        ):
            self._read(group, table)
        self.gemm_s(weight_bits, np.ones(1), shape.hidden_size, shape.hidden_size)

    def gemm_s(self, weight_bits: int, tokens: np.ndarray, outputs: int, inputs: int) -> np.ndarray:
        """A product of ``tokens`` rows with an ``inputs`` x ``outputs`` matrix."""
        kind = {16: "bfloat16", 8: "fp8"}.get(weight_bits)
        if kind is None:
            raise LocalError(f"{PACKAGE} is read for 16 and 8 bit weights", field="model.weight_bits")
        if kind not in self._gemm:
            rows = [row for row in self._read("gemm", "gemm") if row["gemm_dtype"] == kind]
            if not rows:
                raise LocalError(f"no {kind} products of {self.choice.engine}", field="model.weight_bits")
            self._gemm[kind] = _Grid(rows)
        return self._gemm[kind].times(tokens, outputs, inputs)

    def attention_s(self, phase: str, heads: tuple[int, int, int], kv_dtype: str) -> dict[tuple[int, int], float]:
        """(batch, tokens) to time for (query heads, KV heads, head dim): prompt lengths, or contexts of decodes."""
        found: dict[tuple[int, int], float] = {}
        for row in self._read("attention", f"{phase}_attention"):
            same = (row["num_heads"], row["num_key_value_heads"], row["head_dim"]) == heads
            if same and row["window_size"] == 0 and row["kv_cache_dtype"] == kv_dtype:
                tokens = row["isl"] + row["step"] if phase == "generation" else row["isl"]
                key, time_s = (row["batch_size"], tokens), row["latency"] * MS
                found[key] = min(time_s, found.get(key, time_s))
        if not found:
            raise LocalError(f"no {phase} attention with {heads} heads, KV heads and head dim, KV in {kv_dtype}",
                             field="engine.tables", fix="another engine or tensor parallel size")  # fmt: skip
        return found

    def all_reduce_s(self, tp: int, elements: np.ndarray) -> np.ndarray:
        """Of that many 16-bit numbers: only so do the largest messages come out at the speed of the GPUs' links."""
        if tp == 1:
            return np.zeros(len(elements))
        best: dict[int, float] = {}
        for row in self._read("comm", "custom_allreduce"):
            if row["num_gpus"] == tp:
                size, time_s = row["message_size"], row["latency"] * MS
                best[size] = min(time_s, best.get(size, time_s))
        if not best:
            raise LocalError(f"no all-reduce over {tp} GPUs", field="search.tp", fix="2, 4 or 8")
        sizes = np.array(sorted(best))
        times = np.array([best[size] for size in sizes])
        return _along(np.log(elements), np.log(sizes), np.log(times))

    def _read(self, group: str, table: str) -> list[dict[str, Any]]:
        if table not in self._rows:
            try:
                import pyarrow.parquet as parquet
            except ImportError:
                fix = "pip install 'kvbaton[parquet]'"
                raise LocalError("the tables are Parquet files", field="engine.tables", fix=fix) from None
            home = self._root / group / self.choice.engine
            wanted = self.choice.version or "*"
            paths = sorted(home.glob(f"{wanted}/{table}_perf.parquet"), key=lambda path: _newness(path.parent.name))
            if not paths:
                raise LocalError(f"no {table} table of {self.choice.engine} {self.choice.version or ''} for "
                                 f"{self.choice.gpu}", field="engine.tables")  # fmt: skip
            self.versions[table] = paths[-1].parent.name
            self._rows[table] = parquet.read_table(paths[-1]).to_pylist()
        return self._rows[table]


class _Grid:
    """Matrix products measured on a grid of sizes; between its points the logarithm of the time is linear."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._times: dict[tuple[int, int], dict[int, float]] = {}
        for row in rows:
            column = self._times.setdefault((row["n"], row["k"]), {})
            column[row["m"]] = min(row["latency"] * MS, column.get(row["m"], np.inf))
        self._n = sorted({n for n, _ in self._times})
        self._k = sorted({k for _, k in self._times})

    def times(self, tokens: np.ndarray, outputs: int, inputs: int) -> np.ndarray:
        # Wider than the widest measured: as many of those as it takes, for such a product is bound by its size alone.
        wide = max(1.0, outputs / self._n[-1])
        sides_n, sides_k = _between(self._n, outputs / wide), _between(self._k, float(inputs))
        total = np.zeros(len(tokens))
        for n, share_n in sides_n:
            for k, share_k in sides_k:
                column = self._times.get((n, k))
                if column is None:
                    raise LocalError(f"no product with a {k} x {n} matrix", field="engine.tables")
                sizes = np.array(sorted(column))
                times = np.log([column[size] for size in sizes])
                total += share_n * share_k * np.log(_along(np.log(tokens), np.log(sizes), times))
        return wide * np.exp(total)


def _between(grid: list[int], value: float) -> list[tuple[int, float]]:
    """The grid points around a value with their shares, on a log scale."""
    if value <= grid[0]:
        return [(grid[0], 1.0)]
    high = next((point for point in grid if point >= value), grid[-1])
    low = max(point for point in grid if point <= min(value, high))
    if low == high:
        return [(low, 1.0)]
    share = float(np.log(value / low) / np.log(high / low))
    return [(low, 1.0 - share), (high, share)]


def _along(at: np.ndarray, sizes: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Log-log interpolation; past the largest size the time grows with the size."""
    return np.exp(np.interp(at, sizes, times) + np.maximum(0.0, at - sizes[-1]))


def _newness(version: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("."))


@lru_cache(maxsize=8)
def tables_for(choice: Choice, folder: Path | None = None) -> KernelTables:
    return KernelTables(choice, folder)


def fit_tables(tables: KernelTables, shape: ModelShape, tp: int, weight_bits: int, kv_dtype: str) -> TableFit:
    """The step model of one worker, nothing added for what the tables do not hold."""
    heads = _heads(shape, tp)
    kind = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp8": "fp8"}.get(kv_dtype)
    if kind is None:
        raise LocalError(f"{PACKAGE} has no attention with KV in {kv_dtype}", field="model.kv_dtype")
    prompt, decode = (tables.attention_s(phase, heads, kind) for phase in ("context", "generation"))
    lengths = [tokens for tokens in PROMPTS if (1, tokens) in prompt]
    points = [(batch, tokens) for tokens in CONTEXTS for batch in BATCHES if (batch, tokens) in decode]
    num_tokens = np.array([*lengths, *(batch for batch, _ in points)], dtype=float)
    ones = np.array([1.0] * len(lengths) + [batch for batch, _ in points])  # sequences that need a next token
    attention = np.array([*(prompt[1, tokens] for tokens in lengths), *(decode[point] for point in points)])
    measured = shape.num_layers * attention + _products_s(tables, shape, (tp, weight_bits), (num_tokens, ones))
    features = np.array(
        [[1.0, tokens, pairs(0, tokens), 0.0, 0.0] for tokens in lengths]
        + [[1.0, batch, 0.0, batch, batch * tokens] for batch, tokens in points]
    )
    found = relative_nonnegative(features, measured)
    fixed_s, token_s, pair_s, sequence_s, context_s = map(float, found)
    errors = np.abs(features @ found / measured - 1.0)
    versions = sorted(set(tables.versions.values()), key=_newness)
    source = f"{PACKAGE} tables of {tables.choice.gpu} x {tp}, {tables.choice.engine} {'/'.join(versions)}"
    step = StepModel(fixed_s, token_s, pair_s, sequence_s, context_s, source=source)
    return TableFit(step, len(measured), float(errors.mean()), float(errors.max()))


def _products_s(
    tables: KernelTables, shape: ModelShape, how: tuple[int, int], loads: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """Matrix products and all-reduces of steps; the output head, in 16 bits, is for one token of each sequence."""
    (tp, bits), (tokens, sequences) = how, loads
    hidden, inner, vocab = shape.hidden_size, shape.config["intermediate_size"], shape.config["vocab_size"]
    query_heads, kv_heads, dim = _heads(shape, tp)
    layer = (
        tables.gemm_s(bits, tokens, (query_heads + 2 * kv_heads) * dim, hidden)
        + tables.gemm_s(bits, tokens, hidden, query_heads * dim)
        + tables.gemm_s(bits, tokens, 2 * inner // tp, hidden)
        + tables.gemm_s(bits, tokens, hidden, inner // tp)
        + 2 * tables.all_reduce_s(tp, tokens * hidden)
    )
    return shape.num_layers * layer + tables.gemm_s(16, sequences, vocab // tp, hidden)


def _heads(shape: ModelShape, tp: int) -> tuple[int, int, int]:
    """Query heads, KV heads and head dim of one rank of a dense decoder with full attention."""
    experts = any(shape.config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    kinds = {(layer.kind, layer.num_kv_heads, layer.key_dim) for layer in shape.layers}
    if experts or len(kinds) != 1 or shape.layers[0].kind != "full":
        raise LocalError(f"{shape.name} is no dense decoder with full attention in every layer",
                         field="engine.tables", fix="leave engine.tables out")  # fmt: skip
    if not isinstance(shape.config.get("intermediate_size"), int) or not shape.config.get("vocab_size"):
        raise LocalError("the model's config has no intermediate_size or vocab_size", field="engine.tables")
    if shape.num_heads % tp:
        raise LocalError(f"{shape.num_heads} heads over {tp} ranks", field="search.tp")
    return shape.num_heads // tp, rank_heads(shape.layers[0].num_kv_heads, tp), shape.layers[0].key_dim


def with_overheads(step: StepModel, fixed_ms: float) -> StepModel:
    """What the tables leave out, as so many milliseconds a step."""
    return msgspec.structs.replace(
        step, fixed_s=step.fixed_s + fixed_ms * MS, source=f"{step.source}, plus {fixed_ms:g} ms a step outside them"
    )
