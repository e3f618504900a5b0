"""From a row of logits to a token, for one sequence, as users of OpenAI's API and of vLLM expect.

Order: logit bias; ban of what would end the text before ``min_tokens``; repetition penalty (over prompt and output),
frequency and presence penalty (over output); then greedy, or temperature, min_p, top_k, top_p and one draw.
Logprobs are those of the raw logits, before all of this (vLLM's default).

Invariants: exactly one random number is drawn for each token that is not greedy, from a generator of this sequence's
own, so a seed gives the same text whatever else is in the batch, and ``resume`` can stand in for any prefix of it;
the row is never written to; ids outside the vocabulary are ignored (the API layer refuses them), because an error here
would be an error of the whole batch. Logits that are not numbers end this sequence with ``finish_reason="error"``.

Knows nothing about text: stop strings belong to ``tokenizer.StopChecker``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from kvbaton.types import FinishReason, LocalError, SamplingParams, TokenLogprobs, TokenOutput

# A running sum over the vocabulary is the dearest step of a draw; sums of blocks, then one block, is ten times less.
BLOCK = 256
# A model's nucleus is nearly always within its best thousand tokens: sort those first, all only if they do not suffice.
HEAD = 1024
# Less is zero as a float32, or makes infinities of logits, and nothing can be drawn of what is no number.
LEAST_TEMPERATURE, LEAST_PENALTY = 1e-30, 1e-6


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that have no meaning, naming the field. For the edge of the system: samplers assume it."""
    ranges: tuple[tuple[str, float, float, float], ...] = (
        ("max_tokens", params.max_tokens, 1, math.inf),
        ("min_tokens", params.min_tokens, 0, params.max_tokens),
        ("temperature", params.temperature, 0.0, 100.0),
        ("top_k", params.top_k, 0, math.inf),
        ("min_p", params.min_p, 0.0, 1.0),
        ("presence_penalty", params.presence_penalty, -2.0, 2.0),
        ("frequency_penalty", params.frequency_penalty, -2.0, 2.0),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:  # also refuses NaN
            raise LocalError(f"{name} must be between {low} and {high}, got {value}", field=name)
    if not 0.0 < params.top_p <= 1.0:
        raise LocalError(f"top_p must be above 0 and at most 1, got {params.top_p}", field="top_p")
    if not 0.0 < params.repetition_penalty < math.inf:
        raise LocalError(
            f"repetition_penalty must be positive, got {params.repetition_penalty}", field="repetition_penalty"
        )
    for name, token_ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        if outside:
            raise LocalError(f"{name} has token id {outside[0]}, the vocabulary has {vocab_size}", field=name)
    if not all(math.isfinite(bias) for bias in params.logit_bias.values()):
        raise LocalError("logit_bias must be finite numbers", field="logit_bias")


class SequenceSampler:
    """Samples one sequence. Call ``sample`` once for each output token, in order."""

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], eos_token_ids: Iterable[int]) -> None:
        self._params = params
        self._stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else set(eos_token_ids))
        self._stop_array = np.array(sorted(self._stop_ids), dtype=np.int64)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._biases = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._repetition = params.repetition_penalty != 1.0
        self._counts_matter = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._prompt_ids = frozenset(prompt_token_ids) if self._repetition else frozenset()
        self._prompt_array = np.array(sorted(self._prompt_ids), dtype=np.int64)
        # A seed may be negative in OpenAI's API; without one, the operating system's entropy.
        self._seed = np.random.SeedSequence(None if params.seed is None else params.seed % 2**64)
        self._rng = np.random.Generator(np.random.PCG64(self._seed))
        self._output_counts: Counter[int] = Counter()
        self._num_output = 0

    @property
    def num_output_tokens(self) -> int:
        return self._num_output

    def resume(self, output_token_ids: Iterable[int]) -> None:
        """Go on as if exactly these tokens had been sampled here from the beginning (hand-off, recompute)."""
        self._output_counts = Counter(output_token_ids)
        self._num_output = self._output_counts.total()
        generator = np.random.PCG64(self._seed)
        if not self._params.greedy:
            generator.advance(self._num_output)  # one draw a token
        self._rng = np.random.Generator(generator)

    def sample(self, logits_row: np.ndarray) -> TokenOutput:
        """``logits_row``: float32 [vocab], raw."""
        row = self._adjusted(logits_row)
        token_id = int(np.argmax(row))
        sound = math.isfinite(row[token_id])  # argmax finds a NaN or +inf if there is one; -inf means nothing is left
        if not self._params.greedy:
            draw = self._rng.random()  # even if unused: one a token
            if sound:
                token_id = self._pick(row, row[token_id], draw)
        logprobs = None
        if self._params.logprobs is not None and sound:
            logprobs = token_logprobs(logits_row, token_id, self._params.logprobs)
        self._num_output += 1
        if self._counts_matter or self._repetition:
            self._output_counts[token_id] += 1
        finish: FinishReason | None = self._finish_reason(token_id) if sound else "error"
        return TokenOutput(token_id, logprobs, finish, stop_token=finish == "stop")

    def _finish_reason(self, token_id: int) -> FinishReason | None:
        if token_id in self._stop_ids and self._num_output >= self._params.min_tokens:
            return "stop"
        return "length" if self._num_output >= self._params.max_tokens else None

    def _adjusted(self, raw: np.ndarray) -> np.ndarray:
        """The row after bias, ban and penalties; ``raw`` itself where none applies."""
        banned = self._num_output < self._params.min_tokens and self._stop_array.size > 0
        if not (banned or self._bias_ids.size or self._repetition or (self._counts_matter and self._output_counts)):
            return raw
        row = raw.copy()
        size = len(row)
        if self._bias_ids.size:
            inside = self._bias_ids < size
            row[self._bias_ids[inside]] += self._biases[inside]
        if banned:
            row[self._stop_array[self._stop_array < size]] = -np.inf
        if self._repetition:
            new = [token_id for token_id in self._output_counts if token_id not in self._prompt_ids]
            seen = np.concatenate([self._prompt_array, np.array(new, dtype=np.int64)])
            seen = seen[seen < size]
            penalty = np.float32(max(self._params.repetition_penalty, LEAST_PENALTY))
            row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        if self._counts_matter and self._output_counts:
            num_distinct = len(self._output_counts)
            output_ids = np.fromiter(self._output_counts.keys(), dtype=np.int64, count=num_distinct)
            counts = np.fromiter(self._output_counts.values(), dtype=np.float32, count=num_distinct)
            row[output_ids] -= np.float32(self._params.frequency_penalty) * counts
            row[output_ids] -= np.float32(self._params.presence_penalty)
        return row

    def _pick(self, row: np.ndarray, best: float, draw: float) -> int:
        """Invert the cumulative distribution of the candidates, in id order, at ``draw``."""
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
            scaled = (row - best) / np.float32(max(self._params.temperature, LEAST_TEMPERATURE))
        threshold = -math.inf
        if self._params.min_p > 0.0:
            threshold = math.log(self._params.min_p)  # the best is at 0, so this is its share
        if 0 < self._params.top_k < len(scaled):
            place = len(scaled) - self._params.top_k
            threshold = max(threshold, float(np.partition(scaled, place)[place]))
        # Few are left where a threshold applies, so go on with those alone. Equals of the k-th best all stay.
        token_ids = np.flatnonzero(scaled >= np.float32(threshold)) if threshold > -math.inf else None
        weights = np.exp(scaled if token_ids is None else scaled[token_ids])
        if self._params.top_p < 1.0:
            cut_to_top_p(weights, self._params.top_p)
        place = draw_index(weights, draw)
        return place if token_ids is None else int(token_ids[place])


