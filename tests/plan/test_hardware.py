"""Presets: every one says where its figures come from, the figures hang together, and the command shows both."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

from kvbaton.cli.plan_commands import kv_command
from kvbaton.plan.hardware import FABRICS, GPUS, PRICE_EXAMPLES, fabric, gpu
from kvbaton.types import LocalError

ADDRESS = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+/\S+|datasheet \d+|AWS p5|awsdocs-\S+")


def test_every_gpu_and_price_names_a_public_document() -> None:
    for each in (*GPUS.values(), *PRICE_EXAMPLES):
        assert ADDRESS.search(each.source), f"{each} names no document"
        assert "http" not in each.source  # an offline page must stay without links
    for price in PRICE_EXAMPLES:
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", price.as_of)


def test_every_fabric_names_a_document_a_standard_or_says_that_it_is_assumed() -> None:
    for each in FABRICS.values():
        assert ADDRESS.search(each.source) or "assumption" in each.source, each
        assert 0 < each.efficiency_low <= each.efficiency <= 1


def test_dense_eight_bit_peaks_are_twice_the_sixteen_bit_ones() -> None:
    for each in GPUS.values():
        if each.fp8_tflops is not None:
            assert each.fp8_tflops / each.bf16_tflops == pytest.approx(2.0, rel=0.03), each.name
        assert each.link_gb_per_s < each.memory_gb_per_s


@pytest.mark.parametrize(("gb_per_s", "line_gb_per_s", "name"), [(36.25, 100.0, "100G-tcp"), (190.0, 400.0, "8x400G")])
def test_efficiencies_lie_where_mooncake_measured(gb_per_s: float, line_gb_per_s: float, name: str) -> None:
    """Its README: 87 GB/s over 4 x 200G, which is 2.4 times TCP, and 190 GB/s over 8 x 400G."""
    each = fabric(name)
    assert each.efficiency == pytest.approx(gb_per_s / line_gb_per_s, rel=0.02)


def test_the_command_shows_sources() -> None:
    runner = CliRunner()
    listed = runner.invoke(kv_command, ["--presets"]).stdout
    for each in (*GPUS.values(), *FABRICS.values(), *PRICE_EXAMPLES):
        assert each.source in listed
    data = json.loads(runner.invoke(kv_command, ["--presets", "--json"]).stdout)
    assert {each["name"] for each in data["gpus"]} == {each.name for each in GPUS.values()}
    shown = runner.invoke(kv_command, ["Llama-3.1-8B", "--fabric", "400G"]).stdout
    assert gpu("h100").source in shown
    assert fabric("400G").source in shown
    assert runner.invoke(kv_command, []).exit_code == 2
    with pytest.raises(LocalError, match="H900"):
        gpu("H900")
