"""kvbaton's engine against vLLM, llama.cpp and transformers: one core each, same weights, same prompts, one run.

    make bench-engine                      installs the peers and runs everything (about 20 minutes)
    python -m benchmarks.engine --help

Every engine lives in a process of its own pinned to the same CPU, loaded once. A turn measures a workload on every
engine, one after the other, every other time in the opposite order; a round has some turns of each workload. The
hardware's limits are measured in the same run: reading the weights once a step bounds decode, the products of the
linear layers alone bound prefill.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.peers.contenders import OURS, PRECISIONS, Contender, contenders, packaged_gguf
from benchmarks.peers.process import DriverFailed, DriverProcess
from benchmarks.peers.prompts import TEXT, TEXT_SHA256, Windows
from benchmarks.peers.report import WORKLOADS, Sample, Workload, markdown, summarise

ENGINES = (OURS, "vllm", "vllm-eager", "transformers", "llamacpp")
BUSY_ENOUGH = 0.93  # the kernel itself takes 5% from real-time processes when others wait
TRIES = 3  # of one measurement, when something else had our core
AGREEMENT_PROMPT = "The capital of France is"
AGREEMENT_TOKENS = 16
# Bits of one weight as stored: int8 is ggml's Q8_0 (32 weights and a 16-bit scale), int4 its Q4_1 (and an offset).
WEIGHT_BITS = {"bfloat16": 16.0, "int8": 8.5, "int4": 5.0}


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def exclusive(lock: Path | None) -> Iterator[None]:
    """Hold ``lock`` while something is timed, for machines where several benchmarks may run at once."""
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Race:
    """The running engines and the samples so far."""

    def __init__(self, cpu: int, windows: Windows, lock: Path | None, realtime: bool) -> None:
        self._cpu = cpu
        self._windows = windows
        self._lock = lock
        self._realtime = realtime
        self._stack = contextlib.ExitStack()
        self.running: dict[Contender, DriverProcess] = {}
        self.info: dict[str, dict[str, Any]] = {}
        self.samples: list[Sample] = []
        self.failures: dict[str, str] = {}

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, python: Path, module: str, options: dict[str, Any]) -> tuple[DriverProcess, dict[str, Any]]:
        process = self._stack.enter_context(DriverProcess(python, f"benchmarks.peers.{module}", self._cpu))
        return process, process.load(options)

    def join(self, contender: Contender) -> None:
        """Load one engine and run it warm; one that cannot is left out and named in the report."""
        note(f"loading {contender.name}")
        try:
            process, info = self.start(contender.python, contender.module, contender.options)
            process.call({"command": "generate", "prompts": self._windows.take(1, 512), "max_tokens": 8})
        except (DriverFailed, OSError) as error:
            self.failures[contender.name] = str(error).strip()
            note(f"  left out: {str(error).splitlines()[0]}")
            return
        if self._realtime:
            process.raise_priority()
        self.running[contender] = process
        self.info[contender.name] = info

    def agreement(self, prompt: list[int]) -> dict[str, list[int]]:
        """What each engine continues a prompt with: the same weights should say the same."""
        request = {"command": "tokens", "prompt": prompt, "max_tokens": AGREEMENT_TOKENS}
        return {c.name: p.call(request)["token_ids"] for c, p in self.running.items()}

    def measure(self, number: int, workload: Workload) -> None:
        """One turn of each engine in ``workload``; ``number`` counts turns over all rounds."""
        prompts = self._windows.take(workload.num_prompts, workload.prompt_tokens)
        request = {"command": "generate", "prompts": prompts, "max_tokens": workload.max_tokens}
        order = list(self.running.items())
        for contender, process in order if number % 2 else reversed(order):
            for _ in range(TRIES):
                with exclusive(self._lock):
                    reply = process.call(request)
                busy = reply["cpu_s"] / reply["wall_s"]
                if busy >= BUSY_ENOUGH:
                    break
            value = workload.value(reply)
            what = f"turn {number}  {workload.name:16s} {contender.name:22s}"
            note(f"{what} {value:9.1f} {workload.unit:6s} busy {busy:.2f}")
            self.samples.append(
                Sample(number, contender.engine, contender.precision, workload.name, value, round(busy, 4))
            )


def weight_shapes(model_dir: Path) -> tuple[int, list[tuple[int, int]], int]:
    """Layers, the (out, in) shapes of one layer's fused linears, and the elements read in one decode step."""
    config = json.loads((model_dir / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = [(query + 2 * key, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner)]
    layer_elements = sum(rows * columns for rows, columns in shapes)
    num_layers = config["num_hidden_layers"]
    return num_layers, shapes, num_layers * layer_elements + config["vocab_size"] * hidden


def bounds(probe: dict[str, float], num_elements: int) -> dict[str, dict[str, float]]:
    """The best a core could do: prefill in bfloat16 products, decode by one pass over the weights."""
    prefill = {"prefill_512": 512 / probe["products_512_s"], "prefill_2048": 2048 / probe["products_2048_s"]}
    read_gbps = max(probe["read_memory_gbps"], probe["read_model_size_gbps"])
    return {
        precision: {**prefill, "tpot_batch_1": num_elements * bits / 8 / read_gbps / 1e6}
        for precision, bits in WEIGHT_BITS.items()
    }


def best_of(probes: list[dict[str, float]]) -> dict[str, float]:
    return {name: (max if name.endswith("_gbps") else min)(probe[name] for probe in probes) for name in probes[0]}


def machine() -> dict[str, Any]:
    lines = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
    facts = {name.strip(): value.strip() for name, _, value in lines}
    flags = facts.get("flags", "").split()
    return {
        "cpu": facts.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "features": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8") if flag in flags],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


@click.command()
@click.option("--engines", default=",".join(ENGINES), show_default=True, help="Comma-separated.")
@click.option("--precisions", default=",".join(PRECISIONS), show_default=True, help="Comma-separated.")
@click.option("--workloads", default=",".join(w.name for w in WORKLOADS), show_default=True, help="Comma-separated.")
@click.option("--rounds", default=3, show_default=True, help="How often everything is measured.")
@click.option("--cpu", default=(os.cpu_count() or 1) - 1, show_default=True, help="The one CPU that every engine uses.")
@click.option("--lock", type=click.Path(path_type=Path), help="A file to lock while something is timed.")
@click.option("--realtime", is_flag=True, help="Engines before all else on their CPU (root, busy machines).")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Also write everything here, raw samples too."
)
def main(
    engines: str,
    precisions: str,
    workloads: str,
    rounds: int,
    cpu: int,
    lock: Path | None,
    realtime: bool,
    json_path: Path | None,
) -> None:
    """Measure, and print one table for each precision."""
    from tokenizers import Tokenizer

    from kvbaton.engine.weights import default_model_dir

    model_dir = default_model_dir()
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    num_layers, shapes, num_elements = weight_shapes(model_dir)
    chosen = [workload for workload in WORKLOADS if workload.name in workloads.split(",")]
    probes: list[dict[str, float]] = []
    with Race(cpu, Windows(tokenizer.encode(TEXT).ids), lock, realtime) as race:
        limits, _ = race.start(
            Path(sys.executable),
            "limits_driver",
            {"model_bytes": 2 * num_elements, "num_layers": num_layers, "linear_shapes": shapes},
        )
        if realtime:
            limits.raise_priority()
        for contender in contenders(engines.split(","), precisions.split(","), model_dir):
            race.join(contender)
        agreement = race.agreement(tokenizer.encode(AGREEMENT_PROMPT).ids)
        for number in range(1, rounds + 1):
            with exclusive(lock):
                probes.append(limits.call({"command": "probe"})["values"])
            for workload in chosen:
                for turn in range(workload.turns):
                    race.measure((number - 1) * workload.turns + turn + 1, workload)
    probe = best_of(probes)
    rows = summarise(race.samples, bounds(probe, num_elements))
    report = {
        "machine": machine(),
        "model": {"name": packaged_gguf().name, "text_sha256": TEXT_SHA256},
        "limits": probe,
        "engines": race.info,
        "failures": race.failures,
        "agreement": {name: tokenizer.decode(ids) for name, ids in agreement.items()},
        "rows": rows,
        "samples": [asdict(sample) for sample in race.samples],
    }
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1))
    for name, info in race.info.items():
        print(f"* {name}: {info['version']}, {info['settings']}")
    print(
        f"* one core: reads {probe['read_memory_gbps']:.1f} GB/s from memory, {probe['read_model_size_gbps']:.1f} GB/s "
        f"in a buffer of the model's size; products of 512 tokens {1e3 * probe['products_512_s']:.0f} ms\n"
    )
    print(markdown(rows))


if __name__ == "__main__":
    main()
