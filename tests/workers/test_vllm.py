"""The vLLM adapter against a server that answers as vLLM 0.32 was seen to: both legs, and everything that can go wrong.

Real vLLM is behind it in tests/integration/test_vllm_fleet.py; docs/engines.md says what was seen.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from workers.scripted import serving, until

from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import CapacityError, GenerateRequest, LocalError, RemoteError, SamplingParams, TokenOutput
from kvbaton.workers import engine_server
from kvbaton.workers.engine_server import KEEP_ALIVE_S, MOST_LOST
from kvbaton.workers.protocol import Admitted, Finished, PeerAddress, WorkerEvent
from kvbaton.workers.server import ServerOptions, WorkerServer
from kvbaton.workers.vllm import VllmOptions, VllmWorker, _Lease, request_body
from kvbaton.workers.vllm_metrics import read_figures

FIELDS = json.loads((Path(__file__).parent / "engine_fields" / "vllm_nixl.json").read_text())
METRICS = """
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 7.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 5.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 400.0
vllm:generation_tokens_total{engine="0",model_name="m"} 9.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 1.179648e+07
vllm:cache_config_info{block_size="128",num_gpu_blocks="364"} 1.0
"""
EOS = 2
# Not sorted, with a key nobody knows and a number no double holds: it must arrive byte for byte.
TRANSFER = (
    b'{"remote_port":5600,"do_remote_prefill":true,"zzz":[1, 2],"remote_block_ids":[[1,2]],'
    b'"remote_engine_id":"e","big":18446744073709551615,"remote_prefill_cached_tokens":3}'
)


class FakeVllm:
    """One server. ``transfer`` is what its prefill answers carry."""

    def __init__(self) -> None:
        self.transfer: bytes | None = TRANSFER
        self.tokens = [11, 12, 13]
        self.finish_reason = "length"
        self.status = 200
        self.cut_after: int | None = None
        self.hold = asyncio.Event()
        self.hold.set()
        self.bodies: list[dict[str, Any]] = []
        self.raw: list[bytes] = []
        self.headers: list[Any] = []
        self.num_open = 0
        self.metrics = METRICS
        self.stream: bytes | None = None  # instead of an answer
        self.died = False  # whoever asks now is cut off
        self.silent = False  # whoever asks whether it is there waits
        self.num_probes = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        self.bodies.append(body)
        self.raw.append(raw)
        self.headers.append(request.headers)
        self.num_open += 1
        try:
            await self.hold.wait()
            if self.status != 200:
                return web.json_response({"error": {"message": "too long", "code": self.status}}, status=self.status)
            return await (self._stream(request) if body["stream"] else self._whole())
        finally:
            self.num_open -= 1

    @property
    def ending(self) -> str:
        """Of what was asked last, for one token: an end token comes before the length, as in the real one."""
        body = self.bodies[-1]
        ends = {*body.get("stop_token_ids", ()), *(() if body["ignore_eos"] else (EOS,))}
        return "stop" if self.tokens[0] in ends or "stop" in body else self.finish_reason

    async def _whole(self) -> web.Response:
        answer = {
            "choices": [{"index": 0, "text": "x", "finish_reason": self.ending}],
            "usage": {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1}},
        }
        raw = json.dumps(answer).encode()
        transfer = b"null" if self.transfer is None or self.ending == "stop" else self.transfer
        return web.Response(
            body=raw[:-1] + b',"kv_transfer_params":' + transfer + b"}", content_type="application/json"
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if self.stream is not None:
            await response.write(self.stream)
            return response
        for index, token in enumerate(self.tokens):
            if index == self.cut_after:
                assert request.transport is not None
                request.transport.abort()
                return response
            last = index == len(self.tokens) - 1
            choice = {
                "index": 0,
                "text": "?",
                "token_ids": [token],
                "finish_reason": self.finish_reason if last else None,
                "logprobs": {
                    "tokens": [f"token_id:{token}"],
                    "token_logprobs": [-0.5],
                    "top_logprobs": [{f"token_id:{token}": -0.5, "token_id:99": -0.7}],
                },
            }
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        usage = {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    def app(self) -> web.Application:
        async def models(request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "m", "max_model_len": 64}]})

        async def version(request: web.Request) -> web.Response:
            return web.json_response({"version": "0.32.0"})

        async def metrics(request: web.Request) -> web.Response:
            return web.Response(text=self.metrics)

        async def root(request: web.Request) -> web.Response:
            self.num_probes += 1
            if self.silent:
                await asyncio.Event().wait()
            if self.died:
                assert request.transport is not None
                request.transport.abort()
            return web.Response()

        app = web.Application()
        app.router.add_get("/", root)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/version", version)
        app.router.add_get("/metrics", metrics)
        return app


class Pair:
    def __init__(self, prefill: FakeVllm, decode: FakeVllm, worker: VllmWorker, peer: PeerAddress) -> None:
        self.prefill, self.decode, self.worker, self.peer = prefill, decode, worker, peer

    async def run(self, remote: bool = True, **sampling: Any) -> list[WorkerEvent]:
        found = []
        async for event in self.worker.generate(make_request(**sampling), self.peer if remote else None, 20.0):
            found.append(event)
        return found


def make_request(**sampling: Any) -> GenerateRequest:
    return GenerateRequest("r1", (5, 6, 7, 8), SamplingParams(**{"max_tokens": 3, **sampling}), eos_token_ids=(EOS,))


async def start(stack: AsyncExitStack, fake: FakeVllm, port: int = 0) -> tuple[str, int]:
    runner = web.AppRunner(fake.app(), shutdown_timeout=1, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    host, port = runner.addresses[0][:2]
    return host, port


@asynccontextmanager
async def running_pair(model_dir: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        prefill, decode = FakeVllm(), FakeVllm()
        peer = PeerAddress(*await start(stack, prefill))
        host, port = await start(stack, decode)
        options = VllmOptions(f"http://{host}:{port}", "decode", "m", api_key="k", max_running=2, max_waiting=1)
        worker = VllmWorker(options, ModelConfig.from_dir(model_dir), Tokenizer.load(model_dir))
        await worker.start()
        stack.push_async_callback(worker.stop)
        yield Pair(prefill, decode, worker, peer)
        await until(lambda: prefill.num_open == decode.num_open == 0)
        assert worker.engine.num_open == 0


@pytest.fixture
async def pair(tiny_model_dir: Path) -> AsyncIterator[Pair]:
    async with running_pair(tiny_model_dir) as found:
        yield found


async def test_what_is_sent_first_has_the_fields_that_the_connector_reads(pair: Pair) -> None:
    await pair.run()
    sent = pair.prefill.bodies[0]["kv_transfer_params"]
    assert set(sent) == set(FIELDS["prefill_request"]) <= set(FIELDS["request_fields"])
    assert sent["do_remote_decode"] is True and sent["do_remote_prefill"] is False
    assert not any(sent.get(name) for name in FIELDS["needed_to_pull"]), "there is nothing to pull yet"
    assert set(FIELDS["needed_to_pull"]) <= set(FIELDS["answer"]), "decode is told all it needs by prefill's answer"
    assert set(_Lease.__struct_fields__) <= set(FIELDS["answer"])


async def test_both_legs_and_the_object_passes_unchanged(pair: Pair) -> None:
    events = await pair.run(max_tokens=3, min_tokens=2, logprobs=1)
    first, second = pair.prefill.bodies[0], pair.decode.bodies[0]
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert not {"min_tokens", "stream_options"} & set(first)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert (second["max_tokens"], second["min_tokens"], second["stream"]) == (3, 2, True)
    assert TRANSFER in pair.decode.raw[0], "the object is the engines' own: not a byte of it may change"
    assert pair.prefill.headers[0]["x-request-id"] == pair.decode.headers[0]["x-request-id"] == "r1"
    assert pair.decode.headers[0]["authorization"] == "Bearer k"
    assert events[0] == Admitted(4, 3, 4, path="remote"), "cached is what the prefill side's cache had"
    outputs = [event for event in events if isinstance(event, TokenOutput)]
    assert [output.token_id for output in outputs] == [11, 12, 13]
    assert [output.finish_reason for output in outputs] == [None, None, "length"]
    assert outputs[0].logprobs is not None and outputs[0].logprobs.top == ((11, -0.5), (99, -0.7))
    assert isinstance(events[-1], Finished) and events[-1].transfer_bytes > 0


@pytest.mark.parametrize("end", [EOS, 11])
async def test_a_prompt_whose_first_token_is_an_end_is_handed_over_too(pair: Pair, end: int) -> None:
    pair.prefill.tokens = pair.decode.tokens = [end]
    pair.decode.finish_reason = "stop"
    events = await pair.run(stop_token_ids=(11,))
    assert [event.finish_reason for event in events if isinstance(event, TokenOutput)] == ["stop"]
    first, second = pair.prefill.bodies[0], pair.decode.bodies[0]
    assert first["ignore_eos"] is True and not {"stop", "stop_token_ids"} & set(first), "nothing can stop it"
    assert second["stop_token_ids"] == [EOS, 11] and second["ignore_eos"] is False
    assert pair.worker.stats().num_transfer_failures == 0


async def test_a_local_request_is_one_call_and_its_cached_tokens_are_corrected(pair: Pair) -> None:
    pair.decode.finish_reason = "stop"
    events = await pair.run(remote=False)
    assert pair.prefill.bodies == [] and "kv_transfer_params" not in pair.decode.bodies[0]
    assert events[0] == Admitted(4, 0) and events[-1] == Finished(num_cached_tokens=2)
    last = events[-2]
    assert isinstance(last, TokenOutput) and last.stop_token and last.finish_reason == "stop"


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        ({"transfer": None}, "offers no KV"),
        ({"status": 500}, "answers 500"),
        ({"status": 400}, "answers 400"),
        ({"transfer": b'{"remote_blocks_expiry_time": 1.7e9}'}, "lease ended"),
        ({"transfer": b'{"remote_blocks_expiry_time": "soon"}'}, "ValidationError"),
    ],
)
async def test_a_bad_prefill_fails_loudly_and_is_counted(pair: Pair, damage: dict[str, Any], word: str) -> None:
    for name, value in damage.items():
        setattr(pair.prefill, name, value)
    with pytest.raises(RemoteError, match=word):
        await pair.run()
    assert pair.decode.bodies == [], "decode must not start on KV that is not there"
    assert pair.worker.stats().num_transfer_failures == 1


async def test_a_lease_with_time_left_is_good(pair: Pair) -> None:
    """vLLM 0.32 sends null to decode servers, and to prefill servers a clock of its own process."""
    for expiry_s in (time.time() + 3600, None, time.perf_counter() - 60):
        pair.prefill.transfer = json.dumps({"remote_blocks_expiry_time": expiry_s}).encode()
        assert len(await pair.run()) == 5


async def test_a_prefill_server_that_is_not_there_is_the_peers_fault(pair: Pair) -> None:
    pair.peer = PeerAddress("127.0.0.1", 1)
    with pytest.raises(RemoteError, match="127.0.0.1:1"):
        await pair.run()


async def test_no_prefill_is_spent_without_room(pair: Pair) -> None:
    pair.decode.metrics = METRICS.replace(
        'num_requests_waiting{engine="0",model_name="m"} 0.0', "num_requests_waiting 3"
    )
    await until(lambda: pair.worker.figures.num_waiting == 3)
    with pytest.raises(CapacityError):
        await pair.run()
    assert pair.prefill.bodies == []


async def test_the_queue_is_bounded(pair: Pair) -> None:
    pair.decode.hold.clear()
    open_ones = [asyncio.create_task(pair.run(remote=False)) for _ in range(3)]
    await until(lambda: pair.decode.num_open == 3)
    with pytest.raises(CapacityError, match="full"):
        await pair.run(remote=False)
    pair.decode.hold.set()
    await asyncio.gather(*open_ones)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_leaving_calls_off_the_leg_that_is_open(pair: Pair, leg: str) -> None:
    server: FakeVllm = getattr(pair, leg)
    server.hold.clear()
    task = asyncio.create_task(pair.run())
    await until(lambda: server.num_open == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: server.num_open == 0)
    assert bool(pair.decode.bodies) == (leg == "decode")


@pytest.mark.parametrize("status", [400, 503])
async def test_a_refusal_of_the_decode_server_is_told(pair: Pair, status: int) -> None:
    pair.decode.status = status
    with pytest.raises(CapacityError if status == 503 else LocalError, match="too long"):
        await pair.run()


LOST = b'data: {"error":{"message":"Internal server error","code":500}}\n\n'
TOKEN = b'data: {"choices":[{"token_ids":[11]}]}\n\n'


@pytest.mark.parametrize("answer", [LOST, b'data: {"choices":[{"token_ids":[],"finish_reason":"error"}]}\n\n'])
async def test_kv_that_does_not_come_is_the_peers_fault(pair: Pair, answer: bytes) -> None:
    """vLLM says of a pull that failed no more than that something did: as decode's fault it would end the request."""
    pair.decode.stream = answer
    with pytest.raises(RemoteError, match="did not come"):
        await pair.run()
    assert pair.worker.stats().num_transfer_failures == 1
    pair.decode.stream = TOKEN + answer
    with pytest.raises(LocalError):
        await pair.run()  # it had the KV: there is an answer to be continued
    pair.decode.stream = answer
    with pytest.raises(LocalError):
        await pair.run(remote=False)


