"""Fit step constants so that the simulator replays a recorded run, and say how far it is off.

A recorded run is what each request asked for and when its tokens came. At most four constants are fitted: fixed time of
a step, time of a token, of a decoding sequence, of a cached token read; attention pairs of prefill stay in the ratio
to tokens that the model's shape gives. The fit is damped Gauss-Newton on the logarithms of the constants; the residuals
are relative errors of mean, p50, p90 and p99 of TTFT, TPOT and end-to-end time.

Knows nothing about hardware; the start comes from a roofline.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from kvbaton.plan.sim import simulate
from kvbaton.plan.sim_result import SimResult
from kvbaton.plan.sim_spec import FleetSpec
from kvbaton.plan.step_time import StepModel
from kvbaton.plan.workload import Trace, TraceRequest
from kvbaton.types import LocalError

CONSTANTS = ("fixed_s", "per_token_s", "per_sequence_s", "per_context_s")
STATISTICS = tuple(f"{what} {how}" for what in ("TTFT", "TPOT", "E2E") for how in ("mean", "p50", "p90", "p99"))
NEGLIGIBLE = 0.05  # of the mean end-to-end time


class Run(msgspec.Struct, frozen=True):
    """What was measured, request by request, in order of arrival."""

    name: str
    trace: Trace
    ttft_s: tuple[float, ...]  # from the client's send
    tpot_s: tuple[float, ...]  # 0 for a single token
    e2e_s: tuple[float, ...]

    def statistics(self, part: slice = slice(None)) -> np.ndarray:
        return _statistics(*(np.array(getattr(self, name)[part]) for name in ("ttft_s", "tpot_s", "e2e_s")))


class Calibration(msgspec.Struct, frozen=True):
    model: StepModel
    constants: dict[str, float]
    errors: dict[str, float]  # relative, of what was fitted
    worst_error: float
    simulations: int


def _statistics(ttft: np.ndarray, tpot: np.ndarray, e2e: np.ndarray) -> np.ndarray:
    values = []
    for each in (ttft, tpot[tpot > 0], e2e):
        if not each.size:
            raise LocalError("a run needs requests with more than one token", field="run")
        values += [each.mean(), *np.percentile(each, (50, 90, 99))]
    return np.array(values)


def read_vllm_run(directory: Path) -> Run:
    """A run recorded by LLMServingSim's bench: arrivals are wall-clock, token times monotonic seconds.

    The two clocks are aligned where the engine saw a request soonest after it was sent.
    """
    with (directory / "requests.jsonl").open() as lines:
        rows = sorted((json.loads(line) for line in lines), key=lambda row: row["arrival_time"])
    offset_s = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    start_s = rows[0]["arrival_time"]
    requests = tuple(TraceRequest(row["arrival_time"] - start_s, row["input_toks"], row["output_toks"]) for row in rows)
    sent = [row["arrival_time"] + offset_s for row in rows]
    first = [row["first_token_ts"] - at for row, at in zip(rows, sent, strict=True)]
    last = [row["last_token_ts"] - at for row, at in zip(rows, sent, strict=True)]
    tpot = [(row["last_token_ts"] - row["first_token_ts"]) / max(1, row["output_toks"] - 1) for row in rows]
    return Run(directory.name, Trace(directory.name, requests), tuple(first), tuple(tpot), tuple(last))


def errors_of(run: Run, result: SimResult, part: slice = slice(None)) -> np.ndarray:
    """Relative errors of the simulated statistics, over the same requests."""
    if len(result.paired) != len(run.ttft_s):
        raise LocalError(f"{len(run.ttft_s) - len(result.paired)} requests did not end well in simulation", field="run")
    ttft, tpot = (np.array([pair[index] for pair in result.paired][part]) for index in (0, 1))
    return _statistics(ttft, tpot, np.array(result.e2e_s[part])) / run.statistics(part) - 1.0


def replay(run: Run, fleet_of: Callable[[StepModel], FleetSpec], model: StepModel) -> SimResult:
    return simulate(fleet_of(model), run.trace)


def fit(run: Run, fleet_of: Callable[[StepModel], FleetSpec], start: StepModel, part: slice = slice(None),
        rounds: int = 8) -> Calibration:  # fmt: skip
    """Constants that make the simulated statistics of ``part`` match the recorded ones."""
    pair_ratio = start.per_pair_s / start.per_token_s
    simulations = 0

    def model_at(logs: np.ndarray) -> StepModel:
        values = {name: float(np.exp(log)) for name, log in zip(CONSTANTS, logs, strict=True)}
        values["per_pair_s"] = values["per_token_s"] * pair_ratio
        return msgspec.structs.replace(start, **values, source=f"fitted to {run.name}")

    measured = run.statistics(part)
    # A TTFT far below the time a request takes is mostly the phase of the step it met: noise, not to be chased.
    weights = np.minimum(1.0, measured / (NEGLIGIBLE * measured[STATISTICS.index("E2E mean")]))

    def residuals(logs: np.ndarray) -> np.ndarray:
        nonlocal simulations
        simulations += 1
        return errors_of(run, replay(run, fleet_of, model_at(logs)), part) * weights

    best = np.log([getattr(start, name) for name in CONSTANTS])
    found = residuals(best)
    damping = 0.05
    slope = np.empty((len(found), len(best)))
    for _ in range(rounds):
        for index in range(len(best)):
            moved = best.copy()
            moved[index] += 0.03
            slope[:, index] = (residuals(moved) - found) / 0.03
        improved = False
        for _ in range(4):
            rows = np.vstack([slope, damping * np.eye(len(best))])
            step = np.linalg.lstsq(rows, np.concatenate([-found, np.zeros(len(best))]), rcond=None)[0]
            trial = best + np.clip(step, -0.4, 0.4)
            tried = residuals(trial)
            if float(tried @ tried) < float(found @ found):
                gain = 1.0 - float(tried @ tried) / float(found @ found)
                best, found, damping, improved = trial, tried, damping / 3, True
                break
            damping *= 4
        if not improved or gain < 0.02:
            break
    model = model_at(best)
    return Calibration(
        model=model,
        constants={name: getattr(model, name) for name in CONSTANTS},
        errors=dict(zip(STATISTICS, map(float, found / weights), strict=True)),
        worst_error=float(np.abs(found / weights).max()),
        simulations=simulations,
    )
