"""From settings to a worker over vLLM. Knows nothing about how either of them works."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import tempfile
from pathlib import Path

from kvbaton.config import ModelSettings, WorkerSettings
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.engine.weights import default_model_dir
from kvbaton.transfer.reach import is_wildcard
from kvbaton.types import LocalError
from kvbaton.workers.engine_process import engine_url
from kvbaton.workers.process import DEFAULT_KV_MIB
from kvbaton.workers.socket_directory import SocketDirectory, sweep
from kvbaton.workers.vllm import VllmOptions, VllmWorker
from kvbaton.workers.vllm_kv_follow import can_follow, parse_endpoints
from kvbaton.workers.vllm_server import ServerSpec, VllmServer, free_port, key_for_servers, split_arguments

log = logging.getLogger(__name__)


def make_vllm_worker(model: ModelSettings, settings: WorkerSettings, key: str) -> VllmWorker:
    """LocalError for settings that only the embedded engine has."""
    for name, given in (("weights", model.weights != "native"), ("kv_blocks", model.kv_blocks > 0)):
        if given:
            fix = "leave it out, or say it in --engine-args"
            raise LocalError(f"{name} is a setting of the embedded engine", field=name, fix=fix)
    model_dir = Path(model.dir) if model.dir else default_model_dir()
    config = ModelConfig.from_dir(model_dir)
    name = model.name or model_dir.name
    max_context = min(model.max_context or config.max_context, config.max_context)
    server, events = None, None
    url, api_key = engine_url(settings), os.environ.get("VLLM_API_KEY", "") or key_for_servers(key)
    if not url and settings.engine_bootstrap_port:
        fix = "start them yourself, and give --engine-url"
        raise LocalError("servers with MooncakeConnector are not started here", field="engine_bootstrap_port", fix=fix)
    if not url:
        for path in sweep():
            log.info("removed %s of a worker that died", path)
        spec = _spec(model, settings, model_dir, name, max_context, api_key)
        sockets = SocketDirectory() if _follows_events(spec.arguments) else None
        server = VllmServer(dataclasses.replace(spec, events_dir=None if sockets is None else sockets.path), sockets)
        url, events = server.url, server.spec.endpoints
    elif settings.engine_events:
        events = parse_endpoints(settings.engine_events)
        if not can_follow():
            raise LocalError("following KV events needs pyzmq", field="engine_events", fix="pip install kvbaton[vllm]")
    options = VllmOptions(
        url=url,
        role=settings.role,
        model_name=name,
        api_key=api_key,
        dtype=model.dtype,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        events=events,
        bootstrap_port=settings.engine_bootstrap_port,
    )
    return VllmWorker(options, config, Tokenizer.load(model_dir), server)


def _spec(
    model: ModelSettings, settings: WorkerSettings, model_dir: Path, name: str, max_context: int, api_key: str
) -> ServerSpec:
    host = settings.kv_host or settings.host
    if settings.role == "prefill" and is_wildcard(host):
        fix = "give --kv-host ADDRESS, as other hosts reach this one"
        raise LocalError(f"peers would be sent to {host} for KV, which each takes for itself", field="kv_host", fix=fix)
    log_path = settings.engine_log or os.path.join(tempfile.gettempdir(), f"kvbaton-vllm-{os.getpid()}.log")
    return ServerSpec(
        python=settings.engine_python,
        model_dir=model_dir,
        model_name=name,
        role=settings.role,
        host=host,
        port=settings.kv_port or free_port(host),
        side_channel_port=free_port(host),
        dtype=model.dtype,
        max_context=max_context,
        kv_memory_mib=model.kv_memory_mib or DEFAULT_KV_MIB,
        cores=settings.cores,
        api_key=api_key,
        log_path=Path(log_path),
        arguments=split_arguments(shlex.split(settings.engine_args)),
    )


def _follows_events(arguments: tuple[str, ...]) -> bool:
    """Not of several engines in one server, which would need a port for each."""
    several = any(word.startswith(("--data-parallel-size", "-dp")) for word in arguments)
    if several or not can_follow():
        log.info("KV events are not followed: %s", "several engines in one server" if several else "no pyzmq")
    return not several and can_follow()
