"""A fleet whose traffic changes: what is told, shown and done about it. Five minutes on two cores.

    PYTHONPATH=.:tests python -m benchmarks.drift [--out docs/reports/drift]

``kvbaton up --autoscale`` with the default model, one prefill and two decode workers, and the band of the prompt:output
ratio that a plan for chat would give. A real Prometheus (on the PATH) scrapes router and workers and evaluates the
rules that ``kvbaton deploy`` writes, with windows of seconds in place of minutes. The traffic is Azure's conversation
trace until half time and Mooncake's from then on: their requests in order, with lengths scaled to a model this small
(--chat-scale, --documents-scale, --output-scale, --documents-output-scale) and prompts of random words, which no cache
has. So many users ask at once, each the next request when the last is answered: the traces' own arrivals would overload
a machine of unknown speed, or leave it idle. How long this machine computes a prompt is measured first, and there are
as many users with documents as keep one prefill worker waiting longer than prompts may wait (--documents-users sets
them by hand).

What must happen, and exit code 1 if it does not: no alert on the ratio in the minute before half time, one after; the
page and the router's gauge say so; a prefill worker is added, a decode worker drained; and no request fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec
import yaml
from ui.live import WORDS, browser, problems, wait_until

from benchmarks.drift_report import Look, Record, Request, missed, write
from kvbaton.deploy.rules import Gates, render_rules
from kvbaton.plan.workload import read_trace
from kvbaton.router import control

BAND = (0.2, 1.5)
GATES = Gates(
    ttft_s=4.0, tpot_s=0.25, ratio_low=BAND[0], ratio_high=BAND[1], window="30s", hold="15s", ratio_window="1m",
    ratio_hold="15s",
)  # fmt: skip
ALERT = "KvbatonRatioDrift"
CHAT, DOCUMENTS = "azure-llm-2023/AzureLLMInferenceTrace_conv.csv", "mooncake-fast25/conversation_trace.jsonl"
QUEUE_DELAY_S = 6.0  # prompts may wait so long for their first step
POOLS = (1, 2)
UP = [
    *("up", "--autoscale", "--prefill", str(POOLS[0]), "--decode", str(POOLS[1])),
    *("--prefill-max", "3", "--decode-max", "2"),
    *("--threshold-tokens", "0", "--kv-memory", "512", "--threads", "1", "--plan-band", f"{BAND[0]:g},{BAND[1]:g}"),
    *("--scale-interval-s", "1", "--scale-queue-delay-s", f"{QUEUE_DELAY_S:g}", "--scale-sequences", "4"),
    *("--scale-shrink-after-s", "30", "--scale-start-s", "8", "--ttft-slo-s", "4", "--tpot-slo-s", "0.25"),
    *("--port", "0", "--json"),
]
MOST_PROMPT, MOST_OUTPUT = 1700, 256  # of the model's 2048
START_S, END_S, SCRAPE_S, RAMP_S = 240.0, 300.0, 2, 10.0
REST_S = 20.0  # without a change of the pools
PROBE_TOKENS = 256  # of the prompt that is timed
OVERLOAD = 1.5  # a prompt is to wait so many times what it may: the queue is shorter while answers are written
LEAST_USERS, MOST_USERS = 4, 16


# -- traffic -------------------------------------------------------------------------------------------------------


class Shape(msgspec.Struct, frozen=True):
    half_s: float
    most_s: float  # of documents, should not all have happened before
    chat_users: int
    chat_scale: float  # of prompts
    documents_users: int  # 0: as many as the machine's speed asks for
    documents_scale: float
    output_scale: float  # of answers to chat
    documents_output_scale: float
    prompt_tokens_per_s: float = 0.0  # of one worker with nothing else to do, as measured


def lengths_of(path: Path, prompt_scale: float, output_scale: float) -> Iterator[tuple[int, int]]:
    """Prompt and output tokens of a trace's requests, in its order."""
    for each in read_trace(path, Random(0)).scaled(prompt_scale, output_scale).requests:
        yield min(MOST_PROMPT, each.prompt_tokens), min(MOST_OUTPUT, max(2, each.output_tokens))


