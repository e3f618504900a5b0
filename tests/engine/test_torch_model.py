from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbaton.engine.torch_model import TorchModel
from kvbaton.engine.weights import load_model_dir
from kvbaton.kv.layout import KVLayout
from kvbaton.types import LocalError

MakeRunner = Callable[..., Any]


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 320, count).tolist()


def test_sequences_of_a_batch_do_not_meet(tiny_model_dir: Path, make_runner: MakeRunner) -> None:
    """Decodes and prefill chunks of several sequences in one step give what each gives alone.

    As near as float32 products in another order are: 1e-5 of logits of size 3 holds on one processor, not on the next.
    Another sequence's key or row would move them by more than a hundredth.
    """
    lengths = {"a": 45, "b": 1, "c": 17, "d": 8}
    alone = {
        name: make_runner(tiny_model_dir).run(tokens(n + 3, seed=n), [n, 1, 1, 1], name) for name, n in lengths.items()
    }
    together = make_runner(tiny_model_dir, seed=5)
    together.step({"a": tokens(48, 45)[:45], "c": tokens(20, 17)[:5]})
    found = together.step({"a": [tokens(48, 45)[45]], "c": tokens(20, 17)[5:17], "b": tokens(4, 1)[:1]})
    np.testing.assert_allclose(found["a"], alone["a"][45:46], atol=1e-4)
    np.testing.assert_allclose(found["c"], alone["c"][5:17], atol=1e-4)
    np.testing.assert_allclose(found["b"], alone["b"][:1], atol=1e-4)
    found = together.step({"d": tokens(11, 8)[:8], "b": [tokens(4, 1)[1]], "a": [tokens(48, 45)[46]]})
    for name, start in (("d", 0), ("b", 1), ("a", 46)):
        np.testing.assert_allclose(found[name], alone[name][start : start + len(found[name])], atol=1e-4)


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_layout_does_not_change_the_result(
    block_size: int, order: str, tiny_model_dir: Path, make_runner: MakeRunner
) -> None:
    expected = make_runner(tiny_model_dir).run(tokens(60), [33, 27])
    found = make_runner(tiny_model_dir, block_size=block_size, order=order).run(tokens(60), [33, 27])
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("kv_dtype", "limit"), [("bfloat16", 0.02), ("float16", 0.002), ("float8_e4m3", 0.15)])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_narrow_kv_is_near(
    kv_dtype: str, limit: float, order: str, tiny_model_dir: Path, make_runner: MakeRunner
) -> None:
    expected = make_runner(tiny_model_dir).run(tokens(60), [60])
    found = make_runner(tiny_model_dir, kv_dtype=kv_dtype, order=order).run(tokens(60), [33, 1, 26])
    error = np.sqrt(((found - expected) ** 2).mean()) / expected.std()
    assert 0 < error < limit


def test_keys_and_values_lie_where_the_layout_says(tiny_model_dir: Path, make_runner: MakeRunner) -> None:
    """Layer 0's value of one token is a plain product, so its bytes in the pool can be foretold."""
    runner = make_runner(tiny_model_dir)
    runner.run(tokens(20), [13, 7])
    _, weights = load_model_dir(tiny_model_dir)
    hidden = weights["model.embed_tokens.weight"][tokens(20)[17]]
    normed = hidden / np.sqrt((hidden**2).mean() + 1e-5) * weights["model.layers.0.input_layernorm.weight"]
    expected = (weights["model.layers.0.self_attn.v_proj.weight"] @ normed).reshape(2, 16)
    layout, block = runner.layout, runner.blocks["a"][17 // 8]
    start = layout.offset(0, block, runner.pool.num_blocks)
    region = runner.pool.buffer[start : start + layout.layer_block_bytes].view(np.float32).reshape(2, 2, 8, 16)
    np.testing.assert_allclose(region[1, :, 17 % 8], expected, atol=1e-5)


def test_what_other_sequences_left_in_the_pool_does_not_matter(tiny_model_dir: Path, make_runner: MakeRunner) -> None:
    expected = make_runner(tiny_model_dir).run(tokens(30), [30])
    runner = make_runner(tiny_model_dir)
    runner.pool.buffer[:] = 0xFF  # every float32 a NaN
    np.testing.assert_array_equal(runner.run(tokens(30), [30]), expected)


def test_float8_saturates_instead_of_turning_into_nan(
    make_tiny_model: Callable[..., Path], make_runner: MakeRunner
) -> None:
    runner = make_runner(make_tiny_model("qwen2"), kv_dtype="float8_e4m3")
    key = torch.tensor([1e6, -1e6, 448.0, 0.0] * 8).view(1, 2, 16)
    pool = runner.model._pool_view(runner.pool)[0]
    runner.model._store(pool, (torch.tensor([3]), torch.tensor([5])), key, key)
    stored = runner.model._gather(pool, torch.tensor([3]))[0, :, 5]
    assert stored.flatten().tolist() == [448.0, -448.0, 448.0, 0.0] * 8


def test_layer_hook_comes_when_the_layers_keys_are_in_the_pool(tiny_model_dir: Path, make_runner: MakeRunner) -> None:
    runner = make_runner(tiny_model_dir)
    filled: list[list[bool]] = []

    def look(layer: int) -> None:
        blocks = runner.pool.buffer.view(np.float32).reshape(3, runner.pool.num_blocks, -1)
        filled.append([bool(blocks[one, runner.blocks["a"][0]].any()) for one in range(3)])

    runner.model.forward(runner.step_input({"a": tokens(8)}), runner.pool, look)
    assert filled == [[True, False, False], [True, True, False], [True, True, True]]


def test_only_the_rows_asked_for(tiny_model_dir: Path, make_runner: MakeRunner) -> None:
    runner = make_runner(tiny_model_dir)
    step = runner.step_input({"a": tokens(9), "b": tokens(4)})
    everything = runner.model.forward(step, runner.pool)
    for rows in ([], [8], [12, 8]):
        some = runner.model.forward(replace(step, sample_rows=np.asarray(rows, dtype=np.int32)), runner.pool)
        assert some.shape == (len(rows), 320) and some.dtype == np.float32
        np.testing.assert_allclose(some, everything[rows], atol=1e-5)


def test_unknown_dtype_is_refused_by_name(tiny_model_dir: Path) -> None:
    config, weights = load_model_dir(tiny_model_dir)
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, 8, "float32")
    with pytest.raises(LocalError, match="int7.*float32, bfloat16"):
        TorchModel(config, weights, layout, dtype="int7")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_equals_cpu(tiny_model_dir: Path, make_runner: MakeRunner) -> None:
    from kvbaton.engine.pool import KVPool
    from kvbaton.kv.shared_pool import SharedPool

    expected = make_runner(tiny_model_dir)
    config, weights = load_model_dir(tiny_model_dir)
    model = TorchModel(config, weights, expected.layout, dtype="float32", device="cuda")
    pool = KVPool(SharedPool.create(expected.layout, expected.pool.num_blocks, None, "test"), device="cuda")
    step = expected.step_input({"a": tokens(40), "b": tokens(7)})
    np.testing.assert_allclose(model.forward(step, pool), expected.model.forward(step, expected.pool), atol=1e-4)
    pool.stage_out(1, expected.blocks["a"])
    start = expected.layout.offset(1, expected.blocks["a"][0], pool.num_blocks)
    stop = start + expected.layout.layer_block_bytes
    np.testing.assert_allclose(
        pool.buffer[start:stop].view(np.float32), expected.pool.buffer[start:stop].view(np.float32), atol=1e-4
    )
    pool.close()
