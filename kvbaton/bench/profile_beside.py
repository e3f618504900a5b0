"""What workers that share one machine's cores cost each other, measured through the router of a small fleet.

    streams on one worker, asked directly      what a step takes while the other cores have room
    as many on each worker, by the router      what it takes while every core is busy
    streams on one worker, prompts on another  what it takes beside a worker that computes prompts
    a short prompt, alone and among streams    how much longer a worker that computes takes to read it, and the router
                                               while every core is busy

The rows fit ``alone x (1 + slowdown) + streams x token_s`` (plan/sim_host): the first is memory and caches, the second
what router and client spend on each token and take from the workers. Knows nothing about what is done with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from kvbaton.bench.profile import Probe, ProfileResult, ProfileSpec, Tell, ttft_of
from kvbaton.bench.profile_fit import Fit, joint_steps, undisturbed
from kvbaton.bench.samples import RequestSample
from kvbaton.plan.least_squares import relative_nonnegative
from kvbaton.plan.profile_file import BesideRow
from kvbaton.plan.sim_host import SharedCores
from kvbaton.plan.step_time import StepWork, pairs
from kvbaton.types import LocalError, RemoteError

BATCHES = (4, 16)
ROUNDS = 3
PROMPT = 32
PROBES = 6  # short prompts in each round, alone and among streams
FIRST_PROBE_S, PROBE_EVERY_S = 0.8, 0.23  # not in step with anything
PROBED_BATCH = 8
LONG_PROMPTS, LONG_PROMPT = 3, 512  # that another worker computes one after the other


class Beside(msgspec.Struct, frozen=True):
    cores: SharedCores
    admission_s: float  # through the router, on an idle machine
    rows: tuple[BesideRow, ...]


async def measure_beside(
    spec: ProfileSpec, fleet_url: str, others: Sequence[str], found: ProfileResult, tell: Tell
) -> Beside:  # fmt: skip
    """``spec.url`` and ``others`` are equal workers, all there are behind ``fleet_url``. 40 s for a small model."""
    num_workers = 1 + len(others)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_workers < num_cores:
        raise LocalError(
            f"{num_workers} workers leave one of {num_cores} cores free", field="beside", fix="start one for each core"
        )
    probe = _Streams(spec, fleet_url, found.model)
    alone: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    beside: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    prompts: list[float] = []
    idle, busy, full = [], [], []  # TTFT of short prompts: nobody computes, the one worker does, all do
    for _ in range(ROUNDS):
        for batch in BATCHES:
            alone[batch] += joint_steps(await probe.streams(spec.url, batch))
            beside[batch] += joint_steps(await probe.streams(fleet_url, batch * num_workers))
        prompts += [each for other in others for each in await probe.beside_prompts(other)]
        idle += await probe.alone()
        busy += await probe.among(spec.url, PROBED_BATCH)
        full += await probe.among(fleet_url, PROBED_BATCH * num_workers)
    if not all((*alone.values(), *beside.values())):
        raise RemoteError("streams never ran together", field="profile", fix="a worker that runs 16 at once")
    rows = tuple(BesideRow(batch, _middle(alone[batch]), _middle(beside[batch])) for batch in BATCHES)
    for row in rows:
        tell(
            f"{row.streams} streams: {row.alone_s * 1e3:.1f} ms a step alone, {row.beside_s * 1e3:.1f} ms beside others"
        )
    ttft_s = (_middle(idle), _middle(busy), _middle(full))
    beside_prompts = _middle(prompts) if prompts else 1.0  # too short a prompt to lie within: nothing is known
    return settled(rows, beside_prompts, found.fit, num_cores, ttft_s, tell)


def settled(
    rows: Sequence[BesideRow], beside_prompts: float, fit: Fit, num_cores: int, ttft_s: tuple[float, float, float],
    tell: Tell
) -> Beside:  # fmt: skip
    """The constants. ``beside_prompts``: a step of streams while another worker computes prompts, in times of a step
    alone. ``ttft_s``: of a short prompt alone by the router, among ``PROBED_BATCH`` streams of the one
    worker that it is sent to, and by the router among as many on each worker."""
    features = np.array([[row.alone_s, float(row.streams)] for row in rows])
    factor, token_s = map(float, relative_nonnegative(features, np.array([row.beside_s for row in rows])))
    if factor < 1.0:  # nothing runs faster for company: what is left is the tokens'
        features = features[:, 1:]
        factor = 1.0
        token_s = float(np.mean([max(0.0, row.beside_s - row.alone_s) / row.streams for row in rows]))
    step = fit.model
    idle_s, busy_s, full_s = ttft_s
    admission_s = max(0.0, idle_s - step.prefill_s(PROMPT))
    context = PROBED_BATCH * PROMPT * 2
    decode_s = step.step_s(StepWork(0, 0.0, PROBED_BATCH, context))
    mixed_s = step.step_s(StepWork(PROMPT, pairs(0, PROMPT), PROBED_BATCH, context, 1))
    # It comes in the middle of a step on average, and is computed beside the streams in the next.
    worker_s = max(0.0, busy_s - decode_s / 2 - mixed_s - fit.request_overhead_s)
    slowed_s = factor * (decode_s / 2 + mixed_s) + 1.5 * token_s * PROBED_BATCH
    router_s = max(0.0, full_s - slowed_s - admission_s - worker_s)
    cores = SharedCores(
        num_cores=num_cores, slowdown=factor - 1.0, prefill_slowdown=max(factor, beside_prompts) - 1.0, token_s=token_s,
        worker_wait_s=worker_s, full_wait_s=router_s,
    )  # fmt: skip
    tell(
        f"every core busy: steps {cores.slowdown:+.0%}, {cores.prefill_slowdown:+.0%} beside prompts, "
        f"{token_s * 1e6:.0f} us a token of router and client; "
        f"to be heard takes {admission_s * 1e3:.1f} ms, {worker_s * 1e3:.1f} ms longer by a worker that computes, "
        f"{router_s * 1e3:.1f} ms longer if all do"
    )
    return Beside(cores, admission_s, tuple(rows))


def _middle(times: Sequence[float]) -> float:
    return float(np.median(undisturbed(times)))


def gaps_beside(samples: Sequence[RequestSample], spans: Sequence[tuple[float, float]]) -> list[float]:
    """Gaps of the streams that lie within ``spans``, in times of the median gap that touches none of them."""
    within, apart = [], []
    for sample in samples:
        times = [time_s for time_s, _ in sample.visible()]
        for before, after in list(pairwise(times))[len(times) // 8 :]:  # not while the others still start
            if any(start <= before and after <= end for start, end in spans):
                within.append(after - before)
            elif not any(before < end and after > start for start, end in spans):
                apart.append(after - before)
    if not within or not apart:
        return []
    middle = _middle(apart)
    return [gap / middle for gap in within]


class _Streams:
    """Streams and short prompts, to a worker or by the router."""

    def __init__(self, spec: ProfileSpec, fleet_url: str, model: str) -> None:
        self._spec, self._fleet_url = spec, fleet_url
        self._step_s = 0.03  # of the streams before, to know how long others must be
        self._prompt_s = 0.5  # that a long prompt takes, likewise
        # Seeded apart from the rows: a prompt that a worker has cached would be drawn to it.
        self._probe = Probe(dataclasses.replace(spec, seed=spec.seed + 1), model)

    async def streams(self, url: str, count: int) -> list[RequestSample]:
        """They start together with prompts of their own, so the router spreads them evenly."""
        samples = await self._send(url, [(0.0, self._spec.decode_steps + count)] * count)
        self._step_s = _middle(joint_steps(samples) or [self._step_s])
        return samples

    async def beside_prompts(self, other: str) -> list[float]:
        """Steps of streams while ``other`` computes prompts, each in times of a median step before and after."""
        last_s = FIRST_PROBE_S + 0.5 + LONG_PROMPTS * 2 * self._prompt_s
        streams = self._send(self._spec.url, [(0.0, int(last_s / self._step_s) + 16)] * PROBED_BATCH)
        long = self._long_prompts(other)
        samples, spans = await asyncio.gather(streams, long)
        return gaps_beside(samples, spans)

    async def _long_prompts(self, other: str) -> list[tuple[float, float]]:
        """(sent, first token) of prompts one after the other, by the clock of the streams' client."""
        began_s, spans = time.monotonic(), []
        await asyncio.sleep(FIRST_PROBE_S)
        for _ in range(LONG_PROMPTS):
            sent_s = time.monotonic() - began_s
            await self._probe.send_at(other, [(0.0, self._probe.prompt(LONG_PROMPT, 0), 1)])
            spans.append((sent_s, time.monotonic() - began_s))
        self._prompt_s = spans[-1][1] - spans[-1][0]
        return spans

    async def alone(self) -> list[float]:
        return [ttft_of((await self._send(self._fleet_url, [(0.0, 1)]))[0]) for _ in range(PROBES)]

    async def among(self, url: str, count: int) -> list[float]:
        last_s = FIRST_PROBE_S + PROBES * PROBE_EVERY_S
        streams = [(0.0, int((last_s + 0.5) / self._step_s) + 16)] * count
        probes = [(FIRST_PROBE_S + number * PROBE_EVERY_S, 1) for number in range(PROBES)]
        samples = await self._send(url, [*streams, *probes])
        until_s = min(sample.visible()[-1][0] for sample in samples[:count])
        found = [sample for sample in samples[count:] if sample.closed_s is not None and sample.closed_s < until_s]
        return [ttft_of(sample) for sample in found or samples[count:]]

    async def _send(self, url: str, wanted: Sequence[tuple[float, int]]) -> list[RequestSample]:
        """(when, how many tokens) for each."""
        samples, _ = await self._probe.send_at(
            url, [(at_s, self._probe.prompt(PROMPT, 0), max_tokens) for at_s, max_tokens in wanted]
        )
        return samples
