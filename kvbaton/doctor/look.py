"""Reads what each server tells before any request: ours by ``/version`` and ``/internal/info``, others by their own.

Which engine answers is found out, not told. Invariants: every question has a deadline; nothing is changed anywhere; a
server that does not answer is a fact like any other. Knows nothing about what is wrong with an answer (``findings``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvbaton.doctor.facts import ENGINE_NAMES, KEY_VARIABLES, Keys, ServerFacts, Target
from kvbaton.doctor.look_mooncake import with_mooncake
from kvbaton.doctor.look_sglang import look_at_sglang
from kvbaton.doctor.look_trtllm import look_at_trtllm
from kvbaton.doctor.look_vllm import look_at_vllm
from kvbaton.transfer.reach import in_url, is_own_machine, why_not_reached
from kvbaton.types import UNREADABLE, Fingerprint, RemoteError
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER, WorkerInfo
from kvbaton.workers.vllm_server import key_for_servers

ANSWER_S = 5.0
CONNECT_S = 3.0
_MAX_BYTES = 8 * 1024 * 1024


class Answer(msgspec.Struct, frozen=True):
    status: int
    body: bytes
    headers: Mapping[str, str]  # names in lower case
    took_s: float

    def json(self) -> Any:
        """None for what is no JSON."""
        try:
            return msgspec.json.decode(self.body)
        except UNREADABLE:
            return None


class Asking:
    """Questions with a deadline. RemoteError when nobody answers. ``model_s``: of those that a model has to answer."""

    def __init__(self, session: aiohttp.ClientSession, model_s: float) -> None:
        self._session = session
        self.model_s = model_s

    async def get(self, url: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await self._ask("GET", url, None, headers)

    async def post(
        self, url: str, body: object, headers: Mapping[str, str] | None = None, timeout_s: float = ANSWER_S
    ) -> Answer:
        return await self._ask("POST", url, msgspec.json.encode(body), headers, timeout_s)

    async def _ask(
        self,
        method: str,
        url: str,
        data: bytes | None,
        headers: Mapping[str, str] | None,
        timeout_s: float = ANSWER_S,
    ) -> Answer:
        sent = {"content-type": "application/json", **(headers or {})} if data is not None else dict(headers or {})
        began_s = time.monotonic()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, url, data=data, headers=sent) as response,
            ):
                body = bytearray()
                async for part in response.content.iter_any():
                    body += part
                    if len(body) > _MAX_BYTES:
                        raise RemoteError(f"{url} answers with more than {_MAX_BYTES} bytes", field="url")
                took_s = time.monotonic() - began_s
                found = {name.lower(): value for name, value in response.headers.items()}
                return Answer(response.status, bytes(body), found, took_s)
        except TimeoutError:
            raise RemoteError(f"no answer from {url} within {timeout_s:g} s", field="url") from None
        except (aiohttp.ClientError, OSError) as error:
            raise RemoteError(f"no answer from {url}: {why_not_reached(error)}", field="url") from None


async def look_at_all(asking: Asking, targets: Sequence[Target], keys: Keys, probe: bool) -> list[ServerFacts]:
    """All at once. ``probe``: servers of other engines are asked for one token, to see what they offer."""
    found = await asyncio.gather(*(_look_at(asking, target, keys, probe) for target in targets))
    return await with_mooncake(asking, [facts for several in found for facts in several])


async def _look_at(asking: Asking, target: Target, keys: Keys, probe: bool) -> list[ServerFacts]:
    facts = ServerFacts(target.name, target.role, target.url)
    try:
        headers = {INTERNAL_KEY_HEADER.decode(): keys.internal} if keys.internal and target.role == "router" else {}
        version = await asking.get(target.url + "/version", headers)
        skew_s = skew_of(version)
        told = version.json()
        if target.role == "router" and version.status == 401:
            remedy = "set KVBATON_INTERNAL_KEY as the fleet has it"
            return [msgspec.structs.replace(facts, trouble="it lets in who has a key", remedy=remedy)]
        if target.role == "router" and version.status != 200:
            trouble = f"it answers {version.status} to /version: no worker is ready yet"
            remedy = "wait for its workers, or see in their logs why they are not ready"
            return [msgspec.structs.replace(facts, trouble=trouble, remedy=remedy)]
        if version.status == 200 and isinstance(told, dict) and "kvbaton" in told:
            found = await _look_at_ours(asking, target, told, keys, probe)
        else:
            found = [await _look_at_another(asking, facts, keys, probe)]
    except RemoteError as error:
        return [msgspec.structs.replace(facts, trouble=str(error))]
    reached = [await _reach(one) for one in found]
    return [
        one if one.behind or one.skew_s is not None else msgspec.structs.replace(one, skew_s=skew_s) for one in reached
    ]


async def _look_at_another(asking: Asking, facts: ServerFacts, keys: Keys, probe: bool) -> ServerFacts:
    """A server of another engine: whichever knows its answers for its own."""
    return (
        await look_at_sglang(asking, facts, keys.sglang)
        or await look_at_trtllm(asking, facts, keys.trtllm)
        or await look_at_vllm(asking, facts, (keys.vllm,), probe)
        or await _stranger(asking, facts)
    )


async def _stranger(asking: Asking, facts: ServerFacts) -> ServerFacts:
    status = (await asking.get(facts.url + "/v1/models")).status
    if status in (401, 403):
        trouble = "it wants an API key, and without it does not say which engine it is"
        remedy = f"set that of {', '.join(KEY_VARIABLES.values())} which is its engine's to the key of the server"
        return msgspec.structs.replace(facts, trouble=trouble, remedy=remedy)
    if status != 200:
        return msgspec.structs.replace(facts, trouble=f"it lists no model (status {status}): which engine is it?")
    trouble = "its figures are those of no engine that is known here: which engine is it?"
    remedy = "name a server of ours, vLLM's, SGLang's or TensorRT-LLM's that has its figures switched on"
    return msgspec.structs.replace(facts, trouble=trouble, remedy=remedy)


async def _look_at_ours(
    asking: Asking, target: Target, told: dict[str, Any], keys: Keys, probe: bool
) -> list[ServerFacts]:
    facts = ServerFacts(
        name=target.name,
        role=target.role,
        url=target.url,
        engine="kvbaton",
        version=str(told.get("kvbaton", "")),
        model=str(told.get("model", "")),
        block_size=_whole(told.get("block_size")),
        max_context=_whole(told.get("max_context")),
        fingerprint=_fingerprint(told.get("fingerprint")),
    )
    if target.role == "router":
        return [msgspec.structs.replace(facts, fingerprint=None, members=await _members(asking, target, keys.internal))]
    if not keys.internal:
        unread = "without the fleet's key its role and its port for KV stay unknown, and no hand-off is made"
        unread += " (set KVBATON_INTERNAL_KEY)"
        return [msgspec.structs.replace(facts, unread=(unread,))]
    answer = await asking.get(target.url + "/internal/info", {INTERNAL_KEY_HEADER.decode(): keys.internal})
    if answer.status == 403:
        remedy = "set KVBATON_INTERNAL_KEY to the fleet's, here and where it was started; it has another, or none"
        return [msgspec.structs.replace(facts, trouble="it does not take this key", remedy=remedy)]
    try:
        info = msgspec.json.decode(answer.body, type=WorkerInfo)
    except UNREADABLE as error:
        trouble = f"its /internal/info cannot be read by this version: {error}"
        return [msgspec.structs.replace(facts, trouble=trouble)]
    host, port = info.kv_host or urlsplit(target.url).hostname or "", info.kv_port
    if target.kv_address:
        host, _, text = target.kv_address.rpartition(":")
        port = int(text)
    facts = msgspec.structs.replace(
        facts,
        state=info.state,
        says_role=info.role,
        kv_host=host,
        kv_port=port,
        kv_dtype=info.fingerprint.kv_dtype,
        backend=_backend(info.fingerprint),
        bootstrap_port=info.engine_bootstrap_port,
        tp_size=info.fingerprint.tp_size,
        skew_s=info.time_s - (time.time() - answer.took_s / 2) if info.time_s else None,
    )
    if facts.backend == "sglang":
        return await _with_sglang(asking, facts, info.engine_url, keys.sglang)
    return [facts, *await _look_behind(asking, facts, keys, probe)]


def _backend(fingerprint: Fingerprint) -> str:
    """A worker over another engine's server adds that engine and its version to the revision of the model."""
    engine = fingerprint.model_revision.rpartition("/")[2].partition("-")[0]
    return engine if engine in ENGINE_NAMES else ""


