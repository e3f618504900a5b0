"""One request's sequences, from the worker's events to the client's bytes.

Invariants: the status line is not sent before the first token; a stream that began ends with its end mark or an error
event; leaving by any way aborts every sequence. A request that is continued (``resume``) sends only what the client
does not have, under the id and with the counts of the whole. Knows nothing about how requests are parsed or refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvbaton.types import CapacityError, GenerateRequest, TokenOutput
from kvbaton.workers import journal
from kvbaton.workers.http import JSON_HEADER, SSE_HEADERS, Exchange, OpenRequests
from kvbaton.workers.openai_errors import ApiError, bad_request, unavailable
from kvbaton.workers.openai_request import ApiRequest
from kvbaton.workers.openai_response import DONE, REPORT_PREFIX, Answer, Choice, Delta, error_event
from kvbaton.workers.protocol import (
    Admitted,
    Finished,
    InternalRequest,
    RequestReport,
    ResumedSequence,
    Worker,
    WorkerEvent,
)
from kvbaton.workers.traced import WorkerTrace

log = logging.getLogger(__name__)
_ENCODER = msgspec.json.Encoder()
REPORT_HEADER = b"x-kvbaton-report"
JOURNAL_HEADER = (b"x-kvbaton-journal", b"1")  # this stream has a journal
SIBLING_WAIT_S = 0.1  # between two tries of a sequence whose siblings have room


class Host(Protocol):
    """What a generation needs of the server it runs in."""

    worker: Worker
    model_name: str
    open: OpenRequests

    def unexpected(self, error: Exception) -> ApiError:
        """What the client is told; logged as its kind deserves."""
        ...

    def observe(self, report: RequestReport, trace_id: str = "") -> None: ...


@dataclass(frozen=True)
class Identity:
    """What the answer is called, and how long it may take."""

    request_id: str
    echo: str | None  # the client's own id
    timeout_s: float


class Generation:
    """One request's sequences. ``internal.resume``, if given, has an entry for each of ``sequences``."""

    def __init__(
        self,
        host: Host,
        exchange: Exchange,
        request: ApiRequest,
        internal: InternalRequest | None,
        identity: Identity,
        sequences: list[GenerateRequest],
    ) -> None:
        self._host = host
        self._exchange = exchange
        self._request = request
        self._internal = internal
        self._sequences = sequences
        self._journal = internal is not None and internal.journal and request.stream
        self._timeout_s = identity.timeout_s
        self._headers = [(b"x-kvbaton-request-id", identity.request_id.encode())]
        if identity.echo is not None:
            self._headers.append((b"x-request-id", identity.echo.encode()))
        if self._journal:
            self._headers.append(JOURNAL_HEADER)
        answer_id, created_s = identity.request_id, 0
        if internal is not None:
            answer_id, created_s = internal.answer_id or answer_id, internal.created_s
        self._answer = Answer(
            endpoint=request.endpoint,
            response_id=("chatcmpl-" if request.endpoint == "chat" else "cmpl-") + answer_id,
            model=host.model_name,
            created_s=created_s or int(time.time()),
            tokenizer=host.worker.tokenizer,
            include_usage=request.include_usage,
        )
        self._choices = [Choice(i, seq.sampling, host.worker.tokenizer) for i, seq in enumerate(sequences)]
        self._open = list(range(len(sequences)))  # choices that are still to be generated
        self._resumed = internal is not None and bool(internal.resume)
        if internal is not None and internal.resume:
            self._resume(internal.resume)
        self._admitted: dict[int, Admitted] = {}
        self._finished: list[Finished] = []
        self._write_lock = asyncio.Lock()
        self.trace: WorkerTrace | None = None

    def _resume(self, resumed: tuple[ResumedSequence, ...]) -> None:
        """Bring text, stop strings, counts and sequences to where the client is."""
        if len(resumed) != len(self._sequences) or not self._request.stream:
            raise bad_request("kvbaton.resume must have one entry for each choice of a stream", "kvbaton")
        self._open = [i for i, choice in enumerate(resumed) if choice.finish_reason is None]
        usage = self._answer.usage
        for i, (sequence, had) in enumerate(zip(self._sequences, resumed, strict=True)):
            usage.num_output_tokens += len(had.token_ids)
            if i % self._request.n == 0:  # each prompt counts once
                usage.num_prompt_tokens += len(sequence.prompt_token_ids)
                usage.num_cached_tokens += had.num_cached_tokens
            self._answer.resume(i, had.opened, had.token_ids)
            if had.finish_reason is None and had.token_ids:
                for token_id in had.token_ids:
                    self._choices[i].push(TokenOutput(token_id))
                self._sequences[i] = _behind(sequence, had.token_ids)

    async def run(self) -> str:
        """The outcome for the counters. Raises only while nothing has been sent."""
        timeout_s = self._timeout_s
        if self._internal is not None:
            timeout_s = min(timeout_s, self._internal.deadline_s)
        try:
            with self._host.open.bound(timeout_s):
                if len(self._open) == 1:
                    await self._pump(self._open[0], timeout_s)
                else:
                    async with asyncio.TaskGroup() as group:
                        for index in self._open:
                            group.create_task(self._pump_with_siblings(index, timeout_s))
                await self._complete()
            return "ok"
        except Exception as error:
            cause = _first(error)
            if isinstance(cause, TimeoutError) and self._host.open.cut:
                cause = unavailable("the worker is shutting down", "draining")
            if not self._exchange.started:
                raise cause from None
            answer = self._host.unexpected(cause)
            log.warning("stream broken: %s", cause)
            await self._exchange.end_soon(error_event(answer))
            return "error"

    async def _pump_with_siblings(self, index: int, deadline_s: float) -> None:
        """As ``_pump``; a sequence that finds no room waits while siblings have some, for they will give it back.

        Refusing it would take the siblings down with it, and a request of many sequences might never fit at once.
        """
        while True:
            try:
                await self._pump(index, deadline_s)
                return
            except CapacityError:
                others = self._admitted.keys() - {index}
                if index in self._admitted or not (others or self._exchange.started):
                    raise
            await asyncio.sleep(SIBLING_WAIT_S)

    async def _pump(self, index: int, deadline_s: float) -> None:
        choice, sequence = self._choices[index], self._sequences[index]
        prefill = self._internal.prefill if self._internal is not None else None
        async with contextlib.aclosing(
            self._host.worker.generate(sequence, prefill=prefill, deadline_s=deadline_s)
        ) as events:
            async for event in events:
                match event:
                    case TokenOutput():
                        await self._token(choice, event)
                        if choice.finish_reason is not None and event.finish_reason is None:  # a stop string
                            with contextlib.suppress(StopAsyncIteration):
                                self._finish(index, await events.asend(True))
                            return  # closes the iterator, which aborts the sequence if it goes on
                    case Admitted():
                        self._admit(index, event)
                    case Finished():
                        self._finish(index, event)
        if choice.finish_reason is None:
            raise ApiError(500, "generation ended early", type="server_error", code="internal_error")

    def _finish(self, index: int, finished: WorkerEvent) -> None:
        if not isinstance(finished, Finished):
            return  # a worker that could not say what the sequence took until here
        self._finished.append(finished)
        if self.trace is not None:
            self.trace.finished(index, finished)
        if finished.num_cached_tokens is not None and index % self._request.n == 0 and not self._resumed:
            self._answer.usage.num_cached_tokens += finished.num_cached_tokens - self._admitted[index].num_cached_tokens

    def _admit(self, index: int, admitted: Admitted) -> None:
        self._admitted[index] = admitted
        if self.trace is not None:
            self.trace.admitted(index, admitted)
        if index % self._request.n == 0 and not self._resumed:  # each prompt counts once, however many choices it has
            self._answer.usage.num_prompt_tokens += admitted.num_prompt_tokens
            self._answer.usage.num_cached_tokens += admitted.num_cached_tokens

    async def _token(self, choice: Choice, output: TokenOutput) -> None:
        delta = choice.push(output)
        self._answer.usage.num_output_tokens += 1
        if not self._request.stream:
            self._answer.add(delta)
            return
        events = self._journaled(choice, output, delta) if self._journal else self._answer.events(delta)
        if not events:
            return
        async with self._write_lock:
            if not self._exchange.started:
                await self._exchange.start(200, [*SSE_HEADERS, *self._headers])
            await self._exchange.write(events)

    def _journaled(self, choice: Choice, output: TokenOutput, delta: Delta) -> bytes:
        """The events of one token with their journal lines; a block even when nothing is visible: a sign of life."""
        index = choice.index
        opening = self._answer.opening(index)
        if opening:
            opening = journal.role_line(index) + opening
        line = journal.token_line(index, output.token_id, delta.finish_reason)
        if choice.num_tokens == 1 and index in self._admitted:
            line = journal.cached_line(index, self._admitted[index].num_cached_tokens) + line
        return opening + line + (self._answer.content(delta) or b"\n")

    async def _complete(self) -> None:
        report = self._report()
        self._host.observe(report, self.trace.context.trace_id if self.trace is not None else "")
        if self._request.stream:
            # The last part in one write, so that the router finds our comment at a known place.
            comment = REPORT_PREFIX + _ENCODER.encode(report) + b"\n\n" if self._internal is not None else b""
            if not self._exchange.started:  # continued behind the last token of every choice
                await self._exchange.start(200, [*SSE_HEADERS, *self._headers])
            await self._exchange.end(self._answer.last_events() + comment + DONE)
            return
        headers = list(self._headers)
        if self._internal is not None:
            headers.append((REPORT_HEADER, _ENCODER.encode(report)))
        body = self._answer.whole()
        await self._exchange.start(200, [JSON_HEADER, (b"content-length", b"%d" % len(body)), *headers])
        await self._exchange.end(body)

    def _report(self) -> RequestReport:
        admitted, finished, usage = self._admitted.values(), self._finished, self._answer.usage
        return RequestReport(
            path="remote" if any(a.path == "remote" for a in admitted) else "local",
            num_prompt_tokens=usage.num_prompt_tokens,
            num_cached_tokens=usage.num_cached_tokens,
            num_remote_tokens=sum(a.num_remote_tokens for a in admitted),
            num_output_tokens=usage.num_output_tokens,
            transfer_bytes=sum(f.transfer_bytes for f in finished),
            queue_s=max((f.queue_s for f in finished), default=0.0),
            prefill_s=max((f.prefill_s for f in finished), default=0.0),
            transfer_s=max((f.transfer_s for f in finished), default=0.0),
            copying_s=max((f.copying_s for f in finished), default=0.0),
            exposed_s=max((f.exposed_s for f in finished), default=0.0),
            decode_queue_s=max((f.decode_queue_s for f in finished), default=0.0),
            first_step_s=max((f.first_step_s for f in finished), default=0.0),
        )


def _behind(sequence: GenerateRequest, token_ids: tuple[int, ...]) -> GenerateRequest:
    """The rest of a sequence: what was generated becomes prompt, and its limits are what is left of them."""
    had, sampling = len(token_ids), sequence.sampling
    if had >= sampling.max_tokens:
        raise bad_request(f"kvbaton.resume has {had} tokens of at most {sampling.max_tokens}", "kvbaton")
    return msgspec.structs.replace(
        sequence,
        prompt_token_ids=sequence.prompt_token_ids + token_ids,
        sampling=msgspec.structs.replace(
            sampling, max_tokens=sampling.max_tokens - had, min_tokens=max(0, sampling.min_tokens - had)
        ),
        num_resumed_tokens=had,
    )


def _first(error: Exception) -> Exception:
    """The cause inside the group that a TaskGroup raises."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
