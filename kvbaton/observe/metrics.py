"""Every metric kvbaton exports, declared in one table, and the registry that a process makes of its share.

docs/metrics.md, the alert rules and the dashboard are generated from ``METRICS``. Invariants: a name appears once;
label values come from small fixed sets or from the fleet's own member names, never from clients; the largest finite
bucket of a duration covers the longest request. Knows nothing about what is measured where.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from kvbaton.observe.metric import RATIOS, SECONDS, TOKENS, Metric, Where
from kvbaton.observe.tier_metrics import TIER_METRICS
from kvbaton.observe.worker_metrics import WORKER_METRICS

CONTENT_TYPE = b"text/plain; version=1.0.0; charset=utf-8"

METRICS: tuple[Metric, ...] = (
    # -- router: what clients see
    Metric(
        "kvbaton_router_requests_total",
        "counter",
        "router",
        "Requests by endpoint, routing reason (none: refused before a decision) and outcome "
        "(ok, rejected, error, cancelled).",
        ("endpoint", "decision", "outcome"),
    ),
    Metric("kvbaton_router_inflight_requests", "gauge", "router", "Requests being served now."),
    Metric("kvbaton_router_queued_requests", "gauge", "router", "Requests that wait because no worker has room."),
    Metric(
        "kvbaton_router_queue_seconds",
        "histogram",
        "router",
        "Time such a request waited, of those that got in or gave up.",
        buckets=SECONDS,
    ),
    Metric(
        "kvbaton_router_ttft_seconds",
        "histogram",
        "router",
        "Request received to first part of a streamed answer sent; one sample for each stream that began.",
        ("decision",),
        SECONDS,
    ),
    Metric(
        "kvbaton_router_tpot_seconds",
        "histogram",
        "router",
        "Mean gap between output tokens after the first, one sample for each finished stream of two tokens or more.",
        ("decision",),
        SECONDS,
    ),
    Metric("kvbaton_router_itl_seconds", "histogram", "router", "Gap between two parts of a stream.", buckets=SECONDS),
    Metric(
        "kvbaton_router_request_seconds",
        "histogram",
        "router",
        "Request received to answer complete, of requests that ended ok.",
        ("decision",),
        SECONDS,
    ),
    Metric(
        "kvbaton_router_overhead_seconds",
        "histogram",
        "router",
        "Request received to call sent to a worker: parsing, tokenizing, deciding.",
        buckets=SECONDS,
    ),
    Metric("kvbaton_router_prompt_tokens_total", "counter", "router", "Prompt tokens of answered requests."),
    Metric(
        "kvbaton_router_cached_tokens_total",
        "counter",
        "router",
        "Prompt tokens of answered requests that a prefix cache had.",
    ),
    Metric("kvbaton_router_output_tokens_total", "counter", "router", "Tokens generated for answered requests."),
    Metric(
        "kvbaton_router_prompt_output_ratio",
        "gauge",
        "router",
        "Computed prompt tokens (no cache had them) for each output token, over the five minutes before the scrape; "
        "absent while too little was generated.",
    ),
    Metric(
        "kvbaton_router_plan_ratio",
        "gauge",
        "router",
        "The two ends (low, high) of the band of that ratio which the plan was made for (`--plan-band`).",
        ("end",),
    ),
    Metric(
        "kvbaton_router_plan_drift",
        "gauge",
        "router",
        "That ratio over the end of the band it has left: 1 inside, above 1 when prefill is short, below 1 when decode "
        "is.",
    ),
    # -- router: what it decided and why
    Metric(
        "kvbaton_router_decisions_total",
        "counter",
        "router",
        "Routing decisions by reason, retries included.",
        ("decision",),
    ),
    Metric(
        "kvbaton_router_disaggregated_requests_total",
        "counter",
        "router",
        "Answered requests for which KV bytes moved between workers.",
    ),
    Metric("kvbaton_router_transfer_bytes_total", "counter", "router", "KV bytes moved for answered requests."),
    Metric(
        "kvbaton_router_retries_total",
        "counter",
        "router",
        "Second attempts, by why the first failed (prefill_failed, unreachable, draining, worker_error).",
        ("cause",),
    ),
    Metric(
        "kvbaton_router_replays_total",
        "counter",
        "router",
        "Streams continued on another worker, by why the first failed "
        "(worker_error, prefill_failed, draining, stalled).",
        ("cause",),
    ),
    Metric(
        "kvbaton_router_replayed_tokens_total",
        "counter",
        "router",
        "Output tokens that such streams had already, and that were given to the next worker as part of the prompt.",
    ),
    Metric(
        "kvbaton_router_queue_refusals_total",
        "counter",
        "router",
        "Requests answered 429 because the queue of their class (high, normal, low) was full.",
        ("priority",),
    ),
    Metric(
        "kvbaton_router_broken_streams_total",
        "counter",
        "router",
        "Streams that broke after their first part.",
    ),
    Metric(
        "kvbaton_router_prefix_error_tokens",
        "histogram",
        "router",
        "Distance between the cached tokens the prefix index foretold and those the worker found.",
        buckets=TOKENS,
    ),
    Metric(
        "kvbaton_router_foretold_cached_tokens_total",
        "counter",
        "router",
        "Cached tokens that the prefix index foretold for answered requests; what was found is "
        "kvbaton_router_cached_tokens_total.",
    ),
    Metric(
        "kvbaton_router_canary_total",
        "counter",
        "router",
        "Canary prompts by result: right, wrong (another answer than before), failed (no answer).",
        ("result",),
    ),
    # -- router: what it estimates, and how wrong that is
    Metric(
        "kvbaton_router_ttft_estimate_error_ratio",
        "histogram",
        "router",
        "Distance of the estimated from the measured TTFT over the measured one, of streams without a retry.",
        ("path",),
        RATIOS,
    ),
    Metric(
        "kvbaton_router_model_parameter",
        "gauge",
        "router",
        "Cost model of a worker as decisions use it now; units are in the parameter's name, see routing.md.",
        ("member", "parameter"),
    ),
    Metric(
        "kvbaton_router_model_error_ratio",
        "gauge",
        "router",
        "Running mean of the relative error of a worker's prefill or step model, before each sample was learned.",
        ("member", "model"),
    ),
    Metric(
        "kvbaton_router_model_samples",
        "gauge",
        "router",
        "Samples a worker's prefill or step model has seen since it started or changed.",
        ("member", "model"),
    ),
    Metric(
        "kvbaton_router_link_parameter",
        "gauge",
        "router",
        "Start-up time (startup_s) and time per byte (byte_s) of transfers between two workers, as learned.",
        ("prefill", "decode", "parameter"),
    ),
    Metric(
        "kvbaton_router_link_error_ratio",
        "gauge",
        "router",
        "Running mean of the relative error of a link's exposed transfer time.",
        ("prefill", "decode"),
    ),
    Metric(
        "kvbaton_router_arm_ttft_seconds",
        "histogram",
        "router",
        "TTFT of finished streams of two tokens or more that the rollout could have sent either way: split or single.",
        ("arm",),
        SECONDS,
    ),
    Metric(
        "kvbaton_router_arm_tpot_seconds",
        "histogram",
        "router",
        "TPOT of the same streams.",
        ("arm",),
        SECONDS,
    ),
    Metric("kvbaton_router_disagg_percent", "gauge", "router", "Share of eligible requests that goes to the split."),
    # -- router: its members
    Metric("kvbaton_router_member_up", "gauge", "router", "1 when the worker takes requests.", ("member", "role")),
    Metric(
        "kvbaton_router_member_inflight_requests",
        "gauge",
        "router",
        "Requests this router has in flight on the worker.",
        ("member", "role"),
    ),
    Metric(
        "kvbaton_router_member_failures_total",
        "counter",
        "router",
        "Failed calls and polls of the worker.",
        ("member", "cause"),
    ),
    Metric(
        "kvbaton_router_member_restarts_total", "counter", "router", "New incarnations seen of the worker.", ("member",)
    ),
    Metric(
        "kvbaton_router_prefix_index_blocks", "gauge", "router", "Prefix blocks remembered of the worker.", ("member",)
    ),
    Metric(
        "kvbaton_router_kv_fresh",
        "gauge",
        "router",
        "1 when the index follows the worker's KV events; 0 when it goes by what was sent there.",
        ("member",),
    ),
    Metric(
        "kvbaton_router_kv_events_total",
        "counter",
        "router",
        "KV events of the worker by kind: blocks stored, blocks removed, cache cleared.",
        ("member", "kind"),
    ),
    Metric("kvbaton_router_kv_gaps_total", "counter", "router", "Times events of the worker were missed.", ("member",)),
    Metric("kvbaton_router_kv_resyncs_total", "counter", "router", "Snapshots taken of the worker.", ("member",)),
    Metric("kvbaton_router_kv_failures_total", "counter", "router", "Failed questions for KV events.", ("member",)),
    Metric(
        "kvbaton_router_kv_lag_seconds",
        "histogram",
        "router",
        "Age of the oldest change in an answer of KV events.",
        buckets=SECONDS,
    ),
    Metric("kvbaton_router_kv_index_hashes", "gauge", "router", "Distinct KV blocks in the index, of all workers."),
    Metric(
        "kvbaton_router_kv_index_dropped",
        "gauge",
        "router",
        "KV blocks that the index has dropped since its start because it was full.",
    ),
    *WORKER_METRICS,
    *TIER_METRICS,
)


class _Distribution:
    """One series of a histogram."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}  # the last of each bucket that a trace has

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_traced(self, value: float, trace_id: str) -> None:
        self.observe(value)
        self.exemplars[bisect_left(self.bounds, value)] = Exemplar({"trace_id": trace_id}, value, time.time())

    def cumulated(self) -> list[Any]:
        edges = [*map(floatToGoString, self.bounds), "+Inf"]
        found = list(zip(edges, map(float, accumulate(self.counts)), strict=True))
        return [(*each, self.exemplars.get(index)) for index, each in enumerate(found)] if self.exemplars else found


