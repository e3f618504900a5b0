"""One request to one worker at a time: the call, the splice of its answer, and at most one more attempt.

Invariants: bytes of an answer pass unchanged and only as whole SSE events, so that an error event can always follow;
once a byte of a stream went to the client no other worker is asked; everything that waits for a worker has a deadline;
leaving by any way closes the connection to the worker, which aborts the work there. Knows nothing about prompts.
"""

from __future__ import annotations

import contextlib
import io
import logging
from dataclasses import dataclass, field

import aiohttp
import msgspec

from kvbaton.clock import Clock
from kvbaton.config import RouterSettings
from kvbaton.observe.metrics import Metrics
from kvbaton.router.lifecycle import Event, Lifecycle
from kvbaton.router.policy import Decision, NoWorker, PolicyConfig, RequestView, decide
from kvbaton.router.prefix_index import PrefixIndex, PromptChains
from kvbaton.router.registry import Hold, Member, Registry
from kvbaton.router.room import Room
from kvbaton.workers.generation import REPORT_HEADER
from kvbaton.workers.http import JSON_HEADER, SSE_HEADERS, Exchange, Headers
from kvbaton.workers.openai_errors import ApiError, unavailable
from kvbaton.workers.openai_response import DONE, ERROR_MARK, REPORT_PREFIX
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER, InternalRequest, RequestReport

log = logging.getLogger(__name__)
_ENCODER = msgspec.json.Encoder()
_REPORT = msgspec.json.Decoder(RequestReport)
_ERROR = msgspec.json.Decoder(dict[str, dict[str, object]])
_MAX_ERROR_BYTES = 64 * 1024
_LARGE_BODY_BYTES = 1 << 20  # from here on aiohttp wants something it can send in parts


@dataclass(frozen=True)
class Call:
    """What a worker is asked, whichever worker that will be."""

    path: str
    raw_body: bytes
    internal: InternalRequest  # with ``prefill`` still open
    view: RequestView
    prompts: PromptChains
    num_sequences: int
    stream: bool
    forward_headers: dict[str, str]


@dataclass
class Flight:
    """One request on its way: what became of it, and its times."""

    exchange: Exchange
    request_id: str
    received_s: float
    response_headers: Headers
    client_request_id: str | None = None  # for the log and the echo; never a key
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    decisions: list[Decision] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)  # why attempts failed
    cached_tokens: dict[str, int] = field(default_factory=dict)  # foretold, by worker
    report: RequestReport | None = None
    num_dispatched: int = 0  # calls made, deferred ones too
    queued_s: float = 0.0  # waited for room
    no_room: bool = False  # the present attempt was refused for want of it
    dispatched_s: float | None = None
    first_byte_s: float | None = None
    last_part_s: float = 0.0

    @property
    def reason(self) -> str:
        return self.decisions[-1].reason if self.decisions else "none"


class AttemptFailed(Exception):
    """An attempt ended without a byte to the client."""

    def __init__(self, cause: str, error: ApiError, elsewhere: bool) -> None:
        super().__init__(cause)
        self.cause = cause
        self.error = error  # what the client is told if nobody else can help
        self.elsewhere = elsewhere  # another worker may do better


