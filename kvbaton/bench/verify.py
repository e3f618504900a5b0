"""Do two deployments give the same answers? The same prompts through both, greedy, beside a control arm.

A wrong hand-off and ordinary nondeterminism both show as different text. The control tells them apart: A is asked more
than once, and B is judged by whether it differs from A more often than A differs from itself.

Knows nothing about how either side computes.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import comb
from typing import Literal

import msgspec

from kvbaton.bench.http_stream import HttpPool, Response
from kvbaton.bench.runner import origin_of, served_model
from kvbaton.bench.samples import count_tokens
from kvbaton.bench.sse import StreamReader
from kvbaton.types import RemoteError

Reading = Literal["agrees", "as A with itself", "differs"]
CHANCE = 0.05  # one-sided; below it B differs from A more than chance and A's own wavering explain

_PASSAGE = (
    "The relay team met before sunrise on the last day of the season. The first runner checked the track, the second "
    "counted the spare batons, and the coach wrote the order of the legs on a board by the gate. Nobody spoke of the "
    "year before, when the exchange between the first two legs had gone wrong and the baton had rolled under a bench. "
    "This time they had practised the exchange forty times a week, with cold hands, with noise, and with their eyes "
    "closed. The rule was simple: the receiver starts when the runner passes the mark, keeps a steady hand, and never "
    "looks back. The giver says one word and lets go. "
)
_QUESTIONS = (
    "Tell the story of the next race.",
    "What did the coach write on the board?",
    "List three things that can go wrong in an exchange, with one sentence on each.",
    "Write a short letter from the second runner to a friend.",
    "Explain why they practised with their eyes closed.",
)


def fixed_prompts(num: int, max_words: int = 400) -> list[str]:
    """Prompts from a few words to ``max_words``, so that short ones, block edges and several chunks are all met."""
    words = (_PASSAGE * (max_words // 100 + 1)).split()
    lengths = [round(max_words * ((number + 1) / num) ** 2) for number in range(num)]
    return [
        f"[{number}] {' '.join(words[:length])} {_QUESTIONS[number % len(_QUESTIONS)]}".strip()
        for number, length in enumerate(lengths)
    ]


class Answer(msgspec.Struct, frozen=True):
    """``path`` is what the endpoint said of the route (kvbaton's decision header), empty elsewhere."""

    pieces: tuple[str, ...]
    finish_reason: str | None
    tokens: int
    path: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class PromptResult(msgspec.Struct, frozen=True):
    prompt: int
    b_equals_a: bool
    a_equals_itself: bool
    first_difference: int | None  # character at which B leaves A
    a_text: str = ""
    b_text: str = ""


class Verification(msgspec.Struct, frozen=True):
    """``agreement`` is B with A over prompts, ``control`` A with itself."""

    reading: Reading
    sentence: str
    num_prompts: int
    agreement: float
    control: float
    chance: float  # probability of this many differences if B were another A
    differing: tuple[PromptResult, ...]
    paths_a: dict[str, int]
    paths_b: dict[str, int]


class Asking(msgspec.Struct, frozen=True):
    """How the questions are asked, the same on both sides."""

    model: str = ""
    max_tokens: int = 64
    concurrency: int = 4
    repeats: int = 2  # of A, for the control
    timeout_s: float = 300.0


async def verify(url_a: str, url_b: str, prompts: Sequence[str], how: Asking, headers: dict[str, str]) -> Verification:
    """Asks A ``repeats`` times and B once; raises RemoteError when an answer does not come, for that proves nothing."""
    runs_a = [await ask_all(url_a, prompts, how, headers) for _ in range(how.repeats)]
    run_b = await ask_all(url_b, prompts, how, headers)
    return judge(runs_a, run_b)


async def ask_all(url: str, prompts: Sequence[str], how: Asking, headers: dict[str, str]) -> list[Answer]:
    model = how.model or (await served_model(url, headers))[0]
    pool = HttpPool(origin_of(url), time.monotonic, headers)
    permits = asyncio.Semaphore(how.concurrency)

    async def one(number: int, prompt: str) -> Answer:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": how.max_tokens,
            "temperature": 0.0,
            "seed": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with permits:
            reader, response = StreamReader(), Response()
            data = pool.encode("POST", "/v1/chat/completions", msgspec.json.encode(body))
            await pool.send(data, response, reader.feed, how.timeout_s)
        if not response.ok:
            raise RemoteError(f"{url} answered {response.status} to prompt {number}: {response.error_body[:200]!r}")
        reader.close(response.closed_s or 0.0)
        if reader.error is not None:
            raise RemoteError(f"{url} broke off prompt {number}: {reader.error}")
        return Answer(
            tuple(chunk.text for chunk in reader.chunks if chunk.text),
            reader.finish_reason,
            count_tokens(reader, None).total,
            response.headers.get("x-kvbaton-decision", ""),
        )

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number, prompt)) for number, prompt in enumerate(prompts)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        pool.close()
    return [task.result() for task in tasks]


