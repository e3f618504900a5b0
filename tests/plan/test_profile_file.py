"""Profile files: fitted, written, read back, refused, and compared with what a plan is for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvbaton.plan.link import LinkRow
from kvbaton.plan.profile_file import Origin, StepRow, WorkerLimits, build, fit_steps, read_profile, write_profile
from kvbaton.plan.step_time import StepModel, pairs
from kvbaton.types import LocalError

ORIGIN = Origin(engine="kvbaton", engine_version="0.1", model_id="m", model_revision="r", hardware="2 cores")
LIMITS = WorkerLimits(
    num_blocks=1_000, block_size=16, max_batch_tokens=512, max_running=32, max_context=8_192, token_bytes=23_040,
    num_layers=30,
)  # fmt: skip
TRUE = StepModel(0.012, 80e-6, 2e-9, 300e-6, 1e-7)


def rows() -> list[StepRow]:
    shapes = [(n, pairs(0, n), 0, 0) for n in (64, 256, 512)] + [(256, pairs(1_024, 256), 0, 0)]
    shapes += [(0, 0.0, batch, batch * context) for batch in (1, 4, 16) for context in (128, 2_048)]
    made = []
    for tokens, looked_at, decodes, context in shapes:
        row = StepRow(prefill_tokens=tokens, prefill_pairs=looked_at, num_decodes=decodes, context_tokens=context,
                      seconds=1.0)  # fmt: skip
        made.append(msgspec.structs.replace(row, seconds=TRUE.step_s(row.work)))
    return made


def test_round_trip_and_fit(tmp_path: Path) -> None:
    links = [LinkRow(size, 1e-3 + size / 2e9) for size in (1e6, 1e7, 1e8)]
    profile = build(ORIGIN, LIMITS, rows(), links, admission_s=0.004)
    assert profile.step_error < 1e-6
    assert profile.step.fixed_s == pytest.approx(TRUE.fixed_s)
    assert profile.step.per_context_s == pytest.approx(TRUE.per_context_s)
    assert profile.link is not None
    assert profile.link.bytes_per_s == pytest.approx(2e9)
    write_profile(profile, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile
    assert profile.worker_spec().max_batch_tokens == 512


def test_a_profile_of_something_else_is_a_warning() -> None:
    profile = build(ORIGIN, LIMITS, rows(), [])
    other = msgspec.structs.replace(ORIGIN, engine_version="0.2", hardware="8 cores")
    assert profile.mismatches(ORIGIN) == []
    assert len(profile.mismatches(other)) == 2
    assert "engine_version '0.1'" in profile.mismatches(other)[0]


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot read"):
        read_profile(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text('{"version": 1}')
    with pytest.raises(LocalError, match="no profile"):
        read_profile(tmp_path / "bad.json")
    with pytest.raises(LocalError, match="too few"):
        fit_steps(rows()[:3], "x")
