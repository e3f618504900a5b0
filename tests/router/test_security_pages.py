"""Web pages that somebody on this host looks at, and a fleet on loopback that asks nobody for a key."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from router.processes import ProcessFleet

from kvbaton.router.api_keys import ApiKeys, parse
from kvbaton.router.door import Door
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.pages import refuse_strange_pages

EVIL = "evil.example"
OURS = (
    {},
    {"host": EVIL},  # no browser: a proxy that passes on its own name
    {"host": "127.0.0.1:8000", "sec-fetch-site": "none"},
    {"host": "localhost:8000", "origin": "http://localhost:8000", "sec-fetch-site": "same-origin"},
    {"host": "[::1]:8000", "origin": "http://[::1]:8000"},
    {"host": "LOCALHOST.", "origin": "http://127.0.0.1:3000"},  # another program of this host
    {"host": "fleet.localhost:8000", "origin": "https://ui.localhost"},
)
STRANGE = (
    {"host": "127.0.0.1:8000", "origin": f"http://{EVIL}"},  # a page sends what needs no leave
    {"host": "127.0.0.1:8000", "origin": "null"},  # a file, or a frame in a sandbox
    {"host": "127.0.0.1:8000", "origin": f"http://127.0.0.1.{EVIL}"},
    {"host": "127.0.0.1:8000", "origin": f"http://localhost@{EVIL}"},
    {"host": "127.0.0.1:8000", "origin": "http://10.0.0.7"},
    {"host": "127.0.0.1:8000", "origin": "chrome-extension://localhost"},
    {"host": "127.0.0.1:8000", "origin": ""},
    {"host": f"{EVIL}:8000", "sec-fetch-site": "same-origin"},  # its name points here now
    {"host": f"{EVIL}:8000", "origin": f"http://{EVIL}:8000"},
    {"host": f"localhost.{EVIL}", "sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "same-origin"},
)


def raw(headers: dict[str, str]) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in headers.items()}


@pytest.mark.parametrize("headers", OURS, ids=str)
def test_what_is_no_page_or_a_page_of_this_host_may_ask(headers: dict[str, str]) -> None:
    refuse_strange_pages(raw(headers))


@pytest.mark.parametrize("headers", STRANGE, ids=str)
def test_a_page_of_another_site_may_not(headers: dict[str, str]) -> None:
    with pytest.raises(ApiError) as caught:
        refuse_strange_pages(raw(headers))
    assert (caught.value.status, caught.value.code) == (403, "strange_page")


@pytest.fixture
def processes(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessFleet]:
    monkeypatch.delenv("KVBATON_API_KEYS", raising=False)
    fleet = ProcessFleet(tiny_model_dir, tmp_path)
    fleet.workers = {"d0": fleet.workers["d0"]}
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.end()


async def send(port: int, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """As a browser would: it alone decides what these headers say, so they are written as they stand."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"{method} {path} HTTP/1.1", "connection: close", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    async with asyncio.timeout(120):
        answer = await reader.read()
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest


async def test_no_page_of_another_site_uses_or_reads_a_fleet_on_loopback(processes: ProcessFleet) -> None:
    """The router and the worker's own port. A body of text needs no leave from a browser, and is sent with it."""
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 2}).encode()
    here = {"host": f"127.0.0.1:{processes.router.port}"}
    async with asyncio.timeout(120):
        while (await send(processes.router.port, "GET", "/ready", b"", here))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    for process in (processes.router, processes.workers["d0"]):
        text = {"content-type": "text/plain;charset=UTF-8"}
        for headers in STRANGE:
            for method, path, sent in (("POST", "/v1/completions", body), ("GET", "/v1/models", b""),
                                       ("GET", "/metrics", b""), ("GET", "/fleet", b"")):  # fmt: skip
                status, answer = await send(process.port, method, path, sent, {**text, **{"host": "x"}, **headers})
                assert status == 403 and json.loads(answer)["error"]["code"] == "strange_page", (path, headers)
        assert (await send(process.port, "POST", "/v1/completions", body, {"host": EVIL}))[0] == 200
        own = {"host": f"localhost:{process.port}", "origin": f"http://localhost:{process.port}"}
        assert (await send(process.port, "POST", "/v1/completions", body, own))[0] == 200


class Asked:
    def __init__(self, headers: dict[str, str]) -> None:
        self.path, self.headers = "/v1/models", raw(headers)


def test_where_keys_are_asked_for_or_everybody_may_come_pages_may_too() -> None:
    """A page has no key of its own to send; one that its people gave it may come from wherever they like."""
    key = "alice-key-0123456789"
    door = Door(ApiKeys(parse(f"alice {key}\n", "a file")), b"the fleet's secret")
    assert door.admit(Asked({**STRANGE[0], "authorization": f"Bearer {key}"})) == "alice"  # type: ignore[arg-type]
    assert Door(None, b"the fleet's secret").admit(Asked(STRANGE[0])) == ""  # type: ignore[arg-type]
