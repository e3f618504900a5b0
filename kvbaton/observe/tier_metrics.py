"""The metrics of the shared KV tier as a worker sees it: a part of the table in ``metrics``.

All are read from the worker's counters when scraped; without a tier they stay 0. Knows nothing about routers.
"""

from __future__ import annotations

from kvbaton.observe.metric import Kind, Metric


def _metric(name: str, kind: Kind, text: str, stat: str) -> Metric:
    return Metric(f"kvbaton_worker_tier_{name}", kind, "worker", text, ("role",), stat=stat)


TIER_METRICS: tuple[Metric, ...] = (
    _metric("hits_total", "counter", "Requests that found a prefix in the shared KV tier.", "num_tier_hits"),
    _metric("tokens_total", "counter", "Prompt tokens whose KV was read from the tier.", "num_tier_tokens"),
    _metric("wait_seconds_total", "counter", "Time that requests waited for the tier.", "tier_wait_s"),
    _metric(
        "fallbacks_total",
        "counter",
        "Requests that computed what the tier had: too late, wrong, gone, or no room for it.",
        "num_tier_fallbacks",
    ),
    _metric(
        "wrong_blocks_total",
        "counter",
        "Blocks of the tier that were torn or not what they say; removed, and computed instead.",
        "num_tier_wrong_blocks",
    ),
    _metric("written_bytes_total", "counter", "Bytes this worker wrote to all levels.", "tier_written_bytes"),
    _metric(
        "dropped_blocks_total",
        "counter",
        "Blocks not written: too many at once, changed meanwhile, or no room.",
        "num_tier_dropped_blocks",
    ),
    _metric(
        "evicted_blocks_total",
        "counter",
        "Blocks that this worker's writing pushed out of a level.",
        "num_tier_evicted_blocks",
    ),
    _metric("errors_total", "counter", "What file system, index or store did not do.", "num_tier_errors"),
    _metric(
        "memory_bytes",
        "gauge",
        "Bytes held in memory, as of this worker's last look; one level for all workers of the host: not to be summed.",
        "tier_memory_bytes",
    ),
    _metric("disk_bytes", "gauge", "The same on disk.", "tier_disk_bytes"),
    _metric("store_blocks_total", "counter", "Blocks read from the store that hosts share.", "num_tier_store_blocks"),
    _metric(
        "store_written_bytes_total", "counter", "Bytes this worker wrote to that store.", "tier_store_written_bytes"
    ),
    _metric("store_up", "gauge", "1 while that store can be asked, 0 while not.", "tier_store_up"),
)
