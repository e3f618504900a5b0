"""What is wrong with a fleet, by what was read of it, and the fix for each: one table of checks over plain facts.

An ``error`` makes hand-offs fail, or answers wrong; a ``warning`` costs time, memory or trust; an ``info`` is what an
engine keeps to itself, and nothing is wrong for it. Invariants: what is not known is never a finding of a difference;
each finding names who, what and the fix. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from kvbaton.doctor.facts import Examination, PairFacts, ServerFacts
from kvbaton.kv.compat import blocking, differences
from kvbaton.transfer.reach import is_own_machine

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
MAX_SKEW_S = 2.0  # HTTP tells whole seconds
NO_RATE = "the rate is not measured: its engine does not tell how long a transfer took"
_FIXES = {
    "protocol_version": "run one version of kvbaton on both",
    "model_revision": "point both at the same copy of the model, and run one version of an engine behind both; "
    "another revision's KV is noise to it",
    "num_layers": "serve the same model on both",
    "num_kv_heads": "serve the same model on both",
    "head_dim": "serve the same model on both",
    "kv_dtype": "start both with the same --kv-dtype and --dtype",
    "rope": "serve the same model configuration on both: its rope parameters differ",
}


class Finding(msgspec.Struct, frozen=True):
    severity: Severity
    code: str  # stable, for programs
    subject: str  # a server, or prefill -> decode
    what: str
    fix: str


def diagnose(found: Examination, min_gb_per_s: float = 0.0) -> list[Finding]:
    """Errors first, then warnings, otherwise in the order of the servers."""
    findings = [*_pools(found.servers)]
    for server in found.servers:
        findings += _server(server, found.servers)
    for prefill, decode in pairs_of(found.servers):
        findings += pair_findings(prefill, decode)
    for pair in found.pairs:
        findings += _measured(pair, min_gb_per_s)
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def pairs_of(servers: Sequence[ServerFacts]) -> list[tuple[ServerFacts, ServerFacts]]:
    """Every prefill and decode server between which KV may have to move; the engines behind ours among themselves."""
    readable = [server for server in servers if not server.trouble]
    return [
        (prefill, decode)
        for prefill in readable
        for decode in readable
        if prefill.role == "prefill" and decode.role == "decode" and bool(prefill.behind) == bool(decode.behind)
    ]


def _pools(servers: Sequence[ServerFacts]) -> Iterator[Finding]:
    roles = [server.role for server in servers if server.role != "router"]
    if servers and not roles:
        fix = "name its workers, too; --pid or --config do"
        yield Finding("warning", "no-workers", "fleet", "a router was looked at, and no worker", fix)
    if roles and "prefill" not in roles and "both" not in roles:
        yield Finding("warning", "no-prefill", "fleet", "there is no prefill server", "decode servers compute prompts")
    if roles and "decode" not in roles and "both" not in roles:
        fix = "add a decode server, or serve with --colocated"
        yield Finding("error", "no-decode", "fleet", "there is no decode server", fix)


def _server(server: ServerFacts, servers: Sequence[ServerFacts]) -> Iterator[Finding]:
    name = server.name
    if server.trouble:
        fix = server.remedy or f"see whether {server.url} runs and answers there"
        yield Finding("error", "unreadable", name, server.trouble, fix)
        return
    if server.says_role is not None and server.says_role != server.role:
        what = f"it says its role is {server.says_role}, not {server.role}"
        yield Finding("error", "role", name, what, f"start it with --role {server.role}, or list it as it is")
    if server.state not in ("", "serving"):
        yield Finding("warning", "state", name, f"it is {server.state}", "wait until it serves")
    yield from _connector(server, servers)
    if server.skew_s is not None and abs(server.skew_s) > MAX_SKEW_S:
        what = f"its clock is {abs(server.skew_s):.0f} s {'ahead of' if server.skew_s > 0 else 'behind'} ours"
        yield Finding("warning", "clock", name, what, "run a time service on every host")
    for member in server.members:
        yield Finding("error", "member", name, member, "see the findings about it, and its log")
    yield from _address(server, servers)
    for unread in server.unread:
        yield Finding("warning", "unread", name, unread, "what could not be read was not checked")
    for untold in server.untold:
        yield Finding("info", "untold", name, untold, "compare what both sides were started with")


def _connector(server: ServerFacts, servers: Sequence[ServerFacts]) -> Iterator[Finding]:
    """Whether it hands off KV at all; who does both need not. vLLM's has figures of its own, or nobody knows."""
    others = [other for other in servers if other.connector_name]
    unknown = server.engine == "vllm" and not server.connector_name
    if server.connector is False and server.role != "both":
        fix = "start it with a KV connector (vLLM: --kv-transfer-config; SGLang: --disaggregation-mode)"
        what = "it offers no KV: it was started without a connector"
        yield Finding("error", "no-connector", server.name, what, fix)
    elif unknown and others and server.role != "both":
        what = f"it shows no figures of a KV connector, where {others[0].name} has {others[0].connector_name}"
        fix = "start it with the --kv-transfer-config of its peers"
        yield Finding("error", "no-connector", server.name, what, fix)
    elif unknown:
        what = "which KV connector it has, if any, is not known: it shows no figures of one"
        fix = "see that its --kv-transfer-config is that of its peers"
        yield Finding("info", "connector-unknown", server.name, what, fix)


