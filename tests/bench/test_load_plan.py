"""Arrivals, lengths, prompts and traces: what is sent, when, and how exactly."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.bench.arrivals import Phases, arrival_times, replay_times
from kvbaton.bench.lengths import parse_classes, parse_lengths
from kvbaton.bench.prompts import PromptBuilder
from kvbaton.bench.workload import LoadSpec, RequestFactory, offered_rate, plan_work
from kvbaton.types import LocalError


class WordCodec:
    """One token a word, two words glued without a space are one unknown; a BOS when special tokens are asked for."""

    def __init__(self) -> None:
        letters = "abcdefgh"
        self.words = [f" {a}{b}{c}" for a in letters for b in letters for c in letters]
        self.known = {word: number + 1 for number, word in enumerate(self.words)}
        self.vocab_size = len(self.words) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [self.known[f" {word}"] for word in text.split()]
        return [0, *ids] if add_special_tokens else ids

    def decode(self, ids: Any) -> str:
        return "".join("<s>" if number == 0 else self.words[number - 1] for number in ids)


CODEC = WordCodec()
BUILDER = PromptBuilder(CODEC, seed=1)


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize(
    ("kind", "cv", "expected"), [("poisson", 1.0, 1.0), ("gamma", 3.0, 3.0), ("constant", 1.0, 0.0)]
)
def test_rate_and_burstiness(kind: Any, cv: float, expected: float) -> None:
    times = arrival_times(kind, 50.0, Phases(steady_s=400), Random(1), cv)
    assert len(times) / 400 == pytest.approx(50, rel=0.06)
    assert statistics.pstdev(gaps(times)) / statistics.mean(gaps(times)) == pytest.approx(expected, rel=0.1, abs=1e-6)
    assert times == sorted(times) and times[-1] < 400
    assert times == arrival_times(kind, 50.0, Phases(steady_s=400), Random(1), cv)


def test_ramp_rises_linearly_to_the_rate() -> None:
    times = arrival_times("constant", 100.0, Phases(ramp_s=10, steady_s=10, cooldown_s=5), Random(0))
    counts = [sum(low <= time < low + 5 for time in times) for low in (0, 5, 10, 15, 20)]
    assert counts == pytest.approx([125, 375, 500, 500, 500], abs=2)


def test_replay_spreads_ticks_and_changes_speed() -> None:
    stored = [0.0] * 10 + [3.0] * 10
    spread = replay_times(stored, 2.0, 3.0, Random(0))
    assert len(set(spread)) == 20 and spread[0] == 0 and spread[-1] <= 3.0
    assert replay_times([5.0, 7.0], 1.0, 0.0, Random(0)) == [0.0, 2.0]


@pytest.mark.parametrize("bad", ["poisson", "gamma"])
def test_a_rate_of_zero_is_refused(bad: Any) -> None:
    with pytest.raises(LocalError, match="rate"):
        arrival_times(bad, 0.0, Phases(), Random(0))


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [
        ("512", 512, 512, 512),
        ("uniform:100:200", 100, 200, 150),
        ("normal:300:30", 1, 600, 300),
        ("lognormal:200:0.5", 1, 5000, 200 * 1.1331),
        ("exp:100", 1, 3000, 100),
        ("mix:10@3,100@1", 10, 100, 32.5),
    ],
)
def test_length_distributions(text: str, low: int, high: int, mean: float) -> None:
    draw, random = parse_lengths(text, "input"), Random(2)
    drawn = [draw(random) for _ in range(4000)]
    assert low <= min(drawn) and max(drawn) <= high
    assert statistics.mean(drawn) == pytest.approx(mean, rel=0.06)


@pytest.mark.parametrize("bad", ["0", "x", "uniform:5", "uniform:9:3", "mix:5", "zipf:1:2", "mix:0@1"])
def test_bad_lengths_name_the_field_and_the_form(bad: str) -> None:
    with pytest.raises(LocalError) as caught:
        parse_lengths(bad, "input")
    assert caught.value.field == "input" and "uniform:LOW:HIGH" in str(caught.value)


def test_classes_keep_lengths_together_in_their_shares() -> None:
    draw, random = parse_classes("32:96@3,3000:8@1"), Random(2)
    drawn = [draw(random) for _ in range(4000)]
    assert set(drawn) == {(32, 96), (3000, 8)}
    assert drawn.count((32, 96)) / 4000 == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    "bad", ["32@1", "32:96", "a:b@1", "32:96:4@1", "0:5@1", "32:96@0", "32:96@-1,3:3@2", "32:96@nan"]
)
def test_bad_classes_name_the_field_and_the_form(bad: str) -> None:
    with pytest.raises(LocalError) as caught:
        parse_classes(bad)
    assert caught.value.field == "classes" and "INPUT:OUTPUT@SHARE" in str(caught.value)


@given(st.integers(2, 400), st.integers(0, 50))
def test_prompts_have_exactly_the_asked_tokens(num_tokens: int, key: int) -> None:
    assert BUILDER.overhead_tokens == 1  # the BOS
    assert len(CODEC.encode(BUILDER.text(num_tokens, str(key)))) == num_tokens
    assert len(BUILDER.ids(num_tokens, str(key))) == num_tokens


def test_a_template_takes_its_part_of_the_count() -> None:
    codec = WordCodec()
    builder = PromptBuilder(codec, 1, lambda text: len(codec.encode(text, False)) + 9)
    assert len(codec.encode(builder.text(100, "k"), False)) == 91
    assert len(codec.encode(builder.text(3, "k"), False)) == 1  # no room: the least the template allows


def test_equal_blocks_are_equal_prefixes_and_nothing_else_is_shared() -> None:
    builder = PromptBuilder(WordCodec(), seed=1)
    one, two, other = (
        builder.ids(80, key, blocks, 32) for key, blocks in (("a", (7, 8)), ("b", (7, 8)), ("c", (7, 9)))
    )
    assert one[:64] == two[:64] and one[64:] != two[64:]
    assert one[:32] == other[:32] and one[32:64] != other[32:64]
    assert builder.ids(40, "a", (7, 8), 32) == one[:40]
    text = [builder.text(81, key, (7, 8), 32).split() for key in ("a", "b")]
    assert text[0][:64] == text[1][:64] != text[0][64:]


def test_mooncake_rows_become_shared_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 40, "hash_ids": [0, 1]},
        {"timestamp": 3000, "input_length": 700, "output_length": 20, "hash_ids": [0, 2]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    spec = LoadSpec("http://x", "completions", "m", "trace", trace=str(path), trace_scale=0.1, prompt_format="ids")
    work = plan_work(spec, WordCodec())
    assert [item.due_s for item in work.items] == [0.0, 3.0]
    assert [(item.prompt_tokens, item.output_tokens) for item in work.items] == [(100, 4), (70, 2)]
    assert work.block_tokens == 51
    timed = RequestFactory(spec, PromptBuilder(WordCodec(), 0)).timed(work)
    prompts = [json.loads(request.body)["prompt"] for request in timed]
    assert [len(prompt) for prompt in prompts] == [100, 70]
    assert prompts[0][:51] == prompts[1][:51] and prompts[0][51:70] != prompts[1][51:]


def test_sharegpt_brings_its_own_text(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    turns = [{"from": "human", "value": " abc abd"}, {"from": "gpt", "value": " abe abf abg"}]
    path.write_text(json.dumps([{"id": "1", "conversations": turns}, {"id": "2", "conversations": []}]))
    spec = LoadSpec("http://x", model="m", trace=str(path), rate_per_s=5, steady_s=4)
    work = plan_work(spec, WordCodec())
    assert work.items and {(item.text, item.output_tokens) for item in work.items} == {(" abc abd", 3)}
    with pytest.raises(LocalError, match="tokenizer"):
        plan_work(spec, None)


def test_requests_are_the_same_bytes_for_the_same_seed_and_say_what_they_must() -> None:
    spec = LoadSpec("http://x", model="m", rate_per_s=10, steady_s=2, input="uniform:20:40", extra_body={"top_k": 1})
    made = [RequestFactory(spec, PromptBuilder(WordCodec(), 0)).timed(plan_work(spec, WordCodec())) for _ in range(2)]
    assert made[0] == made[1]
    body = json.loads(made[0][0].body)
    assert body["stream"] and body["stream_options"] == {"include_usage": True} and body["ignore_eos"]
    assert body["top_k"] == 1 and body["max_tokens"] == 64


def test_warm_up_prompts_share_nothing_with_the_run() -> None:
    spec = LoadSpec("http://x", model="m", rate_per_s=10, steady_s=2, shared_prefix_tokens=16, input="64")
    work = plan_work(spec, WordCodec())
    factory = RequestFactory(spec, PromptBuilder(WordCodec(), 0))
    prompts = [
        [json.loads(request.body)["messages"][0]["content"].split()[:16] for request in part]
        for part in (factory.warm_up(work), factory.timed(work))
    ]
    assert len(prompts[0]) == 2 and all(prompt == prompts[1][0] for prompt in prompts[1])
    assert prompts[0][0] != prompts[1][0]


def test_token_ids_need_completions() -> None:
    with pytest.raises(LocalError, match="completions"):
        RequestFactory(LoadSpec("http://x", prompt_format="ids"), PromptBuilder(WordCodec(), 0))


def test_a_trace_offers_its_own_rate_in_the_steady_window(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": n / 4, "prompt_tokens": 5, "output_tokens": 2} for n in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = LoadSpec("http://x", arrivals="trace", trace=str(path), rate_per_s=1.0, steady_s=10.0, cooldown_s=5.0)
    assert offered_rate(spec) == 4.0
    assert offered_rate(msgspec.structs.replace(spec, trace_speed=2.0)) == 8.0
    assert offered_rate(msgspec.structs.replace(spec, arrivals="poisson")) == 1.0
