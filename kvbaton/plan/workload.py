"""Traces: when requests come, how long they are, and which prompt blocks they share.

Readers for Mooncake jsonl (with block hashes), Azure and Vidur and APEX csv, vLLM run records and plain jsonl with
``arrival_s, prompt_tokens, output_tokens``. Chance (spreading quantised timestamps, drawing arrivals) comes in as a
``random.Random``.

Knows nothing about statistics (trace_stats) or simulation.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from math import isfinite
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec

from kvbaton.types import LocalError


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    arrival_s: float
    prompt_tokens: int  # the whole context, shared prefix included
    output_tokens: int
    block_ids: tuple[int, ...] = ()  # one for each block of the prompt, the last maybe partial; equal prefix, equal ids


class Trace(msgspec.Struct, frozen=True):
    """Requests in order of arrival, the first at 0 s."""

    name: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int | None = None  # tokens behind one block id; None: the trace says nothing about shared prefixes
    has_arrivals: bool = True
    notes: tuple[str, ...] = ()

    @property
    def span_s(self) -> float:
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    @property
    def rate_per_s(self) -> float:
        """Mean arrival rate."""
        return len(self.requests) / self.span_s if self.span_s else 0.0

    def head(self, count: int) -> Trace:
        return msgspec.structs.replace(self, requests=self.requests[:count])

    def at_rate(self, rate_per_s: float) -> Trace:
        """The same requests and pattern, compressed or stretched to another mean rate."""
        if not self.has_arrivals or not self.span_s:
            raise LocalError("the trace has no arrivals to rescale", field="workload.rate", fix="draw arrivals instead")
        factor = self.rate_per_s / rate_per_s
        moved = (msgspec.structs.replace(each, arrival_s=each.arrival_s * factor) for each in self.requests)
        return msgspec.structs.replace(self, requests=tuple(moved))

    def with_poisson_arrivals(self, rate_per_s: float, rng: Random) -> Trace:
        """The same requests in order, at Poisson arrivals."""
        now_s, moved = 0.0, []
        for each in self.requests:
            moved.append(msgspec.structs.replace(each, arrival_s=now_s))
            now_s += rng.expovariate(rate_per_s)
        note = f"arrivals drawn: Poisson at {rate_per_s:g} a second"
        return msgspec.structs.replace(self, requests=tuple(moved), has_arrivals=True, notes=(*self.notes, note))

    def scaled(self, prompt: float = 1.0, output: float = 1.0) -> Trace:
        """Prompt and output lengths times a factor; block ids are kept for the blocks that remain."""
        requests: list[TraceRequest] = []
        for each in self.requests:
            tokens = max(1, round(each.prompt_tokens * prompt))
            ids = each.block_ids
            if ids and self.block_tokens:
                wanted = -(-tokens // self.block_tokens)
                # New blocks of a longer prompt are private: their ids are negative and never shared.
                ids = ids[:wanted] + tuple(-(len(requests) << 20) - n - 1 for n in range(wanted - len(ids)))
            out = max(1, round(each.output_tokens * output))
            requests.append(TraceRequest(each.arrival_s, tokens, out, ids))
        return msgspec.structs.replace(self, requests=tuple(requests))


def read_trace(path: str | Path, rng: Random | None = None, block_tokens: int = 512) -> Trace:
    """Read any supported file. With ``rng``, quantised timestamps are spread over their tick."""
    path = Path(path)
    if not path.is_file():
        raise LocalError(f"no such trace {path}", field="workload.trace")
    try:
        with path.open() as lines:
            first = lines.readline().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError(f"cannot read {path}: {error}", field="workload.trace") from None
    if not first:
        raise LocalError(f"{path} is empty", field="workload.trace")
    rows = _jsonl_rows(path) if first.startswith("{") else _csv_rows(path)
    trace = _build(path.stem, rows, block_tokens)
    return spread_ticks(trace, rng) if rng is not None else trace


def _jsonl_rows(path: Path) -> Iterable[Mapping[str, Any]]:
    with path.open(errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise LocalError(f"{path}:{number} is not JSON: {error}", field="workload.trace") from None
                if not isinstance(row, dict):
                    raise LocalError(f"{path}:{number} is no JSON object", field="workload.trace")
                yield row


def _csv_rows(path: Path) -> Iterable[Mapping[str, Any]]:
    with path.open(newline="") as lines:
        try:
            yield from csv.DictReader(lines)
        except (csv.Error, UnicodeDecodeError) as error:
            raise LocalError(f"{path} is no table: {error}", field="workload.trace") from None


def _azure_time_s(text: str) -> float:
    return datetime.fromisoformat(text[:26]).replace(tzinfo=UTC).timestamp()


MOST_ID = (1 << 63) - 1
MOST_TOKENS = 1 << 27  # of one request; beyond it is a typing error, and a list of its blocks would fill the memory
# (arrival, prompt, output) column names and how to read the arrival.
COLUMNS: tuple[tuple[str | None, str, str, Callable[[Any], float]], ...] = (
    ("timestamp", "input_length", "output_length", lambda ms: float(ms) / 1e3),  # Mooncake
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens", _azure_time_s),  # Azure
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens", float),  # Vidur, with arrivals
    (None, "num_prefill_tokens", "num_decode_tokens", float),  # Vidur, lengths only
    ("arrival_s", "prompt_tokens", "output_tokens", float),  # APEX, plain
    ("arrival_time", "input_toks", "output_toks", float),  # records of a vLLM run
)


def _build(name: str, rows: Iterable[Mapping[str, Any]], block_tokens: int) -> Trace:
    columns = None
    requests: list[TraceRequest] = []
    for number, row in enumerate(rows, 1):
        if columns is None:
            columns = _columns_of(row)
        arrival, prompt, output, read_time = columns
        try:
            arrival_s = 0.0 if arrival is None else read_time(row[arrival])
            ids = tuple(map(int, row.get("hash_ids") or ()))
            requests.append(TraceRequest(arrival_s, int(row[prompt]), int(row[output]), ids))
            if not isfinite(arrival_s) or requests[-1].prompt_tokens < 0 or requests[-1].output_tokens < 0:
                raise ValueError("times are finite and lengths not negative")
            if max(requests[-1].prompt_tokens, requests[-1].output_tokens) > MOST_TOKENS:
                raise ValueError(f"a request has at most {MOST_TOKENS:,} tokens")
            if any(not -MOST_ID <= each <= MOST_ID for each in ids):
                raise ValueError("hash_ids are numbers of 63 bits")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise LocalError(f"{name}, row {number}: {error!r}", field="workload.trace") from None
    if columns is None:
        raise LocalError(f"{name} has no rows", field="workload.trace")
    requests.sort(key=lambda each: each.arrival_s)
    start_s = requests[0].arrival_s
    if start_s > 1e6:  # epoch seconds; a trace's own origin is kept
        requests = [msgspec.structs.replace(each, arrival_s=each.arrival_s - start_s) for each in requests]
    has_ids = any(each.block_ids for each in requests)
    return Trace(name, tuple(requests), block_tokens if has_ids else None, columns[0] is not None)


def _columns_of(row: Mapping[str, Any]) -> tuple[str | None, str, str, Callable[[Any], float]]:
    for columns in COLUMNS:
        if all(name in row for name in columns[:3] if name is not None):
            return columns
    raise LocalError(
        f"columns {', '.join(map(str, row))} belong to no known trace format",
        field="workload.trace",
        fix="use arrival_s, prompt_tokens, output_tokens",
    )


def tick_s(requests: Sequence[TraceRequest]) -> float | None:
    """The clock tick timestamps sit on, when many requests share each; else None."""
    times = sorted({each.arrival_s for each in requests})
    if len(times) < 3 or len(times) * 3 > len(requests):
        return None
    return median(after - before for before, after in pairwise(times))


def spread_ticks(trace: Trace, rng: Random) -> Trace:
    """Spread requests that share a quantised timestamp uniformly over that tick, keeping their order of ticks."""
    tick = tick_s(trace.requests)
    if tick is None:
        return trace
    moved = [msgspec.structs.replace(each, arrival_s=each.arrival_s + rng.random() * tick) for each in trace.requests]
    moved.sort(key=lambda each: each.arrival_s)
    note = f"timestamps sit on {tick:g} s ticks; each request was moved within its tick, uniformly, seeded"
    return msgspec.structs.replace(trace, requests=tuple(moved), notes=(*trace.notes, note))


def synthetic(count: int, rate_per_s: float, lengths: tuple[int, int], rng: Random, spread: float = 0.2) -> Trace:
    """Poisson arrivals and lengths uniform within ``spread`` of the given prompt and output means."""
    requests, now_s = [], 0.0
    for _ in range(count):
        factors = [1.0 + spread * (2.0 * rng.random() - 1.0) for _ in lengths]
        prompt, output = (max(1, round(mean * factor)) for mean, factor in zip(lengths, factors, strict=True))
        requests.append(TraceRequest(now_s, prompt, output))
        now_s += rng.expovariate(rate_per_s)
    return Trace(f"synthetic {lengths[0]}:{lengths[1]}", tuple(requests))
