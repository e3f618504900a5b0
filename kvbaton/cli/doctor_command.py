"""``kvbaton doctor``: what is wrong with a fleet, and the fix, before there is traffic.

Exit codes: 0 nothing that makes hand-offs fail; 1 something does, or nobody answered; 2 bad input.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvbaton.config import internal_key, load
from kvbaton.types import LocalError

if TYPE_CHECKING:
    from kvbaton.doctor.facts import Examination, Target


@click.command("doctor")
@click.argument("targets", nargs=-1)
@click.option("--pid", type=int, help="Process id of `kvbaton up`, when several fleets run here.")
@click.option("--config", type=click.Path(dir_okay=False, path_type=Path), help="Fleet file with [[workers]].")
@click.option("--measure/--no-measure", default=True, show_default=True, help="Make hand-offs between each pair.")
@click.option("--probe/--no-probe", default=True, show_default=True, help="Ask models of servers that are not ours.")
@click.option("--tokens", type=click.IntRange(1), default=1024, show_default=True, help="Prompt of a hand-off.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Hand-offs of each pair.")
@click.option("--timeout-s", type=click.FloatRange(1), default=60.0, show_default=True, help="For a model to answer.")
@click.option("--min-gb-per-s", type=click.FloatRange(0), default=0.0, help="A slower pair is an error.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def doctor_command(
    targets: tuple[str, ...], pid: int | None, config: Path | None, as_json: bool, min_gb_per_s: float, **how: Any
) -> int:
    """Look at every server of a fleet before any traffic, and say what is wrong and the fix.

    \b
        kvbaton doctor                                      the fleet that `kvbaton up` runs here
        kvbaton doctor --config fleet.toml                  the workers that a fleet file lists
        kvbaton doctor prefill=http://p:8000 decode=http://d:8000

    Servers are ours, vLLM's, SGLang's or TensorRT-LLM's; which, is found out. Read are versions, fingerprints or what
    an engine tells of them, block size, dtype, tensor parallelism, where peers are sent and whether that can be
    reached, and clocks; then each pair hands off a prompt. The fleet's key is read from KVBATON_INTERNAL_KEY,
    those of other servers from VLLM_API_KEY, SGLANG_API_KEY and TRTLLM_API_KEY.
    """
    from kvbaton.doctor.findings import diagnose
    from kvbaton.doctor.report import report_text

    found = asyncio.run(_examine(targets, pid, config, how))
    findings = diagnose(found, min_gb_per_s)
    if as_json:
        pairs = [{**msgspec.structs.asdict(pair), "gb_per_s": pair.gb_per_s} for pair in found.pairs]
        told = {"servers": found.servers, "pairs": pairs, "findings": findings}
        click.echo(msgspec.json.format(msgspec.json.encode(told)))
    else:
        click.echo(report_text(found, findings))
    return int(any(finding.severity == "error" for finding in findings))


async def _examine(given: tuple[str, ...], pid: int | None, config: Path | None, how: dict[str, Any]) -> Examination:
    from kvbaton.doctor.examine import How, examine
    from kvbaton.doctor.facts import KEY_VARIABLES, Keys

    targets, key = await _targets(given, pid, config)
    keys = Keys(key, **{engine: os.environ.get(name, "") for engine, name in KEY_VARIABLES.items()})
    num_tokens = how["tokens"] if how["measure"] else 0
    what = How(how["probe"], num_tokens, how["repeats"], how["timeout_s"])
    return await examine(targets, keys, what)


async def _targets(given: tuple[str, ...], pid: int | None, config: Path | None) -> tuple[list[Target], str]:
    from kvbaton.doctor.facts import Target, parse_target

    if sum((bool(given), config is not None, pid is not None)) > 1:
        raise LocalError("servers, --config and --pid each name a fleet", field="targets", fix="give one of them")
    if given:
        found: list[Target] = []
        for text in given:
            role = text.partition("=")[0].rpartition(":")[2]
            found.append(parse_target(text, sum(target.role == role for target in found)))
        return found, internal_key()
    if config is not None:
        members = load(config).workers
        if not members:
            raise LocalError(f"{config} lists no workers", field="config", fix="add [[workers]]")
        return [Target(one.name, one.role, one.url, one.kv_address) for one in members], internal_key()
    from kvbaton.router import control

    _, status = await control.the_one(pid)
    listed = [Target(one.name, one.role, one.url, one.kv_address) for one in status.processes if one.url]  # type: ignore[arg-type]
    return listed, status.key
