"""Measured rows of a profile: read off samples, cleaned, and fitted by the planner's step model.

Errors are relative, of rows that the fit did not see. Pure; knows nothing about how rows are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from kvbaton.bench.samples import RequestSample
from kvbaton.plan.least_squares import relative_nonnegative
from kvbaton.plan.step_time import StepModel, pairs
from kvbaton.types import LocalError

NUM_FOLDS = 5
# Of the median, in standard deviations as the median deviation gives them: beyond it a sample is no noise.
OUTLIER = 4.0


class PrefillRow(msgspec.Struct, frozen=True):
    """Median over the samples kept. ``cached`` is what the server says it found in its cache."""

    tokens: int  # computed
    cached: int
    seconds: float
    held_out: bool = False
    num: int = 1  # samples kept
    dropped: int = 0
    half_width: float = 0.0  # what the median is known to, relative


class DecodeRow(msgspec.Struct, frozen=True):
    batch: int
    context_tokens: int  # of all streams together, middle of the window
    seconds: float  # of one step
    held_out: bool = False
    num: int = 1
    dropped: int = 0
    half_width: float = 0.0


class MixedRow(msgspec.Struct, frozen=True):
    """One step that decoded ``batch`` streams and computed a whole prompt of ``tokens``."""

    batch: int
    tokens: int
    context_tokens: int  # of all streams together
    seconds: float
    num: int = 1
    dropped: int = 0
    half_width: float = 0.0


class Fit(msgspec.Struct, frozen=True):
    """``errors`` are relative, of rows predicted by a fit without them: the held-out rows, or each row in turn."""

    model: StepModel
    request_overhead_s: float
    held_out_median: float
    held_out_p90: float
    held_out_max: float
    errors: tuple[float, ...]


def undisturbed(times: Sequence[float]) -> list[float]:
    """Without those that lie too far from the median to be noise."""
    if len(times) < 3:
        return list(times)
    middle = float(np.median(times))
    spread = 1.4826 * float(np.median(np.abs(np.array(times) - middle)))
    allowed = OUTLIER * max(spread, 0.005 * middle)
    return [time for time in times if abs(time - middle) <= allowed]


def half_width(times: Sequence[float]) -> float:
    """What the median is known to, relative: 1.96 standard errors, from the median deviation."""
    if len(times) < 2:
        return float("inf")
    middle = float(np.median(times))
    spread = 1.4826 * float(np.median(np.abs(np.array(times) - middle)))
    return 1.96 * 1.2533 * spread / len(times) ** 0.5 / middle


def joint_steps(samples: Sequence[RequestSample]) -> list[float]:
    """Seconds per token of every stream while all of them were open: the batch is then what it was meant to be."""
    seen = [[time for time, _ in sample.visible()] for sample in samples]
    if any(len(times) < 3 for times in seen):
        return []
    start, end = max(times[0] for times in seen), min(times[-1] for times in seen)
    gaps = []
    for times in seen:
        gaps += [after - before for before, after in pairwise(times) if before >= start and after <= end]
    return gaps


def mixed_steps(streams: Sequence[RequestSample], prompts: Sequence[RequestSample]) -> list[tuple[float, int]]:
    """(seconds of the step that computed a prompt beside all streams, tokens the streams had by then) for each prompt.

    A step's tokens come together, so the gap of each stream that ends nearest to the prompt's first token is that step.
    """
    seen = [np.array([time for time, _ in sample.visible()]) for sample in streams]
    if not seen or min(map(len, seen)) < 3:
        return []
    found = []
    for prompt in prompts:
        first_s = prompt.visible()[0][0] if prompt.visible() else prompt.closed_s
        assert first_s is not None
        ends = [int(np.abs(times - first_s).argmin()) for times in seen]
        if all(0 < end < len(times) - 1 for end, times in zip(ends, seen, strict=True)):
            gaps = [times[end] - times[end - 1] for end, times in zip(ends, seen, strict=True)]
            found.append((float(np.median(gaps)), sum(ends)))
    return found


def fit_steps(
    prefill: Sequence[PrefillRow], decode: Sequence[DecodeRow], chunk_tokens: int, mixed: Sequence[MixedRow] = ()
) -> Fit:  # fmt: skip
    """Coefficients that are not negative, by relative error.

    The errors are those of the held-out rows, or where there are none of each row by a fit without its fold.
    """
    features = np.array(
        [_prefill_features(row, chunk_tokens) for row in prefill]
        + [_decode_features(row) for row in decode]
        + [_mixed_features(row) for row in mixed]
    )
    if not mixed:  # else it cannot be told from the overhead of a request
        features[:, -1] = 0.0
    measured = np.array([row.seconds for row in prefill] + [row.seconds for row in decode] + [r.seconds for r in mixed])
    num_coefficients = int(features.any(axis=0).sum())
    if len(measured) < num_coefficients + 2:
        raise LocalError(
            f"{len(measured)} rows are too few for {num_coefficients} coefficients", field="profile", fix="add sizes"
        )
    aside = np.array([row.held_out for row in prefill] + [row.held_out for row in decode] + [False] * len(mixed))
    if (~aside).sum() < num_coefficients:
        raise LocalError("too few rows are left to fit", field="profile", fix="add sizes")
    if aside.any():
        coefficients = relative_nonnegative(features[~aside], measured[~aside])
        errors = features[aside] @ coefficients / measured[aside] - 1.0
        features, measured = features[~aside], measured[~aside]
    else:
        errors = np.zeros(len(measured))
        folds = np.arange(len(measured)) % NUM_FOLDS
        for fold in range(NUM_FOLDS):
            kept = folds != fold
            coefficients = relative_nonnegative(features[kept], measured[kept])
            errors[~kept] = features[~kept] @ coefficients / measured[~kept] - 1.0
    overhead, fixed, per_token, per_pair, per_sequence, per_context, per_chunk = relative_nonnegative(
        features, measured
    )
    size = np.abs(errors)
    return Fit(
        model=StepModel(
            fixed_s=float(fixed),
            per_token_s=float(per_token),
            per_pair_s=float(per_pair),
            per_sequence_s=float(per_sequence),
            per_context_s=float(per_context),
            source="kvbaton profile",
            per_chunk_s=float(per_chunk),
        ),
        request_overhead_s=float(overhead),
        held_out_median=float(np.median(size)),
        held_out_p90=float(np.percentile(size, 90)),
        held_out_max=float(size.max()),
        errors=tuple(float(error) for error in errors),
    )


def _prefill_features(row: PrefillRow, chunk_tokens: int) -> list[float]:
    """Overhead of a request, steps, tokens, pairs, sequences, context, chunks."""
    steps = -(-row.tokens // chunk_tokens)
    return [1.0, float(steps), float(row.tokens), pairs(row.cached, row.tokens), 0.0, 0.0, float(steps)]


def _decode_features(row: DecodeRow) -> list[float]:
    return [0.0, 1.0, float(row.batch), 0.0, float(row.batch), float(row.context_tokens), 0.0]


def _mixed_features(row: MixedRow) -> list[float]:
    tokens = float(row.batch + row.tokens)
    return [0.0, 1.0, tokens, pairs(0, row.tokens), float(row.batch), float(row.context_tokens), 1.0]
