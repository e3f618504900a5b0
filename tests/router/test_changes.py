"""The router in a change: it stops sending at once, waits for what is on the way, and believes what it is told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from router.fleet import KEY, LONG, Fleet
from workers.scripted import until

from kvbaton.config import MemberSettings
from kvbaton.types import LocalError


async def change(fleet: Fleet, verb: str, key: str = KEY, **body: Any) -> tuple[int, Any]:
    headers = {"x-kvbaton-key": key}
    async with fleet.http.post(f"{fleet.url}/internal/members/{verb}", json=body, headers=headers) as response:
        return response.status, await response.json()


def state(fleet: Fleet, name: str) -> tuple[str, str]:
    member = fleet.registry.get(name)
    assert member is not None
    return member.role, member.state


async def test_a_role_change_is_known_at_once_and_without_a_mismatch(pairs: Fleet) -> None:
    status, fleet = await change(pairs, "role", name="d1", role="prefill", deadline_s=5)
    assert status == 200 and {m["name"]: m["role"] for m in fleet["members"]}["d1"] == "prefill"
    assert state(pairs, "d1") == ("prefill", "up")
    await pairs.poll()
    assert state(pairs, "d1") == ("prefill", "up"), "its settings say decode, its word counts"
    async with pairs.http.get(pairs.url + "/metrics") as response:
        text = await response.text()
    assert 'member="d1",role="prefill"' in text and 'member="d1",role="decode"' not in text
    # What a supervisor tells that has not heard of it changes nothing for good.
    pairs.registry.set_members(
        [MemberSettings(pairs.urls[name], role, name) for name, role in (("d0", "decode"), ("d1", "decode"))]
    )
    await pairs.poll()
    assert state(pairs, "d1") == ("prefill", "up")
    status, _, headers = await pairs.post({"prompt": LONG})
    assert status == 200 and headers["x-kvbaton-prefill"] == "d1"


async def test_a_worker_that_never_was_told_another_role_is_a_mismatch(pairs: Fleet) -> None:
    pairs.workers["d1"].role = "prefill"
    await pairs.poll()
    assert state(pairs, "d1") == ("decode", "mismatch")


async def test_nothing_new_goes_to_a_worker_that_drains_and_what_is_open_ends(pairs: Fleet) -> None:
    for worker in ("d0", "d1"):
        pairs.workers[worker].gate.clear()
    asking = [asyncio.ensure_future(pairs.post({"prompt": f"{i} {LONG}"})) for i in range(4)]
    await until(lambda: pairs.workers["d0"].num_open + pairs.workers["d1"].num_open == 4)
    assert (await change(pairs, "drain", name="d0"))[0] == 200
    assert state(pairs, "d0") == ("decode", "draining") and pairs.servers["d0"].drain_requested.is_set()
    for worker in ("d0", "d1"):
        pairs.workers[worker].gate.set()
    assert [answer[0] for answer in await asyncio.gather(*asking)] == [200] * 4
    before = len(pairs.workers["d0"].requests)
    for i in range(4):
        assert (await pairs.post({"prompt": f"again {i} {LONG}"}))[0] == 200
    assert len(pairs.workers["d0"].requests) == before
    status, _ = await change(pairs, "remove", name="d0")
    assert status == 200 and pairs.registry.get("d0") is None


async def test_a_prefill_worker_is_told_only_when_no_prompt_is_on_its_way(pairs: Fleet) -> None:
    for worker in ("d0", "d1"):
        pairs.workers[worker].gate.clear()
    asking = asyncio.ensure_future(pairs.post({"prompt": LONG, "stream": True}))
    await until(lambda: pairs.workers["d0"].num_open + pairs.workers["d1"].num_open == 1)
    busy = next(member.name for member in pairs.registry.members if member.prompts_on_the_way)
    changing = asyncio.ensure_future(change(pairs, "role", name=busy, role="decode", deadline_s=60))
    await until(lambda: state(pairs, busy)[1] == "draining")
    assert pairs.servers[busy].state == "serving", "the prompt has not arrived there yet"
    for worker in ("d0", "d1"):
        pairs.workers[worker].gate.set()
    assert (await asking)[0] == 200 and (await changing)[0] == 200
    assert state(pairs, busy) == ("decode", "up")


async def test_a_worker_that_cannot_change_now_is_used_again(pairs: Fleet) -> None:
    pairs.servers["d0"].state = "draining"
    status, answer = await change(pairs, "role", name="d0", role="prefill", deadline_s=1)
    assert status == 409 and "d0: the worker is draining" in answer["error"]["message"]
    pairs.servers["d0"].state = "serving"
    await pairs.poll()
    assert state(pairs, "d0") == ("decode", "up")
    await pairs.kill("d1")
    status, answer = await change(pairs, "role", name="d1", role="prefill", deadline_s=1)
    assert status == 502 and "d1 did not answer" in answer["error"]["message"]


async def test_what_makes_no_sense_is_refused(pairs: Fleet) -> None:
    """SE-10: and without the key everything is."""
    for status, code, verb, body in (
        (404, "not_found", "drain", {"name": "nobody"}),
        (400, None, "drain", {"name": "d0", "why": "no reason"}),
        (400, None, "role", {"name": "d0", "role": "wizard"}),
        (409, "name_taken", "add", {"url": "http://127.0.0.1:9", "role": "both", "name": "d0"}),
        (400, None, "add", {"url": "ftp://127.0.0.1", "role": "both", "name": "x"}),
        (404, "not_found", "burn", {"name": "d0"}),
    ):
        found, answer = await change(pairs, verb, **body)
        assert (found, answer["error"]["code"]) == (status, code), (verb, body, answer)
        assert (await change(pairs, verb, key="guess", **body))[0] == 403
    assert all(state(pairs, name)[1] == "up" for name in ("p0", "p1", "d0", "d1"))


async def test_the_last_worker_is_not_taken_away_unless_forced(split: Fleet) -> None:
    assert (await change(split, "drain", name="p0"))[0] == 200, "decode workers prefill themselves"
    status, answer = await change(split, "role", name="d0", role="prefill")
    assert (status, answer["error"]["code"]) == (409, "last_one") and state(split, "d0") == ("decode", "up")
    assert (await change(split, "role", name="d0", role="prefill", force=True))[0] == 200
    status, answer = await change(split, "drain", name="p0", force=True)
    assert (status, answer["error"]["code"]) == (409, "change_in_progress")


async def test_a_member_that_joins_is_used_when_it_answers(split: Fleet) -> None:
    split.registry.set_members([MemberSettings(split.urls["p0"], "prefill", "p0")])
    body = {"url": split.urls["d0"], "role": "decode", "name": "late", "kv_address": "127.0.0.1:7701"}
    assert (await change(split, "add", **body))[0] == 200
    await split.poll()
    assert state(split, "late") == ("decode", "up")


def test_where_peers_reach_a_worker_may_differ_from_where_it_listens() -> None:
    member = msgspec.convert(json.loads('{"url": "http://h:1", "kv_address": "[::1]:7701"}'), MemberSettings)
    assert member.kv_address == "[::1]:7701"
    with pytest.raises(LocalError, match="host:port"):
        MemberSettings("http://h:1", kv_address="somewhere")


async def test_the_way_to_a_worker_may_change_while_it_is_used(split: Fleet) -> None:
    member = split.registry.get("p0")
    assert member is not None and split.registry.peer_address(member).port == 7
    settings = [
        MemberSettings(split.urls["p0"], "prefill", "p0", kv_address="[::1]:7701"),
        MemberSettings(split.urls["d0"], "decode", "d0"),
    ]
    split.registry.set_members(settings)
    assert split.registry.get("p0") is member and member.state == "up", "the same worker"
    assert split.registry.peer_address(member) == msgspec.structs.replace(
        split.registry.peer_address(member), host="::1", port=7701
    )
