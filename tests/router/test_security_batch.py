"""What one client asks of the sampler, beside the clients whose answers are computed in the same batch."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

from router.rig import make_rig

# Within every bound of the API, and nothing as a float32 or infinitely much once it divides.
TINY = (1e-320, 1e-46, 1e-38, 1e-8)
HOSTILE: tuple[dict[str, Any], ...] = (
    *({"temperature": each, "min_p": 0.5} for each in TINY),
    *({"temperature": each, "top_p": 1e-320, "top_k": 3} for each in TINY),
    *({"temperature": 1.0, "repetition_penalty": each, "logprobs": 3} for each in TINY),
    *({"temperature": each, "repetition_penalty": each, "min_p": each, "top_p": each} for each in TINY),
    {"temperature": 1e-320, "logit_bias": {str(token): -100 for token in range(260)}, "min_p": 1.0},
    {"temperature": 2.0, "presence_penalty": -2, "frequency_penalty": -2, "repetition_penalty": 1e-320},
)


async def test_numbers_of_one_client_end_nobody_elses_answer(tiny_model_dir: Path) -> None:
    """An error of the sampler was one of the whole batch, and was carried to the next worker with the request."""
    async with make_rig(tiny_model_dir, {"p0": "prefill", "d0": "decode"}, max_replays=0) as rig:
        plain = {"prompt": "a neighbour", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        expected = await rig.expected(plain)
        neighbours = [asyncio.create_task(rig.ask(plain)) for _ in range(3)]
        ways = itertools.cycle((0, 1))
        hostile = [
            {"prompt": "b" * (1 + 40 * next(ways)), "max_tokens": 6, "ignore_eos": True, **each} for each in HOSTILE
        ]
        told = await asyncio.gather(*map(rig.ask, hostile))
        assert [(each.status, each.error, each.done) for each in told] == [(200, None, True)] * len(hostile)
        for answer in await asyncio.gather(*neighbours):
            assert answer.answer == expected.answer
        for worker in rig.workers.values():
            assert worker.stats().num_failed_steps == 0
