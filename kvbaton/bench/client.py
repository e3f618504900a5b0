"""The load: sends requests when they are due, whatever the server does, and keeps what came back.

Invariants: a request's due instant is fixed before the run and is the zero of its latencies (no coordinated omission);
every request is prepared as bytes beforehand, so that nothing is built while measuring; a failure of one request never
stops the run; if the client could not keep up, the run says so and is not valid.

Knows nothing about statistics or how prompts are made.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvbaton.bench.arrivals import Phase
from kvbaton.bench.http_stream import HttpPool, Response
from kvbaton.bench.pacing import Pacer
from kvbaton.bench.samples import ClientReport, RequestSample, fill_from_stream
from kvbaton.bench.sse import StreamReader
from kvbaton.types import RemoteError

PROBE_EVERY_S = 0.01
# Loops round timers up to a millisecond: a probe that much late is on time.
TIMER_GRAIN_S = 0.001
KEPT_HEADERS = frozenset(("x-kvbaton-decision", "x-kvbaton-request-id", "x-kvbaton-path", "x-request-id", "server"))


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request, ready to send. ``intended_s`` is None in a closed loop: it is due when a slot is free."""

    index: int
    phase: Phase
    intended_s: float | None
    body: bytes
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class ClientConfig:
    url: str
    path: str = "/v1/chat/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    max_concurrency: int | None = None  # open loop: at most this many in flight; waiting counts as latency
    save_text: bool = False
    max_lag_ms: float = 10.0  # p99 of lag over which the run is not valid
    max_cpu_share: float = 0.9  # of one core


@dataclass
class Progress:
    """Live counts, read by whoever draws the progress bar."""

    planned: int = 0
    started: int = 0
    finished: int = 0
    failed: int = 0
    in_flight: int = 0
    chunks: int = 0
    max_in_flight: int = 0


