"""A model computed by several ranks: as threads of this process, where the arithmetic counts, and as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from kvbaton.engine.loader import LoadOptions, load
from kvbaton.engine.model import StepInput
from kvbaton.engine.pool import KVPool
from kvbaton.engine.rank_model import RankModel
from kvbaton.engine.shares import shares
from kvbaton.engine.torch_model import TorchModel
from kvbaton.engine.weights import load_model_dir
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.rank_pools import rank_layout
from kvbaton.kv.shared_pool import SharedPool, sweep_stale
from kvbaton.types import LocalError

NUM_BLOCKS = 32
SMOL = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}


class ThreadSums:
    """The sum of what as many threads bring."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=30)
        self._brought: list[Tensor] = []
        self._lock = threading.Lock()

    def add(self, tensor: Tensor) -> None:
        with self._lock:
            self._brought.append(tensor.clone())
        self._barrier.wait()
        total = self._brought[0]
        for part in self._brought[1:]:
            total = total + part
        self._barrier.wait()
        tensor.copy_(total)
        if self._barrier.wait() == 0:
            self._brought.clear()
        self._barrier.wait()


class Ranks:
    """All ranks of a model, each a thread with a pool of its own, beside the whole model."""

    def __init__(self, path: Path, tp_size: int, dtype: str = "float32") -> None:
        config, weights = load_model_dir(path)
        layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, 8, dtype)
        self.shares = shares(config, tp_size)
        sums = ThreadSums(tp_size)
        self.models, self.pools = [], []
        for share in self.shares:
            own = rank_layout(layout, share.kv_heads)
            self.models.append(RankModel(config, weights, share, own, dtype))
            self.models[-1].sums = sums
            self.pools.append(KVPool(SharedPool.create(own, NUM_BLOCKS)))
        self.whole = TorchModel(config, weights, layout, dtype)
        self.pool = KVPool(SharedPool.create(layout, NUM_BLOCKS))
        self.in_place: list[tuple[int, list[bool]]] = []  # by layer, whether each rank had it then

    def heads_of(self, pool: KVPool) -> np.ndarray:
        array = pool.buffer.view({4: np.float32, 2: np.uint16}[pool.layout.itemsize])
        return array.reshape(pool.layout.shape(NUM_BLOCKS))

    def run(self, step: StepInput) -> tuple[list[np.ndarray], np.ndarray]:
        """Logits of each rank, and of the whole model."""
        want = self.whole.forward(step, self.pool)

        def on_layer(layer: int) -> None:
            blocks = step.block_table[0]
            wrote = [bool(self.heads_of(pool)[layer, blocks[0], 0, :, 0].any()) for pool in self.pools]
            self.in_place.append((layer, wrote))

        with ThreadPoolExecutor(len(self.models)) as threads:
            futures = [
                threads.submit(model.forward, step, pool, on_layer if rank == 0 else None)
                for rank, (model, pool) in enumerate(zip(self.models, self.pools, strict=True))
            ]
            return [future.result(60) for future in futures], want

    def close(self) -> None:
        for pool in (self.pool, *self.pools):
            pool.close()


def one_sequence(tokens: list[int], start: int, stop: int, blocks: list[int]) -> StepInput:
    return StepInput(
        token_ids=np.asarray(tokens[start:stop], dtype=np.int32),
        positions=np.arange(start, stop, dtype=np.int32),
        seq_starts=np.asarray([0, stop - start], dtype=np.int32),
        context_lens=np.asarray([stop], dtype=np.int32),
        block_table=np.asarray([blocks], dtype=np.int32),
        sample_rows=np.arange(stop - start, dtype=np.int32),
    )


@pytest.mark.parametrize(
    ("family", "changes", "tp_size"),
    [
        ("llama", {}, 2),
        ("llama", {}, 4),
        ("llama", {**SMOL, "attention_bias": True, "mlp_bias": True, "intermediate_size": 97}, 2),
        ("llama", SMOL, 6),
        ("qwen2", SMOL, 3),
        ("qwen3", {}, 2),
        ("mistral", {"sliding_window": 12}, 2),
    ],
)
def test_the_ranks_together_are_the_model(make_tiny_model, family: str, changes: dict, tp_size: int) -> None:
    """In float32, in chunks and then a token at a time: logits, and the KV of each rank's heads."""
    ranks = Ranks(make_tiny_model(family, **changes), tp_size)
    tokens = np.random.default_rng(3).integers(0, 300, 45).tolist()
    blocks = [5, 9, 2, 17, 11, 30]
    for start, stop in ((0, 20), (20, 41), (41, 42), (42, 43), (43, 45)):
        got, want = ranks.run(one_sequence(tokens, start, stop, blocks))
        for logits in got:
            np.testing.assert_allclose(logits, want, rtol=0, atol=2e-4 * np.abs(want).max())
    whole = ranks.heads_of(ranks.pool)
    for share, pool in zip(ranks.shares, ranks.pools, strict=True):
        own = whole[:, :, :, share.kv_heads.start : share.kv_heads.stop]
        np.testing.assert_allclose(ranks.heads_of(pool), own, rtol=0, atol=1e-4 * np.abs(own).max())
    ranks.close()


