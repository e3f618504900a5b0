"""``kvbaton soak``: a long run of traces against a fleet that is broken again and again.

Exit codes: 0 passed, 1 did not, 2 bad input. stdout carries the result, stderr the progress.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import msgspec

from kvbaton.cli.drill_commands import TINY


@click.command("soak")
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="Of load and faults."
)
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Where lengths and shared prefixes come from; several are mixed.  [default: made up]",
)
@click.option("--prefill", type=click.IntRange(1), default=2, show_default=True, help="Prefill workers to begin with.")
@click.option("--decode", type=click.IntRange(1), default=2, show_default=True, help="Decode workers to begin with.")
@click.option("--model", default="", help="A model directory, or `tiny` for a random one.  [default: as `up`]")
@click.option("--transport", type=click.Choice(["auto", "shm", "tcp", "nixl"]), default="tcp", show_default=True)
@click.option("--up-flag", multiple=True, help="More flags for the fleet, as in --up-flag=--threads=1.")
@click.option(
    "--api-key", envvar="OPENAI_API_KEY", help="For a fleet with `--up-flag=--api-keys=FILE`; never written down."
)
@click.option(
    "--load",
    type=click.FloatRange(0, min_open=True),
    default=0.8,
    show_default=True,
    help="Share of the goodput that is measured first.",
)
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Requests/s, instead of measuring goodput.")
@click.option(
    "--first-rate",
    type=click.FloatRange(0, min_open=True),
    default=2.0,
    show_default=True,
    help="Where the search for goodput begins.",
)
@click.option("--ttft-slo-s", type=float, default=2.0, show_default=True, help="For goodput.")
@click.option("--tpot-slo-s", type=float, default=0.15, show_default=True, help="For goodput.")
@click.option(
    "--fault-every-s",
    type=click.FloatRange(0, min_open=True),
    default=25.0,
    show_default=True,
    help="Pause between two faults, on average.",
)
@click.option("--autoscale/--no-autoscale", default=True, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="What is asked and broken, in which order.")
@click.option(
    "--report",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write soak.json and soak.txt there; keep the logs.",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")  # fmt: skip
def soak_command(**given: Any) -> int:
    """Keep a fleet at a share of its goodput for a long time and break it all the while.

    \b
        kvbaton soak --minutes 30 --trace conversation_trace.jsonl --trace AzureLLMInferenceTrace_conv.csv
        kvbaton soak --minutes 2 --model tiny

    It starts a fleet of its own, with the autoscaler on, and kills, freezes and restarts its processes, slows and cuts
    the ways between them, rolls its pools over and has clients hang up. It passes when every request is accounted for,
    every answer that is known beforehand is right, and at rest nothing is held and nothing has grown.
    """
    from kvbaton.drill.soak import Ended, Settings
    from kvbaton.drill.soak_verdict import summary

    settings = Settings(
        minutes=given["minutes"], seed=given["seed"], load=given["load"], rate_per_s=given["rate"] or 0.0,
        first_rate_per_s=given["first_rate"],
        ttft_slo_s=given["ttft_slo_s"], tpot_slo_s=given["tpot_slo_s"], fault_every_s=given["fault_every_s"],
    )  # fmt: skip
    ended: Ended = asyncio.run(_soak(given, settings))
    record = ended.after_the_fleet()
    text = summary(record)
    plain = msgspec.json.format(msgspec.json.encode({**msgspec.to_builtins(record), "passed": record.passed}))
    if given["report"] is not None:
        (given["report"] / "soak.json").write_bytes(plain + b"\n")
        (given["report"] / "soak.txt").write_text(text + "\n")
    click.echo(plain.decode() if given["as_json"] else text)
    return 0 if record.passed else 1


async def _soak(given: dict[str, Any], settings: Any) -> Any:
    from kvbaton.drill import fleet
    from kvbaton.drill.soak import soak
    from kvbaton.drill.soak_load import made_up
    from kvbaton.plan.workload import read_trace

    traces = [read_trace(path, random.Random(settings.seed)) for path in given["traces"]] or made_up(settings.seed)
    async with AsyncExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbaton-soak-")))
        logs = given["report"] / "logs" if given["report"] is not None else work / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        model_dir = _model(given["model"], work)
        target = await stack.enter_async_context(fleet.started(_flags(given, model_dir), logs))
        target.api_key = given["api_key"] or ""
        return await soak(target, traces, model_dir, settings, lambda line: click.echo(line, err=True))


def _model(name: str, work: Path) -> Path:
    if name == TINY:
        from kvbaton.drill.tiny_model import write_tiny_model

        return write_tiny_model(work / TINY)
    if name:
        return Path(name)
    from kvbaton.engine.weights import default_model_dir

    return default_model_dir()


def _flags(given: dict[str, Any], model_dir: Path) -> list[str]:
    prefill, decode = given["prefill"], given["decode"]
    flags = ["--prefill", str(prefill), "--decode", str(decode), "--transport", given["transport"]]
    # A short prompt too is handed over at times: what is to be shown is not the fastest way.
    flags += ["--model", str(model_dir), "--threshold-tokens", "64", "--canary-interval", "2", "--no-ui"]
    # So few blocks that they change hands all the time; each is touched soon, and then memory stands still.
    flags += ["--kv-blocks", "640", "--chunk-tokens", "128", "--max-inflight", "128"]
    if given["model"] == TINY:
        flags += ["--dtype", "float32"]
    if given["autoscale"]:
        flags += ["--autoscale", "--prefill-max", str(prefill + 1), "--decode-max", str(decode + 1)]
        flags += ["--scale-interval-s", "3", "--scale-sequences", "6", "--scale-shrink-after-s", "45"]
        flags += ["--scale-start-s", "6"]
    return flags + [part for flag in given["up_flag"] for part in flag.split("=", 1)]
