"""Native libraries built beside a module: where one lies, and how those are loaded whose calls keep Python's lock."""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
from pathlib import Path


def native_library(module_file: str, name: str) -> Path | None:
    """None: it was not built (no C++ compiler at installation?)."""
    folder = Path(module_file).parent
    paths = [folder / f"{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in paths if path.is_file()), None)


def quick_library(beside: str, name: str) -> ctypes.PyDLL | None:
    """For calls that keep the lock and share numbers with ``array``. None where it was not built, cannot be loaded,
    or would read them in the other byte order."""
    path = native_library(beside, name)
    if path is None or sys.byteorder != "little":
        return None
    try:
        return ctypes.PyDLL(str(path))
    except OSError:
        return None