def test_a_layer_is_told_of_when_every_rank_has_it(make_tiny_model) -> None:
    ranks = Ranks(make_tiny_model("llama", **SMOL), 3)
    ranks.run(one_sequence(list(range(40, 56)), 0, 16, [7, 3]))
    assert ranks.in_place == [(layer, [True] * 3) for layer in range(3)]
    ranks.close()


def test_bfloat16_is_summed_in_float32(make_tiny_model) -> None:
    ranks = Ranks(make_tiny_model("llama"), 2, dtype="bfloat16")
    got, want = ranks.run(one_sequence(list(range(40, 56)), 0, 16, [7, 3]))
    for logits in got:
        np.testing.assert_allclose(logits, want, rtol=0, atol=0.05 * np.abs(want).max())
    ranks.close()


# -- processes


def options(path: Path, **changes: object) -> LoadOptions:
    return LoadOptions(model_dir=path, dtype="float32", num_kv_blocks=NUM_BLOCKS, block_size=8, **changes)


def gone(pid: int) -> bool:
    """Dead and waited for."""
    return not Path(f"/proc/{pid}").exists()


def test_ranks_are_processes_that_end_with_their_worker(make_tiny_model) -> None:
    """One start for several questions, for each costs seconds: steps, a rank that dies, what is told, what is left."""
    path = make_tiny_model("llama", **SMOL)
    loaded = load(options(path, tp=2), shared="needed")
    assert loaded.ranks is not None and loaded.fingerprint.tp_size == 2 and loaded.fingerprint.num_kv_heads == 3
    (pid,) = loaded.ranks.pids
    names = [pool.name for pool in loaded.pool.whole.pools]
    alone = load(options(path, backend="torch"))
    step = one_sequence(list(range(40, 56)), 0, 16, [7, 3])
    layers: list[int] = []
    got = loaded.model.forward(step, loaded.pool, layers.append)
    want = alone.model.forward(step, alone.pool)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-4 * np.abs(want).max())
    assert layers == [0, 1, 2]
    second = loaded.pool.whole.pools[1]  # written by the other process
    whole = alone.pool.buffer.view(np.float32).reshape(alone.pool.layout.shape(NUM_BLOCKS))
    own = second.buffer.view(np.float32).reshape(second.layout.shape(NUM_BLOCKS))
    np.testing.assert_allclose(own, whole[:, :, :, 2:3], rtol=0, atol=1e-4)
    loaded.pool.publish_generation(7, 41)
    assert [pool.generations[7] for pool in loaded.pool.whole.pools] == [41, 41]

    lost = threading.Event()
    loaded.ranks.watch(lost.set)
    os.kill(pid, signal.SIGKILL)
    assert lost.wait(30)
    with pytest.raises(LocalError, match="rank 1 was ended by signal 9"):
        loaded.model.forward(step, loaded.pool)
    loaded.ranks.close()
    loaded.ranks.close()
    assert gone(pid)
    loaded.pool.whole.unlink()
    assert not [name for name in names if Path("/dev/shm", name).exists()]
    loaded.pool.close()
    alone.pool.close()


def runs(pid: int) -> bool:
    """Not gone, and not a dead process that nobody has waited for."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


WORKER = """
import pathlib, sys, time
from kvbaton.engine.loader import LoadOptions, load
loaded = load(LoadOptions(model_dir=pathlib.Path(sys.argv[1]), dtype="float32", num_kv_blocks=32, tp=3), sys.argv[2])
print(*loaded.ranks.pids, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_ranks_end_when_rank_0_is_killed(make_tiny_model) -> None:
    """They have no chance to be told; the names of the pools go with the next worker's start."""
    incarnation = f"killed-{os.getpid()}"
    arguments = [sys.executable, "-c", WORKER, str(make_tiny_model("llama", **SMOL)), incarnation]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        pids = [int(pid) for pid in worker.stdout.readline().split()]
        assert len(pids) == 2
        assert len(list(Path("/dev/shm").glob(f"kvbaton-{incarnation}-kv*"))) == 3
        worker.kill()
    deadline_s = time.monotonic() + 60
    while any(map(runs, pids)):
        assert time.monotonic() < deadline_s, "a rank outlived its worker"
        time.sleep(0.02)
    assert len([name for name in sweep_stale() if incarnation in name]) == 3


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tp": 4}, "tp"),
        ({"tp": 2, "backend": "native"}, "backend"),
        ({"tp": 2, "weights": "int8"}, "weights"),
        ({"tp": 2, "device": "cuda"}, "device"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_anything_starts(make_tiny_model, changes: dict, field: str) -> None:
    before = set(Path("/dev/shm").glob("kvbaton-*-kv*"))
    with pytest.raises(LocalError) as caught:
        load(options(make_tiny_model("llama", **SMOL), **changes), incarnation=f"refused-{os.getpid()}")
    assert caught.value.field == field
    assert not [
        path for path in set(Path("/dev/shm").glob("kvbaton-*-kv*")) - before if f"-{os.getpid()}-" in path.name
    ]


@pytest.mark.parametrize("changes", [{"tp": 0}, {"tp_deadline_s": 0.0}])
def test_numbers_that_make_no_sense(changes: dict) -> None:
    with pytest.raises(LocalError) as caught:
        LoadOptions(**changes)
    assert caught.value.field in changes
