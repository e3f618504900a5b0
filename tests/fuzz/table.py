"""Every target there is."""

from __future__ import annotations

from . import http_targets, internal_targets, model_targets, text_targets, wire_targets
from .target import Target


def all_targets() -> tuple[Target, ...]:
    ours = (wire_targets, http_targets, internal_targets, model_targets, text_targets)
    return tuple(target for each in ours for target in each.TARGETS)
