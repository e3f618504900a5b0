"""PromQL over our own metrics, written once: the alerts, the dashboard and the scalers are made of these.

Invariants: every metric named here is in the table of ``observe.metrics`` with the labels it is asked for, checked when
the query is built; no query divides by a rate that may be absent without saying what that means. Knows nothing about
who evaluates a query, nor how.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbaton.observe.metrics import METRICS, Metric

_BY_NAME = {metric.name: metric for metric in METRICS}


def metric(name: str) -> Metric:
    """The metric of that name. KeyError: an alert or a panel was written about something that is not exported."""
    return _BY_NAME[name]


def series(name: str, suffix: str = "", **labels: str) -> str:
    """A selector. A label value that starts with ``~`` is a regular expression."""
    declared = metric(name)
    if unknown := set(labels) - set(declared.labels):
        raise KeyError(f"{name} has no label {', '.join(sorted(unknown))}")
    if bool(suffix) != (declared.kind == "histogram"):
        raise KeyError(f"{name} is a {declared.kind}")
    inside = ",".join(
        f'{key}=~"{value[1:]}"' if value.startswith("~") else f'{key}="{value}"' for key, value in labels.items()
    )
    return f"{name}{suffix}{{{inside}}}" if inside else f"{name}{suffix}"


def rate(name: str, window: str, by: tuple[str, ...] = (), **labels: str) -> str:
    """What a counter grew by a second, over all who export it."""
    grouping = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouping} (rate({series(name, **labels)}[{window}]))"


def quantile(fraction: float, name: str, window: str, by: tuple[str, ...] = (), **labels: str) -> str:
    grouping = ", ".join(("le", *by))
    return (
        f"histogram_quantile({fraction:g}, sum by ({grouping}) (rate({series(name, '_bucket', **labels)}[{window}])))"
    )


def mean(name: str, window: str, **labels: str) -> str:
    total, count = series(name, "_sum", **labels), series(name, "_count", **labels)
    return f"sum(rate({total}[{window}])) / sum(rate({count}[{window}]))"


def share(part: str, whole: str) -> str:
    """``part`` of ``whole``; nothing where ``whole`` is zero, so that a silent fleet raises no alert."""
    return f"({part}) / (({whole}) > 0)"


@dataclass(frozen=True)
class Gauge:
    """A gauge summed over a pool."""

    name: str
    role: str

    def __str__(self) -> str:
        return f"sum({series(self.name, role=self.role)})"


def prompt_output_ratio(window: str) -> str:
    """Prompt tokens that had to be computed for each output token: what the ratio of the pools was planned for."""
    prompt = rate("kvbaton_router_prompt_tokens_total", window)
    cached = rate("kvbaton_router_cached_tokens_total", window)
    return share(f"{prompt} - {cached}", rate("kvbaton_router_output_tokens_total", window))


def fallback_share(window: str) -> str:
    some = rate("kvbaton_router_decisions_total", window, decision="~fallback_.*")
    return share(f"{some} or vector(0)", rate("kvbaton_router_decisions_total", window))


def prefill_queue_delay_s(window: str, fraction: float = 0.95) -> str:
    """Time a prompt waits for its first step on the prefill pool; the workers that pull are told it, and export it."""
    return quantile(fraction, "kvbaton_worker_queue_seconds", window, path="remote")


def decode_free_share() -> str:
    """Blocks of the decode pool that can be had."""
    return share(str(Gauge("kvbaton_worker_blocks_free", "decode")), str(Gauge("kvbaton_worker_blocks", "decode")))
