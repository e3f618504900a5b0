"""What holds a real engine still, so that a test need not be quicker than it; and what waits until it is done."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from kvbaton.workers.native import NativeWorker


class GatedModel:
    """The engine's model, of which a step can be held open. The engine does nothing else meanwhile."""

    def __init__(self, model: Any) -> None:
        self._model, self.config, self.layout = model, model.config, model.layout
        self.num_steps = 0
        self.shut_after_steps: int | None = None  # the gate closes by itself before the step that follows so many
        self.gate, self.inside = threading.Event(), threading.Event()
        self.gate.set()

    def forward(self, step: Any, kv: Any, on_layer: Callable[[int], None] | None = None) -> Any:
        if self.num_steps == self.shut_after_steps:
            self.gate.clear()
        self.num_steps += 1
        if not self.gate.is_set():
            self.inside.set()
            assert self.gate.wait(120), "the test never opened the gate"
        return self._model.forward(step, kv, on_layer)


async def until_empty(worker: NativeWorker) -> None:
    """No request, block, pin or lease, as soon as the worker has heard of all that ended."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await worker.check_empty()
            except AssertionError as error:
                held = error
            try:
                await asyncio.sleep(0.005)  # neither the engine's thread nor a closing socket has an event for us
            except asyncio.CancelledError:
                raise held from None


def gate_of(worker: NativeWorker) -> GatedModel:
    gated = GatedModel(worker.engine.model)
    worker.engine.model = gated  # type: ignore[assignment]
    return gated
