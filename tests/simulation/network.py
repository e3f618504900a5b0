"""Wires between processes, and the weather on them: delay, loss, repetition, disorder, cuts (also of one direction).

A wire behaves like TCP: in order, complete, and silent while the way is cut (what was sent arrives after the cut heals,
if anybody is left). With ``frames`` it is hostile beyond TCP: single frames are lost, repeated and overtaken.
Invariants: nothing is delivered to an end that was closed or whose process died; the end of a wire is told once.
Knows nothing about what is carried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from .loop import VirtualLoop
from .story import Story

LONGEST_S = 3.0  # on the way, unless it is cut


@dataclass(frozen=True)
class Weather:
    """How bad it is, for one whole run."""

    delay_s: float = 0.002  # of one frame, at the median
    spike: float = 0.02  # share of frames that take 50 times as long
    frames: bool = False  # lose, repeat and reorder frames of the hand-off's control wires
    lose: float = 0.02
    repeat: float = 0.03


class End:
    """One side of a wire."""

    def __init__(self, wire: Wire, process: Any, side: int) -> None:
        self.wire, self.process, self.side = wire, process, side
        self.on_item: Callable[[Any], None] = lambda item: None
        self.on_closed: Callable[[], None] = lambda: None
        self.closed = False

    def send(self, item: Any) -> None:
        if not self.closed and self.process.alive:
            self.wire.carry(self.side, item)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.wire.finish(self.side)


class Wire:
    def __init__(self, network: Network, a: Any, b: Any, hostile: bool) -> None:
        self.network, self._hostile = network, hostile
        self.ends = (End(self, a, 0), End(self, b, 1))
        self._last_s = [0.0, 0.0]  # when the last frame of each direction arrives
        self._held: tuple[list[Any], list[Any]] = ([], [])  # what a cut keeps back

    def way(self, side: int) -> tuple[str, str]:
        return self.ends[side].process.name, self.ends[1 - side].process.name

    def carry(self, side: int, item: Any) -> None:
        network, weather = self.network, self.network.weather
        copies, in_order = 1, True
        if self._hostile and weather.frames:
            rng = network.rng_of(*self.way(side))
            lot = rng.random()
            copies = 0 if lot < weather.lose else 2 if lot < weather.lose + weather.repeat else 1
            in_order = rng.random() < 0.9
            if copies != 1:
                network.story.tell("{} -> {}: a frame is {}", *self.way(side), "lost" if not copies else "repeated")
        for _ in range(copies):
            self._send(side, (item,), in_order)

    def finish(self, side: int) -> None:
        """This end closes: the other one hears of it behind everything that was sent."""
        if self.ends[1 - side].closed:
            self.network.wires.pop(self, None)
        else:
            self._send(side, (), True)

    def _send(self, side: int, what: tuple[Any, ...], in_order: bool) -> None:
        network = self.network
        at_s = network.loop.time() + network.delay_s(*self.way(side))
        if in_order:
            # Never at the same moment: timers of one moment run in no certain order.
            at_s = self._last_s[side] = max(at_s, self._last_s[side] + 1e-6)
        network.loop.call_at(at_s, self._arrive, side, what)

    def _arrive(self, side: int, what: tuple[Any, ...]) -> None:
        other = self.ends[1 - side]
        if other.closed or not other.process.alive:
            return
        if self.network.is_cut(*self.way(side)) or self._held[side]:
            self._held[side].append(what)
            self.network.held[self] = None
        elif what:
            other.on_item(what[0])
        else:
            other.closed = True
            self.network.wires.pop(self, None)
            other.on_closed()

    def release(self) -> None:
        """Cuts were healed: what was kept back comes soon, and before anything that is under way behind it."""
        for side in (0, 1):
            if self._held[side]:
                network = self.network
                network.loop.call_at(network.loop.time() + network.delay_s(*self.way(side)), self._let_go, side)

    def _let_go(self, side: int) -> None:
        if self.network.is_cut(*self.way(side)):
            self.network.held[self] = None
            return
        held = self._held[side][:]
        self._held[side].clear()
        for what in held:
            self._arrive(side, what)

    def break_off(self) -> None:
        """A reset: both ends hear of it, if they live."""
        for end in self.ends:
            if not end.closed and end.process.alive:
                end.closed = True
                self.network.loop.call_soon(end.on_closed)
        self.network.wires.pop(self, None)


class Network:
    def __init__(self, loop: VirtualLoop, seed: int, story: Story, weather: Weather) -> None:
        self.loop, self.story, self.weather = loop, story, weather
        self._seed = seed
        self._rngs: dict[tuple[str, str], Random] = {}
        self.wires: dict[Wire, None] = {}  # open ones, in the order they were made
        self.held: dict[Wire, None] = {}
        self._cuts: dict[tuple[str, str], int] = {}
        self.slow: dict[str, float] = {}  # factor on every way from or to a process

    def rng_of(self, source: str, target: str) -> Random:
        """Chance on one way: what happens elsewhere at the same moment, in whatever order, does not change it."""
        way = source, target
        if way not in self._rngs:
            self._rngs[way] = Random(f"{self._seed} {source} {target}")
        return self._rngs[way]

    def delay_s(self, source: str, target: str) -> float:
        rng = self.rng_of(source, target)
        delay_s = self.weather.delay_s * rng.uniform(0.5, 2.0)
        if rng.random() < self.weather.spike:
            delay_s *= 50
        return min(LONGEST_S, delay_s * self.slow.get(source, 1.0) * self.slow.get(target, 1.0))

    def is_cut(self, source: str, target: str) -> bool:
        return self._cuts.get((source, target), 0) > 0

    def cut(self, source: str, target: str) -> None:
        self._cuts[source, target] = self._cuts.get((source, target), 0) + 1
        self.story.tell("{} -> {}: cut", source, target)

    def heal(self, source: str, target: str) -> None:
        if self._cuts.get((source, target), 0):
            self._cuts[source, target] -= 1
            self.story.tell("{} -> {}: healed", source, target)
            self._release()

    def _release(self) -> None:
        held, self.held = list(self.held), {}
        for wire in held:
            wire.release()

    async def connect(self, source: Any, target: Any, timeout_s: float, hostile: bool = False) -> Wire:
        """A wire, or as with sockets: TimeoutError when nothing answers, ConnectionRefusedError when nobody listens."""
        await asyncio.sleep(self.delay_s(source.name, target.name) + self.delay_s(target.name, source.name))
        if self.is_cut(source.name, target.name) or self.is_cut(target.name, source.name):
            await asyncio.sleep(timeout_s)
            raise TimeoutError
        if not target.alive:
            raise ConnectionRefusedError(111, "Connection refused")
        wire = Wire(self, source, target, hostile)
        self.wires[wire] = None
        return wire

    def calm_down(self) -> None:
        """What is sent from now on arrives, once, in order and soon."""
        self.weather = replace(self.weather, spike=0.0, frames=False)
        self._cuts.clear()
        self.slow.clear()
        self._release()

    def process_died(self, process: Any) -> None:
        """Its kernel resets what was open; where the way is cut nobody hears of that, until it heals."""
        for wire in list(self.wires):
            for end in wire.ends:
                if end.process is process and not end.closed:
                    end.closed = True
                    wire.finish(end.side)
