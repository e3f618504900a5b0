"""Workers of several ranks give the tokens of a single process, hand off to any other number of ranks, and end whole.

Ranks are real processes. Every hand-off also asserts that exactly the KV bytes of the formula moved: block-rounded on
the prefill side, the heads of each rank of the decode side.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from integration.topologies import Answer, ask, random_prompts, text_prompts

from kvbaton.engine.engine import EngineConfig
from kvbaton.engine.loader import LoadOptions
from kvbaton.engine.scheduler import SchedulerConfig
from kvbaton.engine.shares import shares
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.engine.weights import default_model_dir
from kvbaton.kv.tier import TierOptions
from kvbaton.transfer.errors import HandoffError
from kvbaton.transfer.options import HandoffOptions
from kvbaton.types import GenerateRequest, KvbatonError, LocalError, SamplingParams
from kvbaton.workers.native import NativeWorker, WorkerOptions
from kvbaton.workers.protocol import PeerAddress

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SMOL = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, "head_dim": 16}


class Workers:
    """Made when asked for, ended together; each can prefill and decode."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Workers:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def start(self, tp: int, block_size: int = 16, transport: str = "auto", **changes: object) -> NativeWorker:
        load = LoadOptions(
            model_dir=self._model_dir,
            dtype="float32",
            block_size=block_size,
            num_kv_blocks=4096 // block_size,
            tp=tp,
            **changes,
        )
        engine = EngineConfig(scheduler=SchedulerConfig(max_batch_tokens=96, max_running=32))
        worker = NativeWorker(load, engine, WorkerOptions(handoff=HandoffOptions(transport=transport)))
        self._stack.push_async_callback(worker.stop)
        await worker.start()
        return worker


