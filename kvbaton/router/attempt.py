"""One attempt: a request at one worker, from the moment capacity is taken to the end of its answer.

Invariants: an answer passes unchanged, a stream only as whole events (``stream``), so that an error event can always
follow; what is held of workers is given back on whatever way the attempt ends; everything that waits for a worker has a
deadline; leaving by any way closes the connection to the worker, which aborts the work there. Knows nothing about
prompts, nor about what is done when an attempt failed (``dispatch``).
"""

from __future__ import annotations

import logging
from functools import partial

import aiohttp
import msgspec

from kvbaton.clock import Clock
from kvbaton.config import RouterSettings
from kvbaton.observe.metrics import Metrics
from kvbaton.router.flight import AttemptFailed, Call, Flight
from kvbaton.router.lifecycle import Event
from kvbaton.router.line import Line
from kvbaton.router.patience import Looks, Patience, SlownessBudget
from kvbaton.router.policy import Decision
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.router.registry import Hold, Member, Registry
from kvbaton.router.replay import REPLAYABLE
from kvbaton.router.splice import decode_error, read_report
from kvbaton.router.stream import Stream
from kvbaton.text.native_words import ids_as_json
from kvbaton.workers.generation import REPORT_HEADER
from kvbaton.workers.http import JSON_HEADER
from kvbaton.workers.http_client import HttpClient, Response
from kvbaton.workers.journal import BadStream
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER

log = logging.getLogger(__name__)
_ENCODER = msgspec.json.Encoder(enc_hook=lambda ids: msgspec.Raw(ids_as_json(ids)))
_MAX_ERROR_BYTES = 64 * 1024
OVERDUE_FROM_S = 0.25  # beyond twice the estimate a first token counts as late, and others keep away


