"""How long one engine step takes: one linear form for every engine, so that no arm of a comparison gets its own.

    step = fixed + per_token x tokens + per_pair x prefill attention pairs + per_chunk x prefill chunks
         + per_sequence x decoding sequences + per_context x their cached tokens + expert weights touched

Coefficients come from a roofline (``roofline``), from measured rows (fit) or from a profile file. All terms add:
reading weights and computing are not overlapped, which is what the fitted constants then mean.

Knows nothing about scheduling; the simulator asks it for the time of what the scheduler planned.
"""

from __future__ import annotations

import msgspec

from kvbaton.plan.hardware import Gpu
from kvbaton.plan.kv_math import KVCost
from kvbaton.plan.model_weights import Weights
from kvbaton.types import LocalError


class StepWork(msgspec.Struct, frozen=True, gc=False):
    """What one step computes."""

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0  # sum over chunks of tokens x mean number of keys each looks at
    num_decodes: int = 0
    context_tokens: int = 0  # cached tokens the decoding sequences read
    num_chunks: int = 0  # prefill chunks


class StepModel(msgspec.Struct, frozen=True):
    """Seconds of one step as a linear form; all coefficients in seconds."""

    fixed_s: float  # launch, weights that are always read, all-reduce latency
    per_token_s: float  # each token of the step, prefill or decode
    per_pair_s: float = 0.0  # each (query, key) pair of prefill
    per_sequence_s: float = 0.0  # each decoding sequence on top of its token
    per_context_s: float = 0.0  # each cached token a decoding sequence reads
    expert_read_s: float = 0.0  # reading every routed expert once
    expert_share: float = 0.0  # chance that one token uses one given expert
    source: str = "given"
    per_chunk_s: float = 0.0  # each prefill chunk, whatever its length; known only where mixed steps were measured

    def step_s(self, work: StepWork) -> float:
        tokens = work.prefill_tokens + work.num_decodes
        time_s = (
            self.fixed_s
            + self.per_token_s * tokens
            + self.per_pair_s * work.prefill_pairs
            + self.per_sequence_s * work.num_decodes
            + self.per_context_s * work.context_tokens
            + self.per_chunk_s * work.num_chunks
        )
        if self.expert_read_s:
            time_s += self.expert_read_s * (1.0 - (1.0 - self.expert_share) ** tokens)
        return time_s

    def decode_run_s(self, num_decodes: int, context_tokens: int, steps: int) -> float:
        """``steps`` decode steps in a row of the same sequences, each context growing by one a step."""
        first = self.step_s(StepWork(num_decodes=num_decodes, context_tokens=context_tokens))
        return steps * first + self.per_context_s * num_decodes * (steps * (steps - 1) / 2)

    def decode_steps_within(self, num_decodes: int, context_tokens: int, limit_s: float) -> int:
        """How many such steps end before ``limit_s``."""
        first = self.step_s(StepWork(num_decodes=num_decodes, context_tokens=context_tokens))
        grow = self.per_context_s * num_decodes
        steps = int(limit_s / (first + grow * (limit_s / first) / 2)) if limit_s > 0 else 0
        while self.decode_run_s(num_decodes, context_tokens, steps + 1) <= limit_s:
            steps += 1
        while steps and self.decode_run_s(num_decodes, context_tokens, steps) > limit_s:
            steps -= 1
        return steps

    def prefill_s(self, tokens: int, cached: int = 0, budget: int | None = None) -> float:
        """One prompt alone, in chunks of ``budget``."""
        total, start = 0.0, cached
        while start < tokens:
            chunk = min(tokens - start, budget or tokens)
            total += self.step_s(StepWork(prefill_tokens=chunk, prefill_pairs=pairs(start, chunk), num_chunks=1))
            start += chunk
        return total

    def tpot_s(self, num_decodes: int, context_tokens_each: float) -> float:
        work = StepWork(num_decodes=num_decodes, context_tokens=round(num_decodes * context_tokens_each))
        return self.step_s(work)

    def slower(self, factor: float) -> StepModel:
        """The same machine with every constant times ``factor`` (uncertainty bands)."""
        names = (
            "fixed_s", "per_token_s", "per_pair_s", "per_sequence_s", "per_context_s", "expert_read_s", "per_chunk_s"
        )  # fmt: skip
        return msgspec.structs.replace(self, **{name: getattr(self, name) * factor for name in names})