async def ask(http: aiohttp.ClientSession, url: str, text: str, max_tokens: int) -> tuple[str, float | None]:
    """How it ended, empty when well, and the time to the first part."""
    started_s, first_s, last = time.monotonic(), None, b""
    body = {"prompt": text, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    try:
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                return f"{answer.status} {(await answer.text())[:200]}", None
            async for part in answer.content.iter_any():
                first_s = first_s if first_s is not None else time.monotonic() - started_s
                last = (last + part)[-4096:]
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}", first_s
    if b'"error"' in last or not last.rstrip().endswith(b"data: [DONE]"):
        return f"broken: {last[-200:]!r}", first_s
    return "", first_s


async def calibrated(url: str, shape: Shape, documents: Iterator[tuple[int, int]]) -> Shape:
    """With the users that this machine's speed asks for."""
    rng, rates = Random(1), []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=END_S)) as http:
        for _ in range(2):  # the first of them also brings pages into memory
            failed, ttft_s = await ask(http, url, " ".join(rng.choices(WORDS, k=PROBE_TOKENS)), 2)
            assert ttft_s is not None and not failed, failed
            rates.append(PROBE_TOKENS / ttft_s)
    prompts = [next(documents)[0] for _ in range(50)]
    prompt_s = sum(prompts) / len(prompts) / max(rates)
    # All but the one that is computed wait, if nobody writes an answer.
    users = min(MOST_USERS, max(LEAST_USERS, 1 + ceil(OVERLOAD * QUEUE_DELAY_S / prompt_s)))
    return msgspec.structs.replace(
        shape, documents_users=shape.documents_users or users, prompt_tokens_per_s=max(rates)
    )  # fmt: skip


async def rested(url: str) -> None:
    """Until the autoscaler has forgotten the prompts that were timed, and the pools are what they began with."""
    since_s = time.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http, asyncio.timeout(START_S):
        while time.monotonic() - since_s < REST_S:
            async with http.get(f"{url}/fleet") as answer:
                members = (await answer.json())["members"]
            up = [each["role"] for each in members if each["state"] == "up"]
            if (up.count("prefill"), up.count("decode")) != POOLS or len(members) != sum(POOLS):
                since_s = time.monotonic()
            await asyncio.sleep(0.5)


async def users(url: str, num: int, lengths: Iterator[tuple[int, int]], stop: asyncio.Event, run: Run) -> None:
    """So many at once, each with the next request of the trace, until told to stop; what has begun is finished."""
    rng = Random(0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=END_S)) as http, asyncio.TaskGroup() as group:

        async def one() -> None:
            while not stop.is_set():
                prompt, output = next(lengths)
                begun_s = run.now_s
                failed, ttft_s = await ask(http, url, " ".join(rng.choices(WORDS, k=prompt)), output)
                run.record.requests.append(Request(begun_s, prompt, output, ttft_s, run.now_s - begun_s, failed))

        for _ in range(num):
            group.create_task(one())
            await asyncio.sleep(RAMP_S / num)  # not all in one moment, which no trace has


