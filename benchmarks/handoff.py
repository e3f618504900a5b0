"""What a hand-off costs a user alone on the machine: exposed transfer time by transport, with and without streaming.

    python -m benchmarks.handoff [--rounds 5] [--tokens 512,2048,8000] [--transports shm,tcp,nixl] [--json FILE]

One prefill worker in a process of its own on one core; decode workers on the other. Every round measures, with fresh
prompts, each transport, each streaming layer by layer or not, in an order that turns with the rounds; before the first
arm and after each one the same length is prefilled on the spot (the rival). Two figures, since the first token is sent
by the prefill side and may be out before its KV has arrived:

    TTFT      first token, against the mean of the rivals right before and right after it
    exposed   how much later the last byte came than the first token; what the second token waits for

Medians over the rounds, with the 95% interval of the paired ratio; short prompts get more rounds, in proportion.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection

from kvbaton.bench.stats import summarize
from kvbaton.engine.engine import EngineConfig
from kvbaton.engine.loader import LoadOptions
from kvbaton.engine.scheduler import SchedulerConfig
from kvbaton.transfer.options import HandoffOptions
from kvbaton.types import GenerateRequest, SamplingParams, TokenOutput
from kvbaton.workers.native import NativeWorker, WorkerOptions
from kvbaton.workers.protocol import Finished, PeerAddress

NUM_OUTPUT_TOKENS = 4
READY_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Sample:
    ttft_s: float
    second_s: float  # second token, from the start
    exposed_s: float
    transfer_bytes: int


@dataclass(frozen=True)
class Paired:
    sample: Sample
    local_s: float  # TTFT of the rival, around it in time


def make_worker(role: str, transport: str, streaming: bool, args: argparse.Namespace) -> NativeWorker:
    load = LoadOptions(dtype=args.dtype, num_kv_blocks=1200)
    scheduler = SchedulerConfig(max_batch_tokens=args.chunk_tokens, max_running=16)
    handoff = HandoffOptions(transport=transport, streaming=streaming)
    return NativeWorker(load, EngineConfig(scheduler, prefix_caching=False), WorkerOptions(role=role, handoff=handoff))


def prefill_process(pipe: Connection, args: argparse.Namespace) -> None:
    """The prefill worker; it also measures the rival, so that both run on the same core and the same engine."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    async def serve() -> None:
        # Asked for NIXL it registers its pool as well, and lends by every way.
        worker = make_worker("both", "nixl" if "nixl" in args.transports else "auto", True, args)
        await worker.start()
        pipe.send(worker.kv_port)
        with contextlib.suppress(EOFError):
            while True:
                prompt, name = await asyncio.to_thread(pipe.recv)
                pipe.send(await measure(worker, prompt, name, None))
        await worker.stop()

    asyncio.run(serve())


async def measure_local(pipe: Connection, prompt: tuple[int, ...], name: str) -> Sample:
    def ask() -> Sample:
        pipe.send((prompt, name))
        if not pipe.poll(ANSWER_TIMEOUT_S):
            raise SystemExit("the prefill process does not answer")
        return pipe.recv()

    return await asyncio.to_thread(ask)


async def measure(worker: NativeWorker, prompt: tuple[int, ...], name: str, peer: PeerAddress | None) -> Sample:
    sampling = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    token_s: list[float] = []
    finished = Finished()
    async for event in worker.generate(request, prefill=peer):
        if isinstance(event, TokenOutput):
            token_s.append(loop.time() - started_s)
        elif isinstance(event, Finished):
            finished = event
    expected = worker.layout.blocks_for(len(prompt)) * worker.layout.block_bytes if peer is not None else 0
    assert finished.transfer_bytes == expected, f"{finished.transfer_bytes} bytes moved, {expected} expected"
    return Sample(token_s[0], token_s[1], finished.exposed_s, finished.transfer_bytes)


