"""The load of a drill: fixed prompts whose answers are known, sent when they are due whatever the fleet does.

Invariants: every request is greedy and its whole answer is compared with the one recorded from the healthy fleet, so a
wrong token anywhere is seen; each carries a cache salt of its own, so that its prompt is really computed and handed
over; each ends by its own deadline at the latest, as lost. Knows nothing about faults.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec

from kvbaton.drill.samples import Kind, Outcome, Sample
from kvbaton.types import RemoteError

WORDS = ("the", "quick", "brown", "fox", "and", "a", "lazy", "dog", "under", "seven", "old", "bridges", "of", "town")
CANARY_EVERY_S = 0.3
STREAM_SHARE = 0.6
_MAX_ANSWER_BYTES = 8 * 1024 * 1024


class Prompt(msgspec.Struct, frozen=True):
    text: str
    max_tokens: int
    answer: str = ""


def make_prompts(seed: int, num_prompts: int, longest_chars: int, max_tokens: int) -> list[Prompt]:
    """Short, middling and long ones. The first is the canary: short in answer, long enough to be handed over."""
    rng = random.Random(f"prompts-{seed}")
    prompts = []
    for index in range(num_prompts):
        share = 0.5 if index == 0 else (0.15, 0.4, 1.0)[index % 3] * rng.uniform(0.7, 1.0)
        text = ""
        while len(text) < share * longest_chars:
            text += rng.choice(WORDS) + " "
        num_tokens = 8 if index == 0 else max(8, int(max_tokens * rng.uniform(0.4, 1.0)))
        prompts.append(Prompt(text[: int(share * longest_chars)], num_tokens))
    return prompts


class Traffic:
    """Requests to ``url``. ``now_s`` is the drill's clock."""

    def __init__(
        self,
        url: str,
        prompts: list[Prompt],
        now_s: Callable[[], float],
        deadline_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.prompts = prompts
        self.samples: list[Sample] = []
        self._url = url
        self._now_s = now_s
        self._deadline_s = deadline_s
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None
        self._open: dict[asyncio.Task[Sample], float] = {}  # to when it was sent
        self._flow: asyncio.Task[None] | None = None
        self._number = 0
        self._prefix = "0"

    async def __aenter__(self) -> Traffic:
        # No connection is used twice: one that its router's death left half open must not fail a later request.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._flow is not None:
            self._flow.cancel()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, *([self._flow] if self._flow else []), return_exceptions=True)
        assert self._session is not None
        await self._session.close()

    async def learn(self) -> list[str]:
        """Record every answer, twice: streamed and whole, cached and not. What differed, in words."""
        doubtful, learnt = [], []
        for index, prompt in enumerate(self.prompts):
            status, _, text, error = await self._exchange(prompt, False, "")
            if status != 200 or text is None:
                raise RemoteError(f"the healthy fleet answers {status} {error}", field="url", fix="drill a healthy one")
            learnt.append(msgspec.structs.replace(prompt, answer=text))
            status, _, again, error = await self._exchange(prompt, True, f"learn-{index}")
            if again != text:
                doubtful.append(f"prompt {index}: {text[:60]!r}, then {(again or error)[:60]!r}")
        self.prompts = learnt
        return doubtful

    # -- flow

    def begin(self, rng: random.Random, rate_per_s: float, canary_every_s: float = CANARY_EVERY_S) -> None:
        """Background requests at random instants and canaries at even ones, until ``end``."""
        self.samples = []
        self._prefix = f"{rng.random()}"
        self._flow = asyncio.ensure_future(self._send_all(rng, rate_per_s, canary_every_s))

    async def end(self) -> None:
        """Send no more, and wait for what is open; each has a deadline."""
        assert self._flow is not None
        self._flow.cancel()
        await asyncio.gather(self._flow, return_exceptions=True)
        self._flow = None
        while self._open:
            await asyncio.wait(self._open)

    async def _send_all(self, rng: random.Random, rate_per_s: float, canary_every_s: float) -> None:
        background_s = self._now_s()
        canary_s = background_s
        while True:
            due_s = min(background_s, canary_s)
            await asyncio.sleep(max(0.0, due_s - self._now_s()))
            if due_s == canary_s:
                self.send("canary", 0, stream=False)
                canary_s += canary_every_s
            else:
                index = rng.randrange(1, len(self.prompts))
                self.send("background", index, stream=rng.random() < STREAM_SHARE)
                background_s += rng.expovariate(rate_per_s)

    def send(
        self,
        kind: Kind,
        index: int,
        stream: bool,
        max_tokens: int | None = None,
        on_part: Callable[[int, dict[str, str]], None] | None = None,
    ) -> asyncio.Task[Sample]:
        """One request, now. With ``max_tokens`` its answer must begin as the recorded one, or the recorded with it.

        ``on_part`` hears of every part of a stream: how many there were, and the headers of the answer.
        """
        self._number += 1
        salt = f"{self._prefix}-{self._number}"
        task = asyncio.ensure_future(self._one(kind, index, stream, salt, max_tokens, on_part))
        self._open[task] = self._now_s()
        task.add_done_callback(lambda done: self._open.pop(done, None))
        return task

    def open_since_s(self) -> list[float]:
        """When each request was sent that has not ended."""
        return list(self._open.values())

    async def _one(
        self,
        kind: Kind,
        index: int,
        stream: bool,
        salt: str,
        max_tokens: int | None,
        on_part: Callable[[int, dict[str, str]], None] | None,
    ) -> Sample:
        prompt = self.prompts[index]
        if max_tokens is not None:
            prompt = msgspec.structs.replace(prompt, max_tokens=max_tokens)
        seen: dict[str, Any] = {}
        sent_s = self._now_s()
        try:
            async with asyncio.timeout(self._deadline_s):
                status, usage, text, error = await self._exchange(prompt, stream, salt, seen, on_part)
            outcome, code, message = self._outcome(prompt, status, text, error, seen)
        except TimeoutError:
            outcome, code, message = "lost", "", f"no end within {self._deadline_s:g} s"
            usage = {}
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            outcome, code, message = "lost", "", f"{type(error).__name__}: {error}"
            usage = {}
        headers = seen.get("headers", {})
        sample = Sample(
            kind,
            index,
            sent_s,
            self._now_s(),
            outcome,
            seen.get("status", 0),
            code,
            message,
            bool(seen.get("text")),
            _uncached(usage) if outcome in ("right", "wrong") else 0,
            headers.get("x-kvbaton-decision", ""),
            headers.get("x-kvbaton-prefill", ""),
            headers.get("x-kvbaton-decode", ""),
        )
        self.samples.append(sample)
        return sample

    def _outcome(
        self, prompt: Prompt, status: int, text: str | None, error: str, seen: dict[str, Any]
    ) -> tuple[Outcome, str, str]:
        """What came until an error counts too: it must be the beginning of the right answer."""
        got = seen.get("text", "") if text is None else text
        common = min(len(got), len(prompt.answer))
        begins = got[:common].rstrip("\ufffd") == prompt.answer[: len(got[:common].rstrip("\ufffd"))]
        if not begins or (text is not None and prompt in self.prompts and text != prompt.answer):
            return "wrong", "", f"{got[:200]!r} instead of {prompt.answer[:200]!r}"
        if text is not None:
            return "right", "", ""
        if not error:
            return "lost", "", f"status {status} and no end"
        code, _, message = error.partition(" ")
        return "error", code, message[:200]

    async def _exchange(
        self,
        prompt: Prompt,
        stream: bool,
        salt: str,
        seen: dict[str, Any] | None = None,
        on_part: Callable[[int, dict[str, str]], None] | None = None,
    ) -> tuple[int, dict[str, Any], str | None, str]:
        """Status, usage, the whole text or None, and the error as ``code message``."""
        seen = {} if seen is None else seen
        body: dict[str, Any] = {
            "prompt": prompt.text,
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        if salt:
            body["cache_salt"] = salt
        if stream:
            body["stream_options"] = {"include_usage": True}
        assert self._session is not None
        async with self._session.post(self._url + "/v1/completions", json=body) as response:
            seen["status"], seen["headers"] = response.status, {k.lower(): v for k, v in response.headers.items()}
            if response.status != 200:
                return response.status, {}, None, _error(await response.json(content_type=None))
            if not stream:
                answer = await response.json()
                return 200, answer["usage"], answer["choices"][0]["text"], ""
            return await _stream(response, seen, on_part)


async def _stream(
    response: aiohttp.ClientResponse, seen: dict[str, Any], on_part: Callable[[int, dict[str, str]], None] | None
) -> tuple[int, dict[str, Any], str | None, str]:
    usage: dict[str, Any] = {}
    num_parts = num_bytes = 0
    finished, seen["text"] = False, ""
    async for line in response.content:
        num_bytes += len(line)
        if not line.startswith(b"data: ") or num_bytes > _MAX_ANSWER_BYTES:
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            return 200, usage, seen["text"] if finished else None, ""
        event = json.loads(data)
        if "error" in event:
            return 200, {}, None, _error(event)
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            seen["text"] += choice["text"]
            finished = finished or choice["finish_reason"] is not None
        num_parts += 1
        if on_part is not None:
            on_part(num_parts, seen["headers"])
    return 200, {}, None, ""


def _error(answer: Any) -> str:
    """Raises KeyError or TypeError when it is not in OpenAI's shape: that is no answer."""
    error = answer["error"]
    return f"{error['code'] or error['type']} {error['message']}"


def _uncached(usage: dict[str, Any]) -> int:
    if not usage:
        return 0
    details = usage.get("prompt_tokens_details") or {}
    return int(usage.get("prompt_tokens", 0)) - int(details.get("cached_tokens") or 0)
