"""Every setting of a worker, a router and a local fleet, read once from a TOML file, the environment and flags.

Later sources win: defaults, then the file, then ``KVBATON_<SECTION>_<KEY>`` variables, then flags. Invariants: what
comes out is complete and frozen; an unknown key is an error that names it and the nearest known one. The key that
workers and router share is read from ``KVBATON_INTERNAL_KEY`` only, never from a file or a command line that others
can list.
Knows nothing about what the settings do.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from kvbaton.types import LocalError, Role

INTERNAL_KEY_VARIABLE = "KVBATON_INTERNAL_KEY"

Transport = Literal["auto", "shm", "tcp", "nixl"]
EngineName = Literal["embedded", "vllm", "sglang", "trtllm"]


@dataclass(frozen=True)
class ModelSettings:
    """Section ``[model]``: what is served, and how it is held in memory."""

    dir: str = ""  # a Hugging Face model directory; empty: the small instruct model that ships as a package
    name: str = ""  # what clients call it; empty: the directory's name
    dtype: str = "bfloat16"  # of activations: float32 or bfloat16
    kv_dtype: str = "auto"  # of the KV cache; auto: as dtype
    weights: str = "native"  # or weight-only int8, int4
    block_size: int = 16  # tokens per KV block
    kv_memory_mib: int = 0  # KV pool of one worker; 0: 1024, and `up` takes less where that does not fit
    kv_blocks: int = 0  # above 0: this many blocks instead of kv_memory_mib
    max_context: int = 0  # above 0: fewer tokens than the model allows
    backend: str = "auto"  # native kernels or torch
    device: str = "auto"


@dataclass(frozen=True)
class WorkerSettings:
    """Section ``[worker]``: one worker process."""

    role: Role = "both"
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one; the process reports which
    kv_host: str = ""  # where the hand-off server listens, and what peers are told; empty: as host
    kv_port: int = 0
    transport: Transport = "auto"
    cores: tuple[int, ...] = ()  # CPU cores to stay on; empty: all
    threads: int = 0  # compute threads; 0: one per core it stays on
    tp: int = 1  # ranks that share the heads and the MLP, each a process on the worker's cores
    tp_deadline_s: float = 60.0  # how long a rank may keep the others waiting within a step
    chunk_tokens: int = 512  # tokens of one engine step, decodes first
    max_running: int = 64  # sequences in one batch
    max_waiting: int = 256  # requests queued before more are refused with 503
    lease_s: float = 30.0  # how long offered blocks stay pinned without a sign of life from the reader
    drain_s: float = 60.0  # how long open requests may still run after a drain began
    max_body_bytes: int = 16 * 1024 * 1024
    # Whether clients may ask it without a router. auto: only on loopback, since nobody asks them for an API key.
    clients: Literal["auto", "allow", "refuse"] = "auto"
    engine: EngineName = "embedded"  # what computes: the engine in this package, or a server of another's
    engine_url: str = ""  # of a server that runs already; empty: one is started
    engine_events: str = ""  # where that server publishes KV events, and after a comma replays them; empty: unknown
    engine_bootstrap_port: int = 0  # of vLLM's prefill servers with MooncakeConnector; 0: they have NixlConnector
    engine_python: str = ""  # of the environment that has the engine; empty: ours
    engine_args: str = ""  # more flags for it, as on a command line
    engine_log: str = ""  # file for what it prints; empty: one in the temporary directory
    kv_tier_memory_mib: int = 0  # memory in which the workers of a fleet share KV blocks; 0: none
    kv_tier_disk: str = ""  # DIR:GiB for what leaves that memory, or without it for all; empty: none
    kv_tier_store: str = ""  # mooncake://HOST:PORT of the master of a store that hosts share; empty: none


@dataclass(frozen=True)
class MemberSettings:
    """One entry of ``[[workers]]`` in a fleet file."""

    url: str
    role: Role = "both"
    name: str = ""  # in headers, logs and metrics; empty: role and position, such as decode-1
    kv_address: str = ""  # host:port where peers reach its hand-off server; empty: where the worker says

    def __post_init__(self) -> None:
        if self.kv_address and re.fullmatch(r"[A-Za-z0-9_.\[\]:-]+:[0-9]{1,5}", self.kv_address) is None:
            raise LocalError(f"kv_address {self.kv_address!r} is not host:port", field="workers.kv_address")
        if re.fullmatch(r"http://[A-Za-z0-9_.\[\]:-]+", self.url) is None:
            raise LocalError(f"worker url {self.url!r} is not http://host:port", field="workers.url")


@dataclass(frozen=True)
class RouterSettings:
    """Section ``[router]``: one router process."""

    host: str = "127.0.0.1"
    port: int = 8000
    policy: Literal["cost", "static", "least_load", "round_robin"] = "cost"  # how workers are chosen
    # Unset: the break-even is computed from what is measured. Set: fewer uncached prompt tokens than this are prefilled
    # where they decode, whatever it costs; 0: none are.
    threshold_tokens: int | None = None
    ttft_slo_s: float = 2.0  # what a request should wait for its first token at most
    tpot_slo_s: float = 0.1  # and for each one after it, in the mean
    disagg_percent: float = 100.0  # share of the requests fit for the split that go there; the rest stays local
    profile: str = ""  # a file of `kvbaton profile`: where the cost models start from
    on_prefill_failure: Literal["local", "error"] = "local"  # after the other prefill workers were tried
    request_cost_tokens: int = 256  # what one request in flight on a worker weighs, in prompt tokens
    index_exact_blocks: int = 1 << 20  # KV blocks remembered of all workers together that say what they hold
    kv_events_interval_s: float = 0.05  # between two questions for a worker's KV events
    index_block_tokens: int = 32  # grain of the memory of who was sent which prefix, of workers that do not say
    index_blocks: int = 65536  # size of that memory for each worker
    max_inflight: int = 1024  # requests at once; more are refused with 429
    max_queued: int = 512  # of these, requests that wait because no worker has room; more are refused with 429
    max_queued_high: int = 256  # the same for requests with a priority below 0
    max_queued_low: int = 256  # and for those with one above 0
    queue_timeout_s: float = 30.0  # how long one may wait for room
    max_replays: int = 2  # how often a stream may be continued on another worker
    first_token_min_s: float = 5.0  # a first token may take this long ...
    first_token_factor: float = 8.0  # ... or so many times its estimate, before another worker is asked; 0: for ever
    stream_stall_s: float = 20.0  # silence in the middle of a stream before it is continued elsewhere; 0: for ever
    max_body_bytes: int = 8 * 1024 * 1024
    max_total_body_bytes: int = 64 * 1024 * 1024  # of all requests at once; beyond it 503
    head_timeout_s: float = 20.0  # for a request's head to arrive, since the connection or the head's first byte
    body_timeout_s: float = 30.0  # for the whole request body to arrive
    connect_timeout_s: float = 2.0
    request_timeout_s: float = 600.0  # for a whole request
    stall_timeout_s: float = 120.0  # between two parts of an answer, and until its first
    poll_interval_s: float = 0.5  # between two looks at each worker
    poll_timeout_s: float = 2.0
    ui: bool = True  # the live page at /ui, as public as /fleet
    api_keys_file: str = ""  # who may come in, one key a line; empty, and none in KVBATON_API_KEYS: everybody
    allow_anonymous: bool = False  # let everybody in although others than this host can reach it
    open_metrics: bool = True  # /metrics needs no key
    plan_band: str = ""  # LOW,HIGH of computed prompt tokens per output token that a plan was made for; empty: no plan
    canary_interval_s: float = 0.0  # between two prompts whose answers are compared with earlier ones; 0: none
    discover: str = ""  # kubernetes:SELECTOR: the workers are the pods with these labels, besides those listed
    worker_port: int = 8101  # of such a pod
    drain_s: float = 60.0
    tokenize_inline_chars: int = 4096  # longer texts are tokenized on a thread
    cores: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.disagg_percent <= 100:
            raise LocalError(f"disagg_percent is {self.disagg_percent}", field="disagg_percent", fix="use 0 to 100")
        if self.threshold_tokens is not None and self.threshold_tokens < 0:
            raise LocalError(
                f"threshold_tokens is {self.threshold_tokens}",
                field="threshold_tokens",
                fix="use 0 to always prefill remotely",
            )


@dataclass(frozen=True)
class FleetSettings:
    """A whole configuration file. Every section may be absent."""

    model: ModelSettings = field(default_factory=ModelSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    workers: tuple[MemberSettings, ...] = ()


Settings = TypeVar("Settings", ModelSettings, WorkerSettings, RouterSettings)
_SECTIONS: dict[str, type] = {"model": ModelSettings, "worker": WorkerSettings, "router": RouterSettings}
_POSITIVE = re.compile(
    r"_(s|bytes|tokens)$|^(tp|block_size|max_running|max_waiting|max_inflight|index_blocks|index_exact_blocks)$"
)
_MAY_BE_ZERO = ("canary_interval_s", "stream_stall_s")  # zero is never


def load(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
) -> FleetSettings:
    """Merge all sources. ``flags`` is section -> key -> value; a value of None means the flag was not given."""
    table = _read_toml(path) if path is not None else {}
    environ = os.environ if environ is None else environ
    unknown = set(table) - {*_SECTIONS, "workers"}
    for name in sorted(unknown):
        raise _unknown(name, [*_SECTIONS, "workers"], "section")
    sections: dict[str, Any] = {
        name: _section(name, cls, table.get(name, {}), environ, (flags or {}).get(name, {}))
        for name, cls in _SECTIONS.items()
    }
    return FleetSettings(workers=_members(table.get("workers", [])), **sections)


def internal_key(environ: Mapping[str, str] | None = None) -> str:
    """The key shared by the processes of one fleet; empty when there is none."""
    return (os.environ if environ is None else environ).get(INTERNAL_KEY_VARIABLE, "")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise LocalError(f"cannot read {path}: {error.strerror}", field="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LocalError(f"{path} is not valid TOML: {error}", field="config") from error


def _section(
    section: str, cls: type[Settings], table: Any, environ: Mapping[str, str], flags: Mapping[str, Any]
) -> Settings:
    known = [f.name for f in dataclasses.fields(cls)]
    if not isinstance(table, dict):
        raise LocalError(f"[{section}] must be a table", field=section)
    for key in table:
        if key not in known:
            raise _unknown(f"{section}.{key}", [f"{section}.{k}" for k in known], "key")
    values: Settings = _convert(section, cls, table, strict=True)
    prefix = f"KVBATON_{section.upper()}_"
    from_env: dict[str, Any] = {}
    for name, text in environ.items():
        if not name.startswith(prefix):
            continue
        key = name[len(prefix) :].lower()
        if key not in known:
            raise _unknown(name, [prefix + k.upper() for k in known], "environment variable")
        from_env[key] = [p.strip() for p in text.split(",") if p.strip()] if key == "cores" else text
    given = {key: value for key, value in flags.items() if value is not None}
    merged = {**{k: getattr(values, k) for k in known}, **from_env, **given}
    result: Settings = _convert(section, cls, merged, strict=False)
    _check_ranges(section, result)
    return result


def _convert(section: str, cls: type[Settings], values: Mapping[str, Any], strict: bool) -> Settings:
    try:
        return msgspec.convert(dict(values), cls, strict=strict)
    except msgspec.ValidationError as error:
        path = re.search(r"at `\$\.(\w+)", str(error))
        key = f"{section}.{path.group(1)}" if path is not None else section
        raise LocalError(f"{key}: {str(error).split(' - at ')[0]}", field=key) from None


def _check_ranges(section: str, settings: Any) -> None:
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        if item.name == "threshold_tokens" or isinstance(value, str | tuple):
            continue
        low = 1e-9 if _POSITIVE.search(item.name) and item.name not in _MAY_BE_ZERO else 0
        if isinstance(value, int | float) and value < low:
            raise LocalError(
                f"{section}.{item.name} must be {'above' if low else 'at least'} 0, got {value}", field=item.name
            )
    if (port := getattr(settings, "port", 0)) > 65535:
        raise LocalError(f"{section}.port {port} is above 65535", field="port")


def _members(entries: Any) -> tuple[MemberSettings, ...]:
    if not isinstance(entries, list):
        raise LocalError("workers must be an array of tables", field="workers", fix="write [[workers]]")
    known = [f.name for f in dataclasses.fields(MemberSettings)]
    members: list[MemberSettings] = []
    counts: dict[str, int] = {}
    for i, entry in enumerate(entries):
        for key in entry if isinstance(entry, dict) else ():
            if key not in known:
                raise _unknown(f"workers.{key}", [f"workers.{k}" for k in known], "key")
        try:
            member = msgspec.convert(entry, MemberSettings)
        except msgspec.ValidationError as error:
            fix = f"role is one of {', '.join(get_args(Role))}" if "enum" in str(error) else None
            raise LocalError(f"workers[{i}]: {error}", field="workers", fix=fix) from None
        position = counts.get(member.role, 0)
        counts[member.role] = position + 1
        members.append(member if member.name else dataclasses.replace(member, name=f"{member.role}-{position}"))
    names = [m.name for m in members]
    for name in names:
        if names.count(name) > 1:
            raise LocalError(f"two workers are named {name}", field="workers.name", fix="give each its own name")
    return tuple(members)


def _unknown(name: str, known: list[str], kind: str) -> LocalError:
    near = difflib.get_close_matches(name, known, n=1)
    fix = f"did you mean {near[0]}?" if near else f"known ones: {', '.join(known)}"
    return LocalError(f"unknown {kind} {name}", field=name, fix=fix)


def to_environ(**sections: Any) -> dict[str, str]:
    """Settings as the ``KVBATON_*`` variables that give them back, for a process that we start."""
    variables = {}
    for section, settings in sections.items():
        for item in dataclasses.fields(settings):
            value = getattr(settings, item.name)
            if value is None:
                continue  # unset, as it is without the variable
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            variables[f"KVBATON_{section.upper()}_{item.name.upper()}"] = text
    return variables


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment from which every setting of ours is gone; the internal key too."""
    prefixes = tuple(f"KVBATON_{section.upper()}_" for section in _SECTIONS)
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(prefixes) and name != INTERNAL_KEY_VARIABLE
    }
