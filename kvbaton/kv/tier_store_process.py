"""The process that speaks with a Mooncake store for one worker: ``python -m kvbaton.kv.tier_store_process`` FD FD FD.

It lends its segment to the store, answers questions on two sockets, each with a thread, and says in the first byte of
the shared memory whether the master answers. Invariants: it ends when the worker's ends of the sockets do, even with
a call under way, once the client has begun; signals that a terminal sends to all are the worker's to judge. Knows
nothing about blocks.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from kvbaton.kv.tier_store_link import Exist, Get, Hello, Put, Question, Remove, Setup

_LOOK_S = 0.5  # between two looks at the master
_PROBE_S = 1.0
_CLIENT_BYTES = 16 << 20  # what the client wants for itself


def answer(store: Any, question: Question, base: int) -> list[int]:
    """``base``: where the shared memory begins here."""
    match question:
        case Exist(keys):
            return list(store.batch_is_exist(keys))
        case Get(key, offset, num_bytes):
            return list(store.batch_get_into([key], [base + offset], [num_bytes]))
        case Put(keys, offsets, num_bytes):
            return list(store.batch_put_from(keys, [base + offset for offset in offsets], num_bytes))
        case Remove(key):
            return [store.remove(key, True)]  # True: although somebody has just looked at it


def serve(store: Any, connection: Connection, base: int, ended: threading.Event) -> None:
    decoder = msgspec.msgpack.Decoder(Question)
    try:
        connection.send_bytes(msgspec.msgpack.encode([]))  # it may be asked now
        while True:
            question = decoder.decode(connection.recv_bytes())
            connection.send_bytes(msgspec.msgpack.encode(answer(store, question, base)))
    except (OSError, EOFError):
        pass  # the worker has closed its end, or is gone
    finally:
        ended.set()


def own_address(host: str, port: int) -> str | None:
    """The address of ours from which the master is reached, so others reach us by it; None: it is not."""
    try:
        with socket.create_connection((host, port), timeout=_PROBE_S) as found:
            return str(found.getsockname()[0])
    except OSError:
        return None


def begin(store: Any, setup: Setup, connection: Connection) -> bool:
    """Wait for the master: the client's own way to find that there is none takes it a minute and a half. False: the
    worker is gone, for nothing else can come by ``connection`` so early; or the client did not begin."""
    while (address := own_address(setup.host, setup.port)) is None:
        if connection.poll(_LOOK_S):
            return False
    master = f"{setup.host}:{setup.port}"
    code = store.setup(address, "P2PHANDSHAKE", setup.segment_bytes, _CLIENT_BYTES, "tcp", "", master)
    return bool(code == 0)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.environ.setdefault("GLOG_minloglevel", "1")
    reading, writing, memory_fd = Connection(int(sys.argv[1])), Connection(int(sys.argv[2])), int(sys.argv[3])
    setup = msgspec.msgpack.decode(reading.recv_bytes(), type=Setup)
    memory = mmap.mmap(memory_fd, setup.memory_bytes)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ended = threading.Event()
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        reading.send_bytes(msgspec.msgpack.encode(Hello(str(error))))
        return
    reading.send_bytes(msgspec.msgpack.encode(Hello()))
    store = MooncakeDistributedStore()
    if not begin(store, setup, writing) or store.register_buffer(base, setup.memory_bytes) != 0:
        os._exit(1)  # a client that did not begin is not let end: it crashes
    memory[0:1] = b"\x01"
    for connection in (reading, writing):
        threading.Thread(target=serve, args=(store, connection, base, ended), daemon=True).start()
    while not ended.wait(_LOOK_S):
        reachable = own_address(setup.host, setup.port) is not None and store.health_check() == 0
        memory[0:1] = b"\x01" if reachable else b"\x00"
    if memory[0] == 1:
        store.close()  # the store knows at once that the segment has gone; without a master it would take long
    os._exit(0)


if __name__ == "__main__":
    main()
