"""Routers and workers of neighbouring versions, over real sockets: info, the internal object, KV events, records.

What version 1 said is frozen here, with no name of it taken from the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from router.fleet import KEY, LONG, SHORT, Fleet, running_fleet
from workers.scripted import ScriptedWorker, serving

from kvbaton.cli.main import main
from kvbaton.config import MemberSettings
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.kv.blocks import HASH_BYTES
from kvbaton.router.explain import RECORD_VERSION, read_record
from kvbaton.router.prefix_index import PromptChains
from kvbaton.types import LocalError
from kvbaton.workers.kv_events import KV_EVENTS_VERSION
from kvbaton.workers.protocol import CONTROL_VERSION, InternalRequest, WorkerInfo
from kvbaton.workers.server import ServerOptions, WorkerServer

# As a worker of version 1 answered GET /internal/info.
OLD_INFO: dict[str, Any] = {
    "state": "serving", "role": "both", "model_id": "tiny", "incarnation": "old-1",
    "fingerprint": {"protocol_version": 1, "model_revision": "r", "num_layers": 1, "num_kv_heads": 1, "head_dim": 8,
                    "kv_dtype": "float32", "rope": "", "tp_size": 1},
    "max_context": 512, "block_size": 16, "kv_host": "", "kv_port": 7,
    "stats": {"num_waiting": 0, "num_running": 0, "num_blocks": 1000, "num_blocks_free": 1000},
}  # fmt: skip
# What a worker of version 1 takes; it refuses an object with any other field.
OLD_INTERNAL = {"request_id", "prompt_token_ids", "prefill", "deadline_s", "cache_salt", "priority", "journal",
                "created_s", "answer_id", "resume"}  # fmt: skip


class OldWorker:
    """Speaks HTTP as any version would; ``info`` says which one it is."""

    def __init__(self, info: dict[str, Any], events: Callable[[str], tuple[list[Any], bytes]] | None = None) -> None:
        self.info, self.events = info, events
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers: list[tuple[bytes, bytes]] = [(b"content-type", b"application/json")]
        raw = b""
        while scope["method"] == "POST":
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/internal/info":
            answer = json.dumps(self.info).encode()
        elif self.events is not None and scope["path"].startswith("/internal/kv-"):
            headers, answer = self.events(scope["path"])
        else:
            self.bodies.append(json.loads(raw))
            choice = {"index": 0, "text": "from the old one", "finish_reason": "length", "logprobs": None}
            answer = json.dumps({"id": "x", "object": "text_completion", "choices": [choice]}).encode()
        length = (b"content-length", b"%d" % len(answer))
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, length]})
        await send({"type": "http.response.body", "body": answer})


def info_of(version: int | None, **more: Any) -> dict[str, Any]:
    return {**OLD_INFO, **({} if version is None else {"control_version": version}), **more}


@pytest.mark.parametrize(
    ("version", "more"),
    [
        (None, {}),
        (CONTROL_VERSION - 1, {}),
        (CONTROL_VERSION, {}),
        (CONTROL_VERSION + 1, {"mood": "said by tomorrow's workers alone", "stats": {"num_dreams": 3}}),
    ],
)
async def test_a_worker_of_a_neighbouring_version_is_understood(
    tokenizer: Tokenizer, version: int | None, more: dict[str, Any]
) -> None:
    """It joins, it is asked in words that version 1 knew, and its answer passes."""
    app = OldWorker(info_of(version, **more))
    async with running_fleet(tokenizer, {}) as fleet, serving(app) as url:
        fleet.registry.set_members([MemberSettings(url, "both", "b0")])
        await fleet.poll()
        (member,) = fleet.registry.members
        assert member.state == "up", member.reason
        status, answer, _ = await fleet.post({"prompt": SHORT})
        assert (status, answer["choices"][0]["text"]) == (200, "from the old one")
        (body,) = app.bodies
        assert set(body["kvbaton"]) == OLD_INTERNAL, "a field that is new needs a worker that says it knows it"


@pytest.mark.parametrize("version", [CONTROL_VERSION + 2, 0, -5, 99])
async def test_a_worker_further_away_is_left_out_and_said_to_be(tokenizer: Tokenizer, version: int) -> None:
    async with running_fleet(tokenizer, {"b1": "both"}) as fleet, serving(app := OldWorker(info_of(version))) as url:
        members = [member.settings for member in fleet.registry.members]
        fleet.registry.set_members([*members, MemberSettings(url, "both", "b0")])
        await fleet.poll()
        stranger = fleet.registry.get("b0")
        assert stranger is not None and stranger.state == "mismatch"
        assert f"version {version} of the control API, this router {CONTROL_VERSION}" in stranger.reason
        for _ in range(4):
            status, _, headers = await fleet.post({"prompt": LONG})
            assert (status, headers["x-kvbaton-decode"]) == (200, "b1")
        assert not app.bodies


async def test_a_worker_says_its_version_and_takes_what_the_neighbour_said(tokenizer: Tokenizer) -> None:
    """A router of version 1 is served; what a later one adds is refused by name, never dropped unseen."""
    worker = ScriptedWorker(tokenizer)
    app = WorkerServer(worker, ServerOptions(block_size=16, internal_key=KEY))
    headers = {"x-kvbaton-key": KEY}
    async with serving(app) as url, aiohttp.ClientSession(headers=headers) as http:
        async with http.get(url + "/internal/info") as response:
            info = await response.json()
        assert info["control_version"] == CONTROL_VERSION and set(OLD_INFO) <= set(info)
        internal = {"request_id": "old", "prompt_token_ids": [[1, 2, 3]], "prefill": None, "deadline_s": 60.0,
                    "cache_salt": "", "priority": 0, "journal": False, "created_s": 0, "answer_id": "",
                    "resume": []}  # fmt: skip
        assert set(internal) == OLD_INTERNAL
        async with http.post(url + "/v1/completions", json={"prompt": "x", "kvbaton": internal}) as response:
            assert response.status == 200
        later = {**internal, "request_id": "later", "mood": "good"}
        async with http.post(url + "/v1/completions", json={"prompt": "x", "kvbaton": later}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "kvbaton") and "mood" in error["message"]
    assert len(worker.requests) == 1


def test_what_was_added_says_what_its_absence_means() -> None:
    """Every field of info that version 1 did not have has a default, and so has every one of the internal object."""
    for struct, known in ((WorkerInfo, set(OLD_INFO)), (InternalRequest, {"request_id", "prompt_token_ids"})):
        required = {field.name for field in msgspec.structs.fields(struct) if field.required}
        assert required <= known, required - known
    assert {field.name for field in msgspec.structs.fields(InternalRequest)} == OLD_INTERNAL


# -- KV events


PROMPT = list(range(3, 67))


def events_of(hashes: list[bytes], version: int | None) -> Callable[[str], tuple[list[Any], bytes]]:
    """A worker that holds these blocks, and says so in that version; None: one that did not say which."""

    def answer(path: str) -> tuple[list[Any], bytes]:
        said = {} if version is None else {"version": version}
        if path.endswith("snapshot"):
            headers = [(b"x-kvbaton-incarnation", b"old-1"), (b"x-kvbaton-sequence", b"1")]
            if version is not None:
                headers.append((b"x-kvbaton-kv-version", b"%d" % version))
            return headers, b"".join(hashes)
        batch = {"cleared": False, "removed": [], "stored": hashes}
        body = {"incarnation": "old-1", "block_size": 16, "first": 0, "end": 1, "gap": False, "batches": [batch],
                "age_s": 0.0, **said}  # fmt: skip
        return [], msgspec.msgpack.encode(body)

    return answer


@pytest.mark.parametrize(("version", "taken"), [(None, True), (1, True), (KV_EVENTS_VERSION + 1, False), (0, False)])
async def test_kv_events_of_another_version_are_not_believed(
    tokenizer: Tokenizer, version: int | None, taken: bool
) -> None:
    """Hashes made otherwise would foretell hits that are none: then what was sent there counts, as for engines that
    say nothing."""
    chains = PromptChains([PROMPT], "", {16})
    hashes = [bytes(each) for each in chains.of(16)[0]]
    assert hashes and all(len(each) == HASH_BYTES for each in hashes)
    app = OldWorker(info_of(None, kv_events=True), events_of(hashes, version))
    async with running_fleet(tokenizer, {}) as fleet, serving(app) as url:
        fleet.registry.set_members([MemberSettings(url, "both", "b0")])
        await fleet.poll()
        (member,) = fleet.registry.members
        follower = fleet.monitor.follower(member)
        for _ in range(4):
            await follower.round(wait_s=0.0)
        assert bool(fleet.monitor._index.exact.held("b0")) is taken
        failures = fleet.counter('kvbaton_router_kv_failures_total{member="b0"}')
        assert (failures == 0) is taken
        assert (await fleet.post({"prompt": SHORT}))[0] == 200, "it serves all the same"


# -- records of decisions


async def one_record(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    with caplog.at_level("INFO", logger="kvbaton.router.gateway"):
        assert (await fleet.post({"prompt": LONG}))[0] == 200
        await fleet.settled()
    (fields,) = [record.fields for record in caplog.records if record.getMessage() == "request"]  # type: ignore[attr-defined]
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(fields, enc_hook=str))
    return found


async def test_a_record_of_a_neighbouring_version_is_refused_by_name(
    split: Fleet, caplog: pytest.LogCaptureFixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replay of what was decided by other rules would prove nothing; fields that are only new are passed over."""
    line = await one_record(split, caplog)
    assert line["route"]["version"] == RECORD_VERSION
    assert read_record(json.dumps(line).encode()).version == RECORD_VERSION
    line["route"]["weather"] = "fine"
    assert read_record(json.dumps(line).encode()).version == RECORD_VERSION
    for version in (RECORD_VERSION - 1, RECORD_VERSION + 1):
        line["route"]["version"] = version
        raw = json.dumps(line).encode()
        with pytest.raises(LocalError, match=f"the record has version {version}, not {RECORD_VERSION}"):
            read_record(raw)
        path = tmp_path / "log"
        path.write_bytes(raw)
        assert main(["route", "--explain", str(path)]) == 2
        assert f"version {version}" in capsys.readouterr().err
