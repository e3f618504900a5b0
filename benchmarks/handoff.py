"""What a hand-off costs a user alone on the machine: exposed transfer time by transport, with and without streaming.

    python -m benchmarks.handoff [--rounds 5] [--tokens 512,2048,8000] [--json FILE]

One prefill worker in a process of its own on one core; decode workers on the other. Every round measures in turn and
with fresh prompts: all on the prefill worker (the rival), then shm and tcp, each streaming layer by layer or not.
Two figures, since the first token is sent by the prefill side and may be out before its KV has arrived:

    TTFT      first token, against prefill on the spot
    exposed   how much later the last byte came than the first token; what the second token waits for

Medians over the rounds; a ratio compares medians of the same run.
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

from kvbaton.engine.engine import EngineConfig
from kvbaton.engine.loader import LoadOptions
from kvbaton.engine.scheduler import SchedulerConfig
from kvbaton.transfer.options import HandoffOptions
from kvbaton.types import GenerateRequest, SamplingParams, TokenOutput
from kvbaton.workers.native import NativeWorker, WorkerOptions
from kvbaton.workers.protocol import Finished, PeerAddress

ARMS = (("shm", True), ("shm", False), ("tcp", True), ("tcp", False))
NUM_OUTPUT_TOKENS = 4
READY_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Sample:
    ttft_s: float
    second_s: float  # second token, from the start
    exposed_s: float
    transfer_bytes: int


def make_worker(role: str, transport: str, streaming: bool, args: argparse.Namespace) -> NativeWorker:
    load = LoadOptions(dtype=args.dtype, num_kv_blocks=1200)
    scheduler = SchedulerConfig(max_batch_tokens=args.chunk_tokens, max_running=16)
    handoff = HandoffOptions(transport=transport, streaming=streaming)
    return NativeWorker(load, EngineConfig(scheduler, prefix_caching=False), WorkerOptions(role=role, handoff=handoff))


def prefill_process(pipe: Connection, args: argparse.Namespace) -> None:
    """The prefill worker; it also measures the rival, so that both run on the same core and the same engine."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    async def serve() -> None:
        worker = make_worker("both", "auto", True, args)
        await worker.start()
        pipe.send(worker.kv_port)
        with contextlib.suppress(EOFError):
            while True:
                prompt, name = await asyncio.to_thread(pipe.recv)
                pipe.send(await measure(worker, prompt, name, None))
        await worker.stop()

    asyncio.run(serve())


def measure_local(pipe: Connection, prompt: tuple[int, ...], name: str) -> Sample:
    pipe.send((prompt, name))
    if not pipe.poll(ANSWER_TIMEOUT_S):
        raise SystemExit("the prefill process does not answer")
    return pipe.recv()


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
    workers = {arm: make_worker("decode", *arm, args) for arm in ARMS}
    for worker in workers.values():
        await worker.start()
    peer = PeerAddress("127.0.0.1", kv_port)
    rng = random.Random(args.seed)
    rows = []
    for num_tokens in args.tokens:
        samples: dict[str, list[Sample]] = {}
        for round_index in range(-1, args.rounds):  # the first round warms up and is not counted
            for arm in (None, *ARMS):
                prompt = tuple(rng.randrange(49_000) for _ in range(num_tokens))
                name = "local" if arm is None else f"{arm[0]}{'' if arm[1] else ', not streaming'}"
                request_id = f"{name}-{num_tokens}-{round_index}"
                if arm is None:
                    sample = await asyncio.to_thread(measure_local, pipe, prompt, request_id)
                else:
                    sample = await measure(workers[arm], prompt, request_id, peer)
                if round_index >= 0:
                    samples.setdefault(name, []).append(sample)
                print(".", end="", flush=True, file=sys.stderr)
        rows.extend(summarize(num_tokens, samples))
    print(file=sys.stderr)
    for worker in workers.values():
        await worker.stop()
    return rows


def summarize(num_tokens: int, samples: dict[str, list[Sample]]) -> list[dict]:
    local_s = statistics.median(sample.ttft_s for sample in samples["local"])
    rows = []
    for name, found in samples.items():
        ttft_s = statistics.median(sample.ttft_s for sample in found)
        exposed_s = statistics.median(sample.exposed_s for sample in found)
        rows.append(
            {
                "prompt_tokens": num_tokens,
                "arm": name,
                "ttft_ms": 1e3 * ttft_s,
                "ttft_added_percent": 100 * (ttft_s - local_s) / local_s,
                "exposed_ms": 1e3 * exposed_s,
                "exposed_percent_of_ttft": 100 * exposed_s / local_s,
                "second_token_ms": 1e3 * statistics.median(sample.second_s for sample in found),
                "transfer_mib": found[0].transfer_bytes / 2**20,
            }
        )
    return rows


def print_table(rows: list[dict]) -> None:
    print("| prompt tokens | arm | TTFT ms | TTFT added | exposed ms | exposed / TTFT | second token ms | MiB moved |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['prompt_tokens']} | {row['arm']} | {row['ttft_ms']:.1f} | {row['ttft_added_percent']:+.1f}% "
            f"| {row['exposed_ms']:.1f} | {row['exposed_percent_of_ttft']:.1f}% "
            f"| {row['second_token_ms']:.1f} | {row['transfer_mib']:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[512, 2048, 8000]
    )
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
