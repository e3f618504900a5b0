"""What the hardware allows one core: how fast it reads memory, and how fast it multiplies bfloat16 matrices.

Speaks the driver protocol with one more command, ``probe``. Two limits follow for a model: decode cannot be faster than
its weights can be read once a step, prefill not faster than the products of its linear layers alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.peers.driver import Timeline, serve

MEMORY_BYTES = 1 << 30  # well beyond any cache that is ours alone


def _best_s(run: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        begun_s = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begun_s)
    return best


class LimitsDriver:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(1)
        self._buffer = torch.ones(MEMORY_BYTES // 4)
        self._model_bytes = int(options["model_bytes"])
        self._num_layers = int(options["num_layers"])
        generator = torch.Generator().manual_seed(0)
        shapes: list[tuple[int, int]] = [tuple(shape) for shape in options["linear_shapes"]]  # (out, in), one layer
        self._inputs = sorted({columns for _, columns in shapes})
        # Every layer has weights of its own, packed once, as an engine would hold them.
        self._weights = [
            [self._pack(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]
            for _ in range(self._num_layers)
        ]
        return {"version": torch.__version__, "settings": "oneDNN, packed weights"}

    @staticmethod
    def _pack(weight: torch.Tensor) -> tuple[torch.Tensor, int]:
        return torch.ops.mkldnn._reorder_linear_weight(weight, 512), weight.shape[1]

    def _products_s(self, num_tokens: int) -> float:
        rows = {columns: torch.randn(num_tokens, columns).bfloat16() for columns in self._inputs}

        def run() -> None:
            for layer in self._weights:
                for weight, columns in layer:
                    torch.ops.mkldnn._linear_pointwise(rows[columns], weight, None, "none", [], "")

        with torch.inference_mode():
            return _best_s(run, 3)

    def _read_gbps(self, num_bytes: int) -> float:
        view = self._buffer[: num_bytes // 4]
        # A dot product with itself streams the buffer once with the widest loads the library has.
        return num_bytes / _best_s(lambda: torch.dot(view, view), 5) / 1e9

    def probe(self) -> dict[str, float]:
        return {
            "read_memory_gbps": self._read_gbps(MEMORY_BYTES),
            "read_model_size_gbps": self._read_gbps(min(self._model_bytes, MEMORY_BYTES)),
            "products_512_s": self._products_s(512),
            "products_2048_s": self._products_s(2048),
        }

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        raise NotImplementedError("the limits generate nothing")


if __name__ == "__main__":
    serve(LimitsDriver)
