"""What a vLLM server tells of itself: its API, its figures, and, asked for one token, what it would hand off and where.

``/metrics`` carries the settings of its cache. What decides whether two servers may exchange KV is a hash that no page
shows; the side channel tells it to whoever asks for the metadata of a transfer, which is what a decode server does
first. Only rank 0 is asked for, which every server has. Invariant: only a server whose figures are NixlConnector's is
asked for KV to be continued elsewhere, for which MooncakeConnector of a decode server would end the engine. Knows
nothing about what two answers mean together.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvbaton.doctor.facts import ServerFacts, locked_out
from kvbaton.transfer.reach import in_url
from kvbaton.types import UNREADABLE

if TYPE_CHECKING:
    from kvbaton.doctor.look import Answer, Asking

NIXL, MOONCAKE = "NixlConnector", "MooncakeConnector"
_CONNECTOR_FIGURES = {NIXL: "vllm:nixl_", MOONCAKE: "vllm:mooncake_xfer_"}
_SIDE_CHANNEL_S = 5.0
_PROBE_BLOCKS = 2  # fewer full blocks and there would be nothing to offer
_ASK_METADATA = msgspec.msgpack.encode((b"get_meta_msg", 0, 0))
_OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
_LOST = (*UNREADABLE, ValueError)


class _Envelope(msgspec.Struct):
    compatibility_hash: str = ""
    agent_metadata_bytes: bytes = b""


class _Metadata(msgspec.Struct):
    """Of what is told about a transfer, the part that can be compared. Versions add fields."""

    block_size: int = 0
    kv_cache_layout: str = ""
    attn_backend_name: str = ""


async def look_at_vllm(asking: Asking, facts: ServerFacts, api_keys: Sequence[str], probe: bool) -> ServerFacts | None:
    """None when it is no vLLM server. ``api_keys`` are tried in turn. RemoteError when it does not answer."""
    headers, models = await _models(asking, facts.url, api_keys)
    text = (await asking.get(facts.url + "/metrics", headers)).body.decode(errors="replace")
    config = _cache_config(text)
    if config is None:
        return None
    if models.status in (401, 403):
        return locked_out(facts, "vllm", any(api_keys))
    card = _first_card(models)
    if card is None:
        trouble = f"it lists no model (status {models.status})"
        return msgspec.structs.replace(facts, engine="vllm", trouble=trouble)
    told = (await asking.get(facts.url + "/version", headers)).json()
    connector = _connector(text)
    facts = msgspec.structs.replace(
        facts,
        engine="vllm",
        version=str(told.get("version", "")) if isinstance(told, dict) else "",
        model=str(card.get("id", "")),
        model_path=str(card.get("root") or ""),
        max_context=card["max_model_len"] if isinstance(card.get("max_model_len"), int) else 0,
        block_size=int(config["block_size"]) if config.get("block_size", "").isdecimal() else 0,
        kv_dtype=config.get("cache_dtype", ""),
        connector=True if connector else None,
        connector_name=connector,
    )
    return await _probe(asking, facts, headers) if probe and connector == NIXL else facts


async def _models(asking: Asking, url: str, api_keys: Sequence[str]) -> tuple[dict[str, str], Answer]:
    """With the first key that is taken; the last answer when none is."""
    first, *others = api_keys or ("",)
    headers = {"authorization": f"Bearer {first}"} if first else {}
    answer = await asking.get(url + "/v1/models", headers)
    return await _models(asking, url, others) if answer.status in (401, 403) and others else (headers, answer)


def _connector(text: str) -> str:
    """By its figures, which are there from the start; empty where there are none, as with older versions."""
    for name, start in _CONNECTOR_FIGURES.items():
        if any(line.startswith(start) for line in text.splitlines()):
            return name
    return ""


def _first_card(models: Answer) -> dict[str, Any] | None:
    told = models.json()
    cards = told.get("data") if isinstance(told, dict) else None
    return cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else None


def _cache_config(text: str) -> dict[str, str] | None:
    """The labels of the settings; None when this is no exposition of vLLM's."""
    lines = [line for line in text.splitlines() if line.startswith("vllm:")]
    for line in lines:
        if line.startswith("vllm:cache_config_info"):
            try:
                for family in text_string_to_metric_families(line):
                    return dict(family.samples[0].labels)
            except Exception:  # the parser raises what it happens to meet
                return {}
    return {} if lines else None


async def _probe(asking: Asking, facts: ServerFacts, headers: dict[str, str]) -> ServerFacts:
    """One token, to be continued elsewhere. What is offered lapses with its lease."""
    num_tokens = _PROBE_BLOCKS * (facts.block_size or 128) + 1
    if facts.max_context:
        num_tokens = min(num_tokens, facts.max_context - 1)
    body = {
        "model": facts.model,
        "prompt": [1 + index % 97 for index in range(num_tokens)],
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": _OFFER,
    }
    answer = await asking.post(facts.url + "/v1/completions", body, headers, asking.model_s)
    told = answer.json()
    if answer.status != 200 or not isinstance(told, dict):
        return msgspec.structs.replace(
            facts, trouble=f"it answers a prompt of {num_tokens} tokens with {answer.status}"
        )
    offer = told.get("kv_transfer_params")
    if not isinstance(offer, dict):
        return _unread(facts, f"for a prompt of {num_tokens} tokens it offers no KV: its hash and address are not read")
    host, port, tp_size = offer.get("remote_host"), offer.get("remote_port"), offer.get("tp_size")
    facts = msgspec.structs.replace(
        facts,
        kv_host=host if isinstance(host, str) else "",
        kv_port=port if isinstance(port, int) else 0,
        tp_size=tp_size if isinstance(tp_size, int) else 0,
    )
    return await _side_channel(facts)


async def _side_channel(facts: ServerFacts) -> ServerFacts:
    if not facts.kv_host or not facts.kv_port:
        return facts
    if importlib.util.find_spec("zmq") is None:
        return _unread(facts, "without pyzmq (kvbaton[vllm]) its compatibility hash is not read")
    try:
        envelope, metadata = await _ask_metadata(facts.kv_host_from_here, facts.kv_port)
    except TimeoutError:
        return _unread(facts, f"its side channel {facts.kv_host}:{facts.kv_port} is silent for {_SIDE_CHANNEL_S:g} s")
    except (OSError, *_LOST) as error:
        return _unread(facts, f"what its side channel says cannot be read: {error}")
    return msgspec.structs.replace(
        facts,
        compatibility_hash=envelope.compatibility_hash,
        block_size=metadata.block_size or facts.block_size,
        kv_layout=metadata.kv_cache_layout,
        attention=metadata.attn_backend_name,
    )


def _unread(facts: ServerFacts, why: str) -> ServerFacts:
    return msgspec.structs.replace(facts, unread=(*facts.unread, why))


async def _ask_metadata(host: str, port: int) -> tuple[_Envelope, _Metadata]:
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.IPV6, 1)
        socket.connect(f"tcp://{in_url(host)}:{port}")
        async with asyncio.timeout(_SIDE_CHANNEL_S):
            await socket.send(_ASK_METADATA)
            frames = await socket.recv_multipart()
    finally:
        context.destroy(linger=0)
    envelope = msgspec.msgpack.decode(frames[0], type=_Envelope)
    try:
        metadata = msgspec.msgpack.decode(envelope.agent_metadata_bytes, type=_Metadata)
    except _LOST:
        metadata = _Metadata()  # another version's; the hash says so
    return envelope, metadata
