"""A running worker's step times and its goodput by phase, measured from outside over its HTTP door.

Prefill: prompts alone, of several lengths, fresh and on top of a cached context; the time to their one token. Decode:
several streams at once at several context lengths; the gap between tokens while all of them run. Both kinds of rows fit
one linear step model (plan/step_time); each row is also predicted by a fit that never saw it, and those errors are the
ones reported. Prefill-only and decode-only goodput are searched under a TTFT gate and a TPOT gate apart.

Knows nothing about what the planner does with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from kvbaton.bench.client import ClientConfig, LoadClient, PlannedRequest
from kvbaton.bench.goodput import Goodput
from kvbaton.bench.goodput_run import search_goodput
from kvbaton.bench.prompts import PromptBuilder
from kvbaton.bench.runner import load_tokenizer, origin_of, served_model
from kvbaton.bench.samples import RequestSample
from kvbaton.bench.stats import Gates
from kvbaton.bench.workload import LoadSpec
from kvbaton.plan.least_squares import relative_nonnegative
from kvbaton.plan.step_time import StepModel, pairs
from kvbaton.types import LocalError, RemoteError

Tell = Callable[[str], None]
NUM_FOLDS = 5


@dataclass(frozen=True)
class ProfileSpec:
    url: str
    prefill_tokens: tuple[int, ...] = (64, 128, 256, 512, 1024)
    cached_tokens: tuple[int, ...] = (0, 512)
    decode_batches: tuple[int, ...] = (1, 2, 4, 8)
    decode_contexts: tuple[int, ...] = (64, 512)
    repeats: int = 3
    decode_steps: int = 24
    chunk_tokens: int = 512  # the worker's step budget: a prompt longer than it takes several steps
    ttft_gate_s: float | None = None
    tpot_gate_s: float | None = None
    goodput_input: str = "512"
    goodput_output: str = "64"
    trial_s: float = 10.0
    trials: int = 6
    start_rate_per_s: float = 1.0
    seed: int = 0
    model: str = ""
    tokenizer: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class PrefillRow(msgspec.Struct, frozen=True):
    """Median over the repeats. ``cached`` is what the server says it found in its cache."""

    tokens: int  # computed
    cached: int
    seconds: float


class DecodeRow(msgspec.Struct, frozen=True):
    batch: int
    context_tokens: int  # of all streams together, middle of the window
    seconds: float  # of one step


class Fit(msgspec.Struct, frozen=True):
    """``errors`` are relative, of rows predicted by a fit without them."""

    model: StepModel
    request_overhead_s: float
    held_out_median: float
    held_out_p90: float
    held_out_max: float
    errors: tuple[float, ...]


class ProfileResult(msgspec.Struct, frozen=True):
    url: str
    model: str
    prefill: tuple[PrefillRow, ...]
    decode: tuple[DecodeRow, ...]
    fit: Fit
    prefill_goodput: Goodput | None = None
    decode_goodput: Goodput | None = None


async def profile(spec: ProfileSpec, tell: Tell) -> ProfileResult:
    """A minute or so for a small model; the goodput searches take ``trials`` x ``trial_s`` each on top."""
    name = spec.model or (await served_model(spec.url, spec.headers))[0]
    probe = _Probe(spec, name)
    prefill = await probe.prefill(tell)
    decode = await probe.decode(tell)
    fit = fit_steps(prefill, decode, spec.chunk_tokens)
    tell(f"fit: held-out error median {fit.held_out_median:.1%}, worst {fit.held_out_max:.1%}")
    return ProfileResult(
        url=spec.url,
        model=name,
        prefill=tuple(prefill),
        decode=tuple(decode),
        fit=fit,
        prefill_goodput=await _phase_goodput(spec, name, "prefill", tell),
        decode_goodput=await _phase_goodput(spec, name, "decode", tell),
    )


class _Probe:
    """Sends probes one row at a time and reads the row's number off the samples."""

    def __init__(self, spec: ProfileSpec, model: str) -> None:
        self._spec = spec
        self._load = LoadSpec(spec.url, "completions", model, tokenizer=spec.tokenizer, seed=spec.seed)
        tokenized = load_tokenizer(self._load)
        if tokenized.codec is None:
            raise LocalError("profiling needs the model's tokenizer", field="tokenizer", fix="give --tokenizer DIR")
        self._builder = PromptBuilder(tokenized.codec, spec.seed, tokenized.count)
        self._num = 0

    async def prefill(self, tell: Tell) -> list[PrefillRow]:
        rows = []
        await self._send([self._prompt(32, 0)], 1)  # wakes everything up
        for cached in self._spec.cached_tokens:
            for tokens in self._spec.prefill_tokens:
                times: list[float] = []
                found: list[int] = []
                for _ in range(self._spec.repeats):
                    prompt = self._prompt(cached + tokens, cached)
                    if cached:
                        await self._send([prompt[:cached]], 1)
                    (sample,) = await self._send([prompt], 1)
                    times.append(_ttft(sample))
                    found.append(sample.cached_tokens or 0)
                hit = int(np.median(found))
                rows.append(PrefillRow(cached + tokens - hit, hit, float(np.median(times))))
                tell(f"prefill {rows[-1].tokens} tokens after {hit} cached: {rows[-1].seconds * 1e3:.1f} ms")
        return rows

    async def decode(self, tell: Tell) -> list[DecodeRow]:
        rows = []
        for context in self._spec.decode_contexts:
            for batch in self._spec.decode_batches:
                steps: list[float] = []
                for _ in range(self._spec.repeats):
                    prompts = [self._prompt(context, 0) for _ in range(batch)]
                    # Prefill first, in the cache: else the first streams would be done before the last ones start.
                    await self._send(prompts, 1)
                    steps += joint_steps(await self._send(prompts, self._spec.decode_steps + 2 * batch))
                if not steps:
                    tell(f"decode batch {batch} at context {context}: the streams never ran together; left out")
                    continue
                middle = context + self._spec.decode_steps // 2 + batch
                rows.append(DecodeRow(batch, batch * middle, float(np.median(steps))))
                tell(f"decode batch {batch} at context {middle}: {rows[-1].seconds * 1e3:.2f} ms a step")
        return rows

    def _prompt(self, tokens: int, cached: int) -> list[int]:
        self._num += 1
        return self._builder.ids(tokens, str(self._num), (self._num,) if cached else (), cached)

    async def _send(self, prompts: Sequence[list[int]], max_tokens: int) -> list[RequestSample]:
        body: dict[str, Any] = {
            "model": self._load.model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        client = LoadClient(ClientConfig(origin_of(self._spec.url), self._load.path, self._spec.headers))
        requests = [
            PlannedRequest(
                number, "steady", 0.0, msgspec.json.encode({**body, "prompt": prompt}), len(prompt), max_tokens
            )
            for number, prompt in enumerate(prompts)
        ]
        try:
            samples, _ = await client.run_open(requests)
        finally:
            client.pool.close()
        for sample in samples:
            if not sample.ok:
                raise RemoteError(f"a probe of {sample.prompt_tokens} tokens failed: {sample.error}", field="profile")
        return samples


def _ttft(sample: RequestSample) -> float:
    """From the write to the first event that carries output, or to the end when the token had no text."""
    assert sample.sent_s is not None and sample.closed_s is not None
    seen = sample.visible()
    return (seen[0][0] if seen else sample.closed_s) - sample.sent_s


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


def fit_steps(prefill: Sequence[PrefillRow], decode: Sequence[DecodeRow], chunk_tokens: int) -> Fit:
    """Coefficients that are not negative, by relative error; the error of each row by a fit without its fold."""
    features = np.array(
        [_prefill_features(row, chunk_tokens) for row in prefill] + [_decode_features(r) for r in decode]
    )
    measured = np.array([row.seconds for row in prefill] + [row.seconds for row in decode])
    if len(measured) < features.shape[1] + 2:
        raise LocalError(
            f"{len(measured)} rows are too few for {features.shape[1]} coefficients", field="profile", fix="add sizes"
        )
    errors = np.zeros(len(measured))
    folds = np.arange(len(measured)) % NUM_FOLDS
    for fold in range(NUM_FOLDS):
        kept = folds != fold
        coefficients = relative_nonnegative(features[kept], measured[kept])
        errors[~kept] = features[~kept] @ coefficients / measured[~kept] - 1.0
    overhead, fixed, per_token, per_pair, per_sequence, per_context = relative_nonnegative(features, measured)
    size = np.abs(errors)
    return Fit(
        model=StepModel(
            fixed_s=float(fixed),
            per_token_s=float(per_token),
            per_pair_s=float(per_pair),
            per_sequence_s=float(per_sequence),
            per_context_s=float(per_context),
            source="kvbaton profile",
        ),
        request_overhead_s=float(overhead),
        held_out_median=float(np.median(size)),
        held_out_p90=float(np.percentile(size, 90)),
        held_out_max=float(size.max()),
        errors=tuple(float(error) for error in errors),
    )


def _prefill_features(row: PrefillRow, chunk_tokens: int) -> list[float]:
    """Overhead of a request, steps, tokens, pairs, sequences, context."""
    steps = -(-row.tokens // chunk_tokens)
    return [1.0, float(steps), float(row.tokens), pairs(row.cached, row.tokens), 0.0, 0.0]


def _decode_features(row: DecodeRow) -> list[float]:
    return [0.0, 1.0, float(row.batch), 0.0, float(row.batch), float(row.context_tokens)]


async def _phase_goodput(spec: ProfileSpec, model: str, phase: str, tell: Tell) -> Goodput | None:
    infinite = float("inf")
    gate = spec.ttft_gate_s if phase == "prefill" else spec.tpot_gate_s
    if gate is None:
        return None
    gates = Gates(gate, infinite) if phase == "prefill" else Gates(infinite, gate)
    load = LoadSpec(
        spec.url,
        model=model,
        rate_per_s=spec.start_rate_per_s,
        steady_s=spec.trial_s,
        input=spec.goodput_input if phase == "prefill" else "16",
        output="1" if phase == "prefill" else spec.goodput_output,
        tokenizer=spec.tokenizer,
        seed=spec.seed,
    )
    tell(f"{phase}-only goodput under {gate * 1e3:g} ms {'TTFT' if phase == 'prefill' else 'TPOT'}")
    return await search_goodput(load, gates, spec.headers, spec.trials, tell=tell)