async def _look_behind(asking: Asking, ours: ServerFacts, keys: Keys, probe: bool) -> list[ServerFacts]:
    """The server that a worker of ours drives, where peers are sent to that server itself."""
    name = _name_behind(ours)
    behind = ServerFacts(name, ours.role, f"http://{in_url(ours.kv_host)}:{ours.kv_port}", behind=ours.name)
    try:
        if ours.backend == "vllm":
            given = tuple(filter(None, (keys.vllm, key_for_servers(keys.internal))))
            found = await look_at_vllm(asking, behind, given, probe)
        elif ours.backend == "trtllm":
            found = await look_at_trtllm(asking, behind, keys.trtllm)
        else:
            return []
        return [found or await _stranger(asking, behind)]
    except RemoteError as error:
        return [msgspec.structs.replace(behind, trouble=str(error))]


async def _with_sglang(asking: Asking, ours: ServerFacts, url: str, api_key: str) -> list[ServerFacts]:
    """A server that its worker alone can reach or open is no fault, and neither is its own address for KV: peers are
    sent to that of the worker."""
    try:
        trouble, found = "", await _sglang_behind(asking, ours, url, api_key)
        if found.trouble:
            trouble = f"{found.trouble}; {found.remedy}" if found.remedy else found.trouble
    except (RemoteError, ValueError) as error:
        trouble = str(error)
    if trouble:
        untold = f"its SGLang server cannot be read from here: {trouble}"
        return [msgspec.structs.replace(ours, untold=(*ours.untold, untold))]
    return [ours, msgspec.structs.replace(found, kv_host="", kv_port=0, kv_trouble="")]


