"""The fleet itself tells that its plan no longer fits, and writes the scenario file of the next one."""

from __future__ import annotations

import tomllib
from pathlib import Path

from kvbaton.cli.plan_watch import FILE, PlanWatch
from kvbaton.observe.ratio import Band
from kvbaton.plan.advise import Scrape, parse_metrics
from kvbaton.plan.scenario import parse

STEP_S = 10.0


class Router:
    """Totals as its metrics tell them."""

    def __init__(self) -> None:
        self.totals = {"prompt": 0, "cached": 0, "output": 0}
        self.answered = self.refused = 0

    def serve(self, prompt: int, output: int, requests: int = 5) -> Scrape:
        """So many requests of such lengths; a quarter of each prompt was cached."""
        for what, number in (("prompt", prompt), ("cached", prompt // 4), ("output", output)):
            self.totals[what] += number * requests
        self.answered, self.refused = self.answered + requests, self.refused + 1
        lines = [f"kvbaton_router_{what}_tokens_total {number}" for what, number in self.totals.items()]
        for outcome, number in (("ok", self.answered), ("rejected", self.refused)):
            labels = f'endpoint="chat",decision="remote",outcome="{outcome}"'
            lines.append(f"kvbaton_router_requests_total{{{labels}}} {number}")
        return parse_metrics("\n".join(lines) + "\n")


def follow(directory: Path, shapes: list[tuple[int, int] | None]) -> list[str]:
    told: list[str] = []
    watching, router = PlanWatch(Band(1.0, 4.0), directory, lambda _, text: told.append(text)), Router()
    for number, shape in enumerate(shapes):
        watching.look({} if shape is None else router.serve(*shape), 3, number * STEP_S)
    return told


CHAT, DOCUMENTS = (200, 100), (4000, 100)


def test_leaving_the_band_writes_a_scenario_of_the_new_traffic_that_plan_reads(tmp_path: Path) -> None:
    told = follow(tmp_path, [CHAT] * 40 + [DOCUMENTS] * 40)
    path = tmp_path / FILE
    assert len(told) == 3 and told[1].endswith("plan again") and told[2].startswith(f"wrote {path}")
    scenario = parse(tomllib.loads(path.read_text()))
    assert (scenario.workload.prompt_tokens, scenario.workload.output_tokens) == DOCUMENTS, "nothing of the chat before"
    assert scenario.workload.rate == 5 / STEP_S and scenario.workload.shared_prefix == 0.25
    assert scenario.hardware.max_gpus == 3


def test_within_the_band_nothing_is_written_and_coming_back_is_only_told(tmp_path: Path) -> None:
    assert len(follow(tmp_path, [CHAT] * 80)) == 1 and not (tmp_path / FILE).exists()
    told = follow(tmp_path, [DOCUMENTS] * 40 + [CHAT] * 80)
    assert [text.startswith("wrote") for text in told] == [False, True, False] and told[2].endswith("again")


def test_a_router_that_does_not_answer_says_nothing_about_the_traffic(tmp_path: Path) -> None:
    told = follow(tmp_path, [CHAT] * 20 + [None] * 40 + [CHAT] * 20)
    assert len(told) == 1 and "within" in told[0]


def test_a_file_that_cannot_be_written_is_told_and_ends_nothing(tmp_path: Path) -> None:
    told = follow(tmp_path / "not there", [DOCUMENTS] * 40 + [CHAT] * 80)
    assert told[1].startswith("no scenario was written") and told[2].endswith("again")
