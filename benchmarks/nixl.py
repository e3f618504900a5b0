"""A hand-off over NIXL beside a bare NIXL read of the same bytes: what our protocol costs on top.

    python -m benchmarks.nixl [--mib 64] [--rounds 15] [--json FILE]

One lender in a process of its own, one reader; both registered their pools once. In turns: one read of all bytes, in
as few descriptors as there are layers, by the agent alone; and a pull through the whole hand-off (offer, layers,
generations, acknowledgement) of a prompt that has as many. Medians, and the median of the ratios of neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
import uuid
from pathlib import Path

from kvbaton.bench.link import LinkSpec, identity_of, lender, make_pool, pool_blocks
from kvbaton.kv.layout import KVLayout
from kvbaton.transfer.client import HandoffClient, pull_all
from kvbaton.transfer.nixl_source import NixlPool
from kvbaton.transfer.options import HandoffOptions
from kvbaton.types import GenerateRequest, SamplingParams

# SmolLM2-135M, 16 tokens a block: 360 KiB a block in all layers.
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
DEADLINE_S = 60.0


async def measure(num_bytes: int, rounds: int) -> dict[str, float]:
    num_blocks = num_bytes // LAYOUT.block_bytes
    tokens = num_blocks * LAYOUT.block_size - 1
    spec = LinkSpec(LAYOUT, (tokens,), transport="nixl")
    pool = make_pool(LAYOUT, pool_blocks(spec), named=False)
    pool.buffer[:] = 0
    nixl = NixlPool(pool, pool.incarnation)
    loop = asyncio.get_running_loop()
    bare_s: list[float] = []
    pull_s: list[float] = []
    async with lender(spec) as address:
        client = HandoffClient(identity_of(pool, nixl), pool, HandoffOptions(transport="nixl"), nixl=nixl)
        try:
            peer = await client.connect(address)
            assert peer.nixl is not None
            name = nixl.connect(peer.nixl)
            layer_bytes = num_blocks * LAYOUT.layer_block_bytes
            own = [
                (nixl.data_address + layer * pool.num_blocks * LAYOUT.layer_block_bytes, layer_bytes, 0)
                for layer in range(LAYOUT.num_layers)
            ]
            theirs = [
                (peer.nixl.data_address + layer * peer.num_blocks * LAYOUT.layer_block_bytes, layer_bytes, 0)
                for layer in range(LAYOUT.num_layers)
            ]
            for index in range(-2, rounds):  # two of each warm up
                begun_s = time.perf_counter()
                await loop.run_in_executor(None, nixl.read, name, own, theirs, DEADLINE_S)
                read_s = time.perf_counter() - begun_s
                request = GenerateRequest(uuid.uuid4().hex, (0,) * tokens, SamplingParams(max_tokens=2))
                _, done = await pull_all(client.pull(address, request, 0, range(num_blocks), DEADLINE_S))
                assert done.transport == "nixl" and done.num_bytes == layer_bytes * LAYOUT.num_layers
                if index >= 0:
                    bare_s.append(read_s)
                    pull_s.append(done.transfer_s)
            nixl.disconnect(name)
        finally:
            await client.close()
            nixl.close()
            pool.close()
    moved = num_blocks * LAYOUT.block_bytes
    return {
        "mib": moved / 2**20,
        "bare_gb_per_s": moved / statistics.median(bare_s) / 1e9,
        "pull_gb_per_s": moved / statistics.median(pull_s) / 1e9,
        "pull_over_bare": statistics.median(bare / pull for bare, pull in zip(bare_s, pull_s, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = asyncio.run(measure(given.mib * 2**20, given.rounds))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    print(
        f"{found['mib']:.0f} MiB: bare read {found['bare_gb_per_s']:.2f} GB/s, whole hand-off "
        f"{found['pull_gb_per_s']:.2f} GB/s, {found['pull_over_bare']:.0%} of the bare rate"
    )


if __name__ == "__main__":
    main()
