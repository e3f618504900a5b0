"""More requests than there is room for, deadlines, and clients that leave: what is refused is refused at once, with
its own status; nothing is kept of anybody who is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from router.fleet import SHORT, Fleet, running_fleet
from router.rig import make_rig, read_stream
from workers.scripted import until

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.kv.blocks import OutOfBlocks
from kvbaton.types import CapacityError, GenerateRequest, RemoteError, Role, SamplingParams
from kvbaton.workers.native import NativeWorker
from kvbaton.workers.protocol import WorkerEvent

PROMPT = "the quick brown fox and the lazy dog, "


def fill(fleet: Fleet, count: int, **body: Any) -> list[asyncio.Task[Any]]:
    return [asyncio.ensure_future(fleet.post({"prompt": f"{i} {SHORT}", **body})) for i in range(count)]


@pytest.fixture
def no_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait are tried when somebody leaves, not now and then: a queue that is full stays so."""
    monkeypatch.setattr("kvbaton.router.room.LONGEST_NAP_S", 3600.0)


@pytest.mark.usefixtures("no_naps")
async def test_each_class_of_priority_has_its_own_bound(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of low priority locks out nobody else, and is told when to come back."""
    bounds = {"max_queued": 3, "max_queued_high": 2, "max_queued_low": 2}
    async with running_fleet(tokenizer, {"b0": "both"}, **bounds) as fleet:
        worker = fleet.workers["b0"]
        worker.gate.clear()
        worker.max_open = 1
        waiting = fill(fleet, 1)
        await until(lambda: worker.num_open == 1)
        for priority, bound in ((7, 2), (0, 3), (-1, 2)):
            before = fleet.dispatcher.num_queued
            waiting += fill(fleet, bound, priority=priority)
            await until(lambda n=before + bound: fleet.dispatcher.num_queued == n)  # type: ignore[misc]
            status, answer, headers = await fleet.post({"prompt": SHORT, "priority": priority})
            assert (status, answer["error"]["code"]) == (429, "queue_full")
            assert answer["error"]["type"] == "rate_limit_error" and 1 <= int(headers["retry-after"]) <= 30
        monkeypatch.undo()
        fleet.dispatcher._line._room._wake_up()  # now and then from now on
        worker.gate.set()
        assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * 8
        served = [request.priority for request, _ in worker.requests]
        # Two may be tried at once for one place, so neighbours may change places; classes as a whole do not.
        place = {p: [i for i, q in enumerate(served[1:]) if q == p] for p in (-1, 0, 7)}
        assert sum(place[-1]) / 2 < sum(place[0]) / 3 < sum(place[7]) / 2, served
        assert fleet.dispatcher.num_queued == 0


@pytest.mark.usefixtures("no_naps")
async def test_who_had_its_turn_in_vain_is_not_refused_for_a_newcomer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it looks for room another one takes the only place in the queue: it waits on, in front of that one."""
    async with running_fleet(tokenizer, {"b0": "both"}, max_queued=1) as fleet:
        worker = fleet.workers["b0"]
        worker.gate.clear()
        worker.max_open = 1
        posts = fill(fleet, 1)
        await until(lambda: worker.num_open == 1)
        posts += fill(fleet, 1)
        await until(lambda: fleet.dispatcher.num_queued == 1)
        looks, may_go_on, generate = asyncio.Event(), asyncio.Event(), worker.generate

        async def full(*arguments: Any, **named: Any) -> AsyncGenerator[WorkerEvent, bool | None]:
            if not looks.is_set():  # the one that waited
                looks.set()
                await may_go_on.wait()
            async for event in generate(*arguments, **named):
                yield event

        monkeypatch.setattr(worker, "generate", full)
        fleet.dispatcher._line.freed()  # and yet there is no room
        await looks.wait()
        posts += fill(fleet, 1, max_tokens=1)
        await until(lambda: fleet.dispatcher.num_queued == 1)
        may_go_on.set()
        await until(lambda: fleet.dispatcher.num_queued == 2 or posts[1].done())
        assert not posts[1].done(), await posts[1]
        status, answer, _ = await fleet.post({"prompt": SHORT})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        worker.gate.set()
        assert [status for status, _, _ in await asyncio.gather(*posts)] == [200] * 3
        assert [request.sampling.max_tokens for request, _ in worker.requests][-1] == 1, "the newcomer came last"


async def test_too_busy_is_429_and_nobody_there_is_503(tokenizer: Tokenizer) -> None:
    async with running_fleet(tokenizer, {"b0": "both"}, queue_timeout_s=0.2) as fleet:
        fleet.workers["b0"].error = CapacityError("full")
        status, answer, headers = await fleet.post({"prompt": SHORT})
        assert (status, answer["error"]["code"]) == (429, "no_capacity") and "retry-after" in headers
        fleet.servers["b0"].state = "draining"
        await fleet.poll()
        status, answer, headers = await fleet.post({"prompt": SHORT})
        assert (status, answer["error"]["code"]) == (503, "no_workers") and "retry-after" in headers
        fleet.gateway.state = "draining"
        status, answer, _ = await fleet.post({"prompt": SHORT})
        assert (status, answer["error"]["code"]) == (503, "draining")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_sets_its_deadline(tokenizer: Tokenizer, stream: bool) -> None:
    """While it waits in the queue, before the first token, and in the middle of a stream."""
    async with running_fleet(tokenizer, {"b0": "both"}) as fleet:
        worker = fleet.workers["b0"]
        worker.gate.clear()
        body, short = {"prompt": SHORT, "stream": stream}, {"x-request-timeout-ms": "300"}
        status, answer, _ = await fleet.post(body, **short)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        await until(lambda: worker.num_open == 0)
        worker.max_open = 0
        status, answer, _ = await fleet.post(body, **short)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert fleet.dispatcher.num_queued == 0
        worker.max_open, worker.gate_at = 10, 3
        status, raw, _ = await fleet.post(body, **{"x-request-timeout-ms": "1500"})  # long enough for three tokens
        if stream:
            assert status == 200 and b'"code":"deadline_exceeded"' in raw and b"[DONE]" not in raw
        else:
            assert (status, raw["error"]["code"]) == (504, "deadline_exceeded")
        await until(lambda: worker.num_open == 0)


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "9" * 20, ""])
async def test_a_deadline_that_is_none_is_refused_by_name(tokenizer: Tokenizer, value: str) -> None:
    async with running_fleet(tokenizer, {"b0": "both"}) as fleet:
        status, answer, _ = await fleet.post({"prompt": SHORT}, **{"x-request-timeout-ms": value})
        assert (status, answer["error"]["param"]) == (400, "x-request-timeout-ms")


