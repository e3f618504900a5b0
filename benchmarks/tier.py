"""What a shared KV tier is worth: how its hits grow with its size on recorded traffic, and what it does to TTFT here.

    python -m benchmarks.tier trace [--json FILE]      Mooncake's traces (KVBATON_SHARED), through ``kv.tier_index``
    python -m benchmarks.tier live  [--json FILE]      two fleets of one prefill and one decode worker, with and without

``trace``: each request looks for its prompt's blocks, then adds those it computed, in an index of the class that the
workers use. "shared" is one tier that every worker reads; "private" four of a quarter each, requests dealt out in turn,
which is what four workers have without sharing (a router that sends conversations back to where they were does better
than that, until a worker dies or is full). Bytes are those of a block of 512 tokens of Llama-3.1-70B in bfloat16.

``live``: conversations of several turns, more than the pools hold, in turn, one request at a time. Each turn is asked
of both fleets, one after the other, the order changing, so that whatever else the machine does meets both. Both start
empty. TTFT is from the request to the first part of the answer with text, through the router.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from kvbaton.kv.tier_index import TierIndex
from kvbaton.plan.workload import Trace, read_trace

SHARED = Path(os.environ.get("KVBATON_SHARED", Path(__file__).parents[2] / "shared")) / "data" / "mooncake-fast25"
TRACES = ("conversation_trace", "synthetic_trace")
TOKEN_BYTES = 2 * 80 * 8 * 128 * 2  # K and V, layers, KV heads, dimension, bfloat16
NUM_PRIVATE = 4
FRACTIONS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # of all blocks that the trace ever names
START_TIMEOUT_S = 300.0


# -- trace


def hit_rate(trace: Trace, num_blocks: int, num_parts: int) -> float:
    """Share of the prompt tokens that were found, of ``num_parts`` stores of equal size, requests dealt out in turn."""
    assert trace.block_tokens is not None
    stores = [TierIndex(":memory:", max(1, num_blocks // num_parts)) for _ in range(num_parts)]
    hit_tokens = all_tokens = 0
    for number, request in enumerate(trace.requests):
        store = stores[number % num_parts]
        chain = [block.to_bytes(8, "big") for block in request.block_ids]
        found = store.find(chain, 0.0, 0.0)
        hit_tokens += min(found * trace.block_tokens, request.prompt_tokens)
        all_tokens += request.prompt_tokens
        store.add([(key, 1) for key in chain[found:]], 0.0)
    for store in stores:
        store.check()
        store.close()
    return hit_tokens / all_tokens


def run_trace(name: str) -> dict[str, Any]:
    trace = read_trace(SHARED / f"{name}.jsonl")
    assert trace.block_tokens is not None
    distinct = len({block for request in trace.requests for block in request.block_ids})
    block_bytes = TOKEN_BYTES * trace.block_tokens
    print(f"\n{name}: {len(trace.requests)} requests, {distinct} distinct blocks of {trace.block_tokens} tokens")
    print(f"  {'size':>10}  {'of a 70B':>10}  {'shared':>7}  {f'{NUM_PRIVATE} private':>9}")
    rows = []
    for fraction in FRACTIONS:
        num_blocks = max(NUM_PRIVATE, round(distinct * fraction))
        shared, private = (hit_rate(trace, num_blocks, parts) for parts in (1, NUM_PRIVATE))
        rows.append({"blocks": num_blocks, "bytes_70b": num_blocks * block_bytes, "shared": shared, "private": private})
        size = num_blocks * block_bytes / 2**40
        print(f"  {num_blocks:>10}  {size:>7.2f} TiB  {shared:>7.1%}  {private:>9.1%}", flush=True)
    return {"trace": name, "requests": len(trace.requests), "distinct_blocks": distinct, "rows": rows}


# -- live


@contextlib.contextmanager
def fleet(args: argparse.Namespace, *flags: str) -> Iterator[dict[str, str]]:
    """One prefill and one decode worker: the addresses of the processes by name, the router's among them."""
    command = [sys.executable, "-m", "kvbaton.cli.main", "up", "--json", "--tied", "--port", "0", "--no-ui"]
    command += ["--prefill", "1", "--decode", "1", "--kv-blocks", str(args.kv_blocks), "--threshold-tokens", "0"]
    command += ["--dtype", args.dtype, "--name", "m", "--log-level", "warning", *flags]
    if args.model:
        command += ["--model", args.model]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield {one["name"]: one["url"] for one in ready["processes"]}
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=START_TIMEOUT_S)


