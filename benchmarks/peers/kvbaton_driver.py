"""kvbaton's embedded engine behind the benchmark's driver protocol: the engine loop as it serves, without HTTP."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.driver import Timeline, serve
from kvbaton import __version__
from kvbaton.clock import MonotonicClock
from kvbaton.engine.engine import Engine, EngineConfig
from kvbaton.engine.events import Event, Failed, Token
from kvbaton.engine.loader import LoadOptions, load
from kvbaton.engine.scheduler import SchedulerConfig
from kvbaton.types import GenerateRequest, SamplingParams

STEP_DEADLINE_S = 300.0


class KvbatonDriver:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        loaded = load(
            LoadOptions(
                model_dir=Path(options["model_dir"]),
                dtype=options.get("dtype", "bfloat16"),
                weights=options.get("weights", "native"),
                backend=options.get("backend", "auto"),
                kv_memory_bytes=512 * 1024 * 1024,
            )
        )
        config = EngineConfig(
            SchedulerConfig(max_batch_tokens=4096, max_running=64, max_context=loaded.max_context, max_waiting=256),
            prefix_caching=False,
        )
        self._engine = Engine(loaded.model, loaded.pool, config, MonotonicClock())
        self._engine.start()
        self._num_requests = 0
        return {"version": __version__, "settings": loaded.backend}

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        line = Timeline.empty(len(prompts))
        events: queue.SimpleQueue[tuple[int, Event, float]] = queue.SimpleQueue()
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        begun_s = time.perf_counter()
        for i, prompt in enumerate(prompts):
            self._num_requests += 1
            request = GenerateRequest(f"bench-{self._num_requests}", tuple(prompt), sampling)
            self._engine.generate(request, lambda event, i=i: events.put((i, event, time.perf_counter())))
        num_open = len(prompts)
        while num_open:
            i, event, at_s = events.get(timeout=STEP_DEADLINE_S)
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Token):
                line.add(i, event.output.token_id, at_s - begun_s)
                num_open -= event.output.finish_reason is not None
        return line


if __name__ == "__main__":
    serve(KvbatonDriver)
