"""What engines count of their own transfers: how much KV moved and how long it took, as differences of their figures.

vLLM's and SGLang's show histograms of both, on the side that moves it: the decode server where it pulls
(NixlConnector), the prefill server where it pushes (MooncakeConnector, SGLang). TensorRT-LLM's show neither. Over
several ranks bytes and seconds are sums, so the rate is that of one rank. Invariants: what no figure tells is None,
never zero; every wait has an end. Knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from kvbaton.doctor.facts import ServerFacts
from kvbaton.types import RemoteError
from kvbaton.workers.vllm_metrics import samples_of

if TYPE_CHECKING:
    from kvbaton.doctor.look import Asking

_COUNTED_S = 10.0  # until an engine that has answered has counted it
_POLL_S = 0.1


class _Figure(msgspec.Struct, frozen=True):
    of_bytes: str
    byte_unit: float  # bytes in one of them
    of_time: str
    time_unit: float  # seconds in one of them


_FIGURES = {
    "vllm": (
        _Figure("vllm:nixl_bytes_transferred_sum", 1, "vllm:nixl_xfer_time_seconds_sum", 1),
        _Figure("vllm:mooncake_bytes_transferred_sum", 1, "vllm:mooncake_xfer_time_seconds_sum", 1),
    ),
    "sglang": (_Figure("sglang:kv_transfer_total_mb_sum", 2**20, "sglang:kv_transfer_latency_ms_sum", 1e-3),),
}


class Moved(msgspec.Struct, frozen=True):
    """Of one server, since it started or since another reading."""

    num_bytes: float
    seconds: float

    def since(self, before: Moved) -> Moved:
        return Moved(self.num_bytes - before.num_bytes, self.seconds - before.seconds)


class Transfers:
    """The figures of the servers of one pair: ``start`` before a hand-off, ``moved`` after it."""

    def __init__(self, asking: Asking, servers: tuple[ServerFacts, ...]) -> None:
        self._asking = asking
        self._servers = [server for server in servers if server.engine in _FIGURES]
        self._before: list[Moved | None] = []

    async def start(self) -> None:
        self._before = await self._read()

    async def moved(self) -> Moved | None:
        """What moved since, by the side that tells more of it. None where no side tells; zero bytes: none moved."""
        if not any(self._before):
            return None
        deadline_s = time.monotonic() + _COUNTED_S
        last = Moved(0, 0)
        while True:
            found = [
                now.since(before)
                for before, now in zip(self._before, await self._read(), strict=True)
                if before is not None and now is not None
            ]
            moved = max(found, key=lambda one: one.num_bytes, default=Moved(0, 0))
            if moved.num_bytes > 0 and moved == last or time.monotonic() >= deadline_s:
                return moved
            last = moved  # other ranks may count theirs a moment later
            await asyncio.sleep(_POLL_S)

    async def _read(self) -> list[Moved | None]:
        return [await self._read_one(server) for server in self._servers]

    async def _read_one(self, server: ServerFacts) -> Moved | None:
        try:
            text = (await self._asking.get(server.url + "/metrics")).body.decode(errors="replace")
        except RemoteError:
            return None
        figures = _FIGURES[server.engine]
        known = frozenset(name for each in figures for name in (each.of_bytes, each.of_time))
        sums: dict[str, float] = {}
        for sample in samples_of(text, known)[0]:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        for each in figures:
            if each.of_bytes in sums and each.of_time in sums:
                return Moved(sums[each.of_bytes] * each.byte_unit, sums[each.of_time] * each.time_unit)
        return None