def _address(server: ServerFacts, servers: Sequence[ServerFacts]) -> Iterator[Finding]:
    """Where peers are sent for its KV."""
    if not server.kv_host or server.role == "decode":
        return
    at = f"{server.kv_host}:{server.kv_port}"
    elsewhere = [
        other.name
        for other in servers
        if other.role == "decode" and not is_own_machine(_host(other)) and not other.behind
    ]
    mooncake = server.connector_name == "MooncakeConnector"
    if is_own_machine(server.kv_host) and (elsewhere or not is_own_machine(_host(server))):
        variable = "VLLM_NIXL_SIDE_CHANNEL_HOST" if server.engine == "vllm" and not mooncake else "--kv-host"
        what = f"peers are sent to {at}, which is their own machine"
        yield Finding("error", "localhost", server.name, what, f"set {variable} to an address that peers reach")
    elif server.kv_trouble:
        fix = "open the port between the hosts, or name an address that peers reach"
        if mooncake or server.bootstrap_port:
            fix += "; --engine-bootstrap-port is the VLLM_MOONCAKE_BOOTSTRAP_PORT of the prefill servers"
        yield Finding("error", "kv-port", server.name, f"{at}: {server.kv_trouble}", fix)


def pair_findings(prefill: ServerFacts, decode: ServerFacts) -> Iterator[Finding]:
    """What two servers tell that keeps KV from moving between them, or makes it slow."""
    subject = f"{prefill.name} -> {decode.name}"
    if prefill.engine != decode.engine:
        what = f"{prefill.engine} on one side, {decode.engine} on the other"
        yield Finding("error", "engine", subject, what, "KV is handed off between servers of one engine only")
        return
    if prefill.fingerprint is not None and decode.fingerprint is not None:
        for one in blocking(differences(prefill.fingerprint, decode.fingerprint)):
            what = f"{one.field}: {one.ours} against {one.theirs}"
            yield Finding("error", f"fingerprint-{one.field}", subject, what, _FIXES[one.field])
    names = (prefill.connector_name, decode.connector_name)
    if all(names) and names[0] != names[1]:
        what = f"{names[0]} on one side, {names[1]} on the other"
        yield Finding("error", "connector", subject, what, "start both with the same KV connector")
    yield from _versions(prefill, decode, subject)
    if prefill.engine == "sglang":
        pass  # it is asked by token ids, and calls a model by its path if it is told nothing else
    elif prefill.model and decode.model and prefill.model != decode.model:
        what = f"they serve {prefill.model} and {decode.model}"
        yield Finding("error", "model", subject, what, "serve one model under one name on both")
    yield from _formats(prefill, decode, subject)
    if 0 < prefill.max_context < decode.max_context:
        what = f"the prefill side takes {prefill.max_context} tokens, the decode side {decode.max_context}"
        fix = "longer prompts are computed where they decode; give both the same --max-context"
        yield Finding("warning", "max-context", subject, what, fix)