async def test_the_servers_deadline_bounds_the_clients(tokenizer: Tokenizer) -> None:
    async with running_fleet(tokenizer, {"b0": "both"}, request_timeout_s=0.3) as fleet:
        fleet.workers["b0"].gate.clear()
        status, answer, _ = await fleet.post({"prompt": SHORT}, **{"x-request-timeout-ms": "3600000"})
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


async def broken_and_waiting(fleet: Fleet) -> asyncio.Task[Any]:
    """A stream that lost its worker after some tokens, and no other has room."""
    first, second = fleet.workers["b0"], fleet.workers["b1"]
    first.token_ids = second.token_ids  # they are the same model
    second.max_open = 0
    first.gate_at = 3
    first.gate.clear()
    begun = asyncio.Event()

    async def follow() -> tuple[int, bytes, Any]:
        raw = b""
        async with fleet.http.post(f"{fleet.url}/v1/completions", json={"prompt": SHORT, "stream": True}) as response:
            async for part in response.content.iter_any():
                raw += part
                begun.set()
            return response.status, raw, response.headers

    with fleet.registry.hold(fleet.registry.get("b1"), 50, 0):  # type: ignore[arg-type]
        asking = asyncio.ensure_future(follow())
        await begun.wait()
    first.error = RemoteError("gone")
    first.gate.set()
    await until(lambda: fleet.dispatcher.num_queued == 1)
    return asking


