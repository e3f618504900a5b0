"""One server of another engine by HTTP, as the adapters need it: a session, its figures, and whether it has room.

Figures are scraped four times a second. Invariants: every answer that is read whole is bounded; what a server says
never ends the watching; without figures for ``FIGURES_MAX_AGE_S`` nobody knows whether a prefill would be spent in
vain, so none is. Knows nothing about requests, or what an engine calls its figures (``vllm_metrics``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvbaton.transfer.reach import in_url
from kvbaton.types import UNREADABLE, CapacityError, LocalError, RemoteError, Role, TokenOutput
from kvbaton.workers.protocol import Finished, PeerAddress, WorkerEvent, WorkerStats
from kvbaton.workers.vllm_metrics import EngineFigures, FigureTable, read_figures
from kvbaton.workers.vllm_stream import MAX_EVENT_BYTES, EventSplitter, ServerError, message_of

log = logging.getLogger(__name__)
SCRAPE_S = 0.25
KEEP_ALIVE_S = 2.0  # engines close what was idle for five seconds; a request that meets that is lost
FIGURES_MAX_AGE_S = 5.0
MOST_LOST = 3
PROBE_EVERY_S = 2.0  # while a peer computes
PROBE_S = 5.0  # a server that is busy may be late
MOST_SILENT = 2  # in a row
REFUSALS = 2  # in a row, before its requests go elsewhere
PROMPTS_REMEMBERED = 64
_ANSWER_TIMEOUT_S = 5.0
_ROOM_FIGURES = frozenset({"text", "num_running", "num_queued"})
_BYTES_FIGURES = frozenset({"text", "num_bytes_received"})
_Answer = TypeVar("_Answer")


class EngineServer:
    """``await open()``, then ``watch()`` as a task, until ``await close()``."""

    def __init__(
        self, url: str, api_key: str, table: FigureTable, max_running: int, max_waiting: int, path: str = "/metrics"
    ) -> None:
        self.url = url
        self.figures = EngineFigures()
        self.figures_at_s = time.monotonic()
        self.num_open = 0
        self.num_done = 0  # hand-offs that a token came from
        self.num_failed = 0  # hand-offs that did not
        self.num_refused = 0  # for want of room, before anything was asked of anybody
        self.num_bytes_derived = 0  # received, as far as requests tell
        self.prompt_tokens = 0.0  # of a prompt, in the mean of late
        self._num_prompts = 0  # in that mean
        self.role: Role = "both"  # of its worker, now
        self.busy_s = 0.0  # while it only prefilled and had requests, as far as the figures tell
        self._counts_bytes = False  # whether the server itself ever said what it received
        self._scraped_at_s: float | None = None
        self._api_key = api_key
        self._table = table
        self._path = path
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._trouble = ""  # with the figures, as last logged
        self._num_refused_scrapes = 0  # in a row
        self._num_lost = 0  # hand-offs of peers that were there, in a row
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            headers={"authorization": f"Bearer {self._api_key}"} if self._api_key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            trust_env=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "open it first"
        return self._session

    async def get(self, path: str, url: str = "") -> tuple[int, bytes]:
        """Of this server, or of the one at ``url``."""
        async with asyncio.timeout(_ANSWER_TIMEOUT_S), self.http.get((url or self.url) + path) as response:
            return response.status, await read_whole(response)

    async def get_json(self, path: str, kind: type[_Answer]) -> _Answer:
        status, raw = await self.get(path)
        if status != 200:
            raise RemoteError(f"the server answers {status} to {path}")
        try:
            return msgspec.json.decode(raw, type=kind)
        except UNREADABLE as error:
            raise RemoteError(f"the server's answer to {path} cannot be read: {error}") from None

    # -- requests

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], who: str) -> bytes:
        """The whole answer of a peer's server, which is ``who``. RemoteError whatever goes wrong: it is its part."""
        try:
            async with self.http.post(url, data=body, headers=headers) as response:
                raw = await read_whole(response)
                if response.status != 200:
                    raise RemoteError(f"{who} answers {response.status}: {message_of(raw)}")
                return raw
        except (aiohttp.ClientError, OSError) as error:
            raise RemoteError(f"{who} at {url}: {type(error).__name__}: {error}") from None

    async def ask_peer(self, url: str, body: bytes, headers: Mapping[str, str], who: str) -> bytes:
        """``post``, given up when the peer's host does not answer any more: a prefill shows nothing before its end."""
        asking = asyncio.create_task(self.post(url, body, headers, who))
        probe = asyncio.create_task(self._still_there(url))
        num_silent = 0
        try:
            while True:
                await asyncio.wait({asking, probe}, return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
                num_silent = 0 if probe.result() else num_silent + 1
                if num_silent >= MOST_SILENT:
                    raise RemoteError(f"{who} at {url} does not answer any more")
                probe = asyncio.create_task(self._still_there(url))
        finally:
            asking.cancel()
            probe.cancel()
            await asyncio.gather(asking, probe, return_exceptions=True)

    async def _still_there(self, url: str) -> bool:
        await asyncio.sleep(PROBE_EVERY_S)
        return await self._is_there(url, PROBE_S)

    async def stream(self, path: str, body: bytes, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """The data of this server's answer, event by event; closing it ends the call. Read it under ``answering``."""
        async with self.http.post(self.url + path, data=body, headers=headers) as response:
            if response.status != 200:
                raise refusal(response.status, await read_whole(response))
            async for data in events_of(response):
                yield data

    # -- figures

    async def scrape(self) -> None:
        status, raw = await self.get(self._path)
        if status != 200:
            raise RemoteError(f"the server answers {status} to {self._path}")
        before, self.figures = self.figures, read_figures(raw.decode(errors="replace"), self.figures, self._table)
        self._learn(before, time.monotonic())
        if self._table.counts_bytes and not {*self.figures.missing, *self.figures.odd} & _BYTES_FIGURES:
            self._counts_bytes = True
        if not _ROOM_FIGURES.intersection(self.figures.odd):
            self.figures_at_s = time.monotonic()

    def _learn(self, before: EngineFigures, now_s: float) -> None:
        """From two looks: how long prompts are, and for how long there was work."""
        now, since_s, self._scraped_at_s = self.figures, self._scraped_at_s, now_s
        num_fresh, num_tokens = now.num_prompts - before.num_prompts, now.num_prompts_tokens - before.num_prompts_tokens
        if num_fresh > 0 and num_tokens > 0:  # below zero: another server
            self._num_prompts = min(self._num_prompts + num_fresh, PROMPTS_REMEMBERED)
            weight = min(1.0, num_fresh / self._num_prompts)
            self.prompt_tokens += weight * (num_tokens / num_fresh - self.prompt_tokens)
        if since_s is not None and now.num_running and self.role == "prefill":
            self.busy_s += min(now_s - since_s, 2 * SCRAPE_S)  # of a time without figures nothing is known

    @property
    def disconnected(self) -> bool:
        """Nobody listens there. One that is too busy to answer is another matter."""
        return self._num_refused_scrapes >= REFUSALS

    async def watch(self) -> None:
        """Survives whatever the server answers: without it no figure would ever change again."""
        while True:
            await asyncio.sleep(SCRAPE_S)
            try:
                await self.scrape()
                self._num_refused_scrapes = 0
                odd = self.figures.odd
                self._tell(f"these are odd: {', '.join(odd)}" if odd else "")
            except Exception as error:
                refused = isinstance(error, aiohttp.ClientConnectorError)
                self._num_refused_scrapes = self._num_refused_scrapes + 1 if refused else 0
                self._tell(f"they cannot be read: {type(error).__name__}: {error}")

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("the server's figures: %s", trouble or "they can be read again")

    async def idle(self, deadline_s: float) -> bool:
        """Until it has no requests. It does not say who still reads from it: what was offered has its lease."""
        until_s = time.monotonic() + deadline_s
        while self.figures.num_running + self.figures.num_waiting:
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(SCRAPE_S)
        return True

    # -- room

    def check_room(self, remote: bool) -> None:
        """CapacityError when a request would only wait, or a prefill be spent for nothing."""
        if self.num_open >= self._max_running + self._max_waiting:
            raise CapacityError("this worker's queue is full", fix="retry later")
        if remote and (self.figures.num_queued or self.num_open >= self._max_running):
            self.num_refused += 1
            raise CapacityError("the decode server has no room", fix="retry later or elsewhere")
        if remote and time.monotonic() - self.figures_at_s > FIGURES_MAX_AGE_S:
            raise CapacityError("the decode server does not say whether it has room", fix="retry later or elsewhere")

    async def run(
        self, events: AsyncGenerator[WorkerEvent, None], deadline_s: float
    ) -> AsyncGenerator[WorkerEvent, bool | None]:
        """One request, open until its events end or nobody wants them. CapacityError when its deadline comes first."""
        try:
            async with asyncio.timeout(deadline_s), contextlib.aclosing(events):
                self.num_open += 1
                try:
                    async for event in events:
                        if (yield event):
                            return  # a server does not say before the end what a request took
                finally:
                    self.num_open -= 1
        except TimeoutError:
            raise CapacityError(f"the request's deadline of {deadline_s:.0f} s has passed", fix="retry later") from None

    async def counted(
        self, events: AsyncGenerator[WorkerEvent, None], prompt_bytes: int
    ) -> AsyncGenerator[WorkerEvent, None]:
        """A hand-off that a token came from counts when it is over, whoever leaves. ``prompt_bytes``: KV of the whole
        prompt, which is taken for what came where the server does not get to say it."""
        begun, failed, told = False, False, prompt_bytes
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    begun = begun or isinstance(event, TokenOutput)
                    if isinstance(event, Finished):
                        told = event.transfer_bytes
                    yield event
        except RemoteError:
            failed = True
            raise
        finally:
            if begun and not failed:
                self.num_done += 1
                self.num_bytes_derived += told

    async def handed_over(
        self, events: AsyncGenerator[WorkerEvent, None], peer: PeerAddress
    ) -> AsyncGenerator[WorkerEvent, None]:
        """A decode that waits for KV of ``peer``, whose prefill has ended well.

        An error of this server's before the first token means most often that the KV did not come (the peer died behind
        its offer, say), which servers tell in no other way. That is RemoteError, so that the prompt is computed
        somewhere else. After some in a row of peers that are there it is this server's own.
        """
        begun = False
        async with contextlib.aclosing(events):
            try:
                async for event in events:
                    if not begun and isinstance(event, TokenOutput):
                        begun, self._num_lost = True, 0
                    yield event
            except ServerError as error:
                if begun:
                    raise
                if await self._is_there(f"http://{in_url(peer.host)}:{peer.port}", PROBE_S):
                    self._num_lost += 1
                    if self._num_lost > MOST_LOST:
                        raise
                raise RemoteError(f"the KV that was offered did not come: {error}") from None

    async def _is_there(self, url: str, timeout_s: float) -> bool:
        """It answers, whatever. Its root is asked: SGLang's ``/health`` waits until the scheduler has time."""
        parts = urlsplit(url)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(timeout_s), self.http.get(f"{parts.scheme}://{parts.netloc}/"):
                return True
        return False

    def stats(self) -> WorkerStats:
        """The load as its figures tell it, and estimates of what they do not tell, by which pools are scaled.

        Prompt tokens not computed yet: of a server that only prefills, those of the requests there, half of them for
        one that runs, at the mean length of late; of one that does both, of those that have not begun. What waits on a
        decode server waits for KV. Busy with prefill: as long as a server that only prefills was seen to run something.
        Bytes received: the server's own count where it has one, though it be zero; else what its requests add up to.
        """
        figures = self.figures
        if self.role == "prefill":
            uncomputed = figures.num_waiting + figures.num_running / 2
        else:
            uncomputed = float(figures.num_waiting) if self.role == "both" else 0.0
        num_used = round(figures.num_blocks * figures.usage)
        return WorkerStats(
            num_waiting=figures.num_waiting,
            num_running=figures.num_running,
            waiting_prompt_tokens=round(uncomputed * self.prompt_tokens),
            prefill_busy_s=self.busy_s,
            num_active=max(self.num_open, figures.num_running + figures.num_waiting),
            num_blocks=figures.num_blocks,
            num_blocks_used=num_used,
            num_blocks_free=figures.num_blocks - num_used,
            num_prompt_tokens=figures.num_computed_tokens,
            num_cached_tokens=figures.num_cached_tokens,
            num_output_tokens=figures.num_output_tokens,
            num_preemptions=figures.num_preemptions,
            num_lease_expiries=figures.num_expired,
            transfer_bytes_received=figures.num_bytes_received if self._counts_bytes else self.num_bytes_derived,
            num_transfers=self.num_done,
            num_transfer_failures=self.num_failed + figures.num_failed_transfers,
            num_reservations_refused=self.num_refused,
        )


async def read_whole(response: aiohttp.ClientResponse) -> bytes:
    """A whole body; RemoteError for one beyond the bound, whose sender is at fault."""
    raw = bytearray()
    async for part in response.content.iter_any():
        raw += part
        if len(raw) > MAX_EVENT_BYTES:
            raise RemoteError(f"an answer of more than {MAX_EVENT_BYTES} bytes")
    return bytes(raw)


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Around reading what the worker's own server answers: what goes wrong there is our side's fault."""
    try:
        yield
    except (RemoteError, *UNREADABLE) as error:
        raise LocalError(f"the server's answer cannot be read: {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise LocalError(f"the server went away: {type(error).__name__}: {error}") from None


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of server-sent events until the end mark; a stream without one was cut."""
    splitter = EventSplitter()
    async for part in response.content.iter_any():
        for data in splitter.push(part):
            if data == b"[DONE]":
                return
            yield data
    raise aiohttp.ClientPayloadError("the stream ended without its end mark")


def refusal(status: int, raw: bytes) -> LocalError:
    """What a worker raises for an answer of its server's that is none."""
    message = message_of(raw)
    if status == 400:
        return LocalError(message, field="prompt")
    if status in (429, 503):
        return CapacityError(message, fix="retry later")
    return ServerError(f"the server answers {status}: {message}")
