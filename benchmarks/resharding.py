"""What it costs that prefill and decode share the KV heads by unequal numbers of ranks.

    python -m benchmarks.resharding [--rounds 15] [--tokens 2048] [--transports shm,tcp] [--json FILE]

Real hand-offs over real pools between a lender and a reader in this process; nothing is computed: the lender has all KV
at once, so what is measured is reading it. Every arm moves the same bytes (the KV of one prompt). In each round every
arm has its turn, in an order that turns with the rounds, and is compared with the equal arm of the same round: one rank
on each side, the same blocks. Medians, with the 95% interval of the paired ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass

import msgspec

from kvbaton.bench.stats import summarize
from kvbaton.kv.compat import fingerprint_of
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.rank_pools import AnyPool, RankPools
from kvbaton.kv.reshard import head_ranges
from kvbaton.kv.shared_pool import SharedPool, segment_name
from kvbaton.transfer.client import Completed, HandoffClient
from kvbaton.transfer.identity import Transport, host_identity
from kvbaton.transfer.lending import PrefillSink
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.server import HandoffServer
from kvbaton.transfer.sharding import rank_pools_of
from kvbaton.transfer.wire import Identity
from kvbaton.types import GenerateRequest, SamplingParams, TokenOutput

# A quarter of the layers of an 8B model, so that a long prompt fits anywhere.
LAYOUT = KVLayout(num_layers=8, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")


@dataclass(frozen=True)
class Arm:
    prefill_tp: int
    decode_tp: int
    prefill_block_size: int = 16
    prefill_order: str = "HND"

    @property
    def name(self) -> str:
        what = f"TP {self.prefill_tp} to TP {self.decode_tp}"
        if self.prefill_block_size != LAYOUT.block_size:
            what += f", blocks of {self.prefill_block_size} to {LAYOUT.block_size}"
        return what + (f", {self.prefill_order} to HND" if self.prefill_order != "HND" else "")


EQUAL = Arm(1, 1)
ARMS = (
    EQUAL,
    *(Arm(2, 2), Arm(4, 4)),
    *(Arm(2, 1), Arm(1, 2), Arm(4, 1), Arm(1, 4), Arm(4, 2), Arm(2, 4), Arm(2, 3), Arm(3, 2)),
    *(Arm(2, 1, 32), Arm(1, 2, 32), Arm(2, 1, prefill_order="NHD")),
)


class Computed:
    """A prefill backend that has everything already."""

    def __init__(self, num_tokens: int, layout: KVLayout) -> None:
        self._blocks = tuple(range(layout.blocks_for(num_tokens)))
        self._num_tokens = num_tokens

    def start(self, request: GenerateRequest, have_tokens: int, sink: PrefillSink) -> None:
        sink.on_offer(self._blocks, self._num_tokens, self._num_tokens)
        sink.on_first(TokenOutput(1))

    def release(self, request_id: str) -> None: ...

    def abort(self, request_id: str) -> None: ...

    async def renew(self, request_id: str, lease_s: float) -> bool:
        return True


def make_pool(layout: KVLayout, num_blocks: int, tp: int, name: str) -> AnyPool:
    if tp == 1:
        return SharedPool.create(layout, num_blocks, segment_name(name), name)
    return RankPools.create(layout, num_blocks, head_ranges(layout.num_kv_heads, tp), name)


def identity_of(pool: AnyPool) -> Identity:
    ranks = rank_pools_of(pool)
    fingerprint = msgspec.structs.replace(fingerprint_of(pool.layout, "none", "none"), tp_size=max(1, len(ranks)))
    return Identity(
        fingerprint, pool.layout, pool.num_blocks, pool.incarnation, host_identity(), pool.name, ranks=ranks
    )


class Pair:
    """The lender and the reader of one arm."""

    def __init__(self, arm: Arm, transport: Transport, num_tokens: int) -> None:
        size, order = arm.prefill_block_size, arm.prefill_order
        source = msgspec.structs.replace(LAYOUT, block_size=size, order=order)
        self._options = HandoffOptions(transport=transport)
        name = f"reshard-{time.monotonic_ns()}"
        self.source = make_pool(source, source.blocks_for(num_tokens), arm.prefill_tp, f"{name}-p")
        self.pool = make_pool(LAYOUT, LAYOUT.blocks_for(num_tokens), arm.decode_tp, f"{name}-d")
        backend = Computed(num_tokens, source)
        self._server = HandoffServer(identity_of(self.source), self.source, backend, self._options)
        self._client = HandoffClient(identity_of(self.pool), self.pool, self._options)
        self._request = GenerateRequest("", tuple(range(num_tokens)), SamplingParams(max_tokens=8))
        self._port = 0

    async def start(self) -> None:
        for pool in (self.source, self.pool):  # every page is there before anything is timed
            for own in pool.pools if isinstance(pool, RankPools) else (pool,):
                own.buffer[:] = 1
        self._port = await self._server.start()

    async def pull(self, index: int) -> tuple[float, int]:
        """Seconds from the first word to the last byte, and bytes."""
        request = msgspec.structs.replace(self._request, request_id=f"pull-{index}")
        blocks = range(self.pool.num_blocks)
        async for event in self._client.pull(("127.0.0.1", self._port), request, 0, blocks, 60.0):
            if isinstance(event, Completed):
                return event.transfer_s, event.num_bytes
        raise AssertionError("a pull ends with Completed")

    async def close(self) -> None:
        await self._client.close()
        await self._server.stop()
        for pool in (self.source, self.pool):
            pool.unlink()
            pool.close()


async def run(args: argparse.Namespace, transport: Transport) -> list[dict]:
    pairs = {arm: Pair(arm, transport, args.tokens) for arm in ARMS}
    seconds: dict[Arm, list[float]] = {arm: [] for arm in ARMS}
    try:
        for pair in pairs.values():
            await pair.start()
        for index in range(-1, args.rounds):  # the first round connects, and is not counted
            turn = index % len(ARMS)
            for arm in ARMS[turn:] + ARMS[:turn]:
                took_s, num_bytes = await pairs[arm].pull(index)
                assert num_bytes == args.tokens * LAYOUT.token_bytes, f"{arm.name}: {num_bytes} bytes"
                if index >= 0:
                    seconds[arm].append(took_s)
    finally:
        for pair in pairs.values():
            await pair.close()
    return [row(arm, transport, args.tokens, seconds[arm], seconds[EQUAL]) for arm in ARMS]


def row(arm: Arm, transport: Transport, num_tokens: int, took_s: list[float], equal_s: list[float]) -> dict:
    num_bytes = num_tokens * LAYOUT.token_bytes
    ratio = summarize([[mine / equal] for mine, equal in zip(took_s, equal_s, strict=True)])
    assert ratio is not None
    interval = ratio.intervals.get("p50")
    return {
        "transport": transport,
        "arm": arm.name,
        "mib": num_bytes / 2**20,
        "rounds": len(took_s),
        "ms": 1e3 * statistics.median(took_s),
        "gb_per_s": num_bytes / statistics.median(took_s) / 1e9,
        "ratio": ratio.p50,
        "ratio_interval": None if interval is None else [interval.low, interval.high],
    }


def print_table(rows: list[dict]) -> None:
    print("| transport | pools | MiB | rounds | ms | GB/s | time, equal = 1 | 95% interval |")
    print("|---|---|---|---|---|---|---|---|")
    for each in rows:
        ends = each["ratio_interval"]
        interval = "" if ends is None else f"{ends[0]:.2f} to {ends[1]:.2f}"
        print(
            f"| {each['transport']} | {each['arm']} | {each['mib']:.0f} | {each['rounds']} | {each['ms']:.1f} "
            f"| {each['gb_per_s']:.2f} | {each['ratio']:.2f} | {interval} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=2048, help="a multiple of 32")
    parser.add_argument("--transports", type=lambda text: text.split(","), default=["shm", "tcp"])
    parser.add_argument("--json", help="also write the rows there")
    args = parser.parse_args()
    rows = [each for transport in args.transports for each in asyncio.run(run(args, transport))]
    print_table(rows)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"tokens": args.tokens, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
