"""Transfer time: the measured table within 7% on every row, and what layer-wise sending hides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbaton.plan.hardware import FABRICS
from kvbaton.plan.link import LinkModel, LinkRow, exposed_s, fit_link, from_fabric, read_mooncake_rows
from kvbaton.types import LocalError


def test_fits_every_measured_row_within_7_percent(shared: Callable[[str], Path]) -> None:
    rows = read_mooncake_rows(shared("mooncake-kv-transfer") / "vllm_qwen3-8b_tp8_h800_8xroce.csv", 147_456)
    fit = fit_link(rows)
    assert len(fit.errors) == 9
    assert fit.worst_relative_error < 0.07
    assert fit.model.startup_s == pytest.approx(0.374e-3, rel=0.05)
    assert fit.model.bytes_per_s / 200e9 == pytest.approx(0.74, abs=0.02)  # of line rate
    assert from_fabric(FABRICS["8x200G"]).bytes_per_s == pytest.approx(fit.model.bytes_per_s, rel=0.02)


def test_recovers_a_known_link() -> None:
    true = LinkModel(1e-3, 5e9)
    fit = fit_link([LinkRow(size, true.transfer_s(size)) for size in (1e6, 1e7, 1e8, 1e9)])
    assert (fit.model.startup_s, fit.model.bytes_per_s) == pytest.approx((1e-3, 5e9), rel=1e-6)


def test_refuses_what_cannot_be_fitted() -> None:
    with pytest.raises(LocalError, match="two sizes"):
        fit_link([LinkRow(1e6, 1.0), LinkRow(1e6, 2.0)])
    with pytest.raises(LocalError, match="does not grow"):
        fit_link([LinkRow(1e6, 2.0), LinkRow(1e9, 1.0)])


def test_exposed_time() -> None:
    assert exposed_s(1.0, 10.0, 80, layer_wise=False) == 1.0
    assert exposed_s(1.0, 10.0, 80, layer_wise=True) == pytest.approx(1.0 / 80)  # the last layer
    assert exposed_s(10.0, 1.0, 80, layer_wise=True) == pytest.approx(10.0 - 79 / 80)  # the link is the bottleneck
    assert LinkModel(1e-3, 5e9).transfer_s(0) == 0.0
