"""Real workers in one process, in any topology, so that token ids and bytes can be compared exactly.

Every worker has its own engine thread, pool and sockets; hand-offs go through the real transports.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

from kvbaton.engine.engine import EngineConfig
from kvbaton.engine.loader import LoadOptions
from kvbaton.engine.scheduler import SchedulerConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.kv.tier import TierOptions
from kvbaton.transfer.options import HandoffOptions
from kvbaton.types import GenerateRequest, SamplingParams, TokenOutput
from kvbaton.workers.native import NativeWorker, WorkerOptions
from kvbaton.workers.protocol import Admitted, Finished, PeerAddress


@dataclass(frozen=True)
class Topology:
    name: str
    num_prefill: int = 0
    num_decode: int = 1  # colocated workers when there is no prefill worker
    transport: str = "shm"
    prefill_block_size: int = 16
    decode_block_size: int = 16
    max_batch_tokens: int = 512
    num_concurrent: int = 8


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    path: str = ""
    num_prompt_tokens: int = 0
    num_remote_tokens: int = 0
    transfer_bytes: int = 0
    finish_reason: str | None = None


class Fleet:
    """``async with Fleet(topology, model_dir, ...) as fleet: await fleet.run(prompts, sampling)``."""

    def __init__(
        self,
        topology: Topology,
        model_dir: Path,
        num_blocks: int = 2048,
        tier: TierOptions | None = None,
        **load_options: object,
    ) -> None:
        self.topology = topology
        self._tier = tier or TierOptions()
        self._model_dir = model_dir
        self._num_blocks = num_blocks
        self._load_options = load_options
        self._stack = AsyncExitStack()
        self.prefill: list[NativeWorker] = []
        self.decode: list[NativeWorker] = []

    async def __aenter__(self) -> Fleet:
        topology = self.topology
        for _ in range(topology.num_prefill):
            self.prefill.append(await self._start("prefill", topology.prefill_block_size))
        for _ in range(topology.num_decode):
            role = "decode" if topology.num_prefill else "both"
            self.decode.append(await self._start(role, topology.decode_block_size))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def _start(self, role: str, block_size: int) -> NativeWorker:
        topology = self.topology
        scheduler = SchedulerConfig(max_batch_tokens=topology.max_batch_tokens, max_running=32)
        worker = NativeWorker(
            LoadOptions(
                model_dir=self._model_dir,
                block_size=block_size,
                num_kv_blocks=self._num_blocks * 16 // block_size,
                **self._load_options,
            ),
            EngineConfig(scheduler=scheduler),
            WorkerOptions(role=role, handoff=HandoffOptions(transport=topology.transport), tier=self._tier),
        )
        await worker.start()
        self._stack.push_async_callback(worker.stop)
        return worker

    async def run(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Answer]:
        """All prompts, ``num_concurrent`` at a time, dealt out in turn; answers in the order of the prompts."""
        permits = asyncio.Semaphore(self.topology.num_concurrent)
        decoders, prefillers = itertools.cycle(self.decode), itertools.cycle(self.prefill)
        seats = [(next(decoders), next(prefillers) if self.prefill else None) for _ in prompts]

        async def one(index: int) -> Answer:
            async with permits:
                return await ask(*seats[index], prompts[index], sampling, f"request-{index}")

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(len(prompts))]
        return [task.result() for task in tasks]

    async def check_empty(self) -> None:
        """Nothing is held once everything was answered: no blocks, no pins, no requests."""
        for worker in (*self.prefill, *self.decode):
            await worker.check_empty()


async def ask(
    decode: NativeWorker,
    prefill: NativeWorker | None,
    prompt: Sequence[int],
    sampling: SamplingParams,
    request_id: str,
) -> Answer:
    request = GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        eos_token_ids=decode.tokenizer.eos_token_ids,
    )
    peer = PeerAddress("127.0.0.1", prefill.kv_port) if prefill is not None else None
    answer = Answer()
    async for event in decode.generate(request, prefill=peer):
        match event:
            case Admitted():
                answer.path = event.path
                answer.num_prompt_tokens = event.num_prompt_tokens
                answer.num_remote_tokens = event.num_remote_tokens
            case TokenOutput():
                answer.token_ids.append(event.token_id)
                answer.finish_reason = event.finish_reason
            case Finished():
                answer.transfer_bytes = event.transfer_bytes
    return answer


def random_prompts(num: int, longest: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Lengths from 1 to ``longest``, both included, most of them short as in life; no two share a first block."""
    rng = random.Random(seed)
    lengths = [max(1, round(longest ** ((i / (num - 1)) ** 2))) for i in range(num)]
    rng.shuffle(lengths)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def text_prompts(num: int, longest: int, tokenizer: Tokenizer, seed: int) -> list[list[int]]:
    """Real text, cut to the lengths of ``random_prompts``: the language reference that every Python carries."""
    text = "\n".join(topics.values())
    ids = tokenizer.encode(text[: 40 * longest + 200_000], add_special_tokens=False)
    rng = random.Random(seed)
    prompts = []
    for like in random_prompts(num, longest, tokenizer.vocab_size, seed):
        start = rng.randrange(len(ids) - longest)
        prompts.append(ids[start : start + len(like)])
    return prompts
