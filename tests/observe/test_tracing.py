"""Spans: whose child comes next, who is sampled, what a window keeps, and the timeline made of it."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import kvbaton.observe
from kvbaton.observe.metrics import Metrics
from kvbaton.observe.timeline import render
from kvbaton.observe.tracing import (
    Context,
    Recorder,
    Span,
    read_seconds,
    read_traceparent,
    sampled_share,
    wants_export,
)
from kvbaton.types import LocalError

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{SPAN}-01"


def test_a_traceparent_is_read_as_it_is_written() -> None:
    assert read_traceparent(GIVEN) == (Context(TRACE, SPAN), True)
    assert read_traceparent(Context(TRACE, SPAN).header) == (Context(TRACE, SPAN), True)
    assert read_traceparent(GIVEN[:-2] + "00") == (Context(TRACE, SPAN), False)
    assert read_traceparent(f"cc-{TRACE}-{SPAN}-03-what-will-be") == (Context(TRACE, SPAN), True)


@pytest.mark.parametrize(
    "text", ["", "00", GIVEN.upper(), f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{SPAN}-01"]
)
def test_what_is_no_traceparent_begins_a_new_trace(text: str) -> None:
    assert read_traceparent(text) is None
    begun = Recorder().begin(text.encode())
    assert begun is not None and begun[1] == "" and begun[0].trace_id != TRACE


def test_a_caller_decides_for_its_trace() -> None:
    recorder = Recorder()
    begun = recorder.begin(GIVEN.encode())
    assert begun is not None and begun[0].trace_id == TRACE and begun[1] == SPAN and begun[0].span_id != SPAN
    assert recorder.begin(GIVEN[:-2].encode() + b"00") is None


def test_a_share_of_traces_is_sampled() -> None:
    recorder = Recorder()
    recorder.configure("kvbaton-router", {"OTEL_TRACES_SAMPLER_ARG": "0.25"})
    taken = sum(recorder.begin(None) is not None for _ in range(4000))
    assert 800 < taken < 1200
    assert sampled_share({"OTEL_TRACES_SAMPLER": "always_off"}) == 0.0
    assert sampled_share({"OTEL_TRACES_SAMPLER_ARG": "nonsense"}) == 1.0


def test_nothing_is_sent_unless_it_was_said_where() -> None:
    where = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    assert not wants_export({}) and wants_export(where)
    assert not wants_export({**where, "OTEL_SDK_DISABLED": "true"})
    assert not wants_export({**where, "OTEL_TRACES_EXPORTER": "none"})
    recorder = Recorder()
    recorder.configure("kvbaton-router", {})
    assert not recorder.on


def test_where_opentelemetry_is_missing_it_is_said_and_requests_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(kvbaton.observe, "otlp", raising=False)
    monkeypatch.setitem(sys.modules, "kvbaton.observe.otlp", None)  # type: ignore[arg-type]
    recorder = Recorder()
    recorder.configure("kvbaton-router", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
    assert not recorder.on and "kvbaton[otel]" in caplog.text


async def test_a_window_keeps_what_ends_in_it_and_is_gone_afterwards() -> None:
    recorder = Recorder()
    watching = asyncio.create_task(recorder.watch(0.05))
    await asyncio.sleep(0)
    assert recorder.on
    recorder.record(span("request", "a"))
    assert [each.name for each in await watching] == ["request"]
    assert not recorder.on
    recorder.record(span("late", "b"))


@pytest.mark.parametrize("query", [b"seconds=0", b"seconds=121", b"seconds=many", b"second=1", b"seconds=nan"])
def test_a_window_that_makes_no_sense_is_refused(query: bytes) -> None:
    with pytest.raises(LocalError) as caught:
        read_seconds(query)
    assert caught.value.field == "seconds"


def span(name: str, span_id: str, parent: str = "", trace: str = "t", times: tuple[int, int] = (1000, 2000)) -> Span:
    return Span(name, "internal", trace, span_id, parent, *times, {"kvbaton.decode": "decode-0"})


def test_the_timeline_nests_requests_in_lanes_and_points_to_other_processes() -> None:
    made = render({
        "router": [
            span("request", "r1", trace="one", times=(1000, 9000)), span("call", "c1", "r1", "one", (2000, 9000)),
            span("request", "r2", trace="two", times=(3000, 8000)),
            span("request", "r3", trace="three", times=(9000, 9500)),
        ],
        "decode-0": [span("generate", "d1", "c1", "one", (2500, 8800))],
    })  # fmt: skip
    events = json.loads(json.dumps(made))["traceEvents"]
    shown = {each["args"].get("trace_id", "") + each["name"]: each for each in events if each["ph"] == "X"}
    assert shown["onerequest"]["ts"] == 0 and shown["onerequest"]["dur"] == 8.0
    assert shown["onerequest"]["tid"] == shown["onecall"]["tid"] != shown["tworequest"]["tid"]
    assert shown["threerequest"]["tid"] == shown["onerequest"]["tid"], "a lane that is free is used again"
    assert shown["onegenerate"]["pid"] != shown["onecall"]["pid"]
    start, end = (next(each for each in events if each["ph"] == kind) for kind in "sf")
    assert (start["pid"], start["id"]) == (shown["onecall"]["pid"], end["id"]) and end["pid"] == shown["onegenerate"][
        "pid"
    ]
    assert {each["args"]["name"] for each in events if each["name"] == "process_name"} == {"router", "decode-0"}


def test_histograms_name_a_trace_for_those_who_can_read_it() -> None:
    metrics, asked = Metrics("router"), b"application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    metrics.observe("kvbaton_router_ttft_seconds", "remote", value=0.3)
    assert metrics.answer(asked) == metrics.answer(b""), "without a trace there is nothing more to tell"
    metrics.observe("kvbaton_router_ttft_seconds", "remote", value=0.3, trace_id=TRACE)
    assert b"trace_id" not in metrics.answer(b"text/plain")[0]
    body, kind = metrics.answer(asked)
    assert kind.startswith(b"application/openmetrics-text")
    found = [
        (sample.labels["le"], sample.exemplar.labels["trace_id"], sample.exemplar.value)
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.exemplar is not None
    ]
    assert found == [("0.5", TRACE, 0.3)]
