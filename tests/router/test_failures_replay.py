"""A stream whose worker dies goes on elsewhere, and no client can tell: token for token, count for count.

The connection to the decode worker is reset after a number of bytes, again and again, so that seams fall everywhere:
inside events, between the role and the first token, inside characters and stop strings, behind the last token.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from pathlib import Path
from typing import Any

from router.rig import Rig, Told, make_rig

PROMPT = "the quick brown fox and the lazy dog, "
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": PROMPT * 3, "temperature": 0, "max_tokens": 40},
    "seeded": {"prompt": PROMPT, "temperature": 1, "seed": 7, "max_tokens": 40},
    "seeded, cut to the likely": {"prompt": PROMPT, "temperature": 0.9, "seed": 3, "top_p": 0.9, "max_tokens": 40},
    "penalties": {
        "prompt": PROMPT,
        "temperature": 0.8,
        "seed": 2,
        "presence_penalty": 1,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "max_tokens": 40,
    },
    "min_tokens": {"prompt": PROMPT, "temperature": 0, "logit_bias": {"258": 90}, "min_tokens": 25, "max_tokens": 40},
    "ignore_eos": {"prompt": PROMPT, "temperature": 1, "seed": 5, "ignore_eos": True, "max_tokens": 50},
    "logprobs": {"prompt": PROMPT, "temperature": 0, "logprobs": 3, "max_tokens": 30},
    "many": {"prompt": PROMPT, "temperature": 1, "seed": 1, "n": 3, "max_tokens": 20},
    "prompts": {"prompt": [PROMPT, "another", "third " * 20], "temperature": 1, "seed": 3, "n": 2, "max_tokens": 12},
    "half characters": {
        "prompt": PROMPT,  # token ids are bytes: 0xE2 0x82 0xAC is one character in three tokens
        "temperature": 1,
        "seed": 11,
        "logit_bias": {"162": 60, "230": 60, "105": 60, "170": 60},
        "max_tokens": 60,
    },
    "chat": {"messages": [{"role": "user", "content": PROMPT}], "temperature": 1, "seed": 4, "max_tokens": 40},
    "chat, logprobs, many": {
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 1,
        "seed": 9,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 12,
    },
}


async def cut_again_and_again(rig: Rig, after_bytes: list[int]) -> None:
    """Each decode worker's answers are reset after so many bytes; armed again whenever it has struck."""
    paths = [rig.http_proxies[name].to_client for name in ("d0", "d1")]
    while after_bytes:
        for path in paths:
            if path.cut_after_bytes is None and after_bytes:
                path.cut_after_bytes = after_bytes.pop()
        await asyncio.sleep(0)


async def with_cuts(rig: Rig, body: dict[str, Any], after_bytes: list[int]) -> Told:
    cutting = asyncio.ensure_future(cut_again_and_again(rig, after_bytes))
    try:
        return await rig.ask(body)
    finally:
        cutting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await cutting
        rig.heal()
        await rig.fleet.poll()  # an answered poll ends a worker's quarantine


async def test_no_seam_shows_in_any_kind_of_request(tiny_model_dir: Path) -> None:
    """The seams are at random bytes; what fails says which."""
    rng = random.Random(2026)
    async with make_rig(tiny_model_dir, {"p0": "prefill", "d0": "decode", "d1": "decode"}, max_replays=100) as rig:
        for name, body in REQUESTS.items():
            expected = await rig.expected(body)
            for _ in range(4):
                cuts = [rng.randrange(600, 4000) for _ in range(8)]
                told = await with_cuts(rig, body, list(cuts))
                assert told.status == 200, (name, cuts, told.error)
                assert told.answer == expected.answer, (name, cuts)
                assert len(told.ids) == 1 and len(told.created) == 1, (name, cuts)
        assert rig.replays("worker_error") > len(REQUESTS) * 4, "hardly a stream was cut"
        assert rig.fleet.counter("kvbaton_router_broken_streams_total") == 0


async def test_a_seam_anywhere_in_one_answer(tiny_model_dir: Path) -> None:
    """One short chat with a stop string that is held back, cut once at every 23rd byte of its answer."""
    async with make_rig(tiny_model_dir, {"d0": "both", "d1": "both"}) as rig:
        body = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 7, "ignore_eos": True}
        text = (await rig.expected(body)).texts[0]
        body["stop"] = [text[3:5] + "never", text[4:]]  # the first is held back and let go, the second ends it
        expected = await rig.expected(body)
        assert expected.finish == {0: ["stop"]} and expected.texts[0] == text[:4]
        path, registry = rig.http_proxies["d0"].to_client, rig.fleet.registry
        second = registry.get("d1")
        assert second is not None
        with registry.hold(second, 50, 0):  # so busy that the first worker is always asked first
            before = path.num_bytes
            assert (await rig.ask(body)).answer == expected.answer
            num_bytes = path.num_bytes - before
            for at in range(1, num_bytes, 23):
                path.cut_after_bytes = at
                told = await rig.ask(body)
                assert told.answer == expected.answer, at
                rig.heal()  # an answer differs in length by some digits, so the last cuts may fall behind its end
                await rig.fleet.poll()
        num_planned, num_noticed = len(range(1, num_bytes, 23)), rig.replays("worker_error")
        num_noticed += rig.retries("worker_error")
        assert num_planned - 5 <= num_noticed <= path.num_cut <= num_planned


