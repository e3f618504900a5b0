"""One hand-off of a prompt between two servers of another engine, as their own proxies would make it.

vLLM with NixlConnector is asked one leg after the other, SGLang both at once. Invariants: SGLang's decode server is
asked only for what fits, by its own rules, because what does not would end it; leaving by any way tells both of its
servers, where one would wait for the other without end; who fails is named. Knows nothing about what moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.doctor.facts import Keys, ServerFacts
from kvbaton.kv.compat import describe
from kvbaton.transfer.reach import in_url
from kvbaton.types import UNREADABLE, RemoteError
from kvbaton.workers.sglang_bootstrap import INFO_PATHS, ROUTE_QUERY, DecodeServer, decode_bootstrap, differences
from kvbaton.workers.sglang_stream import PART

if TYPE_CHECKING:
    from kvbaton.doctor.look import Answer, Asking

_NUM_TOKENS = 2  # that decode answers with
_OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
_MAX_ROOM = 2**63 - 1
_ABORT_S = 2.0
_MAX_WORDS = 500  # of a server, in an error


async def between_vllm(
    asking: Asking, prefill: ServerFacts, decode: ServerFacts, keys: Keys, prompt: Sequence[int]
) -> None:
    """RemoteError when it fails."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    body["cache_salt"] = f"doctor-{secrets.token_hex(8)}"
    first = {**body, "model": prefill.model, "kv_transfer_params": _OFFER}
    told = (await _post(asking, prefill, "/v1/completions", first, keys.vllm)).json()
    offer = told.get("kv_transfer_params") if isinstance(told, dict) else None
    if not isinstance(offer, dict):
        raise RemoteError(f"{prefill.name} offers no KV")
    second = {**body, "model": decode.model, "max_tokens": _NUM_TOKENS, "kv_transfer_params": offer}
    told = (await _post(asking, decode, "/v1/completions", second, keys.vllm)).json()
    if not isinstance(told, dict) or not told.get("choices"):
        raise RemoteError(f"{decode.name} answers with no tokens")


async def between_sglang(
    asking: Asking, prefill: ServerFacts, decode: ServerFacts, keys: Keys, prompt: Sequence[int]
) -> None:
    """RemoteError when it fails; whichever leg does ends the other."""
    await _check_fit(asking, prefill, decode, keys.sglang)
    body: dict[str, Any] = {
        "rid": f"doctor-{secrets.token_hex(8)}",
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": _NUM_TOKENS, "temperature": 0.0, "ignore_eos": True},
        "stream": False,
        "bootstrap_host": in_url(prefill.kv_host_from_here),
        "bootstrap_port": prefill.kv_port,
        "bootstrap_room": secrets.randbelow(_MAX_ROOM) + 1,
    }

    async def ask(server: ServerFacts) -> None:
        answer = await _post(asking, server, "/generate", body, keys.sglang, 2 * asking.model_s)
        try:
            part = PART.decode(answer.body)
        except UNREADABLE as error:
            raise RemoteError(f"the answer of {server.name} cannot be read: {error}") from None
        ending = part.meta_info.finish_reason
        if part.error is not None or (ending is not None and ending.type == "abort"):
            said = ending.message if ending is not None else str((part.error or {}).get("message", ""))
            raise RemoteError(f"{server.name} gave up: {_words(said)}")
        if server is decode and not part.output_ids:
            raise RemoteError(f"{server.name} answers with no tokens")

    over = False
    try:
        async with asyncio.timeout(asking.model_s), asyncio.TaskGroup() as legs:
            for server in (prefill, decode):
                legs.create_task(ask(server))
        over = True
    except* TimeoutError:
        what = f"{prefill.name} and {decode.name} do not answer within {asking.model_s:g} s: each waits for the other"
        raise RemoteError(what) from None
    except* RemoteError as errors:
        raise RemoteError(str(errors.exceptions[0])) from None
    finally:
        if not over:
            aborts = (_abort(asking, server, {"rid": body["rid"]}, keys.sglang) for server in (prefill, decode))
            await asyncio.shield(asyncio.gather(*aborts))


async def _check_fit(asking: Asking, prefill: ServerFacts, decode: ServerFacts, key: str) -> None:
    """What a decode server would find with the prefill under way."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    route = f"http://{in_url(prefill.kv_host_from_here)}:{prefill.kv_port}/route?{ROUTE_QUERY}"
    told = await asking.get(route)
    bootstrap = decode_bootstrap(told.status, told.body)
    for path in INFO_PATHS:
        answer = await asking.get(decode.url + path, headers)
        if answer.status == 200:
            break
    try:
        about = msgspec.json.decode(answer.body, type=DecodeServer)
    except UNREADABLE as error:
        raise RemoteError(f"{decode.name} does not say what it is: {error}") from None
    if found := differences(about, bootstrap):
        raise RemoteError(f"KV of {prefill.name} does not fit {decode.name}: {describe(found)}")


async def _abort(asking: Asking, server: ServerFacts, body: Mapping[str, object], key: str) -> None:
    """A closed connection says it too, but who waits for its peer does not look at its connections."""
    with contextlib.suppress(RemoteError):
        await _post(asking, server, "/abort_request", body, key, _ABORT_S)


async def _post(
    asking: Asking, server: ServerFacts, path: str, body: Mapping[str, object], key: str, timeout_s: float = 0.0
) -> Answer:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = await asking.post(server.url + path, body, headers, timeout_s or asking.model_s)
    expect(answer.status, answer.body, server.name)
    return answer


def expect(status: int, body: bytes, name: str) -> None:
    """RemoteError with the server's own words when it did not do what it was asked for."""
    if status == 200:
        return
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (*UNREADABLE, KeyError, TypeError):
        message = body[:_MAX_WORDS].decode(errors="replace")
    raise RemoteError(f"{name} answers {status}: {_words(message)}")


def _words(text: str) -> str:
    """On one line of a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:_MAX_WORDS])
