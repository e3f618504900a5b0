"""What an SGLang server tells of itself, and what its bootstrap server tells every decode server before a transfer.

Knows nothing about what two answers mean together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from kvbaton.doctor.facts import ServerFacts, locked_out
from kvbaton.transfer.reach import in_url
from kvbaton.types import RemoteError
from kvbaton.workers.sglang_bootstrap import INFO_PATHS, ROUTE_QUERY, decode_bootstrap

if TYPE_CHECKING:
    from kvbaton.doctor.look import Asking


_CONNECTED_ROLES = {"prefill": "prefill", "decode": "decode"}


async def look_at_sglang(asking: Asking, facts: ServerFacts, api_key: str) -> ServerFacts | None:
    """None when it is no SGLang server. RemoteError when it does not answer."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    for path in INFO_PATHS:
        answer = await asking.get(facts.url + path, headers)
        if answer.status in (401, 403) and await _has_its_figures(asking, facts.url):
            return locked_out(facts, "sglang", bool(api_key))
        told = answer.json()
        if isinstance(told, dict) and "disaggregation_mode" in told:
            break
    else:
        return None
    mode = told["disaggregation_mode"]
    facts = msgspec.structs.replace(
        facts,
        engine="sglang",
        version=_text(told, "version"),
        says_role=_CONNECTED_ROLES.get(str(mode), "both"),
        model=_text(told, "served_model_name"),
        block_size=_whole(told, "page_size"),
        kv_dtype=_text(told, "kv_cache_dtype"),
        tp_size=_whole(told, "tp_size"),
        max_context=_whole(told, "context_length") or _whole(told, "max_total_num_tokens"),
        connector=mode in ("prefill", "decode"),
    )
    if facts.says_role != "prefill":
        return facts
    host, port = urlsplit(facts.url).hostname or "", _whole(told, "disaggregation_bootstrap_port")
    facts = msgspec.structs.replace(facts, kv_host=host, kv_port=port)
    return await _bootstrap(asking, facts) if port else facts


async def _has_its_figures(asking: Asking, url: str) -> bool:
    """They are shown to whoever asks, where the server shows any."""
    return any(line.startswith(b"sglang:") for line in (await asking.get(url + "/metrics")).body.splitlines())


async def _bootstrap(asking: Asking, facts: ServerFacts) -> ServerFacts:
    """Its word counts: it is what decode servers compare with."""
    try:
        answer = await asking.get(f"http://{in_url(facts.kv_host)}:{facts.kv_port}/route?{ROUTE_QUERY}")
        info = decode_bootstrap(answer.status, answer.body)
    except RemoteError as error:
        return msgspec.structs.replace(facts, kv_trouble=str(error))
    return msgspec.structs.replace(
        facts,
        block_size=info.page_size or facts.block_size,
        kv_dtype=info.kv_cache_dtype or facts.kv_dtype,
        tp_size=info.attn_tp_size or facts.tp_size,
    )


def _text(told: dict[str, Any], name: str) -> str:
    value = told.get(name)
    return value if isinstance(value, str) else ""


def _whole(told: dict[str, Any], name: str) -> int:
    value = told.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
