"""The files of the page, and the charting library where it is installed.

Ours are read once, from the package. The library is plotly's JavaScript as its Python package ships it; it is served
from where it is installed, and never copied. Knows nothing about what the page shows.
"""

from __future__ import annotations

import gzip
from hashlib import blake2b
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import msgspec

LIBRARY_NAME = "plotly.min.js"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Asset(msgspec.Struct, frozen=True):
    body: bytes
    compressed: bytes  # gzip
    content_type: bytes
    etag: bytes


def asset(name: str, body: bytes) -> Asset:
    etag = b'"%s"' % blake2b(body, digest_size=12).hexdigest().encode()
    return Asset(body, gzip.compress(body, 6, mtime=0), _TYPES[Path(name).suffix].encode(), etag)


def own_assets() -> dict[str, Asset]:
    found = {}
    for entry in (files("kvbaton.ui") / "static").iterdir():
        if Path(entry.name).suffix in _TYPES:
            found[entry.name] = asset(entry.name, entry.read_bytes())
    return found


def library_path() -> Path | None:
    """None: `kvbaton[ui]` is not installed."""
    spec = find_spec("plotly")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "package_data" / LIBRARY_NAME
        if path.is_file():
            return path
    return None


def load_library(path: Path) -> Asset:
    """Some megabytes to read and compress: for a thread."""
    return asset(path.name, path.read_bytes())
