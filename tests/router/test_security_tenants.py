"""What the prefix cache tells one tenant of another: nothing, whatever salt it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.fleet import KEY
from router.test_auth import ALICE, BOB, bearer, keys
from router.test_real_fleet import RealFleet, real_fleet

from kvbaton.router.door import Door

SECRET_PROMPT = "the secret prompt of one tenant, " * 8


@dataclass(frozen=True)
class Seen:
    """All that an asker, or whoever times it, can tell a hit from a miss by. Computed tokens stand for the time."""

    cached_tokens: int  # as the answer says
    foretold_tokens: float  # by the router's index, which decides where it goes
    computed_tokens: int  # on every worker together


async def ask(split: RealFleet, key: str, **extra: Any) -> Seen:
    def totals() -> tuple[float, int]:
        computed = sum(worker.stats().num_prompt_tokens for worker in split.workers.values())
        return split.fleet.counter("kvbaton_router_foretold_cached_tokens_total"), computed

    foretold, computed = totals()
    body = {"prompt": SECRET_PROMPT, "max_tokens": 2, "temperature": 0, **extra}
    status, answer, _ = await split.fleet.post(body, **bearer(key))
    assert status == 200, answer
    await split.fleet.settled()
    foretold_now, computed_now = totals()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Seen(cached, foretold_now - foretold, computed_now - computed)


async def hashes(split: RealFleet) -> set[bytes]:
    """What KV events and snapshots name."""
    return {each for worker in split.workers.values() for each in (await worker.kv_events.snapshot())[1]}


async def test_se_06_a_tenant_is_who_its_key_says(tiny_model_dir: Path) -> None:
    """SE-06: B asks what A asked, also under A's salt, and under the one that is made of it; only A ever hits."""
    async with real_fleet(tiny_model_dir, {"p0": "prefill", "d0": "decode"}) as split:
        door = split.fleet.gateway.door = Door(keys(), KEY.encode())
        cold = await ask(split, ALICE, cache_salt="hers")
        assert cold.cached_tokens == cold.foretold_tokens == 0 and cold.computed_tokens > 0
        of_alice = await hashes(split)
        assert of_alice
        for salt in ("", "hers", "alice", door.salt("alice", "hers"), door.salt("alice", "")):
            assert await ask(split, BOB, cache_salt=salt) == cold, salt
        of_bob = await hashes(split) - of_alice
        assert len(of_bob) >= len(of_alice), "not one block of B's is named as one of A's"
        warm = await ask(split, ALICE, cache_salt="hers")
        assert warm.cached_tokens > 0 and warm.foretold_tokens > 0
        assert warm.computed_tokens < cold.computed_tokens
        assert await ask(split, ALICE, cache_salt="another of hers") == cold, "a client's salt narrows"


def test_a_tenants_salt_cannot_be_made_by_another() -> None:
    """Nor by who knows its name, nor by names and salts that run into each other."""
    door = Door(keys(), b"the fleet's secret")
    salts = {
        door.salt("alice", ""), door.salt("alice", "b"), door.salt("aliceb", ""), door.salt("a", "liceb"),
        Door(keys(), b"another fleet's").salt("alice", ""), door.salt("", "alice"),
        door.salt("bob", door.salt("alice", "")),
    }  # fmt: skip
    assert len(salts) == 7
    assert door.salt("alice", "b") == Door(keys(), b"the fleet's secret").salt("alice", "b"), "on every router"
    assert door.salt("", "mine") == "mine", "without API keys nobody is a tenant"
