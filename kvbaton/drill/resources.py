"""What the processes of a fleet hold of their machine: memory, file descriptors, threads; and whether that only grows.

Two questions. At rest: does a process hold more than its kind did before anything happened? That finds what leaks with
each request or fault. Under load: does the memory of a kind rise steadily? That finds what rest would free too late.

Memory also rises because a process settles: tables fill to their bounds, and buffers grow to the largest batch that
came yet. Where processes are killed every few minutes no life is old enough to show that it ends. But settling goes by
steps, and a leak goes with the work: so lives are cut into windows of so many requests, those of all lives of a kind
are put together, and their median is what a request leaves behind. A step is in few windows and does not move it;
something kept of each request is in all. What is kept of few requests moves no median: the slope over time, of lives
that last long enough for it, and the growth of any one life have bounds as well.

Invariants: a process is known by its id and the time it was made, so that a second life is another one; what is judged
is a pure function of the looks. Knows nothing about what the processes do.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median

import msgspec
import psutil

MIB = 1024 * 1024
# A connection that one end keeps for a while, a thread pool that was not full before: not leaks yet.
SPARE_FDS, SPARE_THREADS = 12, 6
SETTLING_S, SETTLING_REQUESTS = 90.0, 50.0  # of a life: caches fill, blocks are touched for the first time
WINDOW_REQUESTS = 25.0  # so that what half a percent of the memory wavers by is little for each
FEWEST_WINDOWS = 8
MOST_KIB_PER_REQUEST = 4.0
SHORTEST_S = 600.0  # of what is judged by time, after it has settled
MOST_MIB_PER_MINUTE = 1.0
MOST_GROWN_MIB = 32.0  # of any life, after it has settled
_MOST_POINTS = 200  # of one life, for the slope
_RECORD_EVERY_S = 15.0


class Held(msgspec.Struct, frozen=True):
    """One look at one process."""

    at_s: float
    own_bytes: int  # resident and not shared
    num_fds: int
    num_threads: int
    num_requests: float = 0.0  # its share of what the fleet has answered in its life


class Life(msgspec.Struct):
    name: str
    kind: str  # router, prefill, decode, both, up
    looks: list[Held] = []

    @property
    def lasted_s(self) -> float:
        return self.looks[-1].at_s - self.looks[0].at_s if self.looks else 0.0


class Slope(msgspec.Struct, frozen=True):
    """How the memory of one kind of process grows while it works, after it has settled."""

    kind: str
    num_lives: int  # that were judged
    num_windows: int
    kib_per_request: float  # the median of all windows
    most_grown_mib: float  # in one life
    longest_s: float
    mib_per_minute: float | None  # the median of the lives that lasted; None: none did

    @property
    def problems(self) -> list[str]:
        found = []
        if self.num_windows >= FEWEST_WINDOWS and self.kib_per_request > MOST_KIB_PER_REQUEST:
            found.append(f"by {self.kib_per_request:.1f} KiB with every request")
        if self.mib_per_minute is not None and self.mib_per_minute > MOST_MIB_PER_MINUTE:
            found.append(f"by {self.mib_per_minute:.2f} MiB a minute")
        if self.most_grown_mib > MOST_GROWN_MIB:
            found.append(f"by {self.most_grown_mib:.0f} MiB in one life")
        return found


class Watch:
    """Looks at processes by their ids; keeps every life it has seen."""

    def __init__(self) -> None:
        self.lives: dict[tuple[int, float], Life] = {}
        self._num_answered = 0

    def look(self, processes: Iterable[tuple[str, str, int]], at_s: float, num_answered: int = 0) -> dict[str, Held]:
        """``processes``: name, kind and process id. Those that are gone meanwhile are left out.

        ``num_answered``: requests, by the whole fleet and until now. Processes of a kind share them evenly.
        """
        processes, found = list(processes), {}
        fresh, self._num_answered = max(0, num_answered - self._num_answered), num_answered
        of_kind = Counter(kind for _, kind, _ in processes)
        for name, kind, pid in processes:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process = psutil.Process(pid)
                memory = process.memory_info()
                life = self.lives.setdefault((pid, process.create_time()), Life(name, kind))
                served = life.looks[-1].num_requests + fresh / of_kind[kind] if life.looks else 0.0
                held = Held(at_s, memory.rss - memory.shared, process.num_fds(), process.num_threads(), served)
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
    """Of each kind with lives that settled, while there was load (until ``until_s``)."""
    by_kind: dict[str, list[list[Held]]] = {}
    for life in lives:
        looks = [each for each in life.looks if each.at_s <= until_s]
        settled = [each for each in looks if _has_settled(each, looks[0])]
        if len(settled) > 1:
            by_kind.setdefault(life.kind, []).append(settled)
    return [_slope(kind, settled) for kind, settled in sorted(by_kind.items())]


def _has_settled(look: Held, first: Held) -> bool:
    return look.at_s - first.at_s >= SETTLING_S and look.num_requests - first.num_requests >= SETTLING_REQUESTS


def _slope(kind: str, lives: list[list[Held]]) -> Slope:
    windows = [each for looks in lives for each in kib_of_windows(looks)]
    lasted = [looks[-1].at_s - looks[0].at_s for looks in lives]
    by_time = [
        theil_sen([(each.at_s, float(each.own_bytes)) for each in looks])
        for looks, seconds in zip(lives, lasted, strict=True)
        if seconds >= SHORTEST_S
    ]
    return Slope(
        kind,
        len(lives),
        len(windows),
        median(windows) if windows else 0.0,
        max(looks[-1].own_bytes - looks[0].own_bytes for looks in lives) / MIB,
        max(lasted),
        median(by_time) * 60 / MIB if by_time else None,
    )


def kib_of_windows(looks: list[Held]) -> list[float]:
    """What memory grew by for each request, window by window; the rest that fills none is left out."""
    found, first = [], looks[0]
    for look in looks:
        served = look.num_requests - first.num_requests
        if served >= WINDOW_REQUESTS:
            found.append((look.own_bytes - first.own_bytes) / 1024 / served)
            first = look
    return found


def thinned(life: Life) -> Life:
    """A look of every so many seconds, for a record."""
    looks: list[Held] = []
    for look in life.looks:
        if not looks or look.at_s - looks[-1].at_s >= _RECORD_EVERY_S:
            looks.append(look)
    return Life(life.name, life.kind, looks)


def theil_sen(points: list[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points: a few odd looks do not turn it."""
    step = -(-len(points) // _MOST_POINTS)
    points = points[::step]
    found = [(y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x2 > x1]
    return median(found) if found else 0.0
