"""A window of time as a file for Perfetto (ui.perfetto.dev) or chrome://tracing: a track group for each process.

Within a process, requests that overlap lie in lanes one below the other, each with its parts nested in it; arrows lead
from a call to the span that it caused in another process. Pure; knows nothing about who recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbaton.observe.tracing import Span


def render(processes: Mapping[str, Sequence[Span]]) -> dict[str, Any]:
    """Trace Event Format: complete events in microseconds, as numbers since the first span."""
    first_ns = min((span.start_ns for spans in processes.values() for span in spans), default=0)
    known = {span.span_id: (process, span) for process, spans in processes.items() for span in spans}
    lanes = {process: _lanes(spans) for process, spans in processes.items()}
    pids = {process: number for number, process in enumerate(processes, 1)}
    events: list[dict[str, Any]] = []
    for process, spans in processes.items():
        pid = pids[process]
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
            tid = lanes[process][span.span_id]
            events.append(_event(span, pid, tid, first_ns))
            caller = known.get(span.parent_id)
            if caller is not None and caller[0] != process:
                start = {"ph": "s", "pid": pids[caller[0]], "tid": lanes[caller[0]][caller[1].span_id]}
                arrow = {"cat": "call", "name": "call", "id": span.span_id}
                events.append({**start, **arrow, "ts": (caller[1].start_ns - first_ns) / 1e3})
                events.append({"ph": "f", "bp": "e", "pid": pid, "tid": tid, **arrow,
                               "ts": (span.start_ns - first_ns) / 1e3})  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"first_ns": str(first_ns)}}


def _event(span: Span, pid: int, tid: int, first_ns: int) -> dict[str, Any]:
    arguments = {"trace_id": span.trace_id, **span.attributes}
    if span.error:
        arguments["error"] = span.error
    return {
        "ph": "X", "name": span.name, "cat": span.kind, "pid": pid, "tid": tid, "ts": (span.start_ns - first_ns) / 1e3,
        "dur": max(0, span.end_ns - span.start_ns) / 1e3, "args": arguments,
    }  # fmt: skip


def _lanes(spans: Sequence[Span]) -> dict[str, int]:
    """A lane for each span: those of one trace share the first that is free for as long as all of them last."""
    groups: dict[str, list[Span]] = {}
    for span in spans:
        groups.setdefault(span.trace_id, []).append(span)
    free_ns: list[int] = []  # from when on, by lane
    found: dict[str, int] = {}
    for group in sorted(groups.values(), key=lambda group: min(span.start_ns for span in group)):
        start_ns, end_ns = min(span.start_ns for span in group), max(span.end_ns for span in group)
        lane = next((number for number, at_ns in enumerate(free_ns) if at_ns <= start_ns), len(free_ns))
        if lane == len(free_ns):
            free_ns.append(0)
        free_ns[lane] = end_ns
        found.update((span.span_id, lane + 1) for span in group)
    return found
