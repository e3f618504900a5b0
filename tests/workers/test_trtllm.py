"""The TensorRT-LLM adapter against servers written from its public sources: context, generation, and what goes wrong.

No real TensorRT-LLM was run here: it needs an accelerator. docs/engines.md says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from workers.scripted import until
from workers.sglang_server import listen

from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import CapacityError, GenerateRequest, LocalError, RemoteError, SamplingParams, TokenOutput
from kvbaton.workers.protocol import Admitted, Finished, PeerAddress, WorkerEvent
from kvbaton.workers.trtllm import TrtllmOptions, TrtllmWorker

FIELDS = json.loads((Path(__file__).parent / "engine_fields" / "trtllm.json").read_text())
METRICS = """
trtllm_num_requests_running 0.0
trtllm_num_requests_waiting 0.0
trtllm_kv_cache_utilization 0.25
trtllm_kv_cache_max_blocks 128.0
trtllm_kv_cache_tokens_per_block 32.0
"""
# Ids that no double holds, a state that is nobody's business, an order that is not alphabetical.
PARAMS = (
    '{"request_type":"context_only","first_gen_tokens":[11],"ctx_request_id":9007199254740993,'
    '"encoded_opaque_state":"b3BhcXVl","draft_tokens":null,"disagg_request_id":%s,"ctx_dp_rank":0,'
    '"ctx_info_endpoint":"tcp://10.0.0.7:7000"}'
)


class FakeTrtllm:
    """One server. It refuses fields that its protocol does not have, as the real one does."""

    def __init__(self) -> None:
        self.tokens = [11, 12, 13]
        self.finish_reason = "length"
        self.status = 200
        self.params: str | None = PARAMS
        self.prompt_token_ids: Any = [5, 6, 7, 8]
        self.bodies: list[dict[str, Any]] = []
        self.raw: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.num_open = 0
        self.port = 0
        self.model, self.version, self.metrics, self.key = "m", "1.3.0", METRICS, ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def complete(self, request: web.Request) -> web.StreamResponse:
        raw = await request.text()
        body = json.loads(raw)
        unknown = {*body} - {*FIELDS["completion_request"]}
        unknown |= {*(body.get("disaggregated_params") or {})} - {*FIELDS["disaggregated_params"]}
        if unknown or (body.get("stream_options") and not body["stream"]):
            return web.json_response({"error": {"message": f"extra fields: {unknown}"}}, status=400)
        self.bodies.append(body)
        self.raw.append(raw)
        self.num_open += 1
        try:
            await self.hold.wait()
            if self.status != 200:
                return web.json_response({"error": {"message": "it broke"}}, status=self.status)
            return await (self._stream(request) if body["stream"] else self._context(body))
        finally:
            self.num_open -= 1

    async def _context(self, body: dict[str, Any]) -> web.Response:
        params = "null"
        if self.params is not None:
            given = body["disaggregated_params"]["disagg_request_id"]
            params = self.params % given if "%s" in self.params else self.params
        choice = {"index": 0, "text": "", "token_ids": [11], "finish_reason": self.finish_reason}
        answer = {
            "choices": [choice],
            "usage": {"prompt_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}},
            "prompt_token_ids": self.prompt_token_ids,
        }
        assert {*answer} <= {*FIELDS["completion_response"]} and {*choice} <= {*FIELDS["completion_choice"]}
        text = json.dumps(answer).replace('"finish_reason"', f'"disaggregated_params": {params}, "finish_reason"')
        return web.Response(text=text, content_type="application/json")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for index, token in enumerate(self.tokens):
            last = index == len(self.tokens) - 1
            logprobs = {"tokens": ["x"], "token_logprobs": [-0.5], "top_logprobs": [{"x": -0.5}], "text_offset": [0]}
            reason = self.finish_reason if last else None
            choice = {"index": 0, "text": "", "token_ids": [token], "finish_reason": reason, "logprobs": logprobs}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        usage = {"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return response

    async def start(self, stack: AsyncExitStack) -> None:
        async def models(request: web.Request) -> web.Response:
            if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

        async def version(request: web.Request) -> web.Response:
            return web.json_response({"version": self.version})

        async def metrics(request: web.Request) -> web.Response:
            return web.Response(text=self.metrics)

        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", models)
        app.router.add_get("/version", version)
        app.router.add_get("/prometheus/metrics", metrics)
        self.port = await listen(stack, app)


class Pair:
    def __init__(self, context: FakeTrtllm, generation: FakeTrtllm, worker: TrtllmWorker) -> None:
        self.context, self.generation, self.worker = context, generation, worker
        self.peer = PeerAddress("127.0.0.1", context.port)

    async def run(self, remote: bool = True, salt: str = "", **sampling: Any) -> list[WorkerEvent]:
        params = SamplingParams(**{"max_tokens": 3, **sampling})
        request = GenerateRequest("r1", (5, 6, 7, 8), params, salt, eos_token_ids=(2,))
        return [event async for event in self.worker.generate(request, self.peer if remote else None, 20.0)]


@pytest.fixture
async def pair(tiny_model_dir: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        context, generation = FakeTrtllm(), FakeTrtllm()
        await context.start(stack)
        await generation.start(stack)
        options = TrtllmOptions(f"http://127.0.0.1:{generation.port}", "decode", "m", max_running=2, max_waiting=1)
        worker = TrtllmWorker(options, ModelConfig.from_dir(tiny_model_dir), Tokenizer.load(tiny_model_dir))
        await worker.start()
        stack.push_async_callback(worker.stop)
        yield Pair(context, generation, worker)
        await until(lambda: context.num_open == generation.num_open == 0)
        assert worker.engine.num_open == 0


async def test_who_leaves_after_the_first_token_counts_with_all_of_its_prompt(pair: Pair) -> None:
    request = GenerateRequest("r1", (5, 6, 7, 8), SamplingParams(max_tokens=3), eos_token_ids=(2,))
    events = pair.worker.generate(request, pair.peer, 20.0)
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, TokenOutput):
                break
    stats = pair.worker.stats()
    whole = (await pair.run())[-1]
    assert isinstance(whole, Finished)
    assert (stats.num_transfers, stats.transfer_bytes_received) == (1, whole.transfer_bytes)


async def test_context_then_generation_and_every_id_is_exact(pair: Pair) -> None:
    events = await pair.run(logprobs=0, min_tokens=2)
    asked, passed = pair.context.bodies[0], pair.generation.bodies[0]
    given = asked["disaggregated_params"]
    assert given["request_type"] == "context_only" and 2**42 <= given["disagg_request_id"] < 2**63
    assert asked["stream"] is False and "stream_options" not in asked
    assert asked["max_tokens"] == passed["max_tokens"] == 3 and asked["min_tokens"] == 2
    got = passed["disaggregated_params"]
    assert got["request_type"] == "generation_only"
    assert got["ctx_request_id"] == 2**53 + 1 and got["disagg_request_id"] == given["disagg_request_id"]
    assert '"ctx_request_id":9007199254740993' in pair.generation.raw[0]
    assert got["encoded_opaque_state"] == "b3BhcXVl" and got["ctx_info_endpoint"] == "tcp://10.0.0.7:7000"
    assert got["ctx_usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert passed["prompt"] == [5, 6, 7, 8] and passed["stream"] is True
    assert events[0] == Admitted(4, 3, 4, path="remote")
    outputs = [event for event in events if isinstance(event, TokenOutput)]
    assert [output.token_id for output in outputs] == [11, 12, 13] and outputs[-1].finish_reason == "length"
    assert outputs[0].logprobs is not None and outputs[0].logprobs.logprob == -0.5
    assert isinstance(events[-1], Finished) and events[-1].transfer_bytes > 0 and events[-1].prefill_s > 0
    assert pair.worker.stats().transfer_bytes_received == events[-1].transfer_bytes
    assert pair.worker.stats().num_transfers == 1 and pair.worker.stats().num_blocks == 128


async def test_two_requests_have_two_ids(pair: Pair) -> None:
    await pair.run()
    await pair.run()
    assert len({body["disaggregated_params"]["disagg_request_id"] for body in pair.context.bodies}) == 2


async def test_what_ended_in_context_is_answered_from_there(pair: Pair) -> None:
    pair.context.finish_reason = "stop"
    events = await pair.run()
    assert pair.generation.bodies == []
    assert events[0] == Admitted(4, 3, 4, path="remote")
    (output,) = [event for event in events if isinstance(event, TokenOutput)]
    assert output.token_id == 11 and output.finish_reason == "stop" and output.stop_token
    last = events[-1]
    assert isinstance(last, Finished) and last.transfer_bytes == 0, "nothing moved"


async def test_not_finished_goes_on(pair: Pair) -> None:
    pair.context.finish_reason = "not_finished"
    assert len(await pair.run()) == 5


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        ({"status": 500}, "answers 500: it broke"),
        ({"params": None}, "offers no KV"),
        ({"params": '{"ctx_request_id": 1}'}, "no disagg_request_id"),
        ({"params": '{"disagg_request_id": 1, "ctx_request_id": null}'}, "no ctx_request_id"),
        ({"params": "[1]"}, "cannot be read"),
        ({"finish_reason": "abort"}, "cannot be read"),
    ],
)
async def test_a_bad_context_fails_loudly_and_is_counted(pair: Pair, damage: dict[str, Any], word: str) -> None:
    for name, value in damage.items():
        setattr(pair.context, name, value)
    with pytest.raises(RemoteError, match=word):
        await pair.run()
    assert pair.generation.bodies == []
    assert pair.worker.stats().num_transfer_failures == 1


async def test_a_context_server_that_is_not_there_is_the_peers_fault(pair: Pair) -> None:
    pair.peer = PeerAddress("127.0.0.1", 1)
    with pytest.raises(RemoteError, match="127.0.0.1:1"):
        await pair.run()


async def test_a_local_request_is_one_call(pair: Pair) -> None:
    events = await pair.run(remote=False)
    assert pair.context.bodies == [] and "disaggregated_params" not in pair.generation.bodies[0]
    assert events[0] == Admitted(4, 0) and events[-1] == Finished(num_cached_tokens=2)


@pytest.mark.parametrize(("status", "kind"), [(400, LocalError), (429, CapacityError), (500, RemoteError)])
async def test_a_refusal_of_generation_is_told(pair: Pair, status: int, kind: type[Exception]) -> None:
    pair.generation.status = status
    with pytest.raises(kind, match="it broke"):
        await pair.run()


@pytest.mark.parametrize("leg", ["context", "generation"])
async def test_leaving_ends_the_leg_that_is_open(pair: Pair, leg: str) -> None:
    server: FakeTrtllm = getattr(pair, leg)
    server.hold.clear()
    task = asyncio.create_task(pair.run())
    await until(lambda: server.num_open == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: server.num_open == 0)
    assert bool(pair.generation.bodies) == (leg == "generation")


async def test_what_the_engine_does_not_offer_is_refused_by_name(pair: Pair) -> None:
    for options, field in (({"salt": "s"}, "cache_salt"), ({"logprobs": 2}, "logprobs")):
        with pytest.raises(LocalError) as caught:
            await pair.run(**options)  # type: ignore[arg-type]
        assert caught.value.field == field
    assert pair.context.bodies == []


async def test_no_context_is_spent_without_room(pair: Pair) -> None:
    pair.worker.engine.figures_at_s -= 60
    with pytest.raises(CapacityError):
        await pair.run()
