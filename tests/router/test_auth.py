"""API keys at the router's door: who comes in, who is told what, and how keys change while it serves."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from router.fleet import KEY, SHORT, Fleet, running_fleet

from kvbaton.cli.main import main
from kvbaton.config import RouterSettings
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.router.api_keys import MAX_KEYS, ApiKeys, load, parse
from kvbaton.router.door import Door, check_reach
from kvbaton.types import LocalError

ALICE, BOB, OPERATOR = "alice-key-0123456789", "bob-key-0123456789ab", "operator-key-01234567"
LINES = f"alice {ALICE}\nbob {BOB}\noperator {OPERATOR}\n"
FLEET_KEY = {"x-kvbaton-key": KEY}


def keys() -> ApiKeys:
    return ApiKeys(parse(LINES, "a file"))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def basic(key: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"somebody:{key}".encode()).decode()}


@pytest.fixture
async def fleet(tokenizer: Tokenizer) -> AsyncIterator[Fleet]:
    async with running_fleet(tokenizer, {"b0": "both"}) as found:
        found.gateway.door = Door(keys(), KEY.encode())
        yield found


async def get(fleet: Fleet, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, Any]:
    async with fleet.http.request(method, fleet.url + path, headers=headers) as response:
        return response.status, await response.read(), response.headers


STRANGERS: dict[str, dict[str, str]] = {
    "nothing": {},
    "another key": bearer("another-key-0123456789"),
    "a key with more behind it": bearer(ALICE + "x"),
    "the beginning of a key": bearer(ALICE[:-1]),
    "no key": {"authorization": "Bearer"},
    "an empty key": {"authorization": "Bearer "},
    "a key without a scheme": {"authorization": ALICE},
    "another scheme": {"authorization": f"Digest {ALICE}"},
    "no base64": {"authorization": "Basic %%%"},
    "a long one": bearer("x" * 20_000),
    "another header": {"x-api-key": ALICE, "api-key": ALICE, "proxy-authorization": f"Bearer {ALICE}"},
    "a tenant's name": bearer("alice"),
    "another fleet's key": {"x-kvbaton-key": "z" * 20},
}


@pytest.mark.parametrize("headers", STRANGERS.values(), ids=STRANGERS)
async def test_without_a_key_nothing_is_served(fleet: Fleet, headers: dict[str, str]) -> None:
    """One answer to all of them, in OpenAI's shape; no worker hears of it."""
    status, answer, told = await fleet.post({"prompt": SHORT}, **headers)
    assert (status, told["www-authenticate"]) == (401, 'Bearer realm="kvbaton"')
    message = "a valid API key is needed: Authorization: Bearer KEY"
    assert answer == {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    }
    assert (await fleet.post({"messages": []}, "/v1/chat/completions", **headers))[0] == 401
    for path in ("/v1/models", "/v1/models/tiny", "/version", "/fleet", "/openapi.json", "/nothing", "/v1/nothing"):
        assert (await get(fleet, path, **headers))[0] == 401, path
    assert (await get(fleet, f"/v1/models?api_key={ALICE}&key={ALICE}", **headers))[0] == 401, "a key in the address"
    status, _, told = await get(fleet, "/ui/", **headers)
    assert (status, told["www-authenticate"]) == (401, 'Basic realm="kvbaton"'), "browsers ask people for that one"
    for path in ("/health", "/ready", "/metrics"):
        assert (await get(fleet, path, **headers))[0] == 200, path
    assert not fleet.workers["b0"].requests


async def test_every_key_opens_and_operators_see_the_fleet(fleet: Fleet) -> None:
    for headers in (bearer(ALICE), basic(ALICE), bearer(BOB), {"authorization": f"bearer  {BOB}"}, FLEET_KEY):
        assert (await fleet.post({"prompt": SHORT}, **headers))[0] == 200
        assert (await get(fleet, "/v1/models", **headers))[0] == 200
    for path in ("/fleet", "/ui", "/ui/", "/ui/state"):
        status, answer, _ = await get(fleet, path, **bearer(ALICE))
        assert (status, json.loads(answer)["error"]["code"]) == (403, "operators_only"), path
    for headers in (bearer(OPERATOR), basic(OPERATOR), FLEET_KEY):
        assert (await get(fleet, "/fleet", **headers))[0] == 200
    assert (await get(fleet, "/internal/members", "PUT", **bearer(OPERATOR)))[0] == 403, "no API key changes a fleet"


