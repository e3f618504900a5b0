"""An examination and its findings as text for a terminal. Knows nothing about how either came about."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.doctor.facts import Examination, ServerFacts
from kvbaton.doctor.findings import NO_RATE, Finding


def report_text(found: Examination, findings: Sequence[Finding]) -> str:
    lines = []
    for server in found.servers:
        lines.append(f"{server.name:<16} {server.role:<8} {_what(server)}")
    if found.pairs:
        lines.append("")
    for pair in found.pairs:
        rate = pair.gb_per_s
        meanwhile = " while prefill computed" if pair.cold else ""
        known = "" if rate is None else f" in {pair.seconds * 1e3:.2f} ms, {rate:.2f} GB/s{meanwhile}"
        how_fast = known or f"; {NO_RATE}"
        moved = f"{pair.num_bytes / 1e6:.2f} MB" if pair.num_bytes else "handed off"
        lines.append(f"{pair.prefill} -> {pair.decode}: {pair.trouble or moved + how_fast}")
    lines.append("")
    for finding in findings:
        lines.append(f"{finding.severity:<8} {finding.subject}: {finding.what}")
        lines.append(f"{'':<8} fix: {finding.fix}")
    num_errors, num_warnings = (sum(one.severity == kind for one in findings) for kind in ("error", "warning"))
    counted = f"{num_errors} error(s), {num_warnings} warning(s)"
    lines.append(counted if num_errors or num_warnings else "nothing is wrong")
    return "\n".join(lines)


def _what(server: ServerFacts) -> str:
    if server.trouble:
        return server.url
    parts = [
        f"{server.engine or 'unknown'} {server.version}".strip(),
        server.model,
        f"blocks of {server.block_size}" if server.block_size else "",
        f"KV {server.kv_dtype}" if server.kv_dtype else "",
        f"TP {server.tp_size or '?'}",
        f"context {server.max_context}" if server.max_context else "",
        f"KV at {server.kv_host}:{server.kv_port}" if server.kv_port and server.role != "decode" else "",
        f"hash {server.compatibility_hash[:12]}" if server.compatibility_hash else "",
        f"clock {server.skew_s:+.1f} s" if server.skew_s is not None and abs(server.skew_s) > 1 else "",
    ]
    if server.role == "router":
        parts = parts[:2]
    return ", ".join(part for part in parts if part)
