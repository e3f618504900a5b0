"""A correctness canary: fixed prompts, greedy, through every pair of workers in turn, compared with earlier answers.

A fleet may answer fast and wrong: KV of another model, blocks that were reused, a kernel that differs. Latency shows
none of it; the same prompt answered differently does. Each turn asks one pair, so that the cost is one short request
per interval however large the fleet. Invariants: an answer is compared only with answers of the same weights
(fingerprint); a turn never outlives its deadline; nothing of it enters the router's counters of requests.
Knows nothing about clients.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
import msgspec

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.observe.metrics import Metrics
from kvbaton.router.registry import Member, Registry
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER, InternalRequest

log = logging.getLogger(__name__)
_ENCODER = msgspec.json.Encoder()
_TEXTS = (
    "The capital of France is",
    "A relay team passes a baton. The first runner sprints, and the second one takes it over without stopping. ",
    "Water boils when its vapour pressure reaches that of the air around it. In the mountains the air is thin, so ",
)
_LENGTHS = (12, 100, 400)  # one block, several blocks, several chunks; cut to what the model can hold
_NUM_OUTPUT_TOKENS = 16
_COUNTER = "kvbaton_router_canary_total"


@dataclass(frozen=True)
class Probe:
    """One prompt through one pair; ``prefill`` is None where the answering worker computes the prompt itself."""

    prompt: tuple[int, ...]
    decode: Member
    prefill: Member | None


class Canary:
    def __init__(
        self,
        registry: Registry,
        session: aiohttp.ClientSession,
        tokenizer: Tokenizer,
        key: str,
        metrics: Metrics,
        deadline_s: float = 30.0,
    ) -> None:
        self._registry = registry
        self._session = session
        self._headers = {INTERNAL_KEY_HEADER.decode(): key, "content-type": "application/json"}
        self._metrics = metrics
        self._deadline_s = deadline_s
        ids = [tokenizer.encode(text) for text in _TEXTS]
        self._prompts = [
            tuple(itertools.islice(itertools.cycle(found), length)) for found, length in zip(ids, _LENGTHS, strict=True)
        ]
        self._said: dict[tuple[str, tuple[int, ...]], tuple[str, str]] = {}  # (weights, prompt) -> (text, who said it)
        self._turn = 0

    async def run(self, interval_s: float) -> None:
        """Until cancelled; one probe each ``interval_s``."""
        while True:
            await asyncio.sleep(interval_s)
            await self.turn()

    async def turn(self) -> str | None:
        """Ask the next pair: ``right``, ``wrong``, ``failed``, or None when no worker takes requests."""
        probes = list(self._probes())
        if not probes:
            return None
        probe = probes[self._turn % len(probes)]
        self._turn += 1
        result = await self._ask(probe)
        self._metrics.add(_COUNTER, result)
        return result

    def _probes(self) -> Iterator[Probe]:
        usable = self._registry.usable(asyncio.get_running_loop().time())
        prefills = [m for m in usable if m.settings.role == "prefill" and m.reported is not None]
        for prompt in self._prompts:
            for member in usable:
                if member.settings.role == "prefill" or member.reported is None:
                    continue
                fitting = prompt[: member.reported.info.max_context - _NUM_OUTPUT_TOKENS]
                if member.serves_alone:
                    yield Probe(fitting, member, None)
                if member.settings.role == "decode":
                    yield from (Probe(fitting, member, prefill) for prefill in prefills)

    async def _ask(self, probe: Probe) -> str:
        reported = probe.decode.reported
        assert reported is not None, "only members that answered are probed"
        who = probe.decode.name if probe.prefill is None else f"{probe.prefill.name} to {probe.decode.name}"
        try:
            async with asyncio.timeout(self._deadline_s):
                text = await self._answer(probe)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            log.warning("canary of %s got no answer: %s: %s", who, type(error).__name__, error)
            return "failed"
        said, by = self._said.setdefault((reported.info.fingerprint.model_revision, probe.prompt), (text, who))
        if text == said:
            return "right"
        log.error("canary: %s answers a prompt of %d tokens differently from %s", who, len(probe.prompt), by)
        return "wrong"

    async def _answer(self, probe: Probe) -> str:
        """The text. Salted anew each time: a cached prefix would hide a hand-off that went wrong."""
        internal = InternalRequest(
            request_id=f"canary-{secrets.token_hex(8)}",
            prompt_token_ids=(probe.prompt,),
            prefill=None if probe.prefill is None else self._registry.peer_address(probe.prefill),
            deadline_s=self._deadline_s,
            cache_salt=secrets.token_hex(8),
        )
        body = {
            "prompt": probe.prompt,
            "max_tokens": _NUM_OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "kvbaton": internal,
        }
        url = f"{probe.decode.settings.url}/v1/completions"
        async with self._session.post(
            url, data=_ENCODER.encode(body), headers=self._headers, allow_redirects=False
        ) as response:
            raw = await response.read()
            if response.status != 200:
                raise ValueError(f"the worker answered {response.status}: {raw[:200].decode(errors='replace')}")
        return str(msgspec.json.decode(raw)["choices"][0]["text"])