async def test_metrics_can_be_closed(fleet: Fleet) -> None:
    fleet.gateway.door = Door(keys(), KEY.encode(), open_metrics=False)
    assert (await get(fleet, "/metrics"))[0] == 401
    assert (await get(fleet, "/metrics", **bearer(ALICE)))[0] == 403
    assert (await get(fleet, "/metrics", **bearer(OPERATOR)))[0] == 200


async def test_openais_own_client_knows_what_a_refusal_is(fleet: Fleet) -> None:
    async with openai.AsyncOpenAI(base_url=fleet.url + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.completions.create(model="tiny", prompt=SHORT)
    assert caught.value.code == "invalid_api_key"
    async with openai.AsyncOpenAI(base_url=fleet.url + "/v1", api_key=ALICE, max_retries=0) as client:
        assert (await client.completions.create(model="tiny", prompt=SHORT)).choices[0].text


async def test_a_key_goes_on_to_nobody(fleet: Fleet) -> None:
    """SE-09: not to a worker, and not into the record; the tenant does."""
    seen: list[dict[bytes, bytes]] = []
    route = fleet.servers["b0"]._route

    async def watching(exchange: Any) -> None:
        seen.append(dict(exchange.headers))
        await route(exchange)

    fleet.servers["b0"]._route = watching  # type: ignore[method-assign]
    assert (await fleet.post({"prompt": SHORT}, **bearer(ALICE)))[0] == 200
    assert seen and not any(ALICE.encode() in value for headers in seen for value in headers.values())
    assert not any(b"authorization" in headers for headers in seen)


# -- where keys come from


def test_keys_are_read_from_lines(tmp_path: Path) -> None:
    hashed = "sha256:" + hashlib.sha256(b"a key that only its holder has").hexdigest()
    found = ApiKeys(parse(f"# who may come in\n\n  alice {ALICE}  # hers\n{BOB}\ncarol {hashed}\n", "f"))
    assert len(found) == 3
    alice, bob = found.find(ALICE.encode()), found.find(BOB.encode())
    assert alice is not None and alice.tenant == "alice"
    assert bob is not None and bob.tenant.startswith("key-"), "a key without a name is a tenant of its own"
    carol = found.find(b"a key that only its holder has")
    assert carol is not None and carol.tenant == "carol"
    assert found.find(hashed.encode()) is None, "the digest is not the key"
    assert found.find(b"") is None and found.find(b"alice") is None
    assert load("", {"KVBATON_API_KEYS": f"alice {ALICE},{BOB}"}) is not None
    assert load("", {}) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("short", "line 1 of f has a key that is not 16 to 512"),
        ("x" * 513, "16 to 512"),
        (f"{ALICE}\na b {ALICE}", "line 2 of f is not KEY or TENANT KEY"),
        (f"../etc {ALICE}", "line 1 of f is not"),
        (f"{ALICE}\nbob {ALICE}", "line 2 of f repeats a key"),
        ("schlüssel-der-lang-genug-ist", "visible ASCII"),
        ("\n".join(f"key-{i:020}" for i in range(MAX_KEYS + 1)), "at most 1000"),
    ],
)
def test_lines_that_make_no_sense_are_named_and_not_shown(text: str, told: str) -> None:
    with pytest.raises(LocalError, match=told) as caught:
        parse(text, "f")
    assert ALICE not in str(caught.value) and "short" not in str(caught.value)


