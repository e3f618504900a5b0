"""Reading traces: every format, quantised timestamps, drawn arrivals, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from kvbaton.plan.workload import Trace, TraceRequest, read_trace, spread_ticks, synthetic, tick_s
from kvbaton.types import LocalError


def test_formats(tmp_path: Path) -> None:
    texts = {
        "mooncake.jsonl": '{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n',
        "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,600,5\n",
        "vidur.csv": "arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,600,5\n",
        "apex.csv": "arrival_s,prompt_tokens,output_tokens\n1.5,600,5\n",
        "plain.jsonl": '{"arrival_s": 1.5, "prompt_tokens": 600, "output_tokens": 5}\n',
        "vllm.jsonl": '{"arrival_time": 1777142838.3, "input_toks": 600, "output_toks": 5}\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        trace = read_trace(tmp_path / name)
        assert trace.has_arrivals
        (request,) = trace.requests
        assert (request.prompt_tokens, request.output_tokens) == (600, 5)
        assert request.block_ids == ((0, 7) if name.startswith("mooncake") else ())
        assert trace.block_tokens == (512 if name.startswith("mooncake") else None)
    (tmp_path / "lengths.csv").write_text("num_prefill_tokens,num_decode_tokens\n600,5\n700,6\n")
    lengths = read_trace(tmp_path / "lengths.csv")
    assert not lengths.has_arrivals
    drawn = lengths.with_poisson_arrivals(2.0, Random(1))
    assert drawn.has_arrivals
    assert "Poisson" in drawn.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "empty"), ("a,b\n1,2\n", "no known trace format"), ('{"arrival_s": 1,\n', "not JSON"),
     ("arrival_s,prompt_tokens,output_tokens\n1,x,2\n", "row 1"),
     ("arrival_s,prompt_tokens,output_tokens\nnan,5,2\n", "row 1"),
     ("arrival_s,prompt_tokens,output_tokens\n1,-5,2\n", "row 1"),
     ('{"arrival_s": 0, "prompt_tokens": 1e999, "output_tokens": 1}\n', "row 1"),
     ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "hash_ids": ["a"]}\n', "row 1"),
     ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n[1]\n', "no JSON object"),
     ("[" * 100_000, "no rows|no known trace format|no table")],
)  # fmt: skip
def test_bad_files_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(LocalError, match=message) as caught:
        read_trace(tmp_path / "bad.csv")
    assert caught.value.field == "workload.trace"


def test_ticks_are_spread_within_themselves_and_seeded() -> None:
    requests = tuple(TraceRequest(3.0 * tick, 10, 1) for tick in range(20) for _ in range(10))
    trace = Trace("ticks", requests)
    assert tick_s(requests) == 3.0
    spread = spread_ticks(trace, Random(5))
    assert spread == spread_ticks(trace, Random(5)) != spread_ticks(trace, Random(6))
    assert "3 s ticks" in spread.notes[0]
    assert [int(each.arrival_s // 3) for each in spread.requests] == [tick for tick in range(20) for _ in range(10)]
    smooth = synthetic(100, 5.0, (100, 10), Random(1))
    assert spread_ticks(smooth, Random(1)) is smooth


def test_rescaling() -> None:
    trace = synthetic(500, 5.0, (1000, 100), Random(1))
    assert trace.at_rate(10.0).rate_per_s == pytest.approx(10.0)
    blocks = Trace("b", (TraceRequest(0, 1024, 4, (0, 1)), TraceRequest(1, 1024, 4, (0, 2))), 512)
    longer, shorter = blocks.scaled(prompt=2.0), blocks.scaled(prompt=0.5)
    assert [len(each.block_ids) for each in longer.requests] == [4, 4]
    assert len({*longer.requests[0].block_ids[2:], *longer.requests[1].block_ids[2:]}) == 4  # new ones are private
    assert [each.block_ids for each in shorter.requests] == [(0,), (0,)]


def test_the_real_conversation_trace_is_spread(shared: Callable[[str], Path]) -> None:
    path = shared("mooncake-fast25") / "conversation_trace.jsonl"
    trace = read_trace(path, Random(0))
    assert tick_s(trace.requests) is None
    assert trace.notes
    with path.open() as lines:
        first = json.loads(lines.readline())
    stored = read_trace(path).requests[0]
    assert (stored.prompt_tokens, list(stored.block_ids)) == (first["input_length"], first["hash_ids"])
