"""``kvbaton kv``, ``plan`` and ``advise``: the deciding half of the command line.

stdout carries the result, stderr the progress. Exit codes: 0 done, 1 the answer is no, 2 bad input, with one line that
names the field and the fix. Planner modules are imported inside the commands, so that ``--help`` stays instant.
"""

from __future__ import annotations

import gc
import gzip
import sys
from collections.abc import Callable
from functools import wraps
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvbaton.types import LocalError, RemoteError

if TYPE_CHECKING:
    from kvbaton.plan.advise import Advice, Window
    from kvbaton.plan.kv_report import KVAnswer


def refuses_bad_input(command: Callable[..., Any]) -> Callable[..., Any]:
    """Turn our own input errors into exit code 2 and one line."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (LocalError, RemoteError) as error:
            prefix = f"{error.field}: " if error.field else ""
            click.echo(f"kvbaton: {prefix}{error}", err=True)
            sys.exit(2)

    return run


def print_json(answer: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())


@click.command("kv")
@click.argument("model", required=False)
@click.option("--tokens", "-t", multiple=True, type=click.IntRange(1), help="Prompt length; repeat for more.")
@click.option("--kv-dtype", default="auto", show_default=True, help="auto, bf16, fp8, mxfp8, int8_token_head, ...")
@click.option("--tp", default=1, show_default=True, help="Tensor parallel ranks.")
@click.option("--pp", default=1, show_default=True, help="Pipeline stages.")
@click.option("--cp", default=1, show_default=True, help="Context parallel ranks.")
@click.option("--block-size", default=16, show_default=True, type=click.IntRange(1), help="Tokens a block.")
@click.option("--gpu", default="H100-SXM", show_default=True, help="For the prefill time behind the words.")
@click.option("--fabric", multiple=True, help="Only these fabrics; repeat for more.")
@click.option("--presets", is_flag=True, help="List GPUs, fabrics and prices with the source of each.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@refuses_bad_input
def kv_command(model: str | None, **options: Any) -> None:
    """KV bytes per token and per prompt for MODEL, and the time to move them over each fabric.

    MODEL is a config.json, a directory with one, or a preset such as Llama-3.1-70B.
    """
    from kvbaton.plan import hardware, kv_report
    from kvbaton.plan.kv_math import KVCost, Sharding, kv_format
    from kvbaton.plan.model_presets import find_preset
    from kvbaton.plan.model_shape import read_model

    if options["presets"]:
        _print_presets(options["as_json"])
        return
    if model is None:
        raise LocalError("give a config.json, a directory or a preset", field="MODEL", fix="or --presets")
    shape = read_model(model) if Path(model).exists() else find_preset(model)
    if shape is None:
        shape = read_model(model)  # says what is missing
    sharding = Sharding(tp=options["tp"], pp=options["pp"], cp=options["cp"])
    cost = KVCost(shape, kv_format(options["kv_dtype"], shape), sharding)
    fabrics = tuple(map(hardware.fabric, options["fabric"])) or tuple(hardware.FABRICS.values())
    gpu = hardware.gpu(options["gpu"])
    answer = kv_report.describe(cost, options["tokens"] or (8192, 32768), gpu, options["block_size"], fabrics)
    if options["as_json"]:
        print_json(answer)
    else:
        _print_kv(answer, gpu.name)
        click.echo(f"\n{gpu.name}: {gpu.source}")
        for each in fabrics:
            click.echo(f"{each.name}: {each.source}")


def _write(path: str, text: str, field: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise LocalError(f"cannot write {path}: {error.strerror}", field=field) from None


def _print_presets(as_json: bool) -> None:
    from kvbaton.plan import hardware

    gpus, fabrics, prices = tuple(hardware.GPUS.values()), tuple(hardware.FABRICS.values()), hardware.PRICE_EXAMPLES
    if as_json:
        print_json({"checked": hardware.CHECKED, "gpus": gpus, "fabrics": fabrics, "prices": prices})
        return
    click.echo(f"compared with their sources on {hardware.CHECKED}")
    for gpu in gpus:
        fp8 = "no" if gpu.fp8_tflops is None else f"{gpu.fp8_tflops:g}"
        click.echo(
            f"{gpu.name}: bf16 {gpu.bf16_tflops:g} and fp8 {fp8} TFLOPS dense, {gpu.memory_gb:g} GB at "
            f"{gpu.memory_gb_per_s:g} GB/s, link {gpu.link_gb_per_s:g} GB/s\n    {gpu.source}"
        )
    for each in fabrics:
        low, high = each.efficiency_low, each.efficiency
        click.echo(f"{each.name}: {each.gb_per_s:g} GB/s, of it {low:g} to {high:g}\n    {each.source}")
    for price in prices:
        click.echo(f"${price.usd_per_gpu_hour:.2f} a GPU hour: {price.what}, {price.as_of}\n    {price.source}")


def _print_kv(answer: KVAnswer, gpu_name: str) -> None:
    click.echo(f"{answer.model}, KV in {answer.kv_dtype}: {answer.token_bytes:,} B a token on each rank")
    for line in answer.formula:
        click.echo(f"  {line}")
    if answer.steady_token_bytes != answer.token_bytes:
        click.echo(f"  logical: {answer.steady_token_bytes:,} B a token once the windows are full")
    if answer.fixed_bytes:
        click.echo(f"  plus {answer.fixed_bytes:,} B of constant state a sequence")
    click.echo(f"  basis: {answer.basis}")
    for note in answer.notes:
        click.echo(f"  note: {note}")
    for row in answer.prompts:
        click.echo("")
        prefill = "" if row.prefill_s is None else f"; prefill about {row.prefill_s * 1e3:,.0f} ms on {gpu_name}"
        logical = "" if row.logical_bytes == row.rank_bytes else f" (logical {row.logical_bytes / 2**30:.3f})"
        click.echo(
            f"{row.prompt_tokens:,} tokens: {row.rank_bytes / 2**30:.3f} GiB a rank{logical}, "
            f"{row.wire_bytes / 2**30:.3f} GiB to move{prefill}"
        )
        click.echo(f"  {'fabric':<10} {'floor':>10} {'expected':>10} {'at worst':>10}  verdict")
        for each in row.fabrics:
            times = "".join(f" {t * 1e3:>7,.1f} ms" for t in (each.floor_s, each.expected_s, each.worst_s))
            click.echo(f"  {each.fabric:<10}{times}  {each.verdict}")


@click.command("plan")
@click.argument("scenario", type=click.Path(dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--html", type=click.Path(dir_okay=False, writable=True), help="Also write a report: one offline file.")
@click.option("--quick", is_flag=True, help="Fewer requests, candidates and runs: a rough answer sooner.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@refuses_bad_input
def plan_command(scenario: str, as_json: bool, html: str | None, quick: bool, quiet: bool) -> None:
    """Decide from SCENARIO (a TOML file) whether to split prefill from decode, and size both ways.

    Prints the verdict (split, stay, or not enough evidence), the pools, latencies, costs, and why. Exit code 0 whatever
    the verdict is.
    """
    from kvbaton.plan import report_html, report_text
    from kvbaton.plan.scenario import load
    from kvbaton.plan.verdict import plan

    wanted = load(scenario)
    if quick:
        search = msgspec.structs.replace(wanted.search, verify=2, sensitivity=False, precision=0.08)
        workload = msgspec.structs.replace(wanted.workload, requests=min(150, wanted.workload.requests))
        wanted = msgspec.structs.replace(wanted, search=search, workload=workload)
    number = count(1)

    def progress(line: str) -> None:
        if not quiet:
            click.echo(f"{next(number):>4}  {line}", err=True)

    gc.disable()  # nothing the simulations make forms cycles, and their records are many
    try:
        answer = plan(wanted, progress)
    finally:
        gc.enable()
    if html is not None:
        _write(html, report_html.render(answer), "--html")
        click.echo(f"report: {html}", err=True)
    if as_json:
        print_json(answer)
    else:
        click.echo(report_text.render(answer))


@click.command("advise")
@click.argument("sources", nargs=-1)
@click.option(
    "--interval", default=30.0, show_default=True, type=click.FloatRange(0.1), help="Seconds between scrapes."
)
@click.option("--before", multiple=True, type=click.Path(exists=True), help="Saved first scrape; one for each worker.")
@click.option("--after", multiple=True, type=click.Path(exists=True), help="Saved second scrape, in the same order.")
@click.option("--prometheus", help="Base URL of a Prometheus server that scrapes the workers.")
@click.option(
    "--log",
    type=click.Path(exists=True, dir_okay=False),
    help="The router's log, samples of `bench`, or records of requests, one JSON object a line.",
)
@click.option("--workers", type=click.IntRange(1), help="Workers behind --log; default: those it names.")
@click.option("--profile", type=click.Path(exists=True), help="Profile file: prices a token of each phase.")
@click.option("--write-scenario", type=click.Path(dir_okay=False), help="Write the traffic seen as a file for `plan`.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@refuses_bad_input
def advise_command(sources: tuple[str, ...], **options: Any) -> None:
    """Say what to tune first on a running fleet, and whether planning a split is worth it.

    SOURCES are the /metrics URLs of vLLM, SGLang or kvbaton workers, scraped twice. Exit code 0 when a split is worth
    planning or nothing speaks against it being looked at; 1 when the answer is no.
    """
    from kvbaton.cli import scrape
    from kvbaton.plan import advise
    from kvbaton.plan.profile_file import read_profile

    if options["log"]:
        seen = _from_log(Path(options["log"]), options["workers"])
    elif options["prometheus"]:
        seen = advise.window(*scrape.from_prometheus(options["prometheus"], options["interval"]), options["interval"])
    elif sources:
        seen = advise.window(*scrape.twice(sources, options["interval"]), options["interval"])
    else:
        before, after = ([_text(path, f"--{name}") for path in options[name]] for name in ("before", "after"))
        if not before or len(before) != len(after):
            raise LocalError("give metrics URLs, or as many --before as --after", field="SOURCES")
        seen = advise.window(before, after, options["interval"])
    if options["write_scenario"]:
        from kvbaton.plan.autoscale_drift import scenario_text

        _write(options["write_scenario"], scenario_text(seen), "--write-scenario")
        click.echo(f"wrote {options['write_scenario']}: check its model, hardware and limits", err=True)
    price = None
    if options["profile"]:
        step = read_profile(options["profile"]).step
        batch = max(1, round(seen.running / seen.workers)) if seen.running else 8
        price = advise.StepPrice(step.per_token_s, step.tpot_s(batch, 1000) / batch, step.source)
    advice = advise.advise(seen, price)
    if options["as_json"]:
        print_json(advice)
    else:
        _print_advice(advice)
    sys.exit(0 if advice.plan_a_split else 1)


def _text(path: str, field: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError(f"cannot read {path}: {error}", field=field) from None


def _from_log(path: Path, workers: int | None) -> Window:
    """Lines as they are; of a benchmark's samples the requests that went well."""
    from kvbaton.bench import stats
    from kvbaton.bench.samples import read_run
    from kvbaton.plan import advise_log

    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            first = lines.readline() if path.suffix != ".parquet" else ""
            if path.suffix != ".parquet" and not first.startswith('{"kind":"header"'):
                return advise_log.from_lines([first, *lines], workers)
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError(f"cannot read {path}: {error}", field="--log") from None
    rows = []
    for sample in read_run(path).measured():
        if not sample.ok:
            continue
        rows.append(
            advise_log.Logged(
                prompt_tokens=sample.usage_prompt_tokens or sample.prompt_tokens,
                output_tokens=sample.output_tokens,
                cached_tokens=sample.cached_tokens,
                ttft_s=stats.ttft_s(sample),
                tpot_s=stats.tpot_s(sample),
                gaps_s=tuple(stats.chunk_gaps_s(sample)),
                finished_at_s=sample.closed_s,
            )
        )
    return advise_log.from_records(rows, workers)


def _print_advice(advice: Advice) -> None:
    click.echo("plan a split: " + ("yes" if advice.plan_a_split else "no"))
    click.echo(f"  {advice.why}")
    rows = (
        ("prefill share of GPU time", advice.prefill_share, "{:.0%}", f" ({advice.prefill_share_source})"),
        ("of that, cache misses", advice.miss_share, "{:.0%}", ""),
        ("uncached prompt tokens a request", advice.uncached_tokens, "{:,.0f}", ""),
        ("prompt tokens for each output token", advice.prompt_per_output, "{:.1f}", ""),
        ("queueing share of TTFT", advice.queue_share_of_ttft, "{:.0%}", ""),
        ("p99 gap over median", advice.gap_ratio, "{:.1f}", ""),
        ("preemptions a request", advice.preemptions_per_request, "{:.3f}", ""),
    )
    for name, value, form, note in rows:
        click.echo(f"  {name}: {'not reported' if value is None else form.format(value)}{note}")
    click.echo("  tune first:")
    for number, text in enumerate(advice.tune_first, 1):
        click.echo(f"    {number}. {text}")


PLAN_COMMANDS: tuple[click.Command, ...] = (kv_command, plan_command, advise_command)
