"""``kvbaton bench``, ``compare``, ``verify``, ``profile`` and ``link``: the measuring half of the command line.

stdout carries the result, stderr the progress. Exit codes: 0 done; 1 the answer is no (a gate was missed, too many
requests failed, the client was the bottleneck, answers disagree); 2 bad input. Modules that measure are imported
inside the commands, so that ``--help`` stays instant.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Coroutine
from functools import reduce, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvbaton.types import LocalError, RemoteError

if TYPE_CHECKING:
    from kvbaton.bench.cost import Fleet
    from kvbaton.bench.stats import Gates
    from kvbaton.bench.workload import LoadSpec


def says_whose_fault(command: Callable[..., Any]) -> Callable[..., Any]:
    """Our own input errors end with 2, an endpoint's with 1; one line either way."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (LocalError, RemoteError) as error:
            field = f"{error.field}: " if error.field else ""
            click.echo(f"kvbaton: {field}{error}", err=True)
            sys.exit(2 if isinstance(error, LocalError) else 1)

    return run


def run_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """On uvloop where it is installed: its reads are cheaper, so their stamps are earlier."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.run(work)
    return uvloop.run(work)


def options(*added: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several click options as one decorator, in the order they are written."""
    return lambda command: reduce(lambda wrapped, option: option(wrapped), reversed(added), command)


def print_json(answer: Any) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())


load_options = options(
    click.option("--endpoint", type=click.Choice(["chat", "completions"]), default="chat", show_default=True),
    click.option("--model", default="", help="Model name to ask for.  [default: the first the endpoint lists]"),
    click.option(
        "--arrivals",
        type=click.Choice(["poisson", "gamma", "constant", "closed", "trace"]),
        default="poisson",
        show_default=True,
        help="closed: --concurrency users, each sends when its last answer ended; trace: as recorded.",
    ),
    click.option("--rate", type=float, default=1.0, show_default=True, help="Requests per second."),
    click.option("--cv", type=float, default=1.0, show_default=True, help="Burstiness of gamma arrivals."),
    click.option("--concurrency", type=click.IntRange(1), default=1, show_default=True, help="Users of a closed loop."),
    click.option("--max-concurrency", type=click.IntRange(1), help="Limit in flight; waiting counts as latency."),
    click.option("--duration", type=float, default=30.0, show_default=True, help="Steady window, seconds."),
    click.option("--requests", "num_requests", type=click.IntRange(1), help="Stop after this many."),
    click.option("--warmup", type=click.IntRange(0), default=2, show_default=True, help="Requests sent before, apart."),
    click.option("--keep-warmup", is_flag=True, help="Count the warm-up in the numbers."),
    click.option("--ramp", type=float, default=0.0, show_default=True, help="Seconds of rising rate, left out."),
    click.option("--cooldown", type=float, default=0.0, show_default=True, help="Seconds of load after, left out."),
    click.option("--input", "input_", default="256", show_default=True, help="Prompt tokens, see LENGTHS."),
    click.option("--output", default="64", show_default=True, help="Output tokens, see LENGTHS."),
    click.option("--trace", type=click.Path(exists=True, dir_okay=False), help="Mooncake, Azure, ShareGPT, plain."),
    click.option("--trace-speed", type=float, default=1.0, show_default=True, help="Replay so many times as fast."),
    click.option("--trace-scale", type=float, default=1.0, show_default=True, help="Lengths times this."),
    click.option("--shared-prefix", type=click.IntRange(0), default=0, show_default=True, help="Tokens all share."),
    click.option("--prefix-groups", type=click.IntRange(1), default=1, show_default=True, help="Different prefixes."),
    click.option("--prompt-format", type=click.Choice(["text", "ids"]), default="text", show_default=True),
    click.option("--tokenizer", default="", help="Directory with tokenizer.json, or none.  [default: the model's]"),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds for one answer."),
    click.option("--stop-at-eos", is_flag=True, help="Do not send ignore_eos (hosted endpoints refuse it)."),
    click.option("--extra-body", default="{}", help="JSON object added to every request."),
    click.option("--max-lag-ms", type=float, default=10.0, show_default=True, help="Client lag that voids the run."),
)
gate_options = options(
    click.option("--ttft-slo", type=float, help="Gate on TTFT, milliseconds."),
    click.option("--tpot-slo", type=float, help="Gate on TPOT, milliseconds."),
    click.option("--attainment", type=float, default=0.9, show_default=True, help="Share that must meet both gates."),
)
fleet_options = options(
    click.option("--gpus", type=float, default=0.0, help="GPUs of a colocated fleet."),
    click.option("--prefill-gpus", type=float, default=0.0),
    click.option("--decode-gpus", type=float, default=0.0),
    click.option("--gpu-price", type=float, default=0.0, help="Price of a GPU-hour, for every pool."),
    click.option("--prefill-price", type=float, help="Price of a prefill GPU-hour.  [default: --gpu-price]"),
    click.option("--decode-price", type=float, help="Price of a decode GPU-hour.  [default: --gpu-price]"),
)


