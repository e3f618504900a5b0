"""Who used the CPU: exact sums over a made-up /proc, a real program beside us, and what a comparison then says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbaton.bench import verdict as judge
from kvbaton.bench.arms import Arm
from kvbaton.bench.compare import CompareSpec, compare
from kvbaton.bench.cost import Fleet
from kvbaton.bench.machine import MachineUse, MachineWatch
from kvbaton.bench.samples import ClientReport, RequestSample, Run, RunFooter, RunHeader
from kvbaton.bench.sse import ChunkKind
from kvbaton.bench.workload import LoadSpec

TICKS = os.sysconf("SC_CLK_TCK")
BURN = """
import sys, time
while not float(sys.argv[1]) or time.process_time() < float(sys.argv[1]):
    pass
"""


@contextmanager
def hog(cpu_s: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
    """A program that burns one core for so many CPU seconds; 0: until it is stopped."""
    process = subprocess.Popen([sys.executable, "-c", BURN, str(cpu_s)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def burn(cpu_s: float) -> None:
    until = time.process_time() + cpu_s
    while time.process_time() < until:
        pass


def write_proc(root: Path, busy_s: float, steal_s: float, processes: dict[int, tuple[int, float]]) -> None:
    root.mkdir(exist_ok=True)
    busy, steal = round(busy_s * TICKS), round(steal_s * TICKS)
    (root / "stat").write_text(f"cpu  {busy} 0 0 1000 5 0 0 {steal} 0 0\ncpu0 1 2 3\n")
    for pid, (parent, used_s) in processes.items():
        (root / str(pid)).mkdir(exist_ok=True)
        rest = ["S", str(parent), *["0"] * 9, str(round(used_s * TICKS)), "0", "0", "0", "20"]
        (root / str(pid) / "stat").write_text(f"{pid} (odd) name) {' '.join(rest)}\n")


def test_exact_sums(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    first = {10: (1, 5.0), 11: (10, 7.0), 12: (11, 1.0), 99: (1, 50.0)}
    write_proc(proc, 100.0, 3.0, first)
    watch = MachineWatch(10, proc)
    began_s, cpu_s = time.monotonic(), time.process_time()
    burn(0.3)
    # The fleet's root +2, its child +3, a new grandchild 4; somebody else +30; 40 busy in all.
    write_proc(proc, 140.0, 4.0, {10: (1, 7.0), 11: (10, 10.0), 12: (11, 1.0), 13: (12, 4.0), 99: (1, 80.0)})
    wall_s, used_s = time.monotonic() - began_s, time.process_time() - cpu_s
    found = watch.end()
    assert found.own_cores is not None
    assert found.other_cores is not None
    assert found.steal_cores is not None
    wall_s = 1.0 / found.steal_cores  # exactly one second was stolen
    assert found.own_cores * wall_s == pytest.approx(9.0 + used_s, abs=0.1)
    assert found.other_cores * wall_s == pytest.approx(31.0 - used_s, abs=0.1)
    assert len(found.doubts(0.25)) == 2


def test_a_real_program_beside_us_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as fleet:
        watch, began_s = MachineWatch(fleet.pid), time.monotonic()
        with hog(0.5) as process:
            process.wait()
        found, wall_s = watch.end(), time.monotonic() - began_s
        fleet.communicate(b"\n")
    assert found.other_cores is not None
    assert found.other_cores * wall_s >= 0.4


def test_our_own_work_is_not_others() -> None:
    with subprocess.Popen([sys.executable, "-c", BURN, "0.3"]) as fleet:
        watch, began_s = MachineWatch(fleet.pid), time.monotonic()
        burn(0.3)
        while (fleet.returncode is None) and _cpu_s(fleet.pid) < 0.25:  # still running or a zombie not waited for
            pass
        found, wall_s = watch.end(), time.monotonic() - began_s
    assert found.own_cores is not None
    assert found.own_cores * wall_s >= 0.5


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def test_what_cannot_be_told_is_not_known(tmp_path: Path) -> None:
    assert MachineWatch(None, tmp_path / "none").end() == MachineUse(os.cpu_count() or 1, None, None, None)
    elsewhere = MachineWatch(None).end()
    assert elsewhere.other_cores is None
    assert not MachineUse(2, None, None, None).doubts()


def run_of(gap_s: float) -> Run:
    samples = [
        RequestSample(index, "steady", 0.0, 0.0, 21, 8, status=200, output_tokens=21,
                      chunks=[(0.1 + gap_s * n, int(ChunkKind.CONTENT), 1.0) for n in range(21)])
        for index in range(10)
    ]  # fmt: skip
    client = ClientReport(0, 0, 0, 0, 0, 0, 0, 0, True, [])
    return Run(RunHeader({}, "", {}), samples, RunFooter(client, 1.0))


def test_an_arm_that_differs_from_itself_proves_nothing() -> None:
    steady = [("a", run_of(0.020)), ("b", run_of(0.010)), ("b", run_of(0.011)), ("a", run_of(0.022))]
    assert judge.drift_doubts("itl", 95, steady, 1.5) == []
    # Case of a neighbour that took a core from one run on: a split that looks twenty times better than one pool.
    starved = [("a", run_of(0.020)), ("b", run_of(0.010)), ("b", run_of(0.011)), ("a", run_of(0.400))]
    (doubt,) = judge.drift_doubts("itl", 95, starved, 1.5)
    assert "single pool differs from itself by 20.0" in doubt


async def test_a_comparison_beside_a_hog_is_not_proven(
    make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:  # fmt: skip
    """Real fleets, and a real program that takes a core from the first run to the last."""
    model = make_tiny_model("llama")
    flags: tuple[Any, ...] = ("--model", str(model), "--dtype", "float32", "--kv-blocks", "64")
    load = LoadSpec("", rate_per_s=8, steady_s=2, input="8", output="8", max_lag_ms=1e6, tokenizer="none")
    spec = CompareSpec(
        Arm("colocated", "a", Fleet(colocated_gpus=2), up=("--colocated", "2", *flags)),
        Arm("disaggregated", "b", Fleet(1, 1), up=("--prefill", "1", "--decode", "1", *flags)),
        load, None, (8.0,), directory=tmp_path,
    )  # fmt: skip
    with hog():
        found = await compare(spec, lambda line: None, lambda progress: None)
    verdict = found.result.verdict
    assert verdict.decision == "not proven"
    disturbed = [reason for reason in verdict.reasons if "the machine was disturbed" in reason]
    assert len(disturbed) >= 4
    assert "other programs used" in disturbed[0]
    for run in found.result.runs:
        assert run.machine is not None
        assert run.machine.own_cores is not None
        assert run.machine.own_cores > 0.01
