"""Each fault strikes where it says, once, and heals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvbaton.bench.fault_proxy import FaultProxy

DATA = bytes(range(256)) * 40


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[FaultProxy]:
    server = await asyncio.start_server(_echo, "127.0.0.1", 0)
    async with server, FaultProxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
        yield proxy


async def _echoed(proxy: FaultProxy) -> bytes:
    """What comes back of DATA until the connection ends."""
    reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
    writer.write(DATA)
    writer.write_eof()
    got = b""
    try:
        while part := await reader.read(1 << 16):
            got += part
    except ConnectionResetError:
        got += b"RESET"
    finally:
        writer.close()
    return got


async def test_without_a_fault_nothing_changes(proxy: FaultProxy) -> None:
    assert await _echoed(proxy) == DATA
    assert (proxy.to_server.num_bytes, proxy.to_client.num_bytes, proxy.num_connections) == (len(DATA), len(DATA), 1)


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_a_cut_comes_at_its_byte_and_only_once(proxy: FaultProxy, direction) -> None:
    proxy.path(direction).cut_after_bytes = 1000
    got = await _echoed(proxy)
    assert got.endswith(b"RESET") and DATA.startswith(got.removesuffix(b"RESET")) and len(got) <= 1005
    assert proxy.path(direction).num_cut == 1 and proxy.path(direction).num_bytes == 1000
    assert await _echoed(proxy) == DATA


async def test_one_byte_is_damaged(proxy: FaultProxy) -> None:
    proxy.to_client.corrupt_after_bytes = 777
    got = await _echoed(proxy)
    assert [i for i, (a, b) in enumerate(zip(got, DATA, strict=True)) if a != b] == [777]
    assert proxy.to_client.num_corrupted == 1


async def test_a_one_way_partition_holds_and_heals(proxy: FaultProxy) -> None:
    proxy.partition("to_client")
    asking = asyncio.ensure_future(_echoed(proxy))
    while proxy.to_server.num_bytes < len(DATA):  # noqa: ASYNC110 (the other way still works)
        await asyncio.sleep(0)
    assert proxy.to_client.num_bytes == 0 and not asking.done()
    proxy.heal()
    assert await asking == DATA


async def test_a_stall_comes_at_its_byte(proxy: FaultProxy) -> None:
    proxy.to_server.stall_after_bytes = 5000
    asking = asyncio.ensure_future(_echoed(proxy))
    while not proxy.to_server.stalled:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert proxy.to_server.num_bytes == 5000
    proxy.heal()
    assert await asking == DATA


async def test_delay_and_bandwidth_only_take_time(proxy: FaultProxy) -> None:
    proxy.to_client.delay_s, proxy.to_client.bytes_per_s = 0.001, 1e7
    assert await _echoed(proxy) == DATA


async def test_refused_until_it_listens_again(proxy: FaultProxy) -> None:
    port = proxy.port
    await proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(proxy.host, port)
    await proxy.listen()
    assert proxy.port == port
    assert await _echoed(proxy) == DATA


async def test_cut_resets_what_is_open(proxy: FaultProxy) -> None:
    reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
    writer.write(b"x")
    assert await reader.readexactly(1) == b"x"
    assert proxy.cut() == 2
    with pytest.raises(ConnectionResetError):
        await reader.readexactly(1)
    writer.close()
    while proxy.num_open:  # noqa: ASYNC110
        await asyncio.sleep(0)
