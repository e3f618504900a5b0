"""Our end of the process that speaks with a Mooncake store for one worker: questions, deadlines, death and return.

    this process                                     the other (``tier_store_process``)
    a thread that reads  --question--> socket -----> a thread --> get, look     --+
    a thread that writes --question--> socket -----> a thread --> put           --+--> Mooncake's client, its segment
    memory, shared by both: one flag "the master answers", then room for what is read, then for what is written

A process of its own, because of what was seen of Mooncake's client (0.3.13): while the master is away it holds
Python's lock for 90 s to begin and 12 s to end, and calls take 4 to 30 s; one that did not begin crashed when it
ended; and its port reads and writes whatever address of its process a peer names. There that is no worker's: no
weights, no fleet's key. Invariants: a question is answered by its deadline or fails; after one that came too late
nothing is asked on that socket, and nothing in its part of the memory touched, before the late answer is there. Knows
nothing about blocks or keys.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Literal

import msgspec

from kvbaton.clock import Clock, MonotonicClock
from kvbaton.types import UNREADABLE, LocalError, RemoteError

log = logging.getLogger(__name__)

FIX = "pip install 'kvbaton[mooncake]', and on Debian or Ubuntu apt install libibverbs1 libnuma1 libcurl4"
FIELD = "kv_tier_store"
FLAG_BYTES = 4096  # a page, of which one byte is used
REST_S = 5.0  # after something failed
_IMPORT_S = 120.0  # for the process to begin and say whether the package is there
_CONNECT_S = 10.0  # for the master to be found, before the worker goes on without
_STUCK_S = 90.0  # no call of the client's own takes that long: it hangs
_END_S = 3.0
_WATCH_S = 5.0
Way = Literal["read", "write"]


class Setup(msgspec.Struct, tag="setup", frozen=True):
    host: str
    port: int
    segment_bytes: int
    memory_bytes: int


class Exist(msgspec.Struct, tag="exist", frozen=True):
    """1 here, 0 not; what is below 0 is Mooncake's error, here and in every answer."""

    keys: list[str]


class Get(msgspec.Struct, tag="get", frozen=True):
    """One value into the memory at ``offset``; the answer is its bytes."""

    key: str
    offset: int
    num_bytes: int


class Put(msgspec.Struct, tag="put", frozen=True):
    """What lies in the memory. 0: it is there now, or was already."""

    keys: list[str]
    offsets: list[int]
    num_bytes: list[int]


class Remove(msgspec.Struct, tag="remove", frozen=True):
    key: str


class Hello(msgspec.Struct, frozen=True):
    """The first word of the process. ``error``: why the package cannot be used."""

    error: str = ""


Question = Exist | Get | Put | Remove


class _Socket:
    """One question at a time."""

    def __init__(self, connection: Connection, now_s: float) -> None:
        self._connection = connection
        # None: nothing is owed to us. The first answer comes unasked, when the master was found.
        self.owed_since_s: float | None = now_s
        self._decoder = msgspec.msgpack.Decoder(list[int])

    def is_settled(self, wait_s: float = 0.0) -> bool:
        """Whether it may be asked; takes a late answer in."""
        try:
            if self.owed_since_s is not None and self._connection.poll(wait_s):
                self._connection.recv_bytes()
                self.owed_since_s = None
        except (OSError, EOFError):
            return False
        return self.owed_since_s is None

    def ask(self, question: Question, now_s: float, deadline_s: float) -> list[int]:
        assert self.owed_since_s is None
        try:
            self.owed_since_s = now_s  # before it is sent: one that is stuck in sending is seen as well
            self._connection.send_bytes(msgspec.msgpack.encode(question))
            if not self._connection.poll(deadline_s):
                raise RemoteError(f"did not answer in {deadline_s:.0f} s", field=FIELD)
            answer = self._decoder.decode(self._connection.recv_bytes())
        except (OSError, EOFError, *UNREADABLE) as error:
            raise RemoteError(f"has lost the process that speaks with it ({error})", field=FIELD) from error
        self.owed_since_s = None
        return answer

    def close(self) -> None:
        self._connection.close()


