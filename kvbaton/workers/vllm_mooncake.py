"""How two vLLM servers with MooncakeConnector are told of each other: a bootstrap server, and the name of a transfer.

Each prefill server has a bootstrap server beside it, which says the id of each of its engines, by data-parallel rank.
Prefill gets the name of a transfer; decode gets the same name, the bootstrap server's address and the engine's id, and
waits until the prefill side has written into it. Invariants: a transfer has a name that no other has; what a bootstrap
server said is forgotten when a request failed, because a server that was restarted is another engine. Knows nothing
about requests.

Decode waits for a prefill that never comes until its own limit (minutes), so whoever asks must call both off together.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass

import aiohttp
import msgspec

from kvbaton.transfer.reach import in_url
from kvbaton.types import UNREADABLE, RemoteError
from kvbaton.workers.engine_server import EngineServer
from kvbaton.workers.protocol import PeerAddress

BOOTSTRAP_PORT = 8998  # what VLLM_MOONCAKE_BOOTSTRAP_PORT is when nobody sets it
_RANK_HEADER = "x-data-parallel-rank"


class _Engine(msgspec.Struct, frozen=True):
    engine_id: str


ENGINES = msgspec.json.Decoder(dict[int, _Engine])


@dataclass(frozen=True)
class Transfer:
    offer: dict[str, object]  # what prefill is asked
    pull: dict[str, object]  # what decode is asked
    headers: dict[str, str]  # of prefill's call: which of its engines


class MooncakePeers:
    """``port``: of every prefill server's bootstrap server, on the host of that server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._engines: dict[PeerAddress, dict[int, str]] = {}

    async def transfer(self, engine: EngineServer, prefill: PeerAddress) -> Transfer:
        """RemoteError when its bootstrap server does not say what is behind it."""
        address = f"http://{in_url(prefill.host)}:{self.port}"
        if prefill not in self._engines:
            self._engines[prefill] = await _ask(engine, address)
        engines = self._engines[prefill]
        rank = random.choice(list(engines))
        name = f"xfer-{uuid.uuid4()}"
        offer = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
        pull = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": name,
            "remote_bootstrap_addr": address,
            "remote_engine_id": engines[rank],
        }
        return Transfer(offer, pull, {_RANK_HEADER: str(rank)} if len(engines) > 1 else {})

    def forget(self, prefill: PeerAddress) -> None:
        self._engines.pop(prefill, None)


async def _ask(engine: EngineServer, address: str) -> dict[int, str]:
    try:
        status, raw = await engine.get("/query", address)
        if status != 200:
            raise RemoteError(f"the bootstrap server at {address} answers {status}")
        found = {rank: entry.engine_id for rank, entry in ENGINES.decode(raw).items() if entry.engine_id}
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise RemoteError(f"bootstrap at {address}: {type(error).__name__}: {error}") from None
    except UNREADABLE as error:
        raise RemoteError(f"the answer of the bootstrap server at {address} cannot be read: {error}") from None
    if not found:
        raise RemoteError(f"the bootstrap server at {address} knows no engine yet")
    return found
