"""One target under a coverage-guided fuzzer (atheris, which is libFuzzer for Python), in a process of its own.

``python -m tests.fuzz.guided NAME --inputs N --folder DIR``. What an input raises is kept once for each place it is
raised at, and the next input follows. An input that takes too long is a find too; one that never ends, and memory
beyond a bound, end the process. Memory is looked at after a fifth of the inputs and at the end. Atheris ends the
process itself, so the result is written when the last input has run.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from pathlib import Path
from random import Random

import atheris
import psutil

DEADLINE_S = 20  # of one input, of this process's own time
STUCK_S = 1200  # by the clock, which goes on while the process is stopped
RSS_LIMIT_MIB = 2048
MOST_FINDS = 50


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the simulation's loop
    with atheris.instrument_imports(include=["kvbaton", "gguf", "uvicorn", "prometheus_client"]):
        from .plain import Find, try_one
        from .table import all_targets

        target = next(each for each in all_targets() if each.name == options.name)
        work, corpus = options.folder / "work", options.folder / "corpus"
        work.mkdir(parents=True)
        corpus.mkdir()
        run = target.prepare(work)
    for number, data in enumerate(target.seeds()):
        (corpus / f"{number:04}").write_bytes(data)
    process, began_s = psutil.Process(), time.monotonic()
    done, at_first = 0, 0
    finds: dict[str, Find] = {}

    def one(data: bytes) -> None:
        nonlocal done, at_first
        done += 1
        begun_s = time.process_time()
        find = try_one(run, data)
        if find is None and time.process_time() - begun_s > DEADLINE_S:
            find = Find("too slow", data, f"more than {DEADLINE_S} s of this process")
        if find is not None and find.where not in finds and len(finds) < MOST_FINDS:
            finds[find.where] = find
            (options.folder / f"crash-{len(finds)}").write_bytes(data)
            print(find, file=sys.stderr)
        if done == options.inputs // 5:
            gc.collect()
            at_first = process.memory_info().rss
        if done == options.inputs:
            gc.collect()
            grown = process.memory_info().rss - at_first
            told = {"inputs": done, "seconds": time.monotonic() - began_s, "grown_bytes": grown}
            (options.folder / "result.json").write_text(json.dumps(told))

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        if seed % 3:
            changed = target.change(data, Random(seed))
            if len(changed) <= max_size:
                return changed
        return bytes(atheris.Mutate(data, max_size))

    flags = [
        f"-runs={options.inputs + 1}", f"-timeout={STUCK_S}", f"-rss_limit_mb={RSS_LIMIT_MIB}",
        f"-seed={options.seed}", "-max_len=16384", f"-artifact_prefix={options.folder}/", "-verbosity=0",
        "-print_final_stats=0", str(corpus),
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *flags], one, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