def cut_to_top_p(weights: np.ndarray, top_p: float) -> None:
    """Zero all but the fewest largest weights whose share of the sum reaches ``top_p``; at least one stays.

    Of equal weights at the border the first ones stay, so the set is as small as asked for.
    """
    target = top_p * float(_block_sums(weights).sum())
    descending = _largest(weights, target)
    num_kept = _first_reaching(descending, _block_sums(descending), target, strictly=False) + 1
    smallest = descending[num_kept - 1]
    level = np.flatnonzero(weights == smallest)
    num_above = int(np.searchsorted(-descending[:num_kept], -smallest, side="left"))
    weights *= weights >= smallest  # a product is quicker than assigning through a mask
    weights[level[num_kept - num_above :]] = 0.0


def _largest(weights: np.ndarray, target: float) -> np.ndarray:
    """The largest weights in falling order, at least so many that their sum reaches ``target``."""
    if weights.size > HEAD:
        head = np.partition(weights, weights.size - HEAD)[-HEAD:]
        if float(head.sum(dtype=np.float64)) > target:
            return np.sort(head)[::-1]
    return np.sort(weights)[::-1]


def draw_index(weights: np.ndarray, draw: float) -> int:
    """The index whose stretch of the summed weights holds ``draw`` (in [0, 1)); never one of weight zero."""
    sums = _block_sums(weights)
    return _first_reaching(weights, sums, draw * float(sums.sum()), strictly=True)


def _block_sums(weights: np.ndarray) -> np.ndarray:
    return np.add.reduceat(weights, np.arange(0, weights.size, BLOCK), dtype=np.float64)


def _first_reaching(weights: np.ndarray, block_sums: np.ndarray, target: float, strictly: bool) -> int:
    """First index whose running sum reaches (or strictly exceeds) ``target``: find the block, then the place in it.

    Where rounding leaves the target out of reach, the last index of positive weight.
    """
    side: Literal["left", "right"] = "right" if strictly else "left"
    block_ends = np.cumsum(block_sums)
    block = int(np.searchsorted(block_ends, target, side=side))
    if block == block_sums.size:
        block = int(np.flatnonzero(block_sums)[-1])
    inside = weights[block * BLOCK : (block + 1) * BLOCK]
    before = block_ends[block - 1] if block else 0.0  # not past the target, so a weight of zero is never the first
    place = int(np.searchsorted(before + np.cumsum(inside, dtype=np.float64), target, side=side))
    if place == inside.size:
        place = int(np.flatnonzero(inside)[-1])
    return block * BLOCK + place


def token_logprobs(raw: np.ndarray, token_id: int, num_top: int) -> TokenLogprobs:
    """Natural-log probabilities of ``token_id`` and of the ``num_top`` best tokens under the raw logits."""
    best = raw.max()
    normaliser = float(best) + math.log(float(np.exp(raw - best).sum(dtype=np.float64)))
    num_top = min(num_top, raw.size)
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        place = raw.size - num_top
        found = np.flatnonzero(raw >= np.partition(raw, place)[place])
        ranked = found[np.argsort(-raw[found], kind="stable")][:num_top]
        top = tuple((int(i), float(raw[i]) - normaliser) for i in ranked)
    return TokenLogprobs(token_id, float(raw[token_id]) - normaliser, top)
