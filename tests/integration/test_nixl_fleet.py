"""A fleet of real processes that hand over by NIXL, beside one that is alone; `make test-nixl`."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.up_process import Up, up
from integration.topologies import random_prompts

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.engine.weights import default_model_dir

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs pip install 'kvbaton[nixl]'"),
]
SPLIT = ("--prefill", "1", "--decode", "1", "--threshold-tokens", "0")


async def answers(fleet: Up, prompts: list[list[int]], decision: str) -> list[str]:
    found = []
    for prompt in prompts:
        status, answer, headers = await fleet.post(prompt=prompt, max_tokens=12, ignore_eos=True)
        assert status == 200, answer
        assert headers["x-kvbaton-decision"] == decision
        found.append(answer["choices"][0]["text"])
    return found


def moved(members: dict[str, dict[str, Any]]) -> int:
    return int(members["decode-0"]["stats"]["transfer_bytes_received"])


@pytest.mark.parametrize("model", ["tiny", "default"])
async def test_tokens_over_nixl_are_those_of_one_process(
    make_tiny_model: Callable[..., Path], tmp_path: Path, model: str
) -> None:
    model_dir = make_tiny_model("llama") if model == "tiny" else default_model_dir()
    tokenizer = Tokenizer.load(model_dir)
    prompts = random_prompts(5, longest=200, vocab_size=tokenizer.vocab_size, seed=3)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with up(model_dir, tmp_path / "one", "--colocated", "1") as alone:
        expected = await answers(alone, prompts, "local_colocated")
    async with up(model_dir, tmp_path / "two", *SPLIT, "--transport", "nixl") as fleet:
        assert await answers(fleet, prompts, "remote") == expected
        num_tokens = sum(map(len, prompts))
        await fleet.until(lambda members: moved(members) >= num_tokens * token_bytes(model_dir))

        os.kill(fleet.pids["prefill-0"], signal.SIGKILL)
        status, answer, _ = await fleet.post(prompt=prompts[0], max_tokens=12, ignore_eos=True, cache_salt="again")
        assert status == 200 and answer["choices"][0]["text"] == expected[0]
        first = (await fleet.members())["prefill-0"]["incarnation"]
        await fleet.until(lambda m: m["prefill-0"]["state"] == "up" and m["prefill-0"]["incarnation"] != first)
        before = moved(await fleet.members())
        status, answer, headers = await fleet.post(prompt=prompts[1], max_tokens=12, ignore_eos=True, cache_salt="back")
        assert (status, headers["x-kvbaton-decision"]) == (200, "remote")
        assert answer["choices"][0]["text"] == expected[1]
        await fleet.until(lambda members: moved(members) > before)


def token_bytes(model_dir: Path) -> int:
    """KV of one token in float32."""
    from kvbaton.engine.model_config import ModelConfig

    config = ModelConfig.from_dir(model_dir)
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
