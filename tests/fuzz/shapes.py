"""Documents that are nearly right: examples of what a decoder expects, and small changes of any document.

Bytes changed at random are refused at the first brace; what a parser does with a document that is well-formed and
wrong in one place is what hurts. Invariants: everything is drawn from the generator that is given, so the same seed
makes the same inputs. Knows nothing about what reads them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**30,
    -(2**31), -(2**63), 0.0, -0.0, 0.5, 1e-300, 1e300, float("inf"), float("nan"), "", "a", "0", "-1", "\0", "\n",
    "a" * 300, "\u2028", "\ud800", "²", "NaN", "default", [], [None], [[]], [[[]]], [0] * 70, {}, {"": None}, {"a": {}},
)  # fmt: skip


def example(of: Any, rng: Random, raw: bytes) -> Any:
    """Plain values that a decoder of that type takes. ``raw``: what stands for a part that is kept undecoded."""
    return _example(inspect.type_info(of), rng, msgspec.Raw(raw), 0)


def _example(kind: inspect.Type, rng: Random, raw: msgspec.Raw, depth: int) -> Any:
    match kind:
        case inspect.UnionType(types=types):
            rest = [each for each in types if not isinstance(each, inspect.NoneType)]
            if len(rest) < len(types) and rng.random() < 0.3:
                return None
            return _example(rng.choice(rest), rng, raw, depth)
        case inspect.StructType() as struct:
            fields = {} if struct.tag is None else {struct.tag_field or "type": struct.tag}
            for field in struct.fields:
                if field.required or rng.random() < 0.7:
                    fields[field.encode_name] = _example(field.type, rng, raw, depth + 1)
            return list(fields.values()) if struct.array_like else fields
        case inspect.DataclassType(fields=of):
            return {each.encode_name: _example(each.type, rng, raw, depth + 1) for each in of}
        case inspect.ListType(item_type=of) | inspect.VarTupleType(item_type=of):
            return [_example(of, rng, raw, depth + 1) for _ in range(rng.randint(0, 3))]
        case inspect.TupleType(item_types=of):
            return [_example(each, rng, raw, depth + 1) for each in of]
        case inspect.DictType(key_type=key, value_type=value):
            return {_example(key, rng, raw, depth): _example(value, rng, raw, depth) for _ in range(rng.randint(0, 3))}
        case inspect.RawType():
            return raw
        case _:
            return _plain(kind, rng)


def _plain(kind: inspect.Type, rng: Random) -> Any:
    match kind:
        case inspect.LiteralType(values=values):
            return rng.choice(values)
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.IntType(ge=ge, gt=gt, le=le, lt=lt):
            low = ge if ge is not None else gt + 1 if gt is not None else 0
            high = le if le is not None else lt - 1 if lt is not None else low + 1000
            return rng.choice((low, high, rng.randint(low, min(high, low + 100))))
        case inspect.FloatType():
            return rng.choice((0.5, 1.0, 30.0))
        case inspect.StrType(min_length=low, max_length=high):
            return "a" * rng.randint(low or 0, min(high if high is not None else 20, (low or 0) + 20))
        case inspect.BytesType(min_length=low, max_length=high):
            return rng.randbytes(rng.randint(low or 0, min(high if high is not None else 20, (low or 0) + 20)))
        case inspect.NoneType():
            return None
        case _:
            return rng.choice(ODD[:20])


def changed(document: Any, rng: Random) -> Any:
    """The document with one to three things done to it."""
    document = copy.deepcopy(document)
    for _ in range(rng.randint(1, 3)):
        places = [(None, None), *_places(document)]
        holder, key = rng.choice(places[:400])
        if holder is None:
            if len(places) == 1 or rng.random() < 0.03:
                return copy.deepcopy(rng.choice(ODD))
            continue
        _change(holder, key, [each for each in places if each[0] is not None], rng)
    return document


def _change(holder: Any, key: Any, places: list[Any], rng: Random) -> None:
    match rng.randrange(8):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("", "extra", "a" * 40, "type", key if isinstance(key, str) else "k"))] = holder.pop(key)
        case 2 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case 3 if isinstance(holder, list):
            del holder[key]
        case 4:
            other, place = rng.choice(places)
            holder[key] = copy.deepcopy(other[place])
        case 5 if isinstance(holder[key], str):
            text = holder[key]
            cut = rng.randint(0, len(text))
            put_in = rng.choice(("", "\0", "\n", "é", "0", "-", "/", "..", "{{", "a" * 60))
            holder[key] = text[:cut] + put_in + text[cut:]
        case 6 if isinstance(holder[key], int) and not isinstance(holder[key], bool):
            holder[key] = holder[key] + rng.choice((-1, 1, 2**16, 2**31, -holder[key]))
        case _:
            holder[key] = copy.deepcopy(rng.choice(ODD))


def _places(document: Any) -> list[tuple[Any, Any]]:
    """(holder, key) of every value inside."""
    found: list[tuple[Any, Any]] = []
    left = [document] if isinstance(document, dict | list) else []
    while left and len(found) < 400:
        holder = left.pop()
        pairs = list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))
        for key, value in pairs:
            found.append((holder, key))
            if isinstance(value, dict | list):
                left.append(value)
    return found


# -- bytes


def changed_bytes(data: bytes, rng: Random, words: tuple[bytes, ...] = ()) -> bytes:
    """One to four changes of plain bytes."""
    held = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(held))
        match rng.randrange(8):
            case 0 if held:
                held[at % len(held)] ^= 1 << rng.randrange(8)
            case 1 if held:
                held[at % len(held)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x0D, 0x22, 0x7B))
            case 2:
                held[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 40)))
            case 3:
                del held[at : at + rng.choice((1, 2, 8, 100))]
            case 4 if held:
                end = min(len(held), at + rng.choice((1, 4, 30)))
                held[at:at] = held[at:end]
            case 5:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice((0, 1, 2 ** (8 * size) - 1, 2 ** (8 * size - 1), 2**16 % 2 ** (8 * size)))
                held[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
            case 6 if words:
                held[at:at] = rng.choice(words)
            case _:
                held = held[:at] if rng.random() < 0.5 else held[at:]
    return bytes(held)


def changed_lines(data: bytes, rng: Random, one: Callable[[bytes, Random], bytes]) -> bytes:
    """Lines of a file: one is changed, repeated, moved or left out."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            lines.insert(at, lines[at])
        case 1:
            del lines[at]
        case 2:
            rng.shuffle(lines)
        case _:
            lines[at] = one(lines[at], rng)
    return b"\n".join(lines)


def as_json(document: Any) -> bytes:
    return json.dumps(document, default=_plain_of).encode("utf-8", "surrogatepass")


def as_msgpack(document: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(document)
    except (OverflowError, UnicodeEncodeError, TypeError):  # some odd values have no place in it
        return b"\xc0"


def _plain_of(value: Any) -> Any:
    return json.loads(bytes(value) or b"null") if isinstance(value, msgspec.Raw) else repr(value)
