"""What the log keeps of a request. Knows nothing about how it is written."""

from __future__ import annotations

import msgspec

from kvbaton.router.explain import brief
from kvbaton.router.flight import Flight
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.openai_request import Endpoint


def record_of(flight: Flight, endpoint: Endpoint, failure: ApiError | None, now_s: float) -> dict[str, object]:
    """What the log keeps of a request: the decision with all its terms, the outcome, and the times."""

    def since_ms(at_s: float | None) -> float | None:
        return None if at_s is None else round((at_s - flight.received_s) * 1e3, 3)

    decided: dict[str, object] = {
        "decision": "none", "prefill": None, "decode": None, "terms": {}, "route": None, "foretold_cached_tokens": 0,
    }  # fmt: skip
    if flight.decisions:
        decision = flight.decisions[-1]
        decided = {
            "decision": decision.reason,
            "prefill": decision.prefill,
            "decode": decision.decode,
            "terms": decision.terms,
            "route": brief(decision),
            "foretold_cached_tokens": decision.foretold_cached_tokens,
        }
    failed: list[dict[str, object]] = []
    if flight.causes:
        failed = [
            {"decision": d.reason, "prefill": d.prefill, "decode": d.decode, "cause": cause}
            for d, cause in zip(flight.decisions, flight.causes, strict=False)
        ]
    return {
        "request_id": flight.request_id,
        "client_request_id": flight.client_request_id,
        "tenant": flight.tenant,
        "endpoint": endpoint,
        "outcome": flight.lifecycle.outcome,
        "states": flight.lifecycle.states,
        **decided,
        "failed_attempts": failed,
        "error": {"status": failure.status, "code": failure.code, "message": failure.message} if failure else None,
        "report": msgspec.to_builtins(flight.report) if flight.report is not None else None,
        "queued_ms": round(flight.queued_s * 1e3, 3),
        "dispatched_ms": since_ms(flight.dispatched_s),
        "first_byte_ms": since_ms(flight.first_byte_s),
        "ended_ms": since_ms(now_s),
    }
