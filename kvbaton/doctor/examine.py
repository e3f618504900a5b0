"""One examination: look at every server, then let those pairs hand off that can be told to. Knows no findings."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp

from kvbaton.doctor.facts import Examination, Target
from kvbaton.doctor.findings import pairs_of
from kvbaton.doctor.look import Asking, look_at_all
from kvbaton.doctor.measure import measure_pairs


async def examine(
    targets: Sequence[Target], key: str, api_key: str, probe: bool, num_tokens: int, repeats: int
) -> Examination:
    """``num_tokens`` of each prompt that is handed off; 0: none is."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        asking = Asking(session)
        servers = await look_at_all(asking, targets, key, api_key, probe)
        pairs = [
            (prefill, decode)
            for prefill, decode in pairs_of(servers)
            if prefill.engine == decode.engine == "kvbaton" and prefill.kv_host and not prefill.kv_trouble
        ]
        found = await measure_pairs(asking, pairs, key, num_tokens, repeats) if key and num_tokens else []
    return Examination(tuple(servers), tuple(found))
