"""The router alone, on one core, against workers that compute nothing, beside vllm-router in its prefill/decode mode.

Client and mock workers are native programs (``benchmarks/httpload``, compiled on first use) on the other core, far
faster than either router; ``direct`` is the client against the mock without a router, in the same run. Both routers
keep their defaults and write their logs to a file. vllm-router (Rust) is installed by
``python -m benchmarks.peers.install vllm-router``, and measured twice: with its default policy, ``cache_aware``, which
like ours looks at prompts, and as ``vllm-router-rr`` with ``round_robin``, which looks at nothing.

Each load goes to one router right after the other, so that a machine that wavers wavers for both.
Workloads, each in a closed loop of 1, 16, 64 and 512 connections:

    requests   one short JSON answer each: requests per second, latency, CPU of the router per request
    streams    64 tokens at a steady gap of 20 ms each: chunks per second, how long each one travelled, CPU per chunk
    burst      16 tokens that the worker writes at once, as fast as requests come

Prompts: ``text`` is what clients send, which kvbaton tokenizes and vllm-router passes on unread; ``ids`` are token ids.
kvbaton makes one call for each request, to the decode worker; vllm-router makes two, one to each worker.

Usage: python -m benchmarks.router [--workloads requests,streams] [--prompts short-text,...] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import msgspec
import psutil

from benchmarks.peers.install import peer
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.engine.weights import default_model_dir
from kvbaton.types import Fingerprint
from kvbaton.workers.protocol import WorkerInfo, WorkerStats

SOURCES = Path(__file__).resolve().parent / "httpload"
ROUTER_CPU, LOAD_CPU = 0, 1
READY_DEADLINE_S = 60.0
NUM_TOKENS = {"requests": 16, "streams": 64, "burst": 16}
GAP_US = {"requests": 0, "streams": 20_000, "burst": 0}
PROMPT_TOKENS = {"short": 64, "long": 4096}


@dataclass(frozen=True)
class Ports:
    prefill: int
    decode: int
    router: int


def compile_tools(into: Path) -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise SystemExit(f"the load generator needs a C++17 compiler; {compiler} was not found (set CXX)")
    for name in ("mock", "load"):
        command = [compiler, "-O2", "-std=c++17", "-o", str(into / name), str(SOURCES / f"{name}.cpp")]
        subprocess.run(command, check=True)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def pinned(cpu: int) -> Callable[[], None]:
    return lambda: os.sched_setaffinity(0, {cpu})


def worker_info(role: Any) -> bytes:
    return msgspec.json.encode(
        WorkerInfo(
            state="serving",
            role=role,
            model_id="mock",
            incarnation=role,
            fingerprint=Fingerprint(1, "r", 1, 1, 8, "float32", ""),
            max_context=200_000,
            block_size=16,
            kv_host="127.0.0.1",
            kv_port=1,
            stats=WorkerStats(num_blocks=100_000, num_blocks_free=100_000),
        )
    )


@contextmanager
def process(command: Sequence[str | Path], cpu: int, log: Path, **environ: str) -> Iterator[psutil.Process]:
    with log.open("ab") as output:
        started = subprocess.Popen(
            [str(word) for word in command],
            stdout=output,
            stderr=output,
            preexec_fn=pinned(cpu),
            env={**os.environ, **environ},
        )
    try:
        yield psutil.Process(started.pid)
    finally:
        started.terminate()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@contextmanager
def mocks(folder: Path, ports: Ports, max_open: int | None = None) -> Iterator[None]:
    for role in ("prefill", "decode"):
        (folder / f"{role}.json").write_bytes(worker_info(role))
    command = [folder / "mock", str(ports.prefill), folder / "prefill.json", str(ports.decode), folder / "decode.json"]
    command += [str(max_open)] if max_open is not None else []
    with process(command, LOAD_CPU, folder / "mock.log") as running:
        wait_for(f"http://127.0.0.1:{ports.decode}/health", folder / "mock.log", running)
        yield


def wait_for(url: str, log: Path, running: psutil.Process) -> None:
    deadline_s = time.monotonic() + READY_DEADLINE_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            if time.monotonic() > deadline_s or running.status() == psutil.STATUS_ZOMBIE:
                tail = log.read_text(errors="replace")[-2000:]
                raise SystemExit(f"nothing answers at {url}\n{tail}") from None
            time.sleep(0.1)


@contextmanager
def kvbaton(
    folder: Path, ports: Ports, settings: Mapping[str, float] = MappingProxyType({})
) -> Iterator[psutil.Process]:
    config = folder / "fleet.toml"
    workers = [("prefill", ports.prefill), ("decode", ports.decode)]
    entries = [f'[[workers]]\nurl = "http://127.0.0.1:{port}"\nrole = "{role}"\n' for role, port in workers]
    more = "".join(f"{name} = {value}\n" for name, value in settings.items())
    config.write_text(
        f'[model]\ndir = "{default_model_dir()}"\nname = "mock"\n[router]\nport = {ports.router}\n{more}'
        + "".join(entries)
    )
    command = [sys.executable, "-m", "kvbaton.cli.main", "router", "--config", config]
    with process(command, ROUTER_CPU, folder / "kvbaton.log", KVBATON_INTERNAL_KEY="benchmark" * 3) as running:
        wait_for(f"http://127.0.0.1:{ports.router}/ready", folder / "kvbaton.log", running)
        yield running


@contextmanager
def vllm_router(folder: Path, ports: Ports, policy: str) -> Iterator[psutil.Process]:
    (prometheus,) = free_ports(1)
    command = [
        peer("vllm-router").directory / "bin" / "vllm-router", "--vllm-pd-disaggregation",
        "--prefill", f"http://127.0.0.1:{ports.prefill}", "--decode", f"http://127.0.0.1:{ports.decode}",
        "--policy", policy, "--host", "127.0.0.1", "--port", str(ports.router),
        "--prometheus-port", str(prometheus), "--worker-startup-check-interval", "1",
        "--max-concurrent-requests", "4096", "--queue-size", "4096",
    ]  # fmt: skip
    log = folder / f"vllm-router-{policy}.log"
    with process(command, ROUTER_CPU, log) as running:
        wait_for(f"http://127.0.0.1:{ports.router}/health", log, running)
        yield running


@contextmanager
def direct(folder: Path, ports: Ports) -> Iterator[None]:
    yield None


RIVALS = ("vllm-router", "vllm-router-rr")
ROUTERS: dict[str, Callable[[Path, Ports], Any]] = {
    "direct": direct,
    "kvbaton": kvbaton,
    RIVALS[0]: partial(vllm_router, policy="cache_aware"),
    RIVALS[1]: partial(vllm_router, policy="round_robin"),
}


def request_body(workload: str, prompt: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """Path and body. The marks become digits that differ from request to request, so no prefix is known already."""
    length, kind = prompt.split("-")
    num_tokens = PROMPT_TOKENS[length]
    extra: dict[str, Any] = {"model": "mock", "max_tokens": NUM_TOKENS[workload], "stream": workload != "requests"}
    if GAP_US[workload]:
        extra["user"] = f"gap_us={GAP_US[workload]}"
    if kind == "ids":
        ids = ", ".join(["@A@@", "@B@@", *(str(1000 + i * 7 % 9000) for i in range(num_tokens - 2))])
        return "/v1/completions", json.dumps(extra)[:-1] + f', "prompt": [{ids}]}}'
    text = "Request @A@@ @B@@."
    sentence = " The quick brown fox jumps over the lazy dog, and then it sleeps until the evening comes."
    while len(tokenizer.encode(text)) < num_tokens:
        text += sentence
    if kind == "chat":
        return "/v1/chat/completions", json.dumps({**extra, "messages": [{"role": "user", "content": text}]})
    return "/v1/completions", json.dumps({**extra, "prompt": text})


def run_load(folder: Path, port: int, connections: int, seconds: float, request: tuple[str, str]) -> dict[str, Any]:
    path, body = request
    (folder / "body.json").write_text(body)
    command = [folder / "load", str(port), str(connections), str(seconds), path, folder / "body.json"]
    done = subprocess.run(
        [str(word) for word in command],
        check=True,
        capture_output=True,
        preexec_fn=pinned(LOAD_CPU),
        timeout=seconds + 60,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def cpu_s(running: psutil.Process | None) -> float:
    if running is None:
        return 0.0
    times = running.cpu_times()
    return float(times.user + times.system)


def measure(folder: Path, ports: Ports, plan: argparse.Namespace, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Each load at one router after the other; those that have none meanwhile only poll their workers."""
    rows = []
    with contextlib.ExitStack() as stack:
        running, port = {}, {}
        for name in plan.routers:
            own = replace(ports, router=free_ports(1)[0])
            running[name] = stack.enter_context(ROUTERS[name](folder, own))
            port[name] = own.decode if name == "direct" else own.router
            run_load(folder, port[name], 8, 0.5, request_body("burst", "short-text", tokenizer))
        cases = [(w, p, c) for w in plan.workloads for p in plan.prompts for c in plan.connections]
        for number, (workload, prompt, connections) in enumerate(cases * plan.rounds):
            request = request_body(workload, prompt, tokenizer)
            seconds = plan.seconds + (2.0 if workload == "streams" else 0.0)
            for name in plan.routers if number % 2 else reversed(plan.routers):
                before = cpu_s(running[name])
                found = run_load(folder, port[name], connections, seconds, request)
                spent_s = cpu_s(running[name]) - before
                row = {"router": name, "workload": workload, "prompt": prompt, "connections": connections}
                rows.append({**row, "router_cpu_s": spent_s, "wall_s": seconds, **found})
                print(as_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def as_line(row: dict[str, Any]) -> str:
    share = row["router_cpu_s"] / row["wall_s"]
    counted_s = row["seconds"]
    units = row["chunks"] if row["workload"] == "streams" else row["requests"]
    per_unit_us = row["router_cpu_s"] * counted_s / row["wall_s"] / units * 1e6 if units else 0.0
    latency, first, chunk = row["latency_us"], row["first_us"], row["chunk_us"]
    return (
        f"{row['router']:<14} {row['workload']:<9} {row['prompt']:<11} {row['connections']:>4}  "
        f"{row['requests'] / counted_s:>8.0f} req/s  {row['chunks'] / counted_s:>8.0f} chunks/s  "
        f"latency {latency['p50'] / 1e3:>8.3f} {latency['p99'] / 1e3:>8.3f} ms  "
        f"first {first['p50'] / 1e3:>8.3f} {first['p99'] / 1e3:>8.3f} ms  "
        f"chunk {chunk['p50'] / 1e3:>7.3f} {chunk['p99'] / 1e3:>7.3f} ms  "
        f"cpu {share:>4.0%} {per_unit_us:>7.1f} us  bad {row['refused'] + row['errors']}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: each router's rate, CPU and latencies, and kvbaton's rate over its rivals'; medians of the rounds."""
    lines = [
        "| workload | prompt | clients | router | rate /s | of vllm-router's | of its round robin | CPU us each "
        "| p50 ms | p99 ms | added p50 ms |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    found: dict[tuple[str, str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["workload"], row["prompt"], row["connections"], row["router"]), []).append(row)
    for (workload, prompt, connections, router), rounds in sorted(found.items(), key=lambda each: each[0][:3]):
        if router == "direct":
            continue
        without, *rivals = (found.get((workload, prompt, connections, name), []) for name in ("direct", *RIVALS))
        kind = "chunk_us" if workload == "streams" else "latency_us"
        ratio, of_round_robin = (times(rounds, rival) if router == "kvbaton" else "" for rival in rivals)
        p50_ms, p99_ms = (median([row[kind][share] for row in rounds]) / 1e3 for share in ("p50", "p99"))
        added = f"{p50_ms - median([row[kind]['p50'] for row in without]) / 1e3:.2f}" if without else ""
        rate = median([rate_of(row) for row in rounds])
        spent_us = median([row["router_cpu_s"] / row["wall_s"] / max(1e-9, rate_of(row)) * 1e6 for row in rounds])
        lines.append(
            f"| {workload} | {prompt} | {connections} | {router} | {rate:,.0f} | {ratio} | {of_round_robin} "
            f"| {spent_us:,.0f} | {p50_ms:.2f} | {p99_ms:.2f} | {added} |"
        )
    return "\n".join(lines)


def times(own: list[dict[str, Any]], rival: list[dict[str, Any]]) -> str:
    """The median of the rounds' ratios."""
    ratios = [rate_of(mine) / rate_of(its) for mine, its in zip(own, rival, strict=False) if rate_of(its)]
    return f"{median(ratios):.2f}" if ratios else ""


def rate_of(row: dict[str, Any]) -> float:
    """Chunks a second where chunks are what is asked for, else requests."""
    return float((row["chunks"] if row["workload"] == "streams" else row["requests"]) / row["seconds"])


def words(choices: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        if not set(found) <= set(choices):
            raise argparse.ArgumentTypeError(f"choose from {', '.join(choices)}")
        return found

    return parse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    prompts = [f"{length}-{kind}" for length in PROMPT_TOKENS for kind in ("text", "chat", "ids")]
    parser.add_argument("--workloads", type=words(list(NUM_TOKENS)), default=["requests", "streams"])
    parser.add_argument("--prompts", type=words(prompts), default=["short-text"])
    parser.add_argument("--routers", type=words(list(ROUTERS)), default=list(ROUTERS))
    parser.add_argument("--connections", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64, 512])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=1, help="how often all of it is measured")
    parser.add_argument("--json", type=Path)
    plan = parser.parse_args()
    if "vllm-router" in plan.routers and not peer("vllm-router").installed:
        raise SystemExit("vllm-router is not installed: python -m benchmarks.peers.install vllm-router")
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("this needs two cores: one for the router, one for client and mocks")
    tokenizer = Tokenizer.load(default_model_dir())
    with tempfile.TemporaryDirectory() as name:
        folder, ports = Path(name), Ports(*free_ports(3))
        compile_tools(folder)
        with mocks(folder, ports):
            rows = measure(folder, ports, plan, tokenizer)
    if plan.json:
        plan.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    return 1 if any(row["refused"] or row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