def judge(runs_a: Sequence[Sequence[Answer]], run_b: Sequence[Answer]) -> Verification:
    """Pure: what the answers say."""
    num = len(run_b)
    rows = []
    self_pairs = self_differs = 0
    for number in range(num):
        mine = [run[number] for run in runs_a]
        for one, two in combinations(mine, 2):
            self_pairs += 1
            self_differs += not _same(one, two)
        equal = any(_same(run_b[number], one) for one in mine)
        rows.append(
            PromptResult(
                prompt=number,
                b_equals_a=equal,
                a_equals_itself=all(_same(mine[0], one) for one in mine),
                first_difference=None if equal else _first_difference(mine[0].text, run_b[number].text),
                a_text="" if equal else mine[0].text,
                b_text="" if equal else run_b[number].text,
            )
        )
    differs = sum(not row.b_equals_a for row in rows)
    chance = at_least_by_chance(differs, num, self_differs, self_pairs)
    control = 1 - self_differs / self_pairs if self_pairs else 1.0
    agreement = 1 - differs / num if num else 1.0
    reading: Reading = "agrees"
    if differs:
        # A that never differed from itself gives no wavering to explain even one difference with.
        reading = "differs" if chance < CHANCE or self_differs == 0 else "as A with itself"
    return Verification(
        reading=reading,
        sentence=_sentence(reading, agreement, control, chance, differs, num),
        num_prompts=num,
        agreement=agreement,
        control=control,
        chance=chance,
        differing=tuple(row for row in rows if not row.b_equals_a),
        paths_a=dict(Counter(answer.path for run in runs_a for answer in run if answer.path)),
        paths_b=dict(Counter(answer.path for answer in run_b if answer.path)),
    )


def _same(one: Answer, two: Answer) -> bool:
    return one.text == two.text and one.finish_reason == two.finish_reason


def _first_difference(one: str, two: str) -> int:
    for place, (left, right) in enumerate(zip(one, two, strict=False)):
        if left != right:
            return place
    return min(len(one), len(two))


def at_least_by_chance(differs: int, num: int, self_differs: int, self_pairs: int) -> float:
    """Fisher's exact test, one-sided: probability of at least ``differs`` of ``num`` if both rows had one rate."""
    total, marked = num + self_pairs, differs + self_differs
    whole = comb(total, marked)
    if whole == 0:
        return 1.0
    most = min(num, marked)
    return sum(comb(num, k) * comb(self_pairs, marked - k) for k in range(differs, most + 1)) / whole


def _sentence(reading: Reading, agreement: float, control: float, chance: float, differs: int, num: int) -> str:
    rates = f"B agrees with A on {agreement:.1%} of {num} prompts, A with itself on {control:.1%}"
    match reading:
        case "agrees":
            return f"Same answers: {rates}."
        case "as A with itself":
            return f"No sign of a wrong hand-off: {rates}; chance alone gives that {chance:.0%} of the time."
        case _:
            return (
                f"Different answers: {rates}; {differs} differences are more than A's own wavering explains "
                f"(probability {chance:.2g}). Suspect the hand-off, the weights or the flags."
            )
