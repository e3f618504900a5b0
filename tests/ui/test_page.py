"""``/ui`` and ``/ui/state`` over a real socket, in front of scripted workers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from router.fleet import LONG, SHORT
from ui.conftest import Shown

from kvbaton.router.policy import REASONS
from kvbaton.ui.decisions import MOST_KEPT, Row
from kvbaton.ui.history import Frame, Link, PoolLoad
from kvbaton.ui.page import LivePage, read_cursors
from kvbaton.ui.spread import Spread
from kvbaton.ui.state import Aims, Blocks, Head, Pool, ReasonCount, State, Worker
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.protocol import WorkerStats

DOCS = Path(__file__).parents[2] / "docs"
SECRET = "the client's own words zanzibar"


async def get(shown: Shown, path: str, method: str = "GET", **headers: str) -> Any:
    url = shown.fleet.url + path
    async with shown.fleet.http.request(method, url, headers=headers, allow_redirects=False) as answer:
        return answer.status, await answer.read(), answer.headers


async def state(shown: Shown, query: str = "") -> Any:
    status, body, _ = await get(shown, f"/ui/state{query}")
    assert status == 200, body
    return msgspec.json.decode(body)


# -- what it says --------------------------------------------------------------------------------------------------


async def test_a_split_request_is_seen_everywhere(shown: Shown) -> None:
    shown.fleet.workers["p0"].reported = WorkerStats(num_blocks=100, num_blocks_used=30, num_blocks_pinned=8)
    await shown.fleet.poll()
    shown.next_second()
    for prompt, stream in ((LONG, True), (SHORT, False)):
        status, _, _ = await shown.fleet.post({"prompt": prompt, "stream": stream, "max_tokens": 3})
        assert status == 200
    await shown.fleet.settled()
    for name, num_bytes in (("p0", {"transfer_bytes_sent": 5000}), ("d0", {"transfer_bytes_received": 5000})):
        worker = shown.fleet.workers[name]
        worker.reported = msgspec.structs.replace(worker.reported, **num_bytes)
    await shown.fleet.poll()
    shown.next_second()
    found = await state(shown)
    head, rows = found["head"], found["decisions"]["rows"]
    assert [row["reason"] for row in rows] == ["remote", "local_short"]
    assert [(row["prefill"], row["decode"], row["outcome"]) for row in rows] == [("p0", "d0", "ok"), (None, "d0", "ok")]
    assert [row["transfer_bytes"] for row in rows] == [64, 0]
    assert rows[0]["ttft_s"] > 0 and rows[1]["ttft_s"] is None  # a whole answer has no first token of its own
    assert {each["reason"]: each["num"] for each in head["reasons"]} == {"remote": 1, "local_short": 1}
    assert {each["meaning"] for each in head["reasons"]} == {REASONS["remote"], REASONS["local_short"]}
    (link,) = head["links"]
    assert (link["prefill"], link["decode"], link["num_requests"]) == ("p0", "d0", 1) and link["bytes_per_s"] > 0
    assert head["latency"]["ttft"]["num"] == 1 and head["latency"]["ttft"]["met"] == 1.0
    assert head["place"] == ("above" if head["ratio"] > 8 else "inside")
    workers = {worker["name"]: worker for worker in head["workers"]}
    assert workers["p0"]["blocks"] == {"total": 100, "used": 30, "pinned": 8, "free": 0, "cached": 0}
    assert workers["p0"]["sent_bytes_per_s"] == workers["d0"]["received_bytes_per_s"] == 2500.0  # over two seconds
    assert [(pool["role"], pool["num_up"], pool["num_workers"]) for pool in head["pools"]] == [
        ("prefill", 1, 1),
        ("decode", 1, 1),
    ]
    assert found["frames"][-1]["moved_bytes_per_s"] == 2500.0


async def test_nothing_a_client_wrote_is_in_it(shown: Shown) -> None:
    await shown.fleet.post(
        {"prompt": SECRET, "max_tokens": 2, "user": "zanzibar", "cache_salt": "zanzibar"},
        **{"x-request-id": "zanzibar", "authorization": "Bearer zanzibar"},
    )
    status, _, _ = await shown.fleet.post({"prompt": SECRET, "model": "zanzibar"})
    assert status == 404
    await shown.fleet.settled()
    shown.next_second()
    _, body, _ = await get(shown, "/ui/state")
    assert [row["reason"] for row in msgspec.json.decode(body)["decisions"]["rows"]] == ["local_short", "none"]
    assert b"zanzibar" not in body and b"hello" not in body and b"127.0.0.1" not in body


async def test_readers_follow_with_cursors(shown: Shown) -> None:
    await shown.fleet.post({"prompt": SHORT, "max_tokens": 2})
    await shown.fleet.settled()
    shown.next_second()
    first = await state(shown)
    again = await state(
        shown, f"?decisions_after={first['decisions']['next']}&frames_after={first['frames'][-1]['number']}"
    )
    assert (again["decisions"]["rows"], again["frames"]) == ([], [])
    await shown.fleet.post({"prompt": SHORT, "max_tokens": 2})
    await shown.fleet.settled()
    shown.next_second()
    more = await state(
        shown, f"?decisions_after={again['decisions']['next']}&frames_after={first['frames'][-1]['number']}"
    )
    assert (len(more["decisions"]["rows"]), len(more["frames"])) == (1, 1)
    other_life = await state(shown, "?decisions_after=999999&frames_after=999999")
    assert (len(other_life["decisions"]["rows"]), len(other_life["frames"])) == (2, len(first["frames"]) + 1)


async def test_who_was_away_too_long_is_told_how_much_is_gone(shown: Shown) -> None:
    for _ in range(MOST_KEPT + 7):
        await shown.fleet.post({"prompt": SHORT, "model": "another"})  # refused: no worker is bothered
    await shown.fleet.settled()
    found = (await state(shown, "?decisions_after=2"))["decisions"]
    assert (len(found["rows"]), found["missed"], found["next"]) == (MOST_KEPT, 5, MOST_KEPT + 7)
    assert [row["number"] for row in found["rows"]] == list(range(7, MOST_KEPT + 7))


async def test_the_state_is_put_together_once_a_second(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    fleet = shown.fleet.gateway.fleet
    monkeypatch.setattr(shown.page, "_fleet", lambda: (asked.append(1), fleet())[1])
    for _ in range(20):
        await state(shown)
    assert len(asked) == 1  # for the frame that the page began with
    shown.next_second()
    for _ in range(20):
        await state(shown)
    assert len(asked) == 3  # one look, one answer


@pytest.mark.parametrize(
    ("query", "field"),
    [
        (b"frames_after=-1", "frames_after"),
        (b"frames_after=", "frames_after"),
        (b"frames_after=%D9%A1", "frames_after"),
        (b"decisions_after=x", "decisions_after"),
        (b"decisions_after=" + b"9" * 16, "decisions_after"),
        (b"since=1", "query"),
        (b"a" * 201, "query"),
    ],
)
def test_a_bad_cursor_is_refused_by_name(query: bytes, field: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_cursors(query)
    assert (caught.value.status, caught.value.param) == (400, field)


# -- how it is served ----------------------------------------------------------------------------------------------


async def test_every_answer_has_the_security_headers(shown: Shown) -> None:
    for path in ("/ui", "/ui/", "/ui/main.js", "/ui/page.css", "/ui/icon.svg", "/ui/state", "/ui/vendor/plotly.min.js"):
        status, _, headers = await get(shown, path)
        assert status in (200, 308), path
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe-eval" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff", path


async def test_the_page_is_found_with_and_without_the_slash(shown: Shown) -> None:
    status, _, headers = await get(shown, "/ui")
    assert (status, headers["location"]) == (308, "ui/")  # relative: a proxy may put it below another path
    status, body, headers = await get(shown, "/ui/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert not re.search(rb"<script(?![^>]*\bsrc=)|\son\w+=|style=|https?://", body), "inline code, or somebody else's"


@pytest.mark.parametrize(
    "path", ["/ui/nothing", "/ui/../config.py", "/ui/%2e%2e/page.py", "/ui/vendor/", "/uix", "/ui//"]
)
async def test_nothing_else_is_there(shown: Shown, path: str) -> None:
    status, body, _ = await get(shown, path)
    assert (status, msgspec.json.decode(body)["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["/ui/", "/ui/state", "/ui/main.js"])
async def test_it_only_reads(shown: Shown, path: str) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert (await get(shown, path, method))[0] == 405
    status, body, headers = await get(shown, path, "HEAD")
    assert (status, body) == (200, b"") and int(headers["content-length"]) > 0


async def test_files_are_sent_once(shown: Shown) -> None:
    for path in ("/ui/main.js", "/ui/vendor/plotly.min.js"):
        _, _, headers = await get(shown, path)
        assert headers["content-encoding"] == "gzip"
        status, body, _ = await get(shown, path, **{"if-none-match": headers["etag"]})
        assert (status, body) == (304, b"")


async def test_without_the_library_the_page_says_so(shown: Shown) -> None:
    shown.fleet.gateway.page = LivePage(
        Aims(2.0, 0.1), shown.fleet.gateway.fleet, shown.fleet.metrics, shown.clock, None
    )
    assert (await state(shown))["head"]["charts"] is False
    assert (await get(shown, "/ui/vendor/plotly.min.js"))[0] == 404
    assert b"kvbaton[ui]" in (await get(shown, "/ui/"))[1]


async def test_switched_off_nothing_is_there(shown: Shown) -> None:
    shown.fleet.gateway.page = None
    for path in ("/ui", "/ui/", "/ui/state"):
        assert (await get(shown, path))[0] == 404


# -- what is written about it --------------------------------------------------------------------------------------


def test_every_field_is_documented() -> None:
    text = re.sub("```.*?```", "", (DOCS / "ui.md").read_text(), flags=re.DOTALL)
    structs = (State, Head, Worker, Pool, Blocks, Link, ReasonCount, Frame, PoolLoad, Spread, Row, Aims)
    named = {part for field in re.findall(r"`([^`]+)`", text) for part in field.split(".")}
    missing = {f"{one.__name__}.{name}" for one in structs for name in one.__struct_fields__ if name not in named}
    assert not missing


def test_decisions_keep_no_request() -> None:
    """A ring of finished requests must not hold their bodies in memory."""
    kinds = {str(field.type) for field in msgspec.structs.fields(Row)}
    assert kinds == {str(kind) for kind in (int, float, str, str | None, int | None, float | None)}
