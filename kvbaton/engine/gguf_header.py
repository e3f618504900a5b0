"""Whether a GGUF file's header keeps what it promises, before a library believes it.

    magic | version | number of tensors | number of fields | fields | tensors | padding | data

Readers of the format take counts and lengths as they are written: a wrong one makes them loop for hours or read beyond
the file. Here every count is held against the bytes that are left. Invariants: no step goes beyond the file; time and
memory are bounded by the header's own size. Knows nothing about what fields or tensors mean.
"""

from __future__ import annotations

import struct
from pathlib import Path

from kvbaton.types import LocalError

MAX_ITEMS = 4_000_000  # of one array; vocabularies and merges have some 100,000
MAX_FIELDS, MAX_TENSORS, MAX_DIMENSIONS = 10_000, 100_000, 4
MAX_HEADER_BYTES = 256 * 1024 * 1024
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_DEFAULT_ALIGNMENT = 32


class _Cursor:
    def __init__(self, data: bytes, name: str) -> None:
        self._data, self._name = data, name
        self.at = 0

    def bad(self, what: str) -> LocalError:
        return LocalError(f"{self._name} is no whole GGUF file: {what}", field="model")

    def skip(self, num_bytes: int, what: str) -> bytes:
        end = self.at + num_bytes
        if end > len(self._data):
            raise self.bad(f"{what} goes beyond its end")
        taken = self._data[self.at : end]
        self.at = end
        return taken

    def number(self, form: str, what: str) -> int:
        found: int = struct.unpack(f"<{form}", self.skip(struct.calcsize(f"<{form}"), what))[0]
        return found

    def count(self, most: int, what: str) -> int:
        found = self.number("Q", what)
        if found > most:
            raise self.bad(f"{found} {what} are more than {most}")
        return found

    def text(self, what: str) -> str:
        raw = self.skip(self.number("Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.bad(f"{what} is not UTF-8") from None


def check_header(path: Path) -> None:
    """LocalError unless fields and tensors are where the header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        cursor = _Cursor(file.read(min(size, MAX_HEADER_BYTES)), path.name)
    if cursor.skip(4, "the magic") != b"GGUF":
        raise cursor.bad("it does not begin like one")
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        raise cursor.bad(f"version {version} is not one of {', '.join(map(str, _VERSIONS))}")
    num_tensors, num_fields = cursor.count(MAX_TENSORS, "tensors"), cursor.count(MAX_FIELDS, "fields")
    alignment, names = _DEFAULT_ALIGNMENT, set()
    for _ in range(num_fields):
        name = cursor.text("a field's name")
        if name in names:
            raise cursor.bad(f"the field {name} is there twice")
        names.add(name)
        kind = cursor.number("I", f"the type of {name}")
        if name == "general.alignment":
            alignment = cursor.number("I", name) if kind == 4 else 0
            if not 0 < alignment <= 65536 or alignment & (alignment - 1):
                raise cursor.bad(f"{name} must be a power of two")
            continue
        _skip_value(cursor, kind, name)
    _check_tensors(cursor, num_tensors, alignment, size)


def _skip_value(cursor: _Cursor, kind: int, name: str) -> None:
    if kind == _STRING:
        cursor.text(name)
    elif kind == _ARRAY:
        item, number = cursor.number("I", name), cursor.count(MAX_ITEMS, f"items of {name}")
        if item == _STRING:
            for _ in range(number):
                cursor.text(f"an item of {name}")
        elif item in _SIZES:
            cursor.skip(number * _SIZES[item], name)
        else:
            raise cursor.bad(f"{name} holds items of type {item}")
    elif kind in _SIZES:
        cursor.skip(_SIZES[kind], name)
    else:
        raise cursor.bad(f"{name} has type {kind}")


def _check_tensors(cursor: _Cursor, num_tensors: int, alignment: int, file_bytes: int) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    spans = []
    for _ in range(num_tensors):
        name = cursor.text("a tensor's name")
        num_dimensions = cursor.number("I", f"the shape of {name}")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise cursor.bad(f"{name} has {num_dimensions} dimensions")
        shape = [cursor.number("Q", f"the shape of {name}") for _ in range(num_dimensions)]
        kind, offset = cursor.number("I", f"the type of {name}"), cursor.number("Q", f"the place of {name}")
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise cursor.bad(f"{name} has type {kind}") from None
        num_elements = 1
        for length in shape:
            num_elements *= length
        if not num_elements or shape[0] % block or offset % alignment:
            raise cursor.bad(f"{name} of shape {shape} does not come out in blocks of {block}, or lies askew")
        spans.append((name, offset, num_elements // block * block_bytes))
    start = -(-cursor.at // alignment) * alignment
    for name, offset, num_bytes in spans:
        if start + offset + num_bytes > file_bytes:
            raise cursor.bad(f"{name} goes beyond its end")
