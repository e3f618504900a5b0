"""The simulator against comparisons of our own engine: the very runs that ``kvbaton compare`` kept, simulated anew.

    python -m benchmarks.plan_own [--profile FILE] [DIR ...]    some seconds for each comparison
    python -m benchmarks.plan_own --speed [DIR ...]             a minute: where the error comes from

DIR is what ``kvbaton compare --out DIR`` wrote; without any, the two kept ones of docs/reports. Nothing is fitted
here: the profile (``kvbaton profile --fleet``, ``benchmarks.reports profile``) was measured apart from the runs. The
same errors are in the report of a comparison that was given ``--profile``. Beside each measured figure stand the least
and the most of the runs it is pooled from: equal loads on one machine lie so far apart by themselves.

``--speed`` asks how much of the error is the machine's: one number, how much slower it was than when profiled, is
fitted to the mean TPOT of the first third of each run; the figures of the other two thirds are foretold with it.

Exit code 1 if the median error of all figures is above 15%; 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvbaton.bench.arms import Arm
from kvbaton.bench.cost import Fleet
from kvbaton.bench.prediction import FIGURES, Prediction, fleet_spec, predict, simulated_pairs
from kvbaton.bench.samples import Run, read_run
from kvbaton.plan.profile_file import ProfileFile, read_profile
from kvbaton.plan.sim_spec import FleetSpec
from kvbaton.types import KvbatonError

LIMIT = 0.15
REPORTS = Path("docs/reports")
SLOWEST, FASTEST, HALVINGS = 4.0, 0.25, 12


class _Arm(msgspec.Struct):
    name: str
    runs: str  # the command, or an address
    fleet: Fleet


class _ArmRun(msgspec.Struct):
    arm: str
    rate_per_s: float
    samples_file: str


class _Report(msgspec.Struct):
    arms: dict[str, _Arm]
    runs: list[_ArmRun]


def kept_runs(directory: Path) -> Iterator[tuple[Arm, float, list[Run]]]:
    """Every arm at every rate, with its runs."""
    report = msgspec.json.decode((directory / "report.json").read_bytes(), type=_Report)
    for style, said in report.arms.items():
        command = shlex.split(said.runs)
        if command[:2] == ["kvbaton", "up"]:
            arm = Arm(said.name, style, said.fleet, up=tuple(command[2:]))
        else:
            arm = Arm(said.name, style, said.fleet, url=said.runs)
        by_rate: dict[float, list[Run]] = {}
        for run in report.runs:
            if run.arm == said.name:
                by_rate.setdefault(run.rate_per_s, []).append(read_run(directory / "samples" / run.samples_file))
        for rate, runs in by_rate.items():
            yield arm, rate, runs


def as_profiled(directory: Path, profile: ProfileFile) -> list[Prediction]:
    found: list[Prediction] = []
    for arm, rate, runs in kept_runs(directory):
        predictions, notes = predict(arm, rate, runs, profile)
        found += predictions
        for note in notes:
            print(f"  {arm.name}: {note}", file=sys.stderr)
        for each in predictions:
            print(f"  {each.arm:14} {each.rate_per_s:4g}/s  {each.name:9} simulated {each.predicted_ms:7.1f} ms  "
                  f"measured {each.measured_ms:7.1f} ms ({min(each.runs_ms):.1f} to {max(each.runs_ms):.1f})  "
                  f"{each.error:+.0%}", flush=True)  # fmt: skip
    return found


def thirds(run: Run, fleet: FleetSpec, block_size: int) -> tuple[float, list[float]]:
    """(simulated mean TPOT of the first third over the measured one, errors of all figures of the rest)."""
    pairs = simulated_pairs(run, fleet, block_size)
    first, errors = 1.0, []
    for what in ("TTFT", "TPOT"):
        said, seen = (np.array([pair[side] for pair in pairs[what]]) for side in (0, 1))
        cut = len(said) // 3
        if what == "TPOT":
            first = float(said[:cut].mean() / seen[:cut].mean())
        errors += [figure(said[cut:]) / figure(seen[cut:]) - 1.0 for figure in FIGURES.values()]  # type: ignore[arg-type]
    return first, errors


def at_own_speed(directory: Path, profile: ProfileFile) -> tuple[list[float], list[float]]:
    """Errors of the last two thirds of each run, at the profile's speed and at that of the run's first third."""
    plain: list[float] = []
    fitted: list[float] = []
    size = profile.worker.block_size
    for arm, rate, runs in kept_runs(directory):
        fleet, _ = fleet_spec(arm, profile)
        for run in runs:
            low, high = FASTEST, SLOWEST
            for _ in range(HALVINGS):
                middle = (low * high) ** 0.5
                if thirds(run, fleet.slower(middle), size)[0] > 1.0:
                    high = middle
                else:
                    low = middle
            errors = thirds(run, fleet.slower(high), size)[1]
            text = ", ".join(f"{error:+.0%}" for error in errors)
            print(f"  {arm.name:14} {rate:4g}/s  {high:.2f} times as slow as profiled: {text}", flush=True)
            fitted += errors
            plain += thirds(run, fleet, size)[1]
    return plain, fitted


def middle_of(errors: list[float]) -> float:
    return float(np.median(np.abs(errors)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=REPORTS / "worker-profile.json")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("directories", nargs="*", type=Path)
    options = parser.parse_args()
    found: list[Prediction] = []
    plain: list[float] = []
    fitted: list[float] = []
    try:
        profile = read_profile(options.profile)
        for directory in options.directories or [REPORTS / "long-prompts", REPORTS / "short-prompts"]:
            print(f"{directory}, simulated from {options.profile}")
            if options.speed:
                of_plain, of_fitted = at_own_speed(directory, profile)
                plain += of_plain
                fitted += of_fitted
            else:
                found += as_profiled(directory, profile)
    except (KvbatonError, OSError, msgspec.MsgspecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    errors = fitted if options.speed else [each.error for each in found]
    if not errors:
        print("error: no figure to compare", file=sys.stderr)
        return 2
    print(f"{len(errors)} figures: median error {middle_of(errors):.0%} (the limit is {LIMIT:.0%}), "
          f"worst {max(map(abs, errors)):.0%}")  # fmt: skip
    if options.speed:
        print(f"the same requests at the profile's speed: median error {middle_of(plain):.0%}")
    else:
        within = sum(min(each.runs_ms) <= each.predicted_ms <= max(each.runs_ms) for each in found)
        print(f"{within} of the simulated figures lie between the runs that the measured ones are pooled from")
    return int(middle_of(errors) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
