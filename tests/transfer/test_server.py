"""Where a hand-off server listens."""

from __future__ import annotations

import socket

import pytest

from kvbaton.types import LocalError


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
async def test_an_address_it_cannot_listen_on_is_our_own_fault_and_named(make_pair) -> None:
    pair = await make_pair(secret=b"a secret of the fleet")
    taken = pair.address[1]
    for host, port, told in (("127.0.0.1", taken, "Address already in use"), ("192.0.2.1", 0, "assign")):
        with pytest.raises(LocalError, match=told) as caught:
            await pair.server.start(host, port)
        assert caught.value.field == "kv_port" and f"{host}:{port}" in str(caught.value)
    assert pair.server.stats().num_connections == 0
    with socket.create_connection(("127.0.0.1", taken)):
        pass  # the one that listens there goes on
