"""A linear model learned one sample at a time: bounded, forgetting, robust; without data it is what it started as.

    y = sum of parameter x feature, each parameter within [low, high]

Recursive least squares of relative errors: a sample weighs 1/y^2, y the larger of measured and expected, times 0.99 for
every later one. Kept as the normal equations; the three or fewer unknowns are solved anew after each sample. Robust: a
sample far off counts less (Huber, on the logarithm of measured over expected); several on one side are a change, not
outliers, and the past is let go. What the samples cannot tell apart stays as it was.

Invariants: pure; parameters stay in their bounds; ``error`` is the running mean of |expected - measured| / measured.
Knows nothing about what is modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import copysign, log

FORGET = 0.99
_HUBER = 2.5  # typical deviations a sample may be off before it counts less
_SMALLEST_SPREAD, _LARGEST_SPREAD = 0.02, 0.5
_FAR_OFF, _BACK = 4.0, 0.5  # far samples on one side that are a change; what a near one takes off their count
_LET_GO = 0.002  # of the weight of the past, after a change
START_WEIGHT = 0.05  # samples that the start is worth
_SHORTEST_S, _LONGEST_S = 1e-7, 1e5  # of a time that can be right
_STAY = 1e-3  # pull towards the present value, as a share of what the samples say


class Regression:
    """``start``: parameters before any sample. ``sizes``: their usual sizes, to weigh the start and to scale by."""

    def __init__(
        self,
        start: Sequence[float],
        sizes: Sequence[float],
        bounds: Sequence[tuple[float, float]],
        start_weight: float = START_WEIGHT,
    ) -> None:
        self.count = 0
        self.error = 0.0
        self._sizes = tuple(sizes)
        self._bounds = tuple((low / size, high / size) for (low, high), size in zip(bounds, sizes, strict=True))
        self._solution = [
            min(max(value / size, low), high)
            for value, size, (low, high) in zip(start, self._sizes, self._bounds, strict=True)
        ]
        count = len(self._sizes)
        self._normal = [[start_weight if i == j else 0.0 for j in range(count)] for i in range(count)]
        self._right = [start_weight * value for value in self._solution]
        self._spread = _LARGEST_SPREAD
        self._far = 0.0  # samples far off and not made up for: above 0 too slow, below too fast

    @property
    def parameters(self) -> tuple[float, ...]:
        return tuple(value * size for value, size in zip(self._solution, self._sizes, strict=True))

    def expect(self, features: Sequence[float]) -> float:
        return sum(f * v * s for f, v, s in zip(features, self._solution, self._sizes, strict=True))

    def add(self, features: Sequence[float], measured: float) -> None:
        """One sample. Those that take no time, or cannot be right, are not taken."""
        expected = self.expect(features)
        if not _SHORTEST_S <= measured <= _LONGEST_S or expected < _SHORTEST_S:
            return
        self.count += 1
        pace = max(0.05, 1.0 / self.count)
        self.error += pace * (min(10.0, abs(expected - measured) / measured) - self.error)
        weight = self._trust(log(measured / expected)) if self.count > 1 else 1.0
        size = max(measured, expected)
        scaled = [f * s / size for f, s in zip(features, self._sizes, strict=True)]
        target = weight * measured / size
        for row, one in zip(self._normal, scaled, strict=True):
            for j, other in enumerate(scaled):
                row[j] = row[j] * FORGET + weight * one * other
        self._right = [r * FORGET + target * one for r, one in zip(self._right, scaled, strict=True)]
        self._solve()

    def doubt(self, share: float) -> None:
        """Keep the parameters, and only ``share`` of the weight behind them."""
        self._normal = [[value * share for value in row] for row in self._normal]
        self._right = [value * share for value in self._right]
        self.count = min(self.count, 3)
        self._spread = _LARGEST_SPREAD

    def _trust(self, off: float) -> float:
        """The weight of a sample that is ``off`` in the logarithm."""
        far = _HUBER * self._spread
        size = abs(off)
        self._spread += 0.1 * (min(size, far) - self._spread)
        self._spread = min(max(self._spread, _SMALLEST_SPREAD), _LARGEST_SPREAD)
        if size <= far:
            self._far = 0.0 if abs(self._far) <= _BACK else self._far - copysign(_BACK, self._far)
            return 1.0
        self._far += copysign(1.0, off)
        if abs(self._far) < _FAR_OFF:
            return far / size
        self._far = 0.0
        self.doubt(_LET_GO)
        return 1.0

    def _solve(self) -> None:
        """Least squares within the bounds: what leaves them is held there, and the rest is solved again."""
        count = len(self._solution)
        held: dict[int, float] = {}
        while len(held) < count:
            free = [i for i in range(count) if i not in held]
            found = self._solve_free(free, held)
            worst, most = None, 1e-12
            for i, value in zip(free, found, strict=True):
                low, high = self._bounds[i]
                beyond = max(low - value, value - high)
                if beyond > most:
                    worst, most = i, beyond
            if worst is None:
                for i, value in zip(free, found, strict=True):
                    low, high = self._bounds[i]
                    self._solution[i] = min(max(value, low), high)
                break
            low, high = self._bounds[worst]
            held[worst] = self._solution[worst] = low if found[free.index(worst)] < low else high

    def _solve_free(self, free: list[int], held: dict[int, float]) -> list[float]:
        normal, present = self._normal, self._solution
        rows = []
        for i in free:
            stay = _STAY * normal[i][i] + 1e-12
            row = [normal[i][j] + (stay if i == j else 0.0) for j in free]
            right = self._right[i] + stay * present[i] - sum(normal[i][j] * value for j, value in held.items())
            rows.append([*row, right])
        return _eliminate(rows)


def _eliminate(rows: list[list[float]]) -> list[float]:
    """Gauss, on a symmetric positive matrix with the right side as its last column."""
    count = len(rows)
    for i in range(count):
        pivot = rows[i]
        for below in rows[i + 1 :]:
            factor = below[i] / pivot[i]
            for j in range(i, count + 1):
                below[j] -= factor * pivot[j]
    solution = [0.0] * count
    for i in reversed(range(count)):
        row = rows[i]
        solution[i] = (row[count] - sum(row[j] * solution[j] for j in range(i + 1, count))) / row[i]
    return solution