async def test_a_prefill_server_that_falls_silent_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host is cut off or frozen: the call stays open for ever, and of a slow one it looks the same."""
    monkeypatch.setattr(engine_server, "PROBE_EVERY_S", 0.01)
    monkeypatch.setattr(engine_server, "PROBE_S", 0.05)
    pair.prefill.hold.clear()
    running = asyncio.ensure_future(pair.run())
    await until(lambda: pair.prefill.num_probes > 3)
    assert not running.done(), "slow, and there"
    pair.prefill.silent = True
    with pytest.raises(RemoteError, match="does not answer any more"):
        await running
    assert pair.worker.stats().num_transfer_failures == 1 and pair.decode.bodies == []
    pair.prefill.silent = False
    pair.prefill.hold.set()
    assert await pair.run()


async def test_a_decode_server_that_gets_no_kv_of_anybody_is_to_blame(pair: Pair) -> None:
    pair.decode.stream = LOST
    for _ in range(MOST_LOST):
        with pytest.raises(RemoteError):
            await pair.run()
    with pytest.raises(LocalError, match="Internal server error"):
        await pair.run()
    pair.decode.stream = None
    async with aclosing(pair.worker.generate(make_request(), pair.peer, 20.0)) as events:
        async for event in events:
            if isinstance(event, TokenOutput):
                break  # that it began to answer shows that the KV came
    pair.decode.stream = LOST
    with pytest.raises(RemoteError):
        await pair.run()
    pair.prefill.died = True  # behind its offers
    for _ in range(MOST_LOST + 1):
        with pytest.raises(RemoteError, match="did not come"):
            await pair.run()


async def test_a_stream_that_is_cut_is_an_error(pair: Pair) -> None:
    pair.decode.cut_after = 1
    with pytest.raises(LocalError, match="went away"):
        await pair.run(remote=False)


@pytest.mark.parametrize(
    ("stream", "word"),
    [
        (b'data: {"choices":[{"token_ids":[11],"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n', "broke the answer off"),
        (b'data: {"choices":[{"token_ids":[11]}]}\n\ndata: [DONE]\n\n', "without a finish reason"),
        (b'data: {"choices":[{"token_ids":[11,12,13,14]}]}\n\n', "more than the 3 tokens"),
        (b'data: {"error":{"message":"it broke","code":"InternalServerError"}}\n\n', "it broke"),
        (b'data: {"choices":[{"token_ids":["x"]}]}\n\n', "cannot be read"),
        (b'data: {"usage":{"prompt_tokens_details":{"cached_tokens":"x"}}}\n\n', "cannot be read"),
        (b"data: \xff\n\n", "cannot be read"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "cannot be read"),
    ],
)
async def test_an_odd_stream_is_a_typed_error(pair: Pair, stream: bytes, word: str) -> None:
    pair.decode.stream = stream
    with pytest.raises(LocalError, match=word) as caught:
        await pair.run(remote=False)
    assert not isinstance(caught.value, CapacityError)


async def test_the_watcher_survives_every_answer_and_says_so_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    odd = METRICS.replace('num_requests_running{engine="0",model_name="m"} 1.0', "num_requests_running NaN")
    for text, found in ((odd, ("num_running",)), ("<html>", ("text",))):
        pair.decode.metrics = text
        await until(lambda found=found: pair.worker.figures.odd == found)
        assert pair.worker.stats().num_running == 1, "the last value is kept"
        pair.worker.engine.figures_at_s -= 60
        scraped = pair.worker.figures
        await until(lambda scraped=scraped: pair.worker.figures is not scraped)
        with pytest.raises(CapacityError, match="does not say"):
            await pair.run()
        assert pair.prefill.bodies == [], "no prefill is spent on a guess"
        assert await pair.run(remote=False), "what is sent here anyway needs no figures"
    pair.decode.metrics = METRICS.replace('num_requests_waiting{engine="0",model_name="m"} 0.0', "x 1").replace(
        'num_requests_running{engine="0",model_name="m"} 1.0', "num_requests_running 7"
    )
    await until(lambda: pair.worker.figures.num_running == 7)
    assert await pair.run()
    told = [record.getMessage() for record in caplog.records if "figures" in record.getMessage()]
    assert len(told) == 3 and "num_running" in told[0] and "text" in told[1] and "again" in told[2]


async def test_a_deadline_ends_the_wait(pair: Pair) -> None:
    pair.decode.hold.clear()
    with pytest.raises(CapacityError, match="deadline"):
        async for _ in pair.worker.generate(make_request(), None, 0.05):
            raise AssertionError("no event can come")


async def test_figures_become_the_workers_load(pair: Pair) -> None:
    stats = pair.worker.stats()
    assert (stats.num_running, stats.num_blocks, stats.num_blocks_used, stats.num_blocks_free) == (1, 364, 91, 273)
    assert (stats.transfer_bytes_received, stats.num_prompt_tokens, stats.num_cached_tokens) == (11796480, 7, 5)
    assert pair.worker.figures.num_external_tokens == 400
    assert pair.worker.max_context == 64 and "vllm-0.32.0" in pair.worker.fingerprint.model_revision


@pytest.mark.parametrize("own", [0, 11796480])
async def test_what_the_server_counts_itself_is_not_counted_twice(pair: Pair, own: int) -> None:
    """NixlConnector tells the bytes it received: what was derived for each request adds nothing to them."""
    pair.decode.metrics = METRICS.replace("1.179648e+07", str(own))
    await until(lambda: pair.worker.stats().transfer_bytes_received == own)
    events = await pair.run()
    assert isinstance(events[-1], Finished) and events[-1].transfer_bytes > 0
    assert pair.worker.stats().transfer_bytes_received == own
    pair.decode.metrics = METRICS.replace("1.179648e+07", str(own + 4096))
    await until(lambda: pair.worker.stats().transfer_bytes_received == own + 4096)


def prompts_text(num_running: int, num_waiting: int, num_prompts: int, num_tokens: int) -> str:
    return (
        f"vllm:num_requests_running {num_running}\nvllm:num_requests_waiting {num_waiting}\n"
        f"vllm:request_prompt_tokens_count {num_prompts}\nvllm:request_prompt_tokens_sum {num_tokens}\n"
    )


async def test_what_a_prefill_pool_is_scaled_by_is_estimated(tiny_model_dir: Path) -> None:
    """vLLM says how many requests wait, and not how long their prompts are."""
    async with AsyncExitStack() as stack:
        fake = FakeVllm()
        fake.metrics = prompts_text(0, 0, 10, 4000)
        host, port = await start(stack, fake)
        options = VllmOptions(f"http://{host}:{port}", "prefill", "m")
        worker = VllmWorker(options, ModelConfig.from_dir(tiny_model_dir), Tokenizer.load(tiny_model_dir))
        stack.push_async_callback(worker.stop)
        await worker.start()
        assert (worker.stats().waiting_prompt_tokens, worker.stats().prefill_busy_s) == (0, 0.0)
        fake.metrics = prompts_text(2, 3, 10, 4000)
        await until(lambda: worker.stats().waiting_prompt_tokens == 4 * 400)
        await until(lambda: worker.stats().prefill_busy_s > 0)
        for role, expected in (("both", 3 * 400), ("decode", 0)):
            await worker.switch_role(role, 1.0)  # type: ignore[arg-type]
            assert worker.stats().waiting_prompt_tokens == expected
            busy_s, figures = worker.stats().prefill_busy_s, worker.figures
            await until(lambda figures=figures: worker.figures is not figures)
            assert worker.stats().prefill_busy_s == busy_s > 0, "it counts what is surely prefill, and never goes back"
        await worker.switch_role("prefill", 1.0)
        fake.metrics = prompts_text(0, 1, 20, 4000 + 10 * 100)
        await until(lambda: worker.stats().waiting_prompt_tokens == 250)  # the mean of both tens
        fake.metrics = prompts_text(0, 1, 1000, 5000 + 980 * 50)
        await until(lambda: worker.stats().waiting_prompt_tokens == 50)  # and no more than what came of late
        fake.metrics = prompts_text(0, 2, 1, 700)  # started anew
        await until(lambda: worker.stats().num_waiting == 2)
        assert worker.stats().waiting_prompt_tokens == 100
        busy_s = worker.stats().prefill_busy_s
        worker.engine._scraped_at_s -= 60  # as if nothing could be read for a minute
        fake.metrics = prompts_text(1, 1, 1, 700)
        await until(lambda: worker.stats().num_running == 1)
        assert worker.stats().prefill_busy_s < busy_s + 50, "of a time without figures nothing is known"
        fake.metrics = prompts_text(0, 2, 1, 700)
        await until(lambda: worker.stats().num_running == 0)
        busy_s = worker.stats().prefill_busy_s
        fake.metrics = prompts_text(0, 0, 1, 700)
        await until(lambda: worker.stats().num_waiting == 0)
        assert worker.stats().prefill_busy_s == busy_s, "nothing ran"


async def test_a_worker_whose_server_is_away_is_not_ready_until_it_is_back(tiny_model_dir: Path) -> None:
    """A server that somebody else started: nobody here would notice its death otherwise."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        host, port = await start(first, FakeVllm())
        options = VllmOptions(f"http://{host}:{port}", "both", "m")
        worker = VllmWorker(options, ModelConfig.from_dir(tiny_model_dir), Tokenizer.load(tiny_model_dir))
        stack.push_async_callback(worker.stop)
        await worker.start()
        app = WorkerServer(worker, ServerOptions(block_size=16, model_name="m", internal_key="k" * 20))
        url = await stack.enter_async_context(serving(app))
        async with aiohttp.ClientSession(url) as http:

            async def ready() -> int:
                async with http.get("/ready") as response:
                    return response.status

            assert await ready() == 200
            await first.aclose()
            await until(lambda: worker.disconnected)
            assert app.info().state == "disconnected" and await ready() == 503
            async with http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}) as response:
                assert response.status == 503 and "disconnected" in await response.text()
            await start(stack, FakeVllm(), port)
            await until(lambda: not worker.disconnected)
            assert app.info().state == "serving" and await ready() == 200


