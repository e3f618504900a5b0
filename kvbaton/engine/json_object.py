"""Reading the JSON files of a model directory. Knows nothing about what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvbaton.types import LocalError


def read_object(path: Path, shown: str) -> dict[str, Any]:
    """The object in the file; ``shown``: what an error calls it. LocalError when it is no JSON or no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise LocalError(f"{shown} is not valid JSON: {error}", field=path.name) from error
    if not isinstance(content, dict):
        raise LocalError(f"{shown} must hold a JSON object", field=path.name)
    return content
