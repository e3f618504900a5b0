"""How fast the native kernels run a model on one core, and how far that is from what the core allows.

Prints, for each dtype and weight format: prefill tokens per second of 512 and 2,048 tokens, time per output token
of one sequence, output tokens per second of 8 and 32 sequences (each 512 tokens long), and the limits measured in the
same run: the time the layers' products alone take (prefill), the time reading the packed weights once takes (decode).

Times are the best of several runs in processor time of this thread, so that other work on the machine disturbs little.

    taskset -c 1 python -m benchmarks.kernels --dtype bfloat16 --weights native int8 int4
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvbaton.engine import native
from kvbaton.engine.model import StepInput
from kvbaton.engine.weights import default_model_dir, load_model_dir
from kvbaton.kv.layout import KVLayout

CONTEXT_TOKENS = 512
PREFILL_TOKENS = (512, 2048)
BATCHES = (1, 8, 32)
BLOCK_SIZE = 16
SEED = 0


def make_step(vocab_size: int, lengths: list[int], starts: list[int]) -> StepInput:
    """Rows ``starts[i] .. starts[i] + lengths[i]`` of each sequence, each in blocks of its own."""
    rng = np.random.default_rng(SEED)
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    width = -(-max(ends) // BLOCK_SIZE)
    return StepInput(
        token_ids=rng.integers(0, vocab_size, bounds[-1]).astype(np.int32),
        positions=np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)]).astype(np.int32),
        seq_starts=bounds,
        context_lens=np.array(ends, dtype=np.int32),
        block_table=np.arange(len(lengths) * width, dtype=np.int32).reshape(len(lengths), width),
        sample_rows=bounds[1:] - 1,
    )


def best_s(run: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        begun_s = time.thread_time()
        run()
        best = min(best, time.thread_time() - begun_s)
    return best


def measure(model: native.NativeModel, repeats: int) -> dict[str, float]:
    vocab_size = model.config.vocab_size
    blocks = max(BATCHES) * (CONTEXT_TOKENS // BLOCK_SIZE + 1)
    pool = np.zeros(model.layout.pool_bytes(blocks), dtype=np.uint8)

    def step_s(lengths: list[int], starts: list[int], times: int) -> float:
        step = make_step(vocab_size, lengths, starts)
        return best_s(lambda: model.forward_buffer(step, pool, blocks), times)

    read_s = best_s(model.read_weights, repeats)
    result = {"weight_mb": model.weight_bytes / 1e6, "read_gb_per_s": model.weight_bytes / read_s / 1e9}
    for tokens in PREFILL_TOKENS:
        products_s = best_s(functools.partial(model.run_products, tokens), max(2, repeats // 4))
        prefill_s = step_s([tokens], [0], max(2, repeats // 4))
        result[f"prefill_{tokens}_tok_per_s"] = tokens / prefill_s
        result[f"prefill_{tokens}_products_alone_tok_per_s"] = tokens / products_s
        result[f"prefill_{tokens}_of_limit"] = products_s / prefill_s
    for batch in BATCHES:
        decode_s = step_s([1] * batch, [CONTEXT_TOKENS] * batch, repeats)
        kv_s = batch * CONTEXT_TOKENS * model.layout.token_bytes * read_s / model.weight_bytes
        result[f"decode_{batch}_ms"] = decode_s * 1e3
        result[f"decode_{batch}_tok_per_s"] = batch / decode_s
        result[f"decode_{batch}_limit_ms"] = (read_s + kv_s) * 1e3
        result[f"decode_{batch}_of_limit"] = (read_s + kv_s) / decode_s
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=None, help="Hugging Face directory (default: the default model)")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--weights", nargs="+", default=["native", "int8", "int4"], choices=["native", "int8", "int4"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    arguments = parser.parse_args()
    reason = native.available()
    if reason is not None:
        sys.exit(f"the native kernels cannot run: {reason}")
    config, tensors = load_model_dir(arguments.model or default_model_dir())
    for dtype in arguments.dtype:
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype)
        for weights in arguments.weights:
            model = native.NativeModel(
                config, tensors, layout, dtype=dtype, weights=weights, num_threads=arguments.threads
            )
            result = measure(model, arguments.repeats)
            model.close()
            if arguments.json:
                print(json.dumps({"dtype": dtype, "weights": weights, "engine": model.engine, **result}), flush=True)
                continue
            print(f"{dtype}, weights {weights}, {model.engine}, {arguments.threads} thread(s)")
            for name, value in result.items():
                print(f"  {name:40} {value:10.2f}", flush=True)


if __name__ == "__main__":
    main()
