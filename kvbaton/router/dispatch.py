"""Where a request goes, and what is done when an attempt fails: other workers, the line, one more attempt, replays.

Invariants: one worker at a time; once a byte of a stream went to the client nothing starts over: another worker goes on
behind it, or it ends with an error. Knows nothing about prompts, nor how a worker is called (``attempt``).
"""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec

from kvbaton.clock import Clock
from kvbaton.config import RouterSettings
from kvbaton.observe.metrics import Metrics
from kvbaton.router.attempt import Caller
from kvbaton.router.flight import AttemptFailed, Call, Flight, without_trace
from kvbaton.router.lifecycle import Event, State
from kvbaton.router.line import Line
from kvbaton.router.policy import Decision, NoWorker, PolicyConfig, decide
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.router.registry import Registry
from kvbaton.router.replay import continue_behind
from kvbaton.router.rollout import Rollout
from kvbaton.workers.http_client import HttpClient
from kvbaton.workers.journal import BadStream
from kvbaton.workers.openai_errors import ApiError, unavailable

log = logging.getLogger(__name__)
__all__ = ["AttemptFailed", "Call", "Dispatcher", "Flight"]


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
        self._settings = settings
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
        self._caller = Caller(registry, index, client, self._line, settings, key, metrics, clock)

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
                await self._caller.attempt(flight, call, decision, failed)
                return
            except AttemptFailed as failure:
                last = without_trace(failure)
            if last.cause == "no_capacity":  # nothing went wrong: ask the others, then wait
                flight.lifecycle.on(Event.DEFER)
                flight.decisions.pop()
                full |= {decision.decode}
                if not self._registry.another_answers(self._clock.now_s(), failed | full):
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
                pool = frozenset(member.name for member in self._registry.members if member.role == "prefill")
                if self._registry.another_answers(self._clock.now_s(), failed | pool):
                    failed |= pool

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
        try:
            resumed = flight.journal.read(whole.num_sequences)
        except BadStream as error:
            log.warning("request %s cannot be continued: %s", flight.request_id, error)
            raise last.error from None
        life.on(Event.RESUME)
        flight.may_queue_s = self._settings.queue_timeout_s
        rest = continue_behind(resumed, whole.internal, whole.view)
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
        if cause == "slow_first_token":  # which of the two was slow is not known; one to answer must be left
            both = frozenset({decision.prefill, decision.decode})
            others = self._registry.another_answers(self._clock.now_s(), failed | both)
            return both if others else frozenset({decision.prefill})
        return frozenset({decision.decode})

    async def _wait_for_room(self, flight: Flight, call: Call, error: ApiError) -> None:
        priority, had_its_turn = call.internal.priority, flight.queued_s > 0
        if had_its_turn:
            self._line.in_vain()
        # Neither a stream that goes on, nor one whose place was taken by another while it looked for room.
        may_be_refused = not flight.exchange.started and not had_its_turn
        waited_s = await self._line.wait(priority, flight.received_s, flight.may_queue_s, error, may_be_refused)
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
        except NoWorker as error:
            if last is not None:
                raise last.error from None
            raise unavailable(str(error), "no_workers", retry_after_s=2) from None
        if prefill_failed and not decision.remote and self._settings.on_prefill_failure == "error":
            assert last is not None
            raise last.error
        flight.decisions.append(decision)
        self._metrics.add("kvbaton_router_decisions_total", decision.reason)
        return decision
