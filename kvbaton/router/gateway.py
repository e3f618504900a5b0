"""The router's HTTP face: OpenAI's endpoints for clients, health and metrics for operators, members for ``kvbaton up``.

Each request is parsed, tokenized and checked once, here; a worker gets the client's body with our decision added.
Invariants: nobody is served whom the door does not let in; nothing a client wrote decides where a request goes or which
key anything has; only listed headers pass on; every request that was let in leaves one record in the log and in the
counters, whatever became of it. Knows nothing about how a worker is called or chosen.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count

import msgspec

from kvbaton.clock import Clock
from kvbaton.config import MemberSettings, RouterSettings
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.observe.log import event as log_event
from kvbaton.observe.metrics import Metrics
from kvbaton.observe.ratio import RatioGauges, read_band
from kvbaton.observe.tracing import RECORDER, TRACE_PATH, TRACEPARENT, watch
from kvbaton.router import openapi
from kvbaton.router.changes import FleetChanges
from kvbaton.router.dispatch import Dispatcher
from kvbaton.router.door import Door
from kvbaton.router.flight import Call, Flight, without_trace
from kvbaton.router.lifecycle import Event, Lifecycle
from kvbaton.router.page import Page
from kvbaton.router.policy import RequestView
from kvbaton.router.prefix_index import PromptChains
from kvbaton.router.record import record_of
from kvbaton.router.registry import Registry
from kvbaton.router.rollout import Rollout, bucket
from kvbaton.router.traced import RouterTrace
from kvbaton.router.wishes import read_wishes
from kvbaton.types import UNREADABLE, LocalError
from kvbaton.workers.http import (
    BodyBudget,
    Claim,
    ClientGone,
    Exchange,
    OpenRequests,
    Receive,
    Scope,
    Send,
    clean_request_id,
    method_not_allowed,
    not_found,
)
from kvbaton.workers.openai_errors import ApiError, bad_request, from_exception, model_not_found, unavailable
from kvbaton.workers.openai_request import (
    ApiRequest,
    Endpoint,
    RequestLimits,
    output_limits,
    parse,
    tokenize,
    tokenize_met,
)
from kvbaton.workers.openai_response import error_event
from kvbaton.workers.protocol import InternalRequest, RequestReport
from kvbaton.workers.server import model_card, version_of

log = logging.getLogger(__name__)
_ENCODER = msgspec.json.Encoder()
_MEMBERS = msgspec.json.Decoder(list[MemberSettings])
# What may pass from a client to a worker. Everything else is dropped: credentials, cookies, addresses, hop-by-hop.
FORWARDED_HEADERS = (b"traceparent", b"tracestate")
_MAX_FORWARDED_BYTES = 512
# Of what each report says.
_TOTALS = (
    "kvbaton_router_prompt_tokens_total", "kvbaton_router_cached_tokens_total", "kvbaton_router_output_tokens_total",
    "kvbaton_router_transfer_bytes_total", "kvbaton_router_foretold_cached_tokens_total",
)  # fmt: skip
LONG_INLINE_CHARS = 32 * 1024  # of a text whose words are known; a thread costs more than its half a millisecond
INLINE_BYTES = 128 * 1024  # hashing the token ids of a larger body would hold the loop up for milliseconds
REFUSALS = frozenset({*range(400, 500), 503})  # the client's fault, or no room: not a failure of ours


@dataclass(frozen=True)
class Served:
    """The one model of the fleet."""

    name: str
    tokenizer: Tokenizer


class Gateway:
    """The ASGI app of the router."""

    def __init__(
        self,
        registry: Registry,
        dispatcher: Dispatcher,
        served: Served,
        settings: RouterSettings,
        key: str,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._tokenizer = served.tokenizer
        self._model_name = served.name
        self._settings = settings
        self.door = Door(None, key.encode())  # everybody, until whoever starts the router closes it
        self._metrics = metrics
        self._totals = [metrics.adder(name) for name in _TOTALS]
        self._clock = clock
        self._limits = RequestLimits()
        self._ratio = RatioGauges(read_band(settings.plan_band))
        self._bodies = BodyBudget(settings.max_total_body_bytes)
        self._created_s = int(time.time())
        # Request ids: one draw for the process and a count, since a draw for each request is a system call.
        self._life, self._number = secrets.token_hex(8), count()
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self.state = "serving"
        self.open = OpenRequests()
        self._changes = FleetChanges(registry, key, clock)
        self.drain_requested = asyncio.Event()
        self.page: Page | None = None  # at /ui; None: it is switched off
        self._traces: dict[str, RouterTrace] = {}  # of open requests that are recorded

    async def drain(self, deadline_s: float) -> bool:
        """Unready at once; open requests may end until the deadline, then they end with an error."""
        self.state = "draining"
        return await self.open.drained(deadline_s)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "only HTTP is served"
        exchange = Exchange(scope, receive, send)
        try:
            tenant = self.door.admit(exchange)
            match exchange.path:
                case "/v1/chat/completions":
                    await self._generate(exchange, "chat", tenant)
                case "/v1/completions":
                    await self._generate(exchange, "completions", tenant)
                case path if path.startswith("/internal/"):
                    await self._internal(exchange)
                case path if self.page is not None and (path == "/ui" or path.startswith("/ui/")):
                    await self.page.answer(exchange)
                case _:
                    await self._get(exchange)
        except ClientGone:
            return
        except (ApiError, LocalError) as error:
            await exchange.fail(from_exception(error))

    # -- generation ----------------------------------------------------------------------------------------------

    async def _generate(self, exchange: Exchange, endpoint: Endpoint, tenant: str) -> None:
        if exchange.method != "POST":
            raise method_not_allowed("POST")
        request_id = f"{self._life}{next(self._number):08x}"
        flight = Flight(exchange, request_id, self._clock.now_s(), [(b"x-kvbaton-request-id", request_id.encode())])
        flight.tenant = tenant
        if RECORDER.on and (begun := RECORDER.begin(exchange.headers.get(TRACEPARENT))) is not None:
            self._traces[request_id] = RouterTrace(*begun, flight.received_s)
        claim, failure = Claim(self._bodies), None
        self.open.enter()
        try:
            failure = await self._fly(flight, endpoint, claim)
        except (ClientGone, asyncio.CancelledError):
            if not flight.lifecycle.ended:
                flight.lifecycle.on(Event.CLIENT_GONE)
            raise
        finally:
            try:
                self._record(flight, endpoint, failure)
            finally:
                claim.release()
                self.open.leave()
                if self._traces:
                    self._traces.pop(request_id, None)

    async def _fly(self, flight: Flight, endpoint: Endpoint, claim: Claim) -> ApiError | None:
        """Serve it; the error that was answered, if one was."""
        exchange, settings = flight.exchange, self._settings
        try:
            wishes = read_wishes(exchange.headers, settings.request_timeout_s)
            flight.timeout_s = wishes.timeout_s
            flight.lifecycle = Lifecycle(max_replays=settings.max_replays if wishes.replay else 0)
            with self.open.bound(flight.timeout_s) as bound:
                raw = await self._read(flight, claim)
                flight.received_s = self._clock.now_s()  # a slow upload is not a slow fleet
                bound.watch(exchange)
                await self._process(flight, endpoint, raw)
            return None
        except ClientGone:
            raise
        except Exception as error:
            failure = from_exception(error)
            if isinstance(error, TimeoutError) and self.open.cut:
                failure = unavailable("the router is shutting down", "draining")
            if failure.code == "internal_error":
                log.error("request %s failed", flight.request_id, exc_info=error)
            without_trace(failure)
        if not flight.lifecycle.ended:
            flight.lifecycle.on(Event.FAIL if exchange.started or failure.status not in REFUSALS else Event.REFUSE)
        if exchange.started:
            self._metrics.add("kvbaton_router_broken_streams_total")
            await exchange.end_soon(error_event(failure))
        else:
            decided = [(b"x-kvbaton-decision", flight.reason.encode())] if flight.decisions else []
            await exchange.fail(failure, [*flight.response_headers, *decided])
        return failure

    async def _read(self, flight: Flight, claim: Claim) -> bytes:
        exchange, settings = flight.exchange, self._settings
        if self.state != "serving":
            raise unavailable(f"the router is {self.state}", self.state)
        if self.open.num > settings.max_inflight:
            raise ApiError(
                429, "too many requests at once", type="rate_limit_error", code="too_many_requests", retry_after_s=1
            )
        echo = clean_request_id(exchange.headers.get(b"x-request-id"))
        if echo is not None:
            flight.client_request_id = echo
            flight.response_headers.append((b"x-request-id", echo.encode()))
        return await exchange.read_body(settings.max_body_bytes, settings.body_timeout_s, claim)

    async def _process(self, flight: Flight, endpoint: Endpoint, raw: bytes) -> None:
        dispatcher, settings = self._dispatcher, self._settings
        if b'"priority"' not in raw:  # it has the usual one: no need to read it to know that there is no place for it
            dispatcher.check_line(flight, 0)
        loop = asyncio.get_running_loop()
        if len(raw) <= INLINE_BYTES:
            request = parse(endpoint, raw, self._limits)
        else:
            limits = replace(self._limits, max_prompt_ids=self._registry.max_context or self._limits.max_prompt_ids)
            request = await loop.run_in_executor(self._threads, parse, endpoint, raw, limits)
        if request.model is not None and request.model != self._model_name:
            raise model_not_found(request.model, self._model_name)
        max_context = self._registry.max_context
        if max_context == 0:
            raise unavailable("no worker takes requests now", "no_workers", retry_after_s=2)
        dispatcher.check_line(flight, request.priority)
        short, chars = len(raw) <= INLINE_BYTES, request.text_chars
        if short and chars <= settings.tokenize_inline_chars:
            call = self._call(flight, request, raw, max_context)
        elif short and chars <= LONG_INLINE_CHARS and (met := tokenize_met(request, self._tokenizer)) is not None:
            call = self._call(flight, request, raw, max_context, met)
        else:
            call = await loop.run_in_executor(self._threads, self._call, flight, request, raw, max_context)
        flight.lifecycle.on(Event.ACCEPT)
        await dispatcher.run(flight, call)

    def _call(
        self, flight: Flight, request: ApiRequest, raw: bytes, max_context: int, met: list[Sequence[int]] | None = None
    ) -> Call:
        """Tokenize and check. May run on a thread."""
        prompts = met or tokenize(request, self._tokenizer, max_context, self._limits)
        limits = output_limits(request, prompts, self._tokenizer, max_context)
        lengths = [len(ids) for ids in prompts]
        headers = flight.exchange.headers
        forwarded = _forwarded(headers) if not headers.keys().isdisjoint(FORWARDED_HEADERS) else {}
        num_sequences = len(prompts) * request.n
        salt = self.door.salt(flight.tenant, request.cache_salt)
        if self._traces and (trace := self._traces.get(flight.request_id)) is not None:
            forwarded["traceparent"] = trace.call.header
        rolling = self._dispatcher.policy.disagg_percent < 100
        return Call(
            flight.exchange.path,
            raw,
            InternalRequest(
                flight.request_id,
                tuple(prompts),
                cache_salt=salt,
                priority=request.priority,
                journal=request.stream and flight.lifecycle.replays_left,
                created_s=int(time.time()),
            ),
            RequestView(
                sum(lengths),
                len(prompts),
                max(lengths),
                max([n + limit for n, limit in zip(lengths, limits, strict=True)]),
                num_sequences,
                bucket(request.user, salt, prompts[0]) if rolling else 0.0,
            ),
            PromptChains(prompts, salt, self._registry.chain_sizes()),
            num_sequences,
            request.stream,
            forwarded,
        )

    def _record(self, flight: Flight, endpoint: Endpoint, failure: ApiError | None) -> None:
        """The one log line and the counters of a request."""
        now_s = self._clock.now_s()
        metrics, report, reason, outcome = self._metrics, flight.report, flight.reason, flight.lifecycle.outcome
        trace_id = ""
        if self._traces and (trace := self._traces.pop(flight.request_id, None)) is not None:
            trace_id = trace.context.trace_id
            trace.end(flight, endpoint, failure.code or "error" if failure and outcome == "error" else "", now_s)
        metrics.add("kvbaton_router_requests_total", endpoint, reason, outcome)
        if flight.first_byte_s is not None:
            waited_s = flight.first_byte_s - flight.received_s
            metrics.observe("kvbaton_router_ttft_seconds", reason, value=waited_s, trace_id=trace_id)
        if outcome == "ok":
            metrics.observe(
                "kvbaton_router_request_seconds", reason, value=now_s - flight.received_s, trace_id=trace_id
            )
        if report is not None:
            self._count_tokens(flight, report)
            ttft_s = None
            if flight.first_byte_s is not None:
                ttft_s = flight.first_byte_s - flight.received_s - flight.queued_s
            if outcome == "ok":
                self._registry.measured.served(flight.decisions, report, ttft_s, now_s)
        if self.page is not None:
            self.page.ended(flight, now_s)
        if log.isEnabledFor(logging.INFO):
            # After what is to be written to sockets now.
            asyncio.get_running_loop().call_soon(self._log, flight, endpoint, failure, now_s)

    @staticmethod
    def _log(flight: Flight, endpoint: Endpoint, failure: ApiError | None, now_s: float) -> None:
        log_event(log, "request", **record_of(flight, endpoint, failure, now_s))

    def _count_tokens(self, flight: Flight, report: RequestReport) -> None:
        metrics, foretold, cached = self._metrics, flight.decisions[-1].foretold_cached_tokens, report.num_cached_tokens
        amounts = (report.num_prompt_tokens, cached, report.num_output_tokens, report.transfer_bytes, foretold)
        for add, amount in zip(self._totals, amounts, strict=True):
            add(amount)
        if report.transfer_bytes:
            metrics.add("kvbaton_router_disaggregated_requests_total")
        metrics.observe("kvbaton_router_prefix_error_tokens", value=abs(foretold - cached))
        if flight.first_byte_s is not None and report.num_output_tokens > 1:
            gap_s = (flight.last_part_s - flight.first_byte_s) / (report.num_output_tokens - 1)
            metrics.observe("kvbaton_router_tpot_seconds", flight.reason, value=gap_s)
            ttft_s = flight.first_byte_s - flight.received_s
            self._registry.measured.arm(flight.decisions[-1], ttft_s, gap_s)

    # -- everything else -----------------------------------------------------------------------------------------

    async def _get(self, exchange: Exchange) -> None:
        answer: object
        match exchange.path:
            case "/v1/models":
                answer = {"object": "list", "data": [self._card()]}
            case "/health":
                answer = {"status": "ok"}
            case "/ready":
                answer = self._ready()
            case "/fleet":
                answer = self.fleet()
            case "/version":
                answer = self._version()
            case openapi.PATH:
                answer = openapi.document(self._model_name, self._limits)
            case "/metrics":
                answer = None
            case path if path == f"/v1/models/{self._model_name}":
                answer = self._card()
            case path if path.startswith("/v1/models/"):
                raise model_not_found(path.removeprefix("/v1/models/"), self._model_name)
            case path:
                raise not_found(path)
        if exchange.method not in ("GET", "HEAD"):
            raise method_not_allowed("GET")
        if answer is not None:
            await exchange.answer(200, _ENCODER.encode(answer))
            return
        self._registry.export()
        self._dispatcher.export()
        self._metrics.set("kvbaton_router_inflight_requests", value=self.open.num)
        self._ratio.export(self._metrics, self._clock.now_s())
        await exchange.answer_text(*self._metrics.answer(exchange.headers.get(b"accept", b"")))

    def _card(self) -> dict[str, object]:
        return model_card(self._model_name, self._created_s, self._registry.max_context)

    def _version(self) -> dict[str, object]:
        """Of the first worker heard of: those that differ in it do not hand over to each other."""
        for member in self._registry.members:
            if member.reported is not None:
                info = member.reported.info
                return version_of(self._model_name, info.fingerprint, info.block_size, self._registry.max_context)
        raise unavailable("no worker was heard of yet", "no_workers")

    def _ready(self) -> dict[str, object]:
        if self.state != "serving":
            raise unavailable(f"the router is {self.state}", self.state)
        if not self._registry.usable(self._clock.now_s()):
            raise unavailable("no worker takes requests now", "no_workers")
        return {"status": "ready"}

    def fleet(self) -> dict[str, object]:
        """Members and load, for people and programs. Without addresses: this page is as public as the API."""
        return {
            "state": self.state,
            "model": self._model_name,
            "inflight": self.open.num,
            "queued": self._dispatcher.num_queued,
            "disagg_percent": self._dispatcher.policy.disagg_percent,
            "members": [
                {
                    "name": member.name,
                    "role": member.role,
                    "state": member.state,
                    "reason": member.reason,
                    "inflight": member.own_requests,
                    "dispatched": member.num_dispatched,
                    "failures": member.num_failures,
                    "num_requests": member.num_requests,
                    "queued_tokens": member.queued_tokens,
                    "prefix_index": self._registry.prefix_index_state(member),
                    "incarnation": member.reported.info.incarnation if member.reported is not None else None,
                    "stats": member.reported.info.stats if member.reported is not None else None,
                }
                for member in self._registry.members
            ],
        }

    async def _internal(self, exchange: Exchange) -> None:
        if not self.door.knows_fleet(exchange):
            raise ApiError(403, "this needs the fleet's internal key", type="permission_error", code="forbidden")
        match exchange.method, exchange.path:
            case "PUT", "/internal/members":
                raw = await exchange.read_body(1024 * 1024, self._settings.body_timeout_s)
                try:
                    self._registry.set_members(_MEMBERS.decode(raw))
                except (*UNREADABLE, LocalError) as error:
                    raise bad_request(str(error), "members") from None
                await exchange.answer(200, _ENCODER.encode(self.fleet()))
            case "POST", path if path.startswith("/internal/members/"):
                raw = await exchange.read_body(64 * 1024, self._settings.body_timeout_s)
                await self._changes.carry_out(path.removeprefix("/internal/members/"), raw)
                await exchange.answer(200, _ENCODER.encode(self.fleet()))
            case "PUT", "/internal/rollout":
                raw = await exchange.read_body(64 * 1024, self._settings.body_timeout_s)
                try:
                    rollout = msgspec.json.decode(raw, type=Rollout)
                except (*UNREADABLE, LocalError) as error:
                    raise bad_request(str(error), "disagg_percent") from None
                self._dispatcher.roll_out(rollout)
                await exchange.answer(200, _ENCODER.encode(rollout))
            case "GET", path if path == TRACE_PATH:
                await exchange.answer(200, await exchange.until_disconnect(watch(exchange.query)))
            case "POST", "/internal/drain":
                self.state = "draining"
                self.drain_requested.set()
                await exchange.answer(202, b'{"state":"draining"}')
            case _:
                raise not_found(exchange.path)


def _forwarded(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Of a client's headers, those that pass on."""
    return {
        name.decode(): value.decode()
        for name in FORWARDED_HEADERS
        if (value := headers.get(name)) is not None and len(value) <= _MAX_FORWARDED_BYTES and value.isascii()
    }
