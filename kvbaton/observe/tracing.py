"""Spans of requests: what a process keeps of them, and who gets them.

A trace goes with a request by W3C's ``traceparent`` header: the router begins it (or goes on with its client's),
workers take it from the router, a prefill worker from the decode worker that asks it. Spans are made once, when their
end is known, from times that are measured anyway.

Invariants: while nobody wants spans (``RECORDER.on`` is false) a request costs one look at that flag; recording never
waits, and what is kept is bounded; a client that asked not to be sampled is not. Knows nothing about what spans mean,
nor about how they are sent (``otlp``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal
from urllib.parse import parse_qsl

import msgspec

from kvbaton.types import LocalError

log = logging.getLogger(__name__)
TRACEPARENT = b"traceparent"
TRACE_PATH = "/internal/trace"
MOST_KEPT = 100_000  # spans of one window
LONGEST_WINDOW_S = 120.0
_HEADER = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 1

Kind = Literal["server", "client", "internal"]
Value = str | int | float | bool


class Span(msgspec.Struct, frozen=True):
    """One thing a process did for a request. Ids are in hexadecimal, times are on the wall clock."""

    name: str
    kind: Kind
    trace_id: str
    span_id: str
    parent_id: str  # empty: the trace begins here
    start_ns: int
    end_ns: int
    attributes: dict[str, Value] = {}
    error: str = ""  # empty: it went well


class Context(msgspec.Struct, frozen=True):
    """Whose child comes next."""

    trace_id: str
    span_id: str

    @property
    def header(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


def new_span_id() -> str:
    return secrets.token_hex(8)


def read_traceparent(text: str) -> tuple[Context, bool] | None:
    """(the caller's span, whether it is sampled); None: there is none, or it is no traceparent."""
    found = _HEADER.fullmatch(text.strip())
    if found is None or text.startswith("ff") or set(found[1]) == {"0"} or set(found[2]) == {"0"}:
        return None
    return Context(found[1], found[2]), bool(int(found[3], 16) & SAMPLED)


Sink = Callable[[Span], None]


class Recorder:
    """Of one process. ``on``: somebody wants spans."""

    def __init__(self) -> None:
        self.on = False
        self.service = ""
        self._sink: Sink | None = None
        self._close: Callable[[], None] = lambda: None
        self._share = 1.0
        self._windows: list[deque[Span]] = []

    def configure(self, service: str, environ: Mapping[str, str] = os.environ) -> None:
        """Send spans where OpenTelemetry's own variables say, if they do. For the entry point of a process only."""
        self.service = service
        self._share = sampled_share(environ)
        if not wants_export(environ):
            return
        try:
            from kvbaton.observe import otlp
        except ImportError:
            log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but opentelemetry is missing: pip install 'kvbaton[otel]'")
            return
        self._sink, self._close = otlp.open_exporter(service)
        self.on = True

    def close(self) -> None:
        """Send what is waiting."""
        self._close()
        self._sink, self._close = None, lambda: None
        self.on = bool(self._windows)

    def begin(self, traceparent: bytes | None) -> tuple[Context, str] | None:
        """(the trace and our span in it, the caller's span) of a request that is to be recorded. Ask only while on."""
        given = read_traceparent(traceparent.decode("latin-1")) if traceparent is not None else None
        if given is not None:
            caller, sampled = given
            return (Context(caller.trace_id, new_span_id()), caller.span_id) if sampled else None
        trace_id = secrets.token_hex(16)
        # The lower half decides, as in OpenTelemetry's ratio sampler, so that processes agree on a trace.
        if not self._windows and int(trace_id[16:], 16) >= self._share * (1 << 64):
            return None
        return Context(trace_id, new_span_id()), ""

    def record(self, span: Span) -> None:
        """From any thread."""
        for window in self._windows:
            window.append(span)
        if self._sink is not None:
            self._sink(span)

    async def watch(self, seconds: float) -> list[Span]:
        """The spans that end in so many seconds from now on; of too many the last ones."""
        window: deque[Span] = deque(maxlen=MOST_KEPT)
        self._windows.append(window)
        self.on = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self._windows = [each for each in self._windows if each is not window]
            self.on = bool(self._windows) or self._sink is not None
        return list(window)


RECORDER = Recorder()


class Watched(msgspec.Struct, frozen=True):
    """Answer of ``GET /internal/trace?seconds=N``."""

    service: str
    from_ns: int
    until_ns: int
    spans: list[Span]


async def watch(query: bytes) -> bytes:
    """The answer to that question. LocalError: it makes no sense."""
    seconds = read_seconds(query)
    from_ns = time.time_ns()
    spans = await RECORDER.watch(seconds)
    return msgspec.json.encode(Watched(RECORDER.service, from_ns, time.time_ns(), spans))


def read_seconds(query: bytes) -> float:
    fix = f"ask for ?seconds=N, above 0 and at most {LONGEST_WINDOW_S:g}"
    given = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    try:
        seconds = float(given.pop("seconds", "10"))
    except ValueError:
        raise LocalError("seconds is no number", field="seconds", fix=fix) from None
    if given or not 0 < seconds <= LONGEST_WINDOW_S:
        raise LocalError("not a window of time", field="seconds", fix=fix)
    return seconds


def wants_export(environ: Mapping[str, str]) -> bool:
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return bool(environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


def sampled_share(environ: Mapping[str, str]) -> float:
    """Of the traces that begin here."""
    if environ.get("OTEL_TRACES_SAMPLER", "").endswith("always_off"):
        return 0.0
    text = environ.get("OTEL_TRACES_SAMPLER_ARG", "")
    try:
        share = float(text) if text else 1.0
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        log.warning("OTEL_TRACES_SAMPLER_ARG %r is no share between 0 and 1; every trace is sampled", text)
        return 1.0
    return share
