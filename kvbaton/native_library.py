"""Where a native library lies that was built beside a module. Loading is the module's: what it needs, and who waits."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path


def native_library(module_file: str, name: str) -> Path | None:
    """None: it was not built (no C++ compiler at installation?)."""
    folder = Path(module_file).parent
    paths = [folder / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in paths if path.is_file()), None)
