"""Makes one hand-off after the other between each pair of our workers, and says what became of it.

The prompt is computed on the prefill worker first, so that the hand-off waits for nothing but its last block; tokens
and a salt of its own keep it out of every other prompt's way, and out of the decode worker's cache. Where a prefill
server is SGLang's or TensorRT-LLM's, which computes for a decode server only, the hand-off is all that is asked for.
Only the embedded engine says how long a transfer took. Invariants: a pair that fails says why in the words of the
worker; one hand-off at a time. Knows nothing about what a rate means.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from statistics import median

import msgspec

from kvbaton.doctor.facts import PairFacts, ServerFacts
from kvbaton.doctor.look import Asking
from kvbaton.types import UNREADABLE, RemoteError
from kvbaton.workers.generation import REPORT_HEADER
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER, InternalRequest, PeerAddress, RequestReport

_NOT_ALONE = {"sglang", "trtllm"}  # their prefill servers answer nobody but a decode server
_WITHOUT_SALTS = {"trtllm"}


async def measure_pairs(
    asking: Asking, pairs: Sequence[tuple[ServerFacts, ServerFacts]], key: str, num_tokens: int, repeats: int
) -> list[PairFacts]:
    return [await _measure(asking, prefill, decode, key, num_tokens, repeats) for prefill, decode in pairs]


async def _measure(
    asking: Asking, prefill: ServerFacts, decode: ServerFacts, key: str, num_tokens: int, repeats: int
) -> PairFacts:
    facts = PairFacts(prefill.name, decode.name)
    room = min(server.max_context for server in (prefill, decode)) - 2
    found = []
    try:
        for _ in range(repeats):
            found.append(await _once(asking, prefill, decode, key, min(num_tokens, room)))
    except RemoteError as error:
        return msgspec.structs.replace(facts, trouble=str(error))
    if any(report.path != "remote" or not report.transfer_bytes for report in found):
        return msgspec.structs.replace(facts, trouble="the decode worker answered, but no bytes moved")
    seconds = [report.transfer_s for report in found if report.transfer_s]
    return msgspec.structs.replace(
        facts,
        num_bytes=found[-1].transfer_bytes,
        seconds=median(seconds) if seconds else 0.0,
        repeats=len(found),
    )


async def _once(asking: Asking, prefill: ServerFacts, decode: ServerFacts, key: str, num_tokens: int) -> RequestReport:
    backends = {prefill.backend, decode.backend}
    salt = "" if backends & _WITHOUT_SALTS else f"doctor-{secrets.token_hex(8)}"
    prompt = [1 + secrets.randbelow(97) for _ in range(num_tokens)]
    body: dict[str, object] = {
        "model": decode.model,
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
    }
    if salt:
        body["cache_salt"] = salt
    headers = {INTERNAL_KEY_HEADER.decode(): key}  # workers that others can reach generate for nobody without it
    if not backends & _NOT_ALONE:
        warm = await asking.post(f"{prefill.url}/v1/completions", {**body, "max_tokens": 1}, headers, asking.model_s)
        _expect(warm.status, warm.body, prefill.name)
    internal = InternalRequest(
        request_id=secrets.token_hex(12),
        prompt_token_ids=(tuple(prompt),),
        prefill=PeerAddress(prefill.kv_host, prefill.kv_port),
        deadline_s=asking.model_s,
        cache_salt=salt,
    )
    answer = await asking.post(f"{decode.url}/v1/completions", {**body, "kvbaton": internal}, headers, asking.model_s)
    _expect(answer.status, answer.body, decode.name)
    try:
        return msgspec.json.decode(answer.headers.get(REPORT_HEADER.decode(), ""), type=RequestReport)
    except UNREADABLE as error:
        raise RemoteError(f"{decode.name} does not say what the hand-off took: {error}") from None


def _expect(status: int, body: bytes, name: str) -> None:
    if status == 200:
        return
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (*UNREADABLE, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    raise RemoteError(f"{name} answers {status}: {message}")