# -- the fleet and its Prometheus ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def process(*command: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Ended by SIGTERM, so that a fleet drains."""
    with log.open("wb") as errors:
        running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=errors)
    try:
        yield running
    finally:
        if running.returncode is None:
            running.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await running.communicate()
            if running.returncode is None:
                running.kill()
                await running.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def prometheus(folder: Path) -> AsyncIterator[str]:
    """Scrapes what ``targets.json`` names; its address."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(render_rules(GATES)))
    (folder / "targets.json").write_text("[]")
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {"job_name": "kvbaton", "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}]}
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    flags = (f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data")
    log = folder / "prometheus.log"
    async with process("prometheus", *flags, f"--web.listen-address={address}", log=log):
        async with aiohttp.ClientSession() as http, asyncio.timeout(30):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(f"http://{address}/-/ready") as answer:
                        if answer.status == 200:
                            break
                await asyncio.sleep(0.1)
        yield f"http://{address}"


async def name_targets(pid: int, path: Path) -> dict[str, str]:
    """Tell Prometheus who is there now."""
    _, status = await control.the_one(pid)
    found = {each.name: each.url.removeprefix("http://") for each in status.processes if each.url}
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps([{"targets": [found[name]], "labels": {"process": name}} for name in sorted(found)]))
    fresh.rename(path)
    return found


# -- watching ------------------------------------------------------------------------------------------------------

_GAUGE = re.compile(r"^kvbaton_router_(prompt_output_ratio|plan_drift) (\S+)$", re.MULTILINE)


async def look(http: aiohttp.ClientSession, url: str, watcher: str, at_s: float) -> Look:
    """The fleet, the router's gauges and Prometheus' alerts now."""
    async with http.get(f"{url}/fleet") as answer:
        fleet = await answer.json()
    async with http.get(f"{url}/metrics") as answer:
        gauges = {name: float(value) for name, value in _GAUGE.findall(await answer.text())}
    async with http.get(f"{watcher}/api/v1/alerts") as answer:
        alerts = (await answer.json())["data"]["alerts"]
    up = [each["role"] for each in fleet["members"] if each["state"] == "up"]
    waiting = sum((each["stats"] or {}).get("waiting_prompt_tokens", 0) for each in fleet["members"])
    return Look(
        at_s, up.count("prefill"), up.count("decode"), fleet["inflight"], fleet["queued"], waiting,
        gauges.get("prompt_output_ratio"), gauges.get("plan_drift"),
        sorted(each["labels"]["alertname"] for each in alerts if each["state"] == "firing"),
    )  # fmt: skip


async def picture(url: str, path: Path, shown: str, size: tuple[int, int], scheme: str = "light") -> None:
    """``shown``: what must be true in the page first."""
    async with browser.new_page() as page:
        await page.open(url, *size, scheme)
        await wait_until(page, shown)
        await asyncio.to_thread(path.write_bytes, await page.screenshot())
        base = url.split("/ui", maxsplit=1)[0]
        assert "/ui" not in url or not problems(page, base), problems(page, base)


def page_says(place: str) -> str:
    says = {"inside": "still fits", "above": "prefill is short"}[place]
    drawn = "document.querySelectorAll('.plot .main-svg').length"
    return f"{drawn} && document.getElementById('drift-text').textContent.includes('{says}')"


class Run:
    """One run: traffic, looks once a second, and pictures when there is something to see."""

    def __init__(self, out: Path, shape: Shape, fleet: dict[str, Any], pid: int, watcher: str, folder: Path) -> None:
        self._out, self._shape, self._url, self._pid = out, shape, fleet["url"], pid
        self._watcher, self._targets = watcher, folder / "targets.json"
        self._begun: set[str] = set()
        self._began_s = time.monotonic()
        self.record = Record(msgspec.to_builtins(shape), BAND, load_before=os.getloadavg()[0])

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def go(self, data: Path) -> None:
        shape, url = self._shape, self._url
        documents, over = asyncio.Event(), asyncio.Event()
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http,
            asyncio.TaskGroup() as group,
        ):
            chat = lengths_of(data / CHAT, shape.chat_scale, shape.output_scale)
            group.create_task(users(url, shape.chat_users, chat, documents, self))
            while not over.is_set():
                await name_targets(self._pid, self._targets)
                now = await look(http, url, self._watcher, self.now_s)
                self.record.looks.append(now)
                for name, due in self._due(now).items():
                    if due and name not in self._begun:
                        self._begun.add(name)
                        group.create_task(self._picture(name))
                if now.at_s >= shape.half_s and not documents.is_set():
                    documents.set()
                    longs = lengths_of(data / DOCUMENTS, shape.documents_scale, shape.documents_output_scale)
                    group.create_task(users(url, shape.documents_users, longs, over, self))
                if self._all_seen(now) or now.at_s > shape.half_s + shape.most_s:
                    await self._picture("after")
                    over.set()
                await asyncio.sleep(1.0)

    def _all_seen(self, now: Look) -> bool:
        pictures = {"before", "alert", "prometheus"} <= set(self.record.pictures)
        return pictures and self.record.grown() is not None and self.record.shrunk() is not None

    def _due(self, now: Look) -> dict[str, bool]:
        alarmed = ALERT in now.firing and now.at_s > self._shape.half_s
        return {
            "before": now.at_s > self._shape.half_s - 25,
            "prometheus": alarmed,
            "alert": alarmed and (now.drift or 0.0) > 1.0,
        }

    async def _picture(self, name: str) -> None:
        """One that cannot be taken is missed in the end; the run goes on."""
        path = self._out / f"{name}.png"
        try:
            if name == "prometheus":
                shown = f"document.body.textContent.includes('{ALERT}')"
                await picture(f"{self._watcher}/classic/alerts", path, shown, (1100, 900))
                await self._advise()
            else:
                shown = page_says("inside" if name == "before" else "above")
                await picture(f"{self._url}/ui", path, shown, (1440, 900))
            self.record.pictures.append(name)
        except (TimeoutError, AssertionError, OSError) as error:
            print(f"no picture {name}: {error!r}", file=sys.stderr)

    async def _advise(self) -> None:
        """The scenario of the new traffic, for `kvbaton plan`."""
        _, status = await control.the_one(self._pid)
        async with aiohttp.ClientSession() as http, http.get(f"{self._url}/fleet") as answer:
            up = {each["name"] for each in (await answer.json())["members"] if each["state"] == "up"}
        urls = [f"{each.url}/metrics" for each in status.processes if each.name in up and each.url]
        command = [sys.executable, "-m", "kvbaton.cli.main", "advise", *urls, "--interval", "20"]
        command += ["--write-scenario", str(self._out / "scenario.toml")]
        running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        self.record.advised = await running.wait()


async def main(out: Path, data: Path, shape: Shape) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with (
            process(sys.executable, "-m", "kvbaton.cli.main", *UP, "--log-dir", name, log=folder / "up.err") as up,
            prometheus(folder) as watcher,
        ):
            assert up.stdout is not None
            async with asyncio.timeout(START_S):
                line = await up.stdout.readline()
            assert line, (folder / "up.err").read_text()
            fleet = json.loads(line)
            longs = lengths_of(data / DOCUMENTS, shape.documents_scale, shape.documents_output_scale)
            shape = await calibrated(fleet["url"], shape, longs)
            await rested(fleet["url"])
            run = Run(out, shape, fleet, up.pid, watcher, folder)
            await run.go(data)
        said = (folder / "up.err").read_text().replace(f"{folder}/", "")
        run.record.told = [each for each in said.splitlines() if _TOLD.search(each)]
    write(out, run.record, " ".join(["kvbaton", *UP[:-3]]))
    wrong = missed(run.record)
    for each in wrong:
        print(f"drift: {each}", file=sys.stderr)
    return int(bool(wrong))


_TOLD = re.compile(r" s  (autoscale|plan|prefill-\d|decode-\d) ")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/reports/drift"))
    default = os.environ.get("KVBATON_SHARED") or Path(__file__).resolve().parents[2] / "shared"
    parser.add_argument("--shared", type=Path, default=Path(default))
    parser.add_argument("--half-s", type=float, default=100.0, help="of chat")
    parser.add_argument("--most-s", type=float, default=300.0, help="of documents, should not all have happened before")
    parser.add_argument("--chat-users", type=int, default=8)
    parser.add_argument("--documents-users", type=int, default=0, help="0: by the machine's speed")
    parser.add_argument("--chat-scale", type=float, default=1 / 24, help="of prompt lengths")
    parser.add_argument("--documents-scale", type=float, default=1 / 8, help="of prompt lengths")
    parser.add_argument("--output-scale", type=float, default=1 / 3, help="of answers to chat")
    parser.add_argument("--documents-output-scale", type=float, default=1 / 48, help="of answers about documents")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = Shape(given.half_s, given.most_s, given.chat_users, given.chat_scale, given.documents_users,
                   given.documents_scale, given.output_scale, given.documents_output_scale)  # fmt: skip
    sys.exit(asyncio.run(main(given.out, given.shared / "data", wanted)))
