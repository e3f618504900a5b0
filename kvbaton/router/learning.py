"""The cost models of a fleet as they are learned: from reports of served requests, first tokens, and polls.

    worker   prefill = chunks x fixed + tokens x (token + context looked at x pair)   from reports of its prompts
             step    = fixed + streams x sequence + KV tokens x context               from its counters, poll to poll
             queue   measured wait over foretold wait                                 from reports
             slowdown   how much later than estimated its first tokens are just now   from first tokens
    link     exposed = alpha + bytes x (1/beta), less what prefill hides              from reports of hand-offs
    fleet    overheads by path, mean output                                           from reports

Each model starts from the prior (cold start, or a profile). A worker counts as the usual one, the median of those that
are known, until it has samples of its own, and again when those are old, so that one that was slow and lost its traffic
is tried again. ``slowdown`` reacts to single first tokens and fades in seconds, for the same end.

Invariants: pure, time is an argument; every parameter is finite and within physical limits; what ``costs`` returned is
never changed afterwards. Knows nothing about how a placement is chosen.
"""

from __future__ import annotations

from math import exp, log

import msgspec

from kvbaton.router.cost import FleetCosts, LinkCost, WorkerCost
from kvbaton.router.policy import Decision
from kvbaton.router.regression import START_WEIGHT, Regression
from kvbaton.router.views import MemberView
from kvbaton.workers.protocol import RequestReport, WorkerStats

# (lowest, highest) of what a machine can be: a step of 10 us to 10 s, a link of 100 kB/s to 10 TB/s.
_PREFILL_BOUNDS = ((0.0, 10.0), (1e-8, 1.0), (0.0, 1e-3))
_STEP_BOUNDS = ((1e-5, 10.0), (0.0, 1.0), (0.0, 1e-3))
_LINK_BOUNDS = ((0.0, 5.0), (1e-13, 1e-5))
_PAIR_SIZE_S = 1e-8  # usual sizes of parameters that may start at 0
_CONTEXT_SIZE_S = 1e-7
_STARTUP_SIZE_S = 1e-3
_TRUST_SAMPLES = 3.0  # of its own, from which a worker's model counts half
STALE_HALF_S = 60.0  # what it measured so long ago counts half
FADE_HALF_S = 5.0  # of the logarithm of a slowdown
_SLOW_FROM = 2.0  # times the estimate; less is noise
_SLOWEST = 64.0
_AFTER_RESTART = 0.01  # of the weight of what the life before showed
_TYPICAL_PREFILL = (1.0, 512.0, 512 * 256.0)  # what workers are compared by
_TYPICAL_STEP = (1.0, 8.0, 8_000.0)
_KNOWN_SAMPLES = 3
_REFRESH_S = 0.25  # how old what only time changes may be
_MOST_SUBTRACTED = 0.5  # of a measured time may be somebody else's work; beyond it says too little


class WorkerModel:
    """What is known of one worker."""

    def __init__(self, prior: WorkerCost, start_weight: float) -> None:
        self.prefill = Regression(
            (prior.prefill_fixed_s, prior.prefill_token_s, prior.prefill_pair_s),
            (max(prior.prefill_fixed_s, 1e-4), prior.prefill_token_s, max(prior.prefill_pair_s, _PAIR_SIZE_S)),
            _PREFILL_BOUNDS,
            start_weight,
        )
        self.step = Regression(
            (prior.step_fixed_s, prior.step_sequence_s, prior.step_context_s),
            (prior.step_fixed_s, max(prior.step_sequence_s, 1e-6), max(prior.step_context_s, _CONTEXT_SIZE_S)),
            _STEP_BOUNDS,
            start_weight,
        )
        self.queue_scale = prior.queue_scale
        self.prefilled_s = self.stepped_s = 0.0  # when the last sample came
        self.slow_log = 0.0  # of the slowdown, at ``slow_s``
        self.slow_s = 0.0

    def slowdown(self, now_s: float) -> float:
        return exp(self.slow_log * 0.5 ** (max(0.0, now_s - self.slow_s) / FADE_HALF_S)) if self.slow_log else 1.0

    def rows_s(self, streams: int, context_tokens: int) -> float:
        """What the streams of a worker add to a step."""
        if not streams:
            return 0.0
        _, sequence_s, context_s = self.step.parameters
        return streams * sequence_s + context_tokens * context_s