def load_spec(url: str, given: dict[str, Any]) -> LoadSpec:
    """The load options of a command as a specification; takes them out of ``given``."""
    from kvbaton.bench.workload import LoadSpec

    try:
        extra = json.loads(given.pop("extra_body"))
    except ValueError as error:
        raise LocalError(f"not JSON: {error}", field="extra_body") from error
    if not isinstance(extra, dict):
        raise LocalError("it must be a JSON object", field="extra_body")
    return LoadSpec(
        url=url,
        endpoint=given.pop("endpoint"),
        model=given.pop("model"),
        arrivals=given.pop("arrivals"),
        rate_per_s=given.pop("rate"),
        cv=given.pop("cv"),
        concurrency=given.pop("concurrency"),
        max_concurrency=given.pop("max_concurrency"),
        warmup_requests=given.pop("warmup"),
        ramp_s=given.pop("ramp"),
        steady_s=given.pop("duration"),
        cooldown_s=given.pop("cooldown"),
        num_requests=given.pop("num_requests"),
        input=given.pop("input_"),
        output=given.pop("output"),
        trace=given.pop("trace"),
        trace_speed=given.pop("trace_speed"),
        trace_scale=given.pop("trace_scale"),
        shared_prefix_tokens=given.pop("shared_prefix"),
        shared_prefix_groups=given.pop("prefix_groups"),
        prompt_format=given.pop("prompt_format"),
        tokenizer=given.pop("tokenizer"),
        seed=given.pop("seed"),
        timeout_s=given.pop("timeout"),
        ignore_eos=not given.pop("stop_at_eos"),
        extra_body=extra,
        max_lag_ms=given.pop("max_lag_ms"),
        keep_warmup=given.pop("keep_warmup"),
    )


def gates_of(given: dict[str, Any]) -> Gates | None:
    from kvbaton.bench.stats import Gates

    ttft, tpot, share = given.pop("ttft_slo"), given.pop("tpot_slo"), given.pop("attainment")
    if ttft is None and tpot is None:
        return None
    if not 0 < share < 1:
        raise LocalError(f"a share between 0 and 1, got {share}", field="attainment")
    infinite = float("inf")
    return Gates(infinite if ttft is None else ttft / 1e3, infinite if tpot is None else tpot / 1e3, share)


def fleet_of(given: dict[str, Any]) -> Fleet | None:
    from kvbaton.bench.cost import Fleet

    price = given.pop("gpu_price")
    prefill_price, decode_price = given.pop("prefill_price"), given.pop("decode_price")
    fleet = Fleet(
        prefill_gpus=given.pop("prefill_gpus"),
        decode_gpus=given.pop("decode_gpus"),
        colocated_gpus=given.pop("gpus"),
        prefill_price_per_hour=price if prefill_price is None else prefill_price,
        decode_price_per_hour=price if decode_price is None else decode_price,
        colocated_price_per_hour=price,
    )
    return fleet if fleet.total_gpus else None


