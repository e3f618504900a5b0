"""Spans to an OpenTelemetry collector, by OTLP over HTTP.

Batching, retries, headers, compression and certificates are the official SDK's, and so are the variables that set them
(``OTEL_EXPORTER_OTLP_*``, ``OTEL_BSP_*``, ``OTEL_RESOURCE_ATTRIBUTES``). Invariant: handing over a span only queues it;
a thread sends, and a queue that is full drops. Knows nothing about requests. Imported only when it is wanted: it brings
``kvbaton[otel]`` along.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvbaton import __version__
from kvbaton.observe.tracing import Span

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
CLOSE_S = 3.0
_SCOPE = InstrumentationScope("kvbaton", __version__)


def open_exporter(service: str) -> tuple[Callable[[Span], None], Callable[[], None]]:
    """(what takes a span, what ends it all and sends what is left)."""
    resource = Resource.create(
        {
            "service.name": service,
            "service.version": __version__,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
        }
    )
    processor = BatchSpanProcessor(OTLPSpanExporter())

    def take(span: Span) -> None:
        processor.on_end(readable(span, resource))

    def close() -> None:
        # A collector that does not answer must not keep a process that has drained.
        last = threading.Thread(target=processor.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(CLOSE_S)

    return take, close


def readable(span: Span, resource: Resource) -> ReadableSpan:
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id, is_remote=False),
        parent=_context(span.trace_id, span.parent_id, is_remote=span.kind == "server") if span.parent_id else None,
        resource=resource,
        attributes=span.attributes,
        kind=_KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=max(span.start_ns, span.end_ns),
        instrumentation_scope=_SCOPE,
    )


def _context(trace_id: str, span_id: str, is_remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote, TraceFlags(TraceFlags.SAMPLED))
