"""How heads, MLP and weights are shared by ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.shares import ShareWeights, shares
from kvbaton.engine.weights import load_model_dir
from kvbaton.kv.reshard import HeadRange
from kvbaton.types import LocalError

SMOL = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}  # SmolLM2-135M's heads


def ranges(config: ModelConfig, tp_size: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    return [((s.kv_heads.start, s.kv_heads.stop), (s.heads.start, s.heads.stop)) for s in shares(config, tp_size)]


def test_heads_that_do_not_divide_go_by_groups(make_tiny_model) -> None:
    config = ModelConfig.from_dir(make_tiny_model("llama", **SMOL))
    assert ranges(config, 1) == [((0, 3), (0, 9))]
    assert ranges(config, 2) == [((0, 2), (0, 6)), ((2, 3), (6, 9))]
    assert ranges(config, 3) == [((0, 1), (0, 3)), ((1, 2), (3, 6)), ((2, 3), (6, 9))]
    six = ranges(config, 6)
    assert [kv for kv, _ in six] == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)]
    assert [heads for _, heads in six] == [(0, 2), (2, 3), (3, 5), (5, 6), (6, 8), (8, 9)]
    assert [heads for _, heads in ranges(config, 9)] == [(head, head + 1) for head in range(9)]


@pytest.mark.parametrize("tp_size", [4, 5, 12])
def test_what_cannot_be_shared_is_refused_by_name(make_tiny_model, tp_size: int) -> None:
    config = ModelConfig.from_dir(make_tiny_model("llama", **SMOL))
    with pytest.raises(LocalError, match=str(tp_size)) as caught:
        shares(config, tp_size)
    assert caught.value.field == "tp"


def test_the_real_models_heads_are_shared_two_to_one(default_model_path: Path) -> None:
    config = ModelConfig.from_dir(default_model_path)
    assert [share.kv_heads for share in shares(config, 2)] == [HeadRange(0, 2), HeadRange(2, 3)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tp_size", [2, 3])
def test_the_parts_are_the_whole(make_tiny_model, family: str, tp_size: int) -> None:
    """Every number of a cut tensor is on one rank, biases of sums on the first, all else everywhere."""
    changes = {**SMOL, "intermediate_size": 97, "attention_bias": True, "mlp_bias": True}
    config, weights = load_model_dir(make_tiny_model(family, **changes))
    parts = [ShareWeights(weights, config, share) for share in shares(config, tp_size)]
    assert all(set(part) == set(weights) and len(part) == len(weights) for part in parts)
    for name in weights:
        got, kind = [part[name] for part in parts], name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            assert np.array_equal(np.concatenate(got), weights[name]), name
        elif kind in ("o_proj", "down_proj") and name.endswith("weight"):
            assert np.array_equal(np.concatenate(got, axis=1), weights[name]), name
        elif kind in ("o_proj", "down_proj"):
            assert np.array_equal(sum(got), weights[name]), name
        else:
            assert all(np.array_equal(part, weights[name]) for part in got), name
