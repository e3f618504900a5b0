"""Makes one hand-off after the other between each pair, and says what became of it and how fast it was.

Between workers of ours the prompt is computed on the prefill worker first, so that the hand-off waits for nothing but
its last block. Where a prefill server is SGLang's or TensorRT-LLM's, which computes for a decode server only, the
hand-off is all that is asked for. vLLM's and SGLang's own servers are asked as their own proxies would (``hand_off``).
Tokens and a salt of its own keep a prompt out of every other one's way, and out of the decode server's cache. How long
the transfer took is told by our embedded engine in its report, by vLLM and SGLang in their figures (``transfers``), by
TensorRT-LLM not at all. Invariants: a pair that fails says why in the words of the server; one hand-off at a time.
Knows nothing about what a rate means.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from kvbaton.doctor.facts import ENGINE_NAMES, Keys, PairFacts, ServerFacts
from kvbaton.doctor.findings import pair_findings
from kvbaton.doctor.hand_off import between_sglang, between_vllm, expect
from kvbaton.doctor.look import Asking
from kvbaton.doctor.look_vllm import NIXL
from kvbaton.doctor.transfers import Transfers
from kvbaton.router.measured import token_bytes
from kvbaton.types import UNREADABLE, RemoteError
from kvbaton.workers.generation import REPORT_HEADER
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER, InternalRequest, PeerAddress, RequestReport

_NOT_ALONE = {"sglang", "trtllm"}  # their prefill servers answer nobody but a decode server
_WITHOUT_SALTS = {"trtllm"}
_NUM_ANSWERED = 2
_MIN_BLOCKS = 2  # of another engine's; with fewer full ones there may be nothing to hand off
_NOTHING_MOVED = "the decode worker answered, but no bytes moved"
Pair = tuple[ServerFacts, ServerFacts]
HandOff = Callable[[Asking, ServerFacts, ServerFacts, Keys, Sequence[int]], Awaitable[None]]


class _Once(msgspec.Struct, frozen=True):
    """One hand-off. ``seconds``: zero where nobody says how long its transfer took."""

    num_bytes: float
    seconds: float
    cold: bool = False  # prefill computed the prompt meanwhile


class _Between(NamedTuple):
    """One pair, and what it takes to ask it. ``movers``: the servers whose engines move its KV."""

    pair: Pair
    movers: Sequence[ServerFacts]
    asking: Asking
    transfers: Transfers
    keys: Keys


def can_measure(prefill: ServerFacts, decode: ServerFacts, keys: Keys, probe: bool) -> bool:
    """``probe``: servers of other engines may be asked. What is behind a worker of ours is asked by that worker.

    Servers that are not ours and do not fit are not tried: a decode server may end for it.
    """
    if prefill.engine != decode.engine or prefill.behind or not prefill.kv_port or prefill.kv_trouble:
        return False
    if prefill.engine == "kvbaton":
        return bool(keys.internal)
    fits = all(finding.severity != "error" for finding in pair_findings(prefill, decode))
    return (
        probe and fits and _hand_off(prefill, decode) is not None and _room(prefill, decode) >= _least(prefill, decode)
    )


async def measure_pairs(
    asking: Asking, servers: Sequence[ServerFacts], pairs: Sequence[Pair], keys: Keys, num_tokens: int, repeats: int
) -> list[PairFacts]:
    """``servers``: all of the fleet, those behind workers of ours among them."""
    behind = {server.behind: server for server in servers if server.behind}
    transfers = Transfers(asking)
    found = []
    for prefill, decode in pairs:
        movers = [behind.get(server.name, server) for server in (prefill, decode)]
        prompts = _prompts(prefill, decode, num_tokens, repeats)
        found.append(await _measure(_Between((prefill, decode), movers, asking, transfers, keys), prompts))
    return found


async def _measure(between: _Between, prompts: Sequence[Sequence[int]]) -> PairFacts:
    facts = PairFacts(between.pair[0].name, between.pair[1].name)
    hand_off = _hand_off(*between.pair)
    found = []
    try:
        for prompt in prompts:
            if hand_off is None:
                found.append(await _between_ours(between, prompt))
            else:
                found.append(await _between_others(between, hand_off, prompt))
    except RemoteError as error:
        return msgspec.structs.replace(facts, trouble=str(error))
    timed = sorted((one for one in found if one.num_bytes and one.seconds), key=lambda one: one.num_bytes / one.seconds)
    typical = timed[(len(timed) - 1) // 2] if timed else found[-1]
    return msgspec.structs.replace(
        facts, num_bytes=int(typical.num_bytes), seconds=typical.seconds, repeats=len(found), cold=typical.cold
    )


def _prompts(prefill: ServerFacts, decode: ServerFacts, num_tokens: int, repeats: int) -> list[list[int]]:
    if prefill.engine != "kvbaton":
        num_tokens = max(num_tokens, _least(prefill, decode))
    length = max(1, min(num_tokens, _room(prefill, decode)))
    return [_prompt(length) for _ in range(repeats)]


def _prompt(length: int) -> list[int]:
    return [1 + secrets.randbelow(97) for _ in range(length)]


def _room(prefill: ServerFacts, decode: ServerFacts) -> int:
    known = [server.max_context for server in (prefill, decode) if server.max_context]
    return min(known) - _NUM_ANSWERED if known else 1 << 30


def _least(prefill: ServerFacts, decode: ServerFacts) -> int:
    return _MIN_BLOCKS * max(prefill.block_size, decode.block_size) + 1


async def _between_ours(between: _Between, prompt: Sequence[int]) -> _Once:
    """A shared KV tier may give decode what prefill has just computed: then prefill computes another prompt for it."""
    decode = between.pair[1]
    once = await _ask_ours(between, prompt, warm=True)
    fingerprint = decode.fingerprint
    whole = token_bytes(fingerprint) * len(prompt) if fingerprint is not None else 0
    if once.num_bytes < whole / 2 and not decode.backend:
        once = await _ask_ours(between, _prompt(len(prompt)), warm=False)
    if not once.num_bytes:
        raise RemoteError(_NOTHING_MOVED)
    return once


async def _ask_ours(between: _Between, prompt: Sequence[int], warm: bool) -> _Once:
    """``warm``: the prefill side computes the prompt before."""
    (prefill, decode), asking, keys = between.pair, between.asking, between.keys
    backends = {prefill.backend, decode.backend}
    salt = "" if backends & _WITHOUT_SALTS else f"doctor-{secrets.token_hex(8)}"
    body: dict[str, object] = {
        "model": decode.model,
        "prompt": prompt,
        "max_tokens": _NUM_ANSWERED,
        "temperature": 0,
        "ignore_eos": True,
    }
    if salt:
        body["cache_salt"] = salt
    headers = {INTERNAL_KEY_HEADER.decode(): keys.internal}  # without it those that others can reach refuse
    if warm and not backends & _NOT_ALONE:
        first = await asking.post(f"{prefill.url}/v1/completions", {**body, "max_tokens": 1}, headers, asking.model_s)
        expect(first.status, first.body, prefill.name)
    internal = InternalRequest(
        request_id=secrets.token_hex(12),
        prompt_token_ids=(tuple(prompt),),
        prefill=PeerAddress(prefill.kv_host, prefill.kv_port),
        deadline_s=asking.model_s,
        cache_salt=salt,
    )
    await between.transfers.start(between.movers)
    answer = await asking.post(f"{decode.url}/v1/completions", {**body, "kvbaton": internal}, headers, asking.model_s)
    expect(answer.status, answer.body, decode.name)
    try:
        report = msgspec.json.decode(answer.headers.get(REPORT_HEADER.decode(), ""), type=RequestReport)
    except UNREADABLE as error:
        raise RemoteError(f"{decode.name} does not say what the hand-off took: {error}") from None
    if report.path != "remote":
        return _Once(0, 0.0)
    if not backends & ENGINE_NAMES.keys():
        # Older workers tell the whole transfer only, with the waiting in it.
        return _Once(report.transfer_bytes, report.copying_s or report.transfer_s, cold=not warm)
    moved = await between.transfers.moved()  # a worker over another engine only derives its bytes
    if moved is None:
        return _Once(report.transfer_bytes, 0.0)
    if not moved.num_bytes and decode.backend == "sglang":
        return _Once(report.transfer_bytes, 0.0)  # its decode servers compute nothing, so it came
    return _Once(moved.num_bytes, moved.seconds)


async def _between_others(between: _Between, hand_off: HandOff, prompt: Sequence[int]) -> _Once:
    await between.transfers.start(between.movers)
    await hand_off(between.asking, *between.pair, between.keys, prompt)
    moved = await between.transfers.moved()
    if moved is None:
        return _Once(0.0, 0.0)
    if (
        not moved.num_bytes and between.pair[1].engine == "vllm"
    ):  # which computes what it could not pull, if it is set to
        raise RemoteError(_NOTHING_MOVED)
    return _Once(moved.num_bytes, moved.seconds)


def _hand_off(prefill: ServerFacts, decode: ServerFacts) -> HandOff | None:
    """How servers that are not ours are asked; None: that is not known here."""
    if prefill.engine == "vllm" and prefill.connector_name == decode.connector_name == NIXL:
        return between_vllm
    return between_sglang if prefill.engine == "sglang" else None
