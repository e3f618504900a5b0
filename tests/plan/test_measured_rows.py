"""Llama-3.1-70B: constants fitted on H200 rows predict H100 rows; rows that fill the memory are flagged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbaton.plan.kv_math import Sharding
from kvbaton.plan.measured_rows import CONSTANTS, RowModel, fit_rows, predict, read_rows
from kvbaton.plan.model_presets import preset
from kvbaton.plan.scenario import Engine, parse
from kvbaton.types import LocalError

Shared = Callable[[str], Path]
MODEL = RowModel(preset("Llama-3.1-70B"), weight_bits=8)


def test_h200_constants_predict_h100_rows_within_6_percent(shared: Shared) -> None:
    rows = read_rows(shared("llama70b-rows") / "h100_h200.csv")
    fit = fit_rows([row for row in rows if row.gpu == "h200-sxm"], MODEL, "H200 rows")
    unseen = [predict(row, MODEL, fit.efficiency) for row in rows if row.gpu == "h100-sxm"]
    errors = [abs(each.relative_error) for each in unseen if each.relative_error is not None]
    assert len(CONSTANTS) == 6
    assert len(errors) == 42
    assert sum(errors) / len(errors) < 0.06
    # Physically possible, not only numerically good.
    assert 0.3 < fit.efficiency.mfu < 1
    assert 0.5 < fit.efficiency.mbu <= 1
    assert 0.5 < fit.efficiency.mbu_kv <= 1


def test_memory_full_rows_are_flagged_not_extrapolated(shared: Shared) -> None:
    rows = [row for row in read_rows(shared("llama70b-rows") / "h100_h200.csv") if row.gpu == "h100-sxm"]
    fit_from = [row for row in read_rows(shared("llama70b-rows") / "h100_h200.csv") if row.gpu == "h200-sxm"]
    efficiency = fit_rows(fit_from, MODEL, "H200 rows").efficiency
    flagged = [each for each in (predict(row, MODEL, efficiency) for row in rows) if each.memory_full]
    assert all(each.tpot_s is None for each in flagged)
    # Exactly the rows whose measured TTFT betrays a queue: above 5 s.
    assert {each.row for each in flagged} == {row for row in rows if row.ttft_s > 5.0}


def test_too_few_rows_are_refused(shared: Shared) -> None:
    rows = read_rows(shared("llama70b-rows") / "h100_h200.csv")[:8]
    with pytest.raises(LocalError, match="too few"):
        fit_rows(rows, MODEL, "few")


def test_a_scenario_may_be_fitted_to_rows(shared: Shared, tmp_path: Path) -> None:
    """The roofline's constants from a table of measured rows, its name and its error in the answer."""
    rows = shared("llama70b-rows") / "h100_h200.csv"
    wanted = parse({
        "workload": {"prompt_tokens": 1000, "output_tokens": 100},
        "model": {"preset": "Llama-3.1-70B", "weight_bits": 8},
        "engine": {"rows": str(rows)},
    })  # fmt: skip
    engine = Engine(wanted)
    assert "h100_h200.csv" in engine.source
    assert "measured rows fitted to" in engine.warnings[0]
    assert engine.measured
    worker = engine.worker(Sharding(tp=4), 2048, 64)
    row = next(row for row in read_rows(rows) if (row.gpu, row.tp, row.concurrency) == ("h100-sxm", 4, 16))
    decode_s = worker.step.tpot_s(row.concurrency, row.prompt_tokens + row.output_tokens / 2)
    assert 0.7 * row.tpot_s < decode_s < row.tpot_s  # what is left are the prefills of the others
    bad = tmp_path / "rows.csv"
    for text, says in (
        ("system,tp\nh100_sxm,2\n", "line 2"),
        ("system,tp,concurrency,prompt_tokens,output_tokens,mean_ttft_ms,mean_tpot_ms\nabacus,1,1,1,1,1,1\n", "abacus"),
        ("system,tp,concurrency,prompt_tokens,output_tokens,mean_ttft_ms,mean_tpot_ms\nh100,1,1,1,1,1,0\n", "positive"),
    ):
        bad.write_text(text)
        with pytest.raises(LocalError, match=says):
            read_rows(bad)