async def run(args: argparse.Namespace, kv_port: int, pipe: Connection) -> list[dict]:
    arms = [(transport, streaming) for transport in args.transports for streaming in (True, False)]
    workers = {arm: make_worker("decode", *arm, args) for arm in arms}
    for worker in workers.values():
        await worker.start()
    peer = PeerAddress("127.0.0.1", kv_port)
    rng = random.Random(args.seed)
    rows = []
    for num_tokens in args.tokens:
        num_rounds = args.rounds * max(1, round(max(args.tokens) / num_tokens / 2))
        samples: dict[str, list[Paired]] = {}
        for index in range(-1, num_rounds):  # the first round warms up and is not counted
            turn = index % len(arms)
            before = await measure_local(pipe, draw(rng, num_tokens), f"local-{num_tokens}-{index}")
            for arm in arms[turn:] + arms[:turn]:
                name = f"{arm[0]}{'' if arm[1] else ', not streaming'}"
                request_id = f"{name}-{num_tokens}-{index}"
                sample = await measure(workers[arm], draw(rng, num_tokens), request_id, peer)
                after = await measure_local(pipe, draw(rng, num_tokens), f"local-{request_id}")
                if index >= 0:
                    samples.setdefault(name, []).append(Paired(sample, (before.ttft_s + after.ttft_s) / 2))
                before = after
                print(".", end="", flush=True, file=sys.stderr)
        rows.extend(summarize_arm(num_tokens, name, found) for name, found in sorted(samples.items()))
    print(file=sys.stderr)
    for worker in workers.values():
        await worker.stop()
    return rows


def draw(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(49_000) for _ in range(num_tokens))


def summarize_arm(num_tokens: int, name: str, found: list[Paired]) -> dict:
    local_s = statistics.median(pair.local_s for pair in found)
    exposed_s = statistics.median(pair.sample.exposed_s for pair in found)
    added = summarize([[100 * (pair.sample.ttft_s / pair.local_s - 1)] for pair in found])
    assert added is not None
    interval = added.intervals.get("p50")
    return {
        "prompt_tokens": num_tokens,
        "arm": name,
        "rounds": len(found),
        "local_ttft_ms": 1e3 * local_s,
        "ttft_ms": 1e3 * statistics.median(pair.sample.ttft_s for pair in found),
        "ttft_added_percent": added.p50,
        "ttft_added_interval": None if interval is None else [interval.low, interval.high],
        "exposed_ms": 1e3 * exposed_s,
        "exposed_percent_of_ttft": 100 * exposed_s / local_s,
        "second_token_ms": 1e3 * statistics.median(pair.sample.second_s for pair in found),
        "transfer_mib": found[0].sample.transfer_bytes / 2**20,
    }


def print_table(rows: list[dict]) -> None:
    print(
        "| prompt tokens | arm | rounds | TTFT local ms | TTFT ms | added | 95% interval | exposed / TTFT | MiB moved |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        ends = row["ttft_added_interval"]
        interval = "" if ends is None else f"{ends[0]:+.1f} to {ends[1]:+.1f}%"
        print(
            f"| {row['prompt_tokens']:,} | {row['arm']} | {row['rounds']} | {row['local_ttft_ms']:.0f} "
            f"| {row['ttft_ms']:.0f} | {row['ttft_added_percent']:+.1f}% | {interval} "
            f"| {row['exposed_percent_of_ttft']:.1f}% | {row['transfer_mib']:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[512, 2048, 8000]
    )
    parser.add_argument("--transports", type=lambda text: text.split(","), default=["shm", "tcp"], help="and nixl")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="also write the rows there")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill_process, args=(theirs, args), daemon=True)
    process.start()
    theirs.close()
    if not ours.poll(READY_TIMEOUT_S):
        raise SystemExit("the prefill worker did not come up")
    kv_port = ours.recv()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows = asyncio.run(run(args, kv_port, ours))
    ours.close()
    process.join(30)
    print_table(rows)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"dtype": args.dtype, "rounds": args.rounds, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
