"""Ten times more requests than the workers can serve, for two minutes: what is still served in time, and what it costs.

A real router in front of workers that take their time: the mock (``benchmarks/httpload``) streams 16 tokens, one each
20 ms, at most ``--streams`` at once, and says 503 to everything beyond, as a full worker does. The client is an open
loop: requests come at their rate whatever becomes of them, with a TTFT SLO of 2 s; the router lets a request wait for
1 s at most (``queue_timeout_s``), and remembers 8192 blocks of prompts for each worker (``index_blocks``). In one run:

    10 s of short answers as fast as they come                       fills what the router remembers to its bounds
    half, nine tenths, one and a fifth of the capacity, 10 s each    the best goodput of these is the peak
    ten times the capacity, ``--seconds``                            goodput, refusals, memory of the router
    half of the capacity again, 20 s                                 seconds until all requests are answered in time

Passes when goodput under overload stays within 10% of the peak, no refusal lacks 429 and Retry-After, the router's
memory grows by less than 1 MiB a minute after the first quarter, and all requests are answered in time 10 s after the
load is back to normal.

Usage: python -m benchmarks.overload [--seconds 120] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.router import (
    LOAD_CPU,
    Ports,
    compile_tools,
    free_ports,
    kvbaton,
    mocks,
    pinned,
    request_body,
    run_load,
)
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.engine.weights import default_model_dir

SLO_MS = 2000
QUEUE_TIMEOUT_S = 1.0
NUM_TOKENS, GAP_US = 16, 20_000
TIMES_OVER = 10
RECOVERY_S = 10
INDEX_BLOCKS = 8192  # an eighth of what is usual, so that it is full soon
FILL_S = 10.0
LOWER_LOADS = (0.5, 0.9, 1.2)


class Watch:
    """Memory, open files and CPU of a process, once a second."""

    def __init__(self, watched: psutil.Process) -> None:
        self._watched = watched
        self._ended = threading.Event()
        self.rss_mib: list[float] = []
        self.num_fds: list[int] = []
        self.cpu_share = 0.0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._before = self._watched.cpu_times()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        after = self._watched.cpu_times()
        spent_s = after.user + after.system - self._before.user - self._before.system
        self.cpu_share = spent_s / max(1, len(self.rss_mib))

    def _run(self) -> None:
        while not self._ended.wait(1.0):
            self.rss_mib.append(self._watched.memory_info().rss / 2**20)
            self.num_fds.append(self._watched.num_fds())

    @property
    def growth_mib_per_min(self) -> float:
        """Slope of the memory without the first quarter, in which buffers find their size."""
        settled = self.rss_mib[len(self.rss_mib) // 4 :]
        return float(np.polyfit(np.arange(len(settled)), settled, 1)[0] * 60) if len(settled) > 2 else 0.0


def phase(folder: Path, port: int, rate: float, seconds: float) -> dict[str, Any]:
    command = [folder / "load", port, 16, seconds, "/v1/completions", folder / "overload.json", rate, SLO_MS]
    done = subprocess.run(
        [str(word) for word in command],
        check=True,
        stdout=subprocess.PIPE,
        preexec_fn=pinned(LOAD_CPU),
        timeout=seconds + 60,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    # The first second fills the queue, and the last is not complete.
    sent, good, late, refused, bad = (sum(column) for column in zip(*found["by_second"][1:-1], strict=True))
    counted_s = len(found["by_second"]) - 2
    return found | {
        "rate": rate,
        "goodput": good / counted_s,
        "late": late,
        "refused_per_s": refused / counted_s,
        "bad": bad,
    }


def seconds_to_recover(by_second: list[list[int]]) -> int:
    """The first second from which on nothing was refused, late or failed."""
    troubled = [number for number, (_, _, late, refused, bad) in enumerate(by_second) if late + refused + bad]
    return troubled[-1] + 1 if troubled else 0


def measure(folder: Path, plan: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.load(default_model_dir())
    _, body = request_body("streams", "short-text", tokenizer)
    wanted = json.loads(body) | {"max_tokens": NUM_TOKENS, "user": f"gap_us={GAP_US}"}
    (folder / "overload.json").write_text(json.dumps(wanted))
    capacity = plan.streams / ((NUM_TOKENS - 1) * GAP_US / 1e6)
    ports = Ports(*free_ports(3))
    settings = {"queue_timeout_s": QUEUE_TIMEOUT_S, "index_blocks": INDEX_BLOCKS}
    with mocks(folder, ports, plan.streams), kvbaton(folder, ports, settings) as router:
        run_load(folder, ports.router, 16, FILL_S, request_body("requests", "short-text", tokenizer))
        lower = [phase(folder, ports.router, capacity * times, 10) for times in LOWER_LOADS]
        log_before = (folder / "kvbaton.log").stat().st_size
        with Watch(router) as watch:
            over = phase(folder, ports.router, capacity * TIMES_OVER, plan.seconds)
        log_bytes = (folder / "kvbaton.log").stat().st_size - log_before
        after = phase(folder, ports.router, capacity * LOWER_LOADS[0], 20)
    return {
        "capacity": capacity,
        "lower": lower,
        "over": over,
        "after": after,
        "peak": max(row["goodput"] for row in lower),
        "growth_mib_per_min": watch.growth_mib_per_min,
        "rss_mib": watch.rss_mib,
        "most_fds": max(watch.num_fds),
        "router_cpu": watch.cpu_share,
        "log_mib_per_min": log_bytes / 2**20 / plan.seconds * 60,
        "recovered_s": seconds_to_recover(after["by_second"]),
    }


def show(found: dict[str, Any]) -> bool:
    print(f"the workers serve {found['capacity']:.0f} requests/s\n")
    print(
        f"{'offered/s':>10}{'goodput/s':>11}{'late':>6}{'refused/s':>11}{'bad':>5}"
        f"{'TTFT p50':>10}{'p99':>8}{'429 p99':>9}"
    )
    for row in (*found["lower"], found["over"], found["after"]):
        first, refused = row["first_us"], row["refused_us"]
        print(
            f"{row['rate']:>10.0f}{row['goodput']:>11.1f}{row['late']:>6}{row['refused_per_s']:>11.1f}{row['bad']:>5}"
            f"{first['p50'] / 1e3:>8.0f}ms{first['p99'] / 1e3:>6.0f}ms{refused['p99'] / 1e3:>7.0f}ms"
        )
    share = found["over"]["goodput"] / found["peak"]
    checks = {
        f"goodput at {TIMES_OVER}x is {share:.0%} of the peak": share >= 0.9,
        f"{found['over']['bad']} answers other than 200 or 429 with Retry-After": found["over"]["bad"] == 0,
        f"memory {found['rss_mib'][0]:.0f} to {found['rss_mib'][-1]:.0f} MiB, "
        f"{found['growth_mib_per_min']:+.2f} MiB a minute": found["growth_mib_per_min"] < 1.0,
        f"recovered in {found['recovered_s']} s": found["recovered_s"] <= RECOVERY_S,
    }
    print()
    for text, good in checks.items():
        print(f"{'pass' if good else 'FAIL'}  {text}")
    print(
        f"      router {found['router_cpu']:.0%} of a core, at most {found['most_fds']} open files for "
        f"{found['over']['connections']} client connections, log {found['log_mib_per_min']:.0f} MiB a minute"
    )
    return all(checks.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of overload")
    parser.add_argument("--streams", type=int, default=8, help="that the workers serve at once")
    parser.add_argument("--json", type=Path)
    plan = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compile_tools(folder)
        found = measure(folder, plan)
    if plan.json:
        plan.json.write_text(json.dumps(found, indent=1))
    return 0 if show(found) else 1


if __name__ == "__main__":
    sys.exit(main())
