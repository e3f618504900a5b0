"""The real engine over memory that can be checked, driven by a virtual clock instead of its thread.

The scheduler, the block manager, leases, generations and every command are the product's; replaced are the wait for
commands, the time that a step takes, and the model. The model of a simulation writes into each place of KV a number
that stands for all tokens up to there, and samples the next token from the last of them: so KV that is not the prompt's
is seen at the step that reads it. Knows nothing about peers.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvbaton.clock import Clock
from kvbaton.engine.engine import Engine, EngineConfig, _Stop
from kvbaton.engine.events import EngineStats
from kvbaton.engine.scheduler import StepPlan
from kvbaton.engine.sequence import Sequence
from kvbaton.kv.layout import KVLayout
from kvbaton.types import LocalError, TokenOutput

from .loop import VirtualLoop
from .story import Story, Violation

BLOCK_SIZE, NUM_LAYERS = 2, 2
LAYOUT = KVLayout(NUM_LAYERS, 1, 1, BLOCK_SIZE, "float32")
VOCAB_SIZE, EOS, FIRST_TOKEN, NUM_TOKENS = 259, 258, 64, 26  # output is letters; see the byte tokenizer
ROOT = 7


def extend(state: int, token_id: int) -> int:
    """What KV stands for after one more token."""
    return (state * 1_000_003 + token_id + 1) & 0x7FFF_FFFF


def next_token(state: int) -> int:
    return EOS if state % 41 == 0 else FIRST_TOKEN + (state >> 7) % NUM_TOKENS


def answer(prompt: tuple[int, ...], max_tokens: int) -> tuple[tuple[int, ...], str]:
    """What any fleet must say: the tokens without EOS, and the reason to stop."""
    state, output = ROOT, []
    for token_id in prompt:
        state = extend(state, token_id)
    for _ in range(max_tokens):
        token_id = next_token(state)
        if token_id == EOS:
            return tuple(output), "stop"
        output.append(token_id)
        state = extend(state, token_id)
    return tuple(output), "length"


class SimPool:
    """Blocks of numbers, one for each token and layer; and the generations that readers see."""

    device_tensor = None

    def __init__(self, num_blocks: int) -> None:
        self.layout, self.num_blocks = LAYOUT, num_blocks
        self.generations = np.zeros(num_blocks, dtype=np.uint64)
        self.memory = [[[0] * BLOCK_SIZE for _ in range(num_blocks)] for _ in range(NUM_LAYERS)]

    def publish_generation(self, block: int, generation: int) -> None:
        self.generations[block] = generation

    def stage_in(self, blocks: object) -> None: ...

    def view(self) -> None:
        return None


class _Inbox:
    """The command queue of an engine without a thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.commands: list[Callable[[], None]] = []
        self._wake = wake

    def put(self, command: Any) -> None:
        assert not isinstance(command, _Stop)
        self.commands.append(command)
        self._wake()


