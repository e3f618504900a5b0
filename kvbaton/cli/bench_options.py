"""What the measuring verbs share: options of a load, of gates and fleets, and what becomes of errors.

Knows nothing about what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import reduce, wraps
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
    """On uvloop where it is installed: its reads are cheaper, so their stamps are earlier.

    SIGTERM cancels the work like Ctrl-C does, so that a fleet which a comparison started ends with it.
    """

    async def until_done() -> Any:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        import uvloop

        run: Callable[..., Any] = uvloop.run
    except ImportError:
        run = asyncio.run
    try:
        return run(until_done())
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


def take_priority() -> None:
    """Real-time priority for this client alone, not for what it starts; LocalError where the system refuses."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(10))
    except (AttributeError, PermissionError) as error:
        raise LocalError(f"the system refuses: {error}", field="realtime", fix="run as root, or without it") from error


realtime_option = click.option(
    "--realtime",
    is_flag=True,
    help="Real-time priority for the client, where it shares cores with what it measures (needs root).",
)


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
    click.option(
        "--classes",
        default="",
        metavar="INPUT:OUTPUT@SHARE,...",
        help="Kinds of requests, each with its lengths, in place of --input and --output.",
    ),
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
    except (ValueError, RecursionError) as error:
        raise LocalError(f"not JSON: {error}", field="extra_body") from error
    if not isinstance(extra, dict):
        raise LocalError("it must be a JSON object", field="extra_body")
    if given["classes"] and given["trace"]:
        raise LocalError("a trace brings its own lengths", field="classes", fix="leave --classes or --trace out")
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
        classes=given.pop("classes"),
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


def numbers(text: str, field: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise LocalError(f"{text!r} is not a row of numbers", field=field, fix="give them as 256,1024") from error


def host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise LocalError(f"{address!r} is not an address", field="address", fix="give HOST:PORT")
    return host.strip("[]"), int(port)
