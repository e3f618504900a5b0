"""The load of a soak: lengths, order and shared prefixes of traces, at instants of our own, in every form the API has.

Invariants: the same seed asks the same; every request ends in exactly one ``Sent``, by its own deadline at the latest;
an answer counts as whole only with a finish reason for each choice and exactly the tokens that were asked for.
Knows nothing about faults; answers whose text is known beforehand are the business of ``traffic``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, pi, sin
from random import Random
from string import ascii_lowercase
from time import monotonic
from typing import Any, Literal, Protocol

import aiohttp
import msgspec

from kvbaton.bench.prompts import Codec
from kvbaton.plan.workload import Trace, synthetic
from kvbaton.types import LocalError

# whole: complete, with every token; refused: 429, 502, 503 or 504 with an error; failed: an error event in the stream;
# hung_up: we left; broken: the connection broke; bad: anything else, which no fault excuses; lost: no end in time.
Ending = Literal["whole", "refused", "failed", "hung_up", "broken", "bad", "lost"]
REFUSALS = (429, 502, 503, 504)
STREAM_SHARE, PAIR_SHARE, GREEDY_SHARE = 0.75, 0.05, 0.5
PATIENCE_S = (0.05, 4.0)  # of a client that is going to hang up


class Wanted(msgspec.Struct, frozen=True):
    """One request of a trace, scaled to the model."""

    source: str
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0


class Sent(msgspec.Struct, frozen=True):
    """One request and how it ended. Times are seconds on the monotonic clock."""

    source: str
    sent_s: float
    ended_s: float
    ending: Ending
    status: int = 0  # 0: no status line came
    code: str = ""  # of the error
    message: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    request_id: str = ""  # by the router's word; begins with the life of that router


class Builder(Protocol):
    """The part of ``PromptBuilder`` that is needed here."""

    def text(self, num_tokens: int, key: str, blocks: Sequence[int] = (), block_tokens: int = 0) -> str: ...

    def ids(self, num_tokens: int, key: str, blocks: Sequence[int] = (), block_tokens: int = 0) -> list[int]: ...


class Letters:
    """Prompts of single letters, for tokenizers that have no words: each byte is a token there."""

    def __init__(self, tokenizer: Codec, seed: int) -> None:
        self._tokenizer, self._seed = tokenizer, seed

    def text(self, num_tokens: int, key: str, blocks: Sequence[int] = (), block_tokens: int = 0) -> str:
        keys = [*(f"block:{block}" for block in blocks), key]
        lengths = [block_tokens] * len(blocks) + [num_tokens]
        parts = (
            "".join(Random(f"{self._seed}:{key}").choices(ascii_lowercase, k=length))
            for key, length in zip(keys, lengths, strict=True)
        )
        return "".join(parts)[:num_tokens]

    def ids(self, num_tokens: int, key: str, blocks: Sequence[int] = (), block_tokens: int = 0) -> list[int]:
        return self._tokenizer.encode(self.text(num_tokens, key, blocks, block_tokens), False)


class Mixture:
    """Requests of several traces in turn, each trace in its own order and again from its beginning when it ends."""

    def __init__(self, traces: Sequence[Trace], longest_prompt_tokens: int, longest_output_tokens: int) -> None:
        if not traces:
            raise LocalError("a soak needs a trace", field="trace")
        self.notes: list[str] = []
        self._rows: list[list[Wanted]] = []
        for number, trace in enumerate(traces):
            prompt = _scale([each.prompt_tokens for each in trace.requests], longest_prompt_tokens)
            output = _scale([each.output_tokens for each in trace.requests], longest_output_tokens)
            block_tokens = max(1, round((trace.block_tokens or 0) * prompt)) if trace.block_tokens else 0
            self._rows.append(
                [
                    Wanted(
                        trace.name,
                        min(longest_prompt_tokens, max(1, round(each.prompt_tokens * prompt))),
                        min(longest_output_tokens, max(1, round(each.output_tokens * output))),
                        tuple(block * len(traces) + number for block in each.block_ids),
                        block_tokens,
                    )
                    for each in trace.requests
                ]
            )
            self.notes.append(
                f"{trace.name}: {len(trace.requests)} requests, prompts times {prompt:.3g}, outputs times {output:.3g}"
            )

    def requests(self, rng: Random) -> Iterator[Wanted]:
        """Without end."""
        places = [rng.randrange(len(row)) for row in self._rows]
        while True:
            number = rng.randrange(len(self._rows))
            row = self._rows[number]
            yield row[places[number] % len(row)]
            places[number] += 1


def _scale(lengths: Sequence[int], longest: int) -> float:
    """So that nine of ten fit; the others are cut."""
    ninth = sorted(lengths)[ceil(0.9 * len(lengths)) - 1]
    return min(1.0, longest / max(1, ninth))


def made_up(seed: int) -> list[Trace]:
    """Chat and long documents, for who has no trace."""
    rng = Random(f"soak-{seed}")
    chat, documents = synthetic(2000, 1.0, (200, 200), rng, 0.8), synthetic(2000, 1.0, (3000, 40), rng, 0.8)
    return [msgspec.structs.replace(chat, name="chat"), msgspec.structs.replace(documents, name="documents")]


def tide(rate_per_s: float, at_s: float, swing: float, period_s: float) -> float:
    """The rate at that moment: it rises and falls around its mean, so that an autoscaler has something to do."""
    return rate_per_s * (1.0 + swing * sin(2 * pi * at_s / period_s))


class TraceLoad:
    """Sends a mixture to ``url``."""

    def __init__(self, url: str, mixture: Mixture, builders: tuple[Builder, Builder | None], deadline_s: float,
                 headers: Mapping[str, str] | None = None) -> None:  # fmt: skip
        """``builders``: for completions, and for chat where the model has a template."""
        self.sent: list[Sent] = []
        self.num_started = 0
        self._url, self._mixture, self._builders, self._deadline_s = url, mixture, builders, deadline_s
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None
        self._open: set[asyncio.Task[Sent]] = set()

    async def __aenter__(self) -> TraceLoad:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        assert self._session is not None
        await self._session.close()

    async def flow(self, rng: Random, rate_per_s: float, lasts_s: float, abort_share: float = 0.0,
                   swing: float = 0.0, period_s: float = 600.0) -> None:  # fmt: skip
        """Poisson arrivals for so long; returns when the last is sent, not when it ended."""
        began_s = due_s = monotonic()
        for wanted in self._mixture.requests(rng):
            due_s += rng.expovariate(tide(rate_per_s, due_s - began_s, swing, period_s))
            if due_s - began_s >= lasts_s:
                break
            await asyncio.sleep(max(0.0, due_s - monotonic()))
            self.send(wanted, rng, rng.uniform(*PATIENCE_S) if rng.random() < abort_share else None)
        await asyncio.sleep(max(0.0, began_s + lasts_s - monotonic()))

    def burst(self, rng: Random, number: int) -> None:
        """Requests at once whose clients all leave."""
        for _, wanted in zip(range(number), self._mixture.requests(rng), strict=False):
            self.send(wanted, rng, rng.uniform(0.0, 2.0))

    async def ended(self) -> None:
        """Until nothing is open; each has a deadline."""
        while self._open:
            await asyncio.wait(self._open)

    def send(self, wanted: Wanted, rng: Random, patience_s: float | None) -> None:
        path, body = self._body(wanted, rng)
        self.num_started += 1
        task = asyncio.ensure_future(self._one(wanted.source, path, body, patience_s))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    def _body(self, wanted: Wanted, rng: Random) -> tuple[str, dict[str, Any]]:
        plain, chat = self._builders
        lot, key = rng.random(), f"{wanted.source}:{self.num_started}"
        what = (wanted.prompt_tokens, key, wanted.block_ids, wanted.block_tokens)
        body: dict[str, Any] = {
            "max_tokens": wanted.output_tokens, "ignore_eos": True, "stream": rng.random() < STREAM_SHARE,
            "temperature": 0 if rng.random() < GREEDY_SHARE else 0.8, "n": 2 if rng.random() < PAIR_SHARE else 1,
        }  # fmt: skip
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if chat is not None and lot < 0.3:
            body["messages"] = [{"role": "user", "content": chat.text(*what)}]
            return "/v1/chat/completions", body
        body["prompt"] = plain.ids(*what) if lot < 0.6 else plain.text(*what)
        return "/v1/completions", body

    async def _one(self, source: str, path: str, body: dict[str, Any], patience_s: float | None) -> Sent:
        answer = _Answer(body)
        sent_s = monotonic()
        ending: Ending
        message = code = ""
        limit_s = self._deadline_s if patience_s is None else patience_s
        try:
            async with asyncio.timeout(limit_s):
                ending, code, message = await self._exchange(path, body, answer)
        except TimeoutError:
            ending = "lost" if patience_s is None else "hung_up"
            message = f"no end within {limit_s:g} s" if patience_s is None else ""
        except (aiohttp.ClientError, OSError) as error:
            ending, message = "broken", f"{type(error).__name__}: {error}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            ending, message = "bad", f"not an answer: {type(error).__name__}: {error}"
        sent = Sent(
            source, sent_s, monotonic(), ending, answer.status, code, message[:300],
            *answer.times(sent_s), answer.request_id,
        )  # fmt: skip
        self.sent.append(sent)
        return sent

    async def _exchange(self, path: str, body: dict[str, Any], answer: _Answer) -> tuple[Ending, str, str]:
        assert self._session is not None
        async with self._session.post(self._url + path, json=body) as response:
            answer.status = response.status
            answer.request_id = response.headers.get("x-kvbaton-request-id", "")
            if response.status != 200:
                error = (await response.json(content_type=None))["error"]
                told = f"{error['message']}" if error["type"] else ""
                refused = response.status in REFUSALS and told
                return "refused" if refused else "bad", str(error["code"] or error["type"]), told
            if not body["stream"]:
                whole = await response.json()
                answer.choices(whole["choices"], monotonic())
                answer.usage = whole["usage"]
                return answer.verdict()
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    return answer.verdict()
                event = json.loads(data)
                if "error" in event:
                    return "failed", str(event["error"]["code"] or event["error"]["type"]), event["error"]["message"]
                answer.choices(event["choices"], monotonic())
                answer.usage = event.get("usage") or answer.usage
        return "bad", "", "the stream ended with neither end mark nor error"


class _Answer:
    """What has come of one answer."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._num_choices, self._max_tokens = body["n"], body["max_tokens"]
        self.status = 0
        self.request_id = ""
        self.usage: dict[str, Any] = {}
        self._finished: dict[int, str] = {}
        self._first_s: float | None = None
        self._last_s = 0.0

    def choices(self, choices: list[dict[str, Any]], at_s: float) -> None:
        for choice in choices:
            if choice.get("finish_reason"):
                self._finished[choice["index"]] = choice["finish_reason"]
            if self._first_s is None:
                self._first_s = at_s
            self._last_s = at_s

    def verdict(self) -> tuple[Ending, str, str]:
        wanted = self._num_choices * self._max_tokens
        reasons = set(self._finished.values())
        if len(self._finished) != self._num_choices or reasons != {"length"}:
            return "bad", "", f"{self._num_choices} choices ended as {self._finished}"
        if self.usage.get("completion_tokens") != wanted:
            return "bad", "", f"{self.usage.get('completion_tokens')} tokens instead of {wanted}"
        return "whole", "", ""

    def times(self, sent_s: float) -> tuple[float | None, float | None]:
        """To the first part, and from then on for each token; of an answer in one piece nothing can be said of that."""
        if self._first_s is None:
            return None, None
        gaps = self._max_tokens - 1
        tpot_s = (self._last_s - self._first_s) / gaps if gaps and self._last_s > self._first_s else None
        return self._first_s - sent_s, tpot_s
