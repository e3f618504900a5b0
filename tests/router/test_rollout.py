"""A percentage rollout: the right share, always the same requests, and nobody moves back when it grows."""

from __future__ import annotations

from typing import Any

import pytest
from router.fleet import KEY, Fleet, running_fleet

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.router.policy import PolicyConfig, RequestView, decide
from kvbaton.router.rollout import FIRST_TOKENS, bucket
from kvbaton.router.views import MemberView

LONG = "a prompt of many tokens " * 8
P, D = MemberView("p", "prefill", 0, 0, 8_192), MemberView("d", "decode", 0, 0, 8_192)


def arm(percent: float, where: float, tokens: int = 500) -> str:
    view = RequestView(tokens, 1, tokens, tokens + 10, bucket=where)
    return decide(view, (P, D), PolicyConfig(64, disagg_percent=percent), 0, True).arm


def test_buckets_are_spread_evenly_and_stay() -> None:
    buckets = [bucket(f"user-{i}", "", (1, 2, 3)) for i in range(5_000)]
    assert all(0 <= each < 100 for each in buckets)
    for percent in (1, 10, 50, 90):
        assert sum(each < percent for each in buckets) / 50 == pytest.approx(percent, abs=2.5)
    assert buckets == [bucket(f"user-{i}", "", (9,)) for i in range(5_000)], "the prompt of a user does not matter"


def test_what_a_request_sticks_by() -> None:
    prompt = tuple(range(100))
    same_start = (*prompt[:FIRST_TOKENS], *([7] * 50))
    assert bucket("", "", prompt) == bucket("", "", same_start)
    assert len({bucket("x", "", prompt), bucket("", "x", prompt), bucket("", "", prompt), bucket("", "", (1,))}) == 4


def test_a_growing_share_moves_nobody_back() -> None:
    buckets = [bucket(str(i), "", ()) for i in range(500)]
    for percent in (0, 5, 25, 60):
        before, after = ({b for b in buckets if arm(p, b) == "split"} for p in (percent, percent + 30))
        assert before < after
    assert all(arm(0, b) == "single" for b in buckets) and all(arm(100, b) == "split" for b in buckets)


def test_only_requests_fit_for_the_split_are_in_an_arm() -> None:
    assert arm(50, 10, tokens=5) == "none"
    for percent, reason in ((50.0, "remote"), (5.0, "local_rollout")):
        view = RequestView(500, 1, 500, 510, bucket=10)
        busy = (P, MemberView("d", "decode", 40, 0, 8_192))
        assert decide(view, busy, PolicyConfig(disagg_percent=percent), 0, True).reason == reason
    assert decide(view, (D,), PolicyConfig(disagg_percent=5.0), 0, False).arm == "none"


async def ask(fleet: Fleet, user: int) -> str:
    status, _, headers = await fleet.post(
        {"prompt": LONG, "user": f"user-{user}", "stream": True}, "/v1/completions"
    )  # fmt: skip
    assert status == 200
    return str(headers["x-kvbaton-decision"])


async def put(fleet: Fleet, body: Any, key: str = KEY) -> int:
    url = fleet.url + "/internal/rollout"
    async with fleet.http.put(url, json=body, headers={"x-kvbaton-key": key}) as response:
        return response.status


async def test_the_share_is_changed_while_the_router_runs(tokenizer: Tokenizer) -> None:
    roles: Any = {"p0": "prefill", "d0": "decode"}
    async with running_fleet(tokenizer, roles, threshold_tokens=8, disagg_percent=50.0) as fleet:
        half = [await ask(fleet, user) for user in range(24)]
        assert {"remote", "local_rollout"} == set(half)
        assert half == [await ask(fleet, user) for user in range(24)], "sticky"
        assert await put(fleet, {"disagg_percent": 0}) == 200
        assert {await ask(fleet, user) for user in range(6)} == {"local_rollout"}
        assert await put(fleet, {"disagg_percent": 100}) == 200
        assert {await ask(fleet, user) for user in range(6)} == {"remote"}
        await fleet.settled()
        for name in ("split", "single"):
            assert fleet.counter(f'kvbaton_router_arm_ttft_seconds_count{{arm="{name}"}}') > 6
            assert fleet.counter(f'kvbaton_router_arm_tpot_seconds_count{{arm="{name}"}}') > 6
        fleet.dispatcher.export()
        assert fleet.counter("kvbaton_router_disagg_percent") == 100


@pytest.mark.parametrize("body", [{"disagg_percent": 101}, {"disagg_percent": "x"}, {"percent": 5}, {}, []])
async def test_a_share_that_makes_no_sense_is_refused(split: Fleet, body: Any) -> None:
    assert await put(split, body) == 400
    assert await put(split, {"disagg_percent": 5}, key="wrong") == 403
    assert split.dispatcher.policy.disagg_percent == 100
