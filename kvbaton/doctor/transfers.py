"""What engines count of their own transfers: how much KV moved and how long it took, as differences of their figures.

vLLM's and SGLang's show histograms of both, on the side that moves it: the decode server where it pulls
(NixlConnector), the prefill server where it pushes (SGLang); which side MooncakeConnector's does is not relied upon.
TensorRT-LLM's show neither. Over several ranks bytes and seconds are sums, so the rate is that of one rank. Invariants:
what no figure tells is None, never zero; every wait has an end. Knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from kvbaton.doctor.facts import ServerFacts, TargetRole
from kvbaton.types import RemoteError
from kvbaton.workers.vllm_metrics import samples_of

if TYPE_CHECKING:
    from kvbaton.doctor.look import Asking

_COUNTED_S = 10.0  # until an engine that has answered has counted it
_SILENT_S = 0.5  # the same for one that did not count an earlier one
_POLL_S = 0.1
_OWN = {"vllm": "vllm:", "sglang": "sglang:"}  # what the names of its figures begin with


class _Figure(msgspec.Struct, frozen=True):
    sides: tuple[TargetRole, ...]  # that may count
    of_bytes: str
    byte_unit: float  # bytes in one of them
    of_time: str
    time_unit: float  # seconds in one of them


_FIGURES = {
    "vllm": (
        _Figure(("decode",), "vllm:nixl_bytes_transferred_sum", 1, "vllm:nixl_xfer_time_seconds_sum", 1),
        _Figure(
            ("prefill", "decode"), "vllm:mooncake_bytes_transferred_sum", 1, "vllm:mooncake_xfer_time_seconds_sum", 1
        ),
    ),
    "sglang": (
        _Figure(("prefill",), "sglang:kv_transfer_total_mb_sum", 2**20, "sglang:kv_transfer_latency_ms_sum", 1e-3),
    ),
}


class Moved(msgspec.Struct, frozen=True):
    num_bytes: float = 0.0
    seconds: float = 0.0


class Transfers:
    """The figures of the servers of one pair after the other: ``start`` before each hand-off, ``moved`` after it."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._silent: set[str] = set()
        self._pair: tuple[ServerFacts, ...] = ()
        self._before: list[dict[str, float] | None] = []

    async def start(self, pair: Sequence[ServerFacts]) -> None:
        self._pair = tuple(server for server in pair if server.engine in _FIGURES)
        self._before = [await self._read(server) for server in self._pair]

    async def moved(self) -> Moved | None:
        """What moved since. None where no side tells; zero: a side that counts says that nothing did."""
        names = {server.name for server in self._pair if self._may_count(server)}
        silent = names <= self._silent
        until_s = time.monotonic() + (_SILENT_S if silent else _COUNTED_S)
        while any(before is not None for before in self._before):
            found = await self._since()
            if found is not None and found.num_bytes > 0:
                await asyncio.sleep(_POLL_S)  # other ranks may count theirs a moment later
                return await self._since() or found
            if time.monotonic() >= until_s:
                self._silent |= names
                return None if silent else found  # it may count later than that
            await asyncio.sleep(_POLL_S)
        return None

    def _may_count(self, server: ServerFacts) -> bool:
        return any(server.role in figure.sides for figure in _FIGURES[server.engine])

    async def _since(self) -> Moved | None:
        """By the side that tells most."""
        told = []
        for server, before in zip(self._pair, self._before, strict=True):
            after = await self._read(server) if before is not None else None
            if before is None or after is None:
                continue
            for figure in _FIGURES[server.engine]:
                if server.role not in figure.sides or not {figure.of_bytes, figure.of_time} <= after.keys():
                    continue  # it is there from the first transfer on, in some engines
                num_bytes = after[figure.of_bytes] - before.get(figure.of_bytes, 0.0)
                seconds = after[figure.of_time] - before.get(figure.of_time, 0.0)
                if num_bytes >= 0 and seconds >= 0:  # else it was started anew in between
                    told.append(Moved(num_bytes * figure.byte_unit, seconds * figure.time_unit))
        return max(told, key=lambda one: one.num_bytes, default=None)

    async def _read(self, server: ServerFacts) -> dict[str, float] | None:
        """Sums of what is known by name, over its ranks. None when they cannot be read."""
        try:
            text = (await self._asking.get(server.url + "/metrics")).body.decode(errors="replace")
        except RemoteError:
            return None
        known = frozenset(name for each in _FIGURES[server.engine] for name in (each.of_bytes, each.of_time))
        samples, broken = samples_of(text, known)
        if broken or not any(line.startswith(_OWN[server.engine]) for line in text.splitlines()):
            return None
        sums: dict[str, float] = {}
        for sample in samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums if all(math.isfinite(value) and value >= 0 for value in sums.values()) else None
