"""What a TensorRT-LLM server tells of itself: its version, its model, and in its figures the size of its blocks.

KV dtype, parallelism and context it tells nobody. Knows nothing about what two answers mean together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvbaton.doctor.facts import ServerFacts, locked_out
from kvbaton.types import UNREADABLE
from kvbaton.workers.trtllm import METRICS_PATH, Models, Version
from kvbaton.workers.vllm_metrics import TRTLLM, read_figures

if TYPE_CHECKING:
    from kvbaton.doctor.look import Asking

_UNTOLD = "TensorRT-LLM does not tell KV dtype, tensor parallelism and context of a server: they are not compared"


async def look_at_trtllm(asking: Asking, facts: ServerFacts, api_key: str) -> ServerFacts | None:
    """None when it is no TensorRT-LLM server. RemoteError when it does not answer."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    figures = await asking.get(facts.url + METRICS_PATH, headers)
    text = figures.body.decode(errors="replace")
    if figures.status != 200 or not any(line.startswith("trtllm_") for line in text.splitlines()):
        return None
    facts = msgspec.structs.replace(facts, engine="trtllm", block_size=read_figures(text, table=TRTLLM).block_size)
    models = await asking.get(facts.url + "/v1/models", headers)
    if models.status in (401, 403):
        return locked_out(facts, "trtllm", bool(api_key))
    version = await asking.get(facts.url + "/version", headers)
    try:
        names = [card.id for card in msgspec.json.decode(models.body, type=Models).data]
        told = msgspec.json.decode(version.body, type=Version)
    except UNREADABLE as error:
        return msgspec.structs.replace(facts, trouble=f"what it says of itself cannot be read: {error}")
    return msgspec.structs.replace(
        facts, version=told.version, model=names[0] if names else "", untold=(*facts.untold, _UNTOLD)
    )