def headers_of(api_key: str | None, header: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for line in header:
        name, separator, value = line.partition(":")
        if not separator:
            raise LocalError(f"{line!r} has no colon", field="header", fix="give it as 'Name: value'")
        found[name.strip()] = value.strip()
    if api_key:
        found["authorization"] = f"Bearer {api_key}"
    return found


@click.command("bench")
@click.argument("url")
@load_options
@gate_options
@fleet_options
@click.option("--goodput", is_flag=True, help="Search the highest rate that meets the gates, starting at --rate.")
@click.option("--trials", type=click.IntRange(1), default=12, show_default=True, help="Runs the search may take.")
@click.option("--stall-ms", type=float, default=500.0, show_default=True, help="A gap this long is a stall.")
@click.option("--max-errors", type=float, default=0.01, show_default=True, help="Share of failures that is a no.")
@click.option("--metrics-url", multiple=True, help="Scrape these for KV transfers.  [default: URL]")
@click.option("--header", multiple=True, help="'Name: value' sent with every request.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Bearer token; never written to a file.")
@click.option(
    "--samples", type=click.Path(dir_okay=False, path_type=Path), help="Keep every chunk: .jsonl or .jsonl.gz"
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@says_whose_fault
def bench_command(url: str, **given: Any) -> None:
    """Open-loop load on the OpenAI-compatible endpoint at URL; what its users feel, with intervals.

    A request's latency counts from when it was due, not from when the client got round to it. LENGTHS are N,
    uniform:LOW:HIGH, normal:MEAN:SD, lognormal:MEDIAN:SIGMA, exp:MEAN or mix:N@SHARE,N@SHARE.
    """
    from kvbaton.bench.runner import run_load
    from kvbaton.bench.summary import summarize_run, table
    from kvbaton.bench.watch import Watch

    spec, gates, fleet = load_spec(url, given), gates_of(given), fleet_of(given)
    headers = headers_of(given["api_key"], given["header"])
    watch = Watch(given["quiet"])
    if given["goodput"]:
        _goodput(spec, gates, headers, given, watch)
        return
    work = run_load(spec, headers, given["metrics_url"], given["samples"], watch)
    run = run_loop(watch.during(work, "bench"))
    summary = summarize_run(run, gates, fleet, given["stall_ms"] / 1e3, spec.keep_warmup)
    if given["as_json"]:
        print_json({"config": run.header.config, "versions": run.header.versions, **msgspec.to_builtins(summary)})
    else:
        click.echo(table(summary))
    missed = summary.attainment is not None and gates is not None and summary.attainment.share < gates.attainment
    if missed or not summary.valid or summary.counts.error_share > given["max_errors"]:
        sys.exit(1)


def _goodput(spec: LoadSpec, gates: Gates | None, headers: dict[str, str], given: dict[str, Any], watch: Any) -> None:
    from kvbaton.bench.goodput_run import search_goodput

    if gates is None:
        raise LocalError("goodput needs gates", field="ttft_slo", fix="give --ttft-slo and --tpot-slo")

    def tell(line: str) -> None:
        click.echo(line, err=True)

    found = run_loop(watch.during(search_goodput(spec, gates, headers, given["trials"], watch, tell), "goodput"))
    if given["as_json"]:
        print_json(found)
    else:
        click.echo(f"goodput    {found.rate_per_s:.3g} requests/s at {found.target:.0%} of requests in both gates")
        if found.failed_at_per_s is not None:
            click.echo(f"           {found.failed_at_per_s:.3g} requests/s surely fails")
        for rate, share, low, high, trials in found.trials:
            click.echo(f"           {rate:>8.3g}/s  {share:.1%} ({low:.1%} .. {high:.1%}), {trials} trials")
        if found.note:
            click.echo(f"note       {found.note}")
    if found.rate_per_s == 0:
        sys.exit(1)


@click.command("compare")
@click.option("--colocated", type=click.IntRange(1), help="Start a single pool of so many workers as arm A.")
@click.option("--prefill", type=click.IntRange(1), help="Start a split fleet as arm B: prefill workers.")
@click.option("--decode", type=click.IntRange(1), help="Start a split fleet as arm B: decode workers.")
@click.option("--url-a", help="Arm A is this running deployment instead.")
@click.option("--url-b", help="Arm B is this running deployment instead.")
@click.option("--up-flag", multiple=True, help="Flag for both started fleets, as in --up-flag=--threads=1.")
@click.option("--rates", default="", help="More rates to draw latency against rate: 0.5,1,2. --rate is the verdict's.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Rounds of A B B A.")
@click.option(
    "--tune",
    multiple=True,
    help="Flags to try on arm A first, as in --tune '--max-batch-tokens 128'; the best go to both arms.",
)
@click.option(
    "--objective", default="itl:95", show_default=True, help="Latency the verdict is about: metric:percentile."
)
@click.option("--title", default="One pool or two", show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="compare", show_default=True)
@click.option("--stall-ms", type=float, default=500.0, show_default=True, help="A gap this long is a stall.")
@click.option(
    "--max-errors", type=float, default=0.01, show_default=True, help="Share of failures that proves nothing."
)
@click.option("--header", multiple=True, help="'Name: value' sent with every request.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Bearer token; never written to a file.")
@load_options
@gate_options
@fleet_options
@click.option("--quiet", is_flag=True, help="No progress bar.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@says_whose_fault
def compare_command(**given: Any) -> None:
    """Colocated against disaggregated on the same requests, interleaved A B B A, with a verdict.

    Writes report.html (one file, opens offline), report.md, report.json and the raw samples to --out. Arms are started
    with `kvbaton up`, or are any two addresses. Exit code 1 when the verdict is "do not split" or "not proven".
    """
    from kvbaton.bench.compare import compare
    from kvbaton.bench.report import comparison_rows, write_reports
    from kvbaton.bench.watch import Watch

    spec = _compare_spec(given)
    watch = Watch(given["quiet"])
    work = compare(spec, lambda line: click.echo(line, err=True), watch)
    found = run_loop(watch.during(work, "compare"))
    paths = write_reports(found, spec.directory)
    if given["as_json"]:
        print_json(found.result)
    else:
        for row in comparison_rows(found.result.rates[0]):
            click.echo(f"{row[0]:<34}{row[1]:<28}{row[2]:<28}{row[3]:<22}{row[5]}")
        click.echo(f"\n{found.result.verdict.sentence}")
        click.echo(f"see {paths[0]}", err=True)
    if found.result.verdict.decision != "split":
        sys.exit(1)


def _compare_spec(given: dict[str, Any]) -> Any:
    from kvbaton.bench.arms import Arm
    from kvbaton.bench.compare import CompareSpec
    from kvbaton.bench.cost import Fleet

    load, gates = load_spec("", given), gates_of(given)
    given["gpus"], given["prefill_gpus"], given["decode_gpus"] = (
        given["gpus"] or float(given["colocated"] or 0),
        given["prefill_gpus"] or float(given["prefill"] or 0),
        given["decode_gpus"] or float(given["decode"] or 0),
    )
    both = fleet_of(given) or Fleet()
    price = both.colocated_price_per_hour
    fleet_a = Fleet(colocated_gpus=both.colocated_gpus, colocated_price_per_hour=price)
    fleet_b = msgspec.structs.replace(both, colocated_gpus=0.0)
    flags = tuple(part for flag in given["up_flag"] for part in flag.split("=", 1))
    up_a = ("--colocated", str(given["colocated"]), *flags) if given["colocated"] else ()
    up_b = ("--prefill", str(given["prefill"]), "--decode", str(given["decode"]), *flags)
    split = given["prefill"] and given["decode"]
    for name, started, address in (("a", given["colocated"], given["url_a"]), ("b", split, given["url_b"])):
        if bool(started) == bool(address):
            fix = f"give --url-{name}, or {'--colocated N' if name == 'a' else '--prefill N --decode M'}"
            raise LocalError(f"arm {name.upper()} is a running deployment or a fleet to start", field="arm", fix=fix)
    arms = (
        Arm("colocated", "a", fleet_a, given["url_a"] or "", up_a),
        Arm("disaggregated", "b", fleet_b, given["url_b"] or "", up_b if split else ()),
    )
    try:
        more = tuple(float(rate) for rate in given["rates"].split(",") if rate)
    except ValueError as error:
        raise LocalError(str(error), field="rates", fix="give numbers separated by commas") from error
    return CompareSpec(
        *arms,
        load,
        gates,
        (load.rate_per_s, *(rate for rate in more if rate != load.rate_per_s)),
        rounds=given["rounds"],
        objective=given["objective"],
        tuning=tuple(tuple(flags.split()) for flags in given["tune"]),
        stall_bound_s=given["stall_ms"] / 1e3,
        max_error_share=given["max_errors"],
        title=given["title"],
        directory=given["out"],
        headers=headers_of(given["api_key"], given["header"]),
    )
