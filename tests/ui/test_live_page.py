"""The page in a real browser, in front of a running fleet of processes with traffic on it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from router.processes import ProcessFleet
from ui.live import SIZES, browser, new_fleet, problems, state_of, traffic, wait_until

needs_chromium = pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium on this machine")
pytestmark = [needs_chromium, pytest.mark.slow]  # a fleet of processes and a browser: two minutes

DRAWN = "document.querySelectorAll('.plot .main-svg').length && Number(document.body.dataset.frame) > 3"
CHARTS = """[...document.querySelectorAll('figure')].map(figure => {
  const plot = figure.querySelector('.plot');
  const box = plot.getBoundingClientRect();
  return {title: figure.querySelector('figcaption').textContent, width: box.width, height: box.height,
          label: plot.getAttribute('aria-label'), lines: plot.querySelectorAll('.scatterlayer .js-line').length,
          ticks: plot.querySelectorAll('.ytick').length,
          text: Math.min(...[...plot.querySelectorAll('text')]
            .filter(each => each.textContent && each.checkVisibility())
            .map(each => each.getBoundingClientRect().height))};
})"""
# Text against the nearest opaque colour behind it; large text may have 3 to 1.
CONTRAST = """(() => {
  const parts = color => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(c => c / 255).map(c => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
    return .2126 * x + .7152 * y + .0722 * z;
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = parts(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility() || node.closest('.skip')) continue;
    const style = getComputedStyle(node);
    const svg = node.closest('svg');
    const [a, b] = [light(parts(svg ? style.fill : style.color)), light(behind(svg ? svg.parentElement : node))];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) {
      found.push(`${walker.currentNode.textContent.trim()}: ${ratio.toFixed(2)}`);
    }
  }
  return found;
})()"""
FOCUSED = """(() => {
  const node = document.activeElement;
  const style = getComputedStyle(node);
  const all = [...document.querySelectorAll('*')];
  return {name: node.getAttribute('aria-label') || node.textContent.trim(), place: all.indexOf(node),
          seen: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2, body: node === document.body};
})()"""


@pytest.fixture(scope="module")
def fleet(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    running = new_fleet(tiny_model_dir, tmp_path_factory.mktemp("fleet"), plan_band="0.5,4")
    try:
        running.start()
        yield running
    finally:
        running.end()


async def press(page: Any, key: str, code: int, text: str = "") -> None:
    for kind in ("keyDown", "keyUp"):
        given = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
        await page.call("Input.dispatchKeyEvent", **given, **({"text": text} if text and kind == "keyDown" else {}))


@pytest.mark.parametrize("name", SIZES)
async def test_it_draws_a_running_fleet(fleet: ProcessFleet, name: str) -> None:
    url, (width, height) = fleet.router.url, SIZES[name]
    async with traffic(url, num=2), browser.new_page() as page:
        await page.open(f"{url}/ui", width, height, "dark" if name == "dark" else "light")
        await wait_until(page, f"{DRAWN} && document.querySelectorAll('#rows tr').length > 2")
        charts = await page.evaluate(CHARTS)
        assert len(charts) == 8
        for chart in charts:
            assert 250 <= chart["width"] <= width and chart["height"] > 150, chart
            assert chart["lines"] and chart["ticks"] and chart["text"] >= 10, chart
            assert chart["label"].startswith(chart["title"].split()[0]), chart
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.evaluate(CONTRAST) == []
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) == (name == "dark")
        workers = await page.evaluate("[...document.querySelectorAll('#workers th')].map(each => each.textContent)")
        assert workers == ["p0", "d0", "d1"]
        assert await page.evaluate("document.querySelectorAll('#links tr').length") > 0
        assert problems(page, url) == []


async def test_what_it_shows_is_the_state_and_moves_with_traffic(fleet: ProcessFleet) -> None:
    url = fleet.router.url
    async with browser.new_page() as page:
        await page.open(f"{url}/ui", 1280, 900)
        await wait_until(page, DRAWN)
        before = (await state_of(url))["decisions"]["next"]
        latest = "document.querySelector('#rows tr td[data-label=where]')?.textContent"
        async with traffic(url, num=2) as flow:
            await wait_until(page, "document.querySelector('#tiles').textContent.includes('within 2 s')")
            await wait_until(page, "!document.querySelector('#tiles').textContent.includes('0 B/s')")
            await wait_until(page, f"({latest} ?? '').includes('p0 → d')")
            async with asyncio.timeout(60):
                while flow.num_ended < 3:
                    await flow.ended.wait()
        after = (await state_of(url))["decisions"]["next"]
        assert after >= before + 3
        # What ended is on the page, as long as there is room for it.
        await wait_until(page, f"document.querySelectorAll('#rows tr').length === Math.min(100, {after})")
        said = await page.evaluate("document.querySelector('#reasons').textContent")
        assert "remote" in said and "a prefill worker computes the prompt" in said
        assert "The plan was made for 0.5 to 4" in await page.evaluate(
            "document.querySelector('#drift-text').textContent"
        )
        assert problems(page, url) == []


async def test_the_keyboard_is_enough(fleet: ProcessFleet) -> None:
    url = fleet.router.url
    async with browser.new_page() as page:
        await page.open(f"{url}/ui", 1280, 900)
        await wait_until(page, DRAWN)
        stops: list[dict[str, Any]] = []
        while len(stops) < 40:
            await press(page, "Tab", 9)
            found = await page.evaluate(FOCUSED)
            if found["body"] or (stops and found["place"] <= stops[0]["place"]):
                break
            stops.append(found)
        names = [stop["name"] for stop in stops]
        assert names[:3] == ["Skip to the page", "Pause", "Pools"]
        for wanted in ("Drift", "Workers", "TTFT as a table", "Requests that ended, the latest first", "/fleet"):
            assert wanted in names
        assert [stop["place"] for stop in stops] == sorted(stop["place"] for stop in stops)  # in reading order
        assert all(stop["seen"] for stop in stops), [stop["name"] for stop in stops if not stop["seen"]]
        # Enter opens the table of a chart, and pauses the page.
        await page.evaluate(
            "[...document.querySelectorAll('summary')].find(s => s.textContent.startsWith('TTFT')).focus()"
        )
        await press(page, "Enter", 13, "\r")
        await wait_until(page, "document.querySelectorAll('#chart-ttft details[open] tbody tr').length > 1")
        await page.evaluate("document.querySelector('#pause').focus()")
        await press(page, "Enter", 13, "\r")
        assert await page.evaluate("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
        assert await page.evaluate("document.querySelector('#heard').textContent.startsWith('paused at')")
        shown = await page.evaluate("document.body.dataset.frame")
        newest = (await state_of(url))["frames"][-1]["number"]
        while (await state_of(url))["frames"][-1]["number"] < newest + 2:
            pass
        assert await page.evaluate("document.body.dataset.frame") == shown
        assert problems(page, url) == []


async def test_it_says_when_the_router_is_gone_and_comes_back(fleet: ProcessFleet) -> None:
    async with browser.new_page() as page:
        await page.open(f"{fleet.router.url}/ui", 390, 844)
        await wait_until(page, DRAWN)
        fleet.router.kill()
        try:
            await wait_until(page, "!document.querySelector('#trouble').hidden")
            assert "No answer from the router" in await page.evaluate("document.querySelector('#trouble').textContent")
        finally:
            fleet.router.start()
        await wait_until(page, "document.querySelector('#trouble').hidden")
        await wait_until(page, "document.querySelector('#fleet-state').textContent === 'serving'")
