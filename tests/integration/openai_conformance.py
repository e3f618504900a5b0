"""What a client of OpenAI's API may expect of a fleet, whichever engine is behind it: one function for each promise.

Asked through the official client where it can say it, and as plain HTTP where only the bytes tell. Nothing here knows
an engine, a tokenizer or a model: what is compared is what the same service said otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import openai
import pytest

WAIT_S = 900.0  # a bound on a wait, not a claim about speed
TEXT = "The quick brown fox jumps over the lazy dog. " * 4
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]


@dataclass(frozen=True)
class Service:
    url: str
    model: str
    num_repeats: int = 5  # of a sentence, for a prompt that fills blocks of the prefix cache

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S)

    def post(self, body: Any, path: str = "/v1/completions") -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps({"model": self.model, **body}).encode()
        headers = {"content-type": "application/json"}
        return httpx.post(self.url + path, content=content, headers=headers, timeout=WAIT_S)

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.post({"temperature": 0, "max_tokens": 8, **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """Its events; the form of the stream is checked."""
        answer = self.post({"temperature": 0, "max_tokens": 8, "stream": True, **body}, path)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, end, rest = answer.text.split("\n\n")
        assert rest == "" and end == "data: [DONE]"
        assert all(event.startswith("data: {") and "\n" not in event for event in events), "events and nothing else"
        found = [json.loads(event.removeprefix("data: ")) for event in events]
        assert len({(event["id"], event["created"], event["model"]) for event in found}) == 1
        return found


def the_model_is_listed(service: Service) -> None:
    models = service.client().models.list().data
    assert service.model in [model.id for model in models] and all(model.object == "model" for model in models)


def a_completion_has_every_field(service: Service) -> None:
    answer = service.client().completions.create(model=service.model, prompt=TEXT, max_tokens=8, temperature=0)
    assert answer.object == "text_completion" and answer.model == service.model and answer.id and answer.created
    (choice,) = answer.choices
    assert choice.index == 0 and choice.finish_reason in ("length", "stop")
    usage = answer.usage
    assert usage is not None and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 8 and usage.prompt_tokens > 8


def a_stream_says_what_the_whole_answer_says(service: Service) -> None:
    whole = service.complete(prompt=TEXT, ignore_eos=True)
    events = service.stream(prompt=TEXT, ignore_eos=True, stream_options={"include_usage": True})
    *parts, last = events
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons[-1] == whole["choices"][0]["finish_reason"] == "length" and not any(reasons[:-1])
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 8
    assert not any(event.get("usage") for event in service.stream(prompt=TEXT)), "nobody asked"


def a_chat_says_the_same_streamed_and_whole(service: Service) -> None:
    client = service.client()
    asked: dict[str, Any] = {"model": service.model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.object == "chat.completion" and whole.choices[0].message.role == "assistant"
    parts = list(client.chat.completions.create(**asked, stream=True))
    deltas = [part.choices[0].delta for part in parts if part.choices]
    assert deltas[0].role == "assistant" and not any(delta.role for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == (whole.choices[0].message.content or "")
    assert [c.finish_reason for part in parts for c in part.choices if c.finish_reason] == [
        whole.choices[0].finish_reason
    ]


def prompts_and_choices_come_in_order(service: Service) -> None:
    prompts = [TEXT, "One, two, three, four,", "A"]
    answer = service.complete(prompt=prompts, n=2, max_tokens=4, ignore_eos=True)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    alone = [service.complete(prompt=prompt, max_tokens=4, ignore_eos=True) for prompt in prompts]
    for number, one in enumerate(alone):
        texts = [choice["text"] for choice in answer["choices"][2 * number : 2 * number + 2]]
        assert texts == [one["choices"][0]["text"]] * 2
    ids = service.complete(prompt=[[50, 51, 52], [53]], max_tokens=4, ignore_eos=True)
    assert [choice["index"] for choice in ids["choices"]] == [0, 1] and ids["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


def a_seed_repeats_itself(service: Service) -> None:
    asked = {"prompt": TEXT, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    texts = [service.complete(**asked, seed=seed)["choices"][0]["text"] for seed in (7, 7)]
    assert texts[0] == texts[1]


def a_bias_is_obeyed_and_a_stop_string_is_not_said(service: Service) -> None:
    one = service.complete(prompt="A", max_tokens=3, logit_bias={"65": 100}, logprobs=0)["choices"][0]
    assert len(set(one["logprobs"]["tokens"])) == 1 and one["finish_reason"] == "length"
    text = one["text"]
    assert len(text) >= 3
    cut = service.complete(prompt="A", max_tokens=9, logit_bias={"65": 100}, stop=text[:2])["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ("", "stop")
    parts = service.stream(prompt="A", max_tokens=9, logit_bias={"65": 100}, stop=text[:2])
    assert "".join(part["choices"][0]["text"] for part in parts) == ""
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


def logprobs_are_of_every_token(service: Service) -> None:
    answer = service.complete(prompt=TEXT, logprobs=2, max_tokens=5, ignore_eos=True)
    found = answer["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == 5
    assert all(value <= 0 for value in found["token_logprobs"])
    assert all(len(top) >= 2 for top in found["top_logprobs"])
    chat = service.client().chat.completions.create(
        model=service.model, messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content and all(len(token.top_logprobs) == 2 for token in content)
    assert all(abs(token.logprob - token.top_logprobs[0].logprob) < 1e-6 for token in content), "greedy"


def a_prefix_is_cached_and_a_salt_shares_nothing(service: Service) -> None:
    text = "What was said before is known to those who listened, and to nobody else. " * service.num_repeats
    service.complete(prompt=text)
    again, salted = (service.complete(prompt=text, **more)["usage"] for more in ({}, {"cache_salt": "a tenant"}))
    assert again["prompt_tokens_details"]["cached_tokens"] > 0
    assert not salted["prompt_tokens_details"]["cached_tokens"]


def what_is_wrong_is_named(service: Service) -> None:
    client = service.client()
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no such model", prompt="x")
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "/v1/completions"),
        ({"prompt": "x", "temperature": -1}, "temperature", "/v1/completions"),
        ({"prompt": "x", "n": 0}, "n", "/v1/completions"),
        ({"prompt": "x", "top_p": 2}, "top_p", "/v1/completions"),
        ({"prompt": [10**9]}, "prompt", "/v1/completions"),
        ({"prompt": [60] * 100_000}, "prompt", "/v1/completions"),
        ({"messages": []}, "messages", "/v1/chat/completions"),
        ({"messages": "x"}, "messages", "/v1/chat/completions"),
    ]
    for body, name, path in wrong:
        answer = service.post(body, path)
        assert answer.status_code == 400, (body, answer.text)
        error = answer.json()["error"]
        assert error["message"] and error["type"] and name in str(error["param"]), (name, error)
    assert service.post(b"{", "/v1/completions").status_code == 400
    assert httpx.get(service.url + "/v1/nothing", timeout=WAIT_S).status_code == 404
    assert httpx.get(service.url + "/v1/completions", timeout=WAIT_S).status_code == 405


def leaving_in_the_middle_harms_nobody(service: Service) -> None:
    with service.client().completions.create(
        model=service.model, prompt=TEXT, max_tokens=64, temperature=0, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    assert service.complete(prompt=TEXT)["choices"][0]["finish_reason"]


def many_at_once_are_each_answered_alone(service: Service) -> None:
    prompts = [f"{number}. {TEXT}" for number in range(6)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda text: service.stream(prompt=text, max_tokens=6, ignore_eos=True), prompts))
    assert len({events[0]["id"] for events in together}) == len(prompts)
    for events in together:
        assert events[-1]["choices"][0]["finish_reason"] == "length"


PROMISES: list[Callable[[Service], None]] = [
    the_model_is_listed,
    a_completion_has_every_field,
    a_stream_says_what_the_whole_answer_says,
    a_chat_says_the_same_streamed_and_whole,
    prompts_and_choices_come_in_order,
    a_seed_repeats_itself,
    a_bias_is_obeyed_and_a_stop_string_is_not_said,
    logprobs_are_of_every_token,
    a_prefix_is_cached_and_a_salt_shares_nothing,
    what_is_wrong_is_named,
    leaving_in_the_middle_harms_nobody,
    many_at_once_are_each_answered_alone,
]
