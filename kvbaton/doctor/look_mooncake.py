"""vLLM servers with MooncakeConnector behind workers of ours: the workers say so, and so do the bootstrap servers.

Each prefill server has one. Nothing else tells it of versions whose connector has no figures. Knows nothing about what
two answers mean together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from kvbaton.doctor.facts import ServerFacts
from kvbaton.doctor.look_vllm import MOONCAKE
from kvbaton.transfer.reach import in_url
from kvbaton.types import UNREADABLE, RemoteError
from kvbaton.workers.vllm_mooncake import ENGINES

if TYPE_CHECKING:
    from kvbaton.doctor.look import Asking


async def with_mooncake(asking: Asking, servers: Sequence[ServerFacts]) -> list[ServerFacts]:
    """The same servers, those behind workers with what these and the bootstrap servers tell."""
    ports = {server.name: server.bootstrap_port for server in servers if server.bootstrap_port}

    async def look(server: ServerFacts) -> ServerFacts:
        if not ports or server.engine != "vllm" or not server.behind or server.trouble:
            return server
        if server.role == "prefill":
            return await _bootstrap(asking, server, next(iter(ports.values())))
        return _named(server) if server.behind in ports else server

    return list(await asyncio.gather(*(look(server) for server in servers)))


async def _bootstrap(asking: Asking, server: ServerFacts, port: int) -> ServerFacts:
    """``port`` is the same on every host."""
    host = urlsplit(server.url).hostname or ""
    server = msgspec.structs.replace(server, kv_host=host, kv_port=port, bootstrap_port=port)
    try:
        answer = await asking.get(f"http://{in_url(host)}:{port}/query")
        num_engines = len(ENGINES.decode(answer.body)) if answer.status == 200 else 0
    except RemoteError as error:
        return msgspec.structs.replace(server, kv_trouble=str(error))
    except UNREADABLE:
        num_engines = 0
    if not num_engines:
        return msgspec.structs.replace(server, kv_trouble="this is no bootstrap server that knows an engine")
    return _named(server)


def _named(server: ServerFacts) -> ServerFacts:
    return msgspec.structs.replace(server, connector=True, connector_name=server.connector_name or MOONCAKE)
