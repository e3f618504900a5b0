"""A way to read a peer's pool whose copies run on threads: how they begin, report and end.

Invariants: each copy reports once, on the loop, when no byte of it lands any more; what the source holds is given up
once, after it was closed and its last copy has reported. Knows nothing about how bytes are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np

from kvbaton.transfer.errors import LeaseLost
from kvbaton.transfer.placement import Placement
from kvbaton.transfer.ranges import Region
from kvbaton.transfer.wire import Offer
from kvbaton.types import KvbatonError, LocalError

OnCopied = Callable[[KvbatonError | None], None]


def require_unchanged(found: np.ndarray, offered: np.ndarray) -> None:
    """LeaseLost unless the generations of blocks, read after their last byte, are those that were offered."""
    changed = np.count_nonzero(found != offered)
    if changed:
        raise LeaseLost(f"{changed} of {found.size} blocks were reused by the prefill side while being read")


class CopyingSource:
    """``executor``: threads to copy in, shared by all peers. ``failed``: how an unforeseen error of a copy begins."""

    def __init__(self, executor: Executor, failed: str) -> None:
        self._executor = executor
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._num_busy = 0
        self._closing = False
        self._ended = False

    def _copy(self, offer: Offer, region: Region, placement: Placement) -> None:
        """On a thread of the executor; short, or bounded."""
        raise NotImplementedError

    def _end(self) -> None:
        """Give up what is held."""
        raise NotImplementedError

    def _copied(self, error: KvbatonError | None) -> None:
        """After a copy has reported."""

    def start_copy(self, offer: Offer, region: Region, placement: Placement, on_copied: OnCopied) -> None:
        """``on_copied`` is called on the loop, when no byte lands any more."""
        self._run(on_copied, self._copy, offer, region, placement)

    def _run(self, on_copied: OnCopied, copy: Callable[..., None], *args: object) -> None:
        self._num_busy += 1
        future = self._loop.run_in_executor(self._executor, copy, *args)

        def done(finished: asyncio.Future[None]) -> None:
            self._num_busy -= 1
            error = finished.exception()
            if error is not None and not isinstance(error, KvbatonError):
                error = LocalError(f"{self._failed}: {error!r}")
            on_copied(error)
            self._copied(error)
            self._end_if_idle()

        future.add_done_callback(done)

    def stop_copies(self, placement: Placement) -> None:
        """A copy of a few MiB is over, or has failed, before it could be stopped."""

    def close(self) -> None:
        self._closing = True
        self._end_if_idle()

    def join(self) -> None:
        """Its copies run on the executor, whose owner waits for them."""

    def _end_if_idle(self) -> None:
        if self._closing and self._num_busy == 0 and not self._ended:
            self._ended = True
            self._end()
