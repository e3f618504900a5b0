"""How many tokens of a prompt each worker has cached, by the best knowledge there is of each.

    sends events, and they come     exact: what its events said, and what is on its way there now (``kv_index``)
    sends events, but none come     the last that was known, and what was sent there since
    sends none                      approximate: what was sent there before (``routing_history``)

Invariant: of a worker that restarted nothing is foretold that its old life knew. Each worker's chains are made with its
own block size, those of the approximate ones with the router's. Pure; knows nothing about sockets or load.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from kvbaton.kv.blocks import block_hashes
from kvbaton.router.kv_index import Expectation, KVIndex, Trust
from kvbaton.router.routing_history import RoutingHistory

if TYPE_CHECKING:  # the planner reads this too, and must load no sockets
    from kvbaton.observe.metrics import Metrics

Chain = Sequence[bytes]
_MEMBER_METRICS = (
    "kvbaton_router_prefix_index_blocks",
    "kvbaton_router_kv_fresh",
    "kvbaton_router_kv_gaps_total",
    "kvbaton_router_kv_resyncs_total",
    "kvbaton_router_kv_failures_total",
)


class PromptChains:
    """The prompts of one request as chains of block hashes, of whatever block size somebody needs."""

    def __init__(self, prompts: Sequence[Sequence[int]], salt: str = "", sizes: Iterable[int] = ()) -> None:
        """``sizes``: those to compute now, for this may run on a thread and later calls may not."""
        self.num_tokens = tuple([len(prompt) for prompt in prompts])
        self._prompts = prompts
        self._salt = salt
        self._by_size: dict[int, tuple[Chain, ...]] = {}
        for size in sizes:
            self.of(size)

    @classmethod
    def known(cls, num_tokens: int, chains: Mapping[int, Chain]) -> PromptChains:
        """One prompt whose chains were computed elsewhere."""
        prompt = cls(())
        prompt.num_tokens = (num_tokens,)
        prompt._by_size = {size: (chain,) for size, chain in chains.items()}
        return prompt

    def of(self, block_size: int) -> tuple[Chain, ...]:
        chains = self._by_size.get(block_size)
        if chains is None:
            chains = tuple([tuple(block_hashes(prompt, block_size, self._salt)) for prompt in self._prompts])
            self._by_size[block_size] = chains
        return chains


class PrefixIndex:
    def __init__(self, block_tokens: int, max_blocks: int, max_exact_blocks: int = 1 << 20) -> None:
        """``block_tokens`` and ``max_blocks`` (for each worker) of those that send no events; ``max_exact_blocks`` of
        all others together."""
        self.block_tokens = block_tokens
        self.exact = KVIndex(max_exact_blocks)
        self._history = RoutingHistory(block_tokens, max_blocks)
        self._lives: dict[str, str] = {}

    # -- workers ---------------------------------------------------------------------------------------------------

    def heard_of(self, worker: str, life: str, block_size: int, sends_events: bool, cache_tokens: int) -> None:
        """What a worker says of itself, again and again. Another life starts with nothing."""
        if self._lives.get(worker) != life:
            self.forget(worker)
            self._lives[worker] = life
            if sends_events:
                self.exact.join(worker, block_size)
        if not sends_events:
            self._history.limit(worker, cache_tokens)

    def life(self, worker: str) -> str | None:
        """The incarnation that what is known speaks of."""
        return self._lives.get(worker)

    def forget(self, worker: str) -> None:
        self._lives.pop(worker, None)
        self.exact.forget(worker)
        self._history.forget(worker)

    def num_blocks(self, worker: str) -> int:
        return self.exact.num_blocks(worker) if self.exact.knows(worker) else self._history.num_blocks(worker)

    def trust(self, worker: str) -> Trust | Literal["approximate"]:
        return self.exact.trust(worker) if self.exact.knows(worker) else "approximate"

    def export(self, metrics: Metrics, worker: str) -> None:
        """Bring the gauges up to date, before a scrape."""
        metrics.set("kvbaton_router_prefix_index_blocks", worker, value=self.num_blocks(worker))
        metrics.set("kvbaton_router_kv_fresh", worker, value=self.trust(worker) == "fresh")
        metrics.set("kvbaton_router_kv_index_hashes", value=self.exact.num_hashes)
        metrics.set("kvbaton_router_kv_index_dropped", value=self.exact.num_dropped)

    @staticmethod
    def forget_metrics(metrics: Metrics, worker: str) -> None:
        for name in _MEMBER_METRICS:
            metrics.forget(name, worker)
        for kind in ("stored", "removed", "cleared"):
            metrics.forget("kvbaton_router_kv_events_total", worker, kind)

    def chain_sizes(self) -> set[int]:
        """Block sizes that a lookup will ask chains of."""
        sizes = self.exact.block_sizes()
        if not sizes or any(not self.exact.knows(worker) for worker in self._lives):
            sizes.add(self.block_tokens)
        return sizes

    # -- prompts ---------------------------------------------------------------------------------------------------

    def cached_tokens(self, prompts: PromptChains, workers: Iterable[str]) -> dict[str, int]:
        """Of all prompts together. The last token of a prompt is always computed, so it never counts."""
        found = dict.fromkeys(workers, 0)
        for size in self.exact.block_sizes():
            for num_tokens, chain in zip(prompts.num_tokens, prompts.of(size), strict=True):
                most = (num_tokens - 1) // size
                for worker, depth in self.exact.matched(chain, size).items():
                    if worker in found:
                        found[worker] += min(depth, most) * size
        by_history, size = self._history, self.block_tokens
        chains: list[tuple[int, Chain]] | None = None
        for worker in found:
            if self.exact.knows(worker) or not by_history.num_blocks(worker):
                continue
            if chains is None:
                chains = [
                    ((num_tokens - 1) // size, chain)
                    for num_tokens, chain in zip(prompts.num_tokens, prompts.of(size), strict=True)
                ]
            for most, chain in chains:
                found[worker] += min(by_history.matched_blocks(worker, chain), most) * size
        return found

    def expect(self, worker: str, prompts: PromptChains) -> list[Expectation]:
        """The prompts are about to be computed there. ``settle`` each when that is over, on any way out."""
        exact = self.exact
        if not exact.knows(worker):
            return []
        return [exact.expect(worker, chain) for chain in prompts.of(exact.block_size(worker))]

    def record(self, worker: str, prompts: PromptChains) -> None:
        """The prompts were computed there."""
        if self.exact.knows(worker):
            for chain in prompts.of(self.exact.block_size(worker)):
                self.exact.used(worker, chain)
        else:
            for chain in prompts.of(self.block_tokens):
                self._history.record(worker, chain)
