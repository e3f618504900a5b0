"""One request as the scheduler sees it: its tokens, its blocks, how far its KV is computed.

Plain state: only the scheduler writes it, in the transitions that scheduler.py draws. ``prompt`` and ``output`` tokens
are numbered through, output after prompt. Knows nothing about batches or about who else holds its blocks.
"""

from __future__ import annotations

from typing import Literal

from kvbaton.kv.blocks import extend_hashes, root_hash
from kvbaton.types import GenerateRequest

Mode = Literal["full", "prefill_only", "import"]
State = Literal["waiting", "running", "held", "receiving", "finished"]


class Sequence:
    """One request on its way. Others read it; only the scheduler writes.

    A simulator gives ``num_prompt_tokens`` instead of token ids, and the hashes of the full blocks it knows (of the
    prompt, and of the output that follows if it likes); blocks without a known hash are not cached.
    """

    __slots__ = (
        "_hashes_given", "block_hashes", "blocks", "max_num_tokens", "mode", "num_cached_tokens", "num_computed",
        "num_foretold_tokens",
        "num_preemptions", "num_prompt_tokens", "num_published", "num_tokens", "order", "output_token_ids",
        "prefilling", "request", "request_id", "state",
    )  # fmt: skip

    def __init__(
        self,
        request: GenerateRequest,
        mode: Mode = "full",
        num_prompt_tokens: int | None = None,
        block_hashes: list[bytes] | None = None,
    ) -> None:
        assert not (request.prompt_token_ids and num_prompt_tokens), "give token ids or their number, not both"
        self.request = request
        self.request_id = request.request_id
        self.mode: Mode = mode
        self.state: State = "waiting"
        self.num_prompt_tokens = num_prompt_tokens or len(request.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens  # prompt and output
        self.max_num_tokens = self.num_prompt_tokens + request.sampling.max_tokens
        self.output_token_ids: list[int] = []
        self.blocks: list[int] = []
        self.num_computed = 0  # tokens whose KV is in ``blocks``
        self.num_cached_tokens = 0  # found in the prefix cache when first scheduled or reserved
        self.num_foretold_tokens = 0  # found in the prefix cache when it was last queued
        self.num_published = 0  # leading blocks that were published or matched
        self.num_preemptions = 0
        self.prefilling = True  # running, but its next step is not one more token of output
        self.order = (request.priority, 0)  # arrival is filled in by the scheduler
        self.block_hashes: list[bytes] = list(block_hashes) if block_hashes is not None else []
        self._hashes_given = block_hashes is not None or num_prompt_tokens is not None

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def hashes_of(self, num_blocks: int, block_size: int) -> list[bytes]:
        """The chain of at least the first ``num_blocks`` full blocks, or of as many as are known."""
        known = self.block_hashes
        if len(known) < num_blocks and not self._hashes_given:
            parent = known[-1] if known else root_hash(self.request.cache_salt)
            tokens = self._tokens(len(known) * block_size, num_blocks * block_size)
            known.extend(extend_hashes(parent, tokens, block_size))
        return known

    def _tokens(self, start: int, stop: int) -> list[int]:
        prompt, num_prompt = self.request.prompt_token_ids, self.num_prompt_tokens
        output = self.output_token_ids[max(0, start - num_prompt) : max(0, stop - num_prompt)]
        return [*prompt[start:stop], *output]

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request_id} {self.mode} {self.state} prompt={self.num_prompt_tokens} "
            f"output={self.num_output_tokens} computed={self.num_computed} blocks={len(self.blocks)}>"
        )
