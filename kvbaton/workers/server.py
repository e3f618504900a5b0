"""A worker's HTTP face: OpenAI's endpoints, health, metrics, and the internal calls of a fleet.

Invariants: a request is refused with a status, or answered, or its stream ends with an error event; the status line is
not sent before the first token, so that whatever goes wrong until then has its own status; a client that goes away
takes its sequences with it. The internal object and ``/internal/*`` are honoured only together with the fleet's key;
a closed worker generates for nobody else.
Knows nothing about how the worker computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvbaton import __version__
from kvbaton.clock import Clock, MonotonicClock
from kvbaton.observe.metrics import Metrics
from kvbaton.observe.tracing import RECORDER, TRACE_PATH, TRACEPARENT, watch
from kvbaton.types import Fingerprint
from kvbaton.workers.generation import Generation, Identity
from kvbaton.workers.http import (
    ClientGone,
    Exchange,
    OpenRequests,
    Receive,
    Scope,
    Send,
    clean_request_id,
    is_header_word,
    method_not_allowed,
    not_found,
)
from kvbaton.workers.kv_events import EVENTS_PATH, SNAPSHOT_PATH, KVEventsEndpoint
from kvbaton.workers.openai_errors import ApiError, bad_request, from_exception, model_not_found, unavailable
from kvbaton.workers.openai_request import (
    ApiRequest,
    Endpoint,
    RequestLimits,
    parse,
    resolve,
    tokenize,
    with_internal,
)
from kvbaton.workers.pages import refuse_strange_pages
from kvbaton.workers.protocol import (
    CONTROL_VERSION,
    INTERNAL_KEY_HEADER,
    InternalRequest,
    RequestReport,
    Worker,
    WorkerInfo,
)
from kvbaton.workers.role_change import MAX_BODY_BYTES as MAX_CHANGE_BYTES
from kvbaton.workers.role_change import change_role, decode_drain
from kvbaton.workers.traced import WorkerTrace

log = logging.getLogger(__name__)
_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True)
class ServerOptions:
    block_size: int
    eos_token_ids: tuple[int, ...] = ()  # of the model's configuration, besides the tokenizer's own
    model_name: str = ""  # empty: the worker's own
    internal_key: str = ""
    closed: bool = False  # only who has that key may generate: the router is where clients are let in
    own_pages_only: bool = False  # nothing is taken from pages of other sites
    kv_host: str = ""  # where peers find the hand-off server; empty: where they find this one
    engine_bootstrap_port: int = 0  # of servers with MooncakeConnector behind this worker and its peers
    engine_url: str = ""  # of the server of another engine, which runs without us
    chunk_tokens: int = 512  # of one engine step
    max_running: int = 64  # sequences in one batch
    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout_s: float = 30.0
    request_timeout_s: float = 600.0
    tokenize_inline_chars: int = 4096
    limits: RequestLimits = field(default_factory=RequestLimits)


class WorkerServer:
    """The ASGI app over one started ``Worker``."""

    def __init__(self, worker: Worker, options: ServerOptions, clock: Clock | None = None) -> None:
        self.worker = worker
        self.options = options
        self.model_name = options.model_name or worker.model_id
        self.metrics = Metrics("worker", role=worker.role, stats=worker.stats)
        self._eos_token_ids = tuple({*options.eos_token_ids, *worker.tokenizer.eos_token_ids})
        self.state = "serving"
        self.role_changes = 0
        self.clock = clock or MonotonicClock()
        self._created_s = int(time.time())
        self._internal_ids: set[str] = set()
        self.open = OpenRequests()
        self._kv_events = KVEventsEndpoint(worker.kv_events) if worker.kv_events is not None else None
        self.drain_requested = asyncio.Event()
        self.drain_deadline_s: float | None = None  # asked for with the drain

    @property
    def max_context(self) -> int:
        """What one sequence may use: the model's limit, or the whole pool if that is less."""
        pool_tokens = self.worker.stats().num_blocks * self.options.block_size
        return min(self.worker.max_context, pool_tokens) if pool_tokens else self.worker.max_context

    async def drain(self, deadline_s: float) -> bool:
        """Refuse new requests, let open ones end, then let the worker release what peers hold. True when all ended."""
        self.state = "draining"
        deadline = self.clock.now_s() + deadline_s
        ended = await self.open.drained(deadline_s)
        released = await self.worker.drain(max(0.0, deadline - self.clock.now_s()))
        return ended and released

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "only HTTP is served"
        exchange = Exchange(scope, receive, send)
        try:
            await self._route(exchange)
        except ClientGone:
            return
        except Exception as error:
            if exchange.started:
                raise
            await exchange.fail(from_exception(error) if isinstance(error, ApiError) else self.unexpected(error))

    def unexpected(self, error: Exception) -> ApiError:
        answer = from_exception(error)
        if answer.code == "internal_error":
            log.error("request failed", exc_info=error)
        elif answer.status >= 500 and answer.code != "no_capacity":
            log.warning("request failed: %s", error)
        return answer

    async def _route(self, exchange: Exchange) -> None:
        if self.options.own_pages_only:
            refuse_strange_pages(exchange.headers)
        if self.options.closed and exchange.path.startswith("/v1/"):
            self._authorize(exchange)
        match exchange.path:
            case "/v1/chat/completions":
                await self._counted(exchange, "chat")
            case "/v1/completions":
                await self._counted(exchange, "completions")
            case "/internal/drain":
                self._need(exchange, "POST")
                self._authorize(exchange)
                raw = await exchange.read_body(MAX_CHANGE_BYTES, self.options.body_timeout_s)
                self.drain_deadline_s = decode_drain(raw).deadline_s
                self.state = "draining"
                self.drain_requested.set()
                await exchange.answer(202, b'{"state":"draining"}')
            case path if path in (EVENTS_PATH, SNAPSHOT_PATH):
                self._need(exchange, "GET")
                self._authorize(exchange)
                if self._kv_events is None:
                    raise not_found(exchange.path)
                await self._kv_events.answer(exchange)
            case path if path == TRACE_PATH:
                self._need(exchange, "GET")
                self._authorize(exchange)
                await exchange.answer(200, await exchange.until_disconnect(watch(exchange.query)))
            case "/internal/role":
                self._need(exchange, "POST")
                self._authorize(exchange)
                await change_role(self, await exchange.read_body(MAX_CHANGE_BYTES, self.options.body_timeout_s))
                await exchange.answer(200, _ENCODER.encode(self.info()))
            case _:
                await self._get(exchange)

    async def _get(self, exchange: Exchange) -> None:
        match exchange.path:
            case "/v1/models":
                answer: object = {"object": "list", "data": [self._card()]}
            case "/health":
                answer = {"status": "ok"}
            case "/ready":
                self._need(exchange, "GET")
                if self.said_state != "serving":
                    raise unavailable(f"the worker is {self.said_state}", self.said_state)
                answer = {"status": "ready"}
            case "/version":
                answer = self.version()
            case "/metrics":
                self._need(exchange, "GET")
                await exchange.answer_text(*self.metrics.answer(exchange.headers.get(b"accept", b"")))
                return
            case "/internal/info":
                self._authorize(exchange)
                answer = self.info()
            case path if path == f"/v1/models/{self.model_name}":
                answer = self._card()
            case path if path.startswith("/v1/models/"):
                raise model_not_found(path.removeprefix("/v1/models/"), self.model_name)
            case path:
                raise not_found(path)
        self._need(exchange, "GET")
        await exchange.answer(200, _ENCODER.encode(answer))

    @property
    def said_state(self) -> str:
        """``state``, or that the engine's server is away: then requests go elsewhere, and come again with it."""
        return "disconnected" if self.state == "serving" and self.worker.disconnected else self.state

    def _card(self) -> dict[str, object]:
        return model_card(self.model_name, self._created_s, self.max_context)

    def version(self) -> dict[str, object]:
        """What two deployments must share to be compared."""
        return version_of(self.model_name, self.worker.fingerprint, self.options.block_size, self.max_context)

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            state=self.said_state,
            role=self.worker.role,
            model_id=self.model_name,
            incarnation=self.worker.incarnation,
            fingerprint=self.worker.fingerprint,
            max_context=self.max_context,
            block_size=self.options.block_size,
            kv_host=self.options.kv_host,
            kv_port=self.worker.kv_port,
            stats=self.worker.stats(),
            chunk_tokens=self.options.chunk_tokens,
            max_running=self.options.max_running,
            kv_events=self.worker.kv_events is not None,
            role_changes=self.role_changes,
            pid=os.getpid(),
            control_version=CONTROL_VERSION,
            serves_alone=self.worker.serves_alone,
            engine_bootstrap_port=self.options.engine_bootstrap_port,
            engine_url=self.options.engine_url,
            time_s=time.time(),
        )

    @staticmethod
    def _need(exchange: Exchange, method: str) -> None:
        if exchange.method != method and not (method == "GET" and exchange.method == "HEAD"):
            raise method_not_allowed(method)

    def _has_key(self, exchange: Exchange) -> bool:
        key = self.options.internal_key.encode()
        return bool(key) and hmac.compare_digest(exchange.headers.get(INTERNAL_KEY_HEADER, b""), key)

    def _authorize(self, exchange: Exchange) -> None:
        if not self._has_key(exchange):
            raise ApiError(403, "this needs the fleet's internal key", type="permission_error", code="forbidden")

    # -- generation ----------------------------------------------------------------------------------------------

    async def _counted(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Serve one generation and count it. In-flight bookkeeping is tied to this frame, so it cannot leak."""
        self._need(exchange, "POST")
        outcome = "error"
        gauge = "kvbaton_worker_inflight_requests"
        try:
            self.open.enter()
            self.metrics.set(gauge, self.worker.role, value=self.open.num)
            outcome = await self._serve(exchange, endpoint)
        except (ClientGone, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        except ApiError as error:
            outcome = "client_error" if error.status < 500 else "error"
            raise
        finally:
            self.open.leave()
            self.metrics.set(gauge, self.worker.role, value=self.open.num)
            self.metrics.add("kvbaton_worker_requests_total", self.worker.role, outcome)

    async def _serve(self, exchange: Exchange, endpoint: Endpoint) -> str:
        options = self.options
        echo = clean_request_id(exchange.headers.get(b"x-request-id"))
        raw = await exchange.read_body(options.max_body_bytes, options.body_timeout_s)
        request = parse(endpoint, raw, options.limits, from_router=self._has_key(exchange))
        internal = self._internal(request)
        state = self.said_state
        if state != "serving":
            raise unavailable(f"the worker is {state}", "draining" if state == "switching" else state)
        if request.model is not None and request.model != self.model_name:
            raise model_not_found(request.model, self.model_name)
        request_id = internal.request_id if internal is not None else secrets.token_hex(12)
        prompts = internal.prompt_token_ids if internal is not None else await self._tokenize(request)
        if internal is not None:
            request = with_internal(request, internal)
        sequences = resolve(request, prompts, self.worker.tokenizer, self.max_context, request_id, self._eos_token_ids)
        identity = Identity(request_id, echo, options.request_timeout_s)
        trace = self._trace(exchange, internal) if RECORDER.on else None
        if trace is not None:
            sequences = trace.follow(sequences)
        generation = Generation(self, exchange, request, internal, identity, sequences)
        generation.trace = trace
        with self._unique(internal):
            if trace is None:
                return await exchange.until_disconnect(generation.run())
            return await self._traced(trace, exchange.until_disconnect(generation.run()))

    @staticmethod
    def _trace(exchange: Exchange, internal: InternalRequest | None) -> WorkerTrace | None:
        """A router has decided already: what it sends without a trace is not recorded."""
        given = exchange.headers.get(TRACEPARENT)
        begun = RECORDER.begin(given) if given is not None or internal is None else None
        return None if begun is None else WorkerTrace(*begun)

    async def _traced(self, trace: WorkerTrace, work: Coroutine[Any, Any, str]) -> str:
        outcome = "cancelled"
        try:
            outcome = await work
            return outcome
        except ApiError:
            outcome = "error"
            raise
        finally:
            trace.end(self.worker.role, outcome)

    @staticmethod
    def _internal(request: ApiRequest) -> InternalRequest | None:
        internal = request.internal
        if internal is not None and len(internal.prompt_token_ids) != max(1, len(request.prompts)):
            raise bad_request("kvbaton.prompt_token_ids must have one list for each prompt", "kvbaton")
        if internal is not None and not is_header_word(internal.request_id.encode(errors="replace")):
            raise bad_request("kvbaton.request_id must be at most 128 visible ASCII characters", "kvbaton")
        return internal

    @contextlib.contextmanager
    def _unique(self, internal: InternalRequest | None):  # type: ignore[no-untyped-def]
        """Two calls with one internal id would share engine state: the second is refused."""
        if internal is None:
            yield
            return
        if internal.request_id in self._internal_ids:
            raise ApiError(409, "this request id is in flight already", param="kvbaton", code="duplicate_request")
        self._internal_ids.add(internal.request_id)
        try:
            yield
        finally:
            self._internal_ids.discard(internal.request_id)

    async def _tokenize(self, request: ApiRequest) -> list[Sequence[int]]:
        arguments = (request, self.worker.tokenizer, self.max_context, self.options.limits)
        if request.text_chars <= self.options.tokenize_inline_chars:
            return tokenize(*arguments)
        return await asyncio.to_thread(tokenize, *arguments)

    def observe(self, report: RequestReport, trace_id: str = "") -> None:
        """Phase times of one finished request."""
        role, path, observe = self.worker.role, report.path, self.metrics.observe
        if report.queue_s:  # other engines do not tell
            observe("kvbaton_worker_queue_seconds", role, path, value=report.queue_s, trace_id=trace_id)
        if report.prefill_s:
            observe("kvbaton_worker_prefill_seconds", role, path, value=report.prefill_s, trace_id=trace_id)
        if report.transfer_bytes and report.transfer_s:  # of another engine's transfer nobody tells the time
            observe("kvbaton_worker_transfer_seconds", role, value=report.transfer_s, trace_id=trace_id)
            observe("kvbaton_worker_exposed_transfer_seconds", role, value=report.exposed_s, trace_id=trace_id)
            rate = report.transfer_bytes / report.transfer_s
            observe("kvbaton_worker_transfer_bytes_per_second", role, value=rate)
        if report.first_step_s:  # it went on after its first token, and the engine says when
            observe("kvbaton_worker_first_step_seconds", role, path, value=report.first_step_s, trace_id=trace_id)
            if path == "remote":
                observe("kvbaton_worker_decode_queue_seconds", role, value=report.decode_queue_s, trace_id=trace_id)


def model_card(name: str, created_s: int, max_context: int) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "kvbaton",
        "max_model_len": max_context,
    }


def version_of(model: str, fingerprint: Fingerprint, block_size: int, max_context: int) -> dict[str, object]:
    return {
        "kvbaton": __version__,
        "model": model,
        "fingerprint": fingerprint,
        "block_size": block_size,
        "max_context": max_context,
    }
