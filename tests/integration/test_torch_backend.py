"""Whole workers on plain torch: a shape that the kernels refuse, and the two-pool way of an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from integration.topologies import Fleet, Topology, random_prompts

from kvbaton.types import SamplingParams

SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SPLIT = [Topology("1P1D shm", num_prefill=1), Topology("1P1D tcp", num_prefill=1, transport="tcp")]


@pytest.mark.parametrize("topology", [Topology("colocated"), *SPLIT], ids=lambda topology: topology.name)
async def test_a_head_dim_that_only_torch_runs_gives_transformers_tokens(
    make_tiny_model: Callable[..., Path], topology: Topology
) -> None:
    from transformers import AutoModelForCausalLM

    path = make_tiny_model("llama", head_dim=24)
    prompts = random_prompts(12, 150, 320, seed=5)
    async with Fleet(topology, path, num_blocks=128, dtype="float32") as fleet:
        assert all(w.loaded.backend.startswith("torch") for w in (*fleet.prefill, *fleet.decode))
        answers = await fleet.run(prompts, SAMPLING)
        await fleet.check_empty()
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        assert answer.token_ids == logits.argmax(dim=1).tolist()
        assert answer.path == ("remote" if topology.num_prefill else "local")


@pytest.mark.parametrize("topology", SPLIT, ids=lambda topology: topology.name)
@pytest.mark.parametrize("device", ["cpu:0", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device"))])  # fmt: skip
async def test_a_pool_of_the_devices_own_is_staged_right(tiny_model_dir: Path, topology: Topology, device: str) -> None:
    """ "cpu:0" is a device whose pool is not the host's, as an accelerator's. Prompts grow, so that every hand-off but
    the first finds a part of its prefix on the decode side, which the host's pool there never saw."""
    whole = random_prompts(2, 200, 320, seed=9)[-1]
    prompts = [whole[:length] for length in (40, 41, 90, 90, 170, len(whole))]
    async with Fleet(Topology("colocated"), tiny_model_dir, dtype="float32", backend="torch", device="cpu") as fleet:
        expected = [(await fleet.run([prompt], SAMPLING))[0].token_ids for prompt in prompts]
    async with Fleet(topology, tiny_model_dir, dtype="float32", backend="torch", device=device) as fleet:
        assert all(w.loaded.pool.device_tensor is not None for w in (*fleet.prefill, *fleet.decode))
        for prompt, tokens in zip(prompts, expected, strict=True):
            (answer,) = await fleet.run([prompt], SAMPLING)
            assert (answer.path, answer.token_ids) == ("remote", tokens)
        assert fleet.decode[0].engine.stats().num_cached_tokens > 0
        # What decode itself computed is in its device's pool only: a prompt that goes on from an answer needs it.
        longer = [*prompts[0], *expected[0], *expected[0]]
        (answer,) = await fleet.run([longer], SAMPLING)
        await fleet.check_empty()
    async with Fleet(Topology("colocated"), tiny_model_dir, dtype="float32", backend="torch", device="cpu") as fleet:
        assert (await fleet.run([longer], SAMPLING))[0].token_ids == answer.token_ids