async def _sglang_behind(asking: Asking, ours: ServerFacts, url: str, api_key: str) -> ServerFacts:
    """RemoteError or ValueError when nothing is found there."""
    if not url:
        raise RemoteError("its worker does not say where it is")
    address = urlsplit(url)
    if is_own_machine(address.hostname or ""):
        url = f"http://{in_url(urlsplit(ours.url).hostname or '')}:{address.port}"
    found = await look_at_sglang(asking, ServerFacts(_name_behind(ours), ours.role, url, behind=ours.name), api_key)
    if found is None:
        raise RemoteError(f"what answers at {url} is none")
    return found


def _name_behind(ours: ServerFacts) -> str:
    return f"{ours.name}'s {ENGINE_NAMES.get(ours.backend, '')}"


async def _members(asking: Asking, target: Target, key: str) -> tuple[str, ...]:
    """Those that the router does not use, and why."""
    headers = {INTERNAL_KEY_HEADER.decode(): key} if key else {}
    answer = (await asking.get(target.url + "/fleet", headers)).json()
    members = answer.get("members") if isinstance(answer, dict) else None
    if not isinstance(members, list):
        return ("its /fleet cannot be read",)
    return tuple(
        f"{member.get('name')} is {member['state']}: {member.get('reason')}"
        for member in members
        if isinstance(member, dict) and member.get("state") != "up"
    )


async def _reach(facts: ServerFacts) -> ServerFacts:
    """Whether somebody listens where peers are sent for KV."""
    if not facts.kv_host or not facts.kv_port or facts.role == "decode":
        return facts
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(facts.kv_host_from_here, facts.kv_port)
        writer.close()
    except TimeoutError:
        return msgspec.structs.replace(facts, kv_trouble=f"no connection within {CONNECT_S:g} s")
    except (OSError, OverflowError) as error:
        words = getattr(error, "strerror", None) or "no port has that number"
        return msgspec.structs.replace(facts, kv_trouble=words)
    return facts


def skew_of(answer: Answer) -> float | None:
    """Its clock minus ours by the Date of an answer, of which whole seconds are told: half a second is added."""
    try:
        there_s = parsedate_to_datetime(answer.headers.get("date", "")).timestamp() + 0.5
    except (TypeError, ValueError):
        return None
    return there_s - (time.time() - answer.took_s / 2)


def _fingerprint(told: object) -> Fingerprint | None:
    try:
        return msgspec.convert(told, Fingerprint)
    except msgspec.ValidationError:
        return None


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