async def test_what_waits_for_its_kv_is_no_queue(pair: Pair) -> None:
    """vLLM counts it as waiting too: each transfer under way would send the next prompt to be computed here."""
    reasons = 'vllm:num_requests_waiting_by_reason{reason="%s"} %d\n'
    waiting = 'vllm:num_requests_waiting{engine="0",model_name="m"} '
    pair.decode.metrics = METRICS.replace(waiting + "0.0", waiting + "2.0")
    pair.decode.metrics += reasons % ("deferred", 2) + reasons % ("capacity", 0)
    await until(lambda: pair.worker.figures.num_waiting == 2)
    assert isinstance((await pair.run())[-1], Finished)
    pair.decode.metrics += reasons % ("capacity", 1)
    await until(lambda: pair.worker.figures.num_queued == 1)
    with pytest.raises(CapacityError, match="no room"):
        await pair.run()


async def test_a_server_of_another_model_is_refused(tiny_model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        host, port = await start(stack, FakeVllm())
        options = VllmOptions(f"http://{host}:{port}", "decode", "other")
        worker = VllmWorker(options, ModelConfig.from_dir(tiny_model_dir), Tokenizer.load(tiny_model_dir))
        stack.push_async_callback(worker.stop)
        with pytest.raises(RemoteError, match="not other"):
            await worker.start()


def test_older_names_are_read_and_missing_ones_are_named() -> None:
    figures = read_figures("vllm:gpu_cache_usage_perc 0.5\nvllm:prompt_tokens_total 9\n")
    assert (figures.usage, figures.num_computed_tokens) == (0.5, 9)
    assert {"num_running", "num_bytes_received"} <= set(figures.missing)
    missing = ("num_preemptions", "num_failed_transfers", "num_expired", "num_prompts", "num_prompts_tokens")
    assert read_figures(METRICS).missing == missing


def test_sampling_is_passed_on_and_stop_strings_are_ours() -> None:
    body = request_body(make_request(seed=3, logit_bias={4: -1.0}, stop=("x",), stop_token_ids=(9,), top_k=5), "m")
    assert (body["seed"], body["logit_bias"], body["stop_token_ids"], body["top_k"]) == (3, {"4": -1.0}, [2, 9], 5)
    assert "stop" not in body
    assert "stop_token_ids" not in request_body(make_request(ignore_eos=True), "m")


async def test_connections_are_left_before_engines_close_them(pair: Pair) -> None:
    """A request on a connection that its server is just closing is lost: a prefill server that is well is given up."""
    connector = pair.worker.engine.http.connector
    assert connector is not None and connector._keepalive_timeout == KEEP_ALIVE_S < 5.0, "vLLM's, SGLang's, uvicorn's"
