"""The doctor makes hand-offs between servers of other engines' shapes, and reads their rate where they count it."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from doctor.test_other_engines import targets, vllm_pair
from doctor.test_our_workers import KEY, pair_over, worker
from workers.scripted import until
from workers.sglang_server import FakeSglang, listen, sglang_pair

from kvbaton.doctor.examine import How, examine
from kvbaton.doctor.facts import Examination, Keys, Target
from kvbaton.doctor.findings import diagnose
from kvbaton.doctor.report import report_text


async def measured(*of: Any, keys: Keys = Keys(), tokens: int = 8, **how: Any) -> Examination:  # noqa: B008
    return await examine(of, keys, How(num_tokens=tokens, repeats=3, **how))


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


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


async def test_servers_that_do_not_fit_are_not_tried() -> None:
    """SGLang's decode server ends for it, with everything that it serves."""
    async with vllm_pair(hash="other") as (prefill, decode):
        found = await measured(*targets(prefill, decode))
        assert [one.code for one in diagnose(found)] == ["compatibility-hash"] and found.pairs == ()
    async with sglang_pair() as (prefill, decode):
        decode.info["page_size"] = 32
        found = await measured(*targets(prefill, decode))
        assert [one.code for one in diagnose(found)] == ["block-size"] and found.pairs == ()
        decode.info |= {"page_size": 16, "pp_size": 2}  # by a rule of its own
        found = await measured(*targets(prefill, decode))
        assert "does not fit" in found.pairs[0].trouble and prefill.bodies == decode.bodies == []


async def test_a_context_without_room_for_two_blocks_is_not_tried() -> None:
    async with vllm_pair(block_size=2048) as (prefill, decode):
        prefill.block_size = 2048
        found = await measured(*targets(prefill, decode))
        assert diagnose(found) == [] and found.pairs == ()


@pytest.mark.parametrize("figure", [float("nan"), float("inf")])
async def test_a_figure_that_is_no_number_is_not_known(figure: float, impatient: None) -> None:
    async with vllm_pair() as (prefill, decode):
        decode.moved = (figure, 1.0)
        found = await measured(*targets(prefill, decode))
        assert diagnose(found) == [] and found.pairs[0].gb_per_s is None and found.pairs[0].num_bytes == 0


async def test_figures_that_go_away_or_begin_anew_are_not_known(impatient: None) -> None:
    async with vllm_pair() as (prefill, decode):
        decode.on_pull = lambda: setattr(decode, "hidden", True)
        found = await measured(*targets(prefill, decode))
        assert diagnose(found) == [] and found.pairs[0].gb_per_s is None
        decode.hidden, decode.moved = False, (1 << 20, 1.0)
        decode.on_pull = lambda: setattr(decode, "moved", (4096, 0.1))
        found = await examine(targets(prefill, decode), Keys(), How(num_tokens=8, repeats=1))
        assert diagnose(found) == [] and found.pairs[0].gb_per_s is None and found.pairs[0].num_bytes == 0


