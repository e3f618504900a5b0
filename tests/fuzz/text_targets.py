"""Parsers of files and texts that users bring: traces, samples, scenarios, settings, metrics."""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from random import Random

from .target import Run, Target

MOONCAKE = (
    b'{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}\n'
    b'{"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]}\n'
    b'{"timestamp": 3000, "input_length": 10, "output_length": 1, "hash_ids": []}\n'
)
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
    b"2023-11-16 18:17:04.0319600,3180,8\n"
)
VIDUR = b"num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.85\n2015,156,2171,12.9\n"
PLAIN = b"arrival_s,prompt_tokens,output_tokens\n0.6,304,822\n1.2,497,1783\n"
PLAIN_JSON = (
    b'{"arrival_s": 0.5, "prompt_tokens": 10, "output_tokens": 4}\n'
    b'{"arrival_s": 1, "prompt_tokens": 3, "output_tokens": 1}'
)
SHAREGPT = json.dumps(
    [
        {"id": "a", "conversations": [{"from": "human", "value": "What is KV?"}, {"from": "gpt", "value": "A cache."}]},
        {"id": "b", "conversation": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    ]
).encode()
METRICS = b"""# HELP kvbaton_worker_transfer_seconds t
# TYPE kvbaton_worker_transfer_seconds histogram
kvbaton_worker_transfer_seconds_bucket{le="0.1",role="decode"} 1
kvbaton_worker_transfer_seconds_bucket{le="+Inf",role="decode"} 2
kvbaton_worker_transfer_seconds_sum{role="decode"} 0.3
kvbaton_worker_transfer_seconds_count{role="decode"} 2
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m\\"\\\\x"} 3.0
vllm:prompt_tokens_total{model_name="m"} 1e3 1700000000
vllm:kv_cache_usage_perc NaN
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0
"""
SCENARIO = b"""name = "x"
[workload]
trace = "t.jsonl"
rate = 2.0
[slo]
ttft_ms = 500.0
[model]
preset = "Llama-3.1-8B"
[hardware]
gpu = "H100-SXM"
max_gpus = 4
[search]
tp = [1, 2]
"""
FLEET = b"""[model]
name = "m"
[router]
port = 8000
threshold_tokens = 512
[worker]
transport = "tcp"
[[workers]]
url = "http://10.0.0.1:8101"
role = "prefill"
[[workers]]
url = "http://10.0.0.2:8101"
role = "decode"
name = "d"
"""


def _traces(folder: Path) -> Run:
    from kvbaton.plan.workload import read_trace
    from kvbaton.types import LocalError

    path = folder / "trace"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        try:
            trace = read_trace(path, Random(0))
        except LocalError:
            return
        assert trace.requests and all(each.prompt_tokens >= 0 for each in trace.requests)
        try:
            trace.scaled(0.1, 0.1).at_rate(2.0)
        except LocalError:
            return

    return run


def _conversations(folder: Path) -> Run:
    """The bench's reader: a trace or a ShareGPT file, to due requests."""
    from kvbaton.bench.workload import LoadSpec, plan_work
    from kvbaton.types import LocalError

    from .model_targets import byte_tokenizer

    path, codec = folder / "trace.json", byte_tokenizer(folder)

    def run(data: bytes) -> None:
        path.write_bytes(data)
        for arrivals in ("poisson", "trace"):
            spec = LoadSpec("http://x", arrivals=arrivals, trace=str(path), steady_s=2.0, trace_scale=0.1)  # type: ignore[arg-type]
            try:
                work = plan_work(spec, codec)
            except LocalError:
                continue
            assert all(item.prompt_tokens >= 1 and item.output_tokens >= 1 for item in work.items)

    return run


def _samples(folder: Path) -> Run:
    from kvbaton.bench.samples import read_run, recover
    from kvbaton.types import LocalError

    def run(data: bytes) -> None:
        for name in ("run.jsonl", "run.jsonl.gz", "run.parquet")[: 1 if data[:1] == b"{" else 3]:
            path = folder / name
            path.write_bytes(data)
            for read in (read_run, recover):
                if name.endswith("parquet") and read is recover:
                    continue
                try:
                    read(path)
                except LocalError:
                    continue

    return run


def _sample_seeds() -> list[bytes]:
    import tempfile

    from kvbaton.bench.samples import ClientReport, RequestSample, Run, RunFooter, RunHeader, write_run

    sample = RequestSample(0, "steady", 0.1, 0.1, 4, 3, chunks=[(0.2, 1, 1.0), (0.3, 1, 1.0)], status=200)
    footer = RunFooter(ClientReport(0.1, 0.2, 0.3, 0.1, 0.2, 0.1, 10.0, 2, True, []), 1.0)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a.jsonl", "a.parquet"):
            path = Path(folder) / name
            write_run(path, Run(RunHeader({"url": "http://x"}, "now", {}), [sample, sample], footer))
            found.append(path.read_bytes())
    return [*found, gzip.compress(found[0], mtime=0)]


def _metrics(folder: Path) -> Run:
    from kvbaton.bench.server_metrics import parse, transfer_between
    from kvbaton.plan.advise import parse_metrics
    from kvbaton.types import LocalError
    from kvbaton.workers.vllm_metrics import SGLANG, TRTLLM, VLLM, read_figures

    def run(data: bytes) -> None:
        text = data.decode("utf-8", "replace")
        for table in (VLLM, SGLANG, TRTLLM):
            read_figures(text, None, table)
        with contextlib.suppress(LocalError):
            parse_metrics(text)
        try:
            scrape = parse(text)
        except ValueError:
            return
        transfer_between(scrape, scrape)

    return run


def _scenario(folder: Path) -> Run:
    from kvbaton.plan.scenario import Engine, load
    from kvbaton.types import LocalError

    path = folder / "scenario.toml"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        try:
            Engine(load(path))
        except LocalError:
            return

    return run


def _fleet_file(folder: Path) -> Run:
    from kvbaton.config import load
    from kvbaton.types import LocalError

    path = folder / "fleet.toml"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        try:
            load(path, {})
        except LocalError:
            return

    return run


def _profile(folder: Path) -> Run:
    from kvbaton.plan.profile_file import read_profile
    from kvbaton.router import prior
    from kvbaton.types import LocalError

    path = folder / "profile.json"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        for read in (read_profile, prior.read_profile):
            try:
                read(path)
            except LocalError:
                continue

    return run


def _profile_seeds() -> list[bytes]:
    import msgspec

    from kvbaton.plan.profile_file import ProfileFile

    from .shapes import example

    rng = Random(1)
    return [msgspec.json.encode(example(ProfileFile, rng, b"null")) for _ in range(12)]


TOML_WORDS = (b"[", b"]", b"=", b'"', b"\n", b"1e400", b"inf", b"nan", b"true", b"{}", b"[[]]", b"0x", b"-1")
TARGETS = (
    Target("traces (jsonl)", _traces, lambda: [MOONCAKE, PLAIN_JSON], "jsonl", 1.0),
    Target("traces (csv)", _traces, lambda: [AZURE, VIDUR, PLAIN], "lines", 1.0),
    Target("conversations (ShareGPT)", _conversations, lambda: [SHAREGPT, MOONCAKE], "json", 0.5),
    Target("samples files", _samples, _sample_seeds, "jsonl", 0.7),
    Target("Prometheus text", _metrics, lambda: [METRICS], "lines", 1.0,
           (b"{", b"}", b'"', b"\\", b" ", b"NaN", b"+Inf", b"# TYPE ", b"_bucket", b"le=", b"1e999", b"vllm:")),
    Target("scenario files", _scenario, lambda: [SCENARIO], "bytes", 0.7, TOML_WORDS),
    Target("fleet files", _fleet_file, lambda: [FLEET], "bytes", 0.7, TOML_WORDS),
    Target("profile files", _profile, _profile_seeds, "json", 0.5),
)  # fmt: skip
