"""The live page behind ``/ui``: its files, its state, and the look at the fleet once a second that both come from.

Invariants: GET and HEAD only, nothing is changed by it; a question costs at most one encoding of the bounded state each
second, however many ask; every answer carries the security headers. As public as ``/fleet``. Knows nothing about how
the router routes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec

from kvbaton.clock import Clock
from kvbaton.observe.metrics import Metrics
from kvbaton.router.dispatch import Flight
from kvbaton.ui.assets import LIBRARY_NAME, Asset, library_path, load_library, own_assets
from kvbaton.ui.decisions import Decisions
from kvbaton.ui.history import History, Totals
from kvbaton.ui.state import Aims, State, head
from kvbaton.workers.http import Exchange, Headers, method_not_allowed, not_found
from kvbaton.workers.openai_errors import bad_request

log = logging.getLogger(__name__)
_ENCODER = msgspec.json.Encoder()
PERIOD_S = 1.0
STATE_PATH = "/ui/state"
LIBRARY_PATH = f"/ui/vendor/{LIBRARY_NAME}"
MOST_QUERY_BYTES = 200
# Scripts only from here, none inline, no eval. The charting library writes style elements of its own: that is all that
# is inline. Nothing is loaded from, sent to, or framed by anybody else.
SECURITY_HEADERS: Headers = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
]


class LivePage:
    """Implements ``kvbaton.router.page.Page``."""

    def __init__(
        self,
        aims: Aims,
        fleet: Callable[[], dict[str, Any]],
        metrics: Metrics,
        clock: Clock,
        library: Path | None,
    ) -> None:
        self._aims = aims
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._library_path = library
        self._library: asyncio.Task[Asset] | None = None  # begun by the first who asks
        self._assets = own_assets()
        self._decisions = Decisions()
        self._history = History((aims.ttft_s, aims.tpot_s, None))
        self._head = msgspec.Raw()
        self._head_number = 0  # of the frame it was encoded for
        self.look()

    @property
    def charts(self) -> bool:
        return self._library_path is not None

    def ended(self, flight: Flight, now_s: float) -> None:
        self._decisions.ended(flight, now_s)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self.look()

    def look(self) -> None:
        """One more frame."""
        values, counts = self._metrics.values, self._metrics.counts
        outcomes = values("kvbaton_router_requests_total")
        totals = Totals(
            self._clock.now_s(),
            sum(outcomes.values()),
            sum(count for labels, count in outcomes.items() if labels[-1] == "error"),
            values("kvbaton_router_prompt_tokens_total")[()],
            values("kvbaton_router_cached_tokens_total")[()],
            values("kvbaton_router_output_tokens_total")[()],
            {labels[0]: count for labels, count in values("kvbaton_router_decisions_total").items()},
            (
                counts("kvbaton_router_ttft_seconds"),
                counts("kvbaton_router_tpot_seconds"),
                counts("kvbaton_router_itl_seconds"),
            ),
        )
        self._history.look(self._fleet(), totals, self._decisions.take_flows())

    def state(self, decisions_after: int, frames_after: int) -> State:
        if self._head_number != self._history.number:
            self._head_number = self._history.number
            found = head(self._fleet(), self._history, self._aims, self._clock.now_s(), self.charts)
            self._head = msgspec.Raw(_ENCODER.encode(found))
        return State(self._head, self._history.after(frames_after), self._decisions.after(decisions_after))

    # -- HTTP ---------------------------------------------------------------------------------------------------

    async def answer(self, exchange: Exchange) -> None:
        if exchange.method not in ("GET", "HEAD"):
            raise method_not_allowed("GET")
        match exchange.path:
            case "/ui":  # relative, so that a proxy may put it below another path
                await self._send(exchange, 308, b"", [(b"location", b"ui/")])
            case "/ui/":
                await self._send_asset(exchange, self._assets["index.html"])
            case path if path == STATE_PATH:
                cursors = read_cursors(exchange.query)
                body = _ENCODER.encode(self.state(**cursors))
                headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
                await self._send(exchange, 200, body, headers)
            case path if path == LIBRARY_PATH and self._library_path is not None:
                await self._send_asset(exchange, await self._load_library(self._library_path))
            case path:
                found = self._assets.get(path.removeprefix("/ui/"))
                if found is None:
                    raise not_found(path)
                await self._send_asset(exchange, found)

    async def _load_library(self, path: Path) -> Asset:
        if self._library is None or (self._library.done() and self._library.exception() is not None):
            self._library = asyncio.create_task(asyncio.to_thread(load_library, path))
        return await asyncio.shield(self._library)  # one client that leaves takes nothing from the others

    async def _send_asset(self, exchange: Exchange, found: Asset) -> None:
        headers = [(b"etag", found.etag), (b"cache-control", b"no-cache"), (b"vary", b"accept-encoding")]
        if exchange.headers.get(b"if-none-match") == found.etag:
            await self._send(exchange, 304, b"", headers)
            return
        body = found.body
        if b"gzip" in exchange.headers.get(b"accept-encoding", b""):
            body = found.compressed
            headers.append((b"content-encoding", b"gzip"))
        await self._send(exchange, 200, body, [*headers, (b"content-type", found.content_type)])

    @staticmethod
    async def _send(exchange: Exchange, status: int, body: bytes, headers: Headers) -> None:
        await exchange.start(status, [*headers, (b"content-length", b"%d" % len(body)), *SECURITY_HEADERS])
        await exchange.end(b"" if exchange.method == "HEAD" else body)


def read_cursors(query: bytes) -> dict[str, int]:
    """``decisions_after`` and ``frames_after``, both from the answer before this one."""
    cursors = {"decisions_after": 0, "frames_after": 0}
    if len(query) > MOST_QUERY_BYTES:
        raise bad_request(f"a query has at most {MOST_QUERY_BYTES} bytes", "query")
    for name, values in parse_qs(query.decode("latin-1"), keep_blank_values=True).items():
        if name not in cursors:
            raise bad_request(f"there is no {name[:40]!r}; known are {', '.join(cursors)}", "query")
        if not values[-1].isascii() or not values[-1].isdigit() or len(values[-1]) > 15:
            raise bad_request(f"{name} must be a whole number from 0, as an earlier answer gave it", name)
        cursors[name] = int(values[-1])
    return cursors


def open_page(aims: Aims, fleet: Callable[[], dict[str, Any]], metrics: Metrics, clock: Clock) -> LivePage:
    library = library_path()
    if library is None:
        log.warning("the page at /ui has no charts: install kvbaton[ui] for them")
    return LivePage(aims, fleet, metrics, clock, library)