class Metrics:
    """The metrics of one process. ``stats`` is asked at each scrape for those that the engine counts.

    Plain numbers that one thread changes, the event loop's: the library's own metrics take a lock and search linearly
    each time, which a router that counts per token would feel. The library writes the exposition.
    """

    def __init__(self, where: Where, role: str = "", stats: Callable[[], Any] | None = None) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._has_exemplars = False
        self._declared = {m.name: m for m in METRICS if m.where == where and not m.stat}
        # A metric without labels is there from the start, with zero.
        self._numbers: dict[str, dict[tuple[str, ...], float]] = {
            name: {} if metric.labels else {(): 0.0}
            for name, metric in self._declared.items()
            if metric.kind != "histogram"
        }
        self._distributions: dict[str, dict[tuple[str, ...], _Distribution]] = {
            name: {} if metric.labels else {(): _Distribution(metric.buckets)}
            for name, metric in self._declared.items()
            if metric.kind == "histogram"
        }
        self._registry.register(_NumbersCollector(self._declared, self._numbers, self._distributions))
        self._stats = _StatsCollector(where, role, stats) if stats is not None else None
        if self._stats is not None:
            self._registry.register(self._stats)

    def add(self, name: str, *labels: str, amount: float = 1.0) -> None:
        series = self._numbers[name]
        try:
            series[labels] += amount
        except KeyError:
            self._check(name, labels)
            series[labels] = amount

    def adder(self, name: str) -> Callable[[float], None]:
        """``add`` of a counter without labels, for places that run often."""
        series, labels = self._numbers[name], ()

        def add(amount: float) -> None:
            series[labels] += amount

        return add

    def set(self, name: str, *labels: str, value: float) -> None:
        series = self._numbers[name]
        if labels not in series:
            self._check(name, labels)
        series[labels] = value

    def observe(self, name: str, *labels: str, value: float, trace_id: str = "") -> None:
        if trace_id:
            self._has_exemplars = True
            self._distribution(name, labels).observe_traced(value, trace_id)
        else:
            self._distribution(name, labels).observe(value)

    def observer(self, name: str, *labels: str) -> Callable[[float], None]:
        """The bound observation of one series, for places that run once per token."""
        return self._distribution(name, labels).observe

    def _distribution(self, name: str, labels: tuple[str, ...]) -> _Distribution:
        series = self._distributions[name]
        found = series.get(labels)
        if found is None:
            self._check(name, labels)
            found = series[labels] = _Distribution(self._declared[name].buckets)
        return found

    def _check(self, name: str, labels: tuple[str, ...]) -> None:
        assert len(labels) == len(self._declared[name].labels), f"{name} has labels {self._declared[name].labels}"

    def forget(self, name: str, *labels: str) -> None:
        """Drop one series, so that a member that left does not stay in the exposition."""
        series: dict[tuple[str, ...], Any] = self._numbers.get(name) or self._distributions.get(name, {})
        series.pop(labels, None)

    def set_role(self, role: str) -> None:
        """From now on the process is of this role; what it counted before moves with it."""
        assert self._stats is not None
        self._stats.role = role

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """The series of a counter or gauge as they are now."""
        return dict(self._numbers[name])

    def counts(self, name: str) -> list[int]:
        """What a histogram has in each bucket, over all its series; the last entry is what lies above the bounds."""
        total = [0] * (len(self._declared[name].buckets) + 1)
        for found in self._distributions[name].values():
            total = [known + more for known, more in zip(total, found.counts, strict=True)]
        return total

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def answer(self, accept: bytes) -> tuple[bytes, bytes]:
        """(body, content type) for a scraper: exemplars exist only in OpenMetrics, for those who ask for it."""
        if self._has_exemplars and b"application/openmetrics-text" in accept:
            return openmetrics.generate_latest(self._registry), openmetrics.CONTENT_TYPE_LATEST.encode()
        return self.exposition(), CONTENT_TYPE


