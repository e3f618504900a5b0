"""The router's spans of one request: all of it, until it was sent to a worker, and the call.

Made when the request has ended, from the times its flight has anyway. Knows nothing about who gets spans.
"""

from __future__ import annotations

import time

from kvbaton.observe.tracing import RECORDER, Context, Span, Value, new_span_id
from kvbaton.router.dispatch import Flight


class RouterTrace:
    """From the moment the request came. ``call.header`` goes to the workers."""

    def __init__(self, context: Context, parent_id: str, received_s: float) -> None:
        self.context = context
        self._parent_id = parent_id
        self._received_s = received_s
        self.call = Context(context.trace_id, new_span_id())

    def end(self, flight: Flight, endpoint: str, error: str, now_s: float) -> None:
        """``error``: what was answered instead, if it was the fleet's fault."""
        now_ns = time.time_ns()

        def at_ns(at_s: float) -> int:
            return now_ns - round((now_s - at_s) * 1e9)

        def span(name: str, kind: str, ids: tuple[str, str], times: tuple[float, float], **attributes: Value) -> None:
            RECORDER.record(Span(
                name, kind, self.context.trace_id, *ids, at_ns(times[0]), at_ns(times[1]), attributes, error,  # type: ignore[arg-type]
            ))  # fmt: skip

        own = self.context.span_id
        decision = flight.decisions[-1] if flight.decisions else None
        workers: dict[str, Value] = {} if decision is None else {
            "kvbaton.prefill": decision.prefill or "", "kvbaton.decode": decision.decode,
        }  # fmt: skip
        sent_s = flight.dispatched_s if flight.dispatched_s is not None else now_s
        span("admit", "internal", (new_span_id(), own), (self._received_s, sent_s),
             **{"kvbaton.waited_for_room_s": flight.queued_s})  # fmt: skip
        if flight.dispatched_s is not None:
            failed = ", ".join(flight.causes[:4])
            tried: dict[str, Value] = {"kvbaton.attempts": flight.num_dispatched, "kvbaton.failed": failed}
            span("call", "client", (self.call.span_id, own), (sent_s, now_s), **workers, **tried)
        about = {**workers, "kvbaton.request_id": flight.request_id, "kvbaton.decision": flight.reason,
                 "kvbaton.outcome": flight.lifecycle.outcome, "gen_ai.operation.name": endpoint}  # fmt: skip
        if flight.first_byte_s is not None:
            about["kvbaton.ttft_s"] = flight.first_byte_s - flight.received_s
        if flight.report is not None:
            about["gen_ai.usage.input_tokens"] = flight.report.num_prompt_tokens
            about["gen_ai.usage.output_tokens"] = flight.report.num_output_tokens
            about["kvbaton.cached_tokens"] = flight.report.num_cached_tokens
            about["kvbaton.transfer_bytes"] = flight.report.transfer_bytes
        span("request", "server", (own, self._parent_id), (self._received_s, now_s), **about)
