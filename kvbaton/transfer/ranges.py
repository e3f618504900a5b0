"""Which (layer, block) regions of an offer are ready, which were asked for, and what to read next.

    layer 0  |####|####|....|    # read      one Region is a rectangle: the same blocks of neighbouring layers
    layer 1  |####|++++|....|    + ready
    layer 2  |++++|....|....|    . not yet computed

Invariants: a region is handed out once, and only when all of its tokens are computed in all of its layers; the regions
together are exactly the blocks that hold tokens [have, num_tokens), so their bytes are the layout's arithmetic.

Pure. Knows nothing about destinations, transports or time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Region:
    """Layers [layer_start, layer_stop) of offered blocks [block_start, block_stop) (indices into the offer)."""

    layer_start: int
    layer_stop: int
    block_start: int
    block_stop: int

    @property
    def num_layer_blocks(self) -> int:
        return (self.layer_stop - self.layer_start) * (self.block_stop - self.block_start)


class CopyPlan:
    """For one offer. ``streaming=False``: nothing is ready until everything is (to measure what streaming is worth)."""

    def __init__(
        self, num_layers: int, block_size: int, num_tokens: int, have_tokens: int, cached_tokens: int, streaming: bool
    ) -> None:
        assert have_tokens >= 0 and 0 <= cached_tokens <= num_tokens
        self.num_layers = num_layers
        self.block_size = block_size
        self.num_tokens = num_tokens
        self.streaming = streaming
        self.last_block = -(-num_tokens // block_size)
        self.first_block = have_tokens // block_size if have_tokens < num_tokens else self.last_block
        self.num_layer_blocks = num_layers * (self.last_block - self.first_block)  # to read in all
        self._ready_tokens = [cached_tokens] * num_layers
        self._asked = [self.first_block] * num_layers  # blocks before this one are read or being read

    def progress(self, tokens_ready: int, layers_ready: int) -> None:
        """Late, repeated and overtaken reports change nothing: what is ready stays ready."""
        for layer in range(min(layers_ready, self.num_layers)):
            self._ready_tokens[layer] = max(self._ready_tokens[layer], min(tokens_ready, self.num_tokens))

    def all_ready(self) -> None:
        self._ready_tokens = [self.num_tokens] * self.num_layers

    @property
    def exhausted(self) -> bool:
        """Every region was handed out."""
        return all(asked == self.last_block for asked in self._asked)

    def next_region(self, max_layer_blocks: int) -> Region | None:
        """The next regions to read, lowest layer first, at most that large; None when nothing is ready."""
        if not self.streaming and min(self._ready_tokens) < self.num_tokens:
            return None
        for layer in range(self.num_layers):
            start, stop = self._asked[layer], self._ready_block(layer)
            if start < stop:
                return self._take(layer, start, min(stop, start + max_layer_blocks), max_layer_blocks)
        return None

    def _ready_block(self, layer: int) -> int:
        """Blocks before this one are complete in ``layer``; the last one may be partly filled and is complete then."""
        ready = self._ready_tokens[layer]
        return self.last_block if ready == self.num_tokens else ready // self.block_size

    def _take(self, layer: int, start: int, stop: int, max_layer_blocks: int) -> Region:
        layer_stop = layer + 1
        while (
            layer_stop < self.num_layers
            and self._asked[layer_stop] == start
            and self._ready_block(layer_stop) >= stop
            and (layer_stop + 1 - layer) * (stop - start) <= max_layer_blocks
        ):
            layer_stop += 1
        for taken in range(layer, layer_stop):
            self._asked[taken] = stop
        return Region(layer, layer_stop, start, stop)


def runs(*lists: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, stop) index ranges in which every list counts up by one: what one copy can cover."""
    length = len(lists[0])
    start = 0
    for index in range(1, length + 1):
        if index == length or any(ids[index] != ids[index - 1] + 1 for ids in lists):
            yield start, index
            start = index
