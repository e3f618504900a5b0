"""Real text that every machine with Python has, and token windows cut from it.

The text is the language reference that ships inside the standard library (``pydoc_data``): some 450 kB of English prose
and code. It changes a little between Python versions, so ``TEXT_SHA256`` goes into every report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pydoc_data.topics import topics

TEXT = "\n".join(topics[name] for name in sorted(topics))
TEXT_SHA256 = hashlib.sha256(TEXT.encode()).hexdigest()[:16]


class Windows:
    """Cuts windows of tokens one after the other, so that no two prompts of a run share a prefix."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)
        self._next = 0

    def take(self, num_prompts: int, num_tokens: int) -> list[list[int]]:
        prompts = []
        for _ in range(num_prompts):
            if self._next + num_tokens > len(self._token_ids):
                self._next = self._next % 97 + 31  # round again at another phase
            prompts.append(self._token_ids[self._next : self._next + num_tokens])
            self._next += num_tokens
        return prompts
