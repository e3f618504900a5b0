"""Flags that several verbs share, each tied to one setting.

A flag that was not given is None, so that the file and the environment keep their say. Knows nothing about what the
settings do; their meaning is told once, in ``kvbaton.config``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvbaton.config import FleetSettings, load

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# flag names, section, key, type, help
_Flag = tuple[tuple[str, ...], str, str, Any, str]
MODEL_FLAGS: tuple[_Flag, ...] = (
    (("--model",), "model", "dir", str, "Hugging Face model directory.  [default: SmolLM2-135M-Instruct]"),
    (("--name",), "model", "name", str, "What clients call the model.  [default: the directory's name]"),
    (("--dtype",), "model", "dtype", click.Choice(["float32", "bfloat16"]), "Compute dtype.  [default: bfloat16]"),
    (("--kv-dtype",), "model", "kv_dtype", str, "auto, float32, bfloat16, float8_e4m3.  [default: auto, as --dtype]"),
    (("--weights",), "model", "weights", click.Choice(["native", "int8", "int4"]), "Weight-only quantisation."),
    (("--block-size",), "model", "block_size", int, "Tokens per KV block.  [default: 16]"),
    (("--kv-blocks",), "model", "kv_blocks", int, "KV blocks of each worker, instead of --kv-memory."),
    (("--kv-memory",), "model", "kv_memory_mib", int, "KV memory of each worker in MiB.  [default: what fits]"),
    (("--max-context",), "model", "max_context", int, "Fewer tokens than the model allows."),
    (("--backend",), "model", "backend", click.Choice(["auto", "native", "torch"]), "What computes.  [default: auto]"),
    (("--device",), "model", "device", str, "auto, cpu, cuda, cuda:1, ...  [default: auto]"),
)
ENGINE_FLAGS: tuple[_Flag, ...] = (
    (
        ("--transport",),
        "worker",
        "transport",
        click.Choice(["auto", "shm", "tcp", "nixl"]),
        "How KV moves.  [default: auto]",
    ),
    (
        ("--chunk-tokens", "--max-batch-tokens"),
        "worker",
        "chunk_tokens",
        int,
        "Tokens of one engine step: decodes first, the rest for prefill chunks.  [default: 512]",
    ),
    (("--max-running",), "worker", "max_running", int, "Sequences in one batch.  [default: 64]"),
    (
        ("--max-waiting",),
        "worker",
        "max_waiting",
        int,
        "Requests queued before a worker says 503.  [default: 256]",
    ),
    (("--threads",), "worker", "threads", int, "Compute threads of a worker.  [default: one per core it stays on]"),
    (("--tp",), "worker", "tp", int, "Ranks that share a worker's heads and MLP, each a process.  [default: 1]"),
    (
        ("--kv-tier-memory",),
        "worker",
        "kv_tier_memory_mib",
        int,
        "MiB of memory in which a fleet's workers on this host share KV blocks.  [default: 0, none]",
    ),
    (("--kv-tier-disk",), "worker", "kv_tier_disk", str, "DIR:GiB on a local disk for what leaves it."),
    (
        ("--kv-tier-store",),
        "worker",
        "kv_tier_store",
        str,
        "mooncake://HOST:PORT[?segment_mib=256]: a Mooncake store in which hosts share KV blocks.",
    ),
)
WORKER_FLAGS: tuple[_Flag, ...] = (
    (("--role",), "worker", "role", click.Choice(["prefill", "decode", "both"]), "What it does.  [default: both]"),
    (("--host",), "worker", "host", str, "Address to listen on.  [default: 127.0.0.1]"),
    (("--port",), "worker", "port", int, "Port to listen on.  [default: any free one, which is reported]"),
    (("--kv-host",), "worker", "kv_host", str, "Address for hand-offs, as peers reach it.  [default: --host]"),
    (("--kv-port",), "worker", "kv_port", int, "Port for hand-offs.  [default: any free one]"),
    (
        ("--clients",),
        "worker",
        "clients",
        click.Choice(["auto", "allow", "refuse"]),
        "Requests that come without a router.  [default: auto, only on loopback]",
    ),
)
ROUTER_FLAGS: tuple[_Flag, ...] = (
    (("--host",), "router", "host", str, "Address to listen on.  [default: 127.0.0.1]"),
    (("--port",), "router", "port", int, "Port to listen on; 0 for any free one.  [default: 8000]"),
    (
        ("--threshold-tokens",),
        "router",
        "threshold_tokens",
        int,
        "Fewer uncached prompt tokens than this stay local; 0: always split.  [default: the break-even as measured]",
    ),
    (
        ("--policy",),
        "router",
        "policy",
        click.Choice(["cost", "static", "least_load", "round_robin"]),
        "How workers are chosen.  [default: cost, by what is measured]",
    ),
    (("--ttft-slo-s",), "router", "ttft_slo_s", float, "Longest wait for a first token to aim at.  [default: 2]"),
    (("--tpot-slo-s",), "router", "tpot_slo_s", float, "Longest time per token after it to aim at.  [default: 0.1]"),
    (
        ("--disagg-percent",),
        "router",
        "disagg_percent",
        float,
        "Share of the requests fit for the split that go there; the rest stays local.  [default: 100]",
    ),
    (("--profile",), "router", "profile", str, "File of `kvbaton profile`: where the cost models start from."),
    (
        ("--on-prefill-failure",),
        "router",
        "on_prefill_failure",
        click.Choice(["local", "error"]),
        "When no other prefill worker is left to try.  [default: local]",
    ),
    (
        ("--canary-interval",),
        "router",
        "canary_interval_s",
        float,
        "Seconds between two prompts whose answers are compared with earlier ones; 0: none.  [default: 0]",
    ),
    (
        ("--head-timeout",),
        "router",
        "head_timeout_s",
        float,
        "Seconds for a request's head to arrive before its connection is closed.  [default: 20]",
    ),
    (("--api-keys",), "router", "api_keys_file", str, "File of API keys, one a line; read again when it changes."),
    (
        ("--allow-anonymous/--no-allow-anonymous",),
        "router",
        "allow_anonymous",
        bool,
        "Answer everybody, also where others than this host reach it.  [default: no]",
    ),
    (("--ui/--no-ui",), "router", "ui", bool, "The live page at /ui.  [default: --ui]"),
    (("--plan-band",), "router", "plan_band", str, "LOW,HIGH prompt:output ratio that the plan was made for."),
    (
        ("--max-inflight",),
        "router",
        "max_inflight",
        int,
        "Requests at once before it says 429.  [default: 1024]",
    ),
)
ENGINES = ("embedded", "vllm", "sglang", "trtllm")
SERVER_FLAGS: tuple[_Flag, ...] = (
    (("--engine",), "worker", "engine", click.Choice(ENGINES), "What computes.  [default: embedded]"),
    (("--engine-python",), "worker", "engine_python", str, "Python of the environment that has vLLM."),
    (("--engine-args",), "worker", "engine_args", str, "More flags for vLLM, in quotes."),
)
ENGINE_URL_FLAG: tuple[_Flag, ...] = (
    (("--engine-url",), "worker", "engine_url", str, "A server that runs already.  [default: start vLLM]"),
    (("--engine-events",), "worker", "engine_events", str, "Its KV events: tcp://HOST:PORT,tcp://HOST:REPLAY-PORT."),
    (
        ("--engine-bootstrap-port",),
        "worker",
        "engine_bootstrap_port",
        int,
        "vLLM's prefill servers have MooncakeConnector, and its bootstrap server there.  [default: NixlConnector]",
    ),
)
DISCOVERY_FLAGS: tuple[_Flag, ...] = (
    (("--discover",), "router", "discover", str, "kubernetes:SELECTOR: workers are the pods with these labels."),
    (("--worker-port",), "router", "worker_port", int, "HTTP port of such a pod.  [default: 8101]"),
)
DRAIN_FLAG: tuple[_Flag, ...] = (
    (("--drain-s",), "worker", "drain_s", float, "How long open requests may still run at the end.  [default: 60]"),
)


def flags(*groups: tuple[_Flag, ...]) -> Decorator:
    """The flags as click options; the command gets them as ``settings: dict[section, dict[key, value]]``."""
    listed = [flag for group in groups for flag in group]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def run(**given: Any) -> Any:
            settings: dict[str, dict[str, Any]] = {}
            for names, section, key, _, _ in listed:
                value = given.pop(_parameter(names))
                settings.setdefault(section, {})[key] = value
            return command(settings=settings, **given)

        run.__doc__ = command.__doc__
        run.__name__ = command.__name__
        decorated: Any = run
        decorated.__click_params__ = list(getattr(command, "__click_params__", []))
        for names, _, _, kind, text in reversed(listed):
            decorated = click.option(*names, _parameter(names), type=kind, default=None, help=text)(decorated)
        return decorated

    return decorate


def _parameter(names: tuple[str, ...]) -> str:
    return names[0].partition("/")[0].removeprefix("--").replace("-", "_")


def config_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        help="TOML file with [model], [worker], [router] and [[workers]]; flags and KVBATON_* win over it.",
    )(command)


def log_level_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--log-level",
        type=click.Choice([name.lower() for name in ("DEBUG", "INFO", "WARNING", "ERROR")]),
        default="info",
        envvar="KVBATON_LOG_LEVEL",
        show_default=True,
        help="Least level of the JSON log.",
    )(command)


def process_options(tied_help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What every single process of a fleet takes, by itself or as a child of ``up``."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        command = click.option("--tied", is_flag=True, hidden=True, help=tied_help)(command)
        command = click.option("--report-fd", type=int, hidden=True)(command)
        command = click.option("--json", "as_json", is_flag=True, help="Print the address as JSON when ready.")(command)
        return config_option(log_level_option(command))

    return decorate


def read_settings(config: Path | None, settings: dict[str, dict[str, Any]]) -> FleetSettings:
    return load(config, flags=settings)
