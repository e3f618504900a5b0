"""The two comparisons that are kept: where splitting two workers wins, and where it loses. Nine minutes each at most.

    python -m benchmarks.reports profile    workers like those compared, for the simulator's word     (3 min)
    python -m benchmarks.reports long       long prompts arrive into open streams: the split wins     (9 min)
    python -m benchmarks.reports short      short prompts, long answers: one decode worker is too few (9 min)
    python -m benchmarks.reports goodput    the highest rate within both gates, of either arrangement    (6 min)
    python -m benchmarks.reports long --small       a minute, to see that it works; proves nothing

Two cores, one for each worker; nothing else should run, and the comparison says so itself if something does. Reports go
to docs/reports/NAME. Exit code 0: the verdict is the one expected; 1: it is another; 2: a run failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

COOLDOWN_S = 5.0
KVBATON = [sys.executable, "-m", "kvbaton.cli.main"]
ARMS = ["--colocated", "2", "--prefill", "1", "--decode", "1"]
# Prompts above 64 uncached tokens are handed over and others stay where they decode, in every run: a policy that
# learns would be another one in each of them.
COMMON = ["--up-flag=--threads=1", "--up-flag=--threshold-tokens=64", "--realtime", "--max-lag-ms", "20", "--quiet"]


@dataclass(frozen=True)
class Batches:
    """Chats at once, and a second later documents at once, every ``period_s``; lengths are (prompt, answer) tokens."""

    period_s: float
    chats: int
    chat: tuple[int, int]
    document: tuple[int, int]
    prefill_share: float  # of the time that the documents keep one prefill worker busy

    def write(self, path: Path, seconds: float) -> None:
        """A trace for a worker as fast as one here is now; arrivals of a batch are spread over half a second."""
        took_s = seconds_of_prefill(self.document[0])
        documents = max(1, round(self.prefill_share * self.period_s / took_s))
        print(f"{self.document[0]} tokens take {took_s:.2f} s: {documents} documents a batch", file=sys.stderr)
        random_, rows = random.Random(0), []
        for batch in range(math.ceil(seconds / self.period_s)):
            begin_s = batch * self.period_s
            rows += [(begin_s + random_.random() / 2, *self.chat) for _ in range(self.chats)]
            rows += [(begin_s + 1 + random_.random() / 2, *self.document) for _ in range(documents)]
        names = ("arrival_s", "prompt_tokens", "output_tokens")
        path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in sorted(rows)))


COMPARISONS: dict[str, dict[str, Any]] = {
    # Every 16 s twelve chats open streams of 128 tokens, and a second later a batch of documents of 1,000 tokens
    # arrives, each with a short answer (a label). In the single pool both workers then compute documents while the
    # streams wait for every chunk; more gaps than one in twenty are hit, whatever the chunk. The batch is as large as
    # keeps one prefill worker busy for "prefill_share" of the time at the speed that the machine has just then (it
    # differs by more than two within minutes). Answers to documents are short, so that what is compared is what
    # prefill does to streams. The gates are wide: the gaps decide. The same instants in every run, or luck decides.
    "long": {
        "expected": "split",
        "report": "long-prompts",
        "batches": Batches(period_s=16.0, chats=12, chat=(32, 128), document=(1000, 8), prefill_share=0.65),
        "load": [
            *("--title", "Batches of documents into open streams: 2 colocated against 1 prefill + 1 decode"),
            *("--arrivals", "trace", "--ttft-slo", "25000", "--tpot-slo", "1000"),
            *("--tune", "--chunk-tokens 512", "--tune", "--chunk-tokens 256"),
            *("--tune", "--chunk-tokens 128", "--tune", "--chunk-tokens 64"),
        ],
        "duration": 80,
        "small": 15,
    },
    # Short prompts are hardly any work for a prefill worker; answers of 128 tokens at this rate are more than one
    # worker decodes within the gate (a batch of 130), and two do with room to spare (22 each). At 8 a second the one
    # came through in one of two runs.
    "short": {
        "expected": "do not split",
        "report": "short-prompts",
        "load": [
            *("--title", "Short prompts and long answers: 2 colocated against 1 prefill + 1 decode"),
            *("--rate", "9", "--rates", "4", "--input", "uniform:16:40", "--output", "128"),
            *("--ttft-slo", "1000", "--tpot-slo", "75"),
        ],
        "duration": 45,
        "small": 15,
    },
}


GOODPUT = [
    *("--rate", "3", "--input", "mix:32@1,256@1", "--output", "32", "--warmup", "4", "--duration", "15"),
    *("--ttft-slo", "1000", "--tpot-slo", "60", "--trials", "12", "--realtime", "--max-lag-ms", "20"),
]


def compare(name: str, small: bool, profile: Path) -> int:
    wanted = COMPARISONS[name]
    out = Path("compare-small" if small else "docs/reports") / wanted["report"]
    command = [*KVBATON, "compare", *ARMS, *COMMON, *wanted["load"], "--out", str(out)]
    command += [
        "--duration",
        str(wanted["small" if small else "duration"]),
        "--warmup",
        "4",
        "--cooldown",
        str(COOLDOWN_S),
    ]
    if "batches" in wanted:
        out.mkdir(parents=True, exist_ok=True)
        wanted["batches"].write(out / "load.jsonl", wanted["duration"] + COOLDOWN_S)
        command += ["--trace", str(out / "load.jsonl")]
    if profile.exists():
        command += ["--profile", str(profile)]
    if subprocess.run(command, check=False).returncode not in (0, 1):
        return 2
    decision = json.loads((out / "report.json").read_text())["verdict"]["decision"]
    print(f"{name}: {decision}, expected {wanted['expected']}", file=sys.stderr)
    return int(decision != wanted["expected"])


def start_fleet(flags: list[str]) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """A fleet of our own and what it says of itself."""
    fleet = subprocess.Popen(
        [*KVBATON, "up", "--json", "--tied", "--threads", "1", "--port", "0", *flags],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert fleet.stdout is not None
    line = fleet.stdout.readline()
    if not line:
        raise SystemExit(2)
    return fleet, json.loads(line)


def stop_fleet(fleet: subprocess.Popen[bytes]) -> None:
    fleet.terminate()
    try:
        fleet.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(fleet.pid, signal.SIGKILL)
        fleet.wait()


def seconds_of_prefill(tokens: int) -> float:
    """How long a worker here takes for a prompt now, alone."""
    fleet, ready = start_fleet(["--colocated", "2"])
    try:
        took_s = []
        for seed in range(3):
            prompt = random.Random(seed).choices(range(1000, 40_000), k=tokens)
            body = {"model": ready["model"], "prompt": prompt, "max_tokens": 1, "temperature": 0}
            begun_s = time.monotonic()
            httpx2.post(f"{ready['url']}/v1/completions", json=body, timeout=120).raise_for_status()
            took_s.append(time.monotonic() - begun_s)
    finally:
        stop_fleet(fleet)
    return statistics.median(took_s)


def profile_worker(path: Path) -> int:
    """One worker on one core beside another on the other, as those compared are, and what they cost each other."""
    fleet, ready = start_fleet(["--colocated", "2"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        worker, other = (each["url"] for each in ready["processes"] if each["role"] == "both")
        command = [*KVBATON, "profile", worker, "--fleet", ready["url"], "--beside", other, "--realtime", "--with-link"]
        command += ["--prefill-tokens", "16,32,64,128,256,512", "--cached-tokens", "0,256", "--contexts", "64,384"]
        command += ["--batches", "1,2,4,8,16,32", "--max-repeats", "6", "--budget", "60", "--out", str(path)]
        return subprocess.run(command, check=False).returncode
    finally:
        stop_fleet(fleet)


def search_goodput(directory: Path) -> int:
    """Two workers in either arrangement, each searched apart."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, flags in (("colocated", ["--colocated", "2"]), ("split", ["--prefill", "1", "--decode", "1"])):
        fleet, ready = start_fleet([*flags, "--threshold-tokens", "64"])
        try:
            command = [*KVBATON, "bench", ready["url"], "--goodput", *GOODPUT, "--json", "--quiet"]
            done = subprocess.run(command, check=False, stdout=subprocess.PIPE)
        finally:
            stop_fleet(fleet)
        if done.returncode:
            return 2
        (directory / f"{name}.json").write_bytes(done.stdout)
        print(f"{name}: {done.stdout.decode().strip()[:2000]}", file=sys.stderr)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("profile", *COMPARISONS, "goodput"))
    parser.add_argument("--small", action="store_true", help="a minute; to see that it works")
    parser.add_argument("--profile", type=Path, default=Path("docs/reports/worker-profile.json"))
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started ends with us
    if given.what == "profile":
        return profile_worker(given.profile)
    if given.what == "goodput":
        return search_goodput(Path("docs/reports/goodput"))
    return compare(given.what, given.small, given.profile)


if __name__ == "__main__":
    sys.exit(main())
