"""An SGLang server behind the worker protocol: both legs at once, joined by a room, each calling the other off.

A remote request goes to the prefill and the decode server in the same moment, with the address of the prefill side's
bootstrap server and a number that nobody else has; the two find each other, and the answer comes from decode.
Invariants: before the first request to a prefill server, and after each that did not end well, its page size, KV dtype
and parallelism are compared with ours, where decode would find a difference with the prefill under way; an error of
either leg ends the other at once, where the servers themselves would wait for minutes; leaving by any way closes both
calls and tells both servers.

A server that was started for decode computes no prompts, and one for prefill decodes nothing. Neither serves alone;
their workers say so, and the router then asks pairs only.
Knows nothing about HTTP of clients, or text.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.kv.compat import describe, fingerprint_of
from kvbaton.kv.layout import KVLayout
from kvbaton.transfer.reach import in_url
from kvbaton.types import UNREADABLE, CapacityError, GenerateRequest, RemoteError, Role
from kvbaton.workers.engine_server import EngineServer, answering, refusal
from kvbaton.workers.kv_events import KVEventLog
from kvbaton.workers.protocol import Admitted, Finished, PeerAddress, WorkerEvent, WorkerStats
from kvbaton.workers.sglang_bootstrap import (
    INFO_PATHS,
    ROUTE_QUERY,
    BootstrapInfo,
    DecodeServer,
    decode_bootstrap,
    differences,
)
from kvbaton.workers.sglang_stream import PART, PartReader
from kvbaton.workers.two_legs import both_legs
from kvbaton.workers.vllm_metrics import SGLANG
from kvbaton.workers.vllm_stream import status_of

_ENCODER = msgspec.json.Encoder()
_MODES: dict[Role, tuple[str | None, ...]] = {"prefill": ("prefill",), "decode": ("decode",), "both": ("null", None)}
_ABORT_S = 2.0
_MAX_ROOM = 2**63 - 1


@dataclass(frozen=True)
class SglangOptions:
    url: str  # of the server, http://host:port
    role: Role
    model_name: str  # as our clients call it
    api_key: str = ""  # shared by the servers of one fleet
    dtype: str = "bfloat16"
    max_running: int = 64
    max_waiting: int = 256


class _ServerInfo(DecodeServer, frozen=True):
    version: str = ""
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: int | None = None
    context_length: int | None = None
    max_total_num_tokens: int | None = None


class SglangWorker:
    """``await start()`` reads what the server is. Implements ``protocol.Worker``."""

    kv_events: KVEventLog | None = None

    def __init__(self, options: SglangOptions, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self.options = options
        self.serves_alone = options.role == "both"
        self.model_id = options.model_name
        self.tokenizer = tokenizer
        self.incarnation = secrets.token_hex(8)
        self.config = config
        self.max_context = config.max_context
        self.block_size = 1
        self.version = ""
        self.kv_port = 0
        self.fingerprint = fingerprint_of(self._layout(), config.revision, config.rope_text)
        self.engine = EngineServer(options.url, options.api_key, SGLANG, options.max_running, options.max_waiting)
        self.engine.role = options.role
        self._about = DecodeServer()
        self._peers: dict[
            PeerAddress, BootstrapInfo
        ] = {}  # those that fit, until a request with them does not end well
        self._watching: asyncio.Task[None] | None = None

    def _layout(self) -> KVLayout:
        config = self.config
        return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, self.block_size, self.options.dtype)

    async def start(self) -> None:
        """RemoteError when the server is not what it should be."""
        await self.engine.open()
        info = await self._server_info()
        if info.disaggregation_mode not in _MODES[self.role]:
            what = f"the server was started with --disaggregation-mode {info.disaggregation_mode or 'null'}"
            raise RemoteError(f"{what}, this worker's role is {self.role}", field="role")
        self._about, self.version, self.block_size = info, info.version, info.page_size or 1
        limits = (self.max_context, info.context_length or 0, info.max_total_num_tokens or 0)
        self.max_context = min(limit for limit in limits if limit)
        if self.role == "prefill":
            self.kv_port = info.disaggregation_bootstrap_port or 0
        revision = f"{self.config.revision}/sglang-{self.version}"
        whole = fingerprint_of(self._layout(), revision, self.config.rope_text)  # the layout is of the whole model
        self.fingerprint = msgspec.structs.replace(whole, tp_size=info.tp_size or 1)
        await self.engine.scrape()
        self._watching = asyncio.create_task(self.engine.watch())

    async def _server_info(self) -> _ServerInfo:
        for path in INFO_PATHS:
            status, raw = await self.engine.get(path)
            if status == 200:
                try:
                    return msgspec.json.decode(raw, type=_ServerInfo)
                except UNREADABLE as error:
                    raise RemoteError(f"the server's answer to {path} cannot be read: {error}") from None
        raise RemoteError(f"the server does not say what it is: it answers {status} to {path}")

    @property
    def role(self) -> Role:
        return self.engine.role

    @property
    def disconnected(self) -> bool:
        return self.engine.disconnected

    @property
    def alive(self) -> bool:
        return True

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(self.config.eos_token_ids)

    @property
    def backend(self) -> str:
        return f"sglang {self.version}"

    async def drain(self, deadline_s: float) -> bool:
        return await self.engine.idle(deadline_s)

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.engine.close()

    async def switch_role(self, role: Role, deadline_s: float) -> bool:
        """A server's mode is what it was started with."""
        return role == self.role

    def stats(self) -> WorkerStats:
        return self.engine.stats()

    # -- requests

    def generate(
        self, request: GenerateRequest, prefill: PeerAddress | None = None, deadline_s: float = 600.0
    ) -> AsyncGenerator[WorkerEvent, bool | None]:
        """See ``protocol.Worker.generate``. Close the iterator (``aclose``) to abort."""
        if (prefill is None) != self.serves_alone:
            what = "was started for both" if self.role == "both" else f"was started for {self.role} only"
            raise CapacityError(f"the SGLang server {what}", fix="start one of the other kind, or wait for it")
        self.engine.check_room(prefill is not None)
        body = request_body(request)
        legs = self._decode(request, body) if prefill is None else self._both(request, body, prefill)
        return self.engine.run(legs, deadline_s)

    async def _both(
        self, request: GenerateRequest, body: dict[str, Any], prefill: PeerAddress
    ) -> AsyncGenerator[WorkerEvent, None]:
        """Both legs. Whichever fails first ends the other."""
        info = await self._peer(prefill)
        port = info.prefill_http_port
        room = {
            "bootstrap_host": in_url(prefill.host),
            "bootstrap_port": prefill.port,
            "bootstrap_room": secrets.randbelow(_MAX_ROOM) + 1,
        }
        url = f"http://{in_url(prefill.host)}:{port}"
        prefilling = self._prefill({**body, **room, "stream": False}, url)
        decoding = self._decode(request, {**body, **room}, remote=True)
        over = False
        try:
            counted = self.engine.counted(both_legs(prefilling, decoding), self._prompt_bytes(request))
            async with contextlib.aclosing(counted) as events:
                async for event in events:
                    yield event
            over = True
        except RemoteError:
            self.engine.num_failed += 1
            raise
        finally:
            if not over:
                self._peers.pop(prefill, None)  # it may have come back as something else, whoever fails of it first
                await asyncio.shield(self._abort(request.request_id, (url, self.options.url)))

    def _prompt_bytes(self, request: GenerateRequest) -> int:
        layout = self._layout()
        return layout.blocks_for(len(request.prompt_token_ids)) * layout.block_bytes

    async def _peer(self, prefill: PeerAddress) -> BootstrapInfo:
        """What is behind that bootstrap server. RemoteError when KV from there would be of no use here."""
        if prefill in self._peers:
            return self._peers[prefill]
        at = f"{in_url(prefill.host)}:{prefill.port}"
        try:
            info = decode_bootstrap(*await self.engine.get(f"/route?{ROUTE_QUERY}", f"http://{at}"))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._failed(f"bootstrap at {at}: {type(error).__name__}: {error}") from None
        except RemoteError as error:
            raise self._failed(f"bootstrap at {at}: {error}") from None
        if found := differences(self._about, info):
            raise self._failed(f"KV of {at} does not fit: {describe(found)}")
        if info.prefill_http_port is None:
            raise self._failed(f"bootstrap at {at} does not say where its server listens")
        self._peers[prefill] = info
        return info

    def _failed(self, what: str) -> RemoteError:
        self.engine.num_failed += 1
        return RemoteError(what)

    async def _prefill(self, body: dict[str, Any], url: str) -> None:
        """Its answer is read and of no use."""
        raw = await self.engine.ask_peer(url + "/generate", _ENCODER.encode(body), _HEADERS, "the prefill server")
        try:
            ending = PART.decode(raw).meta_info.finish_reason
        except UNREADABLE as error:
            raise RemoteError(f"the answer of the prefill server at {url} cannot be read: {error}") from None
        if ending is not None and ending.type == "abort":
            raise RemoteError(f"the prefill server gave up: {ending.message}")

    async def _decode(
        self, request: GenerateRequest, body: dict[str, Any], remote: bool = False
    ) -> AsyncGenerator[WorkerEvent, None]:
        num_prompt, admitted = len(request.prompt_token_ids), False
        parts = PartReader(request, self.config.vocab_size)
        stream = self.engine.stream("/generate", _ENCODER.encode(body), _HEADERS)
        with answering():
            async with contextlib.aclosing(stream):
                async for data in stream:
                    part = PART.decode(data)
                    if part.error is not None:
                        raise refusal(status_of(part.error), _ENCODER.encode({"error": part.error}))
                    if (ending := part.meta_info.finish_reason) is not None and ending.type == "abort":
                        raise refusal(ending.status_code or 500, ending.message.encode())
                    outputs = parts.push(part)
                    if not admitted:
                        admitted = True
                        path = "remote" if remote else "local"
                        yield Admitted(num_prompt, parts.num_cached, num_prompt if remote else 0, path=path)
                    for output in outputs:
                        yield output
            parts.close()
        if remote:
            # It does not say what it got; having answered, it got all of the prompt, as it computes none itself.
            yield Finished(transfer_bytes=self._prompt_bytes(request))
        else:
            yield Finished(num_cached_tokens=parts.num_cached)

    async def _abort(self, rid: str, urls: tuple[str, ...]) -> None:
        """A closed connection says it too, but a server that waits for its peer does not look at its connections."""
        for url in urls:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with (
                    asyncio.timeout(_ABORT_S),
                    self.engine.http.post(url + "/abort_request", json={"rid": rid}),
                ):
                    pass


_HEADERS = {"content-type": "application/json"}


def request_body(request: GenerateRequest) -> dict[str, Any]:
    """One sequence for ``/generate``: token ids in and out, no stop strings (they are ours to find)."""
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "no_stop_trim": True,
    }
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else request.eos_token_ids)}
    if stops:
        parameters["stop_token_ids"] = sorted(stops)
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        parameters["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    body: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": request.prompt_token_ids,
        "sampling_params": parameters,
        "stream": True,
    }
    if sampling.logprobs is not None:
        body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs}
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    if request.priority:
        body["priority"] = request.priority
    return body
