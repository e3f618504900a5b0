"""What a running fleet's own numbers say: where GPU time goes, what to tune first, whether to plan a split.

Reads two scrapes of /metrics (vLLM, SGLang, or kvbaton's own workers) and works on the differences between them, so
counters since start never mix with now. A number that is absent is said to be absent, not zero.

Knows nothing about HTTP; text comes in. Request logs are ``advise_log``'s business.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import inf, isfinite

import msgspec

from kvbaton.types import LocalError

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# Names of the same quantity in the engines' own words. Histograms are given without their suffix.
NAMES: dict[str, tuple[str, ...]] = {
    "prompt_tokens": ("vllm:prompt_tokens_total", "vllm:prompt_tokens", "sglang:prompt_tokens_total"),
    "computed_prompt_tokens": ("kvbaton_worker_computed_prompt_tokens_total",),
    "output_tokens": (
        "vllm:generation_tokens_total", "vllm:generation_tokens", "sglang:generation_tokens_total",
        "kvbaton_worker_output_tokens_total",
    ),
    "cached_tokens": (
        "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "sglang:cached_tokens_total",
        "kvbaton_worker_cached_prompt_tokens_total",
    ),
    "prefill_busy": ("kvbaton_worker_prefill_busy_seconds_total",),
    "decode_busy": ("kvbaton_worker_decode_busy_seconds_total",),
    "queried_tokens": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total",
                    "sglang:num_retractions_total", "kvbaton_worker_preemptions_total"),
    "started": ("process_start_time_seconds",),
    "requests": ("vllm:request_success_total", "sglang:num_requests_total", "kvbaton_worker_requests_total"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "kvbaton_worker_waiting_requests"),
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "kvbaton_worker_running_requests"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "hit_rate": ("sglang:cache_hit_rate",),
    "prefill_time": ("vllm:request_prefill_time_seconds",),
    "decode_time": ("vllm:request_decode_time_seconds",),
    "queue_time": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds", "kvbaton_worker_queue_seconds"),
    "ttft": (
        "vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds", "kvbaton_router_ttft_seconds",
    ),
    "gap": (
        "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds",
        "sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds", "kvbaton_router_itl_seconds",
    ),
}  # fmt: skip

# SGLang can report the same figures from every rank of one server; ranks that share the work share the numbers.
RANKS = frozenset(("tp_rank", "pp_rank", "moe_ep_rank"))
SHARES = frozenset(("kv_usage", "hit_rate"))  # a share of several engines is their mean, not their sum

Labels = tuple[tuple[str, str], ...]
Scrape = dict[str, dict[Labels, float]]


def parse_metrics(text: str) -> Scrape:
    """Prometheus text into name -> labels -> value. Lines that are not samples are skipped, and so are values that are
    not numbers (NaN): what an engine cannot say is not reported."""
    found: Scrape = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line.strip())
        if match is None:
            continue
        labels = tuple(sorted(pair for pair in _LABEL.findall(match[2] or "") if pair[0] not in RANKS))
        try:
            value = float(match[3])
        except ValueError:
            continue
        if isfinite(value):
            series = found.setdefault(match[1], {})
            series[labels] = max(value, series.get(labels, value))
    if not any(name.split(":")[0] in ("vllm", "sglang", "kvbaton") or name.startswith("kvbaton_") for name in found):
        raise LocalError("no metrics of vLLM, SGLang or kvbaton in this scrape", field="metrics",
                         fix="give the text of a worker's /metrics")  # fmt: skip
    return found


class Window(msgspec.Struct, frozen=True):
    """What happened between two scrapes, summed over workers. None: the engine does not say."""

    seconds: float
    workers: int
    prompt_tokens: float | None
    output_tokens: float | None
    cached_share: float | None  # of prompt tokens looked up
    preemptions: float | None
    requests: float | None
    waiting: float | None  # at the second scrape, of all workers
    running: float | None
    kv_usage: float | None  # mean over workers, at the second scrape
    prefill_s: float | None  # request seconds
    prefill_busy_s: float | None  # worker seconds, where the engine counts them
    decode_busy_s: float | None
    queue_s: float | None
    ttft_mean_s: float | None
    queue_mean_s: float | None
    gap_mean_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None


def window(before: Iterable[str], after: Iterable[str], seconds: float) -> Window:
    """The difference of two scrapes of each worker, in the same order."""
    pairs = [(parse_metrics(old), parse_metrics(new)) for old, new in zip(before, after, strict=True)]
    if not pairs or seconds <= 0:
        raise LocalError("two scrapes and the seconds between them are needed", field="metrics")

    def grown(quantity: str, suffix: str = "") -> float | None:
        values = [_grown(old, new, quantity, suffix) for old, new in pairs]
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    def now(quantity: str) -> list[float]:
        return [value for _, new in pairs if (value := _sum(new, quantity)) is not None]

    def mean(quantity: str) -> float | None:
        total, number = grown(quantity, "_sum"), grown(quantity, "_count")
        return total / number if total is not None and number else None

    hits, queries, prompts = grown("cached_tokens"), grown("queried_tokens"), grown("prompt_tokens")
    computed = grown("computed_prompt_tokens")
    if prompts is None and computed is not None:
        prompts = computed + (hits or 0.0)
    looked_up = queries if queries is not None else prompts
    cached = hits / looked_up if hits is not None and looked_up else None
    if cached is None and now("hit_rate"):
        cached = sum(now("hit_rate")) / len(now("hit_rate"))
    gaps = _histogram(pairs, "gap")
    return Window(
        seconds=seconds,
        workers=sum(_works(new) for _, new in pairs) or len(pairs),
        prompt_tokens=prompts,
        output_tokens=grown("output_tokens"),
        cached_share=cached,
        preemptions=grown("preemptions"),
        requests=grown("requests"),
        waiting=sum(now("waiting")) if now("waiting") else None,
        running=sum(now("running")) if now("running") else None,
        kv_usage=sum(now("kv_usage")) / len(now("kv_usage")) if now("kv_usage") else None,
        prefill_s=grown("prefill_time", "_sum"),
        prefill_busy_s=grown("prefill_busy"),
        decode_busy_s=grown("decode_busy"),
        queue_s=grown("queue_time", "_sum"),
        ttft_mean_s=mean("ttft"),
        queue_mean_s=mean("queue_time"),
        gap_mean_s=mean("gap"),
        gap_p50_s=_quantile(gaps, 0.50),
        gap_p99_s=_quantile(gaps, 0.99),
    )


def _works(scrape: Scrape) -> bool:
    """A router's metrics come along, but it is no worker."""
    return any(_series(scrape, name) is not None for name in ("running", "output_tokens", "kv_usage"))


