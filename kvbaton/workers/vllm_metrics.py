"""vLLM's own figures, read from its /metrics text: load, blocks, tokens by source, and what its KV connector moved.

Names have changed over versions; those known are tried in order, and one that is missing is a zero that ``missing``
names. Pure. Knows nothing about HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

# our name -> names of the sample in vLLM, newest first, with the labels that must match
_SAMPLES: dict[str, tuple[tuple[str, dict[str, str]], ...]] = {
    "num_running": (("vllm:num_requests_running", {}),),
    "num_waiting": (("vllm:num_requests_waiting", {}),),
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
}
_CONFIG = "vllm:cache_config_info"


@dataclass(frozen=True)
class EngineFigures:
    """Summed over the engines of one server."""

    num_running: int = 0
    num_waiting: int = 0
    usage: float = 0.0  # share of KV blocks in use
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0  # prompt tokens whose KV came from another server
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_bytes_received: int = 0
    num_failed_transfers: int = 0
    num_expired: int = 0
    num_blocks: int = 0
    block_size: int = 0
    missing: tuple[str, ...] = field(default=())


def read_figures(text: str) -> EngineFigures:
    """ValueError for text that is no exposition."""
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("vllm:")
    ]
    found: dict[str, float] = {}
    for ours, names in _SAMPLES.items():
        for name, labels in names:
            values = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
            if values:
                found[ours] = sum(values) / (len(values) if ours == "usage" else 1)
                break
    config = [sample.labels for sample in samples if sample.name == _CONFIG]
    return EngineFigures(
        num_blocks=sum(_whole(labels.get("num_gpu_blocks")) for labels in config),
        block_size=_whole(config[0].get("block_size")) if config else 0,
        missing=tuple(name for name in _SAMPLES if name not in found),
        usage=found.pop("usage", 0.0),
        **{name: int(value) for name, value in found.items()},
    )


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0
