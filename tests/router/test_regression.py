"""Online regression: finds what made the samples, through noise and outliers, follows a change, keeps its bounds."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.router.regression import Regression

START = (0.008, 250e-6, 0.0)
SIZES = (0.008, 250e-6, 1e-8)
BOUNDS = ((0.0, 10.0), (1e-8, 1.0), (0.0, 1e-3))
TRUE = (0.015, 100e-6, 20e-9)


def fresh() -> Regression:
    return Regression(START, SIZES, BOUNDS)


def sample(rng: Random, true: tuple[float, ...], noise: float = 0.03, outliers: float = 0.05):  # type: ignore[no-untyped-def]
    """A prefill of 8 tokens to some thousands, after none to 8,000 cached ones."""
    tokens = 8 + int(rng.lognormvariate(6.5, 1.0))
    cached = rng.choice((0, 1_000, 8_000))
    features = (-(-tokens // 512), tokens, tokens * (cached + tokens / 2))
    seconds = sum(f * t for f, t in zip(features, true, strict=True)) * max(0.5, rng.gauss(1.0, noise))
    if rng.random() < outliers:
        seconds *= rng.choice((10.0, 5.0, 0.3))
    return features, seconds


@pytest.mark.parametrize("seed", range(8))
def test_parameters_are_found_within_5_percent_through_noise_and_outliers(seed: int) -> None:
    rng, model = Random(seed), fresh()
    for _ in range(500):
        model.add(*sample(rng, TRUE))
    assert model.parameters == pytest.approx(TRUE, rel=0.05)
    assert model.count == 500


@pytest.mark.parametrize("factor", [4.0, 0.25])
@pytest.mark.parametrize("seed", range(4))
def test_it_follows_a_change(seed: int, factor: float) -> None:
    rng, model = Random(seed), fresh()
    for _ in range(300):
        model.add(*sample(rng, TRUE))
    changed = tuple(factor * each for each in TRUE)
    typical = (1, 400, 400 * 1_200.0)
    before = model.expect(typical)
    for _ in range(20):
        model.add(*sample(rng, changed))
    soon = model.expect(typical)
    for _ in range(280):
        model.add(*sample(rng, changed))
    assert soon == pytest.approx(factor * before, rel=0.25), "after 20 samples it is near"
    assert model.parameters == pytest.approx(changed, rel=0.08)


def test_single_outliers_move_nothing() -> None:
    rng, model = Random(3), fresh()
    for _ in range(200):
        model.add(*sample(rng, TRUE, outliers=0.0))
    before = model.expect((1, 400, 4e5))
    features, seconds = sample(rng, TRUE, outliers=0.0)
    model.add(features, 20 * seconds)
    model.add(features, seconds / 20)
    assert model.expect((1, 400, 4e5)) == pytest.approx(before, rel=0.02)


def test_the_error_is_what_it_says() -> None:
    """Of a model that is 10% off for good, held by its bounds."""
    model = Regression((1.0,), (1.0,), ((1.0, 1.0),))
    for _ in range(200):
        model.add((2.0,), 2.0 / 1.1)
    assert model.parameters == (1.0,)
    assert model.error == pytest.approx(0.1)


def test_without_samples_it_is_its_start_and_doubt_keeps_it() -> None:
    model = fresh()
    assert model.parameters == pytest.approx(START)
    for _ in range(50):
        model.add((1, 100, 5_000), 0.05)
    found = model.parameters
    model.doubt(0.01)
    assert model.parameters == found and model.count == 3
    for _ in range(6):
        model.add((1, 100, 5_000), 0.1)
    assert model.expect((1, 100, 5_000)) == pytest.approx(0.1, rel=0.15), "what is doubted gives way at once"


def test_what_samples_cannot_tell_apart_stays_in_proportion() -> None:
    """All prompts alike: the sum is right, and no parameter runs away."""
    model = fresh()
    for _ in range(300):
        model.add((1, 100, 5_000), 0.066)
    assert model.expect((1, 100, 5_000)) == pytest.approx(0.066, rel=0.01)
    assert model.parameters[0] < 0.066 and model.parameters[1] < 0.066 / 100


@given(
    st.lists(
        st.tuples(
            st.tuples(st.floats(0, 64), st.floats(0, 1e5), st.floats(0, 1e9)),
            st.floats(allow_nan=True, allow_infinity=True),
        ),
        max_size=60,
    )
)
def test_parameters_stay_in_their_bounds_whatever_comes(
    samples: list[tuple[tuple[float, float, float], float]],
) -> None:
    model = fresh()
    for features, seconds in samples:
        model.add(features, seconds)
    for value, (low, high) in zip(model.parameters, BOUNDS, strict=True):
        assert low * 0.999 <= value <= high * 1.001
