"""Every metric kvbaton exports, declared in one table, and the registry that a process makes of its share.

docs/metrics.md, the alert rules and the dashboard are generated from ``METRICS``. Invariants: a name appears once;
label values come from small fixed sets or from the fleet's own member names, never from clients; the largest finite
bucket of a duration covers the longest request. Knows nothing about what is measured where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge", "histogram"]
Where = Literal["router", "worker"]

# Up to the longest request (600 s) and beyond, so that a quantile never sticks at the last bucket.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600, 1200)
TOKENS = (0, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
CONTENT_TYPE = b"text/plain; version=1.0.0; charset=utf-8"


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Kind
    where: Where
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    stat: str = ""  # worker metrics read from this field of the worker's stats when scraped


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
        "Streams continued on another worker, by why the first failed (worker_error, prefill_failed, draining, stalled).",
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
    # -- worker: requests
    Metric(
        "kvbaton_worker_requests_total",
        "counter",
        "worker",
        "Requests by outcome (ok, client_error, error, cancelled).",
        ("role", "outcome"),
    ),
    Metric("kvbaton_worker_inflight_requests", "gauge", "worker", "HTTP requests being served now.", ("role",)),
    Metric(
        "kvbaton_worker_queue_seconds",
        "histogram",
        "worker",
        "Arrival at the engine that prefills to its first step.",
        ("role", "path"),
        SECONDS,
    ),
    Metric(
        "kvbaton_worker_prefill_seconds",
        "histogram",
        "worker",
        "First step to first token.",
        ("role", "path"),
        SECONDS,
    ),
    Metric(
        "kvbaton_worker_transfer_seconds",
        "histogram",
        "worker",
        "Hand-off started to last KV byte in place.",
        ("role",),
        SECONDS,
    ),
    Metric(
        "kvbaton_worker_exposed_transfer_seconds",
        "histogram",
        "worker",
        "Part of the transfer after the first token, which the second token waits for.",
        ("role",),
        SECONDS,
    ),
    # -- worker: engine, read when scraped
    Metric("kvbaton_worker_waiting_requests", "gauge", "worker", "Sequences waiting.", ("role",), stat="num_waiting"),
    Metric("kvbaton_worker_running_requests", "gauge", "worker", "Sequences running.", ("role",), stat="num_running"),
    Metric(
        "kvbaton_worker_active_requests",
        "gauge",
        "worker",
        "Sequences known to the engine, held and receiving ones too.",
        ("role",),
        stat="num_active",
    ),
    Metric(
        "kvbaton_worker_waiting_prompt_tokens",
        "gauge",
        "worker",
        "Prompt tokens not yet computed of waiting sequences.",
        ("role",),
        stat="waiting_prompt_tokens",
    ),
    Metric("kvbaton_worker_blocks", "gauge", "worker", "KV blocks in the pool.", ("role",), stat="num_blocks"),
    Metric("kvbaton_worker_blocks_used", "gauge", "worker", "KV blocks in use.", ("role",), stat="num_blocks_used"),
    Metric(
        "kvbaton_worker_blocks_free",
        "gauge",
        "worker",
        "KV blocks free or evictable.",
        ("role",),
        stat="num_blocks_free",
    ),
    Metric(
        "kvbaton_worker_blocks_cached",
        "gauge",
        "worker",
        "KV blocks that hold a cached prefix.",
        ("role",),
        stat="num_blocks_cached",
    ),
    Metric(
        "kvbaton_worker_blocks_pinned",
        "gauge",
        "worker",
        "KV blocks pinned for a reader elsewhere.",
        ("role",),
        stat="num_blocks_pinned",
    ),
    Metric("kvbaton_worker_leases", "gauge", "worker", "Leases open now.", ("role",), stat="num_leases"),
    Metric("kvbaton_worker_steps_total", "counter", "worker", "Engine steps.", ("role",), stat="num_steps"),
    Metric(
        "kvbaton_worker_computed_prompt_tokens_total",
        "counter",
        "worker",
        "Prompt tokens computed here; transferred and cached ones are not among them.",
        ("role",),
        stat="num_prompt_tokens",
    ),
    Metric(
        "kvbaton_worker_cached_prompt_tokens_total",
        "counter",
        "worker",
        "Prompt tokens the prefix cache had.",
        ("role",),
        stat="num_cached_tokens",
    ),
    Metric(
        "kvbaton_worker_output_tokens_total",
        "counter",
        "worker",
        "Tokens sampled.",
        ("role",),
        stat="num_output_tokens",
    ),
    Metric(
        "kvbaton_worker_preemptions_total",
        "counter",
        "worker",
        "Sequences put back to be recomputed because blocks ran out.",
        ("role",),
        stat="num_preemptions",
    ),
    Metric(
        "kvbaton_worker_lease_expiries_total",
        "counter",
        "worker",
        "Leases whose reader showed no sign of life.",
        ("role",),
        stat="num_lease_expiries",
    ),
    Metric(
        "kvbaton_worker_failed_steps_total",
        "counter",
        "worker",
        "Engine steps that failed.",
        ("role",),
        stat="num_failed_steps",
    ),
    Metric(
        "kvbaton_worker_prefill_busy_seconds_total",
        "counter",
        "worker",
        "Engine time spent on prompt tokens.",
        ("role",),
        stat="prefill_busy_s",
    ),
    Metric(
        "kvbaton_worker_decode_busy_seconds_total",
        "counter",
        "worker",
        "Engine time spent on output tokens.",
        ("role",),
        stat="decode_busy_s",
    ),
    Metric(
        "kvbaton_worker_transfer_sent_bytes_total",
        "counter",
        "worker",
        "KV bytes that peers took from here.",
        ("role",),
        stat="transfer_bytes_sent",
    ),
    Metric(
        "kvbaton_worker_transfer_received_bytes_total",
        "counter",
        "worker",
        "KV bytes pulled from peers.",
        ("role",),
        stat="transfer_bytes_received",
    ),
    Metric("kvbaton_worker_transfers_total", "counter", "worker", "Hand-offs begun.", ("role",), stat="num_transfers"),
    Metric(
        "kvbaton_worker_transfer_failures_total",
        "counter",
        "worker",
        "Hand-offs that failed.",
        ("role",),
        stat="num_transfer_failures",
    ),
)


class Metrics:
    """The metrics of one process. ``stats`` is asked at each scrape for those that the engine counts."""

    def __init__(self, where: Where, role: str = "", stats: Callable[[], Any] | None = None) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._by_name: dict[str, Any] = {}
        for metric in METRICS:
            if metric.where == where and not metric.stat:
                self._by_name[metric.name] = self._make(metric)
        self._stats = _StatsCollector(where, role, stats) if stats is not None else None
        if self._stats is not None:
            self._registry.register(self._stats)

    def _make(self, metric: Metric) -> Counter | Gauge | Histogram:
        if metric.kind == "histogram":
            return Histogram(metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=self._registry)
        kind = Counter if metric.kind == "counter" else Gauge
        return kind(metric.name, metric.help, metric.labels, registry=self._registry)

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        parent = self._by_name[name]
        return parent.labels(*labels) if labels else parent

    def add(self, name: str, *labels: str, amount: float = 1.0) -> None:
        self._child(name, labels).inc(amount)

    def set(self, name: str, *labels: str, value: float) -> None:
        self._child(name, labels).set(value)

    def observe(self, name: str, *labels: str, value: float) -> None:
        self._child(name, labels).observe(value)

    def observer(self, name: str) -> Callable[[float], None]:
        """The bound observation of a metric without labels, for places that run once per token."""
        observe: Callable[[float], None] = self._by_name[name].observe
        return observe

    def forget(self, name: str, *labels: str) -> None:
        """Drop one series, so that a member that left does not stay in the exposition."""
        self._by_name[name].remove(*labels)

    def set_role(self, role: str) -> None:
        """From now on the process is of this role; what it counted before moves with it."""
        assert self._stats is not None
        self._stats.role = role

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


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
        "worker serve theirs at `GET /metrics` in the Prometheus text format.",
    ]
    for where in ("router", "worker"):
        lines += ["", f"## {where.capitalize()}", "", "| name | kind | labels | meaning |", "|---|---|---|---|"]
        for metric in METRICS:
            if metric.where == where:
                labels = ", ".join(f"`{label}`" for label in metric.labels)
                lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(lines) + "\n"