def _sum(scrape: Scrape, quantity: str, suffix: str = "") -> float | None:
    series = _series(scrape, quantity, suffix)
    if series is None:
        return None
    total = sum(series.values())
    return total / len(series) if quantity in SHARES else total


def _series(scrape: Scrape, quantity: str, suffix: str = "") -> dict[Labels, float] | None:
    return next((scrape[name + suffix] for name in NAMES[quantity] if scrape.get(name + suffix)), None)


def _grown(old: Scrape, new: Scrape, quantity: str, suffix: str) -> float | None:
    """Growth of every series on its own: an engine that restarted counts from zero, the others go on."""
    after = _series(new, quantity, suffix)
    if after is None:
        return None
    before = {} if _restarted(old, new) else _series(old, quantity, suffix) or {}
    return sum(value - before.get(labels, 0.0) if value >= before.get(labels, 0.0) else value
               for labels, value in after.items())  # fmt: skip


def _restarted(old: Scrape, new: Scrape) -> bool:
    """A process that is younger than the first scrape: its counters say nothing of before, however high they are."""
    before, after = _sum(old, "started"), _sum(new, "started")
    return before is not None and after is not None and after > before + 1.0


def _histogram(pairs: list[tuple[Scrape, Scrape]], quantity: str) -> dict[float, float]:
    """Cumulative counts by upper edge, grown between the scrapes, all workers together."""
    counts: dict[float, float] = {}
    for old, new in pairs:
        after = _series(new, quantity, "_bucket")
        if after is None:
            continue
        before = {} if _restarted(old, new) else _series(old, quantity, "_bucket") or {}
        for labels, value in after.items():
            # The bucket of all tells whether this histogram began anew: smaller edges may by chance have grown.
            whole = tuple(sorted({**dict(labels), "le": "+Inf"}.items()))
            anew = after.get(whole, 0.0) < before.get(whole, 0.0)
            edge = float(dict(labels)["le"].replace("+Inf", "inf"))
            counts[edge] = counts.get(edge, 0.0) + value - (0.0 if anew else before.get(labels, 0.0))
    return counts


def _quantile(counts: Mapping[float, float], share: float) -> float | None:
    """By linear interpolation within the bucket; the last finite edge when it lies above all of them."""
    if not counts or counts.get(inf, 0.0) <= 0:
        return None
    wanted, below, before = share * counts[inf], 0.0, 0.0
    for edge in sorted(counts):
        if counts[edge] >= wanted:
            if not isfinite(edge):
                return below
            inside = counts[edge] - before
            return below + (edge - below) * ((wanted - before) / inside if inside else 1.0)
        below, before = edge, counts[edge]
    return below


class StepPrice(msgspec.Struct, frozen=True):
    """Seconds of GPU time of one token in each phase, to split busy time. From a profile or a roofline."""

    prefill_s: float
    decode_s: float  # one output token's share of a step, at the batch that runs
    source: str


