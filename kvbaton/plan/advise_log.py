"""A window for ``advise`` from request logs: the router's own, the samples of a benchmark, or plain records.

    router log      the lines with "message": "request" and a worker's report; all others are passed over
    plain records   prompt_tokens, output_tokens; and where known cached_tokens, ttft_s, tpot_s, max_gap_s, queue_s,
                    prefill_s, preemptions, finished_at_s

A value of the wrong kind is an error that names line and field. What no line says is None, never zero. Knows nothing
about files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from kvbaton.plan.advise import Window
from kvbaton.plan.sim_record import GapHistogram
from kvbaton.types import LocalError


class Logged(msgspec.Struct, frozen=True, kw_only=True):
    """One request that ended well."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None  # mean gap after the first token
    gaps_s: tuple[float, ...] | None = None  # all of them, where they were kept
    max_gap_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    preemptions: int | None = None
    finished_at_s: float | None = None
    workers: tuple[str, ...] = ()  # that served it


def from_lines(lines: Iterable[str], workers: int | None) -> Window:
    """``workers``: how many are behind the log; None: as many as it names."""
    found, skipped = [], 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise LocalError(f"line {number} is not JSON: {error}", field="--log") from None
        if not isinstance(row, dict):
            raise LocalError(f"line {number} is no JSON object", field="--log", fix="one object for each request")
        logged = _of_router(row, number) if "message" in row else _record(row, number)
        skipped += logged is None
        found += [logged] if logged is not None else []
    if not found and skipped:
        raise LocalError(f"{skipped} lines and no request that ended well among them", field="--log",
                         fix="give the router's log, with its lines of requests")  # fmt: skip
    return from_records(found, workers)


def _record(row: Mapping[str, Any], number: int) -> Logged:
    try:
        return msgspec.convert(row, Logged)
    except msgspec.ValidationError as error:
        raise LocalError(f"line {number}: {error}", field="--log", fix="see docs/plan.md for the fields") from None


def _of_router(row: Mapping[str, Any], number: int) -> Logged | None:
    """What the router says of a request (``router.record.record_of``); None for other lines."""
    report = row.get("report")
    if row.get("message") != "request" or row.get("outcome") != "ok" or not isinstance(report, Mapping):
        return None
    try:
        outputs, first_ms, ended_ms = report["num_output_tokens"], row.get("first_byte_ms"), row.get("ended_ms")
        tpot_s = None
        if first_ms is not None and ended_ms is not None and outputs > 1:
            tpot_s = (ended_ms - first_ms) / 1e3 / (outputs - 1)
        waited_s = [row.get("queued_ms", 0.0) / 1e3, report.get("queue_s", 0.0), report.get("decode_queue_s", 0.0)]
        return Logged(
            prompt_tokens=report["num_prompt_tokens"],
            output_tokens=outputs,
            cached_tokens=report.get("num_cached_tokens"),
            ttft_s=None if first_ms is None else first_ms / 1e3,
            tpot_s=tpot_s,
            queue_s=sum(waited_s),
            prefill_s=report.get("prefill_s"),
            finished_at_s=row.get("time_s"),
            workers=tuple(row[name] for name in ("prefill", "decode") if row.get(name)),
        )
    except (KeyError, TypeError) as error:
        raise LocalError(f"line {number} is no request of the router's log: {error!r}", field="--log") from None


def from_records(rows: list[Logged], workers: int | None) -> Window:
    if not rows:
        raise LocalError("no request records", field="--log")
    prompts = sum(row.prompt_tokens for row in rows)
    cached = _known(rows, "cached_tokens")
    times = _known(rows, "finished_at_s")
    gaps = _gaps(rows)
    return Window(
        seconds=max(times) - min(times) if len(times) > 1 and max(times) > min(times) else 1.0,
        workers=workers or len({name for row in rows for name in row.workers}) or 1,
        prompt_tokens=float(prompts),
        output_tokens=float(sum(row.output_tokens for row in rows)),
        cached_share=sum(cached) / prompts if cached and prompts else None,
        preemptions=_total(rows, "preemptions"),
        requests=float(len(rows)),
        waiting=None,
        running=None,
        kv_usage=None,
        prefill_s=_total(rows, "prefill_s"),
        prefill_busy_s=None,
        decode_busy_s=None,
        queue_s=_total(rows, "queue_s"),
        ttft_mean_s=_mean(rows, "ttft_s"),
        queue_mean_s=_mean(rows, "queue_s"),
        gap_mean_s=_mean(rows, "tpot_s"),
        gap_p50_s=gaps.percentile(0.50) if gaps is not None else None,
        gap_p99_s=gaps.percentile(0.99) if gaps is not None else None,
    )


def _gaps(rows: list[Logged]) -> GapHistogram | None:
    """All gaps; where only the mean and the largest of a request are known, one of that size and the rest alike."""
    gaps = GapHistogram()
    for row in rows:
        if row.gaps_s is not None:
            for gap_s in row.gaps_s:
                gaps.add(gap_s, 1)
        elif row.max_gap_s is not None and row.tpot_s is not None and row.output_tokens > 1:
            rest = row.output_tokens - 2
            gaps.add(row.max_gap_s, 1)
            if rest:
                gaps.add(max(0.0, (row.tpot_s * (rest + 1) - row.max_gap_s) / rest), rest)
    return gaps if gaps.counts else None


def _known(rows: list[Logged], name: str) -> list[float]:
    return [float(value) for row in rows if (value := getattr(row, name)) is not None]


def _total(rows: list[Logged], name: str) -> float | None:
    found = _known(rows, name)
    return sum(found) if found else None


def _mean(rows: list[Logged], name: str) -> float | None:
    found = _known(rows, name)
    return float(np.mean(found)) if found else None
