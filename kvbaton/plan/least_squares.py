"""The two small fits the planner needs: nonnegative least squares, and smallest worst relative error.

Plain numpy. Knows nothing about what is fitted.
"""

from __future__ import annotations

import numpy as np


def relative_nonnegative(features: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Nonnegative x that minimises the sum of squared relative errors of ``features @ x`` (Lawson and Hanson)."""
    rows = features / measured[:, None]
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    matrix, target = rows / scale, np.ones(len(measured))
    count = matrix.shape[1]
    passive = np.zeros(count, dtype=bool)
    solution = np.zeros(count)
    for _ in range(3 * count + 3):
        gradient = matrix.T @ (target - matrix @ solution)
        gradient[passive] = -np.inf
        entering = int(np.argmax(gradient))
        if passive.all() or gradient[entering] <= 1e-10:
            break
        passive[entering] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
            if (trial[passive] > 0).all():
                break
            falling = passive & (trial <= 0)
            step = np.min(solution[falling] / (solution[falling] - trial[falling]))
            solution = solution + step * (trial - solution)
            passive &= solution > 1e-12
        solution = trial
    return solution / scale


def smallest_worst_relative(features: np.ndarray, measured: np.ndarray, rounds: int = 300) -> np.ndarray:
    """x that makes the largest relative error of ``features @ x`` as small as Lawson's iteration gets it."""
    rows = features / measured[:, None]
    weights = np.ones(len(measured)) / len(measured)
    best, best_worst = np.zeros(rows.shape[1]), np.inf
    for _ in range(rounds):
        root = np.sqrt(weights)
        trial = np.linalg.lstsq(rows * root[:, None], root, rcond=None)[0]
        residual = np.abs(rows @ trial - 1.0)
        if residual.max() < best_worst:
            best, best_worst = trial, float(residual.max())
        weights = weights * residual
        total = weights.sum()
        if total <= 0:
            break
        weights = np.maximum(weights / total, 1e-12)
    return best
