"""A decode worker or the way to it fails: refuses, hangs up, falls silent, is cut off one way, drains, is slow."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from router.fleet import LONG, SHORT, running_fleet
from router.gates import gate_of
from router.rig import Rig, make_rig, read_stream
from workers.scripted import sse_events, until

from kvbaton.engine.tokenizer import Tokenizer

PROMPT = "the quick brown fox and the lazy dog, " * 3
BODY = {"prompt": PROMPT, "temperature": 1, "seed": 5, "max_tokens": 24, "ignore_eos": True}
SPLIT2: Any = {"p0": "prefill", "d0": "decode", "d1": "decode"}
# Long enough for a first token on a busy machine, short enough to wait for.
IMPATIENT = {"first_token_min_s": 1.5, "first_token_factor": 1.0, "stream_stall_s": 1.0}


def favour(rig: Rig, name: str) -> Any:
    """As if every other decode worker were very busy, until the block is left."""
    others = [m for m in rig.fleet.registry.members if m.role != "prefill" and m.name != name]
    assert len(others) == 1
    return rig.fleet.registry.hold(others[0], 50, 0)


async def test_decode_that_refuses_connections_is_gone_around(tiny_model_dir: Path) -> None:
    """It died before admission, and nobody knew: one more attempt, and nobody notices."""
    async with make_rig(tiny_model_dir, SPLIT2) as rig:
        expected = await rig.expected(BODY)
        await rig.http_proxies["d0"].refuse()
        with favour(rig, "d0"):
            told = await rig.ask(BODY)
        assert told.answer == expected.answer and told.headers["x-kvbaton-decode"] == "d1"
        assert rig.retries("unreachable") == 1
        status, answer, _ = await rig.fleet.post({**BODY, "stream": False})
        assert status == 200 and answer["choices"][0]["text"] == expected.texts[0]


async def test_the_only_decode_worker_freezes_and_a_prefill_worker_answers(tiny_model_dir: Path) -> None:
    """When its first token is missed its polls have failed too: nobody is left to decode, and two could answer."""
    roles: Any = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
    impatient = {"first_token_min_s": 0.3, "first_token_factor": 0.01, "request_timeout_s": 600.0}
    async with running_fleet(Tokenizer.load(tiny_model_dir), roles, **impatient) as fleet:
        frozen = fleet.workers["d0"]
        frozen.gate.clear()
        post = asyncio.ensure_future(fleet.post({"prompt": LONG, "max_tokens": 3, "stream": True}))
        await until(lambda: frozen.num_open == 1)
        member = fleet.registry.get("d0")
        assert member is not None
        for _ in range(2):
            fleet.registry.poll_failed(member, "timeout", unreachable=False)
        status, raw, _ = await post
        assert status == 200 and sse_events(raw)[-1] == "[DONE]"
        assert any(fleet.workers[name].requests for name in ("p0", "p1"))
        frozen.gate.set()


@pytest.mark.parametrize("stream", [True, False])
async def test_decode_that_dies_with_the_request_before_admission(tiny_model_dir: Path, stream: bool) -> None:
    """The connection is reset when the worker has read the request and answered nothing."""
    async with make_rig(tiny_model_dir, SPLIT2) as rig:
        expected = await rig.expected(BODY)
        rig.http_proxies["d0"].to_client.cut_after_bytes = 1
        with favour(rig, "d0"):
            if stream:
                assert (await rig.ask(BODY)).answer == expected.answer
            else:
                status, answer, _ = await rig.fleet.post(BODY)
                assert (status, answer["choices"][0]["text"]) == (200, expected.texts[0])
        assert rig.retries("worker_error") == 1 and rig.replays("worker_error") == 0


async def test_decode_that_dies_after_the_first_token(tiny_model_dir: Path) -> None:
    """The prefill worker's first token is with the client; not one was decoded."""
    async with make_rig(tiny_model_dir, SPLIT2) as rig:
        expected = await rig.expected(BODY)
        path = rig.http_proxies["d0"].to_client
        path.cut_after_bytes = 700  # headers and the first event or two
        with favour(rig, "d0"):
            told = await rig.ask(BODY)
        assert told.answer == expected.answer
        assert path.num_cut == 1 and rig.replays("worker_error") == 1
        assert 1 <= rig.fleet.counter("kvbaton_router_replayed_tokens_total") <= 3


