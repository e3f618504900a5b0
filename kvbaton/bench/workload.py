"""What is sent when: from a load specification to requests that are ready as bytes.

Invariants: the same specification and seed give the same requests, byte for byte; prompts are built to an exact token
count of the served model's tokenizer when there is one; equal block ids of a trace become equal prompt prefixes.

Knows nothing about sockets or statistics. Traces are read by kvbaton.plan.workload, which the planner reads them with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from kvbaton.bench.arrivals import ArrivalKind, Phases, arrival_times, replay_times
from kvbaton.bench.client import PlannedRequest
from kvbaton.bench.lengths import parse_classes, parse_lengths
from kvbaton.bench.prompts import Codec, PromptBuilder
from kvbaton.plan.workload import Trace, read_trace
from kvbaton.types import LocalError

# Requests built beforehand for a closed loop, whose number nobody knows: more than any user will finish.
CLOSED_LOOP_PER_USER_PER_S = 20


class LoadSpec(msgspec.Struct, frozen=True):
    """Everything that decides a run, kept with its samples."""

    url: str
    endpoint: Literal["chat", "completions"] = "chat"
    model: str = ""
    arrivals: ArrivalKind = "poisson"
    rate_per_s: float = 1.0
    cv: float = 1.0
    concurrency: int = 1  # users of a closed loop
    max_concurrency: int | None = None
    warmup_requests: int = 2
    warmup_concurrency: int = 2
    ramp_s: float = 0.0
    steady_s: float = 30.0
    cooldown_s: float = 0.0
    num_requests: int | None = None  # stop after this many due instants
    input: str = "256"
    output: str = "64"
    classes: str = ""  # prompt and output lengths that belong together, in place of input and output
    trace: str | None = None
    trace_speed: float = 1.0
    trace_scale: float = 1.0  # lengths and shared blocks times this, for models smaller than the trace's
    shared_prefix_tokens: int = 0
    shared_prefix_groups: int = 1
    prompt_format: Literal["text", "ids"] = "text"
    tokenizer: str = ""
    seed: int = 0
    timeout_s: float = 600.0
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: dict[str, Any] = {}
    max_lag_ms: float = 10.0
    keep_warmup: bool = False
    save_text: bool = False

    @property
    def phases(self) -> Phases:
        return Phases(self.ramp_s, self.steady_s, self.cooldown_s)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


class WorkItem(msgspec.Struct):
    """One request before it is text. ``text`` is set only when the workload brings its own."""

    due_s: float | None
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    text: str | None = None


class Work(msgspec.Struct):
    items: list[WorkItem]
    block_tokens: int = 0
    notes: list[str] = []


def plan_work(spec: LoadSpec, codec: Codec | None) -> Work:
    """Due instants and lengths of the timed part."""
    random = Random(f"{spec.seed}:work")
    if spec.trace is not None:
        return _from_trace(spec, codec, random)
    if spec.arrivals == "trace":
        raise LocalError("trace arrivals need a trace", field="trace", fix="give --trace FILE")
    if spec.classes:
        draw_pair = parse_classes(spec.classes)
        items = [WorkItem(time, *draw_pair(random)) for time in _due(spec, random)]
        return _with_shared_prefix(spec, Work(items), random)
    draw_input, draw_output = parse_lengths(spec.input, "input"), parse_lengths(spec.output, "output")
    due: Sequence[float | None] = _due(spec, random)
    items = [WorkItem(time, draw_input(random), draw_output(random)) for time in due]
    return _with_shared_prefix(spec, Work(items), random)


def _due(spec: LoadSpec, random: Random) -> Sequence[float | None]:
    if spec.arrivals == "closed":
        most = round(spec.concurrency * spec.phases.total_s * CLOSED_LOOP_PER_USER_PER_S)
        return [None] * (spec.num_requests or max(spec.concurrency, min(most, 20_000)))
    times = arrival_times(spec.arrivals, spec.rate_per_s, spec.phases, random, spec.cv)
    return times[: spec.num_requests]


def _with_shared_prefix(spec: LoadSpec, work: Work, random: Random) -> Work:
    if spec.shared_prefix_tokens:
        if spec.shared_prefix_groups < 1:
            raise LocalError("there is at least one group of shared prefixes", field="shared_prefix_groups")
        for item in work.items:
            item.block_ids = (random.randrange(spec.shared_prefix_groups),)
        work.block_tokens = spec.shared_prefix_tokens
    return work


def _from_trace(spec: LoadSpec, codec: Codec | None, random: Random) -> Work:
    assert spec.trace is not None
    if _is_sharegpt(Path(spec.trace)):
        return _from_sharegpt(spec, codec, random)
    trace = read_trace(spec.trace, rng=random)
    due = _trace_due(spec, trace, random)
    scale = spec.trace_scale
    items = [
        WorkItem(
            time,
            max(1, round(request.prompt_tokens * scale)),
            max(1, round(request.output_tokens * scale)),
            request.block_ids,
        )
        for request, time in zip(trace.requests, due, strict=False)
    ]
    notes = list(trace.notes)
    if scale != 1.0:
        notes.append(f"lengths and shared blocks of the trace times {scale:g}")
    return Work(items, max(1, round((trace.block_tokens or 0) * scale)), notes)


def _trace_due(spec: LoadSpec, trace: Trace, random: Random) -> Sequence[float | None]:
    if spec.arrivals != "trace":
        return _due(spec, random)[: len(trace.requests)]
    if not trace.has_arrivals:
        raise LocalError("the trace has no arrival times", field="arrivals", fix="use --arrivals poisson --rate R")
    times = replay_times([request.arrival_s for request in trace.requests], spec.trace_speed, 0.0, random)
    return [time for time in times if time < spec.phases.total_s][: spec.num_requests]


def offered_rate(spec: LoadSpec) -> float:
    """Requests a second in the steady window: as asked, or as the trace has them."""
    if spec.arrivals != "trace" or spec.trace is None or _is_sharegpt(Path(spec.trace)):
        return spec.rate_per_s
    random = Random(f"{spec.seed}:work")
    due = _trace_due(spec, read_trace(spec.trace, rng=random), random)
    steady = sum(time is not None and spec.phases.phase_at(time) == "steady" for time in due)
    return round(steady / spec.steady_s, 3)


def _is_sharegpt(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(256).lstrip()[:1] == b"["


def _from_sharegpt(spec: LoadSpec, codec: Codec | None, random: Random) -> Work:
    """First question as the prompt, its own text; the answer's length as the number of tokens to generate."""
    if codec is None:
        raise LocalError("ShareGPT lengths are counted with a tokenizer", field="tokenizer", fix="give --tokenizer DIR")
    assert spec.trace is not None
    try:
        rows = json.loads(Path(spec.trace).read_bytes())
        turns = [row.get("conversations") or row.get("conversation") or [] for row in rows]
        pairs = [(pair[0]["value"], pair[1]["value"]) for pair in turns if len(pair) >= 2]
    except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise LocalError(f"{spec.trace} is not a ShareGPT file: {error!r}", field="trace") from error
    pairs = [pair for pair in pairs if all(map(_is_text, pair))]
    if not pairs:
        raise LocalError(f"{spec.trace} holds no conversation of two turns", field="trace")
    if spec.arrivals == "trace":
        raise LocalError("ShareGPT has no arrival times", field="arrivals", fix="use --arrivals poisson --rate R")
    items = []
    for time in _due(spec, random):
        question, answer = random.choice(pairs)
        items.append(WorkItem(time, len(codec.encode(question)), len(codec.encode(answer, False)) or 1, (), question))
    return Work(items, notes=["prompts are the trace's own text, in random order, with repetition"])


