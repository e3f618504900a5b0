"""The router's prefix index in the simulator: the live one, fed by the events of the simulated workers' block managers.

Events reach it ``lag_s`` after they happened, as over a network; what is sent to a worker is expected there at once.
Workers with a cache tier in host memory send no events, because what the tier holds is not among their blocks: of
those the index remembers what was sent there. Knows nothing about policies or steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvbaton.kv.blocks import BlockEvents
from kvbaton.plan.sim_record import Record
from kvbaton.plan.sim_worker import SimWorker
from kvbaton.router.kv_index import Expectation
from kvbaton.router.prefix_index import PrefixIndex, PromptChains


class SimIndex:
    def __init__(self, block_size: int, max_blocks: int, lag_s: float) -> None:
        self._block_size = block_size
        self._lag_s = lag_s
        self._index = PrefixIndex(block_size, max_blocks, 1 << 40)  # memory is no concern here
        self._under_way: dict[str, list[tuple[str, Expectation]]] = {}
        self._coming: deque[tuple[float, str, str, BlockEvents | Expectation]] = deque()

    def cached_tokens(self, record: Record, workers: Iterable[SimWorker], now_s: float) -> dict[str, int]:
        self._catch_up(now_s)
        names = []
        for worker in workers:
            self._join(worker)
            names.append(worker.name)
        return self._index.cached_tokens(self._chains(record), names)

    def dispatched(self, record: Record, workers: Iterable[SimWorker]) -> None:
        prompts = self._chains(record)
        expected = self._under_way.setdefault(record.request_id, [])
        for worker in workers:
            self._join(worker)
            expected += [(worker.name, each) for each in self._index.expect(worker.name, prompts)]
            self._index.record(worker.name, prompts)

    def over(self, record: Record, now_s: float) -> None:
        """The request holds nothing any more, or is sent elsewhere."""
        for name, each in self._under_way.pop(record.request_id, ()):
            self._coming.append((now_s + self._lag_s, name, self._index.life(name) or "", each))

    def worked(self, worker: SimWorker, now_s: float) -> None:
        """The worker's cache may have changed."""
        if events := worker.blocks.drain_events():
            self._coming.append((now_s + self._lag_s, worker.name, self._life(worker), events))

    def forget(self, worker: SimWorker) -> None:
        self._index.forget(worker.name)

    def _catch_up(self, now_s: float) -> None:
        exact = self._index.exact
        while self._coming and self._coming[0][0] <= now_s:
            _, name, life, what = self._coming.popleft()
            if isinstance(what, Expectation):
                what.settle()
            if self._index.life(name) != life or not exact.knows(name):
                continue
            if isinstance(what, BlockEvents):
                exact.apply(name, what)
            else:
                exact.end_round(name, exact.begin_round(name))

    def _join(self, worker: SimWorker) -> None:
        life = self._life(worker)
        if self._index.life(worker.name) == life:
            return
        spec = worker.spec
        cache_tokens = (spec.num_blocks + spec.tier_blocks) * spec.block_size
        self._index.heard_of(worker.name, life, spec.block_size, not spec.tier_blocks, cache_tokens)
        if self._index.exact.knows(worker.name):
            self._index.exact.end_round(worker.name, 0)

    @staticmethod
    def _life(worker: SimWorker) -> str:
        return str(worker.num_lives)

    def _chains(self, record: Record) -> PromptChains:
        return PromptChains.known(record.prompt_tokens, {self._block_size: record.hashes})
