"""Clients that go away: what they held is free before the next step of either engine, however long a step takes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from router.gates import gate_of
from router.rig import Rig, make_rig
from workers.scripted import until

NUM_CLIENTS = 6
PROMPT = "the quick brown fox and the lazy dog, " * 6  # several chunks


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
    """Each client has its first token, which prefill computes, and decode is in its first step."""
    async with make_rig(tiny_model_dir, {"p0": "prefill", "d0": "decode"}) as rig:
        prefill, decode = rig.workers["p0"], rig.workers["d0"]
        assert prefill._server is not None
        sessions = prefill._server
        before, gated = gate_of(prefill), gate_of(decode)
        before.gate.clear()
        opened = await clients(rig)
        # Decode reserves for all of them before any is decoded: its engine must not be in a step for that.
        await until(lambda: before.inside.is_set() and sessions.stats().num_sessions == NUM_CLIENTS)
        gated.gate.clear()
        before.gate.set()
        await asyncio.gather(*(reader.readuntil(b"data: ") for reader, _ in opened))
        await until(gated.inside.is_set)
        await leave(rig, opened)
        num_steps = gated.num_steps
        gated.gate.set()
        await until(lambda: decode.stats().num_active == 0)
        await decode.check_empty()
        assert gated.num_steps == num_steps, "nothing was decoded for nobody"
        await until(lambda: prefill.stats().num_blocks_pinned == 0)