async def test_a_stream_that_was_retried_and_then_continued_keeps_its_id(tiny_model_dir: Path) -> None:
    """The first worker answers nothing, the second dies in the middle: one answer all the same."""
    async with make_rig(tiny_model_dir, SPLIT2) as rig:
        expected = await rig.expected(BODY)
        rig.http_proxies["d0"].to_client.cut_after_bytes = 1
        rig.http_proxies["d1"].to_client.cut_after_bytes = 2500
        with favour(rig, "d0"):
            told = await rig.ask(BODY)
        assert told.answer == expected.answer
        assert rig.retries("worker_error") == 1 and rig.replays("worker_error") == 1
        assert told.ids == {"cmpl-" + told.headers["x-kvbaton-request-id"]} and len(told.created) == 1


async def test_a_whole_answer_is_computed_again_elsewhere(tiny_model_dir: Path) -> None:
    """Not a stream: nothing was sent, so the second worker begins from the prompt."""
    async with make_rig(tiny_model_dir, SPLIT2) as rig:
        expected = await rig.expected(BODY)
        rig.http_proxies["d0"].to_client.cut_after_bytes = 400  # inside the answer
        with favour(rig, "d0"):
            status, answer, headers = await rig.fleet.post(BODY)
        assert (status, answer["choices"][0]["text"]) == (200, expected.texts[0])
        assert headers["x-kvbaton-decode"] == "d1" and rig.retries("worker_error") == 1


async def test_without_a_decode_pool_prefill_workers_serve(tiny_model_dir: Path) -> None:
    """New requests, and a stream that was open: it ends on the prefill worker."""
    async with make_rig(tiny_model_dir, SPLIT2) as rig:
        expected = await rig.expected(BODY)
        for name in ("d0", "d1"):
            rig.http_proxies[name].to_client.cut_after_bytes = 2500
        assert (await rig.ask(BODY)).answer == expected.answer
        for name in ("d0", "d1"):
            await rig.http_proxies[name].refuse()
        await rig.fleet.poll()
        told = await rig.ask(BODY)
        assert told.answer == expected.answer
        assert told.headers["x-kvbaton-decision"] == "fallback_no_decode"
        for name in ("d0", "d1"):
            await rig.http_proxies[name].listen()
        await rig.fleet.poll()
        assert (await rig.ask(BODY)).headers["x-kvbaton-decision"] == "remote"


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_a_one_way_partition_between_router_and_decode(tiny_model_dir: Path, direction: Any) -> None:
    """The request or its answer does not arrive: patience ends, another worker is asked, polls tell the rest."""
    async with make_rig(tiny_model_dir, SPLIT2, poll_timeout_s=1.0, **IMPATIENT) as rig:
        expected = await rig.expected(BODY)
        proxy = rig.http_proxies["d0"]
        proxy.partition(direction)
        with favour(rig, "d0"):
            told = await rig.ask(BODY)
        assert told.answer == expected.answer and told.headers["x-kvbaton-decode"] == "d1"
        assert rig.retries("slow_first_token") == 1
        for _ in range(2):
            await rig.fleet.poll()
        member = rig.fleet.registry.get("d0")
        assert member is not None and member.state == "down"
        assert (await rig.ask(BODY)).headers["x-kvbaton-decode"] == "d1"
        rig.heal()
        await rig.fleet.poll()
        assert member.state == "up"


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_a_whole_answer_does_not_wait_for_a_worker_that_is_down(tiny_model_dir: Path, direction: Any) -> None:
    """It shows nothing before its end, so only the polls tell. A lone worker is waited for."""
    async with make_rig(tiny_model_dir, SPLIT2, poll_timeout_s=1.0) as rig:
        expected = await rig.expected(BODY)
        rig.http_proxies["d0"].partition(direction)
        with favour(rig, "d0"):
            asking = asyncio.ensure_future(rig.fleet.post(BODY))
            first = rig.fleet.registry.get("d0")
            assert first is not None
            await until(lambda: first.own_requests == 1)
            for _ in range(2):
                await rig.fleet.poll()
            status, answer, headers = await asking
        assert (status, answer["choices"][0]["text"]) == (200, expected.texts[0])
        assert headers["x-kvbaton-decode"] == "d1" and rig.retries("down") == 1


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_a_partition_in_the_middle_of_a_stream(tiny_model_dir: Path, direction: Any) -> None:
    """Only the way back matters then: a stream that cannot be heard is continued, one whose worker hears nothing
    more from us goes on."""
    async with make_rig(tiny_model_dir, SPLIT2, **IMPATIENT) as rig:
        expected = await rig.expected(BODY)
        path = rig.http_proxies["d0"].path(direction)
        with favour(rig, "d0"):
            if direction == "to_client":
                path.stall_after_bytes = 2500
                told = await rig.ask(BODY)
                assert rig.replays("stalled") == 1
            else:
                member = rig.fleet.registry.get("d0")
                assert member is not None
                asking = asyncio.ensure_future(rig.ask(BODY))
                await until(lambda: rig.http_proxies["d0"].to_client.num_bytes > 2500 or asking.done())
                path.stall()
                told = await asking
                assert rig.replays("stalled") == 0
        assert told.answer == expected.answer


