"""A long run at saturation with random aborts and worker kills.

    python -m benchmarks.soak [--minutes 20] [--prefill 2] [--decode 2] [--kill-every 45] [--json FILE]

Starts a real fleet with ``kvbaton up``, keeps more clients busy than it has places, has a share of them hang up at a
random moment, and kills a random worker process with SIGKILL (``up`` starts it anew). Exit code 1 unless

    every request was answered, refused for want of room or a worker with an error in OpenAI's shape, or ended by an
    error event in its stream, and some were answered each way;
    every answer of a fixed greedy prompt was the one the quiet fleet gave before;
    at the end no worker has a block in use, a pin, a lease or a request;
    after Ctrl-C no process and no shared memory of the fleet is left.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import aiohttp
import psutil

ANSWER_S = 300.0  # no request may take longer than this, killed workers and all
IDLE_S = 60.0
END_S = 60.0
CANARY = {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
TEXT = "\n".join(topics.values())


@dataclass(frozen=True)
class Settings:
    """What to run. ``fleet``: more flags for ``kvbaton up``."""

    minutes: float = 20.0
    prefill: int = 2
    decode: int = 2
    clients: int = 24
    abort_share: float = 0.2
    kill_every_s: float = 45.0  # on average
    longest_chars: int = 6300
    seed: int = 0
    log: str | None = None
    fleet: tuple[str, ...] = ()


@dataclass
class Tally:
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    unaccounted: list[str] = field(default_factory=list)
    wrong_canaries: list[str] = field(default_factory=list)
    num_canaries: int = 0
    num_kills: int = 0
    num_output_chunks: int = 0


class Soak:
    def __init__(self, url: str, settings: Settings, up: subprocess.Popen) -> None:
        self.url = url
        self.settings = settings
        self.up = up
        self.tally = Tally()
        self.rng = random.Random(settings.seed)
        self.until_s = time.monotonic() + 60 * settings.minutes
        self.canary_text = ""

    async def run(self) -> dict:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self.url, timeout=timeout, connector=connector) as session:
            self.canary_text = await self._quiet_canary(session)
            async with asyncio.TaskGroup() as group:
                for index in range(self.settings.clients):
                    group.create_task(self._client(session, random.Random(f"{self.settings.seed}-{index}")))
                group.create_task(self._killer())
                group.create_task(self._reporter())
            return await self._settled(session)

    async def _quiet_canary(self, session: aiohttp.ClientSession) -> str:
        async with session.post("/v1/completions", json=CANARY) as answer:
            body = await answer.json()
            assert answer.status == 200, body
            return body["choices"][0]["text"]

    async def _client(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        while time.monotonic() < self.until_s:
            if rng.random() < 0.1:
                await self._canary(session)
                continue
            outcome = await self._request(session, rng)
            self.tally.outcomes[outcome] += 1
            if outcome.startswith("refused 5"):
                await asyncio.sleep(rng.random())  # what Retry-After asks of a client

    async def _canary(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.post("/v1/completions", json=CANARY) as answer:
                body = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.tally.unaccounted.append(f"canary: {error!r}")
            return
        if answer.status != 200:
            self.tally.outcomes[f"refused {answer.status}"] += 1
            return
        self.tally.num_canaries += 1
        text = body["choices"][0]["text"]
        if text != self.canary_text:
            self.tally.wrong_canaries.append(text)

    async def _request(self, session: aiohttp.ClientSession, rng: random.Random) -> str:
        """One request; the word for how it ended."""
        start = rng.randrange(len(TEXT) - 8000)
        body = {
            "prompt": TEXT[start : start + int(self.settings.longest_chars ** rng.uniform(0.13, 1.0))],
            "max_tokens": rng.choice((1, 8, 32, 96)),
            "temperature": rng.choice((0, 0.8)),
            "stream": rng.random() < 0.7,
            "n": rng.choice((1, 1, 1, 2)),
        }
        patience_s = rng.uniform(0.01, 4.0) if rng.random() < self.settings.abort_share else None
        try:
            async with asyncio.timeout(patience_s), session.post("/v1/completions", json=body) as answer:
                if answer.status != 200:
                    error = (await answer.json())["error"]
                    assert error["message"] and error["type"] and answer.status >= 429, error
                    return f"refused {answer.status}"
                if not body["stream"]:
                    choices = (await answer.json())["choices"]
                    assert len(choices) == body["n"], choices
                    return f"answered, {choices[0]['finish_reason']}"
                return await self._stream(answer, body["n"])
        except TimeoutError:
            if patience_s is not None:
                return "hung up"
            self.tally.unaccounted.append(f"no end within {ANSWER_S:.0f} s")
        except (aiohttp.ClientError, KeyError, ValueError, AssertionError) as error:
            self.tally.unaccounted.append(repr(error))
        return "unaccounted"

    async def _stream(self, answer: aiohttp.ClientResponse, num_choices: int) -> str:
        finish_reasons: dict[int, str] = {}
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                if len(finish_reasons) != num_choices:
                    self.tally.unaccounted.append("a stream ended without a finish reason for each choice")
                return f"streamed, {finish_reasons.get(0)}"
            event = json.loads(data)
            if "error" in event:
                return "error event in the stream"
            self.tally.num_output_chunks += 1
            for choice in event["choices"]:
                if choice["finish_reason"]:
                    finish_reasons[choice["index"]] = choice["finish_reason"]
        self.tally.unaccounted.append("a stream broke off without a word")
        return "unaccounted"

    def _workers(self) -> list[psutil.Process]:
        found = []
        for process in psutil.Process(self.up.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "worker" in process.cmdline():
                    found.append(process)
        return found

    async def _killer(self) -> None:
        while True:
            pause_s = self.settings.kill_every_s * self.rng.uniform(0.5, 1.5)
            if time.monotonic() + pause_s > self.until_s:
                return
            await asyncio.sleep(pause_s)
            workers = self._workers()
            if workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.rng.choice(workers).send_signal(signal.SIGKILL)
                    self.tally.num_kills += 1

    async def _reporter(self) -> None:
        while time.monotonic() < self.until_s:
            await asyncio.sleep(min(30.0, max(0.0, self.until_s - time.monotonic())))
            left_s = max(0.0, self.until_s - time.monotonic())
            print(
                f"{left_s:5.0f} s left, {self.tally.num_kills} kills, {sum(self.tally.outcomes.values())} requests, "
                f"{len(self.tally.unaccounted)} unaccounted, {len(self.tally.wrong_canaries)} wrong",
                file=sys.stderr,
                flush=True,
            )

    async def _settled(self, session: aiohttp.ClientSession) -> dict:
        """The fleet page once nothing is held any more, or as it is after IDLE_S; then one more answer."""
        deadline_s = time.monotonic() + IDLE_S
        while True:
            async with session.get("/fleet") as answer:
                fleet = await answer.json()
            if not holding(fleet) or time.monotonic() > deadline_s:
                await self._canary(session)
                return fleet
            await asyncio.sleep(0.5)


def holding(fleet: dict) -> list[str]:
    """What members still hold, in words; empty when nothing."""
    found = []
    for member in fleet["members"]:
        stats = member["stats"]
        if stats is None or member["state"] != "up":
            found.append(f"{member['name']} is {member['state']}")
            continue
        for name in ("num_blocks_used", "num_blocks_pinned", "num_leases", "num_active", "num_running", "num_waiting"):
            if stats[name]:
                found.append(f"{member['name']}: {name} {stats[name]}")
    return found


def start_fleet(settings: Settings) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, "-m", "kvbaton.cli.main", "up", "--json", "--port", "0"]
    command += ["--prefill", str(settings.prefill), "--decode", str(settings.decode), *settings.fleet]
    with open(settings.log or os.devnull, "w") as log:
        up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert up.stdout is not None
    line = up.stdout.readline()
    if not line:
        with up:
            raise SystemExit(f"kvbaton up ended with code {up.wait()}")
    return up, json.loads(line)["url"]


def segments() -> set[Path]:
    return set(Path("/dev/shm").glob("kvbaton-*"))


def leftovers(pids: list[int], before: set[Path]) -> list[str]:
    """What the fleet should have taken with it: of the segments that were not there before, those without an owner."""
    found = [f"process {pid}" for pid in pids if psutil.pid_exists(pid)]
    for path in segments() - before:
        with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append(path.name)
            except BlockingIOError:
                pass
    return found


def soak(settings: Settings) -> dict:
    """Start a fleet, wear it out, end it; everything that was counted, and whether it passed."""
    before = segments()
    up, url = start_fleet(settings)
    run = Soak(url, settings, up)
    pids: list[int] = []
    with up:  # closes its pipe
        try:
            fleet = asyncio.run(run.run())
            pids = [process.pid for process in psutil.Process(up.pid).children(recursive=True)]
        finally:
            up.send_signal(signal.SIGINT)
            try:
                code: int | None = up.wait(END_S)
            except subprocess.TimeoutExpired:
                up.kill()
                code = None
    tally = run.tally
    result = {
        "minutes": settings.minutes,
        "seed": settings.seed,
        "outcomes": dict(sorted(tally.outcomes.items())),
        "requests": sum(tally.outcomes.values()) + tally.num_canaries,
        "output_chunks": tally.num_output_chunks,
        "kills": tally.num_kills,
        "canaries": tally.num_canaries,
        "wrong_canaries": tally.wrong_canaries[:5],
        "unaccounted": tally.unaccounted[:20],
        "held_at_the_end": holding(fleet),
        "left_behind": leftovers(pids, before),
        "exit_code_of_up": code,
    }
    answered = all(any(outcome.startswith(word) for outcome in tally.outcomes) for word in ("answered", "streamed"))
    faults = ("unaccounted", "wrong_canaries", "held_at_the_end", "left_behind", "exit_code_of_up")
    return {**result, "passed": answered and not any(result[name] for name in faults) and code is not None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = Settings()
    parser.add_argument("--minutes", type=float, default=usual.minutes)
    parser.add_argument("--prefill", type=int, default=usual.prefill)
    parser.add_argument("--decode", type=int, default=usual.decode)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--threshold-tokens", type=int, default=64, help="shorter prompts stay on the decode worker")
    parser.add_argument("--clients", type=int, default=usual.clients)
    parser.add_argument("--abort-share", type=float, default=usual.abort_share)
    parser.add_argument("--kill-every", type=float, default=usual.kill_every_s, help="seconds, on average")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--log", help="where the fleet's own log goes")
    parser.add_argument("--json", help="also write the result there")
    args = parser.parse_args()
    result = soak(
        Settings(
            minutes=args.minutes,
            prefill=args.prefill,
            decode=args.decode,
            clients=args.clients,
            abort_share=args.abort_share,
            kill_every_s=args.kill_every,
            seed=args.seed,
            log=args.log,
            fleet=("--transport", args.transport, "--threshold-tokens", str(args.threshold_tokens)),
        )
    )
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        Path(args.json).write_text(text)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
