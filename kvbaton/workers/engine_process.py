"""From settings to a worker over a server of SGLang's or TensorRT-LLM's that runs already. None is started here.

Knows nothing about how either of them works.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from kvbaton.config import ModelSettings, WorkerSettings
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.engine.weights import default_model_dir
from kvbaton.types import LocalError
from kvbaton.workers.sglang import SglangOptions, SglangWorker
from kvbaton.workers.trtllm import TrtllmOptions, TrtllmWorker

_KEYS = {"sglang": "SGLANG_API_KEY", "trtllm": "TRTLLM_API_KEY"}


def engine_url(settings: WorkerSettings) -> str:
    """Of a server that runs already, empty without one. LocalError when it is no address of one."""
    url = settings.engine_url.rstrip("/")
    if "@" in url:
        fix = "leave out user and password; a key for its API is read from a variable"
        raise LocalError("an engine's address has no user", field="engine_url", fix=fix)
    try:
        parts = urlsplit(url)
        right = not url or bool(parts.hostname and parts.port and url == f"http://{parts.netloc}")
    except ValueError:
        right = False
    if not right:
        fix = "give http://HOST:PORT, without /v1 or another path"
        raise LocalError(f"{settings.engine_url!r} is not http://host:port", field="engine_url", fix=fix)
    return url


def make_engine_worker(model: ModelSettings, settings: WorkerSettings) -> SglangWorker | TrtllmWorker:
    """LocalError for settings that do not name a running server."""
    url = engine_url(settings)
    if not url:
        fix = f"start it yourself and give --engine-url to `kvbaton worker --engine {settings.engine}`"
        raise LocalError(f"{settings.engine} servers are not started here", field="engine_url", fix=fix)
    model_dir = Path(model.dir) if model.dir else default_model_dir()
    config, tokenizer = ModelConfig.from_dir(model_dir), Tokenizer.load(model_dir)
    name, key = model.name or model_dir.name, os.environ.get(_KEYS[settings.engine], "")
    limits = (settings.max_running, settings.max_waiting)
    if settings.engine == "sglang":
        return SglangWorker(SglangOptions(url, settings.role, name, key, model.dtype, *limits), config, tokenizer)
    return TrtllmWorker(TrtllmOptions(url, settings.role, name, key, model.dtype, *limits), config, tokenizer)
