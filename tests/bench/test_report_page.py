"""The report page in a real browser: plots drawn, nothing loaded, no console error, readable on a phone."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvbaton.bench.report import write_reports


def _load(name: str) -> ModuleType:
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"bench_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


browser = _load("browser")
needs_chromium = pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium on this machine")

DRAWN = """(() => [...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  return {title: svg.getAttribute('aria-label'), width: box.width, height: box.height,
          marks: svg.querySelectorAll('polyline, rect, circle, .l, .f').length,
          text: Math.min(...[...svg.querySelectorAll('text')].map(t => t.getBoundingClientRect().height))};
}))()"""


SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll('p, td, th, li')]
  .map(element => parseFloat(getComputedStyle(element).fontSize)))"""


async def page_of(tmp_path: Path) -> Path:
    found: Any = await _load("test_compare").compared(tmp_path, 0.005)
    return write_reports(found, tmp_path)[0]


@needs_chromium
async def test_the_page_in_a_browser(tmp_path: Path) -> None:
    path = await page_of(tmp_path)
    for width, height, scheme in ((1280, 900, "light"), (390, 844, "dark")):
        async with browser.new_page() as page:
            await page.open(path.as_uri(), width, height, scheme)
            plots = await page.evaluate(DRAWN)
            assert len(plots) == 7
            for plot in plots:
                assert plot["marks"] > 0, f"{plot['title']} is empty"
                assert 300 <= plot["width"] <= width and plot["height"] > 180
                assert plot["text"] >= 9, f"text of {plot['title']} is too small at {width}"
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            assert await page.evaluate(SMALLEST_TEXT) >= 13
            assert "split" in (await page.evaluate("document.querySelector('.verdict').textContent")).lower()
            (tmp_path / f"page{width}.png").write_bytes(await page.screenshot())
            assert page.problems == []