class Caller:
    """Makes attempts."""

    def __init__(
        self,
        registry: Registry,
        index: PrefixIndex,
        client: HttpClient,
        line: Line,
        settings: RouterSettings,
        key: str,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._index = index
        self._client = client
        self._line = line
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._headers = {"content-type": "application/json", INTERNAL_KEY_HEADER.decode(): key}
        self._slowness, self._looks = SlownessBudget(), Looks()
        self._observe_gap = metrics.observer("kvbaton_router_itl_seconds")
        self._observe_overhead = metrics.observer("kvbaton_router_overhead_seconds")

    async def attempt(self, flight: Flight, call: Call, decision: Decision, failed: frozenset[str]) -> None:
        """Answer the request, or raise AttemptFailed. ``failed``: workers that need not be hoped for."""
        registry, index = self._registry, self._index
        target, prefill = registry.get(decision.decode), registry.get(decision.prefill or "")
        assert target is not None
        uncached = max(1, call.view.num_prompt_tokens - decision.foretold_cached_tokens)
        flight.lifecycle.on(Event.DISPATCH)
        flight.no_room = False
        flight.num_dispatched += 1
        if prefill is not None:
            # At once: those with the same prefix that queue behind it will find it there.
            index.record(prefill.name, call.prompts)
        expected = index.expect(target.name, call.prompts)
        if prefill is not None:
            expected += index.expect(prefill.name, call.prompts)
        due_s = None  # a whole answer shows nothing before its end
        if call.stream and decision.ttft_s is not None:
            due_s = self._clock.now_s() + 2 * decision.ttft_s + OVERDUE_FROM_S
        # The prompt waits where it is computed; both workers hold the request.
        if prefill is None:
            holds = [registry.hold(target, call.num_sequences, uncached, due_s, decision)]
        else:
            holds = [
                registry.hold(target, call.num_sequences, 0),
                registry.hold(prefill, call.num_sequences, uncached, due_s, decision),
            ]
        try:
            body = self._body(flight, call, prefill)
            self._slowness.earn()
            await self._send(flight, call, decision, body, holds, self._patience(flight, call, decision, failed))
        finally:
            if not flight.no_room:  # one that never got in gave nothing back: waking others would go round in circles
                self._line.freed()
            for hold in holds:
                hold.release()
            for each in expected:
                each.settle()

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

        def another_answers(but: str) -> bool:
            return self._registry.another_answers(self._clock.now_s(), failed | {but})

        def slow() -> bool:
            # Of a pair at least the decode worker can be asked again: one that does not prefill, if somebody else does.
            pair = decision.prefill is not None and (member is None or member.serves_alone)
            return (pair or another_answers(decision.prefill or decision.decode)) and self._slowness.spend()

        def hopeless() -> bool:
            # Two polls in a row, not one call that failed: a worker that drains accepts none and ends what it has.
            down = member is not None and member.state == "down" and member.failures_in_row > 1
            return down and another_answers(decision.decode)

        may_go_elsewhere = life.may_retry or life.replays_left
        return Patience(first_token_s, stall_s, slow, hopeless if may_go_elsewhere else None, self._looks)

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
            self._observe_overhead(flight.dispatched_s - flight.received_s)
        headers = {**call.forward_headers, **self._headers} if call.forward_headers else self._headers
        try:
            url = target.settings.url + call.path
            async with patience, self._client.post(url, data=body, headers=headers) as response:
                if response.status != 200:
                    raise await self._refused(flight, response, target, prefill)
                outgoing = self._response_headers(flight, decision)
                if call.stream:
                    stream = Stream(flight, response, patience, self._clock.now_s, self._observe_gap)
                    error = await stream.run(outgoing, partial(self._begins, flight, call, holds))
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
        except (aiohttp.ClientError, OSError, BadStream) as error:
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
        return b'%b,"kvbaton":%b}' % (call.raw_body.rstrip()[:-1], _ENCODER.encode(internal))

    def _prompt_computed(self, call: Call, holds: list[Hold]) -> None:
        """Only now can the worker that answers be said to hold the prompt."""
        for hold in holds:
            hold.first_token()
        self._line.freed()  # it got in; there may be room for one more
        self._index.record(holds[0].member.name, call.prompts)

    @staticmethod
    def _response_headers(flight: Flight, decision: Decision) -> list[tuple[bytes, bytes]]:
        headers = [
            *flight.response_headers,
            (b"x-kvbaton-decision", decision.reason.encode()),
            (b"x-kvbaton-decode", decision.decode.encode()),
        ]
        if decision.prefill is not None:
            headers.append((b"x-kvbaton-prefill", decision.prefill.encode()))
        return headers

    async def _refused(
        self, flight: Flight, response: Response, target: Member, prefill: Member | None
    ) -> AttemptFailed:
        """A worker's answer other than 200: the client's fault passes through, ours is tried elsewhere."""
        error = decode_error(response.status, await response.content.read(_MAX_ERROR_BYTES))
        retry_after = response.header(b"retry-after") or b""
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

    async def _whole(self, flight: Flight, response: Response, headers: list[tuple[bytes, bytes]]) -> None:
        body = await response.read()
        flight.report = read_report(response.header(REPORT_HEADER))
        flight.lifecycle.on(Event.COMPLETE)
        exchange = flight.exchange
        await exchange.start(200, [JSON_HEADER, (b"content-length", b"%d" % len(body)), *headers])
        if not exchange.put_now(body, False):
            await exchange.end(body)

    def _begins(self, flight: Flight, call: Call, holds: list[Hold], at_s: float) -> None:
        """The first part of a stream, or of what continues one."""
        flight.lifecycle.on(Event.FIRST_BYTES)
        self._prompt_computed(call, holds)
        if flight.first_byte_s is None:
            flight.first_byte_s = at_s
            waited_s = at_s - flight.received_s - flight.queued_s
            self._registry.measured.first_token(flight.decisions, waited_s, at_s)
        else:
            self._observe_gap(at_s - flight.last_part_s)
