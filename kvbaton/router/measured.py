"""Where estimates meet what happened: feeds the cost models, and exports them with their errors.

Invariants: only requests of one attempt and one sequence teach anything; the estimate a request is held against is the
one it was routed by. A worker that is well known is learned from now and then, not from each of thousands of requests a
second, which tell the same and would cost a router more than deciding does. Knows nothing about how models learn
(``learning``).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.observe.metrics import Metrics
from kvbaton.router.learning import Learning
from kvbaton.router.policy import Decision
from kvbaton.types import Fingerprint
from kvbaton.workers.protocol import RequestReport, WorkerInfo

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # anything else is an 8-bit format
_WORKER_PARAMETERS = (
    "prefill_fixed_s",
    "prefill_token_s",
    "prefill_pair_s",
    "step_fixed_s",
    "step_sequence_s",
    "step_context_s",
    "queue_scale",
    "slowdown",
)
_LINK_PARAMETERS = ("startup_s", "byte_s")
_WELL_KNOWN = 256  # lessons of a worker from which on the next may have to wait ...
_PAUSE_S = 0.02  # ... since the last one


class Measured:
    def __init__(self, learning: Learning, metrics: Metrics) -> None:
        self.learning = learning
        self._metrics = metrics
        self._exported: set[tuple[str, ...]] = set()  # metric and labels of the series there are
        self._lessons: dict[str, tuple[int, float]] = {}  # of each worker that prefilled: how many, when the last one

    # -- what comes in -----------------------------------------------------------------------------------------------

    def polled(self, name: str, before: WorkerInfo | None, now: WorkerInfo, now_s: float) -> None:
        """A worker answered a poll."""
        self.learning.layout(token_bytes(now.fingerprint), now.fingerprint.num_layers)
        if before is None:
            self.learning.model_of(name)
        elif before.incarnation != now.incarnation:
            self.learning.restarted(name)
            self._lessons.pop(name, None)
        elif now.role != "prefill":
            self.learning.polled(name, before.stats, now.stats, now.block_size, now_s)

    def first_token(self, decisions: Sequence[Decision], ttft_s: float, now_s: float) -> None:
        """Of a stream: the time since it came, without what it waited for room."""
        if len(decisions) != 1 or decisions[0].case.request.num_sequences != 1:
            return
        decision = decisions[0]
        if decision.ttft_s is not None:
            path = "remote" if decision.remote else "local"
            off = abs(decision.ttft_s - ttft_s) / max(ttft_s, 1e-6)
            self._metrics.observe("kvbaton_router_ttft_estimate_error_ratio", path, value=off)
        self.learning.first_token(decision, ttft_s, now_s)

    def served(self, decisions: Sequence[Decision], report: RequestReport, ttft_s: float | None, now_s: float) -> None:
        """It ended well. ``ttft_s`` as above, if it was a stream."""
        if len(decisions) != 1 or decisions[0].case.request.num_sequences != 1:
            return
        decision = decisions[0]
        name = decision.prefill or decision.decode
        count, last_s = self._lessons.get(name, (0, 0.0))
        if count >= _WELL_KNOWN and 0.0 <= now_s - last_s < _PAUSE_S:
            return
        self._lessons[name] = (count + 1, now_s)
        self.learning.served(decision, report, ttft_s, now_s)

    def arm(self, decision: Decision, ttft_s: float | None, tpot_s: float | None) -> None:
        """Both arms of a rollout, of streams that it could have sent either way."""
        if decision.arm == "none":
            return
        if ttft_s is not None:
            self._metrics.observe("kvbaton_router_arm_ttft_seconds", decision.arm, value=ttft_s)
        if tpot_s is not None:
            self._metrics.observe("kvbaton_router_arm_tpot_seconds", decision.arm, value=tpot_s)

    def forget(self, name: str) -> None:
        self.learning.forget(name)
        self._lessons.pop(name, None)
        for series in [s for s in self._exported if name in s[1:]]:
            self._exported.discard(series)
            self._metrics.forget(*series)

    # -- what goes out -----------------------------------------------------------------------------------------------

    def export(self, now_s: float) -> None:
        """Bring the gauges up to date, before a scrape."""
        costs = self.learning.costs(now_s)
        for name, model in self.learning.workers.items():
            cost = costs.workers[name]
            for parameter in _WORKER_PARAMETERS:
                self._set("kvbaton_router_model_parameter", name, parameter, value=getattr(cost, parameter))
            for kind, regression in (("prefill", model.prefill), ("step", model.step)):
                self._set("kvbaton_router_model_samples", name, kind, value=regression.count)
                self._set("kvbaton_router_model_error_ratio", name, kind, value=regression.error)
        for (prefill, decode), link in self.learning.links.items():
            for parameter, value in zip(_LINK_PARAMETERS, link.parameters, strict=True):
                self._set("kvbaton_router_link_parameter", prefill, decode, parameter, value=value)
            self._set("kvbaton_router_link_error_ratio", prefill, decode, value=link.error)

    def _set(self, metric: str, *labels: str, value: float) -> None:
        self._exported.add((metric, *labels))
        self._metrics.set(metric, *labels, value=value)


def token_bytes(fingerprint: Fingerprint) -> int:
    """KV of one token on the wire."""
    per_value = _DTYPE_BYTES.get(fingerprint.kv_dtype, 1)
    return 2 * fingerprint.num_layers * fingerprint.num_kv_heads * fingerprint.head_dim * per_value
