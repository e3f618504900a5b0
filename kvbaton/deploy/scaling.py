"""Scaling of each pool by KEDA, and what Prometheus' operator needs to scrape and to alert.

Invariants: pools scale on queues and on what is left, never on utilisation; prefill does not grow while decode has no
room, for more prompts would only wait there; a pool shrinks slowly and by draining. Knows nothing about who evaluates
it.
"""

from __future__ import annotations

import json
from typing import Any

from kvbaton.deploy.dashboard import render_dashboard
from kvbaton.deploy.kubernetes import Manifest, _labels, _object
from kvbaton.deploy.queries import Gauge, decode_free_share, prefill_queue_delay_s, series
from kvbaton.deploy.rules import render_rules
from kvbaton.deploy.spec import DeploySpec, Pool, PoolName

_WINDOW = "1m"
_SHRINK_AFTER_S = 300


def render_scalers(spec: DeploySpec) -> list[Manifest]:
    """A ScaledObject for each pool that is scaled."""
    return [_scaler(spec, name, pool) for name, pool in spec.pools.items() if pool.scaled]


def _scaler(spec: DeploySpec, name: PoolName, pool: Pool) -> Manifest:
    scaler = _object("keda.sh/v1alpha1", "ScaledObject", spec, f"{spec.name}-{name}", _labels(spec, name))
    scaler["spec"] = {
        "scaleTargetRef": {"name": f"{spec.name}-{name}"},
        "minReplicaCount": pool.replicas,
        "maxReplicaCount": pool.max_replicas,
        "pollingInterval": 15,
        "cooldownPeriod": _SHRINK_AFTER_S,
        # Metrics gone is not load gone: the pool stays as large as it was planned.
        "fallback": {"failureThreshold": 4, "replicas": pool.replicas, "behavior": "currentReplicasIfHigher"},
        "advanced": {
            "horizontalPodAutoscalerConfig": {
                "behavior": {
                    "scaleUp": {"stabilizationWindowSeconds": 0, "policies": [_policy("Percent", 100, 60)]},
                    "scaleDown": {"stabilizationWindowSeconds": _SHRINK_AFTER_S, "policies": [_policy("Pods", 1, 120)]},
                }
            }
        },
        "triggers": [_trigger(spec, *trigger) for trigger in _triggers(name, pool)],
    }
    return scaler


def _triggers(name: PoolName, pool: Pool) -> list[tuple[str, str, float, str]]:
    """(name, query, target, kind). AverageValue is for each worker, Value for the pool."""
    if name == "prefill":
        room = f"({decode_free_share()} > bool {pool.min_free_share:g})"
        waiting = Gauge("kvbaton_worker_waiting_prompt_tokens", "prefill")
        delay = f"(({prefill_queue_delay_s(_WINDOW)} >= 0) or vector(0))"  # NaN while no prompt came: none waits
        return [
            ("waiting-tokens", f"{waiting} * {room}", pool.waiting_tokens_per_worker, "AverageValue"),
            ("queue-delay", f"{delay} * {room}", pool.queue_delay_s, "Value"),
        ]
    role = "both" if name == "colocated" else "decode"
    running, waiting = (Gauge(f"kvbaton_worker_{what}_requests", role) for what in ("running", "waiting"))
    free, blocks = Gauge("kvbaton_worker_blocks_free", role), Gauge("kvbaton_worker_blocks", role)
    unrouted = f"sum({series('kvbaton_router_queued_requests')})"
    used_of_allowed = f"(1 - {free} / {blocks}) / {1 - pool.min_free_share:g}"
    found = [
        ("sequences", f"{running} + {waiting} + {unrouted}", float(pool.sequences_per_worker), "AverageValue"),
        ("blocks", used_of_allowed, 1.0, "Value"),
    ]
    if name == "colocated":
        tokens = Gauge("kvbaton_worker_waiting_prompt_tokens", "both")
        found.append(("waiting-tokens", str(tokens), float(pool.waiting_tokens_per_worker), "AverageValue"))
    return found


def _trigger(spec: DeploySpec, name: str, query: str, target: float, kind: str) -> Manifest:
    return {
        "type": "prometheus",
        "name": name,
        "metricType": kind,
        "metadata": {
            "serverAddress": spec.prometheus_url,
            "query": query,
            "threshold": f"{target:g}",
            # A query is written so that no traffic is 0. Nothing, then, means that nobody is scraped: an error, on
            # which the pool keeps its size, where "true" would take it for an idle one.
            "ignoreNullValues": "false",
        },
    }


def _policy(kind: str, value: int, period_s: int) -> Manifest:
    return {"type": kind, "value": value, "periodSeconds": period_s}


def render_monitoring(spec: DeploySpec) -> list[Manifest]:
    """ServiceMonitor, PrometheusRule, and the dashboard in the ConfigMap that Grafana's sidecar picks up."""
    everything: dict[str, Any] = {"app.kubernetes.io/name": "kvbaton", "app.kubernetes.io/instance": spec.name}
    monitor = _object("monitoring.coreos.com/v1", "ServiceMonitor", spec, spec.name, everything)
    monitor["spec"] = {
        "selector": {"matchLabels": everything},
        "endpoints": [{"port": "http", "path": "/metrics", "interval": "5s"}],
    }
    rule = _object("monitoring.coreos.com/v1", "PrometheusRule", spec, spec.name, everything)
    rule["spec"] = render_rules(spec.gates)
    board = _object("v1", "ConfigMap", spec, f"{spec.name}-dashboard", {**everything, "grafana_dashboard": "1"})
    board["data"] = {"kvbaton.json": json.dumps(render_dashboard(spec.gates), indent=1)}
    return [monitor, rule, board]
