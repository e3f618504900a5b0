"""Commands whose asker went away before the engine came to them: they are dropped, and the engine goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from engine.test_engine import WAIT_S, Inbox, held, running

from kvbaton.engine.engine import Engine
from kvbaton.types import GenerateRequest, SamplingParams

REQUEST = GenerateRequest("r", (1, 2, 3), SamplingParams(max_tokens=4, temperature=0.0))
ASK: dict[str, Callable[[Engine], Future[Any]]] = {
    "renew": lambda engine: engine.renew("r", 1.0),  # its time was up, or the connection of its reader ended
    "call": lambda engine: engine.call(lambda _: None),  # a router that wanted a snapshot of the cache hung up
    "reserve": lambda engine: engine.reserve(REQUEST, Inbox()),  # a client left before decode had room
}


@pytest.mark.parametrize("name", ASK)
def test_what_nobody_waits_for_any_more_does_not_end_the_engine(tiny_model_dir: Path, name: str) -> None:
    with running(tiny_model_dir) as engine:
        gate = threading.Event()
        busy = engine.call(lambda _: gate.wait(WAIT_S))
        asked = ASK[name](engine)
        assert asked.cancel()
        gate.set()
        assert busy.result(WAIT_S)
        assert engine.call(lambda _: 7).result(WAIT_S) == 7 and engine.alive
        assert held(engine) == (0, 0, 0), "what was reserved for nobody is held"
        inbox = Inbox()
        engine.generate(REQUEST, inbox)
        assert len(inbox.tokens()) == 4
