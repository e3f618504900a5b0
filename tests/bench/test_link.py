"""The link benchmark over the real hand-off, both transports, small."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvbaton.bench.link import LinkSpec, _block_order, measure_link
from kvbaton.kv.layout import KVLayout
from kvbaton.types import LocalError

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")


@pytest.mark.parametrize(
    ("transport", "more"),
    [("shm", {}), ("tcp", {"run_blocks": 1}), ("tcp", {"concurrency": 3, "background": 1})],
)
async def test_bytes_and_times_of_every_size(transport: Any, more: dict[str, int]) -> None:
    spec = LinkSpec(LAYOUT, (100, 400), repeats=6, transport=transport, **more)
    found = await measure_link(spec)
    assert found.transport == transport
    assert [size.num_bytes for size in found.sizes] == [LAYOUT.block_bytes * LAYOUT.blocks_for(n) for n in (100, 400)]
    assert all(0 < size.p50_ms <= size.p99_ms <= size.max_ms for size in found.sizes)
    assert (found.startup_ms is None) == (found.gb_per_s is None)


def test_runs_decide_how_many_descriptors_there_are() -> None:
    def descriptors(order: list[int]) -> int:
        return 1 + sum(after != before + 1 for before, after in zip(order, order[1:], strict=False))

    assert descriptors(_block_order(64, 0, Random(1))) == 1
    assert descriptors(_block_order(64, 8, Random(1))) <= 8
    assert descriptors(_block_order(64, 1, Random(1))) > 50
    assert sorted(_block_order(65, 8, Random(1))) == list(range(65))


async def test_nonsense_is_refused() -> None:
    with pytest.raises(LocalError, match="repeats"):
        await measure_link(LinkSpec(LAYOUT, (100,), repeats=1))