def ask(url: str, messages: Sequence[dict[str, str]], max_tokens: int) -> tuple[float, str, int]:
    """TTFT in seconds, the answer, and how many of the prompt's tokens were cached."""
    body = {"model": "m", "messages": list(messages), "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    text, first_s, cached = "", None, 0
    started_s = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        part = json.loads(line[6:])
        if part["choices"] and (said := part["choices"][0]["delta"].get("content")):
            first_s = time.perf_counter() - started_s if first_s is None else first_s
            text += said
        if part.get("usage"):
            cached = (part["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    connection.close()
    assert first_s is not None, "an answer without text"
    return first_s, text, cached


def tier_figures(processes: dict[str, str]) -> dict[str, float]:
    """The tier's counters as each worker tells them."""
    found: dict[str, float] = {}
    for name, url in processes.items():
        if name == "router":
            continue
        with contextlib.closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)) as connection:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("kvbaton_worker_tier_"):
                    found[f"{name} {sample.name.removeprefix('kvbaton_worker_tier_')}"] = sample.value
    return found


def conversations(args: argparse.Namespace) -> list[list[str]]:
    """What the users say: a page to begin with, then something shorter in each turn."""
    rng, text = random.Random(args.seed), "\n".join(topics.values())

    def passage(characters: int) -> str:
        start = rng.randrange(len(text) - characters)
        return text[start : start + characters]

    first, later = args.first_characters, args.turn_characters
    return [
        [f"Explain this:\n{passage(first)}", *(f"And this?\n{passage(later)}" for _ in range(args.turns - 1))]
        for _ in range(args.conversations)
    ]


def run_live(args: argparse.Namespace) -> dict[str, Any]:
    said = conversations(args)
    ttft_s: dict[str, list[list[float]]] = {arm: [[] for _ in range(args.turns)] for arm in ("off", "on")}
    cached: dict[str, list[list[int]]] = {arm: [[] for _ in range(args.turns)] for arm in ("off", "on")}
    num_same = 0
    with fleet(args) as off, fleet(args, "--kv-tier-memory", str(args.tier_mib)) as on:
        urls = {"off": off["router"], "on": on["router"]}
        for url in urls.values():
            ask(url, [{"role": "user", "content": "Hello."}], 4)
        histories: list[list[dict[str, str]]] = [[] for _ in said]
        for turn in range(args.turns):
            for number, history in enumerate(histories):
                history.append({"role": "user", "content": said[number][turn]})
                answers = {}
                for arm in sorted(urls, reverse=(turn + number) % 2 == 0):
                    first_s, answers[arm], num_cached = ask(urls[arm], history, args.max_tokens)
                    ttft_s[arm][turn].append(first_s)
                    cached[arm][turn].append(num_cached)
                num_same += answers["off"] == answers["on"]
                history.append({"role": "assistant", "content": answers["off"]})
        figures = tier_figures(on)
    print(f"  {'turn':>4}  {'TTFT off':>9}  {'on':>8}  {'off/on':>6}  {'cached off':>10}  {'on':>6}")
    rows = []
    for turn in range(args.turns):
        medians = {arm: float(np.median(ttft_s[arm][turn])) for arm in urls}
        ratios = np.array(ttft_s["off"][turn]) / np.array(ttft_s["on"][turn])
        tokens = {arm: float(np.mean(cached[arm][turn])) for arm in urls}
        rows.append({"turn": turn, "ttft_p50_s": medians, "ratio_p50": float(np.median(ratios)), "cached": tokens})
        print(
            f"  {turn:>4}  {medians['off'] * 1e3:>6.0f} ms  {medians['on'] * 1e3:>5.0f} ms  {np.median(ratios):>6.2f}"
            f"  {tokens['off']:>10.0f}  {tokens['on']:>6.0f}"
        )
    print(f"  the same answer in {num_same} of {args.turns * args.conversations} turns; {figures}")
    return {"settings": vars(args), "rows": rows, "ttft_s": ttft_s, "num_same": num_same, "tier": figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["trace", "live"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--traces", nargs="*", default=list(TRACES))
    parser.add_argument("--model", default="", help="of live; default: the one that ships")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first-characters", type=int, default=2400)
    parser.add_argument("--turn-characters", type=int, default=400)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--kv-blocks", type=int, default=160, help="of each worker, of 16 tokens")
    parser.add_argument("--tier-mib", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found: Any = [run_trace(name) for name in args.traces] if args.what == "trace" else run_live(args)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
