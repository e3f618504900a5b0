"""vLLM's CPU build behind the benchmark's driver protocol: its engine in this process, stepped by hand.

Prefix caching is off and a prompt of any length here is one step, as for the others. Graph mode (``eager: false``)
compiles the model with Inductor at loading.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.driver import Timeline, serve


class VllmDriver:
    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        os.environ.update(
            HF_HUB_OFFLINE="1",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND=os.environ["KVBATON_BENCH_CPU"],
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="ERROR",
        )
        import vllm

        eager = bool(options.get("eager", False))
        llm = vllm.LLM(
            model=options["model_dir"],
            dtype="bfloat16",
            max_model_len=4096,
            max_num_batched_tokens=4096,
            max_num_seqs=64,
            enable_prefix_caching=False,
            enforce_eager=eager,
            disable_log_stats=True,
        )
        self._engine = llm.llm_engine
        self._sampling = vllm.SamplingParams
        self._num_requests = 0
        return {"version": vllm.__version__, "settings": "eager" if eager else "torch.compile"}

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timeline:
        line = Timeline.empty(len(prompts))
        sampling = self._sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        begun_s = time.perf_counter()
        index: dict[str, int] = {}
        for i, prompt in enumerate(prompts):
            self._num_requests += 1
            request_id = f"bench-{self._num_requests}"
            self._engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, sampling)
            index[request_id] = i
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            at_s = time.perf_counter() - begun_s
            for output in outputs:
                i = index[output.request_id]
                for token_id in output.outputs[0].token_ids[len(line.token_ids[i]) :]:
                    line.add(i, token_id, at_s)
        return line


if __name__ == "__main__":
    serve(VllmDriver)
