"""One request on its way through the router: what a worker is asked, what became of it, and why an attempt failed.

Plain state without behaviour. Knows nothing about workers or sockets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypeVar

from kvbaton.router.lifecycle import Lifecycle
from kvbaton.router.policy import Decision, RequestView
from kvbaton.router.prefix_index import PromptChains
from kvbaton.router.replay import Journal
from kvbaton.workers.http import Exchange
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.protocol import InternalRequest, RequestReport


@dataclass(slots=True)
class Call:
    """What a worker is asked, whichever worker that will be. Never changed: a continued request gets another."""

    path: str
    raw_body: bytes
    internal: InternalRequest  # with ``prefill`` still open
    view: RequestView
    prompts: PromptChains
    num_sequences: int
    stream: bool
    forward_headers: dict[str, str]


@dataclass(slots=True)
class Flight:
    """One request: what became of it, and its times."""

    exchange: Exchange
    request_id: str
    received_s: float
    response_headers: list[tuple[bytes, bytes]]
    timeout_s: float = math.inf  # of the whole request
    tenant: str = ""  # whose API key it came with; empty: nobody's in particular
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


Failure = TypeVar("Failure", bound=Exception)


def without_trace(failure: Failure) -> Failure:
    """To be kept: an error that a frame it came through holds would be a cycle, and wait for the garbage collector."""
    failure.__traceback__ = failure.__context__ = failure.__cause__ = None
    return failure