class _NumbersCollector(Collector):
    """What ``Metrics`` counted, as the library wants it."""

    def __init__(
        self,
        declared: Mapping[str, Metric],
        numbers: Mapping[str, Mapping[tuple[str, ...], float]],
        distributions: Mapping[str, Mapping[tuple[str, ...], _Distribution]],
    ) -> None:
        self._declared, self._numbers, self._distributions = declared, numbers, distributions

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        for name, metric in self._declared.items():
            if metric.kind == "histogram":
                histogram = HistogramMetricFamily(name, metric.help, labels=metric.labels)
                for labels, found in self._distributions[name].items():
                    histogram.add_metric(labels, found.cumulated(), found.total)
                yield histogram
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(name.removesuffix("_total"), metric.help, labels=metric.labels)
            for labels, value in self._numbers[name].items():
                family.add_metric(labels, value)
            yield family


class _StatsCollector(Collector):
    def __init__(self, where: Where, role: str, stats: Callable[[], Any]) -> None:
        self._metrics = [m for m in METRICS if m.where == where and m.stat]
        self.role = role
        self._stats = stats

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        stats = self._stats()
        for metric in self._metrics:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
            family.add_metric([self.role], float(getattr(stats, metric.stat)))
            yield family


def render_markdown() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated from the table in `kvbaton/observe/metrics.py`; a test compares the two. The router and every",
        "worker serve theirs at `GET /metrics` in the Prometheus text format; where requests are traced, scrapers that",
        "ask for OpenMetrics get trace ids as exemplars ([operations.md](operations.md), Traces).",
    ]
    for where in ("router", "worker"):
        lines += ["", f"## {where.capitalize()}", "", "| name | kind | labels | meaning |", "|---|---|---|---|"]
        for metric in METRICS:
            if metric.where == where:
                labels = ", ".join(f"`{label}`" for label in metric.labels)
                lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"