def _versions(prefill: ServerFacts, decode: ServerFacts, subject: str) -> Iterator[Finding]:
    both = bool(prefill.version and decode.version)
    if both and prefill.version != decode.version:
        severity: Severity = "warning" if prefill.engine == "kvbaton" else "error"
        what = f"version {prefill.version} against {decode.version}"
        yield Finding(severity, "version", subject, what, f"run one version of {prefill.engine} on both")
    hashes = (prefill.compatibility_hash, decode.compatibility_hash)
    if all(hashes) and hashes[0] != hashes[1]:
        what = "their compatibility hashes differ, so every transfer will be refused"
        yield Finding("error", "compatibility-hash", subject, what, _likely(prefill, decode))
    if prefill.model_path and decode.model_path and prefill.model_path != decode.model_path:
        what = f"the model is {prefill.model_path} on one and {decode.model_path} on the other"
        fix = "name it by the same path on both: the path is part of the compatibility hash"
        yield Finding("error", "model-path", subject, what, fix)


def _likely(prefill: ServerFacts, decode: ServerFacts) -> str:
    """What of that which goes into the hash is known to differ."""
    known = {"version": "version", "model_path": "path of the model", "kv_dtype": "KV dtype", "attention": "attention"}
    causes = []
    for field, words in known.items():
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours and theirs and ours != theirs:
            causes.append(f"{words} ({ours} against {theirs})")
    return f"make equal: {', '.join(causes)}" if causes else "make version, model, dtype and attention backend equal"


def _formats(prefill: ServerFacts, decode: ServerFacts, subject: str) -> Iterator[Finding]:
    told = prefill.fingerprint is not None and decode.fingerprint is not None  # with their fingerprints
    if prefill.kv_dtype and decode.kv_dtype and prefill.kv_dtype != decode.kv_dtype and not told:
        what = f"KV is {prefill.kv_dtype} on one and {decode.kv_dtype} on the other"
        yield Finding("error", "kv-dtype", subject, what, "start both with the same KV dtype")
    if prefill.block_size and decode.block_size and prefill.block_size != decode.block_size:
        what = f"blocks of {prefill.block_size} tokens against {decode.block_size}"
        if prefill.engine == "kvbaton":
            fix = "it works, with smaller copies; the same --block-size on both is faster"
            yield Finding("warning", "block-size", subject, what, fix)
        else:
            yield Finding("error", "block-size", subject, what, "start both with the same block (page) size")
    if prefill.kv_layout and decode.kv_layout and prefill.kv_layout != decode.kv_layout:
        what = f"KV layout {prefill.kv_layout} against {decode.kv_layout}"
        yield Finding("warning", "kv-layout", subject, what, "start both with the same KV layout")
    small, large = sorted((prefill.tp_size, decode.tp_size))
    if small and large % small and prefill.engine != "kvbaton":  # ours share out heads in any way
        what = f"tensor parallelism {prefill.tp_size} against {decode.tp_size}"
        yield Finding("error", "tp", subject, what, "one must divide the other")


def _measured(pair: PairFacts, min_gb_per_s: float) -> Iterator[Finding]:
    subject = f"{pair.prefill} -> {pair.decode}"
    if pair.trouble:
        fix = "see the findings about these two, and the logs of both"
        yield Finding("error", "hand-off", subject, f"a hand-off failed: {pair.trouble}", fix)
    elif pair.gb_per_s is None and min_gb_per_s:
        fix = "look at what its engine's own figures say under traffic"
        yield Finding("warning", "unmeasured", subject, f"{NO_RATE}; {min_gb_per_s:g} GB/s were asked for", fix)
    elif (rate := pair.gb_per_s) is not None and rate < min_gb_per_s:
        what = f"{rate:.2f} GB/s, less than the {min_gb_per_s:g} that were asked for"
        severity: Severity = "warning" if pair.cold else "error"
        what += ", while prefill computed" if pair.cold else ""
        yield Finding(severity, "slow", subject, what, "look at the link: `kvbaton link` between these hosts")


def _host(server: ServerFacts) -> str:
    return urlsplit(server.url).hostname or ""
