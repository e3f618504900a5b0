"""The step fit on rows from a known model, and the probes against a server that keeps time by one."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from kvbaton.bench.link import LinkResult, LinkSize
from kvbaton.bench.profile import DecodeRow, PrefillRow, ProfileResult, fit_steps, joint_steps
from kvbaton.bench.profile_export import limits_of, origin_of_run, to_profile_file
from kvbaton.bench.samples import RequestSample
from kvbaton.kv.layout import KVLayout
from kvbaton.plan.profile_file import fit_steps as fit_planner_steps
from kvbaton.plan.profile_file import read_profile, write_profile
from kvbaton.plan.step_time import StepModel, StepWork
from kvbaton.types import LocalError

TRUTH = StepModel(0.004, 0.0005, 2e-7, 0.0008, 1.5e-6)


def rows(noise: float) -> tuple[list[PrefillRow], list[DecodeRow]]:
    random = Random(3)

    def about(seconds: float) -> float:
        return seconds * random.uniform(1 - noise, 1 + noise)

    prefill = [
        PrefillRow(tokens, cached, about(0.006 + TRUTH.prefill_s(cached + tokens, cached, 512)))
        for tokens in (32, 64, 128, 256, 512, 1024, 2048)
        for cached in (0, 512, 1024)
    ]
    decode = [
        DecodeRow(batch, context, about(TRUTH.step_s(StepWork(num_decodes=batch, context_tokens=context))))
        for batch in (1, 2, 4, 8, 16)
        for context in (64 * batch, 512 * batch, 2048 * batch)
    ]
    return prefill, decode


def test_exact_rows_give_the_model_back() -> None:
    found = fit_steps(*rows(0.0), 512)
    for name in ("fixed_s", "per_token_s", "per_pair_s", "per_sequence_s", "per_context_s"):
        assert getattr(found.model, name) == pytest.approx(getattr(TRUTH, name), rel=1e-3)
    assert found.request_overhead_s == pytest.approx(0.006, rel=1e-3)
    assert found.held_out_max < 1e-4


def test_noise_shows_in_the_held_out_error_and_not_as_more() -> None:
    found = fit_steps(*rows(0.05), 512)
    assert 0.005 < found.held_out_median < 0.05 and found.held_out_max < 0.15


def test_too_few_rows_are_refused() -> None:
    prefill, decode = rows(0.0)
    with pytest.raises(LocalError, match="too few"):
        fit_steps(prefill[:3], decode[:3], 512)


def test_the_file_is_one_the_planner_reads(tmp_path: Path) -> None:
    prefill, decode = rows(0.02)
    found = ProfileResult("http://x", "m", tuple(prefill), tuple(decode), fit_steps(prefill, decode, 512))
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
    origin = origin_of_run(found, "kvbaton", "r1", "test machine")
    size = LinkSize(256, 1_000_000, 16, 1.0, 1.5, 2.0, 2.5, 1e9)
    link = LinkResult(layout, "shm", 1, 0, 0, 30, (size,), 0.2, 1.25, 0.05)
    write_profile(to_profile_file(found, limits_of(layout, 100, 512, 64, 2048), origin, link), tmp_path / "p.json")
    read = read_profile(tmp_path / "p.json")
    assert read.step == found.fit.model and read.worker_spec().max_batch_tokens == 512
    assert read.link is not None and read.link.bytes_per_s == 1.25e9
    assert all(row.prefill_tokens <= 512 for row in read.step_rows)
    again = fit_planner_steps(list(read.step_rows), "again").model
    assert again.per_token_s == pytest.approx(TRUTH.per_token_s, rel=0.1)
    assert any("held-out" in note for note in read.notes)


def stream(*times_s: float) -> RequestSample:
    return RequestSample(0, "steady", 0, 0, 8, 8, chunks=[(time, 1, 1.0) for time in times_s])


def test_only_gaps_while_all_streams_are_open_count() -> None:
    found = joint_steps([stream(0.0, 0.1, 0.2, 0.3, 0.4), stream(0.15, 0.25, 0.35, 0.9)])
    assert sorted(round(gap, 3) for gap in found) == [0.1, 0.1, 0.1, 0.1]
    assert joint_steps([stream(0.0, 0.1), stream(0.0, 0.1, 0.2)]) == []
