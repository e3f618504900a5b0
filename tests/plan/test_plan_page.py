"""The planner's report in a real browser: plots drawn, nothing loaded, no console error, readable on a phone."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import browser
from plan.small_scenario import profile_scenario

from kvbaton.plan import report_html
from kvbaton.plan.scenario import load
from kvbaton.plan.verdict import plan

DRAWN = """(() => [...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  return {width: box.width, height: box.height, bars: svg.querySelectorAll('rect').length,
          text: Math.min(...[...svg.querySelectorAll('text')].map(t => t.getBoundingClientRect().height)),
          cut: [...svg.querySelectorAll('text')].some(t => t.getBoundingClientRect().left < box.left - 1
                                                       || t.getBoundingClientRect().right > box.right + 1)};
}))()"""
HEADINGS = "[...document.querySelectorAll('h2')].map(each => each.textContent)"
CONDITIONS = "[...document.querySelectorAll('h2')].find(h => h.textContent == 'Nine conditions')"


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium on this machine")
async def test_the_page_in_a_browser(tmp_path: Path) -> None:
    scenario = load(profile_scenario(tmp_path))
    path = tmp_path / "plan.html"
    path.write_text(report_html.render(plan(scenario)))
    for width, height, scheme in ((1280, 900, "light"), (390, 844, "dark")):
        async with browser.new_page() as page:
            await page.open(path.as_uri(), width, height, scheme)
            plots = await page.evaluate(DRAWN)
            assert len(plots) == 3
            for plot in plots:
                assert plot["bars"] > 0 and not plot["cut"]
                assert 300 <= plot["width"] <= width
                assert plot["text"] >= 8, f"text of a plot is too small at {width}"
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert "Cheaper things to try first" in await page.evaluate(HEADINGS)
            rows = await page.evaluate(f"{CONDITIONS}.nextElementSibling.querySelectorAll('tr').length")
            assert rows == 10  # nine and the head
            (tmp_path / f"plan{width}.png").write_bytes(await page.screenshot())
            assert page.problems == []