class Learning:
    def __init__(self, prior: FleetCosts | None = None, start_weight: float = START_WEIGHT) -> None:
        self._prior = prior or FleetCosts()
        self._start_weight = start_weight
        start = WorkerModel(self._prior.worker, start_weight)
        self._usual_prefill, self._usual_step = start.prefill.parameters, start.step.parameters
        self.workers: dict[str, WorkerModel] = {}
        self.links: dict[tuple[str, str], Regression] = {}
        self._costs = self._prior
        self._dirty: set[str] = set()
        self._refreshed_s = 0.0

    # -- what is known -----------------------------------------------------------------------------------------------

    def costs(self, now_s: float) -> FleetCosts:
        """For a decision now. The same object as long as nothing changed."""
        if now_s - self._refreshed_s >= _REFRESH_S or now_s < self._refreshed_s:
            self._refreshed_s = now_s
            self._dirty.update(self.workers)
            known = self.workers.values()
            self._usual_prefill = _median([m.prefill for m in known], _TYPICAL_PREFILL, self._usual_prefill)
            self._usual_step = _median([m.step for m in known], _TYPICAL_STEP, self._usual_step)
            usual = WorkerCost(*self._usual_prefill, *self._usual_step)  # type: ignore[call-arg]
            self._costs = msgspec.structs.replace(self._costs, worker=usual)
        if self._dirty:
            workers = dict(self._costs.workers)
            for name in self._dirty:
                model = self.workers.get(name)
                if model is None:
                    workers.pop(name, None)
                else:
                    workers[name] = self._worker_cost(model, now_s)
            self._dirty.clear()
            self._costs = msgspec.structs.replace(self._costs, workers=workers)
        return self._costs

    def _worker_cost(self, model: WorkerModel, now_s: float) -> WorkerCost:
        prefill = _blend(model.prefill, self._usual_prefill, now_s - model.prefilled_s)
        step = _blend(model.step, self._usual_step, now_s - model.stepped_s)
        fixed_s, token_s, pair_s = prefill
        step_s, sequence_s, context_s = step
        return WorkerCost(
            fixed_s, token_s, pair_s, step_s, sequence_s, context_s, model.queue_scale, model.slowdown(now_s)
        )

    def model_of(self, name: str) -> WorkerModel:
        model = self.workers.get(name)
        if model is None:
            self._dirty.add(name)
            model = self.workers[name] = WorkerModel(self._prior.worker, self._start_weight)
        return model

    # -- what was seen -----------------------------------------------------------------------------------------------

    def layout(self, token_bytes: int, num_layers: int) -> None:
        """What a hand-off moves, as the workers' fingerprint says."""
        if (token_bytes, num_layers) != (self._costs.token_bytes, self._costs.num_layers):
            self._costs = msgspec.structs.replace(self._costs, token_bytes=token_bytes, num_layers=num_layers)

    def restarted(self, name: str) -> None:
        """The same place, another process: probably as fast as before, but it has to show it."""
        model = self.workers.get(name)
        if model is not None:
            model.prefill.doubt(_AFTER_RESTART)
            model.step.doubt(_AFTER_RESTART)
            model.slow_log = 0.0
            self._dirty.add(name)

    def forget(self, name: str) -> None:
        self.workers.pop(name, None)
        self.links = {pair: link for pair, link in self.links.items() if name not in pair}
        self._dirty.add(name)
        self._publish_links()

    def first_token(self, decision: Decision, ttft_s: float, now_s: float) -> None:
        """How late it was. Far beyond the estimate, the worker that prefilled is slow just now."""
        expected_s = decision.ttft_s
        if expected_s is None:
            return
        name = decision.prefill or decision.decode
        model = self.model_of(name)
        had = decision.case.costs.workers.get(name)
        target = log(max(ttft_s, 1e-6) / max(expected_s, 1e-3)) + log(had.slowdown if had is not None else 1.0)
        if target < log(_SLOW_FROM):
            target = 0.0
        present = log(model.slowdown(now_s))
        if target or present > 1e-3:
            model.slow_log = min(log(_SLOWEST), present + 0.5 * (target - present))
            if model.slow_log < 0.05:
                model.slow_log = 0.0
            model.slow_s = now_s
            self._dirty.add(name)

    def served(self, decision: Decision, report: RequestReport, ttft_s: float | None, now_s: float) -> None:
        """A request of one sequence came to its end. ``ttft_s``: received to first byte, if it was a stream."""
        members = {member.name: member for member in decision.case.members}
        view = members[decision.prefill or decision.decode]
        tokens = max(1, report.num_prompt_tokens - report.num_cached_tokens)
        remote = report.path == "remote"
        if remote == decision.remote and report.prefill_s > 0:
            self._prefilled(view, tokens, report, now_s, 0 if remote else min(view.num_requests, view.max_running))
            self._waited(view.name, decision, report.queue_s)
            if ttft_s is not None:
                self._overhead(remote, ttft_s - report.queue_s - report.prefill_s)
        if remote and decision.prefill is not None and report.transfer_bytes:
            self._moved(decision.prefill, decision.decode, report)
        if report.num_output_tokens > 0:
            mean = self._costs.output_tokens
            mean += 0.02 * (min(report.num_output_tokens, 8 * mean) - mean)
            self._costs = msgspec.structs.replace(self._costs, output_tokens=max(1.0, mean))

    def _prefilled(self, view: MemberView, tokens: int, report: RequestReport, now_s: float, streams: int) -> None:
        model = self.model_of(view.name)
        chunks = -(-tokens // max(1, view.chunk_tokens - streams))
        others_s = chunks * model.rows_s(streams, view.context_tokens)
        if others_s > _MOST_SUBTRACTED * report.prefill_s:
            return
        features = (chunks, tokens, tokens * (report.num_prompt_tokens - tokens / 2))
        model.prefill.add(features, report.prefill_s - others_s)
        model.prefilled_s = now_s
        self._dirty.add(view.name)

    def _waited(self, name: str, decision: Decision, queue_s: float) -> None:
        expected_s = decision.terms.get("queue_s", 0.0)
        if expected_s < 0.005:  # the rest of a step under way, at most: says nothing about the queue
            return
        model = self.model_of(name)
        off = min(max(log(max(queue_s, 1e-4) / expected_s), -1.0), 1.0)
        model.queue_scale = min(max(model.queue_scale * exp(0.05 * off), 0.25), 4.0)
        self._dirty.add(name)

    def _overhead(self, remote: bool, overhead_s: float) -> None:
        name = "overhead_remote_s" if remote else "overhead_local_s"
        present_s: float = getattr(self._costs, name)
        off_s = min(max(overhead_s - present_s, -present_s), 2 * present_s + 1e-4)
        changed = {name: min(max(present_s + 0.05 * off_s, 1e-5), 5.0)}
        self._costs = msgspec.structs.replace(self._costs, **changed)

    def _moved(self, prefill: str, decode: str, report: RequestReport) -> None:
        link = self.links.get((prefill, decode))
        if link is None:
            known = self._costs.links.get(prefill, {}).get(decode, self._costs.link)
            start = (known.startup_s, known.byte_s)
            sizes = (max(known.startup_s, _STARTUP_SIZE_S), known.byte_s)
            link = self.links[prefill, decode] = Regression(start, sizes, _LINK_BOUNDS, self._start_weight)
        layers = self._costs.num_layers
        hidden_s = report.prefill_s * (1 - 1 / layers)
        carry_s = report.transfer_bytes * link.parameters[1]
        if carry_s / layers >= carry_s - hidden_s:  # only the last layer shows
            link.add((1.0, report.transfer_bytes / layers), report.exposed_s)
        else:
            link.add((1.0, report.transfer_bytes), report.exposed_s + hidden_s)
        self._publish_links()

    def _publish_links(self) -> None:
        links: dict[str, dict[str, LinkCost]] = {}
        for (prefill, decode), link in self.links.items():
            links.setdefault(prefill, {})[decode] = LinkCost(*link.parameters)
        self._costs = msgspec.structs.replace(self._costs, links=links)

    def polled(self, name: str, before: WorkerStats, after: WorkerStats, block_size: int, now_s: float) -> None:
        """What a worker that decodes did between two polls of one life: the mean step."""
        steps = after.num_steps - before.num_steps
        rows = after.num_output_tokens - before.num_output_tokens
        busy_s = after.prefill_busy_s + after.decode_busy_s - before.prefill_busy_s - before.decode_busy_s
        if steps <= 0 or rows <= 0 or busy_s <= 0:
            return
        model = self.model_of(name)
        prompt_s = (after.num_prompt_tokens - before.num_prompt_tokens) * model.prefill.parameters[1]
        if prompt_s > _MOST_SUBTRACTED * busy_s:
            return
        context_tokens = (before.num_blocks_used + after.num_blocks_used) / 2 * block_size
        model.step.add((1.0, rows / steps, context_tokens), (busy_s - prompt_s) / steps)
        model.stepped_s = now_s
        self._dirty.add(name)


def _median(models: list[Regression], typical: tuple[float, ...], otherwise: tuple[float, ...]) -> tuple[float, ...]:
    """Parameters of the middle one of those that are known, of two the faster."""
    known = sorted((m for m in models if m.count >= _KNOWN_SAMPLES), key=lambda m: m.expect(typical))
    return known[(len(known) - 1) // 2].parameters if known else otherwise


def _blend(own: Regression, usual: tuple[float, ...], age_s: float) -> tuple[float, ...]:
    """A worker's own parameters as far as they are known and fresh, the usual ones for the rest."""
    if not own.count:
        return usual
    trust = own.count / (own.count + _TRUST_SAMPLES) * 0.5 ** (max(0.0, age_s) / STALE_HALF_S)
    return tuple(trust * mine + (1.0 - trust) * theirs for mine, theirs in zip(own.parameters, usual, strict=True))