async def test_case_fl_09_the_budget_counts_what_was_delivered(tiny_model_dir: Path) -> None:
    """FL-09: max_tokens 50, min_tokens 40, ignore_eos; the decode worker dies after about 30 tokens."""
    async with make_rig(tiny_model_dir, {"p0": "prefill", "d0": "decode", "d1": "decode"}, max_replays=1) as rig:
        body = {
            "messages": [{"role": "user", "content": PROMPT}],
            "temperature": 0,
            "max_tokens": 50,
            "min_tokens": 40,
            "ignore_eos": True,
        }
        expected = await rig.expected(body)
        for name in ("d0", "d1"):
            rig.http_proxies[name].to_client.cut_after_bytes = 7000
        told = await rig.ask(body)
        assert told.answer == expected.answer
        assert told.usage is not None and told.usage["completion_tokens"] == 50
        assert told.usage["prompt_tokens"] == expected.usage["prompt_tokens"]  # type: ignore[index]
        assert told.roles == {0: 1} and told.finish == {0: ["length"]}
        assert rig.replays("worker_error") == 1
        replayed = rig.fleet.counter("kvbaton_router_replayed_tokens_total")
        assert 20 < replayed < 45, "the cut was meant to be near the thirtieth token"


async def test_a_client_that_wants_no_replay_gets_an_error_event(tiny_model_dir: Path) -> None:
    async with make_rig(tiny_model_dir, {"d0": "both", "d1": "both"}) as rig:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
        expected = await rig.expected(body)
        for name in ("d0", "d1"):
            rig.http_proxies[name].to_client.cut_after_bytes = 2500
        told = await rig.ask(body, **{"x-kvbaton-replay": "never"})
        assert told.error is not None and told.error["code"] == "worker_error" and not told.done
        assert told.texts[0] and expected.texts[0].startswith(told.texts[0]) and not told.finish
        assert rig.fleet.counter("kvbaton_router_broken_streams_total") == 1
        assert rig.replays("worker_error") == 0
        rig.heal()
        bad = await rig.ask(body, **{"x-kvbaton-replay": "perhaps"})
        assert bad.status == 400 and bad.error is not None and bad.error["param"] == "x-kvbaton-replay"


async def test_replays_are_bounded(tiny_model_dir: Path) -> None:
    """Both workers die again and again: two replays, then the error event; what was sent is right."""
    async with make_rig(tiny_model_dir, {"d0": "both", "d1": "both"}, max_replays=2) as rig:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 100, "ignore_eos": True}
        expected = await rig.expected(body)
        told = await with_cuts(rig, body, [2000] * 3)
        assert told.error is not None and told.error["code"] == "worker_error"
        assert expected.texts[0].startswith(told.texts[0])
        assert rig.replays("worker_error") == 2


async def test_without_a_seed_a_stream_goes_on_too(tiny_model_dir: Path) -> None:
    async with make_rig(tiny_model_dir, {"d0": "both", "d1": "both"}) as rig:
        body = {"prompt": PROMPT, "temperature": 1, "max_tokens": 40, "ignore_eos": True, "logprobs": 0}
        for name in ("d0", "d1"):
            rig.http_proxies[name].to_client.cut_after_bytes = 5000
        told = await rig.ask(body)
        assert told.done and told.usage is not None and told.usage["completion_tokens"] == 40
        assert len(told.tokens[0]) == 40 and told.finish == {0: ["length"]}
        assert rig.replays("worker_error") >= 1


async def test_the_answer_of_a_stream_is_not_touched(tiny_model_dir: Path) -> None:
    """Without a failure a client gets the worker's bytes, journal and report cut out: nothing is written anew."""
    async with make_rig(tiny_model_dir, {"d0": "both"}) as rig:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "logprobs": 2, "stream": True}
        raws = []
        for url in (rig.reference_url, rig.fleet.url):
            async with rig.fleet.http.post(url + "/v1/completions", json=body) as response:
                raws.append(await response.read())
        plain, routed = (re.sub(rb'"id":"[^"]*","object":"text_completion","created":\d+', b"", raw) for raw in raws)
        assert routed == plain
