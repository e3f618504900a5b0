"""Many seeds hold every invariant; one seed is one run, wherever it runs; bugs that are put in are found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulation.mutations import MUTATIONS, applied
from simulation.run import run_seed, run_seeds

ROOT = Path(__file__).parents[2]
FEW, QUICK = 20, 20


def test_a_few_seeds_hold_every_invariant() -> None:
    total = run_seeds(0, FEW)
    assert not total.failed, "\n".join(f"seed {each.seed}: {each.error}" for each in total.failed)
    assert total.num_seeds == FEW
    # A storm in which nothing succeeds, or nothing is hurt, would show little.
    hurt = sum(total.counts[outcome] for outcome in ("failed", "broken", "refused", "reset", "gone"))
    assert total.counts["ok"] > hurt and total.counts["faults"] > FEW and not total.counts["unfinished"]


@pytest.mark.slow
def test_ten_thousand_seeds_hold_every_invariant() -> None:
    total = run_seeds(0, 10_000, processes=os.cpu_count() or 1)
    assert not total.failed, "\n".join(f"seed {each.seed}: {each.error}" for each in total.failed)
    assert total.num_seeds == 10_000


def test_a_seed_is_one_run_whatever_the_process() -> None:
    """The same story line for line: here twice, and where strings and objects hash differently."""
    for seed in (3, 7):
        story = run_seed(seed).story
        assert run_seed(seed).story == story and len(story) > 20
        command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--story"]
        environment = {**os.environ, "PYTHONHASHSEED": "5"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
        assert done.stdout.splitlines()[: len(story)] == list(story), done.stderr


def name_of(mutation: Any) -> str:
    return str(mutation.__name__)


def first_found(mutation: Callable[[], Any], most: int) -> int | None:
    """The first seed that finds it."""
    with applied(mutation):
        return next((seed for seed in range(most) if run_seed(seed, keep_story=False).error), None)


@pytest.mark.parametrize("mutation", [each for each, most in MUTATIONS.items() if most <= QUICK], ids=name_of)
def test_a_bug_that_is_put_in_is_found(mutation: Callable[[], Any]) -> None:
    assert first_found(mutation, MUTATIONS[mutation]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [each for each, most in MUTATIONS.items() if most > QUICK], ids=name_of)
def test_a_rare_bug_that_is_put_in_is_found(mutation: Callable[[], Any]) -> None:
    assert first_found(mutation, MUTATIONS[mutation]) is not None