async def test_a_server_that_counts_nothing_does_not_make_the_next_one_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share a prefill server, which has nothing to count; the second counts late."""
    monkeypatch.setattr("kvbaton.doctor.transfers._SILENT_S", 0.0)
    monkeypatch.setattr("kvbaton.doctor.transfers._COUNTED_S", 1.0)
    async with vllm_pair(pulls=(0, 0.0)) as (prefill, silent), vllm_pair(pulls=(0, 0.0)) as (_, late):
        late.on_pull = lambda: asyncio.get_running_loop().call_later(0.3, setattr, late, "moved", (4096, 0.5))
        pair = (*targets(prefill, silent), Target("late", "decode", late.url))
        found = await examine(pair, Keys(), How(num_tokens=8, repeats=1))
        assert [one.trouble != "" for one in found.pairs] == [True, False]
        assert found.pairs[1].num_bytes == 4096


async def test_the_hand_off_with_the_median_rate_is_told(impatient: None) -> None:
    pulls = iter([(10**6, 1e-3), (10**7, 1e-2), (10**6, 1e-3)])
    async with vllm_pair() as (prefill, decode):

        def pull() -> None:
            decode.pulls = next(pulls, decode.pulls)

        decode.pulls, decode.on_pull = next(pulls), pull
        (pair,) = (await measured(*targets(prefill, decode))).pairs
        assert pair.gb_per_s == pytest.approx(1.0) and pair.num_bytes in (10**6, 10**7)


async def test_a_last_hand_off_that_is_not_counted_leaves_the_rate_of_the_others(impatient: None) -> None:
    async with vllm_pair() as (prefill, decode):

        def pull() -> None:
            decode.hidden = sum("cache_salt" in body for body in decode.bodies) == 3

        decode.on_pull = pull
        found = await measured(*targets(prefill, decode))
        assert found.pairs[0].num_bytes == 4096 and found.pairs[0].seconds == pytest.approx(0.5)


async def test_servers_of_two_connectors_are_not_asked() -> None:
    async with vllm_pair(connector="mooncake") as (prefill, decode):
        assert (await measured(*targets(prefill, decode))).pairs == ()


def counts(server: FakeSglang, megabytes: float, milliseconds: float) -> None:
    """From now on it counts that much for each request that it ends. Before there is no figure, as with real ones."""
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


async def test_sglang_servers_without_figures_of_transfers_hand_off_all_the_same(impatient: None) -> None:
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


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"error": {"message": "no \x1b[31mroom"}}, "d gave up: no  [31mroom"),
        ({}, "d answers with no tokens"),
        ([], "the answer of d cannot be read"),
    ],
)
async def test_an_sglang_answer_without_tokens_is_no_hand_off(answer: Any, expected: str) -> None:
    async with sglang_pair() as (prefill, decode):

        async def whole(body: dict[str, Any]) -> web.Response:
            return web.json_response(answer)

        decode._whole = whole  # type: ignore[method-assign]
        found = await measured(*targets(prefill, decode))
        assert expected in found.pairs[0].trouble


@pytest.mark.parametrize("hanging", ["prefill", "decode"])
async def test_sglang_servers_that_wait_for_each_other_are_both_named_and_told(hanging: str) -> None:
    async with sglang_pair() as (prefill, decode):
        (prefill if hanging == "prefill" else decode).hold.clear()
        found = await measured(*targets(prefill, decode), model_s=0.3)
        assert "p and d do not answer within 0.3 s" in found.pairs[0].trouble
        assert prefill.aborted == decode.aborted == [prefill.bodies[0]["rid"]]


async def test_who_interrupts_the_doctor_leaves_nothing_waiting() -> None:
    async with sglang_pair() as (prefill, decode):
        decode.hold.clear()
        examining = asyncio.create_task(measured(*targets(prefill, decode)))
        await until(lambda: prefill.num_open == decode.num_open == 1)
        examining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await examining
        assert prefill.aborted == decode.aborted == [prefill.bodies[0]["rid"]]


@pytest.mark.skipif(not has_ipv6(), reason="no ::1 here")
async def test_sglang_servers_by_ipv6(tiny_model_dir: Path) -> None:
    async with sglang_pair("::1") as (prefill, decode):
        for server in (prefill, decode):
            server.tokens, server.ending = [11, 12], {"type": "length", "length": 2}
        counts(prefill, 2.0, 4.0)
        bare = await measured(*targets(prefill, decode))
        assert diagnose(bare) == [] and bare.pairs[0].num_bytes == 2 * 2**20
        async with pair_over("sglang", prefill.url, decode.url, tiny_model_dir, host="::1") as ours:
            behind = await measured(*ours, keys=Keys(KEY))
            assert diagnose(behind) == [] and behind.pairs[0].num_bytes == 2 * 2**20
        assert {body["bootstrap_host"] for body in decode.bodies} == {"[::1]"}


async def test_what_an_sglang_server_calls_its_model_and_its_own_address_is_no_fault(tiny_model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        prefill, decode = await stack.enter_async_context(sglang_pair())
        for server in (prefill, decode):
            server.tokens, server.ending = [11, 12], {"type": "length", "length": 2}
        decode.name = "/data/models/m"
        counts(prefill, 1.0, 2.0)
        bare = await measured(*targets(prefill, decode))
        assert diagnose(bare) == [] and bare.pairs[0].repeats == 3
        app = web.Application()
        app.router.add_get("/route", prefill.route)
        mapped = await listen(stack, app)  # peers find its bootstrap server here, and not where it says
        prefill.bootstrap_port = 1
        first = await stack.enter_async_context(worker("sglang", "prefill", prefill.url, tiny_model_dir))
        second = await stack.enter_async_context(worker("sglang", "decode", decode.url, tiny_model_dir))
        ours = (Target("p", "prefill", first, f"127.0.0.1:{mapped}"), Target("d", "decode", second))
        found = await measured(*ours, keys=Keys(KEY))
        assert diagnose(found) == [] and found.pairs[0].num_bytes == 2**20


async def test_a_server_that_only_its_worker_reaches_is_no_fault(tiny_model_dir: Path) -> None:
    async with (
        sglang_pair() as (prefill, decode),
        worker("sglang", "prefill", prefill.url, tiny_model_dir, kv_host="10.77.0.1") as first,
        worker("sglang", "decode", decode.url, tiny_model_dir) as second,
    ):
        target = Target("p", "prefill", first, f"127.0.0.1:{prefill.bootstrap_port}")
        found = await measured(target, Target("d", "decode", second), keys=Keys(KEY), tokens=0)
        assert diagnose(found) == []
        assert [one.name for one in found.servers] == ["p", "p's SGLang", "d", "d's SGLang"]
        decode.hides = True
        found = await measured(target, Target("d", "decode", second), keys=Keys(KEY), tokens=0)
        (finding,) = diagnose(found)
        assert finding.severity == "info" and f"what answers at {decode.url} is none" in finding.what


@pytest.mark.parametrize("port", [99999, 65536])
async def test_a_port_that_there_is_not(port: int) -> None:
    async with sglang_pair() as (prefill, decode):
        prefill.bootstrap_port = port
        found = await measured(*targets(prefill, decode))
        assert "kv-port" in [one.code for one in diagnose(found)]


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
