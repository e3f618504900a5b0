"""Clients that go away: what they held is free before the next step of either engine, however long a step takes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from router.rig import Rig, make_rig
from workers.scripted import until

from kvbaton.workers.native import NativeWorker

NUM_CLIENTS = 6
PROMPT = "the quick brown fox and the lazy dog, " * 6  # several chunks


class GatedModel:
    """The engine's model, of which a step can be held open."""

    def __init__(self, model: Any) -> None:
        self._model, self.config, self.layout = model, model.config, model.layout
        self.num_steps = 0
        self.gate, self.inside = threading.Event(), threading.Event()
        self.gate.set()

    def forward(self, step: Any, kv: Any, on_layer: Callable[[int], None] | None = None) -> Any:
        self.num_steps += 1
        if not self.gate.is_set():
            self.inside.set()
            assert self.gate.wait(120), "the test never opened the gate"
        return self._model.forward(step, kv, on_layer)


def gate_of(worker: NativeWorker) -> GatedModel:
    gated = GatedModel(worker.engine.model)
    worker.engine.model = gated  # type: ignore[assignment]
    return gated


async def clients(rig: Rig) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = rig.fleet.url.removeprefix("http://").split(":")
    opened = []
    for i in range(NUM_CLIENTS):
        body = json.dumps({"prompt": f"{i} {PROMPT}", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        opened.append((reader, writer))
    return opened


async def leave(rig: Rig, opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    for _, writer in opened:
        writer.close()
    await until(lambda: rig.fleet.gateway.open.num == 0 and rig.servers["d0"].open.num == 0)


async def test_while_prompts_are_computed(tiny_model_dir: Path) -> None:
    async with make_rig(tiny_model_dir, {"p0": "prefill", "d0": "decode"}) as rig:
        prefill, decode = rig.workers["p0"], rig.workers["d0"]
        assert prefill._server is not None
        sessions = prefill._server
        gated = gate_of(prefill)
        gated.gate.clear()
        opened = await clients(rig)
        await until(lambda: gated.inside.is_set() and sessions.stats().num_sessions == NUM_CLIENTS)
        assert decode.stats().num_blocks_used > 0
        await leave(rig, opened)
        # The prefill engine is still in its step: decode does not wait for it.
        await until(lambda: decode.stats().num_blocks_used == 0 and sessions.stats().num_sessions == 0)
        num_steps = gated.num_steps
        gated.gate.set()
        await until(lambda: prefill.stats().num_active == 0)
        await prefill.check_empty()
        assert gated.num_steps == num_steps, "nothing was computed for nobody"


async def test_while_answers_are_decoded(tiny_model_dir: Path) -> None:
    async with make_rig(tiny_model_dir, {"p0": "prefill", "d0": "decode"}) as rig:
        decode = rig.workers["d0"]
        gated = gate_of(decode)
        opened = await clients(rig)
        await asyncio.gather(*(reader.readuntil(b"data: ") for reader, _ in opened))
        gated.gate.clear()
        await until(gated.inside.is_set)
        await leave(rig, opened)
        num_steps = gated.num_steps
        gated.gate.set()
        await until(lambda: decode.stats().num_active == 0)
        await decode.check_empty()
        assert gated.num_steps == num_steps, "nothing was decoded for nobody"
        await until(lambda: rig.workers["p0"].stats().num_blocks_pinned == 0)
