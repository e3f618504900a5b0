"""One examination: look at every server, then let those pairs hand off that can be told to. Knows no findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from kvbaton.doctor.facts import Examination, Keys, Target
from kvbaton.doctor.findings import pairs_of
from kvbaton.doctor.look import Asking, look_at_all
from kvbaton.doctor.measure import can_measure, measure_pairs


@dataclass(frozen=True)
class How:
    """What is done besides reading."""

    probe: bool = True  # servers of other engines are asked for one token each
    num_tokens: int = 0  # of each prompt that is handed off; 0: none is
    repeats: int = 1
    model_s: float = 60.0  # for an answer that a model has to compute


async def examine(targets: Sequence[Target], keys: Keys, how: How) -> Examination:
    async with aiohttp.ClientSession(trust_env=False) as session:
        asking = Asking(session, how.model_s)
        servers = await look_at_all(asking, targets, keys, how.probe)
        pairs = [pair for pair in pairs_of(servers) if how.num_tokens and can_measure(*pair, keys, how.probe)]
        found = await measure_pairs(asking, servers, pairs, keys, how.num_tokens, how.repeats)
    return Examination(tuple(servers), tuple(found))