def _is_text(value: object) -> bool:
    """Half of a surrogate pair, which such files hold at times, is none: no tokenizer takes it."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= each <= "\udfff" for each in value)


class RequestFactory:
    """Turns work items into request bodies."""

    def __init__(self, spec: LoadSpec, builder: PromptBuilder | None) -> None:
        if spec.prompt_format == "ids" and (spec.endpoint == "chat" or builder is None):
            raise LocalError(
                "token ids need the completions endpoint and a tokenizer",
                field="prompt_format",
                fix="use --endpoint completions --tokenizer DIR",
            )
        self._spec = spec
        self._builder = builder

    def timed(self, work: Work) -> list[PlannedRequest]:
        phases = self._spec.phases
        return [
            self._request(index, "steady" if item.due_s is None else phases.phase_at(item.due_s), item, work)
            for index, item in enumerate(work.items)
        ]

    def warm_up(self, work: Work) -> list[PlannedRequest]:
        """The first lengths of the run with prompts of their own, so that no cache is filled for the timed part."""
        items = work.items[: self._spec.warmup_requests]
        planned = []
        for index, item in enumerate(items):
            own = WorkItem(0.0, item.prompt_tokens, min(item.output_tokens, 32), (), item.text)
            planned.append(self._request(index, "warmup", own, work))
        return planned

    def _request(self, index: int, phase: Any, item: WorkItem, work: Work) -> PlannedRequest:
        prompt, tokens = self._prompt(f"{phase}:{index}", item, work)
        body: dict[str, Any] = {
            "model": self._spec.model,
            **(
                {"messages": [{"role": "user", "content": prompt}]}
                if self._spec.endpoint == "chat"
                else {"prompt": prompt}
            ),
            "max_tokens": item.output_tokens,
            "temperature": self._spec.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self._spec.ignore_eos else {}),
            **self._spec.extra_body,
        }
        return PlannedRequest(index, phase, item.due_s, msgspec.json.encode(body), tokens, item.output_tokens)

    def _prompt(self, key: str, item: WorkItem, work: Work) -> tuple[str | list[int], int]:
        if item.text is not None:
            return item.text, item.prompt_tokens
        builder = self._builder
        if builder is None:
            random = Random(f"{self._spec.seed}:{key}")
            return " ".join(random.choices(PLAIN_WORDS, k=item.prompt_tokens)), item.prompt_tokens
        if self._spec.prompt_format == "ids":
            return builder.ids(item.prompt_tokens, key, item.block_ids, work.block_tokens), item.prompt_tokens
        text = builder.text(item.prompt_tokens, key, item.block_ids, work.block_tokens)
        return text, max(item.prompt_tokens, builder.overhead_tokens + 1)


# Without a tokenizer a word stands for a token; the report says that prompt lengths are not exact.
PLAIN_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman"),
    *("life", "child", "world", "school", "state", "family", "student", "group"),
)
