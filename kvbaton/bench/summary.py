"""All numbers of one run in one struct, and the table people read.

Knows nothing about how the run was made; works the same on a run read back from its file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from kvbaton.bench import stats
from kvbaton.bench.cost import Cost, Fleet, cost_of
from kvbaton.bench.samples import ClientReport, RequestSample, Run
from kvbaton.bench.server_metrics import pooled
from kvbaton.bench.sse import ChunkKind
from kvbaton.bench.stats import Attainment, Gates, Interval, Rates, Summary
from kvbaton.types import LocalError

# A gap this long is seen by any reader as the text standing still.
DEFAULT_STALL_S = 0.5
# Past this share of failures the run is about the failures, and the command says so with its exit code.
DEFAULT_MAX_ERROR_SHARE = 0.01
# Arrivals are random: an achieved rate within this share of the offered one is the same rate.
RATE_TOLERANCE = 0.1


class StallSummary(msgspec.Struct, frozen=True):
    bound_s: float
    count: int
    requests_hit: int
    share_of_requests: float
    longest_s: float


class Counts(msgspec.Struct, frozen=True):
    measured: int
    ok: int
    failed: int
    error_share: float
    warmup: int
    warmup_failed: int
    outside_window: int  # ramp and cool-down: sent, not in the numbers
    counted_by: dict[str, int]
    output_mismatches: int  # usage and tokenizer differ by more than the stop token
    prompt_mismatches: int  # the server saw another prompt length than was built
    cached_prompt_share: float | None


class RunSummary(msgspec.Struct, frozen=True):
    """Times in seconds. ``metrics`` has ttft, tpot, itl, icl, e2e, service and, with reasoning, answer_ttft."""

    metrics: dict[str, Summary]
    rates: Rates
    counts: Counts
    stalls: StallSummary
    failures: dict[str, int]
    client: ClientReport
    valid: bool
    notes: tuple[str, ...]
    attainment: Attainment | None = None
    gates: Gates | None = None
    cost: Cost | None = None
    server: dict[str, Any] = {}

    def p(self, metric: str, point: str) -> float | None:
        found = self.metrics.get(metric)
        return found.value(point) if found is not None else None

    def interval(self, metric: str, point: str) -> Interval | None:
        found = self.metrics.get(metric)
        return found.intervals.get(point) if found is not None else None


_SCALARS: dict[str, Callable[[RequestSample], float | None]] = {
    "ttft": stats.ttft_s,
    "tpot": stats.tpot_s,
    "e2e": stats.e2e_s,
    "service": stats.service_s,
}


def summarize_run(
    runs: Run | Sequence[Run],
    gates: Gates | None = None,
    fleet: Fleet | None = None,
    stall_bound_s: float = DEFAULT_STALL_S,
    keep_warmup: bool = False,
) -> RunSummary:
    """One summary of a run, or of several runs of the same thing pooled (rates are means over the runs)."""
    several = [runs] if isinstance(runs, Run) else list(runs)
    if not several:
        raise LocalError("nothing to summarize", field="runs")
    cohorts = [run.measured(keep_warmup) for run in several]
    cohort = [sample for part in cohorts for sample in part]
    good = [sample for sample in cohort if sample.ok]
    rates = _pool_rates([stats.rates(part) for part in cohorts])
    client = _worst_client([run.footer.client for run in several])
    counts = _counts(several, cohort)
    return RunSummary(
        metrics=_metrics(good),
        rates=rates,
        counts=counts,
        stalls=_stalls(cohort, stall_bound_s),
        failures=stats.failures(cohort),
        client=client,
        valid=client.valid and bool(good),
        notes=tuple(_notes(several, cohort, rates, counts)),
        attainment=stats.attainment(cohort, gates) if gates is not None and cohort else None,
        gates=gates,
        cost=cost_of(fleet, rates.wall_s, rates.input_tokens, rates.output_tokens) if fleet is not None else None,
        server=pooled([run.footer.server_metrics for run in several]),
    )


def _metrics(good: Sequence[RequestSample]) -> dict[str, Summary]:
    found: dict[str, Summary | None] = {}
    for name, of in _SCALARS.items():
        values = [of(sample) for sample in good]
        found[name] = stats.summarize([[value] for value in values if value is not None])
    if any(sample.reasoning_tokens or _reasons(sample) for sample in good):
        answers = [stats.answer_ttft_s(sample) for sample in good]
        found["answer_ttft"] = stats.summarize([[value] for value in answers if value is not None])
    gaps = [stats.itl_s(sample) for sample in good]
    found["itl"] = stats.summarize([values for values, _ in gaps], [weights for _, weights in gaps])
    found["icl"] = stats.summarize([stats.chunk_gaps_s(sample) for sample in good])
    return {name: summary for name, summary in found.items() if summary is not None}


def _reasons(sample: RequestSample) -> bool:
    return any(kind == ChunkKind.REASONING for _, kind, _ in sample.chunks)


def _pool_rates(parts: Sequence[Rates]) -> Rates:
    """Runs follow each other: walls and tokens add up, rates are of the whole."""
    if len(parts) == 1:
        return parts[0]
    wall = sum(part.wall_s for part in parts)
    outputs, inputs = sum(part.output_tokens for part in parts), sum(part.input_tokens for part in parts)
    return Rates(
        wall_s=wall,
        offered_per_s=sum(part.offered_per_s for part in parts) / len(parts),
        achieved_per_s=sum(part.achieved_per_s * part.wall_s for part in parts) / wall if wall else 0.0,
        output_tokens_per_s=outputs / wall if wall else 0.0,
        input_tokens_per_s=inputs / wall if wall else 0.0,
        peak_output_tokens_per_s=max(part.peak_output_tokens_per_s for part in parts),
        output_tokens=outputs,
        input_tokens=inputs,
    )


def _worst_client(reports: Sequence[ClientReport]) -> ClientReport:
    """A pooled result is as good as its worst part."""
    worst = max(reports, key=lambda report: (not report.valid, report.lag_p99_ms))
    return msgspec.structs.replace(
        worst,
        valid=all(report.valid for report in reports),
        reasons=[reason for report in reports for reason in report.reasons],
        max_in_flight=max(report.max_in_flight for report in reports),
    )


def _counts(runs: Sequence[Run], cohort: Sequence[RequestSample]) -> Counts:
    everything = [sample for run in runs for sample in run.samples]
    warmup = [sample for sample in everything if sample.phase == "warmup"]
    good = [sample for sample in cohort if sample.ok]
    cached = [sample for sample in good if sample.cached_tokens is not None and sample.usage_prompt_tokens]
    return Counts(
        measured=len(cohort),
        ok=len(good),
        failed=len(cohort) - len(good),
        error_share=(len(cohort) - len(good)) / len(cohort) if cohort else 0.0,
        warmup=len(warmup),
        warmup_failed=sum(not sample.ok for sample in warmup),
        outside_window=sum(sample.phase in ("ramp", "cooldown") for sample in everything),
        counted_by=dict(Counter(sample.counted_by for sample in good)),
        output_mismatches=sum(_output_differs(sample) for sample in good),
        prompt_mismatches=sum(
            sample.usage_prompt_tokens is not None and sample.usage_prompt_tokens != sample.prompt_tokens
            for sample in good
        ),
        cached_prompt_share=(
            sum(sample.cached_tokens or 0 for sample in cached)
            / sum(sample.usage_prompt_tokens or 0 for sample in cached)
            if cached
            else None
        ),
    )


def _output_differs(sample: RequestSample) -> bool:
    if sample.usage_output_tokens is None or sample.tokenizer_tokens is None:
        return False
    # One more in the usage is the stop token. Text of random tokens may join on re-encoding: a twentieth is allowed.
    return abs(sample.usage_output_tokens - sample.tokenizer_tokens) > max(1, sample.usage_output_tokens // 20)


def _stalls(cohort: Sequence[RequestSample], bound_s: float) -> StallSummary:
    found = stats.stalls(cohort, bound_s)
    hit = len({stall.index for stall in found})
    num_ok = sum(sample.ok for sample in cohort)
    longest = max((stall.gap_s for stall in found), default=0.0)
    return StallSummary(bound_s, len(found), hit, hit / num_ok if num_ok else 0.0, longest)


def _notes(runs: Sequence[Run], cohort: Sequence[RequestSample], rates: Rates, counts: Counts) -> Iterable[str]:
    for run in runs:
        yield from run.header.config.get("notes", ())
    if not cohort:
        yield "no request was due in the steady window"
    if counts.failed:
        yield f"{counts.failed} of {counts.measured} requests failed; they give no latency and no tokens"
    if _fell_behind(runs, cohort, rates):
        yield (
            f"achieved {rates.achieved_per_s:.3g} requests/s against {rates.offered_per_s:.3g} offered: "
            "the endpoint (or the concurrency limit) did not keep up"
        )
    if counts.prompt_mismatches:
        yield (
            f"{counts.prompt_mismatches} prompts had another length at the server than was built: "
            "is this the served model's tokenizer?"
        )
    if counts.output_mismatches:
        yield f"{counts.output_mismatches} answers where usage and tokenizer disagree on the output length"
    if counts.warmup_failed:
        yield f"{counts.warmup_failed} of {counts.warmup} warm-up requests failed"


def _fell_behind(runs: Sequence[Run], cohort: Sequence[RequestSample], rates: Rates) -> bool:
    """Fewer answers than requests, and the end dragged on for longer than answers take: not just a short run."""
    if all(run.header.config.get("arrivals") == "closed" for run in runs) or rates.offered_per_s <= 0:
        return False
    if rates.achieved_per_s >= rates.offered_per_s * (1 - RATE_TOLERANCE):
        return False
    took = sorted(service for sample in cohort if (service := stats.service_s(sample)) is not None)
    due = [sample.intended_s for sample in cohort]
    tail_s = rates.wall_s / len(runs) - (max(due) - min(due))
    return bool(took) and tail_s > 2 * took[len(took) // 2]


ROWS = (
    ("TTFT", "ttft"),
    ("TTFT of the answer", "answer_ttft"),
    ("TPOT", "tpot"),
    ("ITL", "itl"),
    ("gap between chunks", "icl"),
    ("end to end", "e2e"),
    ("service (from send)", "service"),
)
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def table(summary: RunSummary) -> str:
    """Plain text: milliseconds, the 95% interval of p95 beside it."""
    lines = [f"{'ms':<20}" + "".join(f"{column:>10}" for column in COLUMNS) + "   95% interval of p95"]
    for title, name in ROWS:
        found = summary.metrics.get(name)
        if found is None:
            continue
        cells = "".join(f"{found.value(column) * 1e3:>10.2f}" for column in COLUMNS)
        interval = found.intervals.get("p95")
        beside = f"   {interval.low * 1e3:.2f} .. {interval.high * 1e3:.2f}" if interval else ""
        lines.append(f"{title:<20}{cells}{beside}")
    return "\n".join([*lines, "", *_prose(summary)])


def _prose(summary: RunSummary) -> Iterable[str]:
    counts, rates, client = summary.counts, summary.rates, summary.client
    yield (
        f"requests   {counts.ok} ok, {counts.failed} failed ({counts.error_share:.1%}); "
        f"left out: {counts.warmup} warm-up, {counts.outside_window} in ramp and cool-down"
    )
    for reason, number in summary.failures.items():
        yield f"           {number} x {reason}"
    yield (
        f"rate       {rates.achieved_per_s:.3g} requests/s (offered {rates.offered_per_s:.3g}), "
        f"{rates.output_tokens_per_s:.4g} output tokens/s (peak {rates.peak_output_tokens_per_s:.4g}), "
        f"{rates.input_tokens_per_s:.4g} input tokens/s"
    )
    counted = ", ".join(f"{name} ({number})" for name, number in counts.counted_by.items())
    yield f"tokens     counted by {counted or 'nobody'}"
    if counts.cached_prompt_share is not None:
        yield f"cache      {counts.cached_prompt_share:.1%} of prompt tokens were cached, by the server's word"
    stalled = summary.stalls
    yield (
        f"stalls     {stalled.count} gaps over {stalled.bound_s:g} s in {stalled.requests_hit} requests, "
        f"longest {stalled.longest_s:.3g} s"
    )
    if summary.attainment is not None and summary.gates is not None:
        met, gates = summary.attainment, summary.gates
        yield (
            f"SLO        {met.share:.1%} ({met.interval.low:.1%} .. {met.interval.high:.1%}) met TTFT <= "
            f"{gates.ttft_s * 1e3:g} ms and TPOT <= {gates.tpot_s * 1e3:g} ms; wanted {gates.attainment:.0%}; "
            f"alone: TTFT {met.ttft_share:.1%}, TPOT {met.tpot_share:.1%}"
        )
    if summary.cost is not None:
        yield _cost_line(summary.cost)
    transfer = summary.server.get("transfer")
    if transfer:
        moved = f", {transfer['bytes'] / 1e6:.4g} MB" if transfer.get("bytes") is not None else ""
        yield (
            f"KV moved   {transfer['count']} transfers, p50 {transfer['p50_ms']:.3g} ms, "
            f"p99 {transfer['p99_ms']:.3g} ms{moved} (from {transfer['source']})"
        )
    yield (
        f"client     lag p50 {client.lag_p50_ms:.2f} ms, p99 {client.lag_p99_ms:.2f} ms; loop late p99 "
        f"{client.loop_lag_p99_ms:.2f} ms; {client.cpu_share:.0%} of a core; {client.max_in_flight} in flight at most"
    )
    for note in dict.fromkeys(summary.notes):
        yield f"note       {note}"
    for reason in dict.fromkeys(client.reasons):
        yield f"INVALID    {reason}"


def _cost_line(cost: Cost) -> str:
    parts = [f"cost       {cost.gpu_hours:.4g} GPU-hours"]
    if cost.blended_per_million_output_tokens is not None:
        parts.append(f"{cost.blended_per_million_output_tokens:.4g} per million output tokens")
    if cost.prefill_pool_per_million_output_tokens is not None:
        parts.append(
            f"of it prefill pool {cost.prefill_pool_per_million_output_tokens:.4g}, "
            f"decode pool {cost.decode_pool_per_million_output_tokens:.4g}"
        )
    return ", ".join(parts)
