"""Takes the screenshots of docs/ui.md: a fleet of processes with a tiny model, seeded traffic, a real browser."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from conftest import write_tiny_model
from ui.live import SIZES, browser, new_fleet, problems, traffic, wait_until

DRAWN = "document.querySelectorAll('.plot .main-svg').length && Number(document.body.dataset.frame) >= {frames}"


async def take(url: str, name: str, frames: int, out: Path) -> None:
    """``frames``: how many seconds the page must know of."""
    width, height = SIZES[name]
    async with browser.new_page() as page:
        await page.open(f"{url}/ui", width, height, "dark" if name == "dark" else "light")
        await wait_until(page, DRAWN.format(frames=frames))
        (out / f"{name}.png").write_bytes(await page.screenshot())
        assert not problems(page, url), problems(page, url)


async def main(out: Path, seconds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder) / "tiny"
        model_dir.mkdir()
        write_tiny_model(model_dir, "llama", 0, {})
        fleet = new_fleet(model_dir, Path(folder), plan_band="0.5,4")
        try:
            fleet.start()
            async with traffic(fleet.router.url):
                for name in SIZES:
                    await take(fleet.router.url, name, seconds, out)
        finally:
            fleet.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for light.png, dark.png and phone.png")
    parser.add_argument("--seconds", type=int, default=60, help="of traffic before the first picture")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(given.out, given.seconds))