class Advice(msgspec.Struct, frozen=True):
    prefill_share: float | None  # of GPU time
    prefill_share_source: str
    miss_share: float | None  # of prefill that is cache miss: what a better cache could save
    uncached_tokens: float | None  # a request
    prompt_per_output: float | None
    queue_share_of_ttft: float | None
    gap_ratio: float | None  # p99 over median
    preemptions_per_request: float | None
    plan_a_split: bool
    why: str
    tune_first: tuple[str, ...]
    unknown: tuple[str, ...]
    window: Window


def advise(seen: Window, price: StepPrice | None = None) -> Advice:
    """What the window says, in order of what to do."""
    share, source = _prefill_share(seen, price)
    per_request = seen.prompt_tokens / seen.requests if seen.prompt_tokens and seen.requests else None
    uncached = per_request * (1.0 - (seen.cached_share or 0.0)) if per_request is not None else None
    queue = _ratio(seen.queue_mean_s, seen.ttft_mean_s)
    gap_ratio = _ratio(seen.gap_p99_s, seen.gap_p50_s)
    preempted = _ratio(seen.preemptions, seen.requests)
    tune = _tune(seen, share, queue, gap_ratio, preempted)
    fitting = share is not None and 0.2 <= share <= 0.8
    hurting = gap_ratio is None or gap_ratio > 3.0  # who does not know the gaps has to look at them
    worth = fitting and hurting and (uncached is None or uncached >= 512) and seen.workers >= 2
    reasons = [
        "prefill's share of GPU time is unknown" if share is None else f"prefill takes {share:.0%} of GPU time",
        "gaps are unknown" if gap_ratio is None else f"the p99 gap is {gap_ratio:.1f} times the median",
    ]
    if uncached is not None:
        reasons.append(f"{uncached:,.0f} uncached prompt tokens a request")
    if seen.workers < 2:
        reasons.append("one worker cannot be divided")
    return Advice(
        prefill_share=share,
        prefill_share_source=source,
        miss_share=None if seen.cached_share is None else 1.0 - seen.cached_share,
        uncached_tokens=uncached,
        prompt_per_output=_ratio(seen.prompt_tokens, seen.output_tokens),
        queue_share_of_ttft=queue,
        gap_ratio=gap_ratio,
        preemptions_per_request=preempted,
        plan_a_split=worth,
        why="; ".join(reasons),
        tune_first=tune,
        unknown=tuple(name for name in Window.__struct_fields__ if getattr(seen, name) is None),
        window=seen,
    )


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return top / bottom if top is not None and bottom else None


def _prefill_share(seen: Window, price: StepPrice | None) -> tuple[float | None, str]:
    """GPU time in prefill. Request seconds are no GPU seconds, so a price a token beats the engine's request timers."""
    if seen.prefill_busy_s is not None and seen.decode_busy_s is not None:
        busy = seen.prefill_busy_s + seen.decode_busy_s
        return (seen.prefill_busy_s / busy if busy else None), "the engine's busy seconds by phase"
    if price is not None and seen.prompt_tokens is not None and seen.output_tokens is not None:
        computed = seen.prompt_tokens * (1.0 - (seen.cached_share or 0.0))
        prefill, decode = computed * price.prefill_s, seen.output_tokens * price.decode_s
        return (prefill / (prefill + decode), price.source) if prefill + decode > 0 else (None, price.source)
    if seen.prefill_s is not None:
        # One prefill runs at a time in most steps, so its request seconds are close to the worker seconds it takes.
        return min(1.0, seen.prefill_s / (seen.seconds * seen.workers)), "request prefill seconds over worker seconds"
    return None, "give a profile (--profile) to price tokens"


def _tune(seen: Window, share: float | None, queue: float | None, gap_ratio: float | None,
          preempted: float | None) -> tuple[str, ...]:  # fmt: skip
    """What to do before a split, most urgent first."""
    todo = []
    if preempted is not None and preempted > 0.02:
        todo.append(f"{preempted:.2f} preemptions a request: fewer running sequences, an 8-bit cache, or more memory")
    elif seen.kv_usage is not None and seen.kv_usage > 0.95:
        todo.append(f"the cache is {seen.kv_usage:.0%} full: an 8-bit cache or more memory")
    if seen.cached_share is not None and seen.cached_share < 0.3 and share is not None and share > 0.3:
        todo.append(f"{1 - seen.cached_share:.0%} of prompt tokens miss the cache: route by prefix, add a cache tier")
    if queue is not None and queue > 0.5:
        todo.append(f"{queue:.0%} of TTFT is queueing: add workers or shed load; a split does not make GPUs")
    if gap_ratio is not None and gap_ratio > 3.0:
        todo.append(f"p99 gaps are {gap_ratio:.1f} times the median: a smaller chunk budget")
    return tuple(todo) or ("nothing stands out",)
