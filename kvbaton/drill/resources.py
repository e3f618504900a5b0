"""What the processes of a fleet hold of their machine: memory, file descriptors, threads; and whether that only grows.

Two questions. At rest: does a process hold more than its kind did before anything happened? That finds what leaks with
each request or fault. Under load: does the memory of one life rise steadily? That finds what rest would free too late.
Invariants: a process is known by its id and the time it was made, so that a second life is another one; what is judged
is a pure function of the looks. Knows nothing about what the processes do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from statistics import median

import msgspec
import psutil

MIB = 1024 * 1024
# A connection that one end keeps for a while, a thread pool that was not full before: not leaks yet.
SPARE_FDS, SPARE_THREADS = 12, 6
SETTLING_S = 90.0  # of a life: caches fill, blocks are touched for the first time
SHORTEST_S = 180.0  # of what is judged after that, unless lives are pooled
MOST_MIB_PER_MINUTE = 1.0
_MOST_POINTS = 200  # of one life, for the slope


class Held(msgspec.Struct, frozen=True):
    """One look at one process."""

    at_s: float
    own_bytes: int  # resident and not shared
    num_fds: int
    num_threads: int


class Life(msgspec.Struct):
    name: str
    kind: str  # router, prefill, decode, both, up
    looks: list[Held] = []

    @property
    def lasted_s(self) -> float:
        return self.looks[-1].at_s - self.looks[0].at_s if self.looks else 0.0


class Slope(msgspec.Struct, frozen=True):
    """How the memory of one kind of process grows while it works: the median of its lives that lasted."""

    kind: str
    num_lives: int
    mib_per_minute: float
    longest_s: float

    @property
    def too_steep(self) -> bool:
        return self.mib_per_minute > MOST_MIB_PER_MINUTE


class Watch:
    """Looks at processes by their ids; keeps every life it has seen."""

    def __init__(self) -> None:
        self.lives: dict[tuple[int, float], Life] = {}

    def look(self, processes: Iterable[tuple[str, str, int]], at_s: float) -> dict[str, Held]:
        """``processes``: name, kind and process id. Those that are gone meanwhile are left out."""
        found = {}
        for name, kind, pid in processes:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process = psutil.Process(pid)
                memory = process.memory_info()
                held = Held(at_s, memory.rss - memory.shared, process.num_fds(), process.num_threads())
                life = self.lives.setdefault((pid, process.create_time()), Life(name, kind))
                life.looks.append(held)
                found[name] = held
        return found


def most_of(held: Mapping[str, Held], kinds: Mapping[str, str]) -> dict[str, Held]:
    """The most that a process of each kind holds; ``kinds`` by name."""
    found: dict[str, Held] = {}
    for name, each in held.items():
        kind = kinds[name]
        most = found.get(kind, each)
        found[kind] = Held(
            each.at_s,
            max(most.own_bytes, each.own_bytes),
            max(most.num_fds, each.num_fds),
            max(most.num_threads, each.num_threads),
        )
    return found


def left_over(before: Mapping[str, Held], held: Mapping[str, Held], kinds: Mapping[str, str]) -> list[str]:
    """What is held at rest beyond what a process of that kind held at rest before, in words."""
    found = []
    for name, each in held.items():
        first = before.get(kinds[name])
        if first is None:
            continue
        if each.num_fds > first.num_fds + SPARE_FDS:
            found.append(f"{name}: {each.num_fds} file descriptors, {first.num_fds} before")
        if each.num_threads > first.num_threads + SPARE_THREADS:
            found.append(f"{name}: {each.num_threads} threads, {first.num_threads} before")
    return found


def slopes(lives: Iterable[Life], until_s: float) -> list[Slope]:
    """Of each kind with lives that lasted, while there was load (until ``until_s``)."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for life in lives:
        looks = [each for each in life.looks if each.at_s <= until_s]
        looks = [each for each in looks if each.at_s - looks[0].at_s >= SETTLING_S]
        if looks and looks[-1].at_s - looks[0].at_s >= SHORTEST_S:
            points = [(each.at_s, float(each.own_bytes)) for each in looks]
            by_kind.setdefault(life.kind, []).append((theil_sen(points), looks[-1].at_s - looks[0].at_s))
    return [
        Slope(kind, len(found), median(slope for slope, _ in found) * 60 / MIB, max(lasted for _, lasted in found))
        for kind, found in sorted(by_kind.items())
    ]


def theil_sen(points: list[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points: a few odd looks do not turn it."""
    step = -(-len(points) // _MOST_POINTS)
    points = points[::step]
    found = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x2 > x1]
    return median(found) if found else 0.0
