"""``python -m kvbaton.engine.rank_process FD``: one rank of a worker, but for the first, which plans for all.

It computes the steps it is told, over the pool that rank 0 made, until rank 0 is gone or a step fails; then it ends at
once. Signals of a terminal are for rank 0, whose end is ours. Knows nothing about requests, blocks or peers.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from kvbaton.engine.rank_link import RankLink, Setup, Step


def main() -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    from kvbaton.engine.rank_link import LinkEnded, RankLink, Setup, Step, Trouble

    link = RankLink(sock)
    steps: queue.SimpleQueue[Step] = queue.SimpleQueue()

    def listen() -> None:
        """A thread of its own, so that rank 0's end is ours even while we wait for a sum."""
        try:
            while True:
                message = link.receive()
                assert isinstance(message, Step)
                steps.put(message)
        except LinkEnded:
            os._exit(0)

    try:
        setup = link.receive()
        assert isinstance(setup, Setup)
        threading.Thread(target=listen, name="kvbaton-listen", daemon=True).start()
        run(setup, link, steps)
    except LinkEnded:
        os._exit(0)
    except BaseException as error:
        with contextlib.suppress(LinkEnded, OSError):
            link.send(Trouble(f"{type(error).__name__}: {error}"))
        os._exit(1)
    os._exit(0)


def run(setup: Setup, link: RankLink, steps: queue.SimpleQueue[Step]) -> None:
    """Never returns but by an error."""
    import torch

    from kvbaton.engine.pool import KVPool
    from kvbaton.engine.rank_link import Ready, Sums
    from kvbaton.engine.rank_model import RankModel
    from kvbaton.engine.shares import shares
    from kvbaton.engine.weights import load_model_dir
    from kvbaton.kv.shared_pool import SharedPool

    torch.set_num_threads(setup.num_threads)
    config, weights = load_model_dir(setup.model_dir)
    pool = KVPool(SharedPool.attach(setup.segment, writable=True))
    share = shares(config, setup.tp_size)[setup.rank]
    model = RankModel(config, weights, share, pool.layout, setup.dtype)
    link.send(Ready())
    model.sums = Sums(setup.meeting, setup.rank, setup.tp_size, setup.deadline_s)
    while True:
        model.forward(steps.get().arrays(), pool)


if __name__ == "__main__":
    main()
