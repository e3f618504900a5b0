"""Headless Chromium over its debugging protocol, as much of it as looking at a page needs."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--hide-scrollbars",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)
DEADLINE_S = 60.0


class Page:
    """One tab. ``problems`` collects console errors, exceptions, failed and outgoing requests."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(DEADLINE_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    assert "error" not in message, message
                    return dict(message["result"])
                self._note(message)

    async def wait_for(self, event: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not any(seen["method"] == event for seen in self._events):
                self._note(await self._socket.receive_json())

    def _note(self, message: dict[str, Any]) -> None:
        self._events.append(message)
        params = message.get("params", {})
        match message["method"]:
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.problems.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(str(params["entry"]))
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith(("file:", "data:")):
                self.problems.append(f"the page asked for {params['request']['url']}")

    async def open(self, url: str, width: int, height: int, scheme: str = "light") -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.call("Page.navigate", url=url)
        await self.wait_for("Page.loadEventFired")

    async def evaluate(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def screenshot(self) -> bytes:
        found = await self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        return base64.b64decode(found["data"])


@asynccontextmanager
async def new_page() -> AsyncIterator[Page]:
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            port = await _port(process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    targets = await answer.json()
                address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    yield Page(socket)
        finally:
            process.kill()
            await process.communicate()


async def _port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE_S):
        async for line in process.stderr:
            if b"DevTools listening on ws://" in line:
                return int(line.split(b":")[2].split(b"/")[0])
    raise AssertionError("Chromium ended before it listened")