class StoreLink:
    """``ask`` from one thread for each way, ``is_up`` from any. LocalError when the package cannot be used."""

    def __init__(
        self, host: str, port: int, segment_bytes: int, room: dict[Way, int], clock: Clock | None = None
    ) -> None:
        self.offsets: dict[Way, int] = {"read": FLAG_BYTES, "write": FLAG_BYTES + room["read"]}
        num_bytes = FLAG_BYTES + room["read"] + room["write"]
        self._setup = Setup(host, port, segment_bytes, num_bytes)
        self._clock = clock or MonotonicClock()
        self._rest_until_s = float("-inf")
        self._fd = os.memfd_create("kvbaton-store", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_bytes)
        self._map = mmap.mmap(self._fd, num_bytes)
        self.memory = memoryview(self._map)
        self._locks: dict[Way, threading.Lock] = {"read": threading.Lock(), "write": threading.Lock()}
        self._sockets: dict[Way, _Socket] = {}
        self._ending = threading.Event()
        try:
            self.process = self._start()
        except BaseException:
            self._release()
            raise
        if not all(each.is_settled(_CONNECT_S) for each in self._sockets.values()):
            log.warning("no Mooncake master answers at %s:%d yet; the worker goes on without it", host, port)
        self._watcher = threading.Thread(target=self._watch, name="kvbaton-tier-store", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Nobody asks any more."""
        self._ending.set()
        for way, lock in self._locks.items():
            with lock:
                self._sockets[way].close()  # which tells the process to end
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._watcher.join()
        self._release()

    def is_up(self) -> bool:
        """A look at a byte: whether the master answered a moment ago and nothing has failed since."""
        return not self._ending.is_set() and self.memory[0] == 1 and self._clock.now_s() >= self._rest_until_s

    def rest(self) -> None:
        """Something failed: nobody asks for a while."""
        self._rest_until_s = self._clock.now_s() + REST_S

    def is_settled(self, way: Way) -> bool:
        """Whether that way's part of the memory is ours now, and may be asked about."""
        with self._locks[way]:
            return self._sockets[way].is_settled()

    def is_owed(self, way: Way) -> bool:
        """Whether an answer is still to come; waits for nobody."""
        return self._sockets[way].owed_since_s is not None

    def ask(self, way: Way, question: Question, deadline_s: float) -> list[int]:
        """RemoteError when there is no answer by then. Only while ``is_settled``."""
        with self._locks[way]:
            return self._sockets[way].ask(question, self._clock.now_s(), deadline_s)

    # -- the process ---------------------------------------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes]:
        ours, theirs = zip(*(multiprocessing.Pipe() for _ in self._locks), strict=True)
        fds = [*(end.fileno() for end in theirs), self._fd]
        words = None if log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL  # the client's, who says a lot
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvbaton.kv.tier_store_process", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
                env={name: value for name, value in os.environ.items() if not name.startswith("KVBATON_")},
            )
        finally:
            for end in theirs:
                end.close()
        try:
            ours[0].send_bytes(msgspec.msgpack.encode(self._setup))
            if not ours[0].poll(_IMPORT_S):
                raise TimeoutError(f"nothing was heard of it in {_IMPORT_S:.0f} s")
            hello = msgspec.msgpack.decode(ours[0].recv_bytes(), type=Hello)
        except (OSError, EOFError, *UNREADABLE) as error:
            hello = Hello(f"its process ended or hangs: {error!r}")
        if hello.error:
            process.kill()
            process.wait()
            for end in ours:
                end.close()
            raise LocalError(f"the Mooncake store cannot be used: {hello.error}", field=FIELD, fix=FIX)
        for way, end in zip(self._locks, ours, strict=True):
            with self._locks[way]:
                if way in self._sockets:
                    self._sockets[way].close()
                self._sockets[way] = _Socket(end, self._clock.now_s())
        return process

    def _watch(self) -> None:
        """Another process when this one ends, or hangs."""
        while True:
            while self.process.poll() is None:
                try:
                    self.process.wait(_WATCH_S)
                except subprocess.TimeoutExpired:
                    self._kill_if_stuck()
            self.memory[0] = 0
            if self._ending.wait(REST_S):
                return
            code = self.process.returncode
            log.warning("the process that speaks with the Mooncake store ended (%d); it is started anew", code)
            try:
                self.process = self._start()
            except (LocalError, OSError) as error:
                log.warning("it did not start: %s", error)
            if self._ending.is_set():  # and its sockets may be newer than those that were closed
                self.process.kill()

    def _kill_if_stuck(self) -> None:
        now_s = self._clock.now_s()
        for each in self._sockets.values():
            since_s = each.owed_since_s
            if self.memory[0] == 1 and since_s is not None and now_s - since_s > _STUCK_S:
                log.warning("a call of the Mooncake store's client hangs; its process is ended")
                self.process.kill()

    def _release(self) -> None:
        for each in self._sockets.values():
            each.close()
        self.memory.release()
        self._map.close()
        os.close(self._fd)
