"""vLLM's MooncakeConnector, against servers written from its public sources (``engine_fields/vllm_mooncake.json``).

As the real ones do, decode waits for its transfer for ever, prefill sends only what ended by length, and answers
without transfer parameters. Never run against a real server: the connector needs an accelerator.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from workers.scripted import until
from workers.test_vllm import EOS, METRICS, FakeVllm, make_request, start

from kvbaton.config import ModelSettings, WorkerSettings
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import LocalError, RemoteError, TokenOutput
from kvbaton.workers.protocol import Admitted, Finished, PeerAddress, WorkerEvent
from kvbaton.workers.vllm import VllmOptions, VllmWorker
from kvbaton.workers.vllm_process import make_vllm_worker

FIELDS = json.loads((Path(__file__).parent / "engine_fields" / "vllm_mooncake.json").read_text())


class Fleet:
    """One prefill server with its bootstrap server, one decode server, and what they know of each transfer."""

    def __init__(self) -> None:
        self.prefill, self.decode = Server(self, "prefill_params"), Server(self, "decode_params")
        self.sent: dict[str, asyncio.Event] = {}
        self.engines: Any = {"0": {"engine_id": "e0", "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}}
        self.bootstrap_status = 200
        self.num_queries = 0
        self.address = ""

    def transfer(self, name: str) -> asyncio.Event:
        return self.sent.setdefault(name, asyncio.Event())

    def bootstrap(self) -> web.Application:
        async def query(request: web.Request) -> web.Response:
            self.num_queries += 1
            if isinstance(self.engines, bytes):
                return web.Response(body=self.engines)
            assert all(set(entry) == set(FIELDS["bootstrap_query"]) for entry in self.engines.values())
            return web.json_response(self.engines, status=self.bootstrap_status)

        app = web.Application()
        app.router.add_get("/query", query)
        return app


class Server(FakeVllm):
    def __init__(self, fleet: Fleet, params: str) -> None:
        super().__init__()
        self.fleet, self.fields = fleet, FIELDS[params]
        self.transfer = None
        self.metrics = "".join(line for line in METRICS.splitlines(True) if "nixl" not in line)
        self.ranks: list[str | None] = []

    async def _whole(self) -> web.Response:
        asked = self.bodies[-1]["kv_transfer_params"]
        assert set(asked) == set(self.fields), asked
        self.ranks.append(self.headers[-1].get("x-data-parallel-rank"))
        if self.ending in FIELDS["prefill_sends_when_finished_by"]:
            self.fleet.transfer(asked["transfer_id"]).set()
        return await super()._whole()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if (asked := self.bodies[-1].get("kv_transfer_params")) is not None:
            assert set(asked) == set(self.fields), asked
            engines = {entry["engine_id"] for entry in self.fleet.engines.values()}
            if asked["remote_bootstrap_addr"] != self.fleet.address or asked["remote_engine_id"] not in engines:
                return web.json_response({"error": {"message": "KV load failed", "code": 500}}, status=500)
            await self.fleet.transfer(asked["transfer_id"]).wait()
        return await super()._stream(request)


class Pair:
    def __init__(self, fleet: Fleet, worker: VllmWorker, peer: PeerAddress) -> None:
        self.fleet, self.worker, self.peer = fleet, worker, peer

    async def run(self, remote: bool = True, **sampling: Any) -> list[WorkerEvent]:
        events = self.worker.generate(make_request(**sampling), self.peer if remote else None, 60.0)
        return [event async for event in events]


@pytest.fixture
async def pair(tiny_model_dir: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        fleet = Fleet()
        peer = PeerAddress(*await start(stack, fleet.prefill))
        runner = web.AppRunner(fleet.bootstrap(), shutdown_timeout=1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        bootstrap_port = runner.addresses[0][1]
        fleet.address = f"http://127.0.0.1:{bootstrap_port}"
        host, port = await start(stack, fleet.decode)
        options = VllmOptions(f"http://{host}:{port}", "decode", "m", bootstrap_port=bootstrap_port)
        worker = VllmWorker(options, ModelConfig.from_dir(tiny_model_dir), Tokenizer.load(tiny_model_dir))
        await worker.start()
        stack.push_async_callback(worker.stop)
        yield Pair(fleet, worker, peer)
        await until(lambda: fleet.prefill.num_open == fleet.decode.num_open == 0)
        assert worker.engine.num_open == 0


async def test_who_leaves_after_the_first_token_counts_with_all_of_its_prompt(pair: Pair) -> None:
    events = pair.worker.generate(make_request(), pair.peer, 60.0)
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, TokenOutput):
                break
    stats = pair.worker.stats()
    assert stats.num_transfers == 1 and stats.transfer_bytes_received > 0


@pytest.mark.parametrize("told", [10, 1000, 2000])
async def test_what_is_counted_only_grows(pair: Pair, told: int) -> None:
    async def events() -> AsyncGenerator[WorkerEvent, None]:
        yield TokenOutput(7)
        yield Finished(transfer_bytes=told)

    seen = []
    async with contextlib.aclosing(pair.worker.engine.counted(events(), 1000)) as counted:
        async for _ in counted:
            seen.append(pair.worker.stats().transfer_bytes_received)
    seen.append(pair.worker.stats().transfer_bytes_received)
    assert seen == sorted(seen) and seen[-1] == told


async def test_both_calls_name_one_transfer(pair: Pair) -> None:
    events = await pair.run()
    first, second = pair.fleet.prefill.bodies[0], pair.fleet.decode.bodies[0]
    assert (first["max_tokens"], first["stream"], second["max_tokens"], second["stream"]) == (1, False, 3, True)
    offered, pulled = first["kv_transfer_params"], second["kv_transfer_params"]
    assert offered["do_remote_decode"] is True and pulled["do_remote_prefill"] is True
    assert offered["transfer_id"] == pulled["transfer_id"] and pulled["remote_engine_id"] == "e0"
    headers = [server.headers[0]["x-request-id"] for server in (pair.fleet.prefill, pair.fleet.decode)]
    assert headers == ["r1", "r1"]
    # Cached is what the prefill side's cache had, where its answer is not later than decode's first token.
    assert events[0] in (Admitted(4, 1, 4, path="remote"), Admitted(4, 0, 4, path="remote"))
    assert [event.token_id for event in events if isinstance(event, TokenOutput)] == [11, 12, 13]
    last = events[-1]
    assert isinstance(last, Finished) and last.transfer_bytes > 0 and last.prefill_s > 0
    assert pair.worker.stats().num_transfers == 1
    assert pair.worker.stats().transfer_bytes_received == last.transfer_bytes, "it does not say; what ended adds up"


async def test_no_two_requests_have_the_same_transfer_and_the_bootstrap_server_is_asked_once(pair: Pair) -> None:
    for _ in range(3):
        await pair.run()
    assert len(pair.fleet.sent) == 3 and pair.fleet.num_queries == 1
    assert pair.fleet.prefill.ranks == [None] * 3, "one engine: nobody needs to be told which"


async def test_of_several_engines_one_is_named_to_both(pair: Pair) -> None:
    """Case RT-11: several ranks behind one address; whoever pulls is told of the one that holds the KV."""
    pair.fleet.engines = {str(rank): {"engine_id": f"e{rank}", "worker_addr": {}} for rank in range(4)}
    for number in range(16):
        await pair.run()
        rank, asked = pair.fleet.prefill.ranks[number], pair.fleet.decode.bodies[number]["kv_transfer_params"]
        assert asked["remote_engine_id"] == f"e{rank}"
    assert len(set(pair.fleet.prefill.ranks)) > 1, "the work is shared"


async def test_a_local_request_is_one_call(pair: Pair) -> None:
    await pair.run(remote=False)
    assert not pair.fleet.prefill.bodies and "kv_transfer_params" not in pair.fleet.decode.bodies[0]


@pytest.mark.parametrize("end", [EOS, 11])
async def test_a_prompt_whose_first_token_is_an_end_is_sent_too(pair: Pair, end: int) -> None:
    """Prefill sends only what ended by length, so nothing else may end it; whether it is an end is decode's to find."""
    pair.fleet.prefill.tokens = pair.fleet.decode.tokens = [end]
    pair.fleet.decode.finish_reason = "stop"
    events = await pair.run(stop_token_ids=(11,))
    assert [event.finish_reason for event in events if isinstance(event, TokenOutput)] == ["stop"]
    first, second = pair.fleet.prefill.bodies[0], pair.fleet.decode.bodies[0]
    assert first["ignore_eos"] is True and not {"stop", "stop_token_ids"} & set(first)
    assert second["stop_token_ids"] == [EOS, 11] and second["ignore_eos"] is False
    assert pair.worker.stats().num_transfer_failures == 0


