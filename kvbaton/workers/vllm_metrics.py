"""An engine's own figures, read from its /metrics text: load, blocks, tokens by source, what its KV connector moved.

Names have changed over versions; those known are tried in order, and one that is missing is a zero that ``missing``
names. One that is there and makes no sense (not a number, below zero, beyond any count) keeps its last value, and
``odd`` names it: no answer of a server raises here. Pure. Knows nothing about HTTP.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

# our name -> names of the sample in the engine, newest first, with the labels that must match
Samples = dict[str, tuple[tuple[str, dict[str, str]], ...]]


@dataclass(frozen=True)
class FigureTable:
    """What one engine calls the figures."""

    samples: Samples
    config: str = ""  # the sample whose labels are settings
    labels: dict[str, str] = field(default_factory=dict)  # our name -> its label

    @property
    def known(self) -> frozenset[str]:
        return frozenset({self.config, *(name for names in self.samples.values() for name, _ in names)} - {""})

    @property
    def counts_bytes(self) -> bool:
        """Whether such an engine may say how much KV it received."""
        return "num_bytes_received" in self.samples


VLLM = FigureTable(
    {
        "num_running": (("vllm:num_requests_running", {}),),
        "num_waiting": (("vllm:num_requests_waiting", {}),),
        # Without those that wait for their KV.
        "num_queued": (
            ("vllm:num_requests_waiting_by_reason", {"reason": "capacity"}),
            ("vllm:num_requests_waiting", {}),
        ),
        "usage": (("vllm:kv_cache_usage_perc", {}), ("vllm:gpu_cache_usage_perc", {})),
        "num_computed_tokens": (
            ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}),
            ("vllm:prompt_tokens_total", {}),
        ),
        "num_cached_tokens": (
            ("vllm:prompt_tokens_by_source_total", {"source": "local_cache_hit"}),
            ("vllm:prefix_cache_hits_total", {}),
        ),
        "num_external_tokens": (
            ("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}),
            ("vllm:external_prefix_cache_hits_total", {}),
        ),
        "num_output_tokens": (("vllm:generation_tokens_total", {}),),
        "num_preemptions": (("vllm:num_preemptions_total", {}),),
        "num_bytes_received": (("vllm:nixl_bytes_transferred_sum", {}),),
        "num_failed_transfers": (("vllm:nixl_num_failed_transfers_total", {}),),
        "num_expired": (("vllm:nixl_num_kv_expired_reqs_total", {}),),
        "num_prompts": (("vllm:request_prompt_tokens_count", {}),),
        "num_prompts_tokens": (("vllm:request_prompt_tokens_sum", {}),),
    },
    "vllm:cache_config_info",
    {"num_blocks": "num_gpu_blocks", "block_size": "block_size"},
)
SGLANG = FigureTable(
    {
        "num_running": (("sglang:num_running_reqs", {}),),
        "num_waiting": (("sglang:num_queue_reqs", {}),),
        "num_queued": (("sglang:num_queue_reqs", {}),),
        "usage": (("sglang:token_usage", {}),),
        "num_computed_tokens": (("sglang:prompt_tokens_total", {}),),
        "num_cached_tokens": (("sglang:cached_tokens_total", {}),),
        "num_output_tokens": (("sglang:generation_tokens_total", {}),),
        "num_prompts": (("sglang:num_requests_total", {}),),
        "num_prompts_tokens": (("sglang:prompt_tokens_total", {}),),
    },
    "sglang:cache_config_info",
    {"num_blocks": "num_pages", "block_size": "page_size"},
)
TRTLLM = FigureTable(
    {
        "num_running": (("trtllm_num_requests_running", {}),),
        "num_waiting": (("trtllm_num_requests_waiting", {}),),
        "num_queued": (("trtllm_num_requests_waiting", {}),),
        "usage": (("trtllm_kv_cache_utilization", {}),),
        "num_blocks": (("trtllm_kv_cache_max_blocks", {}),),
        "block_size": (("trtllm_kv_cache_tokens_per_block", {}),),
        "num_prompts": (("trtllm_request_success_total", {}),),
        "num_prompts_tokens": (("trtllm_prompt_tokens_total", {}),),
    }
)
_NAME = re.compile(r"[a-zA-Z_:][\w:]*")
_EXPOSITION = re.compile(r"\s*(#.*|[a-zA-Z_:][\w:]*(\{.*\})?\s+\S+(\s+\S+)?\s*)?$")
_MAX_COUNT = 2**63
_MAX_DIGITS = 12
_MAX_LINE = 16 * 1024


@dataclass(frozen=True)
class EngineFigures:
    """Summed over the engines of one server."""

    num_running: int = 0
    num_waiting: int = 0
    num_queued: int = 0  # of those, for want of room
    usage: float = 0.0  # share of KV blocks in use
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0  # prompt tokens whose KV came from another server
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_bytes_received: int = 0
    num_failed_transfers: int = 0
    num_expired: int = 0
    num_prompts: int = 0  # of requests that have ended
    num_prompts_tokens: int = 0  # of those prompts
    num_blocks: int = 0
    block_size: int = 0
    missing: tuple[str, ...] = field(default=())
    odd: tuple[str, ...] = field(default=())  # "text": what was read is no exposition


def read_figures(text: str, last: EngineFigures | None = None, table: FigureTable = VLLM) -> EngineFigures:
    """``last`` holds the values of what cannot be read now."""
    before = EngineFigures() if last is None else last
    samples, broken = samples_of(text, table.known)
    if "text" in broken:
        return replace(before, odd=("text",))
    found: dict[str, Any] = {}
    odd = set()
    for ours, names in table.samples.items():
        value = _value(samples, names, mean=ours == "usage")
        if value is not None and 0 <= value <= (1 if ours == "usage" else _MAX_COUNT):  # NaN is not
            found[ours] = value if ours == "usage" else int(value)
        elif value is not None or broken.intersection(name for name, _ in names):
            odd.add(ours)
    missing = tuple(name for name in table.samples if name not in found and name not in odd)
    for ours, label in table.labels.items():
        counts = [_whole(sample.labels[label]) for sample in samples if label in sample.labels]
        if None in counts or table.config in broken:
            odd.add(ours)
        else:
            known = [count for count in counts if count is not None]
            found[ours] = sum(known) if ours == "num_blocks" else max(known, default=0)
    found |= {ours: getattr(before, ours) for ours in odd}
    return EngineFigures(**found, missing=missing, odd=tuple(sorted(odd)))


def samples_of(text: str, known: frozenset[str]) -> tuple[list[Sample], set[str]]:
    """The samples we know of, and the names of those that cannot be read ("text": it is something else altogether).

    Each line is read by itself, so that one that is broken does not take the others with it.
    """
    samples: list[Sample] = []
    broken = set()
    for line in text.splitlines():
        name = _NAME.match(line)
        if name is None or name[0] not in known:
            continue
        if len(line) > _MAX_LINE:  # its parser takes time with the square of that
            broken.add(name[0])
            continue
        try:
            samples += [sample for family in text_string_to_metric_families(line) for sample in family.samples]
        except Exception:  # the parser raises what it happens to meet
            broken.add(name[0])
    if not samples and not broken and not all(_EXPOSITION.match(line) for line in text.splitlines()):
        broken.add("text")
    return samples, broken


def _value(samples: list[Sample], names: tuple[tuple[str, dict[str, str]], ...], mean: bool) -> float | None:
    """Over all engines, by the newest name that is there."""
    for name, labels in names:
        values = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
        if values:
            return sum(values) / (len(values) if mean else 1)
    return None


def _whole(text: str) -> int | None:
    if text == "None":  # vLLM's for what it does not know yet
        return 0
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None
