"""One hand-off of a prompt between two servers of another engine, as their own proxies would make it.

vLLM with NixlConnector is asked one leg after the other, SGLang both at once. Invariants: nothing is asked that a
server without its peer could wait for longer than the deadline; who fails is named. Knows nothing about what moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.doctor.facts import Keys, ServerFacts
from kvbaton.types import UNREADABLE, RemoteError
from kvbaton.workers.sglang_stream import PART

if TYPE_CHECKING:
    from kvbaton.doctor.look import Answer, Asking

_NUM_TOKENS = 2  # that decode answers with
_OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
_MAX_ROOM = 2**63 - 1


async def between_vllm(
    asking: Asking, prefill: ServerFacts, decode: ServerFacts, keys: Keys, prompt: Sequence[int]
) -> None:
    """RemoteError when it fails."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    body["cache_salt"] = f"doctor-{secrets.token_hex(8)}"
    first = {**body, "model": prefill.model, "kv_transfer_params": _OFFER}
    answer = await _post(asking, prefill, "/v1/completions", first, keys.vllm)
    told = answer.json()
    offer = told.get("kv_transfer_params") if isinstance(told, dict) else None
    if not isinstance(offer, dict):
        raise RemoteError(f"{prefill.name} offers no KV")
    second = {**body, "model": decode.model, "max_tokens": _NUM_TOKENS, "kv_transfer_params": offer}
    await _post(asking, decode, "/v1/completions", second, keys.vllm)


async def between_sglang(
    asking: Asking, prefill: ServerFacts, decode: ServerFacts, keys: Keys, prompt: Sequence[int]
) -> None:
    """RemoteError when it fails; whichever leg does ends the other."""
    body: dict[str, Any] = {
        "rid": f"doctor-{secrets.token_hex(8)}",
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": _NUM_TOKENS, "temperature": 0.0, "ignore_eos": True},
        "stream": False,
        "bootstrap_host": prefill.kv_host_from_here,
        "bootstrap_port": prefill.kv_port,
        "bootstrap_room": secrets.randbelow(_MAX_ROOM) + 1,
    }

    async def ask(server: ServerFacts) -> None:
        answer = await _post(asking, server, "/generate", body, keys.sglang)
        try:
            ending = PART.decode(answer.body).meta_info.finish_reason
        except UNREADABLE as error:
            raise RemoteError(f"the answer of {server.name} cannot be read: {error}") from None
        if ending is not None and ending.type == "abort":
            raise RemoteError(f"{server.name} gave up: {ending.message}")

    try:
        async with asyncio.TaskGroup() as legs:
            for server in (prefill, decode):
                legs.create_task(ask(server))
    except* RemoteError as errors:
        for server in (prefill, decode):  # who waits for its peer does not look at its connections
            with contextlib.suppress(RemoteError):
                await _post(asking, server, "/abort_request", {"rid": body["rid"]}, keys.sglang)
        raise RemoteError(str(errors.exceptions[0])) from None


async def _post(asking: Asking, server: ServerFacts, path: str, body: Mapping[str, object], key: str) -> Answer:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = await asking.post(server.url + path, body, headers, asking.model_s)
    expect(answer.status, answer.body, server.name)
    return answer


def expect(status: int, body: bytes, name: str) -> None:
    """RemoteError with the server's own words when it did not do what it was asked for."""
    if status == 200:
        return
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (*UNREADABLE, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    raise RemoteError(f"{name} answers {status}: {message}")
