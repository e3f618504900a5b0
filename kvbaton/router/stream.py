"""A worker's event stream on its way to the client, part by part.

Ordinary parts pass from socket to socket in one call, without waking the request's task; whatever is special (the
first, the last, a report, an error, half an event, a client that does not read) is the task's. Invariants: only whole
SSE events pass, unchanged but for our own comments, in order; a part is passed on once; nothing behind the end mark
passes; an event that does not end breaks the stream instead of growing. Knows nothing about how a
worker was chosen or what follows an error.
"""

from __future__ import annotations

from collections.abc import Callable

import aiohttp

from kvbaton.router.flight import Flight
from kvbaton.router.lifecycle import Event
from kvbaton.router.patience import Patience
from kvbaton.router.replay import Journal
from kvbaton.router.splice import take_error, take_report, until_end, whole_events
from kvbaton.workers.generation import JOURNAL_HEADER
from kvbaton.workers.http import SSE_HEADERS, Headers
from kvbaton.workers.http_client import Response
from kvbaton.workers.journal import BadStream
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.openai_response import DONE, ERROR_MARK, REPORT_PREFIX

MAX_EVENT_BYTES = 4 * 1024 * 1024  # far more than one token of all choices with all their logprobs


class Stream:
    def __init__(
        self,
        flight: Flight,
        response: Response,
        patience: Patience,
        now_s: Callable[[], float],
        observe_gap: Callable[[float], None],
    ) -> None:
        self._flight = flight
        self._exchange = flight.exchange
        self._response = response
        self._patience = patience
        self._now_s = now_s
        self._observe_gap = observe_gap
        self._journal: Journal | None = flight.journal
        if response.header(JOURNAL_HEADER[0]) is None:
            self._journal = None
            patience.waits_for_ever()  # nobody could go on
        self._held = b""  # the beginning of an event that is not complete

    async def run(self, headers: Headers, begins: Callable[[float], None]) -> ApiError | None:
        """Until its end; the worker's error, if it ends with one. ``begins`` is told when its first part is here.

        What follows the last whole event waits for the rest of it.
        """
        flight, exchange, begun = self._flight, self._exchange, False
        take = self._response.take
        while arrived := await take():
            part, self._held = whole_events(self._held + arrived if self._held else arrived)
            if len(self._held) > MAX_EVENT_BYTES:
                raise BadStream(f"an event of the worker's has {len(self._held)} bytes and no end")
            if not part:
                continue
            self._patience.sign_of_life()
            part, ended = until_end(part)
            part, error = self._for_client(part)
            ended = ended and error is None
            if part:
                at_s = self._now_s()
                if begun:
                    self._observe_gap(at_s - flight.last_part_s)
                else:
                    begun = True
                    begins(at_s)
                    self._response.passes_to(self._pass)
                flight.last_part_s = at_s
                if ended:
                    flight.lifecycle.on(Event.COMPLETE)
                if not exchange.started:
                    await exchange.start(200, [*SSE_HEADERS, *headers])
                if not exchange.put_now(part, not ended):
                    with self._patience.passing_on():
                        await (exchange.end(part) if ended else exchange.write(part))
                if ended:
                    return None
            if error is not None:
                return error
        raise aiohttp.ClientPayloadError("the stream ended without its end mark")

    def _pass(self, part: bytes) -> bool:
        """Straight on to the client. False, and nothing happened, when there is more to it."""
        if (
            self._held
            or not part.endswith(b"\n\n")
            or REPORT_PREFIX in part
            or ERROR_MARK in part
            or DONE in part
            or not self._exchange.may_put_now
        ):
            return False
        self._patience.sign_of_life()
        if self._journal is not None:
            part = self._journal.take(part)
            if not part:
                return True
        flight, at_s = self._flight, self._now_s()
        self._observe_gap(at_s - flight.last_part_s)
        flight.last_part_s = at_s
        self._exchange.put_now(part, True)
        return True

    def _for_client(self, part: bytes) -> tuple[bytes, ApiError | None]:
        """What of these events is the client's, and the error they end with. The rest is kept in the flight."""
        flight, error = self._flight, None
        if REPORT_PREFIX in part:
            part, flight.report = take_report(part, flight.report)
        if ERROR_MARK in part:
            part, error = take_error(part)
        if self._journal is not None:
            part = self._journal.take(part)
        elif part:
            flight.journal.complete = False
        return part, error
