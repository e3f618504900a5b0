"""What a page that shows the router at work is to the gateway.

The page itself is above this layer (``kvbaton.ui``) and is handed in by whoever starts the router. Knows nothing about
what is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvbaton.clock import Clock
from kvbaton.observe.metrics import Metrics
from kvbaton.router.dispatch import Flight
from kvbaton.workers.http import Exchange


class Page(Protocol):
    def ended(self, flight: Flight, now_s: float) -> None:
        """A request ended, one way or another. Called on its path: must cost next to nothing and keep no ``flight``."""
        ...

    async def answer(self, exchange: Exchange) -> None:
        """A request for ``/ui`` or something below it."""
        ...

    async def run(self) -> None:
        """Look at the fleet from time to time, until cancelled."""
        ...


# What ``GET /fleet`` answers, the router's metrics and its clock.
OpenPage = Callable[[Callable[[], dict[str, Any]], Metrics, Clock], Page]