class LoadClient:
    """Runs a plan against one endpoint."""

    def __init__(
        self,
        config: ClientConfig,
        encode: Callable[[str], Sequence[int]] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.progress = Progress()
        self.pool = HttpPool(config.url, now_s, config.headers)
        self._encode = encode
        self._now_s = now_s
        self.zero_s = 0.0
        self._permits = asyncio.Semaphore(config.max_concurrency) if config.max_concurrency else None
        self._lags_s: list[float] = []
        self._loop_lags_s: list[float] = []
        self._late: list[tuple[RequestSample, StreamReader]] = []
        # Called as soon as a request has ended, before its tokens are counted; it may not take long.
        self.on_end: Callable[[RequestSample, StreamReader, float], None] = lambda sample, reader, zero_s: None

    async def warm_up(self, requests: Sequence[PlannedRequest], concurrency: int) -> list[RequestSample]:
        """Sends the warm-up, a few at a time, and waits for all: its cold starts stay out of the timed run."""
        self.zero_s = self._now_s()
        samples = await self._closed(iter(self._prepare(requests)), max(1, concurrency), float("inf"))
        self._lags_s.clear()
        return samples

    async def run_open(self, requests: Sequence[PlannedRequest]) -> tuple[list[RequestSample], ClientReport]:
        """Open loop: each request at its due instant."""
        prepared = self._prepare(requests)
        samples: list[RequestSample] = []

        async def load() -> None:
            pacer = Pacer(self._now_s)
            last = asyncio.Event()
            async with asyncio.TaskGroup() as group:

                def send(request: PlannedRequest, data: bytes) -> None:
                    group.create_task(self._one(request, data, samples))
                    if request is prepared[-1][0]:
                        last.set()

                for request, data in prepared:
                    assert request.intended_s is not None, "an open loop has due instants"
                    pacer.at(self.zero_s + request.intended_s, send, request, data)
                try:
                    if prepared:
                        await last.wait()
                finally:
                    pacer.clear()  # a run that is cancelled has requests still to come

        return samples, await self._timed(load)

    async def run_closed(
        self, requests: Sequence[PlannedRequest], concurrency: int, stop_after_s: float
    ) -> tuple[list[RequestSample], ClientReport]:
        """Closed loop: each of ``concurrency`` users sends its next request when the last one ended."""
        samples: list[RequestSample] = []

        async def load() -> None:
            samples.extend(await self._closed(iter(self._prepare(requests)), concurrency, stop_after_s))

        return samples, await self._timed(load)

    def _prepare(self, requests: Sequence[PlannedRequest]) -> list[tuple[PlannedRequest, bytes]]:
        self.progress.planned += len(requests)
        return [
            (
                request,
                self.pool.encode(
                    "POST", self.config.path, request.body, {"x-request-id": f"bench-{request.phase}-{request.index}"}
                ),
            )
            for request in sorted(requests, key=lambda request: request.intended_s or 0.0)
        ]

    async def _closed(
        self, requests: Iterator[tuple[PlannedRequest, bytes]], concurrency: int, stop_after_s: float
    ) -> list[RequestSample]:
        samples: list[RequestSample] = []

        async def user() -> None:
            for request, data in requests:
                if self._now_s() - self.zero_s >= stop_after_s:
                    return
                await self._one(request, data, samples)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(user())
        return samples

    async def _one(self, request: PlannedRequest, data: bytes, samples: list[RequestSample]) -> None:
        started = self._now_s()
        due = self.zero_s + request.intended_s if request.intended_s is not None else started
        sample = RequestSample(
            index=request.index,
            phase=request.phase,
            intended_s=round(due - self.zero_s, 6),
            started_s=round(started - self.zero_s, 6),
            max_tokens=request.max_tokens,
            prompt_tokens=request.prompt_tokens,
        )
        samples.append(sample)
        self.progress.started += 1
        permit_wait = 0.0
        if self._permits is not None:
            await self._permits.acquire()
            permit_wait = self._now_s() - started
            sample.permit_wait_s = round(permit_wait, 6)
        try:
            self.progress.in_flight += 1
            self.progress.max_in_flight = max(self.progress.max_in_flight, self.progress.in_flight)
            await self._exchange(sample, data, started + permit_wait, due + permit_wait)
        finally:
            self.progress.in_flight -= 1
            if self._permits is not None:
                self._permits.release()

    async def _exchange(self, sample: RequestSample, data: bytes, started: float, due: float) -> None:
        reader, response = StreamReader(), Response()

        def sink(body: bytes, read_s: float) -> None:
            self.progress.chunks += reader.feed(body, read_s)

        try:
            await self.pool.send(data, response, sink, self.config.timeout_s)
        except RemoteError as error:
            sample.error = error.message
        else:
            if response.ok:
                reader.close(response.closed_s or self._now_s())
            else:
                sample.error = f"HTTP {response.status}: {response.error_body.decode('utf-8', 'replace')[:300]}"
        self._keep(sample, reader, response)
        if response.sent_s is not None and response.connected_s is not None:
            # Connecting is the server's part; what is left between due and written is ours.
            self._lags_s.append(response.sent_s - due - (response.connected_s - started))

    def _keep(self, sample: RequestSample, reader: StreamReader, response: Response) -> None:
        for name in ("connected_s", "sent_s", "headers_s", "closed_s"):
            value = getattr(response, name)
            setattr(sample, name, None if value is None else round(value - self.zero_s, 6))
        sample.status = response.status
        sample.headers = {name: value for name, value in response.headers.items() if name in KEPT_HEADERS}
        self.on_end(sample, reader, self.zero_s)
        # With a tokenizer, counting may cost milliseconds: it waits until the load is over.
        if self._encode is not None:
            self._late.append((sample, reader))
        else:
            self._finish(sample, reader)
        self.progress.finished += 1
        self.progress.failed += sample.error is not None

    def _finish(self, sample: RequestSample, reader: StreamReader) -> None:
        fill_from_stream(sample, reader, self.zero_s, self._encode)
        if self.config.save_text:
            sample.text = "".join(chunk.text for chunk in reader.chunks)

    def settle(self) -> None:
        """Counts the tokens that waited for the end of the load."""
        for sample, reader in self._late:
            self._finish(sample, reader)
        self._late.clear()

    async def _timed(self, load: Callable[[], object]) -> ClientReport:
        self.settle()
        chunks_before = self.progress.chunks
        # A full collection over a long run's samples would stop every stream for its length.
        gc.collect()
        gc.freeze()
        gc.disable()
        self.zero_s = self._now_s()
        cpu_before = time.process_time()
        probe = asyncio.ensure_future(self._probe())
        try:
            await load()  # type: ignore[misc]
            wall = self._now_s() - self.zero_s
            cpu = time.process_time() - cpu_before
        finally:
            probe.cancel()
            await asyncio.wait([probe])
            gc.enable()
            gc.unfreeze()
        self.settle()
        return self._report(wall, cpu, self.progress.chunks - chunks_before)

    async def _probe(self) -> None:
        """How late the loop turns: what any read may have waited before its time was taken."""
        while True:
            due = self._now_s() + PROBE_EVERY_S
            await asyncio.sleep(PROBE_EVERY_S)
            self._loop_lags_s.append(max(0.0, self._now_s() - due - TIMER_GRAIN_S))

    def _report(self, wall_s: float, cpu_s: float, chunks: int) -> ClientReport:
        lags = sorted(lag * 1e3 for lag in self._lags_s) or [0.0]
        turns = sorted(lag * 1e3 for lag in self._loop_lags_s) or [0.0]
        share = cpu_s / wall_s if wall_s > 0 else 0.0
        reasons = []
        limit = self.config.max_lag_ms
        if _at(lags, 0.99) > limit:
            reasons.append(f"requests left {_at(lags, 0.99):.1f} ms after they were due (p99; limit {limit:g} ms)")
        if _at(turns, 0.99) > limit:
            reasons.append(f"the client's loop was {_at(turns, 0.99):.1f} ms late (p99; limit {limit:g} ms)")
        if share > self.config.max_cpu_share:
            reasons.append(f"the client used {share:.0%} of a core (limit {self.config.max_cpu_share:.0%})")
        return ClientReport(
            lag_p50_ms=_at(lags, 0.5),
            lag_p99_ms=_at(lags, 0.99),
            lag_max_ms=lags[-1],
            loop_lag_p99_ms=_at(turns, 0.99),
            loop_lag_max_ms=turns[-1],
            cpu_share=share,
            chunks_per_s=chunks / wall_s if wall_s > 0 else 0.0,
            max_in_flight=self.progress.max_in_flight,
            valid=not reasons,
            reasons=reasons,
        )


def _at(ordered: Sequence[float], fraction: float) -> float:
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
