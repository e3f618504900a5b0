"""A whole pool gone at once: a request goes around all of it, whatever it had to do before it found out."""

from __future__ import annotations

import pytest
from router.fleet import LONG, Fleet

from kvbaton.types import RemoteError


async def test_workers_that_cannot_be_reached_cost_no_retry(pairs: Fleet) -> None:
    for name in ("d0", "d1"):
        await pairs.kill(name)  # no poll has noticed
    status, answer, headers = await pairs.post({"prompt": LONG})
    assert status == 200, answer
    assert headers["x-kvbaton-decision"] == "fallback_no_decode" and headers["x-kvbaton-decode"] in ("p0", "p1")
    assert pairs.counter('kvbaton_router_retries_total{cause="unreachable"}') == 2


async def test_when_nobody_can_be_reached_the_answer_says_so_and_each_was_asked_once(pairs: Fleet) -> None:
    for name in ("d0", "d1", "p0", "p1"):
        await pairs.kill(name)
    status, answer, _ = await pairs.post({"prompt": LONG})
    assert (status, answer["error"]["code"]) == (502, "unreachable")
    assert [member.num_failures for member in pairs.registry.members] == [1, 1, 1, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_after_two_failed_hand_offs_the_prompt_is_computed_where_it_decodes(pairs: Fleet, stream: bool) -> None:
    for name in ("d0", "d1"):
        pairs.workers[name].remote_error = RemoteError("the prefill worker is gone")
    status, answer, headers = await pairs.post({"prompt": LONG, "stream": stream})
    assert status == 200, answer
    assert headers["x-kvbaton-decision"] == "fallback_prefill_failed"
    tried = [prefill for name in ("d0", "d1") for _, prefill in pairs.workers[name].requests]
    assert len([prefill for prefill in tried if prefill is not None]) == 2 and tried.count(None) == 1


async def test_when_local_work_is_not_wanted_the_second_failed_hand_off_is_the_last(pairs: Fleet) -> None:
    pairs.dispatcher._settings = type(pairs.dispatcher._settings)(on_prefill_failure="error", threshold_tokens=64)
    for name in ("d0", "d1"):
        pairs.workers[name].remote_error = RemoteError("the prefill worker is gone")
    status, answer, _ = await pairs.post({"prompt": LONG})
    assert (status, answer["error"]["code"]) == (502, "prefill_failed")
    assert sum(len(pairs.workers[name].requests) for name in ("d0", "d1")) == 2
