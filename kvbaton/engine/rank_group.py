"""The other ranks of a worker, as rank 0 has them: their processes, what they are told, and how they end.

Invariants: no rank outlives this object's ``close`` or this process; one rank that is gone, or that says it cannot go
on, is the end of all, once, with a reason; whoever waits for them waits with a deadline. Knows nothing about models.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from kvbaton.engine.model import StepInput
from kvbaton.engine.rank_link import LinkEnded, Message, RankLink, Ready, Setup, Step, Trouble
from kvbaton.types import LocalError

log = logging.getLogger(__name__)

START_S = 180.0  # until a rank has its part of the model
_END_S = 5.0
_LAST_WORDS_S = 5.0  # it is ending, or about to say why


class RankGroup:
    """``setups``: one for each rank but the first, in order."""

    def __init__(self, setups: Sequence[Setup]) -> None:
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._closing = False
        self._watcher: threading.Thread | None = None
        self._links: list[RankLink] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for setup in setups:
                self._start(setup)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _start(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._links.append(RankLink(ours))
            threads = str(setup.num_threads)
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "kvbaton.engine.rank_process", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
                )
            )
        self._links[-1].set_deadline(START_S)
        try:
            self._links[-1].send(setup)
        except LinkEnded:
            told = self._how_it_ended(len(self._links))
            raise LocalError(f"rank {setup.rank} of this worker {told}", field="tp") from None

    def wait_ready(self, deadline_s: float) -> None:
        """Until every rank has its part of the model; ``deadline_s`` is of every later message. LocalError if not."""
        for rank, link in enumerate(self._links, start=1):
            try:
                said = link.receive()
            except (LinkEnded, TimeoutError) as error:
                late = isinstance(error, TimeoutError)
                told = f"was not ready in {START_S:.0f} s" if late else self._how_it_ended(rank)
                raise LocalError(f"rank {rank} of this worker {told}", field="tp") from None
            if not isinstance(said, Ready):
                raise LocalError(f"rank {rank} of this worker did not start: {_words(said)}", field="tp")
            link.set_deadline(deadline_s)

    def watch(self, on_lost: Callable[[], None]) -> None:
        """From now on ``on_lost`` is called, on a thread of ours, when the ranks are lost; not after ``close``."""
        self._watcher = threading.Thread(target=self._watch, args=(on_lost,), name="kvbaton-ranks", daemon=True)
        self._watcher.start()

    def send(self, step: StepInput) -> None:
        """To every rank. LocalError when they are lost."""
        if self._lost is not None:
            raise LocalError(f"the ranks of this worker are lost: {self._lost}")
        message = Step.of(step)
        try:
            for link in self._links:
                link.send(message)
        except (LinkEnded, OSError) as error:
            self.fail(f"a step could not be sent: {error!r}")
            raise LocalError(f"the ranks of this worker are lost: {self._lost}") from error

    def fail(self, why: str) -> None:
        """They are not in step any more, and cannot be brought back: the end of all of them."""
        with self._lock:
            if self._lost is None:
                self._lost = why
        for link in self._links:
            link.end()

    def close(self) -> None:
        """End them all and wait for it. Between steps only; harmless when repeated."""
        self._closing = True
        for link in self._links:
            link.end()
        for process in self._processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()
        for link in self._links:
            link.close()
        self._links, self._processes = [], []

    # -- the watcher's thread

    def _watch(self, on_lost: Callable[[], None]) -> None:
        """Ranks say nothing while all is well: what can be read is a last word, or the end."""
        poller = select.poll()
        ranks = {link.fileno(): rank for rank, link in enumerate(self._links, start=1)}
        for fileno in ranks:
            poller.register(fileno, select.POLLIN)
        fileno, _ = poller.poll()[0]
        if self._closing:
            return
        if self._lost is None:
            self.fail(f"rank {ranks[fileno]} {self._last_words(ranks[fileno])}")
        for process in self._processes:
            process.kill()  # one that is stopped would not notice that we are gone
        log.error("the ranks of this worker are lost, and with them the worker: %s", self._lost)
        on_lost()

    def _last_words(self, rank: int) -> str:
        link = self._links[rank - 1]
        link.set_deadline(_LAST_WORDS_S)
        try:
            return f"cannot go on: {_words(link.receive())}"
        except (LinkEnded, OSError):
            return self._how_it_ended(rank)

    def _how_it_ended(self, rank: int) -> str:
        try:
            code = self._processes[rank - 1].wait(_LAST_WORDS_S)
        except subprocess.TimeoutExpired:
            return "does not answer"
        return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


def _words(said: Message) -> str:
    return said.message if isinstance(said, Trouble) else f"{type(said).__name__} was not expected"
