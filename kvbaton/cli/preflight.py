"""What can be known to fail before any process is started: a port that is taken, a model that is not there.

Found by a worker, the same faults cost seconds of loading. Knows nothing about how a fleet is started.
"""

from __future__ import annotations

from pathlib import Path

from kvbaton.config import RouterSettings
from kvbaton.types import LocalError


def check_engine(engine: str, startable: tuple[str, ...]) -> None:
    """Servers of some engines are started by whoever has the hardware for them; here they are only driven."""
    if engine not in startable:
        fix = f"start its servers, and `kvbaton worker --engine {engine} --engine-url ...` for each"
        raise LocalError(f"{engine} servers are not started here", field="engine", fix=fix)


def check_address(host: str, port: int) -> None:
    """Listen there for a moment; LocalError when the router could not."""
    from kvbaton.workers.http import bind

    bind(host, port).close()


def check_door(router: RouterSettings, key: str) -> bool:
    """Whether API keys are configured; LocalError when their file is no good, or strangers would be answered."""
    from kvbaton.router.api_keys import load
    from kvbaton.router.door import check_reach

    keys = load(router.api_keys_file)
    check_reach(router, keys, key)
    return keys is not None


def check_model(model_dir: Path, engine: str) -> None:
    """Everything but the weights themselves; LocalError names what is missing or not supported."""
    from kvbaton.engine.loader import check_model_dir

    check_model_dir(model_dir, embedded=engine == "embedded")


def check_ranks(model_dir: Path, engine: str, num_ranks: int) -> None:
    """LocalError when this model's heads cannot be shared by so many, or the engine is not ours."""
    if engine != "embedded":
        fix = "for vLLM give --engine-args '--tensor-parallel-size N'"
        raise LocalError("tp is of the embedded engine", field="tp", fix=fix)
    from kvbaton.engine.model_config import ModelConfig
    from kvbaton.engine.shares import shares

    shares(ModelConfig.from_dir(model_dir), num_ranks)
