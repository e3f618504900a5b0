"""A worker's spans of one request.

    worker that answers   generate: queue, prefill, decode;  or hand-off, decode queue, decode
    prefill worker        prefill for a peer: queue, prefill

Made when the request has ended, from times that are measured anyway. Knows nothing about who gets spans.
"""

from __future__ import annotations

import time

import msgspec

from kvbaton.engine.events import Event, Failed, Scheduled, Sink, Token
from kvbaton.observe.tracing import RECORDER, Context, Kind, Span, Value, new_span_id, read_traceparent
from kvbaton.types import GenerateRequest
from kvbaton.workers.protocol import Admitted, Finished


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class _Part(msgspec.Struct):
    """One sequence: when it was admitted, and what it took in the end."""

    handoff: Context
    admitted_ns: int = 0
    admitted: Admitted | None = None
    finished: Finished | None = None


class WorkerTrace:
    """Of the worker that answers. ``parts`` are the request's sequences."""

    def __init__(self, context: Context, parent_id: str) -> None:
        self.context = context
        self._parent_id = parent_id
        self._started_ns = time.time_ns()
        self._parts: list[_Part] = []

    def follow(self, sequences: list[GenerateRequest]) -> list[GenerateRequest]:
        """The same, each telling a peer whose child its work is."""
        self._parts = [_Part(Context(self.context.trace_id, new_span_id())) for _ in sequences]
        return [
            msgspec.structs.replace(sequence, traceparent=part.handoff.header)
            for sequence, part in zip(sequences, self._parts, strict=True)
        ]

    def admitted(self, index: int, event: Admitted) -> None:
        self._parts[index].admitted_ns, self._parts[index].admitted = time.time_ns(), event

    def finished(self, index: int, event: Finished) -> None:
        self._parts[index].finished = event

    def end(self, role: str, outcome: str) -> None:
        now_ns = time.time_ns()
        for part in self._parts:
            if part.admitted is not None and part.finished is not None:
                self._phases(part, part.admitted, part.finished, now_ns)
        about: dict[str, Value] = {"kvbaton.role": role, "kvbaton.outcome": outcome,
                                   "kvbaton.sequences": len(self._parts)}  # fmt: skip
        self._record("generate", "server", self.context.span_id, self._parent_id, (self._started_ns, now_ns), about,
                     outcome if outcome == "error" else "")  # fmt: skip

    def _phases(self, part: _Part, admitted: Admitted, took: Finished, now_ns: int) -> None:
        own = self.context.span_id
        if admitted.path == "remote":  # admitted with the first token
            first_ns = part.admitted_ns
            landed_ns = first_ns + _ns(took.exposed_s)
            begun_ns = max(self._started_ns, min(first_ns, landed_ns - _ns(took.transfer_s)))
            self._record("hand-off", "client", part.handoff.span_id, own, (begun_ns, max(first_ns, landed_ns)),
                         {"kvbaton.transfer_bytes": took.transfer_bytes, "kvbaton.exposed_s": took.exposed_s,
                          "kvbaton.remote_tokens": admitted.num_remote_tokens})  # fmt: skip
            decode_ns = min(now_ns, landed_ns + _ns(took.decode_queue_s))
            if took.decode_queue_s:
                self._record("decode queue", "internal", new_span_id(), own, (landed_ns, decode_ns))
        else:
            decode_ns = part.admitted_ns + _ns(took.prefill_s)
            self._record("queue", "internal", new_span_id(), own,
                         (part.admitted_ns - _ns(took.queue_s), part.admitted_ns))  # fmt: skip
            self._record("prefill", "internal", new_span_id(), own, (part.admitted_ns, decode_ns),
                         {"kvbaton.prompt_tokens": admitted.num_prompt_tokens,
                          "kvbaton.cached_tokens": admitted.num_cached_tokens})  # fmt: skip
        if now_ns > decode_ns:
            self._record("decode", "internal", new_span_id(), own, (decode_ns, now_ns))

    def _record(self, name: str, kind: Kind, span_id: str, parent_id: str, times: tuple[int, int],
                attributes: dict[str, Value] | None = None, error: str = "") -> None:  # fmt: skip
        RECORDER.record(Span(name, kind, self.context.trace_id, span_id, parent_id, *times, attributes or {}, error))


def traced(request: GenerateRequest, sink: Sink) -> Sink:
    """``sink``, with the spans of a prefill for a peer. Called on the engine's thread."""
    caller = read_traceparent(request.traceparent)
    if caller is None or not caller[1]:
        return sink
    context = Context(caller[0].trace_id, new_span_id())
    started_ns = time.time_ns()
    scheduled: list[tuple[int, int]] = []  # when, and how much was cached

    def end(error: str = "") -> None:
        now_ns = time.time_ns()
        queued_ns, num_cached = scheduled[-1] if scheduled else (now_ns, 0)

        def record(name: str, kind: Kind, ids: tuple[str, str], times: tuple[int, int], **about: Value) -> None:
            RECORDER.record(Span(name, kind, context.trace_id, *ids, *times, about, error))

        record("queue", "internal", (new_span_id(), context.span_id), (started_ns, queued_ns))
        if scheduled:
            about = {"kvbaton.prompt_tokens": len(request.prompt_token_ids), "kvbaton.cached_tokens": num_cached}
            record("prefill", "internal", (new_span_id(), context.span_id), (queued_ns, now_ns), **about)
        record("prefill for a peer", "server", (context.span_id, caller[0].span_id), (started_ns, now_ns))

    def forward(event: Event) -> None:
        match event:
            case Scheduled():
                scheduled.append((time.time_ns(), event.num_cached_tokens))
            case Token():
                end()
            case Failed():
                end(type(event.error).__name__)
        sink(event)

    return forward
