"""The doctor makes hand-offs between servers of other engines' shapes, and reads their rate where they count it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from doctor.test_other_engines import targets, vllm_pair
from doctor.test_our_workers import KEY, pair_over
from workers.sglang_server import FakeSglang, sglang_pair

from kvbaton.doctor.examine import How, examine
from kvbaton.doctor.facts import Examination, Keys
from kvbaton.doctor.findings import diagnose
from kvbaton.doctor.report import report_text


async def measured(*of: Any, keys: Keys = Keys(), tokens: int = 8, **how: Any) -> Examination:  # noqa: B008
    return await examine(of, keys, How(num_tokens=tokens, repeats=3, **how))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbaton.doctor.transfers._COUNTED_S", 0.2)


async def test_two_vllm_servers_hand_off_and_decode_counts_what_it_pulled() -> None:
    async with vllm_pair() as (prefill, decode):
        found = await measured(*targets(prefill, decode), keys=Keys(vllm="secret"))
        (pair,) = found.pairs
        assert (pair.num_bytes, pair.seconds, pair.repeats) == (4096, 0.5, 3), "over both ranks"
        assert diagnose(found) == [] and "0.00 MB in 500.00 ms" in report_text(found, [])
        assert [one.code for one in diagnose(found, min_gb_per_s=1.0)] == ["slow"]
        first, second = prefill.bodies[-1], decode.bodies[-1]
        assert first["prompt"] == second["prompt"] and len(first["prompt"]) == 2 * 128 + 1
        assert first["cache_salt"] == second["cache_salt"] != prefill.bodies[-2]["cache_salt"]
        assert (first["max_tokens"], second["max_tokens"]) == (1, 2)
        assert second["kv_transfer_params"]["remote_block_ids"] == [[1]], "as it was offered"


async def test_a_vllm_server_that_computes_what_it_should_pull_is_found(impatient: None) -> None:
    async with vllm_pair(pulls=(0, 0.0)) as (prefill, decode):
        (finding,) = diagnose(await measured(*targets(prefill, decode)))
        assert finding.code == "hand-off" and "no bytes moved" in finding.what


async def test_a_vllm_server_that_fails_says_why() -> None:
    async with vllm_pair() as (prefill, decode):
        decode.refuses = "EngineCore is gone"
        found = await measured(*targets(prefill, decode))
        (finding,) = diagnose(found)
        assert (finding.code, finding.subject) == ("hand-off", "p -> d") and "EngineCore is gone" in finding.what


@pytest.mark.parametrize("how", [{"probe": False}, {"tokens": 0}])
async def test_nothing_is_handed_off_where_nothing_may_be_asked(how: dict[str, Any]) -> None:
    async with vllm_pair() as (prefill, decode):
        found = await measured(*targets(prefill, decode), **how)
        assert found.pairs == () and not any("cache_salt" in body for body in (*prefill.bodies, *decode.bodies))


async def test_servers_of_two_connectors_are_not_asked() -> None:
    async with vllm_pair(connector="mooncake") as (prefill, decode):
        assert (await measured(*targets(prefill, decode))).pairs == ()


def counts(server: FakeSglang, megabytes: float, milliseconds: float) -> None:
    """From now on it counts that much for each request that it ends."""
    num = 0
    plain, whole = server.metrics, server._whole

    async def ended(body: dict[str, Any]) -> Any:
        nonlocal num
        num += 1
        server.metrics = plain + shown(num)
        return await whole(body)

    def shown(num: int) -> str:
        sums = {"kv_transfer_total_mb": megabytes, "kv_transfer_latency_ms": milliseconds}
        return "".join(f"sglang:{name}_sum {num * each}\n" for name, each in sums.items())

    server.metrics += shown(0)
    server._whole = ended  # type: ignore[method-assign]


async def test_two_sglang_servers_meet_in_a_room_and_prefill_counts_what_it_sent() -> None:
    async with sglang_pair() as (prefill, decode):
        counts(prefill, 2.0, 4.0)
        found = await measured(*targets(prefill, decode))
        (pair,) = found.pairs
        assert diagnose(found) == [] and (pair.num_bytes, pair.repeats) == (2 * 2**20, 3)
        assert pair.seconds == pytest.approx(0.004)
        assert [body["bootstrap_room"] for body in prefill.bodies] == [body["bootstrap_room"] for body in decode.bodies]
        assert len({body["bootstrap_room"] for body in prefill.bodies}) == 3
        assert {(body["bootstrap_host"], body["bootstrap_port"]) for body in decode.bodies} == {
            ("127.0.0.1", prefill.bootstrap_port)
        }


async def test_sglang_servers_without_figures_of_transfers_hand_off_all_the_same() -> None:
    async with sglang_pair() as (prefill, decode):
        found = await measured(*targets(prefill, decode))
        (pair,) = found.pairs
        assert diagnose(found) == [] and pair.repeats == 3 and pair.gb_per_s is None
        assert "p -> d: handed off; the rate is not measured" in report_text(found, [])


@pytest.mark.parametrize("broken", ["prefill", "decode"])
async def test_an_sglang_leg_that_fails_ends_the_other_and_both_are_told(broken: str) -> None:
    async with sglang_pair() as (prefill, decode):
        server, other = (prefill, decode) if broken == "prefill" else (decode, prefill)
        server.status = 500
        async with asyncio.timeout(30):  # the other would wait for its peer for ever
            found = await measured(*targets(prefill, decode))
        assert [one.code for one in diagnose(found)] == ["hand-off"] and "it broke" in found.pairs[0].trouble
        assert server.aborted == other.aborted == [server.bodies[0]["rid"]]


async def test_an_sglang_server_that_gives_up_is_no_hand_off() -> None:
    async with sglang_pair() as (prefill, decode):
        decode.ending = {"type": "abort", "message": "the room is closed"}
        found = await measured(*targets(prefill, decode))
        assert "the room is closed" in found.pairs[0].trouble


async def test_workers_over_sglang_have_the_rate_that_their_servers_count(tiny_model_dir: Any) -> None:
    async with sglang_pair() as (prefill, decode):
        for server in (prefill, decode):
            server.tokens, server.ending = [11, 12], {"type": "length", "length": 2}
        counts(prefill, 1.0, 2.0)
        async with pair_over("sglang", prefill.url, decode.url, tiny_model_dir) as ours:
            found = await measured(*ours, keys=Keys(KEY))
            assert diagnose(found) == [] and found.pairs[0].num_bytes == 2**20
            assert found.pairs[0].seconds == pytest.approx(0.002)
            behind = {one.name: one for one in found.servers if one.behind}
            assert behind.keys() == {"p's SGLang", "d's SGLang"} and behind["p's SGLang"].version == "0.6.1"
            decode.info["page_size"] = 32
            assert "block-size" in [one.code for one in diagnose(await measured(*ours, keys=Keys(KEY), tokens=0))]
            decode.key = prefill.key = "secret"
            (told, *_) = findings = diagnose(await measured(*ours, keys=Keys(KEY)))
            assert [(one.severity, one.code) for one in findings] == [("info", "untold")] * 2
            assert "SGLANG_API_KEY" in told.what
