"""``kvbaton doctor`` against real workers: a good fleet, and one started with every wrong setting it should find."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.up_process import up
from router.processes import FLAGS, KEY, Process


def run(*arguments: str, key: str = KEY, expected: int) -> dict[str, Any]:
    environ = {**os.environ, "KVBATON_INTERNAL_KEY": key}
    command = [sys.executable, "-m", "kvbaton.cli.main", "doctor", "--json", "--tokens", "100", "--timeout-s", "200"]
    command += arguments
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=240)
    assert done.returncode == expected, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout else {"error": done.stderr}


def codes(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(one["code"], one["subject"]) for one in found["findings"]}


class Workers:
    """Started when first asked for; all of them end together."""

    def __init__(self, directory: Path, make_tiny_model: Callable[..., Path]) -> None:
        self._directory, self._make = directory, make_tiny_model
        self._running: dict[str, Process] = {}

    def __call__(self, name: str, role: str, *flags: str, seed: int = 0, key: str = KEY) -> str:
        """Its address."""
        if name not in self._running:
            model = self._make("llama", seed=seed)
            arguments = ["worker", "--role", role, "--model", str(model), "--name", "tiny", *FLAGS, *flags]
            environ = {"KVBATON_INTERNAL_KEY": key}
            self._running[name] = Process(name, arguments, self._directory / f"{name}.log", environ)
            self._running[name].start()
        return self._running[name].url

    def end(self) -> None:
        for process in self._running.values():
            assert process.popen is not None and process.popen.stdout is not None
            process.popen.kill()
            process.popen.wait()
            process.popen.stdout.close()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: Callable[..., Path]) -> Iterator[Workers]:
    found = Workers(tmp_path_factory.mktemp("doctor"), make_tiny_model)
    yield found
    found.end()


def test_a_good_pair_hands_off_and_says_how_fast(workers: Workers) -> None:
    found = run(f"prefill={workers('p', 'prefill')}", f"decode={workers('d', 'decode')}", expected=0)
    assert found["findings"] == []
    prefill, decode = found["servers"]
    assert prefill["engine"] == decode["engine"] == "kvbaton"
    assert prefill["fingerprint"] == decode["fingerprint"] and prefill["kv_port"]
    (pair,) = found["pairs"]
    assert (pair["prefill"], pair["decode"]) == ("prefill-0", "decode-0")
    assert pair["num_bytes"] > 0 and pair["seconds"] > 0 and pair["repeats"] == 3


def test_workers_that_generate_for_nobody_without_the_key_hand_off(workers: Workers) -> None:
    prefill, decode = (workers(f"{role}-closed", role, "--clients", "refuse") for role in ("prefill", "decode"))
    found = run(f"prefill={prefill}", f"decode={decode}", expected=0)
    assert found["findings"] == [] and found["pairs"][0]["num_bytes"] > 0


def test_a_shared_tier_does_not_stand_for_the_hand_off(workers: Workers) -> None:
    """What prefill has computed decode finds there: another prompt is handed off instead, whole."""
    prefill, decode = (workers(f"{role}-tier", role, "--kv-tier-memory", "64") for role in ("prefill", "decode"))
    whole = run(f"prefill={workers('p', 'prefill')}", f"decode={workers('d', 'decode')}", expected=0)["pairs"][0]
    found = run(f"prefill={prefill}", f"decode={decode}", expected=0)
    assert found["findings"] == [] and found["pairs"][0]["num_bytes"] == whole["num_bytes"]
    assert found["pairs"][0]["gb_per_s"] > 0


def test_other_weights_and_block_sizes_are_found_and_the_hand_off_is_refused(workers: Workers) -> None:
    other = workers("d-other", "decode", "--block-size", "32", seed=1)
    found = run(f"prefill={workers('p', 'prefill')}", f"other:decode={other}", expected=1)
    assert codes(found) == {
        ("fingerprint-model_revision", "prefill-0 -> other"),
        ("block-size", "prefill-0 -> other"),
        ("hand-off", "prefill-0 -> other"),
    }
    assert "prefill worker failed" in next(one["what"] for one in found["findings"] if one["code"] == "hand-off")


def test_another_kv_dtype_is_found(workers: Workers) -> None:
    other = workers("d-bf16", "decode", "--kv-dtype", "bfloat16")
    found = run("--no-measure", f"prefill={workers('p', 'prefill')}", f"decode={other}", expected=1)
    assert codes(found) == {("fingerprint-kv_dtype", "prefill-0 -> decode-0")}


def test_another_key_is_found(workers: Workers) -> None:
    other = workers("d-key", "decode", key="another" * 4)
    found = run(f"prefill={workers('p', 'prefill')}", f"decode={other}", expected=1)
    assert ("unreadable", "decode-0") in codes(found)
    assert "key" in found["findings"][0]["what"] and "set KVBATON_INTERNAL_KEY" in found["findings"][0]["fix"]


def test_a_role_that_is_listed_wrong_is_found(workers: Workers) -> None:
    found = run("--no-measure", f"decode={workers('p', 'prefill')}", f"prefill={workers('d', 'decode')}", expected=1)
    assert {one for one in codes(found) if one[0] == "role"} == {("role", "decode-0"), ("role", "prefill-0")}


def test_an_address_for_kv_that_nobody_listens_on_is_found(workers: Workers, tmp_path: Path) -> None:
    text = ""
    for name, role, more in (("p", "prefill", 'kv_address = "127.0.0.1:1"\n'), ("d", "decode", "")):
        text += f'[[workers]]\nname = "{name}"\nurl = "{workers(name, role)}"\nrole = "{role}"\n{more}'
    (tmp_path / "fleet.toml").write_text(text)
    found = run("--config", str(tmp_path / "fleet.toml"), expected=1)
    assert codes(found) == {("kv-port", "p")}


def test_who_is_not_there_is_found_and_without_a_key_less_is_read(workers: Workers) -> None:
    found = run("prefill=http://127.0.0.1:1", f"decode={workers('d', 'decode')}", key="", expected=1)
    assert codes(found) == {("unreadable", "prefill-0"), ("unread", "decode-0")}


def test_wrong_arguments_are_told(tmp_path: Path) -> None:
    assert "leave out /v1" in run("decode=http://h:1/v1", expected=2)["error"]
    assert "leave out #x" in run("decode=http://h:1#x", expected=2)["error"]
    assert "no server to look at" in run("decode=http://[::1:80", expected=2)["error"]
    assert "no server to look at" in run("worker=http://h:1", expected=2)["error"]
    assert "each name a fleet" in run("decode=http://h:1", "--pid", "1", expected=2)["error"]
    (tmp_path / "empty.toml").write_text("")
    assert "lists no workers" in run("--config", str(tmp_path / "empty.toml"), expected=2)["error"]


async def test_the_fleet_that_up_runs_is_found_with_its_router(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with up(tiny_model_dir, tmp_path, "--prefill", "1", "--decode", "1") as fleet:
        pid = str(fleet.process.pid)
        found = await asyncio.to_thread(run, "--pid", pid, key="", expected=0)
        assert {one["role"] for one in found["servers"]} == {"router", "prefill", "decode"}
        assert found["findings"] == [] and len(found["pairs"]) == 1
        slow = await asyncio.to_thread(run, "--pid", pid, "--min-gb-per-s", "1e6", key="", expected=1)
        assert codes(slow) == {("slow", "prefill-0 -> decode-0")}
