"""Frames, windows and rates, on a clock of our own."""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.observe.metric import SECONDS
from kvbaton.ui.decisions import Flow
from kvbaton.ui.history import MOST_FRAMES, MOST_LINKS, History, Totals
from kvbaton.workers.protocol import WorkerStats

EMPTY = [0] * (len(SECONDS) + 1)


def totals(at_s: float, **given: Any) -> Totals:
    return msgspec.structs.replace(Totals(at_s, 0, 0, 0, 0, 0, {}, (EMPTY, EMPTY, EMPTY)), **given)


def member(name: str = "p0", role: str = "prefill", incarnation: str = "a", **stats: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "incarnation": incarnation, "stats": WorkerStats(**stats)}


def fleet(*members: dict[str, Any]) -> dict[str, Any]:
    return {"members": list(members), "inflight": 3, "queued": 1}


def test_rates_are_over_the_last_ten_seconds() -> None:
    history = History((2.0, 0.1, None))
    for second in range(31):
        done = 2 * min(second, 20)  # two a second, then none
        frame = history.look(fleet(), totals(second, num_requests=done, output_tokens=10 * done), {})
        if second == 20:
            assert (frame.requests_per_s, frame.output_tokens_per_s) == (2.0, 20.0)
    assert frame.requests_per_s == 0.0
    assert (frame.inflight, frame.queued) == (3, 1)


def test_the_first_look_has_no_rates_and_no_ratio() -> None:
    frame = History((2.0, 0.1, None)).look(fleet(), totals(5.0, num_requests=100, output_tokens=50), {})
    assert (frame.requests_per_s, frame.ratio, frame.ttft) == (0.0, None, None)


def test_percentiles_forget_what_is_older_than_a_minute() -> None:
    history = History((0.02, 0.1, None))
    slow = [*EMPTY]
    history.look(fleet(), totals(0.0), {})
    slow[SECONDS.index(1)] = 4
    history.look(fleet(), totals(1.0, counts=(slow, EMPTY, EMPTY)), {})
    found = history.latencies()["ttft"]
    assert found is not None and found.num == 4 and found.p50_s > 0.5 and found.met == 0.0
    fast = [*slow]
    fast[SECONDS.index(0.01)] = 2
    history.look(fleet(), totals(62.0, counts=(fast, EMPTY, EMPTY)), {})
    history.look(fleet(), totals(63.0, counts=(fast, EMPTY, EMPTY)), {})
    assert history.latencies()["ttft"] is None  # both looks within the window counted the same
    assert history.latencies()["itl"] is None


def test_the_ratio_is_of_computed_tokens() -> None:
    history = History((2.0, 0.1, None))
    history.look(fleet(), totals(0.0), {})
    history.look(fleet(), totals(1.0, prompt_tokens=1000, cached_tokens=400, output_tokens=100), {})
    assert history.ratio() == 6.0


def test_a_worker_that_restarted_starts_over() -> None:
    history = History((2.0, 0.1, None))
    for second, sent in ((0, 0), (1, 1000), (2, 2000)):
        history.look(fleet(member(transfer_bytes_sent=sent)), totals(second), {})
    assert history.moved("p0") == (1000.0, 0.0)
    history.look(fleet(member(incarnation="b", transfer_bytes_sent=10)), totals(3), {})
    assert history.moved("p0") == (0.0, 0.0)
    history.look(fleet(member(incarnation="b", transfer_bytes_sent=60)), totals(4), {})
    assert history.moved("p0") == (50.0, 0.0)
    history.look(fleet(), totals(5), {})
    assert history.moved("p0") == (0.0, 0.0)


def test_pools_are_sums_and_a_worker_that_never_answered_counts_as_idle() -> None:
    silent = {"name": "d1", "role": "decode", "incarnation": None, "stats": None}
    load = {"num_running": 2, "num_waiting": 1, "num_blocks": 10, "num_blocks_used": 5}
    frame = History((2.0, 0.1, None)).look(fleet(member("d0", "decode", **load), silent), totals(0.0), {})
    assert set(frame.pools) == {"decode"}
    pool = frame.pools["decode"]
    assert (pool.num_running, pool.num_waiting, pool.used_share) == (2, 1, 0.5)


def test_links_are_the_busiest_of_the_last_minute() -> None:
    history = History((2.0, 0.1, None))
    history.look(fleet(), totals(0.0), {("p0", "d0"): Flow(10**6, 1)})
    for second in range(1, 71):
        flows = {("p0", f"d{i}"): Flow(100 * (i + 1), 1) for i in range(MOST_LINKS + 10)} if second == 69 else {}
        history.look(fleet(), totals(second), flows)
    links = history.links()
    assert len(links) == MOST_LINKS
    assert (links[0].decode, links[0].num_requests) == (f"d{MOST_LINKS + 9}", 1)
    assert links[0].bytes_per_s == 100 * (MOST_LINKS + 10) / 60
    assert [link.bytes_per_s for link in links] == sorted((link.bytes_per_s for link in links), reverse=True)


def test_frames_are_bounded_and_followed_by_number() -> None:
    history = History((2.0, 0.1, None))
    for second in range(MOST_FRAMES + 50):
        history.look(fleet(), totals(second), {})
    assert [len(history.after(0)), history.number] == [MOST_FRAMES, MOST_FRAMES + 50]
    assert [frame.number for frame in history.after(history.number - 2)] == [history.number - 1, history.number]
    assert history.after(history.number) == []
    assert len(history.after(history.number + 1)) == MOST_FRAMES  # a reader of another life of the router