def test_a_file_that_others_may_read_holds_no_plain_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(LocalError, match="cannot read"):
        load(str(path), {})
    path.write_text("# none yet\n")
    path.chmod(0o600)
    with pytest.raises(LocalError, match="has no API key"):
        load(str(path), {})
    path.write_text(LINES)
    path.chmod(0o604)
    with pytest.raises(LocalError, match="chmod o= it"):
        load(str(path), {})
    path.write_text("alice sha256:" + "0" * 64)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604 and load(str(path), {}) is not None
    path.write_bytes(b"\xff\xfe" * 20)
    path.chmod(0o600)
    with pytest.raises(LocalError, match="is not text"):
        load(str(path), {})


def test_keys_change_without_a_restart(tmp_path: Path) -> None:
    """Whatever is written over the file: it counts whole, or what was there goes on."""
    path = tmp_path / "keys"

    def write(text: str) -> None:
        fresh = tmp_path / "fresh"
        fresh.write_text(text)
        fresh.chmod(0o600)
        os.replace(fresh, path)

    write(f"alice {ALICE}")
    found = load(str(path), {})
    assert found is not None and found.find(ALICE.encode()) and not found.refresh(), "nothing changed"
    write(f"bob {BOB}")
    assert found.find(BOB.encode()) is None
    assert found.refresh() and found.find(BOB.encode()) and found.find(ALICE.encode()) is None
    write("no key\nin it that is one")
    assert not found.refresh() and found.find(BOB.encode()), "what makes no sense changes nothing"
    path.unlink()
    assert not found.refresh() and found.find(BOB.encode())
    write("")
    assert found.refresh() and found.find(BOB.encode()) is None, "an empty file lets nobody in"
    write(LINES)
    assert found.refresh() and len(found) == 3


async def test_a_hurried_look_comes_at_once(tmp_path: Path) -> None:
    """What SIGHUP does: the file is read although it looks the same."""
    path = tmp_path / "keys"
    path.write_text(f"alice {ALICE}")
    path.chmod(0o600)
    found = load(str(path), {})
    assert found is not None
    times = path.stat()
    path.write_text(f"alice {ALICE[::-1]}")  # as long as before
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert not found.refresh()
    following = asyncio.ensure_future(found.follow())
    found.hurry()
    async with asyncio.timeout(20):
        while found.find(ALICE[::-1].encode()) is None:  # noqa: ASYNC110 (it reads a file; nobody could wake us)
            await asyncio.sleep(0)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


# -- beyond this host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_beyond_this_host_a_router_needs_keys_or_a_word(host: str) -> None:
    secret = "s" * 20
    with pytest.raises(LocalError, match="--api-keys FILE.*KVBATON_API_KEYS.*--allow-anonymous"):
        check_reach(RouterSettings(host=host), None, secret)
    check_reach(RouterSettings(host=host), keys(), secret)
    check_reach(RouterSettings(host=host, allow_anonymous=True), None, secret)
    with pytest.raises(LocalError, match="can be guessed"):
        check_reach(RouterSettings(host=host), keys(), "guess me")


def test_on_this_host_nothing_has_to_be_set_up() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        check_reach(RouterSettings(host=host), None, "k")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["up", "--host", "0.0.0.0", "--port", "0"], "--api-keys FILE"),
        (["router", "--host", "0.0.0.0", "--discover", "kubernetes:a=b"], "--api-keys FILE"),
        (["router", "--api-keys", "/nowhere", "--discover", "kubernetes:a=b"], "cannot read /nowhere"),
        (["up", "--api-keys", "/nowhere", "--port", "0"], "cannot read /nowhere"),
        (["worker", "--host", "0.0.0.0"], "KVBATON_INTERNAL_KEY"),
    ],
)
def test_a_process_that_strangers_could_use_does_not_start(
    arguments: list[str],
    told: str,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2 and one line with the fix, before anything is loaded or started."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("KVBATON_API_KEYS", raising=False)
    if arguments[0] == "router":
        monkeypatch.setenv("KVBATON_INTERNAL_KEY", "k" * 20)
    else:
        monkeypatch.delenv("KVBATON_INTERNAL_KEY", raising=False)
    assert main([*arguments, "--model", str(tiny_model_dir)]) == 2
    shown = capsys.readouterr()
    assert told in shown.err and shown.out == ""
