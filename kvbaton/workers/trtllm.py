"""A TensorRT-LLM server behind the worker protocol: context first, then generation with what context answered.

A remote request is two calls of the completions endpoint. The context server answers with ``disaggregated_params``,
which go to the generation server value by value as they came: ids there are beyond what a double holds, and the state
is opaque. Invariants: only the fields that the protocol has the orchestrator change are changed; a prompt whose answer
ended in context is answered from there, and generation is never asked; an answer without its ids fails loudly; leaving
by any way closes the open call.

What this engine does not offer through that endpoint is refused by name: salts of the prefix cache, and the other
candidates of logprobs, which come as text. Knows nothing about HTTP of clients, or text.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.kv.compat import fingerprint_of
from kvbaton.kv.layout import KVLayout
from kvbaton.transfer.reach import in_url
from kvbaton.types import UNREADABLE, GenerateRequest, LocalError, RemoteError, Role
from kvbaton.workers.engine_server import EngineServer, answering, refusal
from kvbaton.workers.kv_events import KVEventLog
from kvbaton.workers.protocol import Admitted, Finished, PeerAddress, WorkerEvent, WorkerStats
from kvbaton.workers.vllm_metrics import TRTLLM
from kvbaton.workers.vllm_stream import CHUNK, Choice, Logprobs, TokenReader, Usage, status_of

_ENCODER = msgspec.json.Encoder()
_USUAL_BLOCK_SIZE = 32  # tokens, until the server says its own
_GLOBAL_ID_FROM = 2**42  # smaller request ids are a server's own
_MAX_ID = 2**63 - 1
_GOES_ON = ("length", "not_finished")  # of context: generation has the rest
_HEADERS = {"content-type": "application/json"}
METRICS_PATH = "/prometheus/metrics"


@dataclass(frozen=True)
class TrtllmOptions:
    url: str  # of the server, http://host:port
    role: Role
    model_name: str  # as the server calls it
    api_key: str = ""
    dtype: str = "bfloat16"
    max_running: int = 64
    max_waiting: int = 256


class _Card(msgspec.Struct):
    id: str


class Models(msgspec.Struct):
    data: list[_Card]


class Version(msgspec.Struct):
    version: str = ""


class _ContextChoice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    disaggregated_params: dict[str, msgspec.Raw] | None = None


class _ContextAnswer(msgspec.Struct):
    choices: list[_ContextChoice] = []
    usage: msgspec.Raw = msgspec.Raw(b"null")
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")


_CONTEXT = msgspec.json.Decoder(_ContextAnswer)
_USAGE = msgspec.json.Decoder(Usage | None)


class TrtllmWorker:
    """``await start()`` reads what the server is. Implements ``protocol.Worker``."""

    kv_events: KVEventLog | None = None
    serves_alone = True

    def __init__(self, options: TrtllmOptions, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self.options = options
        self.model_id = options.model_name
        self.tokenizer = tokenizer
        self.incarnation = secrets.token_hex(8)
        self.config = config
        self.max_context = config.max_context
        self.version = ""
        self.kv_port = int(options.url.rpartition(":")[2])
        self.engine = EngineServer(
            options.url, options.api_key, TRTLLM, options.max_running, options.max_waiting, METRICS_PATH
        )
        self.engine.role = options.role
        self.fingerprint = fingerprint_of(self._layout(), config.revision, config.rope_text)
        self._watching: asyncio.Task[None] | None = None

    @property
    def role(self) -> Role:
        return self.engine.role

    @property
    def block_size(self) -> int:
        return self.engine.figures.block_size or _USUAL_BLOCK_SIZE

    def _layout(self) -> KVLayout:
        config = self.config
        return KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, self.block_size, self.options.dtype)

    async def start(self) -> None:
        """RemoteError when the server is not what it should be."""
        await self.engine.open()
        names = [card.id for card in (await self.engine.get_json("/v1/models", Models)).data]
        if self.options.model_name not in names:
            raise RemoteError(f"the server has {', '.join(names)}, not {self.options.model_name}", field="model")
        self.version = (await self.engine.get_json("/version", Version)).version
        await self.engine.scrape()
        revision = f"{self.config.revision}/trtllm-{self.version}"
        self.fingerprint = fingerprint_of(self._layout(), revision, self.config.rope_text)
        self._watching = asyncio.create_task(self.engine.watch())

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
        return f"trtllm {self.version}"

    async def drain(self, deadline_s: float) -> bool:
        return await self.engine.idle(deadline_s)

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self.engine.close()

    async def switch_role(self, role: Role, deadline_s: float) -> bool:
        """A server does what it is asked; the router decides what that is."""
        self.engine.role = role
        return True

    def stats(self) -> WorkerStats:
        return self.engine.stats()

    # -- requests

    def generate(
        self, request: GenerateRequest, prefill: PeerAddress | None = None, deadline_s: float = 600.0
    ) -> AsyncGenerator[WorkerEvent, bool | None]:
        """See ``protocol.Worker.generate``. Close the iterator (``aclose``) to abort."""
        if request.cache_salt:
            raise LocalError("TensorRT-LLM's completions know no cache_salt", field="cache_salt", fix="leave it out")
        if request.sampling.logprobs:
            fix = "ask for logprobs of the chosen token only (logprobs: 0, or chat without top_logprobs)"
            raise LocalError("TensorRT-LLM names other candidates by their text", field="logprobs", fix=fix)
        self.engine.check_room(prefill is not None)
        body = request_body(request, self.options.model_name)
        legs = self._generate(request, body) if prefill is None else self._both(request, body, prefill)
        return self.engine.run(legs, deadline_s)

    async def _both(
        self, request: GenerateRequest, body: dict[str, Any], prefill: PeerAddress
    ) -> AsyncGenerator[WorkerEvent, None]:
        started_s = time.monotonic()
        try:
            answer = await self._context(body, f"http://{in_url(prefill.host)}:{prefill.port}")
            choice, usage = answer.choices[0], _USAGE.decode(bytes(answer.usage)) or Usage()
            num_prompt = len(request.prompt_token_ids)
            admitted = Admitted(num_prompt, min(usage.num_cached, num_prompt), num_prompt, path="remote")
            if choice.finish_reason not in _GOES_ON:
                outputs = _whole_answer(request, choice, self.config.vocab_size)
            else:
                body = _generation_body(body, answer)
                outputs = []
        except RemoteError:
            self.engine.num_failed += 1
            raise
        except (*UNREADABLE, LocalError) as error:
            self.engine.num_failed += 1
            raise RemoteError(f"the context server's answer cannot be read: {error}") from None
        prefilled_s = time.monotonic() - started_s
        if outputs:
            yield admitted
            for output in outputs:
                yield output
            yield Finished(prefill_s=prefilled_s)  # nothing moved: there was nothing left to do
            return
        generating = self.engine.handed_over(self._generate(request, body, admitted), prefill)
        counted = self.engine.counted(generating, self._prompt_bytes(request))
        try:
            async with contextlib.aclosing(counted) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        event = msgspec.structs.replace(event, prefill_s=prefilled_s)
                    yield event
        except RemoteError:
            self.engine.num_failed += 1
            raise

    def _prompt_bytes(self, request: GenerateRequest) -> int:
        layout = self._layout()
        return layout.blocks_for(len(request.prompt_token_ids)) * layout.block_bytes

    async def _context(self, body: dict[str, Any], url: str) -> _ContextAnswer:
        """The first leg."""
        asked = {key: value for key, value in body.items() if key != "stream_options"}
        asked["stream"] = False
        asked["disaggregated_params"] = {
            "request_type": "context_only",
            "disagg_request_id": _GLOBAL_ID_FROM + secrets.randbelow(_MAX_ID - _GLOBAL_ID_FROM),
        }
        raw = await self.engine.ask_peer(
            url + "/v1/completions", _ENCODER.encode(asked), _HEADERS, "the context server"
        )
        answer = _CONTEXT.decode(raw)
        if len(answer.choices) != 1:
            raise RemoteError(f"the context server answers with {len(answer.choices)} choices")
        return answer

    async def _generate(
        self, request: GenerateRequest, body: dict[str, Any], admitted: Admitted | None = None
    ) -> AsyncGenerator[WorkerEvent, None]:
        usage, tokens, remote = Usage(), TokenReader(request, self.config.vocab_size), admitted is not None
        first: Admitted | None = admitted or Admitted(len(request.prompt_token_ids), 0)
        stream = self.engine.stream("/v1/completions", _ENCODER.encode(body), _HEADERS)
        with answering():
            async with contextlib.aclosing(stream):
                async for data in stream:
                    chunk = CHUNK.decode(data)
                    if chunk.error is not None:
                        raise refusal(status_of(chunk.error), _ENCODER.encode({"error": chunk.error}))
                    usage = chunk.usage or usage
                    if first is not None:
                        yield first
                        first = None
                    for choice in chunk.choices:
                        for output in tokens.push(_known(choice)):
                            yield output
            tokens.close()
        if remote:
            # It does not say what it got; it was given no other way to the prompt's KV.
            yield Finished(transfer_bytes=self._prompt_bytes(request))
        else:
            yield Finished(num_cached_tokens=usage.num_cached)


def _known(choice: Choice) -> Choice:
    """A part that says it is not the last one says nothing; candidates that are named by text are of no use."""
    reason = None if choice.finish_reason == "not_finished" else choice.finish_reason
    return msgspec.structs.replace(choice, finish_reason=reason, logprobs=_chosen(choice.logprobs))


def _chosen(logprobs: Logprobs | None) -> Logprobs | None:
    return None if logprobs is None else Logprobs(logprobs.token_logprobs)


def _whole_answer(request: GenerateRequest, choice: _ContextChoice, vocab_size: int) -> list[Any]:
    """What ended in context."""
    tokens = TokenReader(request, vocab_size)
    outputs = tokens.push(Choice(choice.token_ids, choice.finish_reason, _chosen(choice.logprobs)))
    tokens.close()
    return outputs


def _generation_body(body: dict[str, Any], answer: _ContextAnswer) -> dict[str, Any]:
    """RemoteError when the two servers could not find each other with this."""
    given = answer.choices[0].disaggregated_params
    if given is None:
        raise RemoteError(f"the context server offers no KV (finish reason {answer.choices[0].finish_reason})")
    for name in ("ctx_request_id", "disagg_request_id"):
        if bytes(given.get(name, b"null")) == b"null":
            raise RemoteError(f"the context server's answer has no {name}")
    parameters: dict[str, Any] = {**given, "request_type": "generation_only"}
    if bytes(answer.usage) != b"null":
        parameters["ctx_usage"] = answer.usage
    made = {**body, "disaggregated_params": parameters}
    if bytes(answer.prompt_token_ids) != b"null":
        made["prompt"] = answer.prompt_token_ids
    return made


def request_body(request: GenerateRequest, model_name: str) -> dict[str, Any]:
    """One sequence as a completions request: token ids in and out, no stop strings (they are ours to find)."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model_name,
        "prompt": request.prompt_token_ids,
        "stream": True,
        "stream_options": {"include_usage": True},
        "detokenize": False,  # ids are what is answered then
        "add_special_tokens": False,
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
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if sampling.logprobs is not None:
        body["logprobs"] = 1
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else request.eos_token_ids)}
    if stops:
        body["stop_token_ids"] = sorted(stops)
    return body
