"""The SGLang adapter against servers written from its public sources: the room, both legs, and all that goes wrong.

No real SGLang was run here: it needs an accelerator. docs/engines.md says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from workers.scripted import until
from workers.sglang_server import FakeSglang, sglang_pair

from kvbaton.config import ModelSettings, WorkerSettings
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.kv.compat import digest
from kvbaton.router.measured import token_bytes
from kvbaton.types import CapacityError, GenerateRequest, LocalError, RemoteError, SamplingParams, TokenOutput
from kvbaton.workers.engine_process import make_engine_worker
from kvbaton.workers.protocol import Admitted, Finished, PeerAddress, WorkerEvent
from kvbaton.workers.sglang import SglangOptions, SglangWorker
from kvbaton.workers.sglang_bootstrap import BootstrapInfo, DecodeServer, differences
from kvbaton.workers.sglang_stream import PART, PartReader


def make_request(rid: str = "r1", **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 3, "temperature": 0.0, **sampling})
    return GenerateRequest(rid, (5, 6, 7, 8), params, eos_token_ids=(2,), cache_salt="s", priority=3)


class Pair:
    def __init__(self, prefill: FakeSglang, decode: FakeSglang, worker: SglangWorker) -> None:
        self.prefill, self.decode, self.worker = prefill, decode, worker

    @property
    def peer(self) -> PeerAddress:
        return PeerAddress(self.prefill.host, self.prefill.bootstrap_port)

    async def run(self, rid: str = "r1", **sampling: Any) -> list[WorkerEvent]:
        return [event async for event in self.worker.generate(make_request(rid, **sampling), self.peer, 20.0)]

    async def open_legs(self) -> None:
        await until(lambda: self.prefill.num_open == self.decode.num_open == 1)


def make_worker(model_dir: Path, server: FakeSglang, role: Any) -> SglangWorker:
    options = SglangOptions(server.url, role, "m", max_running=2, max_waiting=1)
    return SglangWorker(options, ModelConfig.from_dir(model_dir), Tokenizer.load(model_dir))


@pytest.fixture
async def pair(tiny_model_dir: Path) -> AsyncIterator[Pair]:
    async with sglang_pair() as (prefill, decode):
        worker = make_worker(tiny_model_dir, decode, "decode")
        await worker.start()
        yield Pair(prefill, decode, worker)
        await until(lambda: prefill.num_open == decode.num_open == 0)
        assert worker.engine.num_open == 0
        await worker.stop()


async def test_the_fingerprint_has_the_models_heads_on_any_number_of_ranks(tiny_model_dir: Path) -> None:
    found = []
    async with sglang_pair() as (_, decode):
        for tp_size in (1, 2, 4):
            decode.info["tp_size"] = tp_size
            worker = make_worker(tiny_model_dir, decode, "decode")
            await worker.start()
            await worker.stop()
            found.append(worker.fingerprint)
    assert [one.tp_size for one in found] == [1, 2, 4]
    assert {one.num_kv_heads for one in found} == {ModelConfig.from_dir(tiny_model_dir).num_kv_heads}
    assert all(digest(one) == digest(found[0]) for one in found), "KV may move between them"
    assert len({token_bytes(one) for one in found}) == 1, "what the router takes for a token on the wire"


@pytest.mark.parametrize("incremental", [False, True])
async def test_both_legs_meet_in_a_room_that_nobody_else_has(pair: Pair, incremental: bool) -> None:
    pair.decode.incremental = incremental
    events = await pair.run(logprobs=1)
    await pair.run("r2")
    first, second = pair.prefill.bodies[0], pair.decode.bodies[0]
    assert {**first, "stream": True} == second, "the same body to both, but only decode streams"
    assert (second["bootstrap_host"], second["bootstrap_port"]) == ("127.0.0.1", pair.prefill.bootstrap_port)
    rooms = [body["bootstrap_room"] for body in pair.decode.bodies]
    assert len(set(rooms)) == 2 and all(0 < room < 2**63 for room in rooms)
    assert events[0] == Admitted(4, 2, 4, path="remote")
    outputs = [event for event in events if isinstance(event, TokenOutput)]
    assert [output.token_id for output in outputs] == [11, 12, 13]
    assert [output.finish_reason for output in outputs] == [None, None, "length"]
    assert outputs[1].logprobs is not None and outputs[1].logprobs.top == ((12, -0.5), (99, -0.7))
    assert isinstance(events[-1], Finished) and events[-1].transfer_bytes > 0
    stats = pair.worker.stats()
    assert stats.num_transfers == 2
    assert stats.transfer_bytes_received == 2 * events[-1].transfer_bytes, "it does not say; what ended adds up"
    assert pair.prefill.aborted == pair.decode.aborted == []


async def test_who_leaves_after_the_first_token_counts_with_all_of_its_prompt(pair: Pair) -> None:
    whole = (await pair.run())[-1]
    events = pair.worker.generate(make_request("r2"), pair.peer, 20.0)
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, TokenOutput):
                break
    stats = pair.worker.stats()
    assert isinstance(whole, Finished) and stats.num_transfers == 2
    assert stats.transfer_bytes_received == 2 * whole.transfer_bytes


async def test_what_is_asked_is_in_the_engines_words(pair: Pair) -> None:
    await pair.run(top_k=0, seed=7, logit_bias={4: 1.5}, stop_token_ids=(9,), min_tokens=1)
    body = pair.decode.bodies[0]
    assert body["input_ids"] == [5, 6, 7, 8] and body["cache_salt"] == "s" and body["priority"] == 3
    asked = body["sampling_params"]
    assert (asked["max_new_tokens"], asked["min_new_tokens"], asked["top_k"]) == (3, 1, -1)
    assert asked["stop_token_ids"] == [2, 9] and asked["sampling_seed"] == 7 and asked["logit_bias"] == {"4": 1.5}


@pytest.mark.parametrize("status", [500, 503, 400])
async def test_an_error_of_prefill_ends_decode_at_once(pair: Pair, status: int) -> None:
    """Case: without it decode waits for its prefill for minutes."""
    pair.prefill.status = status
    pair.prefill.hold.clear()
    task = asyncio.create_task(pair.run())
    await pair.open_legs()
    pair.prefill.hold.set()
    with pytest.raises(RemoteError, match=f"answers {status}: it broke"):
        await task
    await until(lambda: pair.decode.num_open == 0)
    assert pair.decode.aborted == ["r1"] and pair.prefill.aborted == ["r1"]
    assert pair.worker.stats().num_transfer_failures == 1


async def test_a_prefill_that_gives_up_ends_decode_too(pair: Pair) -> None:
    pair.prefill.ending = {"type": "abort", "message": "out of memory", "status_code": 500}
    pair.decode.hold.clear()
    task = asyncio.create_task(pair.run())
    await pair.open_legs()
    pair.prefill.rooms[pair.prefill.bodies[0]["bootstrap_room"]].awaited.set()
    with pytest.raises(RemoteError, match="out of memory"):
        await task


@pytest.mark.parametrize(("status", "kind"), [(400, LocalError), (503, CapacityError), (500, LocalError)])
async def test_an_error_of_decode_ends_prefill(pair: Pair, status: int, kind: type[Exception]) -> None:
    pair.decode.status = status
    with pytest.raises(kind, match="it broke"):
        await pair.run()
    await until(lambda: pair.prefill.num_open == 0)
    assert pair.prefill.aborted == ["r1"]


async def test_decode_that_fails_because_prefill_did_is_the_peers_fault(pair: Pair) -> None:
    pair.decode.status = pair.prefill.status = 500
    pair.prefill.hold.clear()
    task = asyncio.create_task(pair.run())
    await until(lambda: bool(pair.decode.bodies) and pair.decode.num_open == 0)
    pair.prefill.hold.set()
    with pytest.raises(RemoteError, match="prefill server answers 500"):
        await task


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_leaving_ends_both(pair: Pair, leg: str) -> None:
    getattr(pair, leg).hold.clear()
    task = asyncio.create_task(pair.run())
    await pair.open_legs()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: pair.prefill.num_open == pair.decode.num_open == 0)
    assert pair.prefill.aborted == pair.decode.aborted == ["r1"]


async def test_a_deadline_ends_both(pair: Pair) -> None:
    pair.prefill.hold.clear()
    with pytest.raises(CapacityError, match="deadline"):
        async for _ in pair.worker.generate(make_request(), pair.peer, 0.2):
            pass
    await until(lambda: pair.prefill.num_open == pair.decode.num_open == 0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"page_size": 64}, "page_size: ours 16, theirs 64"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype: ours bfloat16, theirs fp8_e4m3"),
        ({"prefill_http_port": None}, "does not say where its server listens"),
    ],
)
async def test_a_server_that_does_not_fit_gets_no_request(pair: Pair, change: dict[str, Any], word: str) -> None:
    right = dict(pair.prefill.bootstrap)
    pair.prefill.bootstrap |= change
    with pytest.raises(RemoteError, match=word):
        await pair.run()
    assert pair.prefill.bodies == pair.decode.bodies == []
    assert pair.worker.stats().num_transfer_failures == 1
    pair.prefill.bootstrap = right
    assert await pair.run(), "it is asked again, and what was wrong is right now"


@pytest.mark.parametrize("ends", ["decode's error", "leaving"])
async def test_after_whatever_did_not_end_well_the_servers_are_compared_again(pair: Pair, ends: str) -> None:
    """Case: prefill was restarted with other pages, and decode is the first to say that something is wrong."""
    await pair.run()
    pair.prefill.bootstrap["page_size"] = 64
    pair.prefill.hold.clear()
    if ends == "decode's error":
        pair.decode.status = 500
        with pytest.raises(LocalError, match="it broke"):
            await pair.run()
    else:
        task = asyncio.create_task(pair.run())
        await pair.open_legs()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    num_asked = len(pair.prefill.bodies)
    with pytest.raises(RemoteError, match="page_size: ours 16, theirs 64"):
        await pair.run()
    assert len(pair.prefill.bodies) == num_asked


async def test_ranks_that_are_not_there_yet_and_servers_that_are_not(pair: Pair) -> None:
    pair.prefill.registered = False
    with pytest.raises(RemoteError, match="waits for ranks"):
        await pair.run()
    with pytest.raises(RemoteError, match="127.0.0.1:1"):
        async for _ in pair.worker.generate(make_request(), PeerAddress("127.0.0.1", 1), 5.0):
            pass


def test_parallelism_may_differ_where_one_divides_the_other() -> None:
    assert not differences(DecodeServer(tp_size=8), BootstrapInfo(attn_tp_size=4))
    assert not differences(DecodeServer(tp_size=8, dp_size=8, enable_dp_attention=True), BootstrapInfo(attn_tp_size=3))
    (found,) = differences(DecodeServer(tp_size=4), BootstrapInfo(attn_tp_size=3))
    assert found.field == "attn_tp_size"
    assert not differences(DecodeServer(pp_size=1), BootstrapInfo(pp_size=4))
    (found,) = differences(DecodeServer(pp_size=2), BootstrapInfo(pp_size=4))
    assert found.field == "pp_size"
    (found,) = differences(DecodeServer(kv_cache_dtype="auto"), BootstrapInfo(kv_cache_dtype="bfloat16"))
    assert found.field == "kv_cache_dtype", "decode compares the words"
    assert not differences(DecodeServer(), BootstrapInfo()), "what nobody tells is no difference"


async def test_a_server_for_one_half_does_not_do_the_other(pair: Pair, tiny_model_dir: Path) -> None:
    with pytest.raises(CapacityError, match="started for decode only"):
        pair.worker.generate(make_request(), None)
    assert not pair.worker.serves_alone
    assert not await pair.worker.switch_role("both", 1.0) and pair.worker.role == "decode"
    wrong = make_worker(tiny_model_dir, pair.decode, "prefill")
    with pytest.raises(RemoteError, match="--disaggregation-mode decode"):
        await wrong.start()
    await wrong.stop()
    prefill = make_worker(tiny_model_dir, pair.prefill, "prefill")
    await prefill.start()
    assert prefill.kv_port == pair.prefill.bootstrap_port and prefill.block_size == 16
    await prefill.stop()


async def test_a_server_for_both_answers_alone(tiny_model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        server = FakeSglang(None, {})
        await server.start(stack)
        worker = make_worker(tiny_model_dir, server, "both")
        await worker.start()
        stack.push_async_callback(worker.stop)
        server.ending = {"type": "stop", "matched": 13}
        events = [event async for event in worker.generate(make_request())]
        assert events[0] == Admitted(4, 2) and events[-1] == Finished(num_cached_tokens=2)
        last = events[-2]
        assert isinstance(last, TokenOutput) and last.stop_token and last.token_id == 13
        assert "bootstrap_room" not in server.bodies[0]
        server.metrics = server.metrics.replace("num_queue_reqs{", "num_queue_reqs_gone{")
        assert worker.stats().num_blocks == 64


@pytest.mark.parametrize(
    ("stream", "word"),
    [
        (b'data: {"output_ids":[1],"meta_info":{"completion_tokens":3}}\n\n', "counts 3 tokens and sends 1"),
        (b'data: {"output_ids":[1,2,3,4],"meta_info":{"completion_tokens":4}}\n\n', "more than the 3 tokens"),
        (b'data: {"output_ids":["x"]}\n\n', "cannot be read"),
        (
            b'data: {"output_ids":[1],"meta_info":{"completion_tokens":1}}\n\ndata: [DONE]\n\n',
            "without a finish reason",
        ),
        (b'data: {"output_ids":[1],"meta_info":{"completion_tokens":1}}\n\n', "went away"),
        (b'data: {"error":{"message":"it broke","code":500}}\n\n', "it broke"),
        (
            b'data: {"meta_info":{"finish_reason":{"type":"abort","message":"no KV","status_code":500}}}\n\n',
            "no KV",
        ),
    ],
)
async def test_an_odd_answer_is_a_typed_error(pair: Pair, stream: bytes, word: str) -> None:
    pair.decode.stream = stream
    with pytest.raises(LocalError, match=word):
        await pair.run()


def test_an_end_token_that_was_cut_off_costs_no_other() -> None:
    reader = PartReader(make_request(), 320)
    raw = b'{"output_ids":[11,12],"meta_info":{"completion_tokens":2,"finish_reason":{"type":"stop","matched":2}}}'
    outputs = reader.push(PART.decode(raw))
    assert [(output.token_id, output.stop_token) for output in outputs] == [(11, False), (12, False), (2, True)]
    reader.close()


def test_settings_must_name_a_server(tiny_model_dir: Path) -> None:
    model = ModelSettings(dir=str(tiny_model_dir))
    for engine in ("sglang", "trtllm"):
        settings = WorkerSettings(engine=engine, engine_url="http://127.0.0.1:7")  # type: ignore[arg-type]
        assert make_engine_worker(model, settings).model_id == tiny_model_dir.name
        for url, word in (("", "not started here"), ("ftp://h:1", "not http")):
            with pytest.raises(LocalError, match=word) as caught:
                make_engine_worker(model, WorkerSettings(engine=engine, engine_url=url))  # type: ignore[arg-type]
            assert caught.value.field == "engine_url"
