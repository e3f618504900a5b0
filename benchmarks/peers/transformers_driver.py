"""transformers behind the benchmark's driver protocol: scaled-dot-product attention, a growing cache, greedy.

Only the last position's logits are computed at prefill. Prompts of one call must be of one length, so that no padding
slows it down.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.driver import Timeline, serve


class TransformersDriver:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            options["model_dir"], dtype=getattr(torch, options.get("dtype", "bfloat16")), attn_implementation="sdpa"
        ).eval()
        return {"version": transformers.__version__, "settings": f"eager, sdpa, torch {torch.__version__}"}

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        assert len({len(prompt) for prompt in prompts}) == 1, "prompts of one length"
        line = Timeline.empty(len(prompts))
        begun_s = time.perf_counter()
        with self._torch.inference_mode():
            ids, cache = self._torch.tensor(prompts), None
            for _ in range(max_tokens):
                out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
                ids = out.logits[:, -1].argmax(dim=-1, keepdim=True)
                tokens = ids[:, 0].tolist()
                at_s = time.perf_counter() - begun_s
                for i, token_id in enumerate(tokens):
                    line.add(i, token_id, at_s)
        return line


if __name__ == "__main__":
    serve(TransformersDriver)
