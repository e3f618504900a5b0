"""Known faults of the installed packages, from a checkout of the Python advisory database: for who reaches no service.

``vulns/NAME/ID.yaml`` in the form of OSV: versions that are affected, one by one or from where to where. Invariant: a
version that cannot be compared counts as affected. Knows nothing about who asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from packaging.version import InvalidVersion, Version

_KINDS = ("fixed", "introduced", "last_affected")  # in this order, where they name the same version


def advisories_for(packages: Mapping[str, str], folder: Path) -> tuple[list[str], str]:
    """What is known of these (version by name), and from which day the newest advisory of all is."""
    told, newest = [], ""
    for path in sorted((folder / "vulns").glob("*/*.yaml")):
        loaded: dict[str, Any] = yaml.load(path.read_bytes(), Loader=yaml.CSafeLoader)
        newest = max(newest, _day(loaded.get("published")), _day(loaded.get("modified")))
        version = packages.get(path.parent.name)
        if version is not None and not loaded.get("withdrawn") and is_affected(version, loaded["affected"]):
            told.append(f"{path.parent.name} {version}: {loaded['id']}")
    return told, newest


def is_affected(version: str, affected: Iterable[Mapping[str, Any]]) -> bool:
    for each in affected:
        if version in map(str, each.get("versions", ())):
            return True
        for span in each.get("ranges", ()):
            if span["type"] == "ECOSYSTEM" and _within(version, span["events"]):
                return True
    return False


def _within(version: str, events: Iterable[Mapping[str, str]]) -> bool:
    """Affected from ``introduced`` on, until before ``fixed`` or through ``last_affected``."""
    inside = False
    try:
        ours = Version(version)
        for event in sorted(events, key=_place):
            kind, bound = next(iter(event.items()))
            if kind == "introduced" and ours >= Version(str(bound)):
                inside = True
            elif (kind == "fixed" and ours >= Version(str(bound))) or (
                kind == "last_affected" and ours > Version(str(bound))
            ):
                inside = False
    except InvalidVersion:
        return True
    return inside


def _place(event: Mapping[str, str]) -> tuple[Version, int]:
    kind, bound = next(iter(event.items()))
    return Version(str(bound)), _KINDS.index(kind) if kind in _KINDS else len(_KINDS)


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _day(value: object) -> str:
    return value.date().isoformat() if isinstance(value, datetime) else str(value or "")[:10]
