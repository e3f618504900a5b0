"""Our client beside AIPerf and GuideLLM, on the same scripted server, with the server's own record as the truth.

``agree``: each tool sends the same number of requests at the same constant rate to a fresh server whose answers take a
hundred different times. TTFT and TPOT (AIPerf: inter-token latency; GuideLLM: inter_token_latency) are compared at p50
and p95, with each other and with what the server wrote when.
``load``: 2,000 chunks a second for a while. For our client the lag of every chunk is known, because the server's
writes and our reads are on the same clock; for the others, what they report of a known truth, and the CPU they used.

The peers live in environments of their own, made once by ``python -m benchmarks.client install`` (AIPerf and GuideLLM
from PyPI; about 3 GB, outside the repository). A peer that is not there is left out, and said so.

Usage: python -m benchmarks.client [agree|load|install] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvbaton.bench import stats
from kvbaton.bench.http_stream import HttpPool
from kvbaton.bench.runner import run_load
from kvbaton.bench.workload import LoadSpec
from kvbaton.engine.weights import default_model_dir

PEERS = Path(os.environ.get("KVBATON_PEERS", Path.home() / ".cache" / "kvbaton" / "peers"))
TOOLS = ("kvbaton", "aiperf", "guidellm")


def scenario(name: str) -> dict[str, float]:
    """Server timing and load. Requests are a multiple of 100, so that every tool meets the same answers."""
    if name == "agree":
        return {"first_ms": 100, "gap_ms": 15, "tokens": 32, "vary": 1, "rate": 10, "requests": 200}
    # About 125 streams open at once, a chunk each 50 ms: over 2,000 chunks a second from first request to last token.
    return {"first_ms": 100, "gap_ms": 50, "tokens": 60, "vary": 0, "rate": 42, "requests": 600}


@contextmanager
def scripted(plan: dict[str, float]) -> Iterator[str]:
    command = [sys.executable, "-m", "kvbaton.bench.scripted", "--tokens", str(int(plan["tokens"]))]
    for name in ("first_ms", "gap_ms", "vary"):
        command += [f"--{name.replace('_', '-')}", str(plan[name])]
    if plan["rate"] * plan["tokens"] > 1000:
        command.append("--coarse")  # a server that spins all the time would take the core from whom it is to serve
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.stdin.close()
            server.wait(10)


def played(url: str) -> list[dict[str, Any]]:
    async def fetch() -> bytes:
        pool = HttpPool(url, time.monotonic)
        try:
            return (await pool.get("/played"))[1]
        finally:
            pool.close()

    return list(json.loads(asyncio.run(fetch())))


def truth(rows: Sequence[dict[str, Any]], plan: dict[str, float]) -> dict[str, float]:
    """TTFT and TPOT as the server wrote them: read to first token written, and first to last over tokens - 1."""
    tokens = int(plan["tokens"])
    whole = [row for row in rows if len(row["writes_s"]) == tokens + 2]
    ttft = [(row["writes_s"][1] - row["read_s"]) * 1e3 for row in whole]
    tpot = [(row["writes_s"][tokens] - row["writes_s"][1]) / (tokens - 1) * 1e3 for row in whole]
    return points(ttft, tpot)


def points(ttft_ms: Sequence[float], tpot_ms: Sequence[float]) -> dict[str, float]:
    found = {}
    for name, values in (("ttft", ttft_ms), ("tpot", tpot_ms)):
        for percent in (50, 95):
            found[f"{name}_p{percent}_ms"] = float(np.percentile(values, percent))
    return found


def ours(url: str, plan: dict[str, float], folder: Path) -> dict[str, float]:
    """In a process of its own, like the others."""
    command = [sys.executable, "-m", "benchmarks.client", "ours", "--url", url, "--json", str(folder / "ours.json")]
    command += [word for name in ("rate", "requests") for word in (f"--{name}", str(plan[name]))]
    subprocess.run(command, check=True, timeout=300)
    return dict(json.loads((folder / "ours.json").read_text()))


def measure_ours(url: str, rate: float, num: int) -> dict[str, Any]:
    import uvloop

    spec = LoadSpec(
        url, arrivals="constant", rate_per_s=rate, steady_s=num / rate + 0.5 / rate, num_requests=num,
        input="32", warmup_requests=0,
    )  # fmt: skip
    run = uvloop.run(run_load(spec))
    good = [sample for sample in run.measured() if sample.ok]
    values = [(stats.ttft_s(sample), stats.tpot_s(sample)) for sample in good]
    found: dict[str, Any] = points([(a or 0) * 1e3 for a, _ in values], [(b or 0) * 1e3 for _, b in values])
    wrote = {row["request_id"]: row["writes_s"] for row in played(url)}
    lags = [
        (read + run.footer.zero_monotonic_s - write) * 1e3
        for sample in good
        for (read, _), write in zip(sample.visible(), wrote[f"bench-steady-{sample.index}"][1:], strict=False)
    ]
    found |= {f"chunk_lag_p{percent}_ms": float(np.percentile(lags, percent)) for percent in (50, 99)}
    found |= {"chunks_per_s": run.footer.client.chunks_per_s, "failed": len(run.measured()) - len(good)}
    found |= {"loop_cpu_share": run.footer.client.cpu_share, "send_lag_p99_ms": run.footer.client.lag_p99_ms}
    return found


def aiperf(url: str, plan: dict[str, float], folder: Path) -> dict[str, float]:
    command = [
        str(PEERS / "aiperf/bin/aiperf"), "profile", "--model", "scripted", "--url", url, "--endpoint-type", "chat",
        "--streaming", "--request-rate", str(plan["rate"]), "--request-rate-mode", "constant",
        "--request-count", str(int(plan["requests"])), "--tokenizer", str(default_model_dir()),
        "--use-server-token-count", "--isl", "32", "--osl", str(int(plan["tokens"])),
        "--output-artifact-dir", str(folder), "--ui", "none",
    ]  # fmt: skip
    quiet(command, folder)
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    return {
        f"{ours}_p{percent}_ms": found[theirs][f"p{percent}"]
        for ours, theirs in (("ttft", "time_to_first_token"), ("tpot", "inter_token_latency"))
        for percent in (50, 95)
    }


def guidellm(url: str, plan: dict[str, float], folder: Path) -> dict[str, float]:
    path = folder / "guidellm.json"
    command = [
        str(PEERS / "guidellm/bin/guidellm"), "run", "--backend", f"kind=openai_http,target={url},model=scripted",
        "--profile", f"kind=constant,rate={plan['rate']}",
        "--constraint", f"kind=max_requests,count={int(plan['requests'])}",
        "--tokenizer", f"kind=huggingface_auto,model={default_model_dir()}",
        "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={int(plan['tokens'])}",
        "--output", f"kind=json,path={path}", "--disable-console",
    ]  # fmt: skip
    quiet(command, folder)
    metrics = json.loads(path.read_text())["benchmarks"][0]["metrics"]
    return {
        f"{ours}_p{percent}_ms": metrics[theirs]["successful"]["percentiles"][f"p{percent:02}"]
        for ours, theirs in (("ttft", "time_to_first_token_ms"), ("tpot", "inter_token_latency_ms"))
        for percent in (50, 95)
    }


def quiet(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {(done.stdout + done.stderr)[-2000:]}")


RUN: dict[str, Callable[[str, dict[str, float], Path], dict[str, float]]] = {
    "kvbaton": ours,
    "aiperf": aiperf,
    "guidellm": guidellm,
}


def compare(name: str) -> dict[str, Any]:
    plan = scenario(name)
    report: dict[str, Any] = {"scenario": name, **plan, "tools": {}}
    for tool in TOOLS:
        if tool != "kvbaton" and not (PEERS / tool / "bin" / tool).exists():
            print(f"{tool} is not installed; python -m benchmarks.client install", file=sys.stderr)
            continue
        print(f"running {tool}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder, scripted(plan) as url:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            found = RUN[tool](url, plan, Path(folder))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            report["tools"][tool] = {
                "says": found,
                "server": truth(played(url), plan),
                "cpu_s_with_start": cpu_s,
            }
    return report


def show(report: dict[str, Any]) -> bool:
    """Prints the table; False when a tool is over 3% from the server's own record or from ours."""
    agreed = True
    print(f"{'':<10}{'':<8}" + "".join(f"{name:>14}" for name in ("TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95")))
    for tool, row in report["tools"].items():
        says, server = row["says"], row["server"]
        print(f"{tool:<10}{'says':<8}" + "".join(f"{says[name]:>14.2f}" for name in server))
        print(f"{'':<10}{'server':<8}" + "".join(f"{server[name]:>14.2f}" for name in server))
        off = {name: says[name] / server[name] - 1 for name in server}
        print(f"{'':<10}{'off by':<8}" + "".join(f"{off[name]:>13.2%} " for name in server), end="")
        print(f"   {row['cpu_s_with_start']:.1f} s of CPU with its start")
        mine = report["tools"]["kvbaton"]["says"]
        agreed &= all(abs(says[name] / mine[name] - 1) <= 0.03 for name in server)
    mine = report["tools"]["kvbaton"]["says"]
    print(
        f"kvbaton: {mine['chunks_per_s']:.0f} chunks/s on {mine['loop_cpu_share']:.0%} of a core, chunk lag p50 "
        f"{mine['chunk_lag_p50_ms']:.2f} ms, p99 {mine['chunk_lag_p99_ms']:.2f} ms, send lag p99 "
        f"{mine['send_lag_p99_ms']:.2f} ms, {mine['failed']} failed"
    )
    return agreed


def install() -> None:
    """CPU torch first: GuideLLM would pull a CUDA build of it."""
    for tool, first in (("aiperf", ()), ("guidellm", ("torch==2.13.0",))):
        home = PEERS / tool
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        for package in (*first, tool):
            subprocess.run([str(home / "bin/pip"), "install", "-q", package], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="agree", choices=["agree", "load", "install", "ours"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--realtime", action="store_true", help="real-time priority, on a machine that others use too")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--requests", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.realtime:
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    if given.what == "install":
        install()
        return 0
    if given.what == "ours":
        given.json.write_text(json.dumps(measure_ours(given.url, given.rate, int(given.requests))))
        return 0
    report = compare(given.what)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1))
    return 0 if show(report) else 1


if __name__ == "__main__":
    sys.exit(main())