async def test_its_servers_keep_the_role_they_were_started_with(pair: Pair) -> None:
    """Case: its scheduler breaks on a request of the other role."""
    assert not await pair.worker.switch_role("prefill", 1.0)
    assert pair.worker.role == "decode" and await pair.worker.switch_role("decode", 1.0)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        ({"status": 500}, "prefill server answers 500"),
        ({"finish_reason": "stop"}, "offers no KV"),
        ({"finish_reason": "abort"}, "offers no KV"),
    ],
)
async def test_a_failed_prefill_ends_the_decode_that_waits_for_it(
    pair: Pair, damage: dict[str, Any], word: str
) -> None:
    for name, value in damage.items():
        setattr(pair.fleet.prefill, name, value)
    with pytest.raises(RemoteError, match=word):
        await pair.run()
    assert pair.worker.stats().num_transfer_failures == 1
    await until(lambda: pair.fleet.decode.num_open == 0)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_leaving_closes_both_calls(pair: Pair, leg: str) -> None:
    getattr(pair.fleet, leg).hold.clear()
    task = asyncio.create_task(pair.run())
    await until(lambda: pair.fleet.decode.num_open == 1 and (leg == "decode" or pair.fleet.prefill.num_open == 1))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: pair.fleet.prefill.num_open == pair.fleet.decode.num_open == 0)


