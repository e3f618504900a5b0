"""A vLLM server behind the worker protocol: every leg bounded, counted, and called off together.

The server is driven by its OpenAI completions endpoint with token ids in and out, so that text, stop strings, usage
and errors are made by the same code as for the embedded engine. A remote request is two calls: the prefill server
computes one token and answers with an object that only the decode server reads; it is passed on unchanged. That is
NixlConnector's pull; with MooncakeConnector both calls are made at once (``vllm_mooncake``). Invariants:
no prefill is spent while this side has no room; an answer without that object fails loudly; decode is never started on
KV whose lease has run out; leaving by any way closes the open call, which aborts it there.

What vLLM does not offer: a reservation (room is judged by what was sent and by its own figures), and a release of KV
that was prefilled and is not wanted any more (it goes with its lease). Knows nothing about HTTP of clients, or text.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from kvbaton.clock import MonotonicClock
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.kv.compat import fingerprint_of
from kvbaton.kv.layout import KVLayout
from kvbaton.transfer.reach import in_url
from kvbaton.types import UNREADABLE, GenerateRequest, LocalError, RemoteError, Role
from kvbaton.workers.engine_server import EngineServer, answering, refusal
from kvbaton.workers.kv_events import KVEventLog
from kvbaton.workers.protocol import Admitted, Finished, PeerAddress, WorkerEvent, WorkerStats
from kvbaton.workers.two_legs import both_legs
from kvbaton.workers.vllm_kv_events import EngineBlocks
from kvbaton.workers.vllm_kv_follow import EventEndpoints, KVEventFollower
from kvbaton.workers.vllm_metrics import VLLM, EngineFigures
from kvbaton.workers.vllm_mooncake import MooncakePeers, Transfer
from kvbaton.workers.vllm_server import VllmServer
from kvbaton.workers.vllm_stream import (
    CHUNK,
    Chunk,
    TokenReader,
    Usage,
    status_of,
)

_ENCODER = msgspec.json.Encoder()
_USUAL_BLOCK_SIZE = 128  # of vLLM on a CPU, until the server says its own
_START_S = 900.0  # compiling a large model takes minutes
_TIME_OF_DAY_S = 1e9  # 2001; no process's clock, which starts with its machine, is that far
_LEASE_MARGIN_S = 2.0  # the decode server must have asked for the KV before its lease ends
# What the prefill leg asks for: one token, to be continued elsewhere.
_OFFER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class VllmOptions:
    url: str  # of the server, http://host:port
    role: Role
    model_name: str  # as the server calls it
    api_key: str = ""  # shared by the servers of one fleet
    dtype: str = "bfloat16"
    max_running: int = 64
    max_waiting: int = 256
    events: EventEndpoints | None = None  # where it publishes what its prefix cache holds
    bootstrap_port: int = 0  # of the prefill servers' MooncakeConnector; 0: they have NixlConnector


class _Lease(msgspec.Struct):
    """The fields of the object that we look at, none of which need be there."""

    remote_blocks_expiry_time: float | None = None
    remote_prefill_cached_tokens: int | None = None

    def over(self, now_s: float) -> bool:
        """Versions give the time of day, nothing, or a clock of the server's process that means nothing elsewhere."""
        expiry_s = self.remote_blocks_expiry_time
        return expiry_s is not None and expiry_s > _TIME_OF_DAY_S and now_s > expiry_s - _LEASE_MARGIN_S


class _Card(msgspec.Struct):
    id: str
    max_model_len: Annotated[int, msgspec.Meta(gt=0)]


