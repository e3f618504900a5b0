"""The last decisions and what became of them, in a ring that readers follow with a cursor.

Invariants: bounded; holds numbers, reasons and workers' names, nothing of what clients sent (no prompt, no answer, no
id or header of theirs); a reader that was away too long is told how many it missed. Knows nothing about HTTP.
"""

from __future__ import annotations

from collections import deque

import msgspec

from kvbaton.router.dispatch import Flight

MOST_KEPT = 200
MOST_LINKS = 4096  # pairs of workers counted between two looks


class Row(msgspec.Struct, frozen=True, gc=False):
    number: int
    at_s: float  # the end of the request, on the router's clock
    reason: str  # of the last decision; none: refused before one
    prefill: str | None
    decode: str | None
    outcome: str
    prompt_tokens: int | None
    cached_tokens: int | None  # found, of the prompt
    output_tokens: int | None
    transfer_bytes: int
    ttft_s: float | None
    total_s: float
    queued_s: float
    failed: str  # why earlier attempts failed, in words; empty: there were none


class Page(msgspec.Struct, frozen=True):
    """What a reader gets: rows after its cursor, the oldest first."""

    rows: list[Row]
    next: int  # the cursor of the next question
    missed: int  # rows after the cursor that are gone


class Flow(msgspec.Struct):
    """What moved between two workers."""

    num_bytes: int = 0
    num_requests: int = 0


class Decisions:
    def __init__(self) -> None:
        self._rows: deque[Row] = deque(maxlen=MOST_KEPT)
        self._next = 0
        self._flows: dict[tuple[str, str], Flow] = {}

    def ended(self, flight: Flight, now_s: float) -> None:
        decision = flight.decisions[-1] if flight.decisions else None
        report = flight.report
        row = Row(
            self._next,
            now_s,
            flight.reason,
            decision.prefill if decision is not None else None,
            decision.decode if decision is not None else None,
            flight.lifecycle.outcome,
            decision.case.request.num_prompt_tokens if decision is not None else None,
            report.num_cached_tokens if report is not None else None,
            report.num_output_tokens if report is not None else None,
            report.transfer_bytes if report is not None else 0,
            flight.first_byte_s - flight.received_s if flight.first_byte_s is not None else None,
            now_s - flight.received_s,
            flight.queued_s,
            ", ".join(flight.causes[:4]),
        )
        self._rows.append(row)
        self._next += 1
        if row.transfer_bytes and row.prefill is not None and row.decode is not None:
            self._count((row.prefill, row.decode), row.transfer_bytes)

    def _count(self, link: tuple[str, str], num_bytes: int) -> None:
        flow = self._flows.get(link)
        if flow is None:
            if len(self._flows) >= MOST_LINKS:
                return
            flow = self._flows[link] = Flow()
        flow.num_bytes += num_bytes
        flow.num_requests += 1

    def take_flows(self) -> dict[tuple[str, str], Flow]:
        """Since the last time this was asked."""
        flows, self._flows = self._flows, {}
        return flows

    def after(self, cursor: int) -> Page:
        """``cursor`` 0: all that is kept. One from another life of the router starts over."""
        if cursor > self._next:
            cursor = 0
        first = self._next - len(self._rows)
        rows = list(self._rows)[max(0, cursor - first) :]
        return Page(rows, self._next, max(0, first - cursor) if cursor else 0)
