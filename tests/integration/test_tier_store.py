"""Workers that share nothing but a store: the same tokens, read from it, when it is wrong, and when it is away."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.up_process import Up, up
from integration.test_nixl_fleet import token_bytes
from integration.topologies import Fleet, Topology, random_prompts
from kv.mooncake_master import Master, master_of
from kv.store_blocks import WAIT_S, use_fake

from kvbaton.kv.tier import MIB, TierOptions
from kvbaton.kv.tier_store import StoreAddress
from kvbaton.kv.tiering import TieringConfig
from kvbaton.types import SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
ONE = Topology("one worker", num_concurrent=1)
BLOCK_TOKENS = 16


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    with master_of(tmp_path) as found:
        yield found


async def answers(fleet: Up, prompts: list[list[int]], salt: str = "") -> list[str]:
    found = []
    for prompt in prompts:
        body: dict[str, Any] = {"cache_salt": salt} if salt else {}
        status, answer, _ = await fleet.post(prompt=prompt, max_tokens=12, ignore_eos=True, **body)
        assert status == 200, answer
        found.append(answer["choices"][0]["text"])
    return found


def total(members: dict[str, dict[str, Any]], name: str) -> float:
    return sum(member["stats"][name] for member in members.values())


def directory(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.peer
async def test_another_host_reads_what_one_computed_and_a_dead_master_changes_no_token(
    tiny_model_dir: Path, tmp_path: Path, master: Master
) -> None:
    prompts = random_prompts(6, longest=150, vocab_size=250, seed=3)
    others = random_prompts(3, longest=150, vocab_size=250, seed=4)
    num_bytes = sum(len(prompt) // BLOCK_TOKENS for prompt in prompts) * BLOCK_TOKENS * token_bytes(tiny_model_dir)
    store = ("--kv-tier-store", master.flag)
    async with up(tiny_model_dir, directory(tmp_path / "alone"), "--colocated", "1") as alone:
        expected = await answers(alone, prompts)
        other_expected = await answers(alone, others)

    async with up(tiny_model_dir, directory(tmp_path / "one"), "--colocated", "1", *store) as one:
        await one.until(lambda members: total(members, "tier_store_up") == 1)
        assert await answers(one, prompts) == expected
        await one.until(lambda members: total(members, "tier_store_written_bytes") >= num_bytes)

        two_flags = ("--prefill", "1", "--decode", "1", "--threshold-tokens", "0", "--kv-tier-memory", "8", *store)
        async with up(tiny_model_dir, directory(tmp_path / "two"), *two_flags) as two:
            await two.until(lambda members: total(members, "tier_store_up") == 2)
            assert await answers(two, prompts) == expected
            await two.until(lambda members: total(members, "num_tier_store_blocks") > 0)
            members = await two.members()
            assert total(members, "num_tier_tokens") > 0 and total(members, "num_tier_wrong_blocks") == 0

            master.kill()
            assert await answers(two, others) == other_expected
            assert await answers(two, prompts, salt="another") == expected
            await two.until(lambda members: total(members, "tier_store_up") == 0)
            assert await answers(one, others) == other_expected

            master.start()
            await two.until(lambda members: total(members, "tier_store_up") == 2)
            before = total(await two.members(), "tier_store_written_bytes")
            number = 0
            while total(await two.members(), "tier_store_written_bytes") == before:  # it rests after an error
                assert await answers(two, others, salt=f"back {number}") == other_expected
                number += 1


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the values of a store in place of Mooncake's are."""
    use_fake(monkeypatch, tmp_path)
    return tmp_path


async def run(fleet: Fleet, prompts: list[list[int]]) -> list[list[int]]:
    for worker in fleet.decode:
        assert worker.engine.tiering is not None
        worker.engine.tiering.config = TieringConfig(deadline_s=WAIT_S)
    found = [answer.token_ids for answer in await fleet.run(prompts, GREEDY)]
    for worker in fleet.decode:
        assert await asyncio.to_thread(worker.engine.tiering.flush, WAIT_S)
    return found


def values_of(directory: Path) -> list[Path]:
    return list(directory.glob("kvbaton-*"))


def flip_last_byte(paths: list[Path]) -> None:
    for path in paths:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)


async def test_of_wrong_values_every_token_is_computed(tiny_model_dir: Path, values: Path) -> None:
    prompts = random_prompts(8, longest=150, vocab_size=250, seed=5)
    num_long = sum(len(prompt) > BLOCK_TOKENS for prompt in prompts)
    assert num_long > 1
    options = {"dtype": "float32", "num_blocks": 128}
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as master:
        tier = TierOptions(store=StoreAddress("127.0.0.1", master.getsockname()[1], MIB))
        async with Fleet(ONE, tiny_model_dir, tier=tier, **options) as fleet:
            expected = await run(fleet, prompts)
        written = values_of(values)
        assert len(written) >= sum(len(prompt) // BLOCK_TOKENS for prompt in prompts)
        here = TierOptions(8 * MIB, secrets.token_hex(8), store=tier.store)
        async with Fleet(ONE, tiny_model_dir, tier=here, **options) as fleet:
            assert await run(fleet, prompts) == expected
            stats = fleet.decode[0].stats()
            assert stats.tier_memory_bytes > 0 == stats.tier_store_written_bytes, "what came in is held here too"
            assert stats.num_tier_store_blocks > 0 and stats.num_tier_wrong_blocks == stats.num_tier_fallbacks == 0
        flip_last_byte(written)
        async with Fleet(ONE, tiny_model_dir, tier=tier, **options) as fleet:
            assert await run(fleet, prompts) == expected
            stats = fleet.decode[0].stats()
            assert stats.num_tier_wrong_blocks == stats.num_tier_fallbacks == num_long
            assert stats.num_tier_tokens == 0 and stats.num_tier_errors == 0
            await fleet.check_empty()
