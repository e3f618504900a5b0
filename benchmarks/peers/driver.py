"""One engine in a process of its own, driven by JSON lines, so that rounds of several engines can interleave.

The process pins itself to one CPU before the engine is imported. Requests arrive on stdin, replies leave on what was
stdout when the process started; everything an engine prints goes to stderr. Standard library only: it runs under the
interpreter of each engine's own environment. Knows nothing about any engine.

    {"command": "load", ...options}                                 -> {"info": {...}}
    {"command": "generate", "prompts": [[ids]], "max_tokens": n}    -> {"first_s": [...], "last_s": [...],
                                                                        "num_tokens": [...], "wall_s": s, "cpu_s": s}
    {"command": "tokens", "prompt": [ids], "max_tokens": n}         -> {"token_ids": [...]}
    {"command": "probe"}                                            -> {"values": {...}}   (the hardware's limits only)
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class Timeline:
    """When each sequence got its first and its last token, in seconds since submission, and what it got."""

    first_s: list[float] = field(default_factory=list)
    last_s: list[float] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)

    @classmethod
    def empty(cls, num_sequences: int) -> Timeline:
        return cls([0.0] * num_sequences, [0.0] * num_sequences, [[] for _ in range(num_sequences)])

    def add(self, sequence: int, token_id: int, at_s: float) -> None:
        if not self.token_ids[sequence]:
            self.first_s[sequence] = at_s
        self.last_s[sequence] = at_s
        self.token_ids[sequence].append(token_id)


class Driver(Protocol):
    """What the benchmark needs of an engine. Greedy, exactly ``max_tokens`` tokens, no reuse of earlier prompts."""

    def load(self, options: dict[str, Any]) -> dict[str, Any]: ...

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline: ...


def _answer(driver: Any, request: dict[str, Any]) -> dict[str, Any]:
    match request.pop("command"):
        case "load":
            return {"info": driver.load(request)}
        case "generate":
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            line = driver.generate(request["prompts"], request["max_tokens"])
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
            counts = [len(ids) for ids in line.token_ids]
            assert counts == [request["max_tokens"]] * len(request["prompts"]), f"engine generated {counts}"
            times = {"first_s": line.first_s, "last_s": line.last_s, "num_tokens": counts}
            return {**times, "wall_s": wall_s, "cpu_s": cpu_s}
        case "tokens":
            return {"token_ids": driver.generate([request["prompt"]], request["max_tokens"]).token_ids[0]}
        case "probe":
            return {"values": driver.probe()}
        case unknown:
            raise ValueError(f"unknown command {unknown!r}")


def serve(make_driver: Callable[[], Driver]) -> None:
    """Answer until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if cpu := os.environ.get("KVBATON_BENCH_CPU"):
        os.sched_setaffinity(0, {int(cpu)})
    driver = make_driver()
    for line in sys.stdin:
        try:
            reply = _answer(driver, json.loads(line))
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        replies.write(json.dumps(reply) + "\n")
