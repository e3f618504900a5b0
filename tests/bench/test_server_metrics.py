"""What endpoints count of KV and prompt tokens, between two scrapes and over several runs."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.bench.server_metrics import Moved, TransferMetrics, moved_between, parse, pooled, transfer_between

WORKER = """
# TYPE kvbaton_worker_transfer_received_bytes counter
kvbaton_worker_transfer_received_bytes_total{{role="decode"}} {bytes}
# TYPE kvbaton_worker_prompt_tokens counter
kvbaton_worker_prompt_tokens_total{{role="prefill"}} {computed}
"""
ENGINE = """
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{{le="+Inf"}} {count}
vllm:nixl_bytes_transferred_sum {bytes}
vllm:nixl_bytes_transferred_count {count}
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{{le="0.01"}} {fast}
vllm:nixl_xfer_time_seconds_bucket{{le="0.1"}} {count}
vllm:nixl_xfer_time_seconds_bucket{{le="+Inf"}} {count}
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {computed}
vllm:prompt_tokens_by_source_total{{engine="0",source="local_cache_hit"}} 0
vllm:prompt_tokens_by_source_total{{engine="0",source="external_kv_transfer"}} {moved}
"""


def worker(num_bytes: float, computed: float) -> str:
    return WORKER.format(bytes=num_bytes, computed=computed)


def engine(num_bytes: float, computed: float, moved: float, count: float = 0, fast: float = 0) -> str:
    return ENGINE.format(bytes=num_bytes, computed=computed, moved=moved, count=count, fast=fast)


def test_a_pool_that_moved_nothing_says_so_and_one_that_counts_nothing_is_not_known() -> None:
    found = moved_between(parse(worker(0, 10)), parse(worker(0, 60)))
    assert found == Moved(0.0, "kvbaton_worker_transfer_received_bytes_total", {"computed": 50.0})
    assert moved_between(parse(""), parse("# TYPE up gauge\nup 1\n")) is None


def test_the_engines_own_word_counts_before_what_a_worker_repeats_of_it() -> None:
    before = parse(worker(500, 10) + engine(500, 7, 100))
    after = parse(worker(900, 40) + engine(2500, 9, 356))
    assert moved_between(before, after) == Moved(
        2000.0, "vllm:nixl_bytes_transferred_sum", {"computed": 2.0, "cached": 0.0, "moved": 256.0}
    )


def test_several_runs_are_as_one() -> None:
    start = parse(engine(0, 0, 0))
    ends = [parse(engine(100, 1, 10, count=4, fast=4)), parse(engine(300, 2, 20, count=4, fast=0))]
    runs = []
    for end in ends:
        transfer, moved = transfer_between(start, end), moved_between(start, end)
        # As a samples file keeps them: JSON has no infinity.
        runs.append(msgspec.json.decode(msgspec.json.encode({"transfer": transfer, "moved": moved})))
    found = pooled(runs)
    assert found["moved"]["bytes"] == 400 and found["moved"]["prompt_tokens"]["moved"] == 30
    transfer = msgspec.convert(found["transfer"], TransferMetrics)
    assert (transfer.count, transfer.bytes) == (8, 400)
    assert transfer.p50_ms == pytest.approx(10.0) and 90 < transfer.p99_ms <= 100
    assert pooled([{}]) == {}
