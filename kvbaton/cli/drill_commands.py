"""``kvbaton drill``: rehearses failures on a running fleet and says pass or fail for each.

Exit codes: 0 all passed, 1 some failed, 2 bad input. stdout carries the result, stderr the progress.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvbaton.types import LocalError

if TYPE_CHECKING:
    from kvbaton.drill.fleet import Target
    from kvbaton.drill.run import DrillRecord, Settings
    from kvbaton.drill.scenarios import Scenario

TINY = "tiny"


@click.command("drill")
@click.argument("url", required=False)
@click.option("--prefill", type=click.IntRange(1), help="Start a fleet for the drill: prefill workers.")
@click.option("--decode", type=click.IntRange(1), help="Start a fleet for the drill: decode workers.")
@click.option("--model", default="", help="Of that fleet: a model directory, or `tiny` for a random one.")
@click.option("--transport", type=click.Choice(["auto", "shm", "tcp", "nixl"]), default="tcp", show_default=True)
@click.option("--up-flag", multiple=True, help="More flags for that fleet, as in --up-flag=--threads=1.")
@click.option(
    "--fleet",
    "fleet_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Fleet file of the router at URL: its workers run on this machine and are killed by signals.",
)
@click.option("--api-key", envvar="OPENAI_API_KEY", help="What the router knows its clients by; never written down.")
@click.option("--pid", type=int, help="Process id of `kvbaton up`, when several fleets run here.")
@click.option("--kubernetes", metavar="NAMESPACE", help="The workers are pods there; they are killed by deleting them.")
@click.option("--router-selector", help="Label selector of the router's pods.  [default: those of `kvbaton deploy`]")
@click.option("--runs", type=click.IntRange(1), default=1, show_default=True, help="How often, each with its own seed.")
@click.option("--per-run", type=click.IntRange(0), default=0, help="Scenarios in one run, in turns.  [default: all]")
@click.option("--seed", type=int, default=0, show_default=True, help="What is broken when, and in which order.")
@click.option("--only", multiple=True, help="Scenarios, by name or by the beginning of it.")
@click.option("--list", "list_only", is_flag=True, help="Say what can be rehearsed, and do nothing.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=4.0, show_default=True, help="Requests/s.")
@click.option("--canary-every-s", type=click.FloatRange(0, min_open=True), default=0.3, show_default=True)
@click.option(
    "--patience",
    type=click.FloatRange(1.0),
    default=1.0,
    show_default=True,
    help="What multiplies every wait, for slow engines and machines.",
)
@click.option("--heal-s", type=float, default=90.0, show_default=True, help="For the fleet to be whole again.")
@click.option("--settle-s", type=float, default=60.0, show_default=True, help="Until nothing may be held any more.")
@click.option(
    "--report",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write report.html, .md and .json; keep the logs.",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def drill_command(only: tuple[str, ...], list_only: bool, as_json: bool, **given: Any) -> int:
    """Break a fleet on purpose and watch whether anybody notices.

    \b
        kvbaton drill --prefill 2 --decode 2 --model tiny     a fleet of its own
        kvbaton drill                                         the one that `kvbaton up` keeps here
        kvbaton drill http://router:8000 --kubernetes serving  pods

    Steady traffic and a canary run all the while, greedy, with answers recorded beforehand; every answer is compared.
    Processes are really killed: do not point it at a fleet whose users you cannot spare.
    """
    from kvbaton.drill.report import summary_text, write_reports
    from kvbaton.drill.run import Settings

    scenarios = choose(only)
    if list_only:
        show(scenarios, as_json)
        return 0
    settings = Settings(
        *(given["seed"], given["runs"], given["per_run"]),
        rate_per_s=given["rate"],
        settle_s=given["settle_s"],
        heal_s=given["heal_s"],
        patience=given["patience"],
        canary_every_s=given["canary_every_s"],
    )
    record = asyncio.run(_drill(given, scenarios, settings))
    if given["report"] is not None:
        for path in write_reports(record, given["report"]):
            click.echo(f"wrote {path}", err=True)
    click.echo(msgspec.json.encode(_plain(record)).decode() if as_json else summary_text(record))
    return 0 if record.passed else 1


def _plain(record: DrillRecord) -> dict[str, Any]:
    return {**msgspec.to_builtins(record), "passed": record.passed}


def choose(only: tuple[str, ...]) -> list[Scenario]:
    from kvbaton.drill.scenarios import SCENARIOS

    for name in only:
        if not any(scenario.name.startswith(name) for scenario in SCENARIOS):
            known = ", ".join(scenario.name for scenario in SCENARIOS)
            raise LocalError(f"no scenario begins with {name!r}", field="only", fix=f"there are {known}")
    return [s for s in SCENARIOS if not only or any(s.name.startswith(name) for name in only)]


def show(scenarios: list[Scenario], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([{"name": s.name, "title": s.title, "promise": s.promise.text} for s in scenarios]))
        return
    for scenario in scenarios:
        click.echo(f"{scenario.name:<26}{scenario.title}\n{'':<26}-> {scenario.promise.text}")


async def _drill(given: dict[str, Any], scenarios: list[Scenario], settings: Settings) -> DrillRecord:
    from kvbaton.drill.report import write_reports
    from kvbaton.drill.run import drill

    async with AsyncExitStack() as stack:
        target = await _target(given, stack)
        target.api_key = given["api_key"] or ""

        def keep(record: DrillRecord) -> None:
            if given["report"] is not None:
                write_reports(record, given["report"])

        return await drill(target, scenarios, settings, lambda line: click.echo(line, err=True), keep)


async def _target(given: dict[str, Any], stack: AsyncExitStack) -> Target:
    """What the arguments mean: a fleet to start, one of this machine, or one behind a router."""
    from kvbaton.drill import fleet
    from kvbaton.router import control

    own = given["prefill"] is not None or given["decode"] is not None
    if own and given["url"]:
        raise LocalError("the drill starts a fleet or takes a running one", field="url", fix="give one of the two")
    if own:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbaton-drill-")))
        logs = given["report"] / "logs" if given["report"] is not None else work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        flags = up_flags(given, work)
        return await stack.enter_async_context(fleet.started(flags, logs, _start_s(flags)))
    if given["kubernetes"] or given["fleet_file"] is not None:
        return await _elsewhere(given)
    found = await control.running()
    for path, status in found:
        if given["url"] and status.url == given["url"].rstrip("/"):
            return fleet.of_up(path, status)
    if given["url"]:
        fix = "drill it where `kvbaton up` runs, or give --fleet or --kubernetes"
        raise LocalError(f"nothing is known of the processes behind {given['url']}", field="url", fix=fix)
    return fleet.of_up(*await control.the_one(given["pid"]))


def up_flags(given: dict[str, Any], work: Path) -> list[str]:
    """Of the fleet that is started for the drill."""
    flags = ["--prefill", str(given["prefill"] or 1), "--decode", str(given["decode"] or 1)]
    flags += ["--transport", given["transport"], "--threshold-tokens", "0"]
    if given["model"] == TINY:
        from kvbaton.drill.tiny_model import write_tiny_model

        model = write_tiny_model(work / TINY)
        # Small chunks, so that a prefill takes several steps and can be hit in it; a limit that a burst reaches.
        flags += ["--model", str(model), "--dtype", "float32", "--kv-blocks", "1024", "--chunk-tokens", "64"]
        flags += ["--max-inflight", "128"]
    elif given["model"]:
        flags += ["--model", given["model"]]
    return flags + [part for flag in given["up_flag"] for part in flag.split("=", 1)]


def _start_s(flags: list[str]) -> float:
    """`up` has a deadline of its own, and says more than we could when it passes."""
    from kvbaton.cli.up import START_S
    from kvbaton.drill import fleet

    return fleet.START_S + max((START_S[word] for word in flags if word in START_S), default=0.0)


async def _elsewhere(given: dict[str, Any]) -> Target:
    from kvbaton.config import internal_key, load
    from kvbaton.drill import fleet
    from kvbaton.drill.killer import ROUTERS, Kubernetes

    urls: dict[str, str] = {}
    url = given["url"]
    if given["fleet_file"] is not None:
        settings = load(given["fleet_file"])
        urls = {worker.name: worker.url for worker in settings.workers}
        url = url or f"http://{settings.router.host}:{settings.router.port}"
    if not url:
        raise LocalError("where is the router?", field="url", fix="give its address")
    if not given["kubernetes"]:
        if not internal_key():
            raise LocalError("workers tell their process only with the fleet's key", field="KVBATON_INTERNAL_KEY")
        return fleet.of_router(url, None, urls, internal_key())
    killer = Kubernetes(given["kubernetes"], given["router_selector"] or ROUTERS)
    target = fleet.of_router(url, killer, urls, internal_key())
    page = await target.page() or {"members": []}
    await killer.check([member["name"] for member in page["members"]])
    return target
