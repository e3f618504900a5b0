"""Workers that say what a test wants, and the sockets to reach real apps by. Implements ``protocol.Worker``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import CapacityError, Fingerprint, GenerateRequest, Role, TokenLogprobs, TokenOutput
from kvbaton.workers.http import HttpServer, bind
from kvbaton.workers.kv_events import KVEventLog
from kvbaton.workers.protocol import Admitted, Finished, PeerAddress, WorkerEvent, WorkerStats


class ScriptedWorker:
    """Answers every request with ``text``; ``gate`` holds tokens from ``gate_at`` on; ``error`` is raised there."""

    def __init__(self, tokenizer: Tokenizer, role: Role = "both", text: str = "hello world", life: str = "a") -> None:
        self.model_id, self.role, self.tokenizer, self.incarnation = "tiny", role, tokenizer, life
        self.max_context, self.kv_port, self.fingerprint = 512, 7, Fingerprint(1, "r", 1, 1, 8, "float32", "")
        self.kv_events: KVEventLog | None = None
        self.serves_alone = True
        self.token_ids = tokenizer.encode(text)
        self.gate, self.gate_at = asyncio.Event(), 0
        self.gate.set()
        self.error: Exception | None = None
        self.remote_error: Exception | None = None  # raised whenever a prefill peer is named
        self.remote_errors_left = 10**9
        self.requests: list[tuple[GenerateRequest, PeerAddress | None]] = []
        self.reported = WorkerStats(num_blocks=1000)
        self.num_open = 0
        self.max_open = 10**9
        self.num_cancelled = 0
        self.disconnected = False

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def drain(self, deadline_s: float) -> bool:
        return True

    async def switch_role(self, role: Role, deadline_s: float) -> bool:
        self.role = role
        return True

    def stats(self) -> WorkerStats:
        return self.reported

    async def generate(
        self, request: GenerateRequest, prefill: PeerAddress | None = None, deadline_s: float = 600.0
    ) -> AsyncGenerator[WorkerEvent, bool | None]:
        if self.num_open >= self.max_open:
            raise CapacityError("full")
        self.requests.append((request, prefill))
        self.num_open += 1
        ended = False
        try:
            if prefill is not None and self.remote_error is not None and self.remote_errors_left:
                self.remote_errors_left -= 1
                raise self.remote_error
            path = "remote" if prefill is not None else "local"
            count = len(request.prompt_token_ids)
            admitted = Admitted(count, 0, count if prefill is not None else 0, path)
            token_ids = self.token_ids[request.num_resumed_tokens :]
            limit = min(len(token_ids), request.sampling.max_tokens)
            for i, token_id in enumerate(token_ids[:limit]):
                if i >= self.gate_at:
                    await self.gate.wait()
                    if self.error is not None:
                        raise self.error
                if i == 0:
                    yield admitted
                wanted = request.sampling.logprobs
                logprobs = (
                    None if wanted is None else TokenLogprobs(token_id, -0.5, ((token_id, -0.5),) * min(1, wanted))
                )
                finish = None if i + 1 < limit else ("length" if limit < len(token_ids) else "stop")
                yield TokenOutput(token_id, logprobs, finish)
            ended = True
            yield Finished(transfer_bytes=64 if prefill is not None else 0)
        finally:
            self.num_open -= 1
            self.num_cancelled += not ended


@asynccontextmanager
async def serving(app: Any, **options: Any) -> AsyncIterator[str]:
    """The app behind a real socket on a free port."""
    listener = bind("127.0.0.1", 0)
    server = HttpServer(app, **options)
    task = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        while not server.started:
            await asyncio.sleep(0)
            assert not task.done()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.end()
        await task


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until the other side of a socket has seen what we did."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (the other side is the code under test; it has no event for us)
            await asyncio.sleep(0)


def sse_events(raw: bytes) -> Sequence[str]:
    """The data of each event; comments are dropped, as clients do."""
    assert raw.endswith(b"\n\n")
    blocks = raw.decode().removesuffix("\n\n").split("\n\n")
    return [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
