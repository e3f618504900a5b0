"""Real vLLM servers behind the router, one that prefills and one that decodes; `make test-vllm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from integration.openai_conformance import PROMISES, Service, a_prefix_is_cached_and_a_salt_shares_nothing
from integration.vllm_fleet import BLOCK, KV_BYTES, MAX_CONTEXT, PYTHON, TEXTS, VllmFleet, running, text_of, until
from openai.types import Completion

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` installs vLLM"),
]


@pytest.fixture(scope="module")
def split(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmFleet]:
    with running(default_model_path, tmp_path_factory.mktemp("split"), "--prefill", "1", "--decode", "1") as fleet:
        yield fleet


def test_answers_are_those_of_one_server_and_the_kv_moved(split: VllmFleet) -> None:
    """Case KV-16."""
    decode = split.server("decode-0")
    before = decode.figure("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    bytes_before = decode.figure("vllm:nixl_bytes_transferred_sum")
    num_moved = 0
    for text in TEXTS:
        answer = split.complete(prompt=text, logprobs=1)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvbaton-decision"] == "remote", answer.headers
        alone = split.complete("prefill-0", prompt=text, logprobs=1)
        assert "x-kvbaton-decision" not in alone.headers
        assert answer.json()["choices"][0]["logprobs"]["tokens"] == alone.json()["choices"][0]["logprobs"]["tokens"]
        assert text_of(answer) == text_of(alone)
        num_moved += answer.json()["usage"]["prompt_tokens"] // BLOCK * BLOCK
    until(
        "the decode server says whence its prompts came",
        lambda: (
            decode.figure("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") >= before + num_moved
        ),
    )
    assert num_moved >= len(TEXTS) * BLOCK
    assert decode.figure("vllm:nixl_bytes_transferred_sum") - bytes_before >= num_moved * KV_BYTES
    computed = decode.figure("vllm:prompt_tokens_by_source_total", source="local_compute")
    assert computed <= len(TEXTS) * BLOCK, "it computed at most what does not fill a block"


def test_the_router_knows_what_each_server_caches(split: VllmFleet) -> None:
    text = "What was said before is known to those who listened. " * 30
    first = split.complete(prompt=text).json()["usage"]
    num_blocks = first["prompt_tokens"] // BLOCK
    members = until(
        "events arrive",
        lambda: (
            (found := split.members())
            and all(one["prefix_index"]["num_blocks"] >= num_blocks for one in found.values())
            and found
        ),
    )
    assert {one["prefix_index"]["trust"] for one in members.values()} == {"fresh"}
    again = split.complete(prompt=text).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= num_blocks * BLOCK - BLOCK
    other = split.complete(prompt=text, cache_salt="another tenant").json()["usage"]
    assert not other["prompt_tokens_details"]["cached_tokens"], "a salt shares nothing"


def doctor(*arguments: str, **environ: str) -> Any:
    command = [sys.executable, "-m", "kvbaton.cli.main", "doctor", "--json", *arguments]
    command += ["--tokens", str(3 * BLOCK), "--repeats", "1", "--timeout-s", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2400, env={**os.environ, **environ})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert not [one for one in found["findings"] if one["severity"] == "error"]
    return found


def test_the_doctor_reads_both_servers_and_finds_nothing(split: VllmFleet) -> None:
    found = doctor("--pid", str(split.process.pid))
    prefill, decode = (one for one in found["servers"] if one["engine"] == "vllm")
    assert len(prefill["compatibility_hash"]) == 64
    assert prefill["compatibility_hash"] == decode["compatibility_hash"]
    assert prefill["block_size"] == decode["block_size"] == BLOCK and prefill["attention"] and prefill["connector"]
    (pair,) = found["pairs"]
    assert pair["num_bytes"] >= 2 * BLOCK * KV_BYTES and not pair["trouble"]
    assert pair["seconds"] > 0, "by the figures of the decode server"


def test_the_doctor_hands_off_between_bare_servers(split: VllmFleet) -> None:
    prefill, decode = split.server("prefill-0"), split.server("decode-0")
    before = decode.figure("vllm:nixl_bytes_transferred_sum")
    key = decode.process.environ()["VLLM_API_KEY"]
    found = doctor(f"prefill={prefill.url}", f"decode={decode.url}", VLLM_API_KEY=key)
    (pair,) = found["pairs"]
    assert not pair["trouble"] and pair["seconds"] > 0
    moved = decode.figure("vllm:nixl_bytes_transferred_sum") - before
    assert pair["num_bytes"] == moved >= 2 * BLOCK * KV_BYTES


def test_a_stream_says_the_same_and_what_it_took(split: VllmFleet) -> None:
    client = openai.OpenAI(base_url=split.url + "/v1", api_key="none", max_retries=0, timeout=600)
    whole = split.complete(prompt=TEXTS[0], max_tokens=16).json()
    parts: list[Completion] = list(
        client.completions.create(
            model="m",
            prompt=TEXTS[0],
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole["choices"][0]["text"]
    assert sum(bool(part.choices and part.choices[0].text) for part in parts) > 3, "it came in parts"
    usage = parts[-1].usage
    assert usage is not None and usage.completion_tokens == 16
    assert usage.prompt_tokens == whole["usage"]["prompt_tokens"]
    chat = client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=20,
        temperature=0,
    )
    assert "Paris" in str(chat.choices[0].message.content)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_leaving_ends_the_work_on_both_servers(split: VllmFleet, name: str) -> None:
    """While the prompt is computed, in several steps, and in the middle of the answer. vLLM counts no such abort."""
    prompt = [1000 + index for index in range(MAX_CONTEXT - 64)] if name == "prefill-0" else TEXTS[1]
    body = {"model": "m", "prompt": prompt, "max_tokens": 60, "ignore_eos": True, "stream": True, "cache_salt": name}
    server, decode = split.server(name), split.server("decode-0")
    finished = server.figure("vllm:request_success_total")
    said = decode.figure("vllm:generation_tokens_total")
    with split.leaving(body):
        until(f"{name} works on it", lambda: server.figure("vllm:num_requests_running"))
    for one in ("prefill-0", "decode-0"):
        until(f"{one} is idle", lambda one=one: not split.server(one).figure("vllm:num_requests_running"))
        until(f"{one} queues nothing", lambda one=one: not split.server(one).figure("vllm:num_requests_waiting"))
    assert server.figure("vllm:request_success_total") == finished, "it was not worked off to its end"
    assert decode.figure("vllm:generation_tokens_total") < said + 60
    assert split.complete(prompt=TEXTS[2]).status_code == 200


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_it_keeps_the_promises_of_openais_api(split: VllmFleet, promise: Callable[[Service], None]) -> None:
    decode = split.server("decode-0")
    before = decode.figure("vllm:nixl_bytes_transferred_sum")
    promise(Service(split.url, "m", num_repeats=30))
    if promise is a_prefix_is_cached_and_a_salt_shares_nothing:  # of its prompts, some of which are longer than a block
        until("KV moved", lambda: decode.figure("vllm:nixl_bytes_transferred_sum") > before)


def test_wrong_requests_are_the_clients_fault(split: VllmFleet) -> None:
    too_long = split.complete(prompt=list(range(100, 100 + MAX_CONTEXT + 1)))
    assert too_long.status_code == 400 and too_long.json()["error"]["param"], too_long.text
    assert split.complete(prompt="x", n=0).status_code == 400
    assert split.complete(prompt="x", model="other").status_code == 404


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_server_that_dies_is_made_up_for_and_comes_back(split: VllmFleet, name: str) -> None:
    split.server(name).process.kill()
    answer = split.complete(prompt=TEXTS[0])
    assert answer.status_code == 200, answer.text
    until("the worker is gone", lambda: split.members()[name]["state"] != "up")
    answer = split.complete(prompt=TEXTS[1])
    assert answer.status_code == 200 and answer.headers["x-kvbaton-decision"] != "remote"
    until("it is back", lambda: all(one["state"] == "up" for one in split.members().values()))
    split.refresh()
    decode = split.server("decode-0")
    before = decode.figure("vllm:nixl_bytes_transferred_sum")
    answer = split.complete(prompt=TEXTS[2], cache_salt=name)
    assert answer.headers["x-kvbaton-decision"] == "remote" and answer.status_code == 200
    until("bytes moved again", lambda: decode.figure("vllm:nixl_bytes_transferred_sum") > before)
