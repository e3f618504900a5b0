"""The correctness bar of the house: any topology gives the same tokens, and the reference implementation's tokens.

Greedy. In float32 the tokens equal those of transformers on the same weights; in bfloat16 the topologies equal each
other. Every
disaggregated case also asserts that exactly the KV bytes of the formula moved, block-rounded, and that nothing is held
at the end.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from integration.topologies import Answer, Fleet, Topology, random_prompts, text_prompts

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.engine.weights import default_model_dir
from kvbaton.types import SamplingParams

COLOCATED = Topology("2 colocated", num_decode=2)
SINGLE = Topology("single process, one request at a time", num_concurrent=1)
SPLIT = [
    Topology("1P1D shm", num_prefill=1),
    Topology("2P2D shm", num_prefill=2, num_decode=2),
    Topology("1P1D tcp", num_prefill=1, transport="tcp"),
    Topology("1P1D shm, blocks of 32 to 16, chunks of 192", 1, 1, "shm", 32, 16, 192),
    Topology("1P1D tcp, blocks of 16 to 48", 1, 1, "tcp", 16, 48),
]


def check_bytes(topology: Topology, answers: list[Answer], token_bytes: int) -> None:
    """KV bytes of the formula: tokens, rounded up to what a transport moves at once."""
    for answer in answers:
        if topology.num_prefill == 0:
            assert answer.path == "local" and answer.transfer_bytes == 0
            continue
        assert answer.path == "remote"
        assert answer.num_remote_tokens == answer.num_prompt_tokens
        blocks = -(-answer.num_prompt_tokens // topology.prefill_block_size)
        assert answer.transfer_bytes == blocks * topology.prefill_block_size * token_bytes, topology.name


async def tokens_of(
    topology: Topology, model_dir: Path, prompts: list[list[int]], sampling: SamplingParams, **load_options: object
) -> list[list[int]]:
    async with Fleet(topology, model_dir, **load_options) as fleet:
        answers = await fleet.run(prompts, sampling)
        await fleet.check_empty()
        token_bytes = fleet.decode[0].layout.token_bytes
    check_bytes(topology, answers, token_bytes)
    assert all(answer.finish_reason == "length" for answer in answers)
    return [answer.token_ids for answer in answers]


def reference_tokens(model_dir: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # threads that wait for each other are slow where cores are shared
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    outputs = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            outputs.append(out[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_topologies_agree_on_a_small_model(tiny_model_dir: Path, dtype: str) -> None:
    prompts = random_prompts(24, longest=300, vocab_size=Tokenizer.load(tiny_model_dir).vocab_size, seed=1)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    options = {"dtype": dtype, "num_blocks": 256}
    expected = await tokens_of(SINGLE, tiny_model_dir, prompts, sampling, **options)
    if dtype == "float32":
        assert expected == reference_tokens(tiny_model_dir, prompts, 8)
    for topology in (COLOCATED, *SPLIT):
        small = replace(topology, max_batch_tokens=min(topology.max_batch_tokens, 96))
        assert await tokens_of(small, tiny_model_dir, prompts, sampling, **options) == expected, topology.name


async def test_the_real_model_equals_the_reference() -> None:
    model_dir = default_model_dir()
    prompts = text_prompts(6, longest=400, tokenizer=Tokenizer.load(model_dir), seed=2)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    options = {"dtype": "float32", "num_blocks": 256}
    expected = reference_tokens(model_dir, prompts, 8)
    assert await tokens_of(COLOCATED, model_dir, prompts, sampling, **options) == expected
    assert await tokens_of(SPLIT[0], model_dir, prompts, sampling, **options) == expected


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_two_hundred_prompts_in_every_topology(dtype: str) -> None:
    """1 to 3,000 tokens of real text. KVBATON_EQUALITY_PROMPTS changes how many."""
    model_dir = default_model_dir()
    num_prompts = int(os.environ.get("KVBATON_EQUALITY_PROMPTS", "200"))
    prompts = text_prompts(num_prompts, longest=3000, tokenizer=Tokenizer.load(model_dir), seed=3)
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    expected = await tokens_of(SINGLE, model_dir, prompts, sampling, dtype=dtype)
    if dtype == "float32":
        assert expected == reference_tokens(model_dir, prompts, 16)
    for topology in (COLOCATED, *SPLIT):
        assert await tokens_of(topology, model_dir, prompts, sampling, dtype=dtype) == expected, topology.name
