"""A request whose prefill and decode calls are open at the same time: the answer is decode's, the blame is whose it is.

Invariants: whichever fails first ends the other, where the servers themselves would wait for minutes; leaving by any
way ends both. Decode often fails because prefill did, and says so first: for a moment the blame waits for prefill.
Knows nothing about what the calls are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from kvbaton.types import LocalError
from kvbaton.workers.protocol import WorkerEvent

BLAME_S = 0.5


async def both_legs(
    prefill: Coroutine[Any, Any, None], decode: AsyncGenerator[WorkerEvent, None]
) -> AsyncGenerator[WorkerEvent, None]:
    """The events of ``decode``. What ``prefill`` raises is a RemoteError, what ``decode`` raises a LocalError."""
    leg = asyncio.create_task(prefill)
    step: asyncio.Future[WorkerEvent | None] | None = None
    try:
        while not leg.done():
            step = asyncio.ensure_future(anext(decode, None))
            await asyncio.wait((leg, step), return_when=asyncio.FIRST_COMPLETED)
            if leg.done() and leg.exception() is not None:
                break
            if (event := await step) is None:
                return
            yield event
        leg.result()
        async for event in decode:
            yield event
    except LocalError:
        await asyncio.wait({leg}, timeout=BLAME_S)
        if leg.done() and (cause := leg.exception()) is not None:
            raise cause from None
        raise
    finally:
        open_ones: list[asyncio.Future[Any]] = [leg] if step is None else [leg, step]
        for one in open_ones:
            one.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)
        await decode.aclose()
