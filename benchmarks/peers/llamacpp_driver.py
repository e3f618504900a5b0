"""llama.cpp behind the benchmark's driver protocol: its C API through llama-cpp-python, one batch per step.

Prefill goes in logical batches of 2,048 tokens, micro-batches of 512 (its default, and the faster one here); the logits
of the last position only. The samples are greedy, taken outside of the library by numpy.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.peers.driver import Timeline, serve

NUM_CONTEXT_TOKENS = 4096
NUM_BATCH_TOKENS = 2048
MAX_SEQUENCES = 64


class LlamaCppDriver:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        import llama_cpp

        self._api = llama_cpp
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = options.get("extra_buffers", True)
        self._model = llama_cpp.llama_model_load_from_file(options["gguf"].encode(), model_params)
        assert self._model, f"cannot load {options['gguf']}"
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch = NUM_CONTEXT_TOKENS, NUM_BATCH_TOKENS
        params.n_ubatch = options.get("micro_batch_tokens", 512)
        params.n_seq_max = MAX_SEQUENCES
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = options.get("flash_attention", -1)  # -1: the library decides
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._context, "no context"
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(NUM_BATCH_TOKENS, 0, 1)
        settings = f"micro-batch {params.n_ubatch}, flash attention {['auto', 'off', 'on'][params.flash_attn_type + 1]}"
        return {"version": llama_cpp.__version__, "settings": settings}

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, wants logits) rows; the best token of each row that wants logits."""
        batch, wanted = self._batch, []
        batch.n_tokens = len(rows)
        for k, (token_id, position, sequence, wants) in enumerate(rows):
            batch.token[k], batch.pos[k] = token_id, position
            batch.n_seq_id[k], batch.seq_id[k][0] = 1, sequence
            batch.logits[k] = wants
            if wants:
                wanted.append(k)
        status = self._api.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode returned {status}"
        best = []
        for k in wanted:
            logits = self._api.llama_get_logits_ith(self._context, k)
            best.append(int(np.ctypeslib.as_array(logits, shape=(self._num_vocab,)).argmax()))
        return best

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        line = Timeline.empty(len(prompts))
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        rows = [
            (token_id, position, i, position + 1 == len(prompt))
            for i, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        begun_s = time.perf_counter()
        latest: list[int] = []
        for start in range(0, len(rows), NUM_BATCH_TOKENS):
            latest += self._decode(rows[start : start + NUM_BATCH_TOKENS])
        for step in range(max_tokens):
            if step:
                latest = self._decode([(t, len(prompts[i]) + step - 1, i, True) for i, t in enumerate(latest)])
            at_s = time.perf_counter() - begun_s
            for i, token_id in enumerate(latest):
                line.add(i, token_id, at_s)
        return line


if __name__ == "__main__":
    serve(LlamaCppDriver)