async def test_a_stream_that_is_continued_waits_for_room(tokenizer: Tokenizer) -> None:
    """Its turn comes like another's; a queue that is full for others is not full for it."""
    async with running_fleet(tokenizer, {"b0": "both", "b1": "both"}, max_queued=0) as fleet:
        asking = await broken_and_waiting(fleet)
        status, answer, _ = await fleet.post({"prompt": SHORT})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        fleet.workers["b1"].max_open = 10
        status, raw, headers = await asking
        told = read_stream(raw, status, headers)
        assert told.texts == {0: "hello from b1"} and told.done
        assert fleet.counter('kvbaton_router_replays_total{cause="worker_error"}') == 1


async def test_a_client_that_leaves_while_its_stream_waits_leaves_nothing(tokenizer: Tokenizer) -> None:
    async with running_fleet(tokenizer, {"b0": "both", "b1": "both"}) as fleet:
        asking = await broken_and_waiting(fleet)
        asking.cancel()
        await until(lambda: fleet.gateway.open.num == 0)
        assert fleet.dispatcher.num_queued == 0
        line = 'kvbaton_router_requests_total{decision="local_colocated",endpoint="completions",outcome="cancelled"}'
        assert fleet.counter(line) == 1


async def test_a_stream_that_waits_too_long_ends_with_an_error(tokenizer: Tokenizer) -> None:
    async with running_fleet(tokenizer, {"b0": "both", "b1": "both"}, queue_timeout_s=0.3) as fleet:
        asking = await broken_and_waiting(fleet)
        status, raw, headers = await asking
        told = read_stream(raw, status, headers)
        assert told.error is not None and told.error["code"] == "no_capacity" and not told.done
        assert "hello from b1".startswith(told.texts[0])


async def take_all_blocks(worker: NativeWorker) -> list[str]:
    """Reservations that nobody will fill, until no prompt of theirs finds room; the ids to give them back by."""
    taken: list[str] = []
    while True:
        request = GenerateRequest(f"held-{len(taken)}", (len(taken),) * 480, SamplingParams(max_tokens=16))
        try:
            await asyncio.wrap_future(worker.engine.reserve(request, lambda event: None))
        except OutOfBlocks:
            return taken
        taken.append(request.request_id)


async def test_decode_room_is_reserved_before_prefill_is_spent(tiny_model_dir: Path) -> None:
    """A decode worker without blocks refuses before the prefill worker hears of the request."""
    roles: dict[str, Role] = {"p0": "prefill", "d0": "decode"}
    async with make_rig(tiny_model_dir, roles, queue_timeout_s=0.3) as rig:
        decode, prefill = rig.workers["d0"], rig.workers["p0"]
        held = await take_all_blocks(decode)
        for given_back, names, outcomes in (
            ([], range(20), {429}),
            (held[:1], range(20, 40), {200, 429}),
            (held[1:], range(40, 42), {200}),
        ):
            for request_id in given_back:
                decode.engine.abort(request_id)
            spent, moved = prefill.stats().num_prompt_tokens, decode.stats().num_transfers
            bodies = [
                {"prompt": f"{i} {PROMPT * 8}", "temperature": 0, "max_tokens": 9, "ignore_eos": True} for i in names
            ]
            answers = await asyncio.gather(*(rig.fleet.post(body) for body in bodies))
            served = [answer["usage"] for status, answer, _ in answers if status == 200]
            assert {status for status, _, _ in answers} <= outcomes
            # How many get one place in turn is the machine's affair; that others' prompts are not computed is not.
            assert prefill.stats().num_prompt_tokens - spent == sum(usage["prompt_tokens"] for usage in served)
            assert decode.stats().num_transfers - moved == len(served)