class Dispatcher:
    def __init__(
        self,
        registry: Registry,
        index: PrefixIndex,
        session: aiohttp.ClientSession,
        settings: RouterSettings,
        key: str,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._index = index
        self._session = session
        self._settings = settings
        self._key = key
        self._metrics = metrics
        self._clock = clock
        self.policy = PolicyConfig(
            settings.threshold_tokens,
            settings.request_cost_tokens,
            settings.policy,
            settings.ttft_slo_s,
            settings.tpot_slo_s,
            settings.disagg_percent,
        )
        self._turn = 0
        self._room = Room(settings.max_queued)

    async def run(self, flight: Flight, call: Call) -> None:
        """Answer the request, or raise ApiError while nothing was sent."""
        flight.cached_tokens = self._registry.cached_tokens(call.prompts)
        failed: frozenset[str] = frozenset()  # for good
        full: frozenset[str] = frozenset()  # until the next turn
        prefill_failed = False
        last: AttemptFailed | None = None
        if self._room.num_waiting:  # others came first
            await self._wait_for_room(flight, call, no_capacity())
        while True:
            decision = self._decide(flight, call, failed | full, prefill_failed, last)
            try:
                await self._attempt(flight, call, decision)
                return
            except AttemptFailed as failure:
                last = failure
            if last.cause == "no_capacity":  # nothing went wrong: ask the others, then wait
                flight.lifecycle.on(Event.DEFER)
                flight.decisions.pop()
                full |= {decision.decode}
                if not self._registry.another_decodes(self._clock.now_s(), failed | full):
                    await self._wait_for_room(flight, call, last.error)
                    full = frozenset()
                continue
            flight.causes.append(last.cause)
            if not last.elsewhere or not flight.lifecycle.may_retry:
                raise last.error
            prefill_failed = last.cause == "prefill_failed"
            # A failed hand-off speaks against the prefill worker, anything else against the one that was called.
            failed |= {decision.prefill or decision.decode} if prefill_failed else {decision.decode}
            flight.lifecycle.on(Event.RETRY)
            self._metrics.add("kvbaton_router_retries_total", last.cause)

    def _gave_back(self, flight: Flight) -> None:
        """An attempt ended. One that never got in gave nothing back: waking others for it would go round in circles."""
        if not flight.no_room:
            self._room.freed()

    async def _wait_for_room(self, flight: Flight, call: Call, error: ApiError) -> None:
        """Raises ``error`` when the queue is full or the time is up."""
        if self._room.full:
            raise error
        started_s = self._clock.now_s()
        left_s = self._settings.queue_timeout_s - flight.queued_s
        try:
            got_turn = await self._room.wait(call.internal.priority, flight.received_s, left_s)
        finally:
            waited_s = self._clock.now_s() - started_s
            flight.queued_s += waited_s
            self._metrics.observe("kvbaton_router_queue_seconds", value=waited_s)
        if not got_turn:
            raise error

    @property
    def num_queued(self) -> int:
        return self._room.num_waiting

    def export(self) -> None:
        self._metrics.set("kvbaton_router_queued_requests", value=self.num_queued)

    def _decide(
        self, flight: Flight, call: Call, excluded: frozenset[str], prefill_failed: bool, last: AttemptFailed | None
    ) -> Decision:
        self._turn += 1
        members = self._registry.views(flight.cached_tokens, self._clock.now_s(), excluded)
        try:
            decision = decide(
                call.view, members, self.policy, self._turn, self._registry.has_prefill_pool, prefill_failed
            )
        except NoWorker:
            if last is not None:
                raise last.error from None
            raise unavailable("no worker takes requests now", "no_workers", retry_after_s=2) from None
        if prefill_failed and not decision.remote and self._settings.on_prefill_failure == "error":
            assert last is not None
            raise last.error
        flight.decisions.append(decision)
        self._metrics.add("kvbaton_router_decisions_total", decision.reason)
        return decision

    async def _attempt(self, flight: Flight, call: Call, decision: Decision) -> None:
        target, prefill = self._registry.get(decision.decode), self._registry.get(decision.prefill or "")
        assert target is not None
        uncached = max(1, call.view.num_prompt_tokens - decision.foretold_cached_tokens)
        flight.lifecycle.on(Event.DISPATCH)
        flight.no_room = False
        flight.num_dispatched += 1
        if prefill is not None:
            # At once: those with the same prefix that queue behind it will find it there.
            self._index.record(prefill.name, call.prompts)
        with contextlib.ExitStack() as held:
            for name in (target.name, *([prefill.name] if prefill is not None else [])):
                for expected in self._index.expect(name, call.prompts):
                    held.callback(expected.settle)
            # The prompt waits where it is computed; both workers hold the request.
            hold = held.enter_context(
                self._registry.hold(target, call.num_sequences, uncached if prefill is None else 0)
            )
            holds = [hold]
            if prefill is not None:
                holds.append(held.enter_context(self._registry.hold(prefill, call.num_sequences, uncached)))
            body = self._body(flight, call, prefill)
            held.callback(self._gave_back, flight)
            await self._send(flight, call, decision, body, holds)

    async def _send(self, flight: Flight, call: Call, decision: Decision, body: bytes, holds: list[Hold]) -> None:
        """POST to the first hold's worker and pass its answer on."""
        target = holds[0].member
        prefill = holds[1].member if len(holds) > 1 else None
        if flight.dispatched_s is None:
            flight.dispatched_s = self._clock.now_s()
            self._metrics.observe("kvbaton_router_overhead_seconds", value=flight.dispatched_s - flight.received_s)
        headers = {
            **call.forward_headers,
            "content-type": "application/json",
            INTERNAL_KEY_HEADER.decode(): self._key,
        }
        try:
            data = body if len(body) < _LARGE_BODY_BYTES else io.BytesIO(body)
            async with self._session.post(target.settings.url + call.path, data=data, headers=headers) as response:
                if response.status != 200:
                    raise await self._refused(flight, response, target, prefill)
                outgoing = self._response_headers(flight, decision)
                if call.stream:
                    await self._splice(flight, call, response, outgoing, holds)
                else:
                    self._prompt_computed(call, holds)
                    await self._whole(flight, response, outgoing)
        except aiohttp.ClientConnectorError:
            self._registry.call_failed(target, "unreachable", self._clock.now_s(), unreachable=True)
            raise self._lost(flight, "unreachable", "the worker could not be reached") from None
        except aiohttp.ConnectionTimeoutError:
            self._registry.call_failed(target, "unreachable", self._clock.now_s())
            raise self._lost(flight, "unreachable", "the worker could not be reached") from None
        except TimeoutError:
            self._registry.call_failed(target, "timeout", self._clock.now_s())
            raise self._lost(flight, "worker_timeout", "the worker did not answer in time", status=504) from None
        except (aiohttp.ClientError, OSError) as error:
            log.warning("call to %s failed: %s: %s", target.name, type(error).__name__, error)
            self._registry.call_failed(target, "connection_lost", self._clock.now_s())
            raise self._lost(flight, "worker_error", "the worker went away") from None

    def _lost(self, flight: Flight, cause: str, message: str, status: int = 502) -> AttemptFailed:
        # A worker that let its deadline pass has used up the client's patience too: no second attempt.
        error = ApiError(status, message, type="server_error", code=cause)
        return AttemptFailed(cause, error, elsewhere=not flight.exchange.started and status != 504)

    def _body(self, flight: Flight, call: Call, prefill: Member | None) -> bytes:
        """The client's bytes with our object as the last member: of two with one name the last counts."""
        left_s = self._settings.request_timeout_s - (self._clock.now_s() - flight.received_s)
        address = self._registry.peer_address(prefill) if prefill is not None else None
        # An id of its own for each attempt: what is left of an earlier one on some worker must not be in its way.
        attempt = flight.num_dispatched
        internal = msgspec.structs.replace(
            call.internal,
            request_id=flight.request_id if attempt == 1 else f"{flight.request_id}-{attempt}",
            prefill=address,
            deadline_s=max(0.1, left_s),
        )
        return call.raw_body.rstrip()[:-1] + b',"kvbaton":' + _ENCODER.encode(internal) + b"}"

    def _prompt_computed(self, call: Call, holds: list[Hold]) -> None:
        """Only now can the worker that answers be said to hold the prompt."""
        for hold in holds:
            hold.first_token()
        self._room.freed()  # it got in; there may be room for one more
        self._index.record(holds[0].member.name, call.prompts)

    def _response_headers(self, flight: Flight, decision: Decision) -> Headers:
        headers = [
            *flight.response_headers,
            (b"x-kvbaton-decision", decision.reason.encode()),
            (b"x-kvbaton-decode", decision.decode.encode()),
        ]
        if decision.prefill is not None:
            headers.append((b"x-kvbaton-prefill", decision.prefill.encode()))
        return headers

    async def _refused(
        self, flight: Flight, response: aiohttp.ClientResponse, target: Member, prefill: Member | None
    ) -> AttemptFailed:
        """A worker's answer other than 200: the client's fault passes through, ours is tried elsewhere."""
        error = _decode_error(response.status, await response.content.read(_MAX_ERROR_BYTES))
        retry_after = response.headers.get("retry-after", "")
        if retry_after.isdigit():
            error.retry_after_s = int(retry_after)
        now_s = self._clock.now_s()
        if error.code == "prefill_failed" and prefill is not None:
            self._registry.call_failed(prefill, "prefill_failed", now_s)
            return AttemptFailed("prefill_failed", error, elsewhere=True)
        if error.code in ("draining", "starting"):
            self._registry.says_draining(target)
            return AttemptFailed("draining", error, elsewhere=True)
        if error.status in (429, 503):
            flight.no_room = True
            return AttemptFailed("no_capacity", error, elsewhere=True)
        if error.status < 500 and error.status != 409:
            return AttemptFailed("refused", error, elsewhere=False)
        self._registry.call_failed(target, "worker_error", now_s)
        return AttemptFailed("worker_error", error, elsewhere=error.status != 504)

    async def _whole(self, flight: Flight, response: aiohttp.ClientResponse, headers: Headers) -> None:
        body = await response.read()
        report = response.headers.get(REPORT_HEADER.decode())
        flight.report = _REPORT.decode(report) if report is not None else None
        flight.lifecycle.on(Event.COMPLETE)
        length = (b"content-length", b"%d" % len(body))
        await flight.exchange.start(200, [JSON_HEADER, length, *headers])
        await flight.exchange.end(body)

    async def _splice(
        self, flight: Flight, call: Call, response: aiohttp.ClientResponse, headers: Headers, holds: list[Hold]
    ) -> None:
        """Pass events on as they come. What follows the last whole event waits for the rest of it."""
        exchange, now_s = flight.exchange, self._clock.now_s
        observe_gap = self._metrics.observer("kvbaton_router_itl_seconds")
        held = b""
        async for arrived in response.content.iter_any():
            part, held = whole_events(held + arrived if held else arrived)
            if not part:
                continue
            if REPORT_PREFIX in part:
                part, flight.report = take_report(part, flight.report)
            at_s = now_s()
            if flight.first_byte_s is None:
                flight.first_byte_s = at_s
                flight.lifecycle.on(Event.FIRST_BYTES)
                self._prompt_computed(call, holds)
                await exchange.start(200, [*SSE_HEADERS, *headers])
            else:
                observe_gap(at_s - flight.last_part_s)
            flight.last_part_s = at_s
            if part.endswith(DONE):
                flight.lifecycle.on(Event.COMPLETE)
                await exchange.end(part)
                return
            if ERROR_MARK in part:
                flight.lifecycle.on(Event.FAIL)
                self._metrics.add("kvbaton_router_broken_streams_total")
                await exchange.end(part)
                return
            await exchange.write(part)
        raise aiohttp.ClientPayloadError("the stream ended without its end mark")


def whole_events(data: bytes) -> tuple[bytes, bytes]:
    """Whole SSE events, and the beginning of one that is not complete."""
    if data.endswith(b"\n\n"):
        return data, b""
    cut = data.rfind(b"\n\n") + 2
    return (data[:cut], data[cut:]) if cut > 1 else (b"", data)


def take_report(events: bytes, known: RequestReport | None) -> tuple[bytes, RequestReport | None]:
    """Cut the worker's comment out of whole events. Text cannot look like it: JSON strings hold no bare newline."""
    start = 0 if events.startswith(REPORT_PREFIX) else events.find(b"\n\n" + REPORT_PREFIX) + 2
    if start == 1:  # not found: the words occur inside an event
        return events, known
    stop = events.index(b"\n\n", start) + 2
    report = _REPORT.decode(events[start + len(REPORT_PREFIX) : stop])
    return events[:start] + events[stop:], report


def no_capacity() -> ApiError:
    return unavailable("no worker has room now", "no_capacity")


def _decode_error(status: int, raw: bytes) -> ApiError:
    """A worker's error as it wrote it; what is not in OpenAI's shape is not shown."""
    try:
        error = _ERROR.decode(raw)["error"]
    except (msgspec.MsgspecError, KeyError):
        error = {}
    texts = {key: str(value) for key, value in error.items() if value is not None}
    return ApiError(
        status if 400 <= status < 600 else 502,
        texts.get("message", f"the worker answered {status}"),
        type=texts.get("type", "server_error"),
        param=texts.get("param"),
        code=texts.get("code"),
    )
