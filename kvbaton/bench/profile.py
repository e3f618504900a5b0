"""A running worker's step times and its goodput by phase, measured from outside over its HTTP door.

Prefill: prompts alone, of several lengths, fresh and on top of a cached context; the time to their one token. Decode:
several streams at once at several context lengths; the gap between tokens while all of them run. Mixed: a prompt comes
into running streams; the gap of theirs that ends with its first token is the step that held both.

Rows are measured in rounds, every round in another order, so that a drift of the machine does not sit on one kind of
row. A row is measured again until its median is known to within ``stable_within``, or the rounds are used up. Samples
during which this client itself was held up are dropped, and so are those far from their row's median; how many is kept
with the row. Rows fit one linear step model (plan/step_time). Rows in between, measured in the same rounds, are held
out of the fit, and the error reported is theirs.

Prefill-only and decode-only goodput are searched under a TTFT gate and a TPOT gate apart. Knows nothing about what the
planner does with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, Literal

import msgspec
import numpy as np

from kvbaton.bench.client import ClientConfig, LoadClient, PlannedRequest
from kvbaton.bench.goodput import Goodput
from kvbaton.bench.goodput_run import search_goodput
from kvbaton.bench.profile_fit import (
    DecodeRow,
    Fit,
    MixedRow,
    PrefillRow,
    fit_steps,
    half_width,
    joint_steps,
    mixed_steps,
    undisturbed,
)
from kvbaton.bench.prompts import PromptBuilder
from kvbaton.bench.runner import load_tokenizer, origin_of, served_model
from kvbaton.bench.samples import ClientReport, RequestSample
from kvbaton.bench.stats import Gates
from kvbaton.bench.workload import LoadSpec
from kvbaton.types import LocalError, RemoteError

Tell = Callable[[str], None]
# A client that turned this late saw what it measures late.
LATE_MS = 5.0
MIXED_STREAM = 32  # prompt tokens of the streams that prompts come into
MIXED_PROMPTS = 3  # in each sample of a mixed row


@dataclass(frozen=True)
class ProfileSpec:
    url: str
    prefill_tokens: tuple[int, ...] = (64, 128, 256, 512, 1024)
    cached_tokens: tuple[int, ...] = (0, 512)
    decode_batches: tuple[int, ...] = (1, 2, 4, 8)
    decode_contexts: tuple[int, ...] = (64, 512)
    repeats: int = 3  # of each row at least
    max_repeats: int = 8  # of rows that are not stable by then
    budget_s: float = 120.0  # beyond ``repeats``, no further round that would end later
    stable_within: float = 0.02  # half width of what the median of a row is known to, relative
    mixed_batches: tuple[int, ...] | None = None  # streams that prompts come into; None: two of the larger batches
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


Kind = Literal["prefill", "decode", "mixed"]


class _Wanted:
    """One row on its way: what to send, and what came of it."""

    def __init__(self, kind: Kind, size: int, context: int, held_out: bool) -> None:
        self.kind: Kind = kind
        self.size = size  # tokens to compute, or streams
        self.context = context  # of a mixed row: tokens of the prompt that comes
        self.held_out = held_out
        self.times: list[float] = []
        self.late: list[float] = []  # while the client was held up
        self.hits: list[int] = []
        self.prompts: list[list[int]] = []

    @property
    def kept(self) -> tuple[list[float], int]:
        """Samples near the median, and how many were dropped. Late ones count only where there are no others."""
        times = self.times or self.late
        near = undisturbed(times)
        return near, len(self.times) + len(self.late) - len(near)

    def settled(self, spec: ProfileSpec) -> bool:
        kept, _ = self.kept
        return len(kept) >= spec.repeats and half_width(kept) <= spec.stable_within


class ProfileResult(msgspec.Struct, frozen=True):
    url: str
    model: str
    prefill: tuple[PrefillRow, ...]
    decode: tuple[DecodeRow, ...]
    fit: Fit
    mixed: tuple[MixedRow, ...] = ()
    prefill_goodput: Goodput | None = None
    decode_goodput: Goodput | None = None


async def profile(spec: ProfileSpec, tell: Tell) -> ProfileResult:
    """A minute or so for a small model; the goodput searches take ``trials`` x ``trial_s`` each on top."""
    name = spec.model or (await served_model(spec.url, spec.headers))[0]
    probe = Probe(spec, name)
    prefill, decode, mixed = await probe.rows(tell)
    fit = fit_steps(prefill, decode, spec.chunk_tokens, mixed)
    tell(f"fit: held-out error median {fit.held_out_median:.1%}, worst {fit.held_out_max:.1%}")
    return ProfileResult(
        url=spec.url,
        model=name,
        prefill=tuple(prefill),
        decode=tuple(decode),
        fit=fit,
        mixed=tuple(mixed),
        prefill_goodput=await _phase_goodput(spec, name, "prefill", tell),
        decode_goodput=await _phase_goodput(spec, name, "decode", tell),
    )


class Probe:
    """Sends probes one row at a time and reads the row's number off the samples."""

    def __init__(self, spec: ProfileSpec, model: str) -> None:
        self._spec = spec
        self._load = LoadSpec(spec.url, "completions", model, tokenizer=spec.tokenizer, seed=spec.seed)
        tokenized = load_tokenizer(self._load)
        if tokenized.codec is None:
            raise LocalError("profiling needs the model's tokenizer", field="tokenizer", fix="give --tokenizer DIR")
        self._builder = PromptBuilder(tokenized.codec, spec.seed, tokenized.count)
        self._num = 0
        self._step_s = 0.03  # of the last decode row, to know how long streams must be

    async def rows(self, tell: Tell) -> tuple[list[PrefillRow], list[DecodeRow], list[MixedRow]]:
        """All rows, in rounds of changing order."""
        spec, chance = self._spec, Random(self._spec.seed)
        wanted = wanted_rows(spec)
        await self._send([self.prompt(32, 0)], 1)  # wakes everything up
        began_s = ended_s = time.monotonic()
        for number in range(max(spec.repeats, spec.max_repeats)):
            left = [each for each in wanted if not each.settled(spec)]
            if not left:
                break
            chance.shuffle(left)
            for each in left:
                await self._measure(each)
            round_s, ended_s = time.monotonic() - ended_s, time.monotonic()
            tell(f"round {number + 1}: {len(left)} rows measured, {sum(not e.settled(spec) for e in left)} not stable")
            if number + 1 >= spec.repeats and ended_s + round_s > began_s + spec.budget_s:
                tell(f"no time for another round within {spec.budget_s:g} s")
                break
        return self._prefill_rows(wanted, tell), self._decode_rows(wanted, tell), self._mixed_rows(wanted, tell)

    async def _measure(self, each: _Wanted) -> None:
        if each.kind == "prefill":
            prompt = self.prompt(each.context + each.size, each.context)
            if each.context:
                await self._send([prompt[: each.context]], 1)
            (sample,), report = await self._send([prompt], 1)
            found = ttft_of(sample)
            each.hits.append(sample.cached_tokens or 0)
        elif each.kind == "mixed":
            steps, report = await self._mixed(each)
            if not steps:
                return
            found = float(np.median(steps))
        else:
            each.prompts = each.prompts or [self.prompt(each.context, 0) for _ in range(each.size)]
            # Prefill first, into the cache: else the first streams would be done before the last ones start.
            await self._send(each.prompts, 1)
            samples, report = await self._send(each.prompts, self._spec.decode_steps + 2 * each.size)
            steps = joint_steps(samples)
            if not steps:
                return
            found = self._step_s = float(np.median(steps))
        late = max(report.lag_max_ms, report.loop_lag_max_ms) > LATE_MS
        (each.late if late else each.times).append(found)

    def _prefill_rows(self, wanted: Sequence[_Wanted], tell: Tell) -> list[PrefillRow]:
        rows = []
        for each in wanted:
            if each.kind != "prefill":
                continue
            kept, dropped = each.kept
            hit, middle = int(np.median(each.hits)), float(np.median(kept))
            rows.append(PrefillRow(each.context + each.size - hit, hit, middle, each.held_out, len(kept), dropped,
                                   half_width(kept)))  # fmt: skip
            tell(f"prefill {rows[-1].tokens} tokens after {hit} cached: {middle * 1e3:.1f} ms{_said(rows[-1])}")
        return rows

    def _decode_rows(self, wanted: Sequence[_Wanted], tell: Tell) -> list[DecodeRow]:
        rows = []
        for each in wanted:
            if each.kind != "decode":
                continue
            kept, dropped = each.kept
            if not kept:
                tell(f"decode batch {each.size} at context {each.context}: streams never ran together; left out")
                continue
            middle = each.context + self._spec.decode_steps // 2 + each.size
            rows.append(DecodeRow(each.size, each.size * middle, float(np.median(kept)), each.held_out, len(kept),
                                  dropped, half_width(kept)))  # fmt: skip
            tell(f"decode batch {each.size} at context {middle}: {rows[-1].seconds * 1e3:.2f} ms{_said(rows[-1])}")
        return rows

    async def _mixed(self, each: _Wanted) -> tuple[list[float], ClientReport]:
        """Prompts that come into streams one after the other, at no fixed place of a step."""
        starts_s = [0.8 + 0.37 * number for number in range(MIXED_PROMPTS)]
        tokens = int((starts_s[-1] + 0.8) / self._step_s) + each.size
        plan = [(0.0, self.prompt(MIXED_STREAM, 0), tokens) for _ in range(each.size)]
        plan += [(at_s, self.prompt(each.context, 0), 1) for at_s in starts_s]
        samples, report = await self.send_at(self._spec.url, plan)
        streams, prompts = samples[: each.size], samples[each.size :]
        found = mixed_steps(streams, prompts)
        each.hits += [context for _, context in found]
        return [seconds for seconds, _ in found], report

    def _mixed_rows(self, wanted: Sequence[_Wanted], tell: Tell) -> list[MixedRow]:
        rows = []
        for each in wanted:
            kept, dropped = each.kept if each.times or each.late else ([], 0)
            if each.kind != "mixed" or not kept:
                continue
            context = int(np.median(each.hits)) + each.size * MIXED_STREAM
            rows.append(MixedRow(each.size, each.context, context, float(np.median(kept)), len(kept), dropped,
                                 half_width(kept)))  # fmt: skip
            tell(
                f"{each.size} streams and a prompt of {each.context}: {rows[-1].seconds * 1e3:.2f} ms{_said(rows[-1])}"
            )
        return rows

    def prompt(self, tokens: int, cached: int) -> list[int]:
        self._num += 1
        return self._builder.ids(tokens, str(self._num), (self._num,) if cached else (), cached)

    def body(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """A stream of exactly so many tokens."""
        return {
            "model": self._load.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _send(self, prompts: Sequence[list[int]], max_tokens: int) -> tuple[list[RequestSample], ClientReport]:
        return await self.send_at(self._spec.url, [(0.0, prompt, max_tokens) for prompt in prompts])

    async def send_at(
        self, url: str, plan: Sequence[tuple[float, list[int], int]]
    ) -> tuple[list[RequestSample], ClientReport]:  # fmt: skip
        """(when, prompt, how many tokens) of each, in that order."""
        client = LoadClient(ClientConfig(origin_of(url), self._load.path, self._spec.headers))
        requests = [
            PlannedRequest(
                number, "steady", at_s, msgspec.json.encode(self.body(prompt, max_tokens)), len(prompt), max_tokens
            )
            for number, (at_s, prompt, max_tokens) in enumerate(plan)
        ]
        try:
            samples, report = await client.run_open(requests)
        finally:
            client.pool.close()
        for sample in samples:
            if not sample.ok:
                raise RemoteError(f"a probe of {sample.prompt_tokens} tokens failed: {sample.error}", field="profile")
        return sorted(samples, key=lambda sample: sample.index), report


def wanted_rows(spec: ProfileSpec) -> list[_Wanted]:
    """The grid that is fitted, and rows between its points that are not."""
    rows = [
        _Wanted("prefill", tokens, cached, False) for cached in spec.cached_tokens for tokens in spec.prefill_tokens
    ]
    rows += [_Wanted("decode", batch, at, False) for at in spec.decode_contexts for batch in spec.decode_batches]
    contexts = [*_between(spec.cached_tokens), *spec.cached_tokens[-1:]]
    lengths = _between(spec.prefill_tokens)[::2]
    rows += [_Wanted("prefill", tokens, contexts[n % len(contexts)], True) for n, tokens in enumerate(lengths)]
    contexts = _between(spec.decode_contexts) or list(spec.decode_contexts)
    batches = _between(spec.decode_batches)[-2:]
    rows += [_Wanted("decode", batch, contexts[n % len(contexts)], True) for n, batch in enumerate(batches)]
    mixed = [size for size in spec.prefill_tokens if size <= spec.chunk_tokens // 2][:3:2]
    batches = list(spec.decode_batches[-3:-1] if spec.mixed_batches is None else spec.mixed_batches)
    rows += [_Wanted("mixed", batch, tokens, False) for batch in batches for tokens in mixed]
    return rows


def _between(points: Sequence[int]) -> list[int]:
    """Whole numbers strictly between neighbours, near their geometric middle."""
    found = []
    for low, high in pairwise(sorted(set(points))):
        middle = round((max(low, 1) * high) ** 0.5) if low else high // 2
        if low < middle < high:
            found.append(middle)
    return found


def _said(row: PrefillRow | DecodeRow | MixedRow) -> str:
    dropped = f", {row.dropped} dropped" if row.dropped else ""
    known = f", known to {row.half_width:.1%}" if row.num > 1 else ""
    return f" ({row.num} samples{dropped}{known}{', held out' if getattr(row, 'held_out', False) else ''})"


def ttft_of(sample: RequestSample) -> float:
    """From the write to the first event that carries output, or to the end when the token had no text."""
    assert sample.sent_s is not None and sample.closed_s is not None
    seen = sample.visible()
    return (seen[0][0] if seen else sample.closed_s) - sample.sent_s


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