@pytest.mark.usefixtures("no_naps")
async def test_case_lk_08_overload_and_clients_that_give_up(tokenizer: Tokenizer) -> None:
    """LK-08: far more than fits, and all clients leave; then half the load is served as if nothing was."""
    async with running_fleet(tokenizer, {"b0": "both"}, max_queued=20) as fleet:
        worker = fleet.workers["b0"]
        worker.max_open = 4
        worker.gate.clear()

        for _ in range(4):
            asking = fill(fleet, 80)
            await until(lambda: sum(task.done() for task in asking) == 80 - 24)  # noqa: B023
            refused = [task.result() for task in asking if task.done()]
            assert {(status, answer["error"]["code"]) for status, answer, _ in refused} == {(429, "queue_full")}
            await until(lambda: worker.num_open == 4 and fleet.dispatcher.num_queued == 20)
            for task in asking:
                task.cancel()
            await until(lambda: fleet.gateway.open.num == 0 and worker.num_open == 0)
            fleet.check_idle()  # slots of those that left are free at once, long before any deadline
            assert fleet.dispatcher.num_queued == 0
        worker.gate.set()
        assert [s for s, _, _ in await asyncio.gather(*fill(fleet, 2))] == [200, 200]


async def test_case_fl_10_prefill_work_moves_onto_decode_within_its_room(tiny_model_dir: Path) -> None:
    """FL-10: prefill workers refuse for want of room. The way chosen is in the header and a counter; decode workers
    take no more than their own room."""
    async with make_rig(tiny_model_dir, {"p0": "prefill", "d0": "decode"}, queue_timeout_s=5.0) as rig:
        await rig.kv_proxies["p0"].refuse()
        answers = await asyncio.gather(
            *(rig.ask({"prompt": f"{i} {PROMPT * 4}", "temperature": 0, "max_tokens": 20}) for i in range(10))
        )
        assert {told.status for told in answers} == {200}
        reasons = {told.headers["x-kvbaton-decision"] for told in answers}
        assert reasons <= {"fallback_prefill_failed", "remote", "local_cached"}
        line = 'kvbaton_router_decisions_total{decision="fallback_prefill_failed"}'
        assert rig.fleet.counter(line) >= 1
        assert rig.workers["d0"].stats().num_preemptions == 0


async def test_a_jump_of_the_wall_clock_changes_nothing(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases, deadlines and polls are timed by the monotonic clock. Only ``created`` shows what the wall says."""
    async with make_rig(tiny_model_dir, {"p0": "prefill", "d0": "decode"}) as rig:
        body = {"prompt": PROMPT * 6, "temperature": 1, "seed": 3, "max_tokens": 60, "ignore_eos": True}
        expected = await rig.expected(body)
        real = time.time
        for jump_s in (3600.0 * 24 * 365, -3600.0 * 24 * 365):
            asking = asyncio.ensure_future(rig.ask(body))
            await until(lambda: rig.fleet.gateway.open.num == 1)
            monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real() + jump_s)
            told = await asking
            assert told.answer == expected.answer and told.headers["x-kvbaton-decision"] in ("remote", "local_cached")
            await rig.check_empty()
        assert rig.workers["p0"].stats().num_lease_expiries == 0
        assert rig.retries("prefill_failed") == rig.replays("prefill_failed") == 0


# Where the wall's time is meant: a date in a prompt, the age of a file, an expiry date that another engine wrote.
WALL_CLOCK = {"engine/chat_template.py", "engine/gguf_model.py", "workers/socket_directory.py", "workers/vllm.py"}


def test_nothing_that_waits_reads_the_wall_clock() -> None:
    """The packages on a request's way use it for nothing but the date of an answer and of a process's start, and to
    tell it to who compares clocks."""
    package = Path(__file__).resolve().parents[2] / "kvbaton"
    for folder in ("router", "transfer", "engine", "kv", "workers"):
        for path in (package / folder).glob("*.py"):
            if str(path.relative_to(package)) in WALL_CLOCK:
                continue
            for line in path.read_text().splitlines():
                if "time.time(" in line or "datetime.now" in line or "utcnow" in line:
                    assert "created" in line or line.strip() == "time_s=time.time(),", f"{path.name}: {line.strip()}"
