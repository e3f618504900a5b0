"""Beside the autoscaler: tells when traffic leaves what the plan was made for, and writes the scenario of a new plan.

Invariants: a departure that lasts is told once, with a file of the traffic since then; a file that cannot be written is
told and ends nothing. Knows nothing about workers beyond how many there are.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from kvbaton.cli.supervisor import Tell
from kvbaton.observe.ratio import Band, Totals
from kvbaton.plan.advise import Scrape, Window
from kvbaton.plan.autoscale_drift import DriftState, scenario_text, watch
from kvbaton.types import LocalError

FILE = "scenario.toml"


class PlanWatch:
    def __init__(self, band: Band, directory: Path, tell: Tell) -> None:
        self._band = band
        self._path = directory / FILE
        self._tell = tell
        self._drift = DriftState()
        self._answered: deque[tuple[float, float]] = deque()  # (when, requests answered so far) of the window's looks

    def look(self, router: Scrape, num_workers: int, now_s: float) -> None:
        """``router``: its metrics; empty while it does not answer, which says nothing about the traffic."""
        if not router:
            return
        prompt, cached, output = (
            sum(router.get(f"kvbaton_router_{what}_tokens_total", {}).values())
            for what in ("prompt", "cached", "output")
        )
        requests = router.get("kvbaton_router_requests_total", {})
        self._answered.append((now_s, sum(n for labels, n in requests.items() if ("outcome", "ok") in labels)))
        left_s = self._drift.other_since_s
        drift = watch(Totals(now_s, prompt, cached, output), self._drift, self._band)
        self._drift = drift.state
        while self._answered[0][0] < drift.state.seen[0].at_s:
            self._answered.popleft()
        if drift.news:
            self._tell("plan", drift.news)
            if drift.place in ("above", "below"):
                self._write(drift.state.seen, left_s if left_s is not None else now_s, num_workers)

    def _write(self, seen: tuple[Totals, ...], left_s: float, num_workers: int) -> None:
        """The traffic since the ratio left the band: what came before is what the old plan was for."""
        since = [each for each in seen if each.at_s >= left_s]
        answered = [number for at_s, number in self._answered if at_s >= left_s]
        before, now = since[0], since[-1]
        prompt = now.prompt_tokens - before.prompt_tokens
        nothing = dict.fromkeys(Window.__struct_fields__)
        known = {
            "seconds": now.at_s - before.at_s,
            "workers": num_workers,
            "requests": answered[-1] - answered[0],
            "prompt_tokens": prompt,
            "output_tokens": now.output_tokens - before.output_tokens,
            "cached_share": (now.cached_tokens - before.cached_tokens) / prompt if prompt else None,
        }
        found = Window(**{**nothing, **known})  # type: ignore[arg-type]
        try:
            self._path.write_text(scenario_text(found))
        except (OSError, LocalError) as error:
            self._tell("plan", f"no scenario was written: {error}")
            return
        self._tell("plan", f"wrote {self._path}: check its model, hardware and limits, then kvbaton plan {self._path}")
