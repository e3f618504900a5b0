"""The Grafana dashboard: rows for what users feel, the decisions, each pool, and the hand-off between them.

Invariants: every query is built from the metric table; a panel says in its description what to read from it; panel ids
and positions follow from the order here, so that a new version differs only where something changed. Knows nothing
about where Grafana runs: the data source is a variable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvbaton.deploy.queries import (
    Gauge,
    decode_free_share,
    fallback_share,
    mean,
    prefill_queue_delay_s,
    prompt_output_ratio,
    quantile,
    rate,
    series,
)
from kvbaton.deploy.rules import Gates

Unit = Literal["s", "short", "percentunit", "reqps", "Bps", "none", "tokens/s"]
_WINDOW = "$__rate_interval"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 24


@dataclass(frozen=True)
class Panel:
    title: str
    unit: Unit
    queries: dict[str, str]  # legend -> query
    reading: str
    gate: float | None = None  # drawn as a line
    stacked: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...] = field(default_factory=tuple)


def rows(gates: Gates) -> tuple[Row, ...]:
    return (
        Row("What users feel", _felt(gates)),
        Row("Decisions", _decisions(gates)),
        Row("Prefill pool", _pool("prefill")),
        Row("Decode pool", _pool("decode")),
        Row("Hand-off", _hand_off(gates)),
    )


def _felt(gates: Gates) -> tuple[Panel, ...]:
    ttft, tpot, itl = "kvbaton_router_ttft_seconds", "kvbaton_router_tpot_seconds", "kvbaton_router_itl_seconds"
    return (
        Panel(
            "TTFT",
            "s",
            {f"p{round(100 * f)}": quantile(f, ttft, _WINDOW) for f in (0.5, 0.95, 0.99)},
            "Request received to first part sent. The line is the gate.",
            gates.ttft_s,
        ),
        Panel(
            "TPOT",
            "s",
            {f"p{round(100 * f)}": quantile(f, tpot, _WINDOW) for f in (0.5, 0.95, 0.99)},
            "Mean gap between tokens, one sample a stream. The line is the gate.",
            gates.tpot_s,
        ),
        Panel(
            "Gaps between parts of a stream",
            "s",
            {f"p{round(1000 * f) / 10:g}": quantile(f, itl, _WINDOW) for f in (0.5, 0.95, 0.99, 0.999)},
            "Stalls show here and not in TPOT: a long prompt that freezes open streams lifts the last percentiles.",
        ),
        Panel(
            "Requests",
            "reqps",
            {"{{outcome}}": rate("kvbaton_router_requests_total", _WINDOW, ("outcome",))},
            "By how they ended.",
            stacked=True,
        ),
        Panel(
            "Tokens",
            "tokens/s",
            {
                "prompt": rate("kvbaton_router_prompt_tokens_total", _WINDOW),
                "of it cached": rate("kvbaton_router_cached_tokens_total", _WINDOW),
                "output": rate("kvbaton_router_output_tokens_total", _WINDOW),
            },
            "Prompt and output apart: their ratio is what the pools are sized for.",
        ),
        Panel(
            "Waiting for room, and broken",
            "short",
            {
                "waiting": f"sum({series('kvbaton_router_queued_requests')})",
                "in flight": f"sum({series('kvbaton_router_inflight_requests')})",
                "broken streams/s": rate("kvbaton_router_broken_streams_total", _WINDOW),
            },
            "A queue that never empties means demand above capacity.",
        ),
    )


def _decisions(gates: Gates) -> tuple[Panel, ...]:
    return (
        Panel(
            "Decisions by reason",
            "reqps",
            {"{{decision}}": rate("kvbaton_router_decisions_total", _WINDOW, ("decision",))},
            "Where requests go and why; docs/api.md lists the reasons.",
            stacked=True,
        ),
        Panel(
            "p95 TTFT by decision",
            "s",
            {"{{decision}}": quantile(0.95, "kvbaton_router_ttft_seconds", _WINDOW, ("decision",))},
            "Whether the split pays: remote beside local.",
            gates.ttft_s,
        ),
        Panel(
            "Falling back",
            "percentunit",
            {"share": fallback_share(_WINDOW)},
            "Share of decisions that could not be what the policy wanted.",
            0.05,
        ),
        Panel(
            "Computed prompt tokens per output token",
            "short",
            {"ratio": prompt_output_ratio(gates.ratio_window)},
            "What the ratio of the pools was planned for. The line is the upper end of the planned band.",
            gates.ratio_high,
        ),
        Panel(
            "Cache foretold against found",
            "short",
            {"mean distance, tokens": mean("kvbaton_router_prefix_error_tokens", _WINDOW)},
            "How wrong the router's index of prefixes is.",
        ),
        Panel(
            "Router's own time",
            "s",
            {
                "p50": quantile(0.5, "kvbaton_router_overhead_seconds", _WINDOW),
                "p99": quantile(0.99, "kvbaton_router_overhead_seconds", _WINDOW),
            },
            "Parsing, tokenizing and deciding.",
        ),
    )


def _pool(role: str) -> tuple[Panel, ...]:
    waiting = series("kvbaton_worker_waiting_requests", role=role)
    running = series("kvbaton_worker_running_requests", role=role)
    busy = "kvbaton_worker_prefill_busy_seconds_total", "kvbaton_worker_decode_busy_seconds_total"
    panels = [
        Panel(
            "Sequences",
            "short",
            {"waiting": f"sum({waiting})", "running": f"sum({running})"},
            "Queue and batch of the whole pool.",
            stacked=True,
        ),
        Panel(
            "Blocks",
            "short",
            {name: str(Gauge(f"kvbaton_worker_blocks_{name}", role)) for name in ("used", "cached", "pinned", "free")},
            "Free ones include cached ones that may be evicted; pinned ones are being read elsewhere.",
        ),
        Panel(
            "Engine time",
            "percentunit",
            {"on prompts": rate(busy[0], _WINDOW, role=role), "on output": rate(busy[1], _WINDOW, role=role)},
            "In workers. On a decode pool, time on prompts is what the split was to remove.",
            stacked=True,
        ),
    ]
    if role == "prefill":
        panels.append(
            Panel(
                "Queue delay",
                "s",
                {"p50": prefill_queue_delay_s(_WINDOW, 0.5), "p95": prefill_queue_delay_s(_WINDOW)},
                "The autoscaler's signal: time a prompt waits for its first step.",
            )
        )
        panels.append(
            Panel(
                "Prompt tokens waiting",
                "short",
                {"tokens": str(Gauge("kvbaton_worker_waiting_prompt_tokens", role))},
                "Work in the queue.",
            )
        )
    else:
        panels.append(
            Panel("Free share of blocks", "percentunit", {"free": decode_free_share()}, "Admission stops at zero.", 0.1)
        )
        panels.append(
            Panel(
                "Preemptions",
                "short",
                {"per second": rate("kvbaton_worker_preemptions_total", _WINDOW, role=role)},
                "Sequences that are computed again because blocks ran out. Should be zero.",
            )
        )
    return tuple(panels)


def _hand_off(gates: Gates) -> tuple[Panel, ...]:
    whole, exposed = "kvbaton_worker_transfer_seconds", "kvbaton_worker_exposed_transfer_seconds"
    return (
        Panel(
            "Transfer",
            "s",
            {
                "p50": quantile(0.5, whole, _WINDOW),
                "p99": quantile(0.99, whole, _WINDOW),
                "exposed p99": quantile(0.99, exposed, _WINDOW),
            },
            "Most of it runs while prefill computes; only the exposed part delays the second token.",
            gates.transfer_share * gates.ttft_s,
        ),
        Panel(
            "After the transfer",
            "s",
            {
                "decode queue p50": quantile(0.5, "kvbaton_worker_decode_queue_seconds", _WINDOW),
                "decode queue p99": quantile(0.99, "kvbaton_worker_decode_queue_seconds", _WINDOW),
                "first step p99": quantile(0.99, "kvbaton_worker_first_step_seconds", _WINDOW, path="remote"),
            },
            "From KV in place to the second token: a long queue here means that decode steps are long or batches full.",
        ),
        Panel(
            "Between the pools",
            "short",
            {
                "receiving": f"sum({series('kvbaton_worker_receiving_requests')})",
                "held": f"sum({series('kvbaton_worker_held_requests')})",
                "refused for want of room/s": rate("kvbaton_worker_reservations_refused_total", _WINDOW),
            },
            "Blocks reserved for prompts that are computed elsewhere, and prompts computed that nobody has read yet. "
            "Many held: decode cannot take them; many receiving and none held: prefill is late.",
        ),
        Panel(
            "Bandwidth of hand-offs",
            "Bps",
            {
                f"p{round(100 * f)}": quantile(f, "kvbaton_worker_transfer_bytes_per_second", _WINDOW)
                for f in (0.1, 0.5, 0.9)
            },
            "Bytes over time, waiting for layers that are computed meanwhile included: falls when prefill slows too.",
        ),
        Panel(
            "KV bytes",
            "Bps",
            {
                "sent": rate("kvbaton_worker_transfer_sent_bytes_total", _WINDOW),
                "received": rate("kvbaton_worker_transfer_received_bytes_total", _WINDOW),
            },
            "Sent and received agree unless pulls are given up on the way.",
        ),
        Panel(
            "Failures and leases",
            "short",
            {
                "transfers failed/s": rate("kvbaton_worker_transfer_failures_total", _WINDOW),
                "leases expired/s": rate("kvbaton_worker_lease_expiries_total", _WINDOW),
                "leases open": f"sum({series('kvbaton_worker_leases')})",
            },
            "Expiries mean readers that vanished.",
        ),
    )


def render_dashboard(gates: Gates) -> dict[str, object]:
    """Grafana's JSON model, schema 39 (Grafana 10 and later)."""
    panels: list[dict[str, object]] = []
    top = 0
    for row in rows(gates):
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1},
                "panels": [],
            }
        )
        top += 1
        for index, panel in enumerate(row.panels):
            x = index * _WIDTH % _COLUMNS
            if index and x == 0:
                top += _HEIGHT
            panels.append(_panel(panel, len(panels) + 1, x, top))
        top += _HEIGHT
    return {
        "uid": "kvbaton",
        "title": "kvbaton",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["kvbaton"],
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Source"}]
        },
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel(panel: Panel, panel_id: int, x: int, y: int) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    custom: dict[str, object] = {"fillOpacity": 20 if panel.stacked else 0, "showPoints": "never"}
    steps: list[dict[str, object]] = [{"color": "green", "value": None}]
    if panel.stacked:
        custom["stacking"] = {"mode": "normal"}
    if panel.gate is not None:
        custom["thresholdsStyle"] = {"mode": "line"}
        steps.append({"color": "red", "value": panel.gate})
    unit = "short" if panel.unit == "tokens/s" else panel.unit
    return {
        "id": panel_id,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.reading,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": custom, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": source, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }
