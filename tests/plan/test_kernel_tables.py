"""AIConfigurator's tables: composed for a dense decoder, against numbers that are known, and refused by name.

Those marked ``peer`` read the real package (``aiconfigurator-core``, installed, or under the peers' folder).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvbaton.plan.kernel_tables import FIXED_MS, Choice, KernelTables, fit_tables, package_folder, with_overheads
from kvbaton.plan.kv_math import Sharding
from kvbaton.plan.measured_rows import Row, RowModel, memory_full, read_rows
from kvbaton.plan.model_presets import preset
from kvbaton.plan.scenario import Engine, parse
from kvbaton.plan.step_time import StepModel, StepWork
from kvbaton.types import LocalError

PEERS = Path(os.environ.get("KVBATON_PEERS", Path.home() / ".cache" / "kvbaton" / "peers"))
NUM_LAYERS, VOCAB = 80, 128_256


def write_tables(folder: Path, gemm_ms: Callable[[int, int, int], float]) -> Path:
    """Tables of a made-up H100 whose kernels follow formulas: products ``gemm_ms``, attention 1 us a 1,000 pairs."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist

    def write(group: str, name: str, rows: list[dict[str, object]]) -> None:
        home = folder / "h100_sxm" / group / "vllm" / "0.9.10"
        home.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table(rows), home / f"{name}_perf.parquet")

    sizes = [32 << power for power in range(12)]
    products = [{"gemm_dtype": kind, "m": m, "n": n, "k": k, "latency": gemm_ms(m, n, k)}
                for kind in ("bfloat16", "fp8") for m in [1, 2, 4, 8, 16, *sizes[:9]] for n in sizes
                for k in sizes]  # fmt: skip
    write("gemm", "gemm", products)
    same = {"num_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "window_size": 0, "kv_cache_dtype": "bfloat16"}
    write(
        "attention",
        "context_attention",
        [{**same, "batch_size": 1, "isl": isl, "step": 0, "latency": isl * (isl + 1) / 2 * 1e-6} for isl in sizes[:9]],
    )
    write("attention", "generation_attention", [
        {**same, "batch_size": batch, "isl": 1, "step": size - 1, "latency": batch * size * 1e-6}
        for batch in (1, 4, 16, 64) for size in sizes[3:9]])  # fmt: skip
    return folder


def test_kernels_that_are_linear_come_back_as_they_were(tmp_path: Path) -> None:
    tables = KernelTables(Choice("H100-SXM"), write_tables(tmp_path, lambda m, n, k: m * n * k * 1e-12))
    shape = preset("Llama-3.1-70B")
    fit = fit_tables(tables, shape, 1, 8, "bfloat16")
    hidden, inner = shape.hidden_size, shape.config["intermediate_size"]
    weights = NUM_LAYERS * hidden * ((64 + 16) * 128 + 64 * 128 + 3 * inner)
    assert fit.step.per_token_s == pytest.approx(weights * 1e-15, rel=0.01)
    assert fit.step.per_pair_s == pytest.approx(NUM_LAYERS * 1e-9, rel=0.01)
    assert fit.step.per_context_s == pytest.approx(NUM_LAYERS * 1e-9, rel=0.01)
    assert fit.mean_relative_error < 0.01
    # The head is wider than any product in the tables, and only one token a sequence goes through it.
    assert tables.gemm_s(16, np.array([4.0]), VOCAB, hidden)[0] == pytest.approx(4 * VOCAB * hidden * 1e-15, rel=0.01)
    assert fit.step.source == "aiconfigurator-core tables of H100-SXM x 1, vllm 0.9.10"


def test_the_newest_version_is_read_unless_one_is_named(tmp_path: Path) -> None:
    write_tables(tmp_path, lambda m, n, k: 1.0)
    home = tmp_path / "h100_sxm" / "gemm" / "vllm"
    (home / "0.9.9").mkdir()
    (home / "0.9.9" / "gemm_perf.parquet").write_bytes(b"not read")
    tables = KernelTables(Choice("H100-SXM"), tmp_path)
    assert tables.gemm_s(8, np.array([1.0]), 64, 64)[0] == pytest.approx(1e-3)
    assert tables.versions["gemm"] == "0.9.10"
    with pytest.raises(LocalError, match=r"no gemm table of vllm 0\.8"):
        KernelTables(Choice("H100-SXM", "vllm", "0.8"), tmp_path).gemm_s(8, np.array([1.0]), 64, 64)


@pytest.mark.parametrize(
    ("model", "tp", "bits", "kv_dtype", "message"),
    [
        ("Qwen3-30B-A3B", 1, 8, "bfloat16", "no dense decoder"),
        ("gpt-oss-120b", 1, 8, "bfloat16", "no dense decoder"),
        ("DeepSeek-V3", 1, 8, "bfloat16", "no dense decoder"),
        ("Llama-3.1-70B", 1, 4, "bfloat16", "16 and 8 bit"),
        ("Llama-3.1-70B", 1, 8, "int8", "KV in int8"),
        ("Llama-3.1-70B", 4, 8, "bfloat16", "no context attention"),
    ],
)
def test_what_the_tables_do_not_cover_is_named(
    tmp_path: Path, model: str, tp: int, bits: int, kv_dtype: str, message: str
) -> None:
    tables = KernelTables(Choice("H100-SXM"), write_tables(tmp_path, lambda m, n, k: 1.0))
    with pytest.raises(LocalError, match=message):
        fit_tables(tables, preset(model), tp, bits, kv_dtype)
    with pytest.raises(LocalError, match="no tables of MI300X"):
        KernelTables(Choice("MI300X"), tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("aiconfigurator_core") is not None, reason="the package is installed")
def test_without_the_package_a_scenario_says_what_to_install() -> None:
    workload = {"prompt_tokens": 10, "output_tokens": 10}
    scenario = parse({"workload": workload, "model": {"preset": "Llama-3.1-8B"}, "engine": {"tables": "vllm"}})
    with pytest.raises(LocalError, match="not installed") as caught:
        Engine(scenario)  # at once: later it would look like a model that fits no GPU
    assert (caught.value.field, caught.value.fix) == ("engine.tables", "pip install aiconfigurator-core")


def real_folder() -> Path:
    local = PEERS / "aiconfigurator" / "aiconfigurator_core" / "systems" / "data"
    if local.is_dir():
        return local
    try:
        return package_folder()
    except LocalError as error:
        pytest.skip(str(error))


def tpot_s(step: StepModel, row: Row) -> float:
    """A closed loop of c streams: each sees, while it decodes, about c - 1 prefills of the others."""
    context = row.prompt_tokens + row.output_tokens / 2
    prefills = (row.concurrency - 1) / row.output_tokens
    decodes = step.step_s(StepWork(num_decodes=row.concurrency, context_tokens=round(row.concurrency * context)))
    prompts = step.per_token_s * row.prompt_tokens + step.per_pair_s * row.prompt_tokens**2 / 2
    return decodes + prefills * prompts


@pytest.mark.peer
@pytest.mark.parametrize(("gpu", "num_rows"), [("h100-sxm", 42), ("h200-sxm", 57)])
def test_kernel_times_alone_predict_vllm_rows(shared: Callable[[str], Path], gpu: str, num_rows: int) -> None:
    """Nothing fitted to the rows but one overhead a step, for both GPUs. Without it every row comes out too fast."""
    tables, model = KernelTables(Choice(gpu), real_folder()), RowModel(preset("Llama-3.1-70B"), weight_bits=8)
    rows = [row for row in read_rows(shared("llama70b-rows") / "h100_h200.csv") if row.gpu == gpu]
    rows = [row for row in rows if not memory_full(row, model)]
    fits = {tp: fit_tables(tables, model.shape, tp, 8, "bfloat16") for tp in {row.tp for row in rows}}
    assert all(fit.mean_relative_error < 0.06 for fit in fits.values())
    bare = [tpot_s(fits[row.tp].step, row) / row.tpot_s - 1 for row in rows]
    whole = [tpot_s(with_overheads(fits[row.tp].step, FIXED_MS), row) / row.tpot_s - 1 for row in rows]
    assert len(rows) == num_rows
    assert -0.15 < float(np.mean(bare)) < -0.08
    assert float(np.mean(np.abs(whole))) < 0.10


@pytest.mark.peer
def test_a_scenario_with_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(real_folder().parents[2]))
    raw = {"workload": {"prompt_tokens": 10, "output_tokens": 10}, "model": {"preset": "Llama-3.1-8B"}}
    engine = Engine(parse({**raw, "engine": {"tables": "vllm"}}))
    found, rough = engine.worker(Sharding(tp=2), 512, 64), Engine(parse(raw)).worker(Sharding(tp=2), 512, 64)
    assert found.num_blocks == rough.num_blocks
    assert "tables" in found.step.source and "tables" in engine.source
    assert found.step.tpot_s(16, 2_000) == pytest.approx(rough.step.tpot_s(16, 2_000), rel=0.5)
    with pytest.raises(LocalError, match="profile and tables are 2 sources"):
        parse({**raw, "engine": {"tables": "vllm", "profile": "p.json"}})
    mixture = {**raw, "model": {"preset": "Qwen3-30B-A3B"}, "engine": {"tables": "vllm"}}
    with pytest.raises(LocalError, match="no dense decoder"):
        Engine(parse(mixture))
    slower = engine.with_knob("compute", 2.0).worker(Sharding(tp=2), 512, 64).step
    assert slower == msgspec.structs.replace(
        found.step, per_token_s=2 * found.step.per_token_s, per_pair_s=2 * found.step.per_pair_s
    )