async def test_a_prefill_server_that_came_back_as_another_engine_is_learned(pair: Pair) -> None:
    await pair.run()
    pair.fleet.engines = {"0": {"engine_id": "another", "worker_addr": {}}}
    with pytest.raises(RemoteError, match="KV load failed"):
        await pair.run()
    assert await pair.run()
    assert pair.fleet.decode.bodies[-1]["kv_transfer_params"]["remote_engine_id"] == "another"


@pytest.mark.parametrize(
    ("engines", "status", "word"),
    [
        ({}, 200, "knows no engine"),
        (b"[1]", 200, "cannot be read"),
        (b'{"0":{"engine_id":7}}', 200, "cannot be read"),
        (b"[" * 100_000, 200, "cannot be read"),
        ({}, 503, "answers 503"),
    ],
)
async def test_an_odd_bootstrap_server_fails_before_anybody_is_asked(
    pair: Pair, engines: Any, status: int, word: str
) -> None:
    pair.fleet.engines, pair.fleet.bootstrap_status = engines, status
    with pytest.raises(RemoteError, match=word):
        await pair.run()
    assert not pair.fleet.prefill.bodies and not pair.fleet.decode.bodies
    assert pair.worker.stats().num_transfer_failures == 1


async def test_a_bootstrap_server_that_is_not_there(pair: Pair) -> None:
    assert pair.worker.mooncake is not None
    pair.worker.mooncake.port = 1
    with pytest.raises(RemoteError, match="127.0.0.1:1"):
        await pair.run()


def test_its_servers_are_not_started_here(tiny_model_dir: Path) -> None:
    settings = WorkerSettings(engine="vllm", engine_bootstrap_port=8998)
    with pytest.raises(LocalError, match="engine-url"):
        make_vllm_worker(ModelSettings(dir=str(tiny_model_dir)), settings, "key")
    settings = WorkerSettings(engine="vllm", engine_bootstrap_port=8998, engine_url="http://127.0.0.1:9")
    worker = make_vllm_worker(ModelSettings(dir=str(tiny_model_dir)), settings, "key")
    assert worker.mooncake is not None and worker.mooncake.port == 8998
