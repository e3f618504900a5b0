"""The API cases on a split fleet of real engines: what a client asks is what it gets, whoever computed which part."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from router.fleet import running_fleet
from router.test_real_fleet import PROMPT, RealFleet, real_fleet
from workers.scripted import sse_events

from kvbaton.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def split(tiny_model_dir: Path) -> AsyncIterator[RealFleet]:
    async with real_fleet(tiny_model_dir, {"p0": "prefill", "d0": "decode"}) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def single(tiny_model_dir: Path) -> AsyncIterator[RealFleet]:
    async with real_fleet(tiny_model_dir, {"b0": "both"}) as fleet:
        yield fleet


async def refusal(fleet: RealFleet, body: Any, path: str = "/v1/completions") -> dict[str, Any]:
    """The error of a request that is the client's fault; no worker may have heard of it."""
    await fleet.check_empty()  # of what came before
    before = [worker.stats() for worker in fleet.workers.values()]
    status, answer, _ = await fleet.fleet.post(body, path)
    assert status == 400, answer
    assert [worker.stats() for worker in fleet.workers.values()] == before, "work was done for a refused request"
    error: dict[str, Any] = answer["error"]
    return error


async def events_of(fleet: RealFleet, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    raw = await fleet.ask(path, stream=True, **body)
    *events, end = sse_events(raw)
    assert end == "[DONE]"
    return [json.loads(event) for event in events]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    parts = [c for event in events for c in event["choices"] if c["index"] == index]
    return "".join(part["text"] for part in parts)


async def test_ap_02_min_tokens_stays_with_the_prefill_leg_too(split: RealFleet) -> None:
    # The end token would be chosen at once, and is banned until a hundred were made.
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 400, "min_tokens": 100, "logit_bias": {"258": 100}}
    whole = await split.ask(**body)
    assert 100 <= whole["usage"]["completion_tokens"] < 400 and whole["choices"][0]["finish_reason"] == "stop"
    assert text_of(await events_of(split, **body)) == whole["choices"][0]["text"]
    error = await refusal(split, {**body, "max_tokens": 99})
    assert error["param"] == "min_tokens"


async def test_ap_03_limits_that_the_client_left_out(split: RealFleet) -> None:
    hello = [{"role": "user", "content": "hello"}]
    bias = {"65": 100}  # else the answer might end by itself
    for path, body, num_tokens in (
        ("/v1/completions", {"prompt": "x"}, 16),
        ("/v1/completions", {"prompt": "x", "max_tokens": None}, 16),
        ("/v1/chat/completions", {"messages": hello, "max_completion_tokens": 20}, 20),
    ):
        answer = await split.ask(path, temperature=0, logit_bias=bias, **body)
        assert answer["usage"]["completion_tokens"] == num_tokens, body
        assert answer["choices"][0]["finish_reason"] == "length"
    answer = await split.ask("/v1/chat/completions", temperature=0, messages=hello, logit_bias={"258": 100})
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_ap_05_choices_of_several_prompts_are_whole_and_in_order(split: RealFleet, single: RealFleet) -> None:
    body = {"prompt": [PROMPT, PROMPT + "b", "c"], "n": 2, "temperature": 1, "seed": 1, "max_tokens": 16}
    expected, actual = await single.ask(**body), await split.ask(**body)
    assert [choice["index"] for choice in actual["choices"]] == list(range(6))
    assert [c["text"] for c in actual["choices"]] == [c["text"] for c in expected["choices"]]
    assert all(choice["finish_reason"] in ("stop", "length") for choice in actual["choices"])
    events = await events_of(split, **body)
    assert [text_of(events, i) for i in range(6)] == [c["text"] for c in expected["choices"]]


async def test_ap_08_every_form_of_prompt_and_what_is_none(split: RealFleet) -> None:
    for prompt, num_choices in (([1, 2, 3], 1), ([[1, 2], [3, 4, 5]], 2), (["a", "b"], 2)):
        answer = await split.ask(prompt=prompt, max_tokens=2, temperature=0)
        assert len(answer["choices"]) == num_choices
    await split.fleet.settled()
    wrong: list[Any] = [[], [1, "a"], [-1], [99_999_999]]
    for prompt in wrong:
        error = await refusal(split, {"prompt": prompt})
        assert error["param"] == "prompt", error


