"""Cores and memory of the workers of one machine."""

from __future__ import annotations

import pytest

from kvbaton.cli.placement import assign_cores, fit_kv_memory_mib
from kvbaton.cli.up import fleet_roles
from kvbaton.types import LocalError

GIB = 2**30


@pytest.mark.parametrize(
    ("available", "num_workers", "expected"),
    [
        ([0, 1], 2, [(0,), (1,)]),
        ([0, 1], 4, [(0,), (1,), (0,), (1,)]),
        ([0, 1, 2, 3, 4], 2, [(0, 1, 2), (3, 4)]),
        ([3, 7], 1, [(3, 7)]),
        ([0], 2, [(0,), (0,)]),
    ],
)
def test_cores(available: list[int], num_workers: int, expected: list[tuple[int, ...]]) -> None:
    assert assign_cores(available, num_workers) == expected


def test_memory_fits_the_machine_and_the_shared_memory() -> None:
    assert fit_kv_memory_mib(2, 64 * GIB, 1, 64 * GIB) == 1024
    assert fit_kv_memory_mib(2, 2 * GIB, 1, 64 * GIB) == 512
    assert fit_kv_memory_mib(2, 64 * GIB, 1, 64 * 2**20) == 51  # a container's default /dev/shm
    assert fit_kv_memory_mib(2, 64 * GIB, 0, 0) == 1024


def test_roles() -> None:
    assert fleet_roles(None, None, None) == ["prefill", "decode"]
    assert fleet_roles(2, None, None) == ["prefill", "prefill", "decode"]
    assert fleet_roles(None, None, 2) == ["both", "both"]
    with pytest.raises(LocalError, match="single pool"):
        fleet_roles(1, None, 2)
