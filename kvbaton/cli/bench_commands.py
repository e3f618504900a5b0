"""``kvbaton bench``, ``compare``, ``verify``, ``profile`` and ``link``: the measuring half of the command line.

stdout carries the result, stderr the progress. Exit codes: 0 done; 1 the answer is no (a gate was missed, too many
requests failed, the client was the bottleneck, answers disagree); 2 bad input. Modules that measure are imported
inside the commands, so that ``--help`` stays instant.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from kvbaton.cli.bench_options import (
    fleet_of,
    fleet_options,
    gate_options,
    gates_of,
    headers_of,
    host_port,
    load_options,
    load_spec,
    numbers,
    print_json,
    realtime_option,
    run_loop,
    says_whose_fault,
    take_priority,
)
from kvbaton.types import LocalError

if TYPE_CHECKING:
    from kvbaton.bench.compare import CompareSpec
    from kvbaton.bench.profile import ProfileResult, ProfileSpec
    from kvbaton.bench.stats import Gates
    from kvbaton.bench.workload import LoadSpec


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
    "--samples", type=click.Path(dir_okay=False, path_type=Path), help="Keep every chunk: .jsonl, .jsonl.gz or .parquet"
)
@realtime_option
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
    if given["realtime"]:
        take_priority()
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
@click.option(
    "--profile",
    type=click.Path(exists=True, dir_okay=False),
    help="Profile file of such a worker: the same runs are simulated too, and the error is in the report.",
)
@click.option("--title", default="One pool or two", show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="compare", show_default=True)
@click.option("--stall-ms", type=float, default=500.0, show_default=True, help="A gap this long is a stall.")
@click.option(
    "--max-errors", type=float, default=0.01, show_default=True, help="Share of failures that proves nothing."
)
@click.option(
    "--max-other-cores",
    type=float,
    default=0.25,
    show_default=True,
    help="Mean cores other programs may use during a run of a started fleet; above it nothing is proven.",
)
@click.option(
    "--max-drift",
    type=click.FloatRange(1.0),
    default=1.5,
    show_default=True,
    help="Factor by which the objective may differ between runs of the same arm; above it nothing is proven.",
)
@click.option("--header", multiple=True, help="'Name: value' sent with every request.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Bearer token; never written to a file.")
@load_options
@gate_options
@fleet_options
@realtime_option
@click.option("--quiet", is_flag=True, help="No progress bar.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@says_whose_fault
def compare_command(**given: Any) -> None:
    """Colocated against disaggregated on the same requests, interleaved A B B A, with a verdict.

    Writes report.html (one file, opens offline), report.md, report.json and the raw samples to --out. Arms are started
    with `kvbaton up`, or are any two addresses. Exit code 1 when the verdict is "do not split" or "not proven".
    """
    from kvbaton.bench.compare import compare
    from kvbaton.bench.report import comparison_rows, simulated_rows, write_reports
    from kvbaton.bench.watch import Watch

    spec = _compare_spec(given)
    watch = Watch(given["quiet"])
    if given["realtime"]:
        take_priority()
    work = compare(spec, lambda line: click.echo(line, err=True), watch)
    found = run_loop(watch.during(work, "compare"))
    paths = write_reports(found, spec.directory)
    if given["as_json"]:
        print_json(found.result)
    else:
        for row in comparison_rows(found.result.rates[0]):
            click.echo(f"{row[0]:<34}{row[1]:<28}{row[2]:<28}{row[3]:<22}{row[5]}")
        for arm, rate, name, predicted, measured, error in simulated_rows(found.result):
            click.echo(f"simulated {arm} at {rate}/s, {name}: {predicted} ms, measured {measured} ms ({error})")
        click.echo(f"\n{found.result.verdict.sentence}")
        click.echo(f"see {paths[0]}", err=True)
    if found.result.verdict.decision != "split":
        sys.exit(1)


def _compare_spec(given: dict[str, Any]) -> CompareSpec:
    from kvbaton.bench.arms import Arm
    from kvbaton.bench.compare import CompareSpec
    from kvbaton.bench.cost import Fleet
    from kvbaton.bench.workload import offered_rate
    from kvbaton.plan.profile_file import read_profile

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
    if more and load.arrivals == "trace":
        raise LocalError("a trace has its own rate", field="rates", fix="leave it out, or use --arrivals poisson")
    load = msgspec.structs.replace(load, rate_per_s=offered_rate(load))
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
        max_other_cores=given["max_other_cores"],
        max_drift=given["max_drift"],
        title=given["title"],
        directory=given["out"],
        profile=read_profile(given["profile"]) if given["profile"] else None,
        headers=headers_of(given["api_key"], given["header"]),
    )


@click.command("verify")
@click.argument("url_a")
@click.argument("url_b")
@click.option("--prompts", type=click.IntRange(1), default=20, show_default=True, help="Fixed prompts to ask.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--concurrency", type=click.IntRange(1), default=4, show_default=True, help="Asked at once.")
@click.option("--repeats", type=click.IntRange(2), default=2, show_default=True, help="Times A is asked: the control.")
@click.option("--model", default="", help="Model name to ask for.  [default: the first each endpoint lists]")
@click.option("--header", multiple=True, help="'Name: value' sent with every request.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Bearer token.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@says_whose_fault
def verify_command(url_a: str, url_b: str, **given: Any) -> None:
    """The same prompts through URL_A and URL_B, greedy, beside a control arm (A against A).

    Tells a wrong hand-off from ordinary nondeterminism: B is at fault only where it leaves A more often than A leaves
    itself. Exit code 1 when it does.
    """
    from kvbaton.bench.verify import Asking, fixed_prompts, verify

    how = Asking(given["model"], given["max_tokens"], given["concurrency"], given["repeats"])
    headers = headers_of(given["api_key"], given["header"])
    found = run_loop(verify(url_a, url_b, fixed_prompts(given["prompts"]), how, headers))
    if given["as_json"]:
        print_json(found)
    else:
        click.echo(found.sentence)
        for name, paths in (("A", found.paths_a), ("B", found.paths_b)):
            if paths:
                click.echo(f"routes of {name}: " + ", ".join(f"{path} {number}" for path, number in paths.items()))
        for row in found.differing:
            click.echo(f"prompt {row.prompt}: leaves A at character {row.first_difference}")
            click.echo(f"  A: {row.a_text[:200]!r}\n  B: {row.b_text[:200]!r}")
    if found.reading == "differs":
        sys.exit(1)


@click.command("link")
@click.argument("address", required=False)
@click.option(
    "--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Model whose layout moves."
)
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens a block.")
@click.option("--kv-dtype", default="bfloat16", show_default=True)
@click.option("--tokens", default="256,1024,4096", show_default=True, help="Prompt sizes to move.")
@click.option("--repeats", type=click.IntRange(2), default=30, show_default=True)
@click.option("--concurrency", type=click.IntRange(1), default=1, show_default=True, help="Pulls at once.")
@click.option("--run-blocks", type=click.IntRange(0), default=0, show_default=True, help="Neighbouring blocks; 0: all.")
@click.option(
    "--background", type=click.IntRange(0), default=0, show_default=True, help="Pulls going on all the while."
)
@click.option("--transport", type=click.Choice(["auto", "shm", "tcp", "nixl"]), default="auto", show_default=True)
@click.option("--fabric", help="Preset to hold the result against, as in `kvbaton kv`.")
@click.option("--serve", is_flag=True, help="Lend blocks on ADDRESS until Ctrl-C, for a pull from another host.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@says_whose_fault
def link_command(address: str | None, **given: Any) -> None:
    """Effective KV transfer time between two workers: alpha, beta and p99, with the real hand-off and layout.

    Without ADDRESS both ends are on this machine. Between hosts: `kvbaton link --serve 0.0.0.0:7700` on one, then
    `kvbaton link HOST:7700` with the same layout options on the other.
    """
    from kvbaton.bench import link

    layout = link.layout_of(given["model"] or _default_model(), given["block_size"], given["kv_dtype"])
    spec = link.LinkSpec(
        layout,
        numbers(given["tokens"], "tokens"),
        given["repeats"],
        given["concurrency"],
        given["run_blocks"],
        given["background"],
        given["transport"],
        None if address is None else host_port(address),
    )
    if given["serve"]:
        if spec.address is None:
            raise LocalError("--serve needs an address to listen on", field="address", fix="give HOST:PORT")
        run_loop(link.lend_forever(spec))
        return
    found = run_loop(link.measure_link(spec))
    if given["fabric"]:
        from kvbaton.plan.hardware import fabric

        found = msgspec.structs.replace(found, nominal_gb_per_s=fabric(given["fabric"]).gb_per_s)
    if given["as_json"]:
        print_json(found)
        return
    click.echo(
        f"{layout.num_layers} layers x {layout.num_kv_heads} KV heads x {layout.head_dim}, {layout.dtype}, blocks of "
        f"{layout.block_size} tokens, {layout.layer_block_bytes:,} B a block and layer; over {found.transport}"
    )
    click.echo(f"{'tokens':>8}{'MB':>10}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}{'max ms':>10}{'GB/s':>9}")
    for size in found.sizes:
        times = "".join(f"{value:>10.3f}" for value in (size.p50_ms, size.p90_ms, size.p99_ms, size.max_ms))
        click.echo(f"{size.prompt_tokens:>8}{size.num_bytes / 1e6:>10.2f}{times}{size.bytes_per_s / 1e9:>9.2f}")
    if found.gb_per_s is not None and found.startup_ms is not None and found.worst_fit_error is not None:
        nominal = f"; nominal {found.nominal_gb_per_s:g} GB/s" if found.nominal_gb_per_s else ""
        click.echo(
            f"alpha {found.startup_ms:.3f} ms, beta {found.gb_per_s:.2f} GB/s (fit within {found.worst_fit_error:.0%})"
            f"{nominal}"
        )


def _default_model() -> Path:
    from kvbaton.engine.weights import default_model_dir

    return default_model_dir()


@click.command("profile")
@click.argument("url")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Profile file for `plan` and the router.")
@click.option("--engine", default="kvbaton", show_default=True, help="What serves at URL, for the file.")
@click.option("--hardware", default="", help="What it runs on, for the file.  [default: this processor]")
@click.option("--model-dir", type=click.Path(exists=True, file_okay=False, path_type=Path), help="For the KV layout.")
@click.option("--kv-blocks", type=click.IntRange(1), default=2048, show_default=True, help="Blocks the worker has.")
@click.option("--max-running", type=click.IntRange(1), default=64, show_default=True, help="Its largest batch.")
@click.option("--with-link", is_flag=True, help="Also measure the link on this machine, as `kvbaton link` does.")
@click.option("--fleet", help="Router of a fleet on this machine, one worker a core, of which URL is one.")
@click.option("--beside", multiple=True, help="URL of another worker behind --fleet; give all of them.")
@realtime_option
@click.option("--prefill-tokens", default="64,128,256,512,1024", show_default=True, help="Prompt lengths to time.")
@click.option("--cached-tokens", default="0,512", show_default=True, help="Cached contexts before them.")
@click.option("--batches", default="1,2,4,8", show_default=True, help="Decode batches to time.")
@click.option("--contexts", default="64,512", show_default=True, help="Context lengths to decode at.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Samples of each row at least.")
@click.option("--max-repeats", type=click.IntRange(1), default=8, show_default=True, help="Of rows not stable by then.")
@click.option("--budget", type=float, default=120.0, show_default=True, help="Seconds after which no further round.")
@click.option(
    "--chunk-tokens", type=click.IntRange(1), default=512, show_default=True, help="The worker's step budget."
)
@click.option("--ttft-slo", type=float, help="Search prefill-only goodput under this TTFT, milliseconds.")
@click.option("--tpot-slo", type=float, help="Search decode-only goodput under this TPOT, milliseconds.")
@click.option("--goodput-input", default="512", show_default=True, help="Prompt tokens of the prefill-only load.")
@click.option("--goodput-output", default="64", show_default=True, help="Output tokens of the decode-only load.")
@click.option("--rate", type=float, default=1.0, show_default=True, help="Rate the searches start at.")
@click.option("--trial", type=float, default=10.0, show_default=True, help="Seconds of one trial of a search.")
@click.option("--trials", type=click.IntRange(1), default=6, show_default=True, help="Trials a search may take.")
@click.option("--model", default="", help="Model name to ask for.  [default: the first the endpoint lists]")
@click.option("--tokenizer", default="", help="Directory with tokenizer.json.  [default: the model's]")
@click.option("--header", multiple=True, help="'Name: value' sent with every request.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Bearer token.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@says_whose_fault
def profile_command(url: str, **given: Any) -> None:
    """Step times of the worker at URL, and its prefill-only and decode-only goodput.

    Fits the linear step model that `plan` simulates with, and says how far it is off on rows it was not fitted to.
    With --fleet also what the fleet's workers cost each other, the router and the clients when all are busy.
    """
    from kvbaton.bench.profile import ProfileSpec, profile

    if given["realtime"]:
        take_priority()
    if given["fleet"] and not given["out"]:
        raise LocalError("what --fleet measures goes into the file", field="fleet", fix="give --out FILE")
    spec = ProfileSpec(
        url=url,
        prefill_tokens=numbers(given["prefill_tokens"], "prefill_tokens"),
        cached_tokens=numbers(given["cached_tokens"], "cached_tokens"),
        decode_batches=numbers(given["batches"], "batches"),
        decode_contexts=numbers(given["contexts"], "contexts"),
        repeats=given["repeats"],
        max_repeats=given["max_repeats"],
        budget_s=given["budget"],
        chunk_tokens=given["chunk_tokens"],
        ttft_gate_s=None if given["ttft_slo"] is None else given["ttft_slo"] / 1e3,
        tpot_gate_s=None if given["tpot_slo"] is None else given["tpot_slo"] / 1e3,
        goodput_input=given["goodput_input"],
        goodput_output=given["goodput_output"],
        trial_s=given["trial"],
        trials=given["trials"],
        start_rate_per_s=given["rate"],
        model=given["model"],
        tokenizer=given["tokenizer"],
        headers=headers_of(given["api_key"], given["header"]),
    )
    found = run_loop(profile(spec, lambda line: click.echo(line, err=True)))
    if given["out"]:
        _write_profile(found, spec, given)
    if given["as_json"]:
        print_json(found)
        return
    step, fit = found.fit.model, found.fit
    click.echo(
        f"step = {step.fixed_s * 1e3:.3f} ms + {step.per_token_s * 1e6:.2f} us/token + "
        f"{step.per_pair_s * 1e9:.3f} ns/pair + {step.per_sequence_s * 1e6:.2f} us/sequence + "
        f"{step.per_context_s * 1e9:.2f} ns/cached token + {step.per_chunk_s * 1e3:.3f} ms/chunk; "
        f"{fit.request_overhead_s * 1e3:.2f} ms a request"
    )
    click.echo(
        f"held-out error: median {fit.held_out_median:.1%}, p90 {fit.held_out_p90:.1%}, worst {fit.held_out_max:.1%} "
        f"over {len(fit.errors)} rows"
    )
    for name, searched in (("prefill", found.prefill_goodput), ("decode", found.decode_goodput)):
        if searched is not None:
            note = f" ({searched.note})" if searched.note else ""
            click.echo(f"{name}-only goodput: {searched.rate_per_s:.3g} requests/s{note}")


def _write_profile(found: ProfileResult, spec: ProfileSpec, given: dict[str, Any]) -> None:
    from kvbaton.bench import link, profile_export
    from kvbaton.bench.profile_beside import measure_beside
    from kvbaton.engine.model_config import ModelConfig
    from kvbaton.plan.profile_file import write_profile

    directory = given["model_dir"] or _default_model()
    config = ModelConfig.from_dir(directory)
    layout = link.layout_of(directory, 16, "bfloat16")
    limits = profile_export.limits_of(
        layout, given["kv_blocks"], spec.chunk_tokens, given["max_running"], config.max_context
    )
    origin = profile_export.origin_of_run(found, given["engine"], config.revision, given["hardware"])
    measured = run_loop(link.measure_link(link.LinkSpec(layout))) if given["with_link"] else None
    beside = None
    if given["fleet"]:
        tell = lambda line: click.echo(line, err=True)  # noqa: E731
        beside = run_loop(measure_beside(spec, given["fleet"], given["beside"], found, tell))
    write_profile(profile_export.to_profile_file(found, limits, origin, measured, beside=beside), given["out"])
