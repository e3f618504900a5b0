"""The metric table: names, docs, labels, and that every metric can move."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvbaton.observe.metrics import METRICS, Metric, Metrics, render_markdown
from kvbaton.workers.protocol import WorkerStats

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_docs_are_generated_from_the_table() -> None:
    assert (DOCS / "metrics.md").read_text() == render_markdown()


def test_names_are_unique_and_follow_the_conventions() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith(f"kvbaton_{metric.where}_") and metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert not metric.stat or metric.stat in WorkerStats.__struct_fields__


def test_the_longest_request_fits_the_buckets_of_durations() -> None:
    """MT-05: the gap between two tokens is a duration like any other, and may last as long as a request."""
    for metric in METRICS:
        if metric.name.endswith("_seconds") and metric.kind == "histogram":
            assert metric.buckets[-1] >= 600


@pytest.mark.parametrize("where", ["router", "worker"])
def test_every_declared_metric_changes(where: str) -> None:
    stats = WorkerStats(**dict.fromkeys(WorkerStats.__struct_fields__, 3))
    metrics = Metrics(where, role="decode", stats=(lambda: stats) if where == "worker" else None)  # type: ignore[arg-type]
    declared = [metric for metric in METRICS if metric.where == where]
    for metric in declared:
        if not metric.stat:
            change(metrics, metric)
    seen = {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics.exposition().decode())
        for sample in family.samples
    }
    for metric in declared:
        name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
        assert seen[name] == (3 if metric.stat else 1), metric.name


def change(metrics: Metrics, metric: Metric) -> None:
    labels = ["x"] * len(metric.labels)
    if metric.kind == "counter":
        metrics.add(metric.name, *labels)
    elif metric.kind == "gauge":
        metrics.set(metric.name, *labels, value=1)
    else:
        metrics.observe(metric.name, *labels, value=1)


def test_a_member_that_left_leaves_no_series() -> None:
    metrics = Metrics("router")
    metrics.set("kvbaton_router_member_up", "d0", "decode", value=1)
    metrics.forget("kvbaton_router_member_up", "d0", "decode")
    metrics.forget("kvbaton_router_member_up", "never", "decode")
    assert b"d0" not in metrics.exposition()
