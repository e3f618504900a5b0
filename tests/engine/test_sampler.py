from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.engine.sampler import (
    SequenceSampler,
    check_sampling,
    cut_to_top_p,
    draw_index,
    token_logprobs,
)
from kvbaton.types import LocalError, SamplingParams

VOCAB = 4096  # more than a block and more than the head that top_p sorts first
EOS = 2


def logits(seed: int, spread: float = 3.0, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


def sampler(prompt: tuple[int, ...] = (5, 6, 7), eos: tuple[int, ...] = (EOS,), **params: Any) -> SequenceSampler:
    return SequenceSampler(SamplingParams(**{"max_tokens": 1000, **params}), prompt, eos)


def peak(token_id: int, vocab: int = 64) -> np.ndarray:
    row = np.zeros(vocab, dtype=np.float32)
    row[token_id] = 20.0
    return row


def chi_square_sigmas(counts: np.ndarray, expected: np.ndarray) -> float:
    """How far the counts are from the expected probabilities, in standard deviations (Wilson and Hilferty's cube root).

    Rare tokens are taken together. Draws are seeded, so this cannot flicker; a wrong distribution gives tens.
    """
    wanted = expected * counts.sum()
    common = wanted >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = wanted.size - 1
    if freedom == 0:
        return 0.0
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    spread = 2.0 / (9.0 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def reachable(row: np.ndarray, num_draws: int = 1000, **params: Any) -> set[int]:
    one = sampler(seed=11, max_tokens=num_draws, eos=(), **params)
    return {one.sample(row).token_id for _ in range(num_draws)}


class TestAgainstTransformers:
    """Each warper and processor of ours leaves the tokens and values that transformers' leaves."""

    @pytest.mark.parametrize("top_p", [0.05, 0.3, 0.9, 0.999])
    @pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
    def test_top_p(self, top_p: float, spread: float) -> None:
        import torch
        from transformers import TopPLogitsWarper

        row = logits(1, spread)
        expected = torch.isfinite(TopPLogitsWarper(top_p)(None, torch.from_numpy(row)[None]))[0].numpy()
        weights = np.exp(row - row.max())
        cut_to_top_p(weights, top_p)
        # torch sums in float32: a token whose share lies on the border to the last bits may fall on either side.
        assert np.count_nonzero((weights > 0) != expected) <= (1 if expected.sum() > 500 else 0)

    @pytest.mark.parametrize(
        "params",
        [
            {"top_k": 3},
            {"top_k": 7, "top_p": 0.6},
            {"min_p": 0.2},
            {"min_p": 0.1, "top_k": 5},
            {"temperature": 0.5, "min_p": 0.05, "top_k": 9, "top_p": 0.8},
            {"temperature": 2.0, "top_p": 0.3},
        ],
    )
    def test_support_and_frequencies(self, params: dict[str, Any]) -> None:
        import torch
        from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        row = logits(2, spread=2.0, vocab=48)
        scores = torch.from_numpy(row)[None]
        for name, warper in (
            ("temperature", TemperatureLogitsWarper),
            ("min_p", MinPLogitsWarper),
            ("top_k", TopKLogitsWarper),
            ("top_p", TopPLogitsWarper),
        ):
            if name in params:
                scores = warper(params[name])(None, scores)
        expected = torch.softmax(scores[0].double(), dim=0).numpy()
        num_draws = 6_000
        one = sampler(seed=5, max_tokens=num_draws, eos=(), **params)
        counts = np.bincount([one.sample(row).token_id for _ in range(num_draws)], minlength=48)
        assert not counts[expected == 0].any(), "a token that was cut off came out"
        assert chi_square_sigmas(counts, expected) < 3.5

    def test_repetition_penalty(self) -> None:
        import torch
        from transformers import RepetitionPenaltyLogitsProcessor

        row = logits(3)
        for penalty in (0.7, 1.3):
            one = sampler(prompt=(5, 6, 7, 5), repetition_penalty=penalty, temperature=0.0)
            context = [5, 6, 7, 5]
            for _ in range(20):
                processed = RepetitionPenaltyLogitsProcessor(penalty)(
                    torch.tensor([context]), torch.from_numpy(row)[None]
                )
                context.append(one.sample(row).token_id)
                assert context[-1] == int(processed.argmax())

    def test_min_tokens_bans_what_would_end_the_text(self) -> None:
        row = peak(EOS)
        row[9], row[4] = 15.0, 10.0
        one = sampler(temperature=0.0, min_tokens=3, stop_token_ids=(9,))
        outputs = [one.sample(row) for _ in range(4)]
        assert [output.token_id for output in outputs] == [4, 4, 4, EOS]
        assert [output.finish_reason for output in outputs] == [None, None, None, "stop"]
        ignoring = sampler(temperature=0.0, min_tokens=3, ignore_eos=True)
        assert ignoring.sample(row).token_id == EOS, "what does not end the text need not be banned"


def test_frequency_and_presence_penalty_count_output_only() -> None:
    row = np.array([0.07, 3.0, 2.51, 1.96], dtype=np.float32)
    one = sampler(prompt=(1, 1, 1), temperature=0.0, frequency_penalty=0.4, presence_penalty=0.3, eos=())
    expected, counts = [], np.zeros(4)
    for _ in range(30):
        adjusted = row - 0.4 * counts - 0.3 * (counts > 0)
        expected.append(int(adjusted.argmax()))
        counts[expected[-1]] += 1
    assert [one.sample(row).token_id for _ in range(30)] == expected
    assert len(set(expected)) == 4


def test_bias_comes_before_bans_and_penalties_as_in_vllm() -> None:
    """A bias cannot lift a ban, and a repeated token is penalised with its bias."""
    row = np.zeros(16, dtype=np.float32)
    banned = sampler(temperature=0.0, min_tokens=2, logit_bias={EOS: 100.0, 4: 1.0})
    assert [banned.sample(row).token_id for _ in range(3)] == [4, 4, EOS]
    penalised = sampler(prompt=(3,), temperature=0.0, repetition_penalty=2.0, logit_bias={3: 8.0, 4: 5.0})
    assert penalised.sample(row).token_id == 4, "8 / 2 is less than 5"
    assert penalised.sample(row).token_id == 3, "5 / 2 is less than 8 / 2"


def test_min_p_is_a_share_of_the_best_after_temperature() -> None:
    row = np.array([0.0, 1.0, 2.0, 3.0], dtype=np.float32)
    assert reachable(row, min_p=math.exp(-2.0) - 1e-4) == {1, 2, 3}
    assert reachable(row, min_p=math.exp(-2.0) + 1e-4) == {2, 3}
    assert reachable(row, min_p=math.exp(-2.0) + 1e-4, temperature=2.0) == {0, 1, 2, 3}
    assert reachable(row, min_p=1.0) == {3}


def test_logit_bias_and_ids_outside_the_vocabulary() -> None:
    row = peak(3)
    assert sampler(temperature=0.0, logit_bias={8: 100.0}).sample(row).token_id == 8
    assert sampler(temperature=0.0, logit_bias={3: -100.0, 9: 1.0}).sample(row).token_id == 9
    outside = sampler(
        prompt=(999,),
        temperature=0.0,
        logit_bias={999: 9.0},
        stop_token_ids=(999,),
        min_tokens=2,
        repetition_penalty=1.2,
    )
    assert outside.sample(row).token_id == 3
    assert row[3] == 20.0, "the row is the caller's"


def test_greedy() -> None:
    rows = np.stack([logits(seed) for seed in range(5)])
    rows[0, [40, 30]] = 99.0
    assert [sampler(temperature=0.0).sample(row).token_id for row in rows] == rows.argmax(axis=1).tolist()
    assert sampler(temperature=0.0).sample(rows[0]).token_id == 30
    assert sampler(temperature=1e-30, seed=1).sample(rows[1]).token_id == rows[1].argmax()
    assert sampler(top_p=1e-9, seed=1).sample(rows[1]).token_id == rows[1].argmax()
    assert sampler(top_k=1, seed=1).sample(rows[1]).token_id == rows[1].argmax()


def test_equals_at_the_border() -> None:
    row = np.array([1.0, 5.0, 3.0, 3.0, 3.0, 0.0], dtype=np.float32)
    assert reachable(row, top_k=2) == {1, 2, 3, 4}
    share = math.exp(5) / (math.exp(5) + 3 * math.exp(3) + math.exp(1) + 1)
    assert reachable(row, top_p=share + 0.01) == {1, 2}
    assert reachable(np.zeros(6, dtype=np.float32), top_p=0.5) == {0, 1, 2}


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_plain_sampling_follows_softmax(spread: float) -> None:
    row = logits(4, spread, vocab=700)
    expected = np.exp(row.astype(np.float64) - row.max())
    expected /= expected.sum()
    num_draws = 12_000
    one = sampler(seed=17, max_tokens=num_draws, eos=())
    counts = np.bincount([one.sample(row).token_id for _ in range(num_draws)], minlength=700)
    assert chi_square_sigmas(counts, expected) < 3.5


@settings(max_examples=300, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 1e-6, 0.25, 1.0]), min_size=1, max_size=900).filter(any),
    draw=st.floats(0.0, 1.0, exclude_max=True),
)
def test_draw_index_is_the_inverse_of_the_running_sum(weights: list[float], draw: float) -> None:
    array = np.array(weights, dtype=np.float32)
    found = draw_index(array, draw)
    assert array[found] > 0
    sums = np.concatenate([[0.0], np.cumsum(array, dtype=np.float64)])
    slack = 1e-12 * sums[-1]
    assert sums[found] - slack <= draw * sums[-1] <= sums[found + 1] + slack


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=60).filter(any),
    top_p=st.floats(0.0, 1.0, exclude_min=True, exclude_max=True),
)
def test_top_p_keeps_the_fewest_that_suffice(weights: list[float], top_p: float) -> None:
    array = np.array(weights, dtype=np.float32)
    kept = array.copy()
    cut_to_top_p(kept, top_p)
    ids = np.flatnonzero(kept)
    assert ids.size >= 1 and np.array_equal(kept[ids], array[ids])
    total = array.sum(dtype=np.float64)
    mass = array[ids].sum(dtype=np.float64)
    assert mass >= top_p * total * (1 - 1e-9) or ids.size == np.count_nonzero(array)
    assert mass - array[ids].min() <= top_p * total * (1 + 1e-9)
    dropped = np.setdiff1d(np.arange(array.size), ids)
    assert dropped.size == 0 or array[dropped].max() <= array[ids].min()