class SimEngine(Engine):
    def __init__(
        self, name: str, num_blocks: int, config: EngineConfig, clock: Clock, loop: VirtualLoop, story: Story
    ) -> None:
        model: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB_SIZE))
        super().__init__(model, SimPool(num_blocks), config, clock)  # type: ignore[arg-type]
        self.name = name
        self._loop, self._story, self._rng = loop, story, Random(name)
        self._commands = _Inbox(self._wake)  # type: ignore[assignment]
        self._turn_at: Any = None
        self._in_step = False
        self._is_alive = True
        self.slowness = 1.0
        self.breaks_next = False  # the next step fails
        self.on_release: Callable[[str], None] = lambda request_id: None

    # -- in place of the thread

    def start(self) -> None: ...

    def stop(self, timeout_s: float = 10.0) -> None:
        self._is_alive = False

    @property
    def alive(self) -> bool:
        return self._is_alive

    def release(self, request_id: str) -> None:
        self.on_release(request_id)
        super().release(request_id)

    def _wake(self) -> None:
        if self._is_alive and not self._in_step:
            if self._turn_at is not None:
                self._turn_at.cancel()
            self._turn_at = self._loop.call_later(0.0001, self._turn)

    def _turn(self) -> None:
        """Between two steps."""
        self._turn_at = None
        if not self._is_alive or self._in_step:
            return
        commands, self._commands.commands = self._commands.commands, []  # type: ignore[attr-defined]
        for command in commands:
            command()
        self._expire_leases()
        self._begin_step()
        self.publish_block_events()
        self._flush()
        self._scheduler.check()
        if not self._in_step and self._turn_at is None and (self._has_work() or self._blocks.num_leases):
            self._turn_at = self._loop.call_later(self._idle_poll_s, self._turn)

    def _begin_step(self) -> None:
        plan = self._scheduler.schedule()
        self._counters.num_preemptions += len(plan.preempted)
        self._stalled = not plan.items and not plan.preempted
        if not plan.items:
            if plan.preempted:
                self._wake()
            return
        started_s = self._clock.now_s()
        self._announce(plan, started_s)
        self._in_step = True
        seconds = (0.004 + 0.001 * plan.num_tokens) * self.slowness * self._rng.uniform(0.8, 1.3)
        hook = self._layer_hook(plan)
        for layer in range(NUM_LAYERS):
            at_s = self._loop.time() + seconds * (layer + 1) / NUM_LAYERS
            self._loop.call_at(at_s, self._layer, plan, layer, hook, started_s)

    def _layer(self, plan: StepPlan, layer: int, hook: Callable[[int], None] | None, started_s: float) -> None:
        if not self._is_alive:
            return
        states = [self._attend(item.seq, item.start, item.num_tokens, layer) for item in plan.items]
        if hook is not None:
            hook(layer)
        if layer + 1 < NUM_LAYERS:
            return
        self._in_step = False
        if self.breaks_next:
            self.breaks_next = False
            self._story.tell("{}: a step fails", self.name)
            self._counters.num_failed_steps += 1
            for item in plan.items:
                self._fail(item.seq.request_id, LocalError("the engine step failed: simulated"))
        else:
            pairs = zip(plan.items, states, strict=True)
            sampled = {item.seq.request_id: self._token(item.seq, state) for item, state in pairs if item.samples}
            self._scheduler.complete(plan, sampled)
            self._account(plan, self._clock.now_s() - started_s)
            for request_id, output in sampled.items():
                if request_id in self._active:
                    self._emit(request_id, output)
        self.publish_block_events()
        self._flush()
        self._turn()

    # -- the model

    def _attend(self, seq: Sequence, start: int, num_tokens: int, layer: int) -> int:
        """Read what was there before, write what is new; what the last new place stands for."""
        tokens = [*seq.request.prompt_token_ids, *seq.output_token_ids][: start + num_tokens]
        memory, state = self.pool.memory[layer], ROOT  # type: ignore[attr-defined]
        for position, token_id in enumerate(tokens):
            state = extend(state, token_id)
            block, offset = seq.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            if position >= start:
                memory[block][offset] = state + layer
            elif memory[block][offset] != state + layer:
                raise Violation(
                    f"{self.name} computes {seq.request_id} from KV that is not its own: layer {layer}, "
                    f"token {position} in block {block}"
                )
        return state

    def _token(self, seq: Sequence, state: int) -> TokenOutput:
        token_id = next_token(state)
        if token_id == EOS:
            return TokenOutput(token_id, finish_reason="stop", stop_token=True)
        full = seq.num_output_tokens + 1 >= seq.request.sampling.max_tokens
        return TokenOutput(token_id, finish_reason="length" if full else None)

    # -- looking in

    def receiving(self, block: int) -> bool:
        """Whether a hand-off may write into ``block`` now."""
        return any(active.seq.state == "receiving" and block in active.seq.blocks for active in self._active.values())

    def problem(self) -> str | None:
        """What is held although nothing is under way."""
        stats: EngineStats = self.stats()
        held = {
            "requests": stats.num_active, "blocks": stats.num_blocks_used, "pins": stats.num_blocks_pinned,
            "leases": stats.num_leases, "waiting": stats.num_waiting, "tokens queued": stats.waiting_prompt_tokens,
        }  # fmt: skip
        kept = {name: number for name, number in held.items() if number}
        return f"{self.name} still holds {kept}" if kept else None
