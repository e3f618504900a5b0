"""A store whose values are files of one directory, which all its clients share; files of other names are its faults."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

HERE = Path(os.environ["FAKE_STORE_DIR"])
if (HERE / "no library").exists():
    raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")


class MooncakeDistributedStore:
    def setup(self, *args: object) -> int:
        return 0

    def register_buffer(self, pointer: int, num_bytes: int) -> int:
        return 0

    def health_check(self) -> int:
        return 2 if (HERE / "away").exists() else 0

    def close(self) -> int:
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        while (HERE / "hang").exists():
            time.sleep(0.005)
        if (HERE / "broken").exists():
            return [-900] * len(keys)
        return [int((HERE / key).exists()) for key in keys]

    def batch_get_into(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        try:
            value = (HERE / keys[0]).read_bytes()
        except FileNotFoundError:
            return [-704]
        if len(value) > sizes[0]:
            return [-600]
        ctypes.memmove(pointers[0], value, len(value))
        return [len(value)]

    def batch_put_from(self, keys: list[str], pointers: list[int], sizes: list[int]) -> list[int]:
        if (HERE / "full").exists():
            return [-200] * len(keys)
        for key, pointer, size in zip(keys, pointers, sizes, strict=True):
            (HERE / key).write_bytes(ctypes.string_at(pointer, size))
        return [0] * len(keys)

    def remove(self, key: str, force: bool) -> int:
        (HERE / key).unlink()
        return 0