async def test_ap_10_usage_comes_where_it_was_asked_for_and_counts_once(split: RealFleet) -> None:
    hello = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
    whole = await split.ask("/v1/chat/completions", **hello)
    num_prompt = len(split.workers["d0"].tokenizer.chat(hello["messages"]))  # type: ignore[arg-type]
    assert whole["usage"]["prompt_tokens"] == num_prompt
    *parts, last = await events_of(split, "/v1/chat/completions", **hello, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["prompt_tokens"] == num_prompt
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(part["usage"] is None for part in parts)
    assert all("usage" not in part or part["usage"] is None for part in
               await events_of(split, "/v1/chat/completions", **hello))  # fmt: skip
    error = await refusal(split, {**hello, "stream_options": {"include_usage": True}}, "/v1/chat/completions")
    assert error["param"] == "stream_options"


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
async def test_ap_13_a_stop_string_across_the_hand_off_is_never_sent(split: RealFleet, endpoint: str) -> None:
    """Every answer begins with prefill's token; the stop string begins in it, or right behind it."""
    asked = {"prompt": PROMPT} if endpoint == "/v1/completions" else {"messages": [{"role": "user", "content": "go"}]}
    body = {**asked, "temperature": 0, "max_tokens": 12, "logit_bias": {"258": -100}}
    choice = (await split.ask(endpoint, **body))["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert len(text) > 4
    for start, stop in ((0, 2), (0, 3), (1, 4)):
        stopped = await split.ask(endpoint, **body, stop=text[start:stop])
        whole = stopped["choices"][0]
        events = await events_of(split, endpoint, **body, stop=text[start:stop])
        parts = [c for event in events for c in event["choices"]]
        streamed = "".join(p.get("text") or p.get("delta", {}).get("content") or "" for p in parts)
        expected = text[: text.index(text[start:stop])]
        assert streamed == (whole["text"] if "text" in whole else whole["message"]["content"]) == expected
        assert whole["finish_reason"] == "stop" == parts[-1]["finish_reason"]
    # One that begins like the text and does not complete is flushed.
    never = text[0] + "\x00"
    assert (await split.ask(endpoint, **body, stop=never))["choices"][0] == choice


async def test_ap_18_a_model_without_a_template_still_completes(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_model_dir / "tokenizer.json").read_bytes())
    config = json.loads((tiny_model_dir / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    async with running_fleet(Tokenizer.load(tmp_path), {"p0": "prefill", "d0": "decode"}) as fleet:
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        status, answer, _ = await fleet.post(chat, "/v1/chat/completions")
        assert status == 400 and "no chat template" in answer["error"]["message"]
        assert not any(worker.requests for worker in fleet.workers.values())
        assert (await fleet.post({"prompt": "x"}))[0] == 200


async def test_ap_19_empty_prompts_have_one_answer(split: RealFleet) -> None:
    for prompt in ("", [""], [[]]):
        error = await refusal(split, {"prompt": prompt, "max_tokens": 2})
        assert "empty" in error["message"] and error["param"] == "prompt", error
    assert (await split.ask(prompt="  ", max_tokens=2))["choices"]
    empty = {"messages": [{"role": "user", "content": ""}], "max_tokens": 2}
    assert (await split.ask("/v1/chat/completions", **empty))["choices"], "the template's own tokens are a prompt"


async def test_ap_20_kv_12_a_prompt_above_the_limit_is_refused_before_any_work(split: RealFleet) -> None:
    limit = split.fleet.registry.max_context
    most = [1] * (limit - 4)
    assert (await split.ask(prompt=most, max_tokens=4, temperature=0))["usage"]["prompt_tokens"] == len(most)
    await split.check_empty()
    for prompt in ([1] * (limit + 1), [1] * limit, "a" * (7 * 1024 * 1024)):
        for stream in (False, True):
            error = await refusal(split, {"prompt": prompt, "max_tokens": 16, "stream": stream})
            assert error["code"] == "context_length_exceeded" and str(limit) in error["message"]
    await split.check_empty()
    assert (await split.ask(prompt=PROMPT, max_tokens=2))["choices"]


async def test_ap_22_one_seed_gives_one_answer_wherever_the_first_token_is_drawn(
    split: RealFleet, single: RealFleet
) -> None:
    bodies = [{"prompt": f"{i} {PROMPT}", "temperature": 1.0, "seed": 7, "max_tokens": 32, "logprobs": 1}
              for i in range(20)]  # fmt: skip
    expected = [await single.ask(**body) for body in bodies]
    actual = await asyncio.gather(*(split.ask(**body) for body in bodies))
    for one, two in zip(expected, actual, strict=True):
        first, second = one["choices"][0], two["choices"][0]
        assert (first["text"], first["logprobs"]["tokens"]) == (second["text"], second["logprobs"]["tokens"])
        assert len(second["logprobs"]["tokens"]) == two["usage"]["completion_tokens"]