def pairs(start: int, tokens: int) -> float:
    """(query, key) pairs of a causal chunk of ``tokens`` queries after ``start`` cached tokens."""
    return tokens * (start + (tokens + 1) / 2)


class Efficiency(msgspec.Struct, frozen=True):
    """The constants of the roofline. Defaults are round figures for well-run engines; fit them where rows exist."""

    mfu: float = 0.55  # of peak FLOP/s, large products
    mbu: float = 0.80  # of peak memory bandwidth, weights
    mbu_kv: float = 0.80  # of peak memory bandwidth, KV
    fixed_ms: float = 3.0  # of each step, whatever it holds
    sequence_us: float = 10.0  # of each decoding sequence: sampling, block tables, detokenising
    all_reduce_us: float = 5.0  # latency of one all-reduce, twice a layer, times log2(tp)
    link_efficiency: float = 0.50  # of the GPU link, for activations
    source: str = "round figures, not measured"


def roofline(cost: KVCost, weights: Weights, gpu: Gpu, efficiency: Efficiency, weight_bits: int = 16) -> StepModel:
    """Step coefficients of one worker from its hardware.

    Pipeline stages divide the work of a step and add nothing: their bubbles are hidden in a full queue and shown as
    idle time otherwise, an optimism that holds for both arms.
    """
    if weight_bits <= 8 and gpu.fp8_tflops is None:
        raise LocalError(f"{gpu.name} has no 8-bit units", field="weight_bits", fix="16 bit weights, or another GPU")
    sharding = cost.sharding
    ranks = sharding.tp * sharding.pp
    flops = gpu.flops(weight_bits) * efficiency.mfu * ranks * sharding.cp
    attention_flops = gpu.flops(16) * efficiency.mfu * ranks * sharding.cp
    read = gpu.memory_gb_per_s * 1e9 * efficiency.mbu * ranks
    read_kv = gpu.memory_gb_per_s * 1e9 * efficiency.mbu_kv
    weight_bytes = weight_bits / 8
    routed = weights.moe_layers * weights.expert_weights
    always = weights.active - routed * weights.experts_per_token
    hops, comm_s = 0.0, 0.0
    if sharding.tp > 1:
        hops = 2 * cost.shape.num_layers * (sharding.tp - 1).bit_length() * efficiency.all_reduce_us * 1e-6
        comm_bytes = 2 * cost.shape.num_layers * 2 * cost.shape.hidden_size * 2 * (sharding.tp - 1) / sharding.tp
        comm_s = comm_bytes / (gpu.link_gb_per_s * 1e9 * efficiency.link_efficiency)
    return StepModel(
        fixed_s=efficiency.fixed_ms * 1e-3 + always * weight_bytes / read + hops,
        per_token_s=2.0 * weights.active / flops + comm_s,
        per_pair_s=4.0 * weights.attention_width / attention_flops,
        per_sequence_s=efficiency.sequence_us * 1e-6,
        per_context_s=cost.token_bytes / read_kv,
        expert_read_s=routed * weights.experts * weight_bytes / read,
        expert_share=weights.experts_per_token / weights.experts if weights.experts else 0.0,
        source=f"roofline of {gpu.name} x {ranks}: {efficiency.source}",
    )


def kv_budget_bytes(gpu: Gpu, cost: KVCost, weights: Weights, weight_bits: int = 16, share: float = 0.9,
                    reserve_gb: float = 2.0) -> int:  # fmt: skip
    """Bytes of one rank left for the cache: ``share`` of the memory minus weights and ``reserve_gb`` of activations."""
    ranks = cost.sharding.tp * cost.sharding.pp
    left = gpu.memory_gb * 1e9 * share - weights.total * weight_bits / 8 / ranks - reserve_gb * 1e9
    if left <= 0:
        raise LocalError(
            f"{cost.shape.name} at {weight_bits} bits does not fit {ranks} x {gpu.name}",
            field="tp",
            fix="more tensor parallel ranks, or fewer bits",
        )
    return int(left)
