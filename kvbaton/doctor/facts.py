"""What was read of each server of a fleet before any request: plain data, whoever told it.

Invariants: what nobody told is empty, zero or None and means "not known", never "equal". Pure; knows nothing about
sockets or about what is wrong with a value (``findings``).
"""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

import msgspec

from kvbaton.transfer.reach import is_own_machine
from kvbaton.types import Fingerprint, LocalError, Role

TargetRole = Literal["prefill", "decode", "both", "router"]
ROLES: tuple[TargetRole, ...] = ("prefill", "decode", "both", "router")
ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
KEY_VARIABLES = {"vllm": "VLLM_API_KEY", "sglang": "SGLANG_API_KEY", "trtllm": "TRTLLM_API_KEY"}


class Keys(msgspec.Struct, frozen=True):
    """What lets us in: the fleet's own key, and those that servers of other engines were started with."""

    internal: str = ""
    vllm: str = ""
    sglang: str = ""
    trtllm: str = ""


class Target(msgspec.Struct, frozen=True):
    """One server that is to be looked at."""

    name: str
    role: TargetRole
    url: str  # http://host:port
    kv_address: str = ""  # where peers are sent for its KV, instead of where it says


class ServerFacts(msgspec.Struct, frozen=True):
    name: str
    role: TargetRole
    url: str
    engine: str = ""  # kvbaton, vllm, sglang, trtllm
    behind: str = ""  # the worker of ours that drives it
    backend: str = ""  # of a worker of ours: the engine that it drives; empty: it computes itself
    trouble: str = ""  # it could not be read, and why
    remedy: str = ""  # what would let it be read, where that is known
    version: str = ""
    state: str = ""  # in its own words
    says_role: Role | None = None
    model: str = ""
    model_path: str = ""
    fingerprint: Fingerprint | None = None
    compatibility_hash: str = ""  # of an engine that tells no more
    block_size: int = 0
    kv_dtype: str = ""
    kv_layout: str = ""
    attention: str = ""  # backend; what layout and hash depend on
    tp_size: int = 0
    max_context: int = 0
    skew_s: float | None = None  # its clock minus ours
    kv_host: str = ""  # where peers find its KV
    kv_port: int = 0
    kv_trouble: str = ""  # that address could not be reached from here, and why
    connector: bool | None = None  # whether it hands off KV at all
    connector_name: str = ""  # vLLM's name of what does
    bootstrap_port: int = 0  # where a worker of ours looks for MooncakeConnector's bootstrap server; and of that server
    members: tuple[str, ...] = ()  # of a router: those it does not use, and why
    unread: tuple[str, ...] = ()  # what could not be looked at, and why
    untold: tuple[str, ...] = ()  # what an engine tells nobody

    @property
    def kv_host_from_here(self) -> str:
        """Where it names what everybody takes for their own machine, that is its own, which may not be ours."""
        return (urlsplit(self.url).hostname or "") if is_own_machine(self.kv_host) else self.kv_host.strip("[]")


class PairFacts(msgspec.Struct, frozen=True):
    """One hand-off that was really made."""

    prefill: str
    decode: str
    num_bytes: int = 0
    seconds: float = 0.0  # of that one; of several the one with the median rate
    repeats: int = 0
    cold: bool = False  # prefill computed meanwhile: the link may be faster
    trouble: str = ""

    @property
    def gb_per_s(self) -> float | None:
        return self.num_bytes / self.seconds / 1e9 if self.num_bytes and self.seconds > 0 else None


class Examination(msgspec.Struct, frozen=True):
    servers: tuple[ServerFacts, ...]
    pairs: tuple[PairFacts, ...] = ()


def parse_target(text: str, taken: int) -> Target:
    """``ROLE=URL`` or ``NAME:ROLE=URL``. ``taken``: how many of that kind there are already, for the name."""
    left, separator, url = text.partition("=")
    name, _, role = left.rpartition(":")
    if not separator or role not in ROLES or not url.startswith("http://") or url.count(":") < 2:
        fix = f"give ROLE=http://HOST:PORT with a role of {', '.join(ROLES)}"
        raise LocalError(f"{text!r} is no server to look at", field="targets", fix=fix)
    try:
        parts = urlsplit(url)
        right, more = parts.port is not None, url.rstrip("/").partition(parts.netloc)[2]
    except ValueError:
        right, more = False, ""
    if not right:
        fix = f"give ROLE=http://HOST:PORT with a role of {', '.join(ROLES)}"
        raise LocalError(f"{text!r} is no server to look at", field="targets", fix=fix)
    if more:
        raise LocalError(
            f"{text!r} names more than a server", field="targets", fix=f"leave out {more}: its API is found"
        )
    found: TargetRole = role  # type: ignore[assignment]
    return Target(name or f"{role}-{taken}", found, url.rstrip("/"))


def locked_out(facts: ServerFacts, engine: str, tried: bool) -> ServerFacts:
    """A server of that engine which wants a key. ``tried``: it had one of us."""
    variable = KEY_VARIABLES[engine]
    return msgspec.structs.replace(
        facts,
        engine=engine,
        trouble="it does not take the key that it was given" if tried else "it wants an API key",
        remedy=f"set {variable} to the key that the {ENGINE_NAMES[engine]} server was started with",
    )