class _Models(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str = ""


_JSON = {"content-type": "application/json"}
_LEASE = msgspec.json.Decoder(_Lease)


class VllmWorker:
    """``await start()`` waits until the server answers. Implements ``protocol.Worker``."""

    kv_events: KVEventLog | None = None
    serves_alone = True
    follower: KVEventFollower | None = None

    def __init__(
        self, options: VllmOptions, config: ModelConfig, tokenizer: Tokenizer, server: VllmServer | None = None
    ) -> None:
        self.options = options
        self._server = server
        self.model_id = options.model_name
        self.tokenizer = tokenizer
        self.incarnation = secrets.token_hex(8)
        self.config = config
        self.max_context = config.max_context
        self.version = ""
        self.fingerprint = fingerprint_of(self._layout(_USUAL_BLOCK_SIZE), config.revision, config.rope_text)
        self.kv_port = int(options.url.rpartition(":")[2])
        self.engine = EngineServer(options.url, options.api_key, VLLM, options.max_running, options.max_waiting)
        self.engine.role = options.role
        self.mooncake = MooncakePeers(options.bootstrap_port) if options.bootstrap_port else None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def role(self) -> Role:
        return self.engine.role

    @property
    def figures(self) -> EngineFigures:
        return self.engine.figures

    @property
    def block_size(self) -> int:
        """Tokens of one of the server's blocks."""
        return self.figures.block_size or _USUAL_BLOCK_SIZE

    def _layout(self, block_size: int) -> KVLayout:
        config, dtype = self.config, self.options.dtype
        return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)

    async def start(self) -> None:
        """RemoteError when the server answers, but not as what it should be; LocalError when ours does not come up."""
        if self._server is not None:
            await self._server.start(_START_S)
        await self.engine.open()
        models = await self.engine.get_json("/v1/models", _Models)
        lengths = {card.id: card.max_model_len for card in models.data}
        if self.options.model_name not in lengths:
            raise RemoteError(f"the server has {', '.join(lengths)}, not {self.options.model_name}", field="model")
        self.max_context = min(self.max_context, lengths[self.options.model_name])
        self.version = (await self.engine.get_json("/version", _Version)).version
        if self._server is not None:
            await self._warm_up()
        await self.engine.scrape()
        layout = self._layout(self.block_size)
        self.fingerprint = fingerprint_of(layout, f"{self.config.revision}/vllm-{self.version}", self.config.rope_text)
        self._tasks.append(asyncio.create_task(self.engine.watch()))
        if self.options.events is not None:
            self._follow_events(self.options.events)

    async def _warm_up(self) -> None:
        """A server of ours serves when it has answered once: sampling and logprobs are compiled by the first that asks
        for them, for minutes on a busy CPU, and the first client would be told that its worker hangs."""
        body = {
            **{"model": self.options.model_name, "prompt": [*range(8)], "max_tokens": 2, "ignore_eos": True},
            "stream": False,
            **{"temperature": 1.0, "top_p": 0.9, "seed": 0, "logprobs": 1},
        }
        try:
            async with asyncio.timeout(_START_S):
                await self.engine.post(f"{self.options.url}/v1/completions", _ENCODER.encode(body), _JSON, "vLLM")
        except TimeoutError:
            raise LocalError(f"vLLM gave no first answer in {_START_S:.0f} s", field="engine") from None

    def _follow_events(self, endpoints: EventEndpoints) -> None:
        blocks = EngineBlocks(self.block_size)

        async def snapshot() -> tuple[int, list[bytes]]:
            return events.next_sequence, blocks.held()

        self.kv_events = events = KVEventLog(self.incarnation, self.block_size, snapshot, MonotonicClock())
        self.follower = KVEventFollower(endpoints, blocks, events)
        self._tasks.append(asyncio.create_task(self.follower.run()))

    @property
    def disconnected(self) -> bool:
        return self.engine.disconnected

    @property
    def alive(self) -> bool:
        return self._server is None or self._server.alive

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(self.config.eos_token_ids)

    @property
    def backend(self) -> str:
        return f"vllm {self.version}"

    async def drain(self, deadline_s: float) -> bool:
        return await self.engine.idle(deadline_s)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.engine.close()
        if self._server is not None:
            await self._server.stop()

    async def switch_role(self, role: Role, deadline_s: float) -> bool:
        """A server with ``kv_both`` does either; the router decides what it is asked. One with MooncakeConnector has
        the role it was started with, and a request of the other one ends it."""
        if self.mooncake is not None:
            return role == self.role
        self.engine.role = role
        return True

    def stats(self) -> WorkerStats:
        return self.engine.stats()

    # -- requests

    def generate(
        self, request: GenerateRequest, prefill: PeerAddress | None = None, deadline_s: float = 600.0
    ) -> AsyncGenerator[WorkerEvent, bool | None]:
        """See ``protocol.Worker.generate``. Close the iterator (``aclose``) to abort."""
        self.engine.check_room(prefill is not None)
        body = request_body(request, self.options.model_name)
        if prefill is None:
            legs = self._decode(request, body)
        else:
            legs = (self._both if self.mooncake is None else self._at_once)(request, body, prefill)
        return self.engine.run(legs, deadline_s)

    async def _both(
        self, request: GenerateRequest, body: dict[str, Any], prefill: PeerAddress
    ) -> AsyncGenerator[WorkerEvent, None]:
        started_s = time.monotonic()
        transfer, lease = await self._prefill(request, prefill, body)
        prefilled_s = time.monotonic() - started_s
        decoding = self.engine.handed_over(self._decode(request, body, transfer, lease), prefill)
        counted = self.engine.counted(decoding, self._prompt_bytes(request))
        try:
            async with contextlib.aclosing(counted) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        event = msgspec.structs.replace(event, prefill_s=prefilled_s)
                    yield event
        except RemoteError:
            self.engine.num_failed += 1
            raise

    async def _prefill(
        self, request: GenerateRequest, prefill: PeerAddress, body: dict[str, Any]
    ) -> tuple[msgspec.Raw, _Lease]:
        """The first leg. RemoteError whatever goes wrong: it is the peer's part."""
        try:
            answer = await self._ask_prefill(request, prefill, body, _OFFER)
            if bytes(answer.kv_transfer_params) == b"null":
                reason = answer.choices[0].finish_reason if answer.choices else None
                raise RemoteError(f"the prefill server offers no KV (finish reason {reason})")
            lease = _LEASE.decode(bytes(answer.kv_transfer_params))
        except UNREADABLE as error:
            self.engine.num_failed += 1
            raise RemoteError(f"prefill at {prefill.host}:{prefill.port}: {type(error).__name__}: {error}") from None
        except RemoteError:
            self.engine.num_failed += 1
            raise
        if lease.remote_prefill_cached_tokens is None and answer.usage is not None:
            lease.remote_prefill_cached_tokens = answer.usage.num_cached
        if lease.over(time.time()):
            self.engine.num_failed += 1
            raise RemoteError("the prefilled KV's lease ended before decode could start")
        return answer.kv_transfer_params, lease

    async def _ask_prefill(
        self, request: GenerateRequest, prefill: PeerAddress, body: dict[str, Any], transfer: Mapping[str, object],
        headers: Mapping[str, str] | None = None,
    ) -> Chunk:  # fmt: skip
        """Its whole answer: one token, and whatever the connector tells.

        No token ends it: MooncakeConnector sends only what ended by length. Decode computes the first token anew, and
        ends with it where it is an end.
        """
        asked = {**body, "stream": False, "max_tokens": 1, "ignore_eos": True, "kv_transfer_params": transfer}
        for name in ("stream_options", "min_tokens", "logprobs", "stop_token_ids"):
            asked.pop(name, None)
        url = f"http://{in_url(prefill.host)}:{prefill.port}/v1/completions"
        sent = {**_headers(request), **(headers or {})}
        return CHUNK.decode(await self.engine.ask_peer(url, _ENCODER.encode(asked), sent, "the prefill server"))

    async def _at_once(
        self, request: GenerateRequest, body: dict[str, Any], prefill: PeerAddress
    ) -> AsyncGenerator[WorkerEvent, None]:
        """MooncakeConnector: both calls together; the two servers find each other by bootstrap server and transfer."""
        assert self.mooncake is not None
        started_s, over, lease, prefilled_s = time.monotonic(), False, _Lease(), 0.0

        async def ask(transfer: Transfer) -> None:
            nonlocal prefilled_s
            try:
                answer = await self._ask_prefill(request, prefill, body, transfer.offer, transfer.headers)
            except UNREADABLE as error:
                raise RemoteError(f"the prefill server's answer cannot be read: {error}") from None
            reason = answer.choices[0].finish_reason if answer.choices else None
            if reason != "length":  # it sends nothing then, and decode would wait for it
                raise RemoteError(f"the prefill server offers no KV (finish reason {reason})")
            lease.remote_prefill_cached_tokens = 0 if answer.usage is None else answer.usage.num_cached
            prefilled_s = time.monotonic() - started_s

        try:
            transfer = await self.mooncake.transfer(self.engine, prefill)
            decoding = self._decode(request, body, transfer.pull, lease)
            legs = self.engine.handed_over(both_legs(ask(transfer), decoding), prefill)
            counted = self.engine.counted(legs, self._prompt_bytes(request))
            async with contextlib.aclosing(counted) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        event = msgspec.structs.replace(event, prefill_s=prefilled_s)
                    yield event
            over = True
        except RemoteError:
            self.engine.num_failed += 1
            raise
        finally:
            if not over:
                self.mooncake.forget(prefill)  # it may come back as another engine

    def _prompt_bytes(self, request: GenerateRequest) -> int:
        layout = self._layout(self.block_size)
        return layout.blocks_for(len(request.prompt_token_ids)) * layout.block_bytes

    async def _decode(
        self,
        request: GenerateRequest,
        body: dict[str, Any],
        transfer: msgspec.Raw | Mapping[str, object] | None = None,
        lease: _Lease | None = None,
    ) -> AsyncGenerator[WorkerEvent, None]:
        num_prompt = len(request.prompt_token_ids)
        asked = body if transfer is None else {**body, "kv_transfer_params": transfer}
        admitted, usage, tokens = False, Usage(), TokenReader(request, self.config.vocab_size)
        stream = self.engine.stream("/v1/completions", _ENCODER.encode(asked), _headers(request))
        with answering():
            async with contextlib.aclosing(stream):
                async for data in stream:
                    chunk = CHUNK.decode(data)
                    if chunk.error is not None:
                        raise refusal(status_of(chunk.error), _ENCODER.encode({"error": chunk.error}))
                    usage = chunk.usage or usage
                    if not admitted:
                        admitted = True
                        yield _admitted(num_prompt, lease)
                    for choice in chunk.choices:
                        for output in tokens.push(choice):
                            yield output
            tokens.close()
        if transfer is None:
            yield Finished(num_cached_tokens=usage.num_cached)
            return
        # What the decode server calls cached came over the wire, unless its own cache had it: the engine's word for it.
        num_blocks = -(-usage.num_cached // self.block_size)
        yield Finished(transfer_bytes=num_blocks * self._layout(self.block_size).block_bytes)


def request_body(request: GenerateRequest, model_name: str) -> dict[str, Any]:
    """One sequence as a completions request: token ids in and out, no stop strings (they are ours to find)."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model_name,
        "prompt": request.prompt_token_ids,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "priority": request.priority,
    }
    if not request.priority:
        del body["priority"]  # refused by servers whose scheduler is first come, first served
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.logprobs is not None:
        body["logprobs"] = sampling.logprobs
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else request.eos_token_ids)}
    if stops:
        body["stop_token_ids"] = sorted(stops)
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    return body


def _admitted(num_prompt: int, lease: _Lease | None) -> Admitted:
    """``lease``: of what is pulled; None where nothing is."""
    if lease is None:
        return Admitted(num_prompt, 0)  # how much was cached is told with the last part
    num_cached = max(0, min(lease.remote_prefill_cached_tokens or 0, num_prompt))  # the peer's word
    return Admitted(num_prompt, num_cached, num_prompt, path="remote")


def _headers(request: GenerateRequest) -> dict[str, str]:
    return {**_JSON, "x-request-id": request.request_id}
