"""What other processes send and nobody can read: it is their fault, said as such, and never the end of the router."""

from __future__ import annotations

import pytest
from router.fleet import KEY, RawWorker, ask_raw, running_fleet
from workers.scripted import serving

from kvbaton.config import MemberSettings
from kvbaton.engine.tokenizer import Tokenizer

DEEP = b'{"nobody asked for": ' + b"[" * 100_000


async def test_a_worker_that_tells_nonsense_of_itself_is_down_and_the_others_go_on(tokenizer: Tokenizer) -> None:
    """Nested so deep that the decoder gives up in a way of its own: it once ended the router."""
    async with running_fleet(tokenizer, {"w0": "both"}) as fleet, serving(RawWorker(DEEP, [])) as address:
        good = [member.settings for member in fleet.registry.members]
        fleet.registry.set_members([*good, MemberSettings(address, "both", "odd")])
        await fleet.poll()
        odd = fleet.registry.get("odd")
        assert odd is not None and odd.state == "down" and "makes no sense" in odd.reason
        status, answer, _ = await fleet.post({"prompt": "x", "max_tokens": 1})
        assert status == 200, answer


@pytest.mark.parametrize(
    ("parts", "stream"),
    [
        ([b": kvbaton {\n\ndata: {}\n\n"], True),
        ([b": kvbaton " + DEEP + b"\n\ndata: {}\n\n"], True),
        ([b'data: {"error": ' + b"[" * 100_000 + b"\n\n"], True),
    ],
)
async def test_a_stream_that_makes_no_sense_is_the_workers_fault(
    tokenizer: Tokenizer, info: bytes, parts: list[bytes], stream: bool
) -> None:
    status, answer, _ = await ask_raw(tokenizer, RawWorker(info, parts), {"prompt": "x", "stream": stream})
    assert status == 502 and answer["error"]["code"] != "internal_error", answer


async def test_a_report_in_a_head_that_makes_no_sense_is_the_workers_fault(tokenizer: Tokenizer, info: bytes) -> None:
    worker = RawWorker(info, [b"{}"], headers=[(b"x-kvbaton-report", b"{")])
    status, answer, _ = await ask_raw(tokenizer, worker, {"prompt": "x"})
    assert status == 502 and answer["error"]["code"] != "internal_error", answer


async def test_a_window_of_time_that_is_none_is_refused_by_name(tokenizer: Tokenizer) -> None:
    async with running_fleet(tokenizer, {"w0": "both"}) as fleet:
        url = f"{fleet.url}/internal/trace?seconds=never"
        async with fleet.http.get(url, headers={"x-kvbaton-key": KEY}) as answer:
            assert answer.status == 400 and (await answer.json())["error"]["param"] == "seconds"