async def answers_of(
    decode: NativeWorker,
    prefill: NativeWorker | None,
    prompts: list[list[int]],
    name: str,
    sampling: SamplingParams = GREEDY,
) -> list[Answer]:
    """All at once, so that prompts are prefilled in chunks beside one another's decodes."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(ask(decode, prefill, prompt, sampling, f"{name}-{index}"))
            for index, prompt in enumerate(prompts)
        ]
    for worker in (decode, prefill):
        if worker is not None:
            await worker.check_empty()
            await worker_cleared(worker)
    return [task.result() for task in tasks]


async def worker_cleared(worker: NativeWorker) -> None:
    """So that the next pair moves everything anew."""
    await asyncio.wrap_future(worker.engine.call(lambda engine: engine.clear_cache()))


def formula_bytes(prefill: NativeWorker, decode: NativeWorker, num_tokens: int) -> int:
    """Blocks of the prefill side, and of each all KV heads that each rank of the decode side holds."""
    held = shares(decode.loaded.config, decode.fingerprint.tp_size)
    layout = prefill.layout
    head_bytes = 2 * layout.num_layers * layout.head_dim * layout.itemsize  # of one token
    num_heads = sum(share.kv_heads.num_heads for share in held)
    return layout.blocks_for(num_tokens) * layout.block_size * head_bytes * num_heads


async def check_pair(
    prefill: NativeWorker,
    decode: NativeWorker,
    prompts: list[list[int]],
    expected: list[list[int]],
    name: str,
    sampling: SamplingParams = GREEDY,
) -> None:
    answers = await answers_of(decode, prefill, prompts, name, sampling)
    assert [answer.token_ids for answer in answers] == expected, name
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.path == "remote" and answer.num_remote_tokens == len(prompt), name
        assert answer.transfer_bytes == formula_bytes(prefill, decode, len(prompt)), name


async def test_pools_of_one_and_two_ranks_hand_off_to_each_other(make_tiny_model: Callable[..., Path]) -> None:
    """Case KV-01: 2 to 1, 1 to 2 and 2 to 2, shared memory and TCP, blocks of 16 and 32, heads shared two to one."""
    model_dir = make_tiny_model("llama", **SMOL)
    prompts = random_prompts(6, longest=300, vocab_size=Tokenizer.load(model_dir).vocab_size, seed=5)
    async with Workers(model_dir) as workers:
        one = await workers.start(1)
        two, other = await asyncio.gather(workers.start(2), workers.start(2, block_size=32, transport="tcp"))
        assert two.identity.shm_name is not None and other.identity.shm_name is None
        expected = [answer.token_ids for answer in await answers_of(one, None, prompts, "single")]
        for name, worker in (("two", two), ("other", other)):
            got = [answer.token_ids for answer in await answers_of(worker, None, prompts, name)]
            assert got == expected, name
        pairs = {"2>1": (two, one), "1>2": (one, two), "2>2 tcp": (two, other), "2>2 back": (other, two)}
        pairs |= {"2>1 tcp": (other, one), "1>2 tcp": (one, other)}
        for name, (prefill, decode) in pairs.items():
            await check_pair(prefill, decode, prompts, expected, name)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_pools_of_unlike_layouts_hand_off_to_each_other(
    make_tiny_model: Callable[..., Path], transport: str
) -> None:
    """Blocks of 16 and 24, either order of heads and tokens, one rank and two; real engines on both sides."""
    model_dir = make_tiny_model("llama", **SMOL)
    prompts = random_prompts(6, longest=300, vocab_size=Tokenizer.load(model_dir).vocab_size, seed=6)
    async with Workers(model_dir) as workers:
        plain = await workers.start(1, transport=transport)
        turned = await workers.start(1, 24, transport, kv_order="NHD")
        shared = await workers.start(2, 24, transport, kv_order="NHD")
        assert (plain.layout.order, turned.layout.order, shared.layout.order) == ("HND", "NHD", "NHD")
        expected = [answer.token_ids for answer in await answers_of(plain, None, prompts, "single")]
        for prefill, decode in ((plain, turned), (turned, plain), (shared, plain), (plain, shared), (shared, turned)):
            await check_pair(prefill, decode, prompts, expected, f"{prefill.backend} to {decode.backend}")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
async def test_the_real_model_between_any_two_pools(transport: str) -> None:
    model_dir = default_model_dir()
    prompts = text_prompts(6, longest=400, tokenizer=Tokenizer.load(model_dir), seed=2)
    async with Workers(model_dir) as workers:
        made = {tp: await workers.start(tp, transport=transport) for tp in (1, 2, 3)}
        made[4] = await workers.start(2, block_size=32, transport=transport)
        expected = [answer.token_ids for answer in await answers_of(made[1], None, prompts, "single")]
        for key, prefill in made.items():
            for other, decode in made.items():
                if key != other:
                    await check_pair(prefill, decode, prompts, expected, f"{key}-{other}")


@pytest.mark.slow
@pytest.mark.parametrize("pair", [(4, 1), (1, 4), (4, 2), (2, 4), (4, 8), (8, 2), (3, 4)])
async def test_heads_held_by_several_ranks(make_tiny_model: Callable[..., Path], pair: tuple[int, int]) -> None:
    """Eight heads that share four KV heads: with eight ranks each KV head is held twice."""
    model_dir = make_tiny_model("llama", num_attention_heads=8, num_key_value_heads=4, hidden_size=128)
    prompts = random_prompts(6, longest=300, vocab_size=Tokenizer.load(model_dir).vocab_size, seed=5)
    async with Workers(model_dir) as workers:
        prefill, decode = [await workers.start(tp) for tp in pair]
        alone = await workers.start(1)
        expected = [answer.token_ids for answer in await answers_of(alone, None, prompts, "single")]
        await check_pair(prefill, decode, prompts, expected, str(pair))


@pytest.mark.slow
@pytest.mark.parametrize("pair", [(2, 1), (1, 2), (4, 2)])
async def test_twenty_prompts_of_kv_01(make_tiny_model: Callable[..., Path], pair: tuple[int, int]) -> None:
    """Case KV-01: 1 to 500 tokens, 64 tokens each."""
    model_dir = make_tiny_model(
        "llama", num_attention_heads=8, num_key_value_heads=4, hidden_size=128, max_position_embeddings=1024
    )
    prompts = random_prompts(20, longest=500, vocab_size=Tokenizer.load(model_dir).vocab_size, seed=7)
    sampling = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    async with Workers(model_dir) as workers:
        prefill, decode = [await workers.start(tp, block_size=block) for tp, block in zip(pair, (16, 32), strict=True)]
        alone = await workers.start(1)
        expected = [answer.token_ids for answer in await answers_of(alone, None, prompts, "single", sampling)]
        await check_pair(prefill, decode, prompts, expected, str(pair), sampling)


class HeldSums:
    """The sums of rank 0, held before one of them."""

    def __init__(self, worker: NativeWorker, before: int) -> None:
        self._part = worker.loaded.model._part
        self._sums, self._part.sums = self._part.sums, self
        self._left = before
        self.reached, self.go_on = threading.Event(), threading.Event()

    def add(self, tensor: object) -> None:
        if self._left == 0:
            self.reached.set()
            assert self.go_on.wait(60)
        self._left -= 1
        self._sums.add(tensor)


async def fails_whole(request: GenerateRequest, decode: NativeWorker, prefill: NativeWorker | None) -> KvbatonError:
    peer = None if prefill is None else PeerAddress("127.0.0.1", prefill.kv_port)
    with pytest.raises(KvbatonError) as caught:
        async for _ in decode.generate(request, prefill=peer, deadline_s=60.0):
            pass
    return caught.value


def left_of(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def ended(worker: NativeWorker, pids: list[int]) -> None:
    """The engine has stopped, and no rank is left (those that were killed are waited for when the worker stops)."""
    async with asyncio.timeout(60):
        while worker.alive:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await worker.stop()
    assert not left_of(pids)
    with pytest.raises(KvbatonError):
        worker.generate(GenerateRequest("late", (1, 2, 3), GREEDY))


async def test_a_rank_that_dies_in_a_prefill_ends_worker_and_hand_off(make_tiny_model: Callable[..., Path]) -> None:
    """It is killed in the middle of a step, while the decode side reads what other layers have."""
    model_dir = make_tiny_model("llama", **SMOL)
    async with Workers(model_dir) as workers:
        decode, prefill = await workers.start(1), await workers.start(2)
        pids = prefill.loaded.ranks.pids
        held = HeldSums(prefill, before=8)  # in the second chunk
        request = GenerateRequest("dies", tuple(range(10, 210)), GREEDY)
        failing = asyncio.ensure_future(fails_whole(request, decode, prefill))
        assert await asyncio.to_thread(held.reached.wait, 60)
        os.kill(pids[0], signal.SIGKILL)
        held.go_on.set()
        assert isinstance(await failing, HandoffError)
        await decode.check_empty()
        await ended(prefill, pids)
        got = await ask(decode, None, request.prompt_token_ids, GREEDY, "goes on")
        assert len(got.token_ids) == 8


@pytest.mark.slow
async def test_a_rank_that_is_stopped_ends_its_worker_after_its_deadline(make_tiny_model: Callable[..., Path]) -> None:
    model_dir = make_tiny_model("llama", **SMOL)
    async with Workers(model_dir) as workers:
        worker = await workers.start(3, tp_deadline_s=10.0)
        pids = worker.loaded.ranks.pids
        os.kill(pids[1], signal.SIGSTOP)
        error = await fails_whole(GenerateRequest("waits", tuple(range(10, 60)), GREEDY), worker, None)
        assert "step failed" in str(error)
        await ended(worker, pids)


@pytest.mark.slow
async def test_a_rank_of_the_decode_side_that_dies_frees_the_prefill_side(make_tiny_model: Callable[..., Path]) -> None:
    model_dir = make_tiny_model("llama", **SMOL)
    async with Workers(model_dir) as workers:
        prefill, decode = await workers.start(1), await workers.start(2)
        pids = decode.loaded.ranks.pids
        held = HeldSums(decode, before=3)
        request = GenerateRequest("dies", tuple(range(10, 210)), GREEDY)
        failing = asyncio.ensure_future(fails_whole(request, decode, prefill))
        assert await asyncio.to_thread(held.reached.wait, 60)
        os.kill(pids[0], signal.SIGKILL)
        held.go_on.set()
        await failing
        await ended(decode, pids)
        await prefill.check_empty()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (WorkerOptions(handoff=HandoffOptions(transport="nixl")), "transport"),
        (WorkerOptions(tier=TierOptions(memory_bytes=1 << 20, memory_name="kvbaton-none")), "kv_tier_memory_mib"),
    ],
)
def test_what_several_ranks_do_not_do_is_refused_by_name(
    tiny_model_dir: Path, options: WorkerOptions, field: str
) -> None:
    with pytest.raises(LocalError) as caught:
        NativeWorker(LoadOptions(model_dir=tiny_model_dir, tp=2), EngineConfig(SchedulerConfig()), options)
    assert caught.value.field == field
