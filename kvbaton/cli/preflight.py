"""What can be known to fail before any process is started: a port that is taken, a model that is not there.

Found by a worker, the same faults cost seconds of loading. Knows nothing about how a fleet is started.
"""

from __future__ import annotations

from pathlib import Path


def check_address(host: str, port: int) -> None:
    """Listen there for a moment; LocalError when the router could not."""
    from kvbaton.workers.http import bind

    bind(host, port).close()


def check_model(model_dir: Path, engine: str) -> None:
    """Everything but the weights themselves; LocalError names what is missing or not supported."""
    from kvbaton.engine.loader import check_model_dir

    check_model_dir(model_dir, embedded=engine == "embedded")
