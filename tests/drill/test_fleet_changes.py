"""Workers join, drain, leave and change roles under constant traffic: no request fails, and every answer is right."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cli.up_process import Up, up

from kvbaton.router import control
from kvbaton.router.control import Command, FleetStatus
from kvbaton.types import LocalError

CHANGE_S = 300.0  # not a bound on speed: only so that what is broken ends
PROMPTS = ["a short one", "the quick brown fox and the lazy dog, " * 4, "a prompt of many tokens " * 9]
NUM_CLIENTS = 4


class Traffic:
    """Clients that ask all the time; every answer is compared with the one of the quiet fleet."""

    def __init__(self, fleet: Up) -> None:
        self.fleet = fleet
        self.expected: dict[tuple[int, bool], str] = {}
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.decisions: Counter[str] = Counter()
        self._stop = asyncio.Event()

    async def learn(self) -> None:
        for index in range(len(PROMPTS)):
            status, text, _ = await self._ask(index, False, "")
            assert status == "ok"
            self.expected[index, False] = self.expected[index, True] = text

    async def _ask(self, index: int, stream: bool, salt: str) -> tuple[str, str, str]:
        body = {
            "prompt": PROMPTS[index], "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": stream,
            **({"cache_salt": salt} if salt else {}),
        }  # fmt: skip
        async with self.fleet.http.post(self.fleet.url + "/v1/completions", json=body) as response:
            raw = await response.read()
            decision = response.headers.get("x-kvbaton-decision", "")
            if response.status != 200:
                return f"{response.status} {json.loads(raw)['error']['code']}", "", decision
        if not stream:
            return "ok", json.loads(raw)["choices"][0]["text"], decision
        if not raw.endswith(b"data: [DONE]\n\n"):
            return f"broken stream {raw[-300:]!r}", "", decision
        events = [json.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
        return "ok", "".join(choice["text"] for event in events for choice in event["choices"]), decision

    async def _client(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            index, stream = rng.randrange(len(PROMPTS)), rng.random() < 0.7
            # A salt of its own: no cache knows the prompt, so it is computed and handed over again.
            end, text, decision = await self._ask(index, stream, f"{rng.random()}" if rng.random() < 0.7 else "")
            self.ends[end] += 1
            self.decisions[decision] += 1
            if end == "ok" and text != self.expected[index, stream]:
                self.wrong.append(f"prompt {index}, {decision}: {text!r}")

    @asynccontextmanager
    async def flowing(self, seed: int) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CLIENTS):
                group.create_task(self._client(random.Random(f"{seed}-{number}")))
            try:
                yield
            finally:
                self._stop.set()

    async def more(self, number: int) -> None:
        """Until so many more requests have ended: the change is felt by real traffic."""
        goal = self.ends.total() + number
        async with asyncio.timeout(CHANGE_S):
            while self.ends.total() < goal:  # noqa: ASYNC110 (clients count, they do not tell)
                await asyncio.sleep(0.01)


@pytest.fixture
def runtime_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path


async def ask(fleet: Up, command: Command) -> FleetStatus:
    return await control.ask(control.socket_path(fleet.process.pid), command, CHANGE_S)


async def roles(fleet: Up) -> dict[str, str]:
    return {name: member["role"] for name, member in (await fleet.members()).items()}


async def settled(fleet: Up) -> None:
    """Nothing is held anywhere once the traffic has ended."""

    def free(members: dict[str, dict[str, Any]]) -> bool:
        held = ("num_active", "num_blocks_used", "num_blocks_pinned", "num_leases")
        return all(
            member["state"] == "up" and member["stats"] is not None and not any(member["stats"][name] for name in held)
            for member in members.values()
        )

    await fleet.until(free)


def next_change(rng: random.Random, now: dict[str, str]) -> Command:
    """One that leaves at least two workers; any role may become any other."""
    name = rng.choice(sorted(now))
    kinds = ["role", "role", "drain"] if len(now) > 3 else ["role", "role", "add"]
    match rng.choice(kinds):
        case "add":
            return Command("add", role=rng.choice(("prefill", "decode")))
        case "drain":
            return Command("drain", name)
        case _:
            return Command("role", name, role=rng.choice([r for r in ("prefill", "decode", "both") if r != now[name]]))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_ten_changes_under_traffic_fail_no_request(
    tiny_model_dir: Path, tmp_path: Path, runtime_directory: Path, transport: str
) -> None:
    seed = int(os.environ.get("KVBATON_TEST_SEED", "1"))
    print(f"seed {seed}")
    rng = random.Random(f"{seed}-{transport}")
    flags = ("--prefill", "1", "--decode", "2", "--transport", transport, "--threshold-tokens", "0")
    async with up(tiny_model_dir, tmp_path, *flags) as fleet:
        traffic = Traffic(fleet)
        await traffic.learn()
        done = []
        async with traffic.flowing(seed):
            await traffic.more(20)
            for _ in range(10):
                command = next_change(rng, await roles(fleet))
                await ask(fleet, command)
                done.append(command)
                now = await roles(fleet)
                match command.verb:
                    case "role":
                        assert now[command.name] == command.role
                    case "drain":
                        assert command.name not in now
                await traffic.more(20)
        story = [f"{command.verb} {command.name} {command.role or ''}" for command in done]
        assert set(traffic.ends) == {"ok"}, (traffic.ends, story)
        assert traffic.wrong == [], story
        await settled(fleet)
        members = await fleet.members()
        assert all(member["stats"]["num_failed_steps"] == 0 for member in members.values())


async def test_a_worker_that_was_told_another_role_keeps_it_when_it_dies(
    tiny_model_dir: Path, tmp_path: Path, runtime_directory: Path
) -> None:
    async with up(tiny_model_dir, tmp_path, "--prefill", "1", "--decode", "2", "--threshold-tokens", "0") as fleet:
        before = (await fleet.members())["decode-1"]["incarnation"]
        status = await ask(fleet, Command("role", "decode-1", role="prefill"))
        member = (await fleet.members())["decode-1"]
        assert (member["role"], member["state"], member["incarnation"]) == ("prefill", "up", before), "no restart"
        await ask(fleet, Command("drain", "prefill-0"))
        answer = await fleet.post(prompt="a prompt of many tokens " * 9, max_tokens=4)
        assert answer[0] == 200 and answer[2]["x-kvbaton-prefill"] == "decode-1", "it lends as any prefill worker does"

        pid = next(process.pid for process in status.processes if process.name == "decode-1")
        assert pid is not None
        os.kill(pid, 9)
        await fleet.until(lambda m: m["decode-1"]["state"] == "up" and m["decode-1"]["incarnation"] != before)
        assert (await fleet.members())["decode-1"]["role"] == "prefill"
        answer = await fleet.post(prompt="another prompt of many tokens " * 9, max_tokens=4)
        assert answer[2]["x-kvbaton-prefill"] == "decode-1"


async def test_what_makes_no_sense_is_refused_with_a_reason_and_changes_nothing(
    tiny_model_dir: Path, tmp_path: Path, runtime_directory: Path
) -> None:
    async with up(tiny_model_dir, tmp_path, "--colocated", "1") as fleet:
        for command, told in (
            (Command("drain", "both-0"), "the last worker"),
            (Command("role", "both-0", role="decode"), "the last worker"),
            (Command("drain", "nobody"), "there is no worker 'nobody'"),
            (Command("add"), "names no role"),
        ):
            with pytest.raises(LocalError, match=told):
                await ask(fleet, command)
        assert await roles(fleet) == {"both-0": "both"}
        assert (await fleet.post(prompt="still here", max_tokens=2))[0] == 200
        await ask(fleet, Command("role", "both-0", role="decode", force=True))
        assert await roles(fleet) == {"both-0": "decode"}
        assert (await fleet.post(prompt="still here", max_tokens=2))[0] == 200
