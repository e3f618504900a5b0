"""Fetching metrics for ``kvbaton advise``: two scrapes of workers, or two moments out of Prometheus.

Every fetch has a deadline. Knows nothing about what the numbers mean.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

from kvbaton.types import RemoteError

DEADLINE_S = 10.0
SELECTOR = '{__name__=~"vllm:.*|sglang:.*|kvbaton_.*|process_start_time_seconds"}'
OURS = ("vllm:", "sglang:", "kvbaton_")


def fetch(url: str) -> str:
    """The body of an http or https URL."""
    if not url.startswith(("http://", "https://")):
        url = f"http://{url}"
    try:
        with urlopen(url, timeout=DEADLINE_S) as answer:
            return answer.read().decode("utf-8", "replace")
    except HTTPError as error:
        with error:
            said = error.read(2000).decode("utf-8", "replace").strip()
        raise RemoteError(f"{url} answered {error.code}: {said or error.reason}", field="SOURCES") from None
    except (URLError, OSError, ValueError) as error:
        raise RemoteError(f"cannot scrape {url}: {error}", field="SOURCES") from None


def metrics_url(url: str) -> str:
    return url if url.rstrip("/").endswith("/metrics") else url.rstrip("/") + "/metrics"


def twice(urls: Sequence[str], interval_s: float) -> tuple[list[str], list[str]]:
    """All workers now, and again after the interval."""
    before = [fetch(metrics_url(url)) for url in urls]
    time.sleep(interval_s)
    return before, [fetch(metrics_url(url)) for url in urls]


def from_prometheus(base_url: str, interval_s: float) -> tuple[list[str], list[str]]:
    """The same from Prometheus: its samples of ``interval_s`` ago and of now, by instance."""
    now_s = time.time()
    before, after = (_instant(base_url, at_s) for at_s in (now_s - interval_s, now_s))
    names = sorted(set(before) & set(after))
    if not names:
        raise RemoteError("Prometheus has no samples of vLLM, SGLang or kvbaton at both ends", field="--prometheus")
    return [before[name] for name in names], [after[name] for name in names]


def _instant(base_url: str, at_s: float) -> dict[str, str]:
    query = urlencode({"query": SELECTOR, "time": f"{at_s:.3f}"})
    text = fetch(f"{base_url.rstrip('/')}/api/v1/query?{query}")
    try:
        answer = json.loads(text)
        if answer["status"] != "success":
            raise RemoteError(f"Prometheus: {answer.get('error', answer['status'])}", field="--prometheus")
        samples = [(dict(each["metric"]), each["value"][1]) for each in answer["data"]["result"]]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise RemoteError(
            f"{base_url} does not speak Prometheus' query API: {text[:80]!r}", field="--prometheus"
        ) from None
    texts: dict[str, list[str]] = {}
    for labels, value in samples:
        name, instance = labels.pop("__name__"), labels.get("instance", "")
        inner = ",".join(f"{key}={json.dumps(label)}" for key, label in sorted(labels.items()))
        texts.setdefault(instance, []).append(f"{name}{{{inner}}} {value}")
    return {
        instance: "\n".join(lines)
        for instance, lines in texts.items()
        if any(line.startswith(OURS) for line in lines)  # others' process start times came along
    }
