"""Running a model over a paged pool without an engine: chunks, batches and scattered blocks by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbaton.engine.model import StepInput
from kvbaton.engine.pool import KVPool
from kvbaton.engine.weights import load_model_dir
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.shared_pool import SharedPool


class PagedRunner:
    """One model, one pool, several named sequences; every row of a step yields logits."""

    def __init__(self, model: Any, num_blocks: int, seed: int = 0) -> None:
        self.model = model
        self.layout: KVLayout = model.layout
        self.pool = KVPool(SharedPool.create(self.layout, num_blocks, None, "test"))
        self._free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self.blocks: dict[str, list[int]] = {}
        self.num_tokens: dict[str, int] = {}
        self.layers_seen: list[int] = []

    def step_input(self, fed: Mapping[str, Sequence[int]]) -> StepInput:
        """The step that feeds each named sequence its next tokens."""
        starts, stops = {}, {}
        for name, tokens in fed.items():
            starts[name] = self.num_tokens.get(name, 0)
            stops[name] = self.num_tokens[name] = starts[name] + len(tokens)
            held = self.blocks.setdefault(name, [])
            while len(held) < self.layout.blocks_for(stops[name]):
                held.append(self._free.pop())
        table = np.zeros((len(fed), max(len(self.blocks[name]) for name in fed)), dtype=np.int32)
        for row, name in enumerate(fed):
            table[row, : len(self.blocks[name])] = self.blocks[name]
        counts = [len(tokens) for tokens in fed.values()]
        return StepInput(
            token_ids=np.concatenate([np.asarray(tokens, dtype=np.int32) for tokens in fed.values()]),
            positions=np.concatenate([np.arange(starts[name], stops[name], dtype=np.int32) for name in fed]),
            seq_starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            context_lens=np.asarray([stops[name] for name in fed], dtype=np.int32),
            block_table=table,
            sample_rows=np.arange(sum(counts), dtype=np.int32),
        )

    def step(self, fed: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
        step = self.step_input(fed)
        logits = self.model.forward(step, self.pool, self.layers_seen.append)
        return {
            name: logits[start:stop]
            for name, start, stop in zip(fed, step.seq_starts[:-1], step.seq_starts[1:], strict=True)
        }

    def run(self, tokens: Sequence[int], chunks: Sequence[int], name: str = "a") -> np.ndarray:
        """Logits of every position, the prompt fed in ``chunks``."""
        assert sum(chunks) == len(tokens)
        edges = np.concatenate([[0], np.cumsum(chunks)])
        parts = [self.step({name: tokens[i:j]})[name] for i, j in zip(edges, edges[1:], strict=False)]
        return np.concatenate(parts)

    def greedy(self, prompt: Sequence[int], num_tokens: int, name: str = "a") -> list[int]:
        """The prompt in one chunk, then one token a step."""
        out: list[int] = []
        fed = list(prompt)
        while len(out) < num_tokens:
            out.append(int(self.step({name: fed})[name][-1].argmax()))
            fed = out[-1:]
        return out


MakeRunner = Callable[..., PagedRunner]


@pytest.fixture
def make_runner() -> Iterator[MakeRunner]:
    """``make_runner(path, backend="torch", dtype=..., kv_dtype=..., block_size=..., order=..., num_blocks=...)``."""
    made: list[PagedRunner] = []

    def make(
        path: Path,
        backend: str = "torch",
        dtype: str = "float32",
        kv_dtype: str = "float32",
        block_size: int = 8,
        order: Any = "HND",
        num_blocks: int = 64,
        seed: int = 0,
    ) -> PagedRunner:
        config, weights = load_model_dir(path)
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, kv_dtype, order)
        if backend == "torch":
            from kvbaton.engine.torch_model import TorchModel

            made.append(PagedRunner(TorchModel(config, weights, layout, dtype=dtype), num_blocks, seed))
        else:
            from kvbaton.engine import native

            if native.available() is not None:
                pytest.skip(f"{native.available()}")
            made.append(PagedRunner(native.NativeModel(config, weights, layout, dtype=dtype), num_blocks, seed))
        return made[-1]

    yield make
    for runner in made:
        runner.pool.close()
