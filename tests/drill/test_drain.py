"""What a drain waits for, with real workers: transfers that are not over, streams that are not, and its deadline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.up_process import Up, up

from kvbaton.bench.fault_proxy import FaultProxy
from kvbaton.cli.main import main
from kvbaton.router import control
from kvbaton.router.control import Command, FleetStatus

CHANGE_S = 300.0
LONG = "a prompt of many tokens " * 12
ROOM = ("--kv-blocks", "1024", "--threshold-tokens", "0")


@pytest.fixture(autouse=True)
def runtime_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))


async def ask(fleet: Up, command: Command) -> FleetStatus:
    return await control.ask(control.socket_path(fleet.process.pid), command, CHANGE_S)


async def stream(fleet: Up, number: int, max_tokens: int, begun: asyncio.Event | None = None) -> tuple[str, str]:
    """How one stream ended, and its text."""
    body = {
        "prompt": f"{number} {LONG}", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "cache_salt": f"{number}",
    }  # fmt: skip
    text = ""
    async with fleet.http.post(fleet.url + "/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    return f"error {event['error']['code']}", text
                text += "".join(choice["text"] for choice in event["choices"])
                if begun is not None:
                    begun.set()
            elif line == b"data: [DONE]\n":
                return "ok", text
            elif line.startswith(b"{"):
                return f"refused {response.status}", text
    return "cut", text


@pytest.mark.parametrize("change", ["drain", "role"])
async def test_a_prefill_worker_stays_until_what_it_offered_is_read(
    tiny_model_dir: Path, tmp_path: Path, change: str
) -> None:
    """AS-01: prefill is over and transfers are not when the worker is told to go, or to change its role."""
    async with up(tiny_model_dir, tmp_path, "--prefill", "2", "--decode", "1", "--transport", "tcp", *ROOM) as fleet:
        status = await ask(fleet, Command("status"))
        async with FaultProxy("127.0.0.1", next(p.kv_port for p in status.processes if p.name == "prefill-0")) as proxy:
            await ask(fleet, Command("reroute", "prefill-0", kv_address=f"127.0.0.1:{proxy.port}"))
            proxy.to_client.bytes_per_s = 100_000  # a prompt's KV is some 75 kB here
            streams = await streams_until(lambda: proxy.to_client.num_bytes > 0, fleet)
            role = "decode" if change == "role" else None
            changing = asyncio.ensure_future(ask(fleet, Command(change, "prefill-0", role=role)))  # type: ignore[arg-type]
            ended = await asyncio.gather(*streams)
            await changing
            assert proxy.to_client.num_bytes > 50_000, "KV went the slow way"
        assert {end for end, _ in ended} == {"ok"}
        assert [text for _, text in ended] == [(await stream(fleet, number, 12))[1] for number in range(len(ended))]
        members = await fleet.members()
        if change == "drain":
            assert "prefill-0" not in members
        else:
            assert members["prefill-0"]["role"] == "decode"
            assert members["prefill-0"]["stats"]["num_lease_expiries"] == 0


async def streams_until(reached: Callable[[], bool], fleet: Up) -> list[asyncio.Future[tuple[str, str]]]:
    """Streams of prompts that nobody has cached, eight at a time, until one of them has gone where it should."""
    streams: list[asyncio.Future[tuple[str, str]]] = []
    async with asyncio.timeout(CHANGE_S):
        while not reached():
            if all(each.done() for each in streams):
                streams += [asyncio.ensure_future(stream(fleet, len(streams) + n, 12)) for n in range(8)]
            await asyncio.wait([each for each in streams if not each.done()], timeout=0.05)
    return streams


async def test_a_decode_worker_goes_when_its_last_stream_ends(tiny_model_dir: Path, tmp_path: Path) -> None:
    """AS-02, AS-10: twenty streams end whole, nothing new goes there, the model stays served."""
    async with up(tiny_model_dir, tmp_path, "--prefill", "1", "--decode", "2", *ROOM) as fleet:
        begun = asyncio.Event()
        streams = [asyncio.ensure_future(stream(fleet, number, 120, begun)) for number in range(20)]
        await begun.wait()
        draining = asyncio.ensure_future(ask(fleet, Command("drain", "decode-0")))
        ended = await asyncio.gather(*streams)
        await draining
        assert [end for end, _ in ended] == ["ok"] * 20
        assert set(await fleet.members()) == {"prefill-0", "decode-1"}
        async with fleet.http.get(fleet.url + "/v1/models") as response:
            assert len((await response.json())["data"]) == 1
        assert [(await stream(fleet, number, 120))[1] for number in (3, 11)] == [ended[3][1], ended[11][1]]


async def test_what_is_open_at_the_deadline_goes_on_elsewhere(tiny_model_dir: Path, tmp_path: Path) -> None:
    """AS-02, the other half: a worker removed at once takes no stream with it."""
    async with up(tiny_model_dir, tmp_path, "--prefill", "1", "--decode", "2", *ROOM) as fleet:
        begun = asyncio.Event()
        streams = [asyncio.ensure_future(stream(fleet, number, 150, begun)) for number in range(6)]
        await begun.wait()
        await ask(fleet, Command("drain", "decode-0", deadline_s=0.0))
        ended = await asyncio.gather(*streams)
        assert [end for end, _ in ended] == ["ok"] * 6
        assert [(await stream(fleet, number, 150))[1] for number in range(6)] == [text for _, text in ended]


async def test_a_role_that_cannot_be_given_in_time_is_not_given_and_cuts_nothing(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    async with up(tiny_model_dir, tmp_path, "--prefill", "1", "--decode", "1", "--transport", "tcp", *ROOM) as fleet:
        path = control.socket_path(fleet.process.pid)
        status = await ask(fleet, Command("status"))
        async with FaultProxy("127.0.0.1", next(p.kv_port for p in status.processes if p.name == "prefill-0")) as proxy:
            await ask(fleet, Command("reroute", "prefill-0", kv_address=f"127.0.0.1:{proxy.port}"))
            proxy.to_client.bytes_per_s = 20_000  # a prompt's KV is some 75 kB here: nobody is done for seconds
            begun = asyncio.Event()
            streams = [asyncio.ensure_future(stream(fleet, number, 150, begun)) for number in range(3)]
            await begun.wait()
            with pytest.raises(Exception, match="still open after 0 s; the role is decode as before"):
                await control.ask(path, Command("role", "decode-0", role="prefill", deadline_s=0.0), CHANGE_S)
            proxy.heal()
            assert [end for end, _ in await asyncio.gather(*streams)] == ["ok"] * 3
            await ask(fleet, Command("reroute", "prefill-0", kv_address=""))
        await fleet.until(lambda members: members["decode-0"]["state"] == "up")
        assert (await fleet.members())["decode-0"]["role"] == "decode"
        assert (await stream(fleet, 9, 8))[0] == "ok"


async def test_the_command_line_changes_a_fleet_by_its_socket_and_by_its_router(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def kvbaton(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, ["fleet", *arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    async with up(tiny_model_dir, tmp_path, "--prefill", "1", "--decode", "1", *ROOM) as fleet:
        code, out, _ = await kvbaton("add", "--role", "decode", "--json")
        members = {member["name"]: member for member in json.loads(out)["members"]}
        assert code == 0 and members["decode-1"]["state"] == "up" and members["decode-1"]["pid"]
        code, out, _ = await kvbaton("status")
        assert code == 0 and "decode-1" in out and fleet.url in out
        code, _, told = await kvbaton("drain", "nobody")
        assert code == 2 and "there is no worker 'nobody'" in told

        by_router = ("--url", fleet.url, "--json")
        code, _, told = await kvbaton("role", "decode-1", "prefill", *by_router)
        assert code == 2 and "KVBATON_INTERNAL_KEY" in told
        monkeypatch.setenv("KVBATON_INTERNAL_KEY", (await ask(fleet, Command("status"))).key)
        code, out, _ = await kvbaton("role", "decode-1", "prefill", *by_router)
        assert code == 0 and {m["name"]: m["role"] for m in json.loads(out)["members"]}["decode-1"] == "prefill"
        # `up` knows nothing of that; what it tells the router next must not undo it.
        assert (await kvbaton("drain", "prefill-0"))[0] == 0
        await fleet.until(lambda m: set(m) == {"decode-0", "decode-1"} and m["decode-1"]["state"] == "up")
        assert (await fleet.members())["decode-1"]["role"] == "prefill"
        code, _, told = await kvbaton("add", "--role", "both", *by_router)
        assert code == 2 and "starts no workers" in told
        assert (await kvbaton("status", "--url", "http://127.0.0.1:9"))[0] == 1
        assert (await kvbaton("remove", "decode-1"))[0] == 0
        assert set(await fleet.members()) == {"decode-0"}
        assert (await fleet.post(prompt=LONG, max_tokens=4))[0] == 200
