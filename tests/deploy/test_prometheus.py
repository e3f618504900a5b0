"""A real Prometheus in front of a running fleet: every rule, panel and scaler has an answer, and an alert fires."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from deploy.test_rules import QUERIES
from router.processes import ProcessFleet
from ui.live import new_fleet, traffic

from kvbaton.deploy.dashboard import rows
from kvbaton.deploy.rules import Gates, alerts, render_rules

pytestmark = [
    pytest.mark.slow,  # a fleet of processes, a Prometheus, and rules that want a minute of trouble
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
]
# Limits that no machine misses: what fires here fires for what the test does.
GATES = Gates(ttft_s=600.0, tpot_s=600.0, ratio_low=0.0, ratio_high=1e6, window="20s", hold="5s")
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def fleet(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    running = new_fleet(tiny_model_dir, tmp_path_factory.mktemp("fleet"))
    try:
        running.start()
        yield running
    finally:
        running.end()


class Prometheus:
    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url, self._http = url, http

    async def get(self, path: str, **query: str) -> Any:
        async with self._http.get(f"{self._url}/api/v1/{path}", params=query) as answer:
            found = await answer.json()
            assert found["status"] == "success", found
            return found["data"]

    async def value(self, expression: str) -> list[Any]:
        """Of an instant query; samples that are no numbers are no answer."""
        found = (await self.get("query", query=expression))["result"]
        return [each for each in found if each["value"][1] != "NaN"]

    async def firing(self) -> set[str]:
        found = (await self.get("alerts"))["alerts"]
        return {each["labels"]["alertname"] for each in found if each["state"] == "firing"}


@contextlib.asynccontextmanager
async def scraping(folder: Path, fleet: ProcessFleet) -> AsyncIterator[Prometheus]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    targets = [each.url.removeprefix("http://") for each in (fleet.router, *fleet.workers.values())]
    (folder / "rules.yaml").write_text(yaml.safe_dump(render_rules(GATES)))
    (folder / "prometheus.yaml").write_text(yaml.safe_dump({
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "kvbaton", "static_configs": [{"targets": targets}]}],
    }))  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}", stdout=log, stderr=log,
        )  # fmt: skip
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
            watcher = Prometheus(f"http://{address}", http)
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        if len((await watcher.get("query", query="up == 1"))["result"]) == len(targets):
                            break
                    assert process.returncode is None, (folder / "prometheus.log").read_text()
                    await asyncio.sleep(0.2)
            yield watcher
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def eventually(condition: Callable[[], Awaitable[bool]]) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while not await condition():  # noqa: ASYNC110 (what a Prometheus knows has no event for us)
                await asyncio.sleep(0.5)
            return True
    return False


def panels() -> dict[str, str]:
    return {
        f"{panel.title}: {legend}": query.replace("$__rate_interval", "20s")
        for row in rows(GATES)
        for panel in row.panels
        for legend, query in panel.queries.items()
    }


async def test_every_query_has_an_answer_and_a_pool_that_is_gone_raises_its_alert(
    fleet: ProcessFleet, tmp_path: Path
) -> None:
    async with scraping(tmp_path, fleet) as watcher:
        unanswered = {**panels(), **{f"KEDA {name}": query for name, query in QUERIES.items()}}

        async def all_answered() -> bool:
            for name in [name for name, query in unanswered.items() if await watcher.value(query)]:
                del unanswered[name]
            return not unanswered

        async with traffic(fleet.router.url, num=2):
            assert await eventually(all_answered), unanswered
        groups = (await watcher.get("rules"))["groups"]
        rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
        assert rules.keys() == {alert.name for alert in alerts(GATES)}
        assert {name: rule["lastError"] for name, rule in rules.items() if rule["health"] == "err"} == {}
        assert await watcher.firing() == set(), "nothing is wrong"

        async def fires() -> bool:
            return "KvbatonPoolGone" in await watcher.firing()

        async def is_over() -> bool:
            return not await fires()

        fleet.workers["p0"].kill()
        try:
            assert await eventually(fires)
        finally:
            fleet.workers["p0"].start()
        assert await eventually(is_over)
