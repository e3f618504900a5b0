"""Every target there is."""

from __future__ import annotations

from . import http_targets, model_targets, text_targets, wire_targets
from .target import Target


def all_targets() -> tuple[Target, ...]:
    return (*wire_targets.TARGETS, *http_targets.TARGETS, *model_targets.TARGETS, *text_targets.TARGETS)
