"""One request to one worker at a time: the call, the splice of its answer, one more attempt, and replays.

Invariants: bytes of an answer pass unchanged and only as whole SSE events, so that an error event can always follow;
once a byte of a stream went to the client nothing starts over: another worker goes on behind it, or it ends with an
error; everything that waits for a worker has a deadline; leaving by any way closes the connection to the worker, which
aborts the work there. Knows nothing about prompts.
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import dataclass, field, replace

import aiohttp
import msgspec

from kvbaton.clock import Clock
from kvbaton.config import RouterSettings
from kvbaton.observe.metrics import Metrics
from kvbaton.router.lifecycle import Event, Lifecycle, State
from kvbaton.router.line import Line
from kvbaton.router.patience import Patience, SlownessBudget
from kvbaton.router.policy import Decision, NoWorker, PolicyConfig, RequestView, decide
from kvbaton.router.prefix_index import PrefixIndex, PromptChains
from kvbaton.router.registry import Hold, Member, Registry
from kvbaton.router.replay import REPLAYABLE, Journal, continue_behind
from kvbaton.router.rollout import Rollout
from kvbaton.router.splice import decode_error, read_report, take_error, take_report, whole_events
from kvbaton.workers.generation import JOURNAL_HEADER, REPORT_HEADER
from kvbaton.workers.http import JSON_HEADER, SSE_HEADERS, Exchange, Headers
from kvbaton.workers.http_client import HttpClient, Response
from kvbaton.workers.openai_errors import ApiError, unavailable
from kvbaton.workers.openai_response import DONE, ERROR_MARK, REPORT_PREFIX
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER, InternalRequest, RequestReport

log = logging.getLogger(__name__)
_ENCODER = msgspec.json.Encoder()
_MAX_ERROR_BYTES = 64 * 1024
OVERDUE_FROM_S = 0.25  # beyond twice the estimate a first token counts as late, and others keep away


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
    timeout_s: float = math.inf  # of the whole request
    client_request_id: str | None = None  # for the log and the echo; never a key
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    decisions: list[Decision] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)  # why attempts failed
    cached_tokens: dict[str, int] = field(default_factory=dict)  # foretold, by worker
    report: RequestReport | None = None
    journal: Journal = field(default_factory=Journal)
    num_dispatched: int = 0  # calls made, deferred ones too
    queued_s: float = 0.0  # waited for room
    may_queue_s: float = 0.0  # and may still wait
    no_room: bool = False  # the present attempt was refused for want of it
    dispatched_s: float | None = None
    first_byte_s: float | None = None
    last_part_s: float = 0.0

    @property
    def reason(self) -> str:
        return self.decisions[-1].reason if self.decisions else "none"


class AttemptFailed(Exception):
    """An attempt ended before its answer did."""

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
        client: HttpClient,
        settings: RouterSettings,
        key: str,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._index = index
        self._client = client
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
        self._line = Line(settings, metrics, clock)
        self._slowness = SlownessBudget()

    async def run(self, flight: Flight, call: Call) -> None:
        """Answer the request, or raise ApiError: the answer, or the last event of a stream that has begun."""
        flight.cached_tokens = self._registry.cached_tokens(call.prompts)
        whole, flight.may_queue_s = call, self._settings.queue_timeout_s
        failed: frozenset[str] = frozenset()  # for good
        full: frozenset[str] = frozenset()  # until the next turn
        prefill_failed = False
        last: AttemptFailed | None = None
        if self._line.num_waiting:  # others came first
            await self._wait_for_room(flight, call, self._line.busy())
        while True:
            decision = self._decide(flight, call, failed | full, prefill_failed, last)
            try:
                await self._attempt(flight, call, decision, failed)
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
            if flight.lifecycle.state is State.STREAMING:  # it went well for a while: others may be back
                failed = frozenset()
            call = self._once_more(flight, whole, last)
            prefill_failed = last.cause == "prefill_failed"
            failed |= self._blamed(decision, last.cause, failed)
            if flight.causes.count("prefill_failed") >= 2:  # enough of it: the rest is done where it decodes
                failed |= {member.name for member in self._registry.members if member.role == "prefill"}

    def _once_more(self, flight: Flight, whole: Call, last: AttemptFailed) -> Call:
        """What the next worker is asked, or the error when nobody shall be."""
        life = flight.lifecycle
        if not flight.exchange.started:
            if self._costs_nothing(flight, last):
                life.on(Event.DEFER)
            elif not last.elsewhere or not life.may_retry:
                raise last.error
            else:
                life.on(Event.RETRY)
            self._metrics.add("kvbaton_router_retries_total", last.cause)
            flight.journal.clear()
            return whole
        if not last.elsewhere or not life.may_resume or not flight.journal.complete:
            raise last.error
        life.on(Event.RESUME)
        flight.may_queue_s = self._settings.queue_timeout_s
        rest = continue_behind(flight.journal.read(whole.num_sequences), whole.internal, whole.view)
        self._metrics.add("kvbaton_router_replays_total", last.cause)
        self._metrics.add("kvbaton_router_replayed_tokens_total", amount=rest.num_replayed_tokens)
        return replace(whole, internal=rest.internal, view=rest.view, num_sequences=rest.num_sequences)

    @staticmethod
    def _costs_nothing(flight: Flight, last: AttemptFailed) -> bool:
        """No retry: a worker that never heard of it, or local work after a second failed hand-off."""
        again = last.cause == "prefill_failed" and flight.causes.count("prefill_failed") == 2
        return last.cause == "unreachable" or (again and last.elsewhere)

    def _blamed(self, decision: Decision, cause: str, failed: frozenset[str]) -> frozenset[str]:
        """The workers that are not asked again by this request."""
        if decision.prefill is None:
            return frozenset({decision.decode})
        if cause == "prefill_failed":
            return frozenset({decision.prefill})
        if cause == "slow_first_token":  # which of the two was slow is not known; one to decode must be left
            both = frozenset({decision.prefill, decision.decode})
            others = self._registry.another_decodes(self._clock.now_s(), failed | both)
            return both if others else frozenset({decision.prefill})
        return frozenset({decision.decode})

    def _gave_back(self, flight: Flight) -> None:
        """An attempt ended. One that never got in gave nothing back: waking others for it would go round in circles."""
        if not flight.no_room:
            self._line.freed()

    async def _wait_for_room(self, flight: Flight, call: Call, error: ApiError) -> None:
        going_on, priority = flight.exchange.started, call.internal.priority
        if flight.queued_s:
            self._line.in_vain()
        waited_s = await self._line.wait(priority, flight.received_s, flight.may_queue_s, error, not going_on)
        flight.queued_s += waited_s
        flight.may_queue_s = max(0.0, flight.may_queue_s - waited_s)

    def check_line(self, flight: Flight, priority: int) -> None:
        """Refuse what could only queue in vain, before anything is spent on it."""
        if self._line.num_waiting:
            self._line.check(priority, flight.received_s, self._settings.queue_timeout_s)

    @property
    def num_queued(self) -> int:
        return self._line.num_waiting

    def export(self) -> None:
        self._metrics.set("kvbaton_router_queued_requests", value=self.num_queued)
        self._metrics.set("kvbaton_router_disagg_percent", value=self.policy.disagg_percent)

    def roll_out(self, rollout: Rollout) -> None:
        """From the next decision on."""
        self.policy = msgspec.structs.replace(self.policy, disagg_percent=rollout.disagg_percent)

    def _decide(
        self, flight: Flight, call: Call, excluded: frozenset[str], prefill_failed: bool, last: AttemptFailed | None
    ) -> Decision:
        self._turn += 1
        registry, now_s = self._registry, self._clock.now_s()
        members, costs = registry.views(flight.cached_tokens, now_s, excluded), registry.measured.learning.costs(now_s)
        try:
            decision = decide(
                call.view, members, self.policy, self._turn, registry.has_prefill_pool, prefill_failed, costs
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

    async def _attempt(self, flight: Flight, call: Call, decision: Decision, failed: frozenset[str]) -> None:
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
            due_s = None  # a whole answer shows nothing before its end
            if call.stream and decision.ttft_s is not None:
                due_s = self._clock.now_s() + 2 * decision.ttft_s + OVERDUE_FROM_S
            here = (uncached, due_s) if prefill is None else (0, None)
            holds = [held.enter_context(self._registry.hold(target, call.num_sequences, *here))]
            if prefill is not None:
                holds.append(held.enter_context(self._registry.hold(prefill, call.num_sequences, uncached, due_s)))
            body = self._body(flight, call, prefill)
            held.callback(self._gave_back, flight)
            self._slowness.earn()
            patience = self._patience(flight, call, decision, failed)
            await self._send(flight, call, decision, body, holds, patience)

    def _patience(self, flight: Flight, call: Call, decision: Decision, failed: frozenset[str]) -> Patience:
        """Only where somebody else could be asked, and only of streams: a whole answer shows nothing before its end."""
        settings, life = self._settings, flight.lifecycle
        first_token_s = stall_s = None
        if call.stream and settings.first_token_factor and (life.may_retry or life.may_resume):
            # A policy that makes no estimate: as if it had foretold the least.
            estimate_s = settings.first_token_min_s if decision.ttft_s is None else decision.ttft_s
            first_token_s = max(settings.first_token_min_s, settings.first_token_factor * estimate_s)
        if call.internal.journal and life.replays_left and settings.stream_stall_s:
            stall_s = settings.stream_stall_s
        member = self._registry.get(decision.decode)  # one that leaves the fleet meanwhile may end what it has

        def another_decodes() -> bool:
            return self._registry.another_decodes(self._clock.now_s(), failed | {decision.decode})

        def slow() -> bool:
            return (decision.remote or another_decodes()) and self._slowness.spend()

        def hopeless() -> bool:
            # Two polls in a row, not one call that failed: a worker that drains accepts none and ends what it has.
            down = member is not None and member.state == "down" and member.failures_in_row > 1
            return down and another_decodes()

        may_go_elsewhere = life.may_retry or life.replays_left
        return Patience(first_token_s, stall_s, slow, hopeless if may_go_elsewhere else None)

    async def _send(
        self,
        flight: Flight,
        call: Call,
        decision: Decision,
        body: bytes,
        holds: list[Hold],
        patience: Patience,
    ) -> None:
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
            url = target.settings.url + call.path
            async with patience, self._client.post(url, data=body, headers=headers) as response:
                if response.status != 200:
                    raise await self._refused(flight, response, target, prefill)
                outgoing = self._response_headers(flight, decision)
                if call.stream:
                    error = await self._splice(flight, call, response, outgoing, holds, patience)
                    if error is not None:
                        raise self._broke(error, target, prefill)
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
            if patience.cause == "down":
                raise self._lost(flight, "down", "the worker went away") from None
            if patience.cause is not None:
                slow = prefill if prefill is not None and not patience.begun else target
                self._registry.call_failed(slow, patience.cause, self._clock.now_s())
                raise self._lost(flight, patience.cause, "the worker did not answer in time", status=504) from None
            self._registry.call_failed(target, "timeout", self._clock.now_s())
            raise self._lost(flight, "worker_timeout", "the worker did not answer in time", status=504) from None
        except (aiohttp.ClientError, OSError) as error:
            log.warning("call to %s failed: %s: %s", target.name, type(error).__name__, error)
            self._registry.call_failed(target, "connection_lost", self._clock.now_s())
            raise self._lost(flight, "worker_error", "the worker went away") from None

    def _lost(self, flight: Flight, cause: str, message: str, status: int = 502) -> AttemptFailed:
        # A worker that let its deadline pass has used up the client's patience too: no second attempt.
        code = {504: "worker_timeout"}.get(status, "worker_error" if cause == "down" else cause)
        error = ApiError(status, message, type="server_error", code=code)
        return AttemptFailed(cause, error, elsewhere=cause != "worker_timeout")

    def _broke(self, error: ApiError, target: Member, prefill: Member | None) -> AttemptFailed:
        """A worker's error inside its stream."""
        cause, now_s = "worker_error", self._clock.now_s()
        if error.code == "prefill_failed" and prefill is not None:
            cause = "prefill_failed"
            self._registry.call_failed(prefill, cause, now_s)
        elif error.code == "draining":
            cause = "draining"
            self._registry.says_draining(target)
        else:
            self._registry.call_failed(target, cause, now_s)
        return AttemptFailed(cause, error, elsewhere=error.code in REPLAYABLE)

    def _body(self, flight: Flight, call: Call, prefill: Member | None) -> bytes:
        """The client's bytes with our object as the last member: of two with one name the last counts."""
        left_s = min(flight.timeout_s, self._settings.request_timeout_s) - (self._clock.now_s() - flight.received_s)
        address = self._registry.peer_address(prefill) if prefill is not None else None
        # An id of its own for each attempt: what is left of an earlier one on some worker must not be in its way.
        attempt = flight.num_dispatched
        internal = msgspec.structs.replace(
            call.internal,
            request_id=flight.request_id if attempt == 1 else f"{flight.request_id}-{attempt}",
            prefill=address,
            deadline_s=max(0.1, left_s),
            answer_id="" if attempt == 1 else flight.request_id,
        )
        return call.raw_body.rstrip()[:-1] + b',"kvbaton":' + _ENCODER.encode(internal) + b"}"

    def _prompt_computed(self, call: Call, holds: list[Hold]) -> None:
        """Only now can the worker that answers be said to hold the prompt."""
        for hold in holds:
            hold.first_token()
        self._line.freed()  # it got in; there may be room for one more
        self._index.record(holds[0].member.name, call.prompts)

    def _response_headers(self, flight: Flight, decision: Decision) -> Headers:
        ours = [(b"x-kvbaton-decision", decision.reason.encode()), (b"x-kvbaton-decode", decision.decode.encode())]
        if decision.prefill is not None:
            ours.append((b"x-kvbaton-prefill", decision.prefill.encode()))
        return [*flight.response_headers, *ours]

    async def _refused(
        self, flight: Flight, response: Response, target: Member, prefill: Member | None
    ) -> AttemptFailed:
        """A worker's answer other than 200: the client's fault passes through, ours is tried elsewhere."""
        error = decode_error(response.status, await response.content.read(_MAX_ERROR_BYTES))
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
            return AttemptFailed("no_capacity", self._line.busy() if error.code == "no_capacity" else error, True)
        if error.status < 500 and error.status != 409:
            return AttemptFailed("refused", error, elsewhere=False)
        self._registry.call_failed(target, "worker_error", now_s)
        error.status = 502 if error.status == 500 else error.status  # a 500 of ours would be a bug of the router
        return AttemptFailed("worker_error", error, elsewhere=error.status != 504)

    async def _whole(self, flight: Flight, response: Response, headers: Headers) -> None:
        body = await response.read()
        flight.report = read_report(response.headers.get(REPORT_HEADER.decode()))
        flight.lifecycle.on(Event.COMPLETE)
        length = (b"content-length", b"%d" % len(body))
        await flight.exchange.start(200, [JSON_HEADER, length, *headers])
        await flight.exchange.end(body)

    async def _splice(
        self,
        flight: Flight,
        call: Call,
        response: Response,
        headers: Headers,
        holds: list[Hold],
        patience: Patience,
    ) -> ApiError | None:
        """Pass events on as they come; the worker's error, if the stream ends with one.

        What follows the last whole event waits for the rest of it.
        """
        exchange, now_s = flight.exchange, self._clock.now_s
        observe_gap = self._metrics.observer("kvbaton_router_itl_seconds")
        journal = flight.journal if JOURNAL_HEADER[0].decode() in response.headers else None
        if journal is None:
            patience.waits_for_ever()  # nobody could go on
        begun, held = False, b""
        async for arrived in response.content.iter_any():
            part, held = whole_events(held + arrived if held else arrived)
            if not part:
                continue
            patience.sign_of_life()
            part, error = _for_client(flight, journal, part)
            if part:
                at_s = now_s()
                if not begun:
                    begun = True
                    flight.lifecycle.on(Event.FIRST_BYTES)
                    self._prompt_computed(call, holds)
                if flight.first_byte_s is None:
                    flight.first_byte_s = at_s
                    waited_s = at_s - flight.received_s - flight.queued_s
                    self._registry.measured.first_token(flight.decisions, waited_s, at_s)
                else:
                    observe_gap(at_s - flight.last_part_s)
                flight.last_part_s = at_s
                if ended := part.endswith(DONE):
                    flight.lifecycle.on(Event.COMPLETE)
                with patience.passing_on():
                    if not exchange.started:
                        await exchange.start(200, [*SSE_HEADERS, *headers])
                    await (exchange.end(part) if ended else exchange.write(part))
                if ended:
                    return None
            if error is not None:
                return error
        raise aiohttp.ClientPayloadError("the stream ended without its end mark")


def _for_client(flight: Flight, journal: Journal | None, part: bytes) -> tuple[bytes, ApiError | None]:
    """What of these events is the client's, and the error they end with. The rest is kept in ``flight``."""
    error = None
    if REPORT_PREFIX in part:
        part, flight.report = take_report(part, flight.report)
    if ERROR_MARK in part:
        part, error = take_error(part)
    if journal is not None:
        part = journal.take(part)
    elif part:
        flight.journal.complete = False
    return part, error