class TestSeed:
    def run(self, num_tokens: int, **params: Any) -> list[int]:
        one = sampler(eos=(), **params)
        return [one.sample(logits(i, spread=1.0)).token_id for i in range(num_tokens)]

    def test_repeatable_and_sensitive_to_the_seed(self) -> None:
        first = self.run(30, seed=7)
        assert first == self.run(30, seed=7)
        assert first != self.run(30, seed=8)
        assert self.run(30, seed=-1) == self.run(30, seed=2**64 - 1)
        assert self.run(30) != self.run(30), "without a seed every sequence draws its own"

    def test_independent_of_the_batch(self) -> None:
        alone = self.run(20, seed=7)
        several = [sampler(eos=(), seed=seed) for seed in (3, 7, 9)]
        together = [[one.sample(logits(i, spread=1.0)).token_id for one in several] for i in range(20)]
        assert [tokens[1] for tokens in together] == alone

    @settings(max_examples=40, deadline=None)
    @given(
        at=st.integers(0, 25),
        params=st.sampled_from(
            [
                {},
                {"temperature": 0.0, "frequency_penalty": 0.5},
                {"top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5},
                {"top_k": 20, "min_tokens": 12},
            ]
        ),
    )
    def test_resume_stands_in_for_any_prefix(self, at: int, params: dict[str, Any]) -> None:
        rows = [logits(i, spread=1.0, vocab=64) for i in range(25)]
        through = sampler(seed=3, max_tokens=25, **params)
        expected = [through.sample(row) for row in rows]
        handed = sampler(seed=3, max_tokens=25, **params)
        handed.resume([output.token_id for output in expected[:at]])
        assert handed.num_output_tokens == at
        assert [handed.sample(row) for row in rows[at:]] == expected[at:]


def test_finish_reasons() -> None:
    def ends(row: np.ndarray, **params: Any) -> tuple[str | None, bool]:
        output = sampler(temperature=0.0, **params).sample(row)
        return output.finish_reason, output.stop_token

    assert ends(peak(4)) == (None, False)
    assert ends(peak(4), max_tokens=1) == ("length", False)
    assert ends(peak(EOS)) == ("stop", True)
    assert ends(peak(EOS), max_tokens=1) == ("stop", True)
    assert ends(peak(EOS), ignore_eos=True) == (None, False)
    assert ends(peak(EOS), ignore_eos=True, stop_token_ids=(EOS,)) == ("stop", True)
    assert ends(peak(4), stop_token_ids=(4,)) == ("stop", True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1}, {"top_p": 0.5, "top_k": 3, "logprobs": 2}])
