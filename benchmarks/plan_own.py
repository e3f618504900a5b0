"""The simulator against comparisons of our own engine: the very runs that ``kvbaton compare`` kept, simulated anew.

    python -m benchmarks.plan_own [--profile FILE] [DIR ...]    a few seconds for each comparison

DIR is what ``kvbaton compare --out DIR`` wrote; without any, the two kept ones of docs/reports. Nothing is fitted
here: the profile (``kvbaton profile --fleet``, ``benchmarks.reports profile``) was measured apart from the runs. The
same errors are in the report of a comparison that was given ``--profile``. Exit code 1 if a figure of either arm is off
by more than 25%; 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvbaton.bench.arms import Arm
from kvbaton.bench.cost import Fleet
from kvbaton.bench.prediction import Prediction, predict
from kvbaton.bench.samples import Run, read_run
from kvbaton.plan.profile_file import ProfileFile, read_profile
from kvbaton.types import KvbatonError

LIMIT = 0.25
REPORTS = Path("docs/reports")


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


def errors(directory: Path, profile: ProfileFile) -> Iterator[Prediction]:
    """Every figure of every arm at every rate that the comparison kept."""
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
            found, notes = predict(arm, rate, runs, profile)
            yield from found
            for note in notes:
                print(f"  {said.name}: {note}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=REPORTS / "worker-profile.json")
    parser.add_argument("directories", nargs="*", type=Path)
    options = parser.parse_args()
    worst = 0.0
    try:
        profile = read_profile(options.profile)
        for directory in options.directories or [REPORTS / "long-prompts", REPORTS / "short-prompts"]:
            print(f"{directory}, simulated from {options.profile}")
            for each in errors(directory, profile):
                worst = max(worst, abs(each.error))
                print(f"  {each.arm:14} {each.rate_per_s:4g}/s  {each.name:9} simulated {each.predicted_ms:7.1f} ms  "
                      f"measured {each.measured_ms:7.1f} ms  {each.error:+.0%}")  # fmt: skip
    except (KvbatonError, OSError, msgspec.MsgspecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"worst {worst:.0%}, the limit is {LIMIT:.0%}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
