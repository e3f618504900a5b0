"""Which cores and how much KV memory each worker of one machine gets.

Pure: what the machine has is an argument. Knows nothing about processes.
"""

from __future__ import annotations

from collections.abc import Sequence

MIB = 1024 * 1024
MOST_KV_MIB = 1024
LEAST_KV_MIB = 64


def assign_cores(available: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """A set of cores for each worker: its own while there are enough, else they take turns in sharing.

    The first workers get one more where the division leaves a rest.
    """
    assert available and num_workers > 0
    if num_workers > len(available):
        return [(available[i % len(available)],) for i in range(num_workers)]
    share, rest = divmod(len(available), num_workers)
    sets, start = [], 0
    for i in range(num_workers):
        stop = start + share + (1 if i < rest else 0)
        sets.append(tuple(available[start:stop]))
        start = stop
    return sets


def emptiest_cores(available: Sequence[int], taken: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """For one more worker: as many as an even division among all would give, of those that fewest others are on."""
    assert available
    share = max(1, len(available) // (len(taken) + 1))
    load = {core: sum(core in cores for cores in taken) for core in available}
    return tuple(sorted(sorted(available, key=lambda core: (load[core], core))[:share]))


def fit_kv_memory_mib(num_workers: int, free_memory_bytes: int, num_shared: int, free_shm_bytes: int) -> int:
    """KV memory of one worker that surely fits: half of what is free, in shared memory four fifths for those in it."""
    fits = free_memory_bytes // 2 // num_workers
    if num_shared:
        fits = min(fits, free_shm_bytes * 4 // 5 // num_shared)
    return min(MOST_KV_MIB, fits // MIB)