def test_numbers_that_are_none_end_the_sequence_with_an_error(bad: float, params: dict[str, Any]) -> None:
    row = peak(4)
    row[7] = bad
    assert sampler(**params).sample(row).finish_reason == "error"
    assert sampler(**params).sample(np.full(8, -np.inf, dtype=np.float32)).finish_reason == "error"


@pytest.mark.parametrize("tiny", [5e-324, 1e-320, 1e-46, 1e-38, 1e-8])
@pytest.mark.parametrize("more", [{}, {"min_p": 0.5}, {"top_p": 1e-320}, {"top_k": 2, "top_p": 0.5, "min_p": 1e-320}])
def test_numbers_that_are_next_to_nothing_are_taken_as_such(tiny: float, more: dict[str, Any]) -> None:
    """Also as a float32, which has no number so small: nothing is left of a weight then, or it is none."""
    row = logits(6, vocab=64)
    best = int(np.argmax(row))
    output = sampler(temperature=tiny, seed=1, logprobs=2, **more).sample(row)
    assert output.token_id == best and output.finish_reason is None
    output = sampler((best,), temperature=1.0, seed=1, repetition_penalty=tiny, **more).sample(row)
    assert output.token_id == best and output.finish_reason is None


class TestLogprobs:
    def test_of_the_raw_logits(self) -> None:
        import torch

        row = logits(6)
        expected = torch.log_softmax(torch.from_numpy(row).double(), dim=0).numpy()
        one = sampler(temperature=0.3, seed=1, logprobs=5, logit_bias={17: 50.0}, repetition_penalty=1.5)
        output = one.sample(row)
        assert output.token_id == 17
        assert output.logprobs is not None
        assert output.logprobs.token_id == 17
        assert output.logprobs.logprob == pytest.approx(expected[17], abs=1e-5)
        best = np.argsort(-row)[:5]
        assert [token_id for token_id, _ in output.logprobs.top] == best.tolist()
        assert [logprob for _, logprob in output.logprobs.top] == pytest.approx(expected[best], abs=1e-5)

    def test_how_many(self) -> None:
        row = logits(6, vocab=8)
        assert sampler(seed=1).sample(row).logprobs is None
        chosen_only = sampler(seed=1, logprobs=0).sample(row).logprobs
        assert chosen_only is not None and chosen_only.top == ()
        assert len(token_logprobs(row, 0, 100).top) == 8
        equal = token_logprobs(np.zeros(8, dtype=np.float32), 7, 3)
        assert equal.top == tuple((i, pytest.approx(-math.log(8))) for i in range(3))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("logit_bias", {64: 1.0}),
        ("logit_bias", {1: math.inf}),
        ("stop_token_ids", (-1,)),
    ],
)
def test_parameters_without_meaning_are_refused_by_name(field: str, value: Any) -> None:
    check_sampling(SamplingParams(), vocab_size=64)
    with pytest.raises(LocalError, match=field) as error:
        check_sampling(SamplingParams(**{field: value}), vocab_size=64)
    assert error.value.field == field