async def test_a_worker_cut_off_by_its_drain_deadline_loses_no_stream(tiny_model_dir: Path) -> None:
    """It drains, its deadline passes with a stream open: the error event is ours to act on, not the client's."""
    async with make_rig(tiny_model_dir, {"d0": "both", "d1": "both"}) as rig:
        body = {**BODY, "max_tokens": 300}
        expected = await rig.expected(body)
        gated = gate_of(rig.workers["d0"])
        gated.shut_after_steps = 30
        with favour(rig, "d0"):
            asking = asyncio.ensure_future(rig.ask(body))
            await until(lambda: gated.inside.is_set() and rig.http_proxies["d0"].to_client.num_bytes > 4000)
            rig.servers["d0"].state = "draining"
            assert await rig.servers["d0"].open.drained(0.0) is False
            told = await asking
            gated.gate.set()
        assert told.answer == expected.answer
        assert rig.replays("draining") == 1


async def test_a_slow_worker_is_given_up_only_when_another_can_help(tokenizer: Tokenizer) -> None:
    """Gray failure: it answers polls and computes nothing. Alone, it is waited for."""
    settings = {"first_token_min_s": 0.6, "first_token_factor": 1.0, "threshold_tokens": 64}
    async with running_fleet(tokenizer, {"b0": "both", "b1": "both"}, **settings) as fleet:
        slow, quick = fleet.workers["b0"], fleet.workers["b1"]
        slow.gate.clear()
        answers = [await fleet.post({"prompt": SHORT, "stream": True}) for _ in range(4)]
        assert all(status == 200 for status, _, _ in answers)
        assert all(headers["x-kvbaton-decode"] == "b1" for _, _, headers in answers)
        assert 1 <= fleet.counter('kvbaton_router_retries_total{cause="slow_first_token"}') <= 4
        assert slow.num_open == 0 and len(quick.requests) == 4
        await fleet.kill("b1")
        await fleet.poll()
        alone = asyncio.ensure_future(fleet.post({"prompt": SHORT, "stream": True}))
        await until(lambda: slow.num_open == 1)
        await asyncio.wait((alone,), timeout=3 * settings["first_token_min_s"])
        assert not alone.done(), "nobody else could be asked"
        slow.gate.set()
        status, raw, headers = await alone
        assert status == 200 and read_stream(raw, status, headers).texts[0].startswith("hello from b0")


async def test_a_fleet_that_is_slow_as_a_whole_is_not_asked_twice_for_all(tokenizer: Tokenizer) -> None:
    """Impatience has a budget: of many requests only few are sent again."""
    settings = {"first_token_min_s": 0.1, "first_token_factor": 1.0}
    async with running_fleet(tokenizer, {"b0": "both", "b1": "both"}, **settings) as fleet:
        for worker in fleet.workers.values():
            worker.gate.clear()
        posts = [asyncio.ensure_future(fleet.post({"prompt": f"{i} {SHORT}", "stream": True})) for i in range(60)]
        line = 'kvbaton_router_retries_total{cause="slow_first_token"}'
        await until(lambda: sum(len(w.requests) for w in fleet.workers.values()) >= 60 and fleet.counter(line) >= 10)
        for worker in fleet.workers.values():
            worker.gate.set()
        assert [status for status, _, _ in await asyncio.gather(*posts)] == [200] * 60
        assert fleet.counter(line) <= 17, "ten that were saved up, and a tenth of seventy"
