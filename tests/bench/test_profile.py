"""The step fit on rows from a known model, and the probes against a server that keeps time by one."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from kvbaton.bench.link import LinkResult, LinkSize
from kvbaton.bench.profile import ProfileResult, ProfileSpec, profile, wanted_rows
from kvbaton.bench.profile_export import limits_of, origin_of_run, to_profile_file
from kvbaton.bench.profile_fit import (
    DecodeRow,
    MixedRow,
    PrefillRow,
    fit_steps,
    half_width,
    joint_steps,
    mixed_steps,
    undisturbed,
)
from kvbaton.bench.samples import RequestSample
from kvbaton.bench.scripted import Script, ScriptedServer, even_script
from kvbaton.kv.layout import KVLayout
from kvbaton.plan.profile_file import fit_steps as fit_planner_steps
from kvbaton.plan.profile_file import read_profile, write_profile
from kvbaton.plan.step_time import StepModel, StepWork, pairs
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


def test_samples_far_from_their_row_are_dropped_and_noise_is_not() -> None:
    assert undisturbed([0.100, 0.101, 0.099, 0.102, 0.180]) == [0.100, 0.101, 0.099, 0.102]
    assert undisturbed([0.100, 0.110, 0.090, 0.120, 0.085]) == [0.100, 0.110, 0.090, 0.120, 0.085]
    assert half_width([0.1, 0.1, 0.1]) == 0.0
    assert half_width([0.1]) == float("inf")
    assert half_width([0.100, 0.110, 0.090] * 4) < half_width([0.100, 0.110, 0.090])


def test_held_out_rows_lie_between_those_that_are_fitted() -> None:
    spec = ProfileSpec("http://x")
    rows = wanted_rows(spec)
    held = {kind: [(row.size, row.context) for row in rows if row.held_out and row.kind == kind]
            for kind in ("prefill", "decode")}  # fmt: skip
    fitted = {kind: {row.size for row in rows if not row.held_out and row.kind == kind} for kind in held}
    for kind, found in held.items():
        assert len(found) >= 2
        for size, _ in found:
            assert size not in fitted[kind]
            assert min(fitted[kind]) < size < max(fitted[kind])


def test_the_error_is_of_the_held_out_rows_alone() -> None:
    prefill, decode = rows(0.0)
    wrong = PrefillRow(300, 0, 1.10 * (0.006 + TRUTH.prefill_s(300, 0, 512)), held_out=True)
    found = fit_steps([*prefill, wrong], decode, 512)
    assert found.errors == pytest.approx((1 / 1.10 - 1.0,), rel=1e-3)
    assert found.model.per_token_s == pytest.approx(TRUTH.per_token_s, rel=1e-3)


def test_what_a_chunk_costs_by_itself_is_told_from_a_request_by_steps_that_hold_both() -> None:
    truth = msgspec.structs.replace(TRUTH, per_chunk_s=0.007)
    prefill, decode = rows(0.0)
    prefill = [msgspec.structs.replace(row, seconds=row.seconds + 0.007 * -(-row.tokens // 512)) for row in prefill]
    mixed = [
        MixedRow(batch, tokens, 64 * batch, truth.step_s(StepWork(tokens, pairs(0, tokens), batch, 64 * batch, 1)))
        for batch in (4, 16) for tokens in (32, 128)
    ]  # fmt: skip
    found = fit_steps(prefill, decode, 512, mixed)
    assert found.model.per_chunk_s == pytest.approx(0.007, rel=0.02)
    assert found.request_overhead_s == pytest.approx(0.006, rel=0.05)
    without = fit_steps(prefill, decode, 512)
    assert without.model.per_chunk_s == 0.0
    assert without.request_overhead_s > 0.010


def test_the_step_that_held_a_prompt_is_the_gap_that_ends_with_its_first_token() -> None:
    streams = [stream(0.00, 0.10, 0.20, 0.35, 0.45), stream(0.00, 0.10, 0.20, 0.352, 0.45)]
    ((seconds, tokens),) = mixed_steps(streams, [stream(0.351)])
    assert seconds == pytest.approx(0.151)
    assert tokens == 6
    assert mixed_steps(streams, [stream(0.46)]) == []  # after the last token nobody is beside it
    assert mixed_steps([], [stream(0.1)]) == []


async def test_probes_of_a_server_that_keeps_time_and_stumbles_now_and_then(default_model_path: Path) -> None:
    """Known step times, and one answer in nine half a second late: the rows must not show it."""
    answered = itertools.count()

    def choose(number: int, body: dict[str, Any]) -> Script:
        prompt, max_tokens = len(body["prompt"]), int(body["max_tokens"])
        first = TRUTH.prefill_s(prompt, 0, 512) + (0.5 if next(answered) % 9 == 8 else 0.0)
        return even_script(first, TRUTH.step_s(StepWork(num_decodes=1, context_tokens=prompt)), max_tokens, prompt)

    async with ScriptedServer(choose) as server:
        spec = ProfileSpec(
            server.url, prefill_tokens=(16, 64, 256, 512), cached_tokens=(0,), decode_batches=(1, 2), max_repeats=6,
            mixed_batches=(), decode_contexts=(64, 256), decode_steps=6, model="scripted",
            tokenizer=str(default_model_path),
        )  # fmt: skip
        found = await profile(spec, lambda line: None)
    assert any(row.dropped for row in found.prefill), "no answer of a row was late, so nothing was shown"
    for row in found.prefill:
        assert row.seconds == pytest.approx(TRUTH.prefill_s(row.tokens, 0, 512), rel=0.3, abs=0.02)
    assert any(row.held_out for row in found.prefill)
