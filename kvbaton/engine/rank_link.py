"""What the ranks of a worker say to each other: messages over a socket that a child inherits, and sums by gloo.

Invariants: the socket's end is the other side's end, however it came; everything that waits for another rank has a
deadline, but for a rank that has nothing to do; gloo listens on this machine's loopback only.

Knows nothing about models.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import struct
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kvbaton.engine.model import StepInput

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 30
LOOPBACK = "127.0.0.1"


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """First message to a rank: who it is, and where it finds model and pool."""

    rank: int
    tp_size: int
    model_dir: str
    dtype: str
    segment: str  # the pool of this rank
    num_threads: int
    meeting: str  # file by which the ranks find each other
    deadline_s: float  # for any of them to join a sum


class Step(msgspec.Struct, frozen=True, tag="step"):
    """The arrays of a ``StepInput``, without those that only the rank that samples needs."""

    token_ids: bytes
    positions: bytes
    seq_starts: bytes
    context_lens: bytes
    block_table: bytes

    @classmethod
    def of(cls, step: StepInput) -> Step:
        named = (step.token_ids, step.positions, step.seq_starts, step.context_lens, step.block_table)
        return cls(*(np.asarray(array, dtype=np.int32).tobytes() for array in named))

    def arrays(self) -> StepInput:
        context_lens = np.frombuffer(self.context_lens, dtype=np.int32)
        return StepInput(
            np.frombuffer(self.token_ids, dtype=np.int32),
            np.frombuffer(self.positions, dtype=np.int32),
            np.frombuffer(self.seq_starts, dtype=np.int32),
            context_lens,
            np.frombuffer(self.block_table, dtype=np.int32).reshape(len(context_lens), -1),
            np.empty(0, dtype=np.int32),
        )


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The rank has its part of the model."""


class Trouble(msgspec.Struct, frozen=True, tag="trouble"):
    """The last word of a rank that cannot go on."""

    message: str


Message = Setup | Step | Ready | Trouble
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class LinkEnded(Exception):
    """The other side is gone."""


class RankLink:
    """One end of the socket between rank 0 and another rank. One thread sends, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        return self._sock.fileno()

    def set_deadline(self, deadline_s: float | None) -> None:
        """For each message from now on, either way. TimeoutError when it passes."""
        self._sock.settimeout(deadline_s)

    def send(self, message: Message) -> None:
        payload = _encoder.encode(message)
        try:
            self._sock.sendall(_LENGTH.pack(len(payload)) + payload)
        except ConnectionError as error:
            raise LinkEnded from error

    def receive(self) -> Message:
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
        assert length <= MAX_MESSAGE_BYTES
        return _decoder.decode(self._receive(length))

    def _receive(self, num_bytes: int) -> bytearray:
        received = bytearray(num_bytes)
        view = memoryview(received)
        while view:
            try:
                count = self._sock.recv_into(view)
            except ConnectionError as error:
                raise LinkEnded from error
            if count == 0:
                raise LinkEnded
            view = view[count:]
        return received

    def end(self) -> None:
        """Whoever waits on either side is told; the descriptor stays until ``close``."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()


class Sums:
    """The collectives of one worker, apart from those of any other in this process."""

    def __init__(self, meeting: str, rank: int, tp_size: int, deadline_s: float) -> None:
        """Returns when all ranks are connected; RuntimeError (gloo's) when one is not in time."""
        gloo: Any = dist.ProcessGroupGloo  # its own types name less than it has
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = datetime.timedelta(seconds=deadline_s)
        options._threads = 1
        store = dist.FileStore(meeting, tp_size)
        store.set_timeout(options._timeout)
        self._group = gloo(store, rank, tp_size, options)
        self.add(torch.zeros(1))  # when it has returned, nobody needs the meeting any more

    def add(self, tensor: Tensor) -> None:
        """``tensor`` becomes the sum of those of all ranks, or RuntimeError: one is gone, or not in time."""
        self._group.allreduce([tensor]).wait()
