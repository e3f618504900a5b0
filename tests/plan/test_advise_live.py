"""``advise`` against real HTTP servers: Prometheus' query API and workers' /metrics, in the formats their docs print.

Formats: prometheus.io/docs/prometheus/latest/querying/api, docs.vllm.ai/en/stable/usage/metrics,
docs.sglang.io/references/production_metrics.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

import pytest
from click.testing import CliRunner

from kvbaton.cli import scrape
from kvbaton.cli.plan_commands import advise_command
from kvbaton.plan.advise import parse_metrics, window
from kvbaton.types import RemoteError

Answer = tuple[int, str]


@contextmanager
def serving(answer: Callable[[str], Answer]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answer(self.path)
            data = text.encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def vllm(step: int, engine: int = 0, started: float = 1.0e9) -> str:
    """As vLLM's V1 engine prints it: counters with _total and _created, one series for each data-parallel engine."""
    at = f'engine="{engine}",model_name="unsloth/Llama-3.2-1B-Instruct"'
    edges = zip(("0.01", "0.05", "+Inf"), (800, 950, 1000), strict=True)
    gaps = "\n".join(
        f'vllm:inter_token_latency_seconds_bucket{{{at},le="{edge}"}} {count * step:.1f}' for edge, count in edges
    )
    return f"""# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds {started}
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{{at}}} 6.0
vllm:num_requests_waiting{{{at}}} 1.0
vllm:kv_cache_usage_perc{{{at}}} 0.5
vllm:prefix_cache_queries_total{{{at}}} {40_000.0 * step}
vllm:prefix_cache_hits_total{{{at}}} {10_000.0 * step}
vllm:prompt_tokens_total{{{at}}} {40_000.0 * step}
vllm:prompt_tokens_created{{{at}}} 1.75e+09
vllm:generation_tokens_total{{{at}}} {1.0e3 * step}
vllm:request_success_total{{{at},finished_reason="stop"}} {9.0 * step}
vllm:request_success_total{{{at},finished_reason="length"}} {1.0 * step}
vllm:request_success_total{{{at},finished_reason="abort"}} 0.0
vllm:request_prefill_time_seconds_sum{{{at}}} {12.0 * step}
vllm:request_prefill_time_seconds_count{{{at}}} {10.0 * step}
vllm:time_to_first_token_seconds_sum{{{at}}} NaN
vllm:time_to_first_token_seconds_count{{{at}}} {10.0 * step}
vllm:inter_token_latency_seconds_sum{{{at}}} {20.0 * step}
vllm:inter_token_latency_seconds_count{{{at}}} {1000.0 * step}
{gaps}
"""


def sglang(step: int) -> str:
    """As SGLang prints it, with the ranks of one tensor-parallel server each saying the same."""
    lines = []
    for rank in range(2):
        at = f'engine_type="unified",model_name="meta-llama/Llama-3.1-8B-Instruct",pp_rank="0",tp_rank="{rank}"'
        lines += [
            f"sglang:num_running_reqs{{{at}}} 4.0",
            f"sglang:num_queue_reqs{{{at}}} 0.0",
            f"sglang:token_usage{{{at}}} 0.28",
            f"sglang:prompt_tokens_total{{{at}}} {8.128902e04 * step:e}",
            f"sglang:generation_tokens_total{{{at}}} {7.557572e03 * step:e}",
            f"sglang:num_requests_total{{{at}}} {75.0 * step}",
        ]
    at = 'engine_type="unified",model_name="meta-llama/Llama-3.1-8B-Instruct"'
    lines += [
        f'sglang:cached_tokens_total{{{at},cache_source="device"}} {1.0e4 * step}',
        f'sglang:cached_tokens_total{{{at},cache_source="host"}} {5.0e3 * step}',
        f'sglang:time_to_first_token_seconds_bucket{{{at},le="0.001"}} 0.0',
        f'sglang:time_to_first_token_seconds_bucket{{{at},le="+Inf"}} {75.0 * step}',
        f"sglang:time_to_first_token_seconds_sum{{{at}}} {15.0 * step}",
        f"sglang:time_to_first_token_seconds_count{{{at}}} {75.0 * step}",
        f"sglang:queue_time_seconds_sum{{{at}}} {3.0 * step}",
        f"sglang:queue_time_seconds_count{{{at}}} {75.0 * step}",
    ]
    return "\n".join(lines) + "\n"


def as_prometheus(pages: dict[str, str], at_s: float) -> str:
    """An instant vector of what those instances showed, as /api/v1/query answers."""
    result = []
    for instance, text in pages.items():
        for line in text.splitlines():
            match = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
            if match is None:
                continue
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            metric = {"__name__": match[1], "instance": instance, "job": "engines", **labels}
            result.append({"metric": metric, "value": [at_s, match[3]]})
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}, "infos": []})


def test_prometheus() -> None:
    asked: list[tuple[str, float]] = []

    def answer(path: str) -> Answer:
        url = urlparse(path)
        if url.path != "/api/v1/query":
            return 404, "404 page not found"
        query = parse_qs(url.query)
        at_s = float(query["time"][0])
        asked.append((query["query"][0], at_s))
        step = len(asked)
        router = f"kvbaton_router_ttft_seconds_sum {step}\nkvbaton_router_ttft_seconds_count {step}\n"
        pages = {"w0:8000": vllm(step), "w1:8000": vllm(step), "router:8000": router}
        pages["node:9100"] = "process_start_time_seconds 5\n"
        if step == 2:
            pages["late:8000"] = vllm(2)  # came up in between: no first sample, so left out
        return 200, as_prometheus(pages, at_s)

    with serving(answer) as url:
        done = CliRunner().invoke(advise_command, ["--prometheus", url, "--interval", "60", "--json"])
    assert done.exit_code in (0, 1), done.stderr
    advice = json.loads(done.stdout)
    assert asked[1][1] - asked[0][1] == pytest.approx(60.0, abs=0.01)
    assert "vllm:" in asked[0][0]
    seen = advice["window"]
    assert seen["workers"] == 2
    assert seen["prompt_tokens"] == 80_000
    assert seen["requests"] == 20
    assert seen["kv_usage"] == pytest.approx(0.5)
    assert advice["miss_share"] == pytest.approx(0.75)
    assert advice["prefill_share"] == pytest.approx(24.0 / 120.0)
    assert seen["gap_p50_s"] == pytest.approx(0.01 * 500 / 800)


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (400, '{"status":"error","errorType":"bad_data","error":"invalid parameter \\"query\\""}', "bad_data"),
        (200, '{"status":"error","errorType":"timeout","error":"query timed out"}', "query timed out"),
        (200, "<html>login</html>", "does not speak"),
        (200, '{"status":"success","data":{"resultType":"vector","result":[]}}', "no samples"),
        (200, '{"status":"success","data":{"resultType":"scalar","result":[1,"2"]}}', "does not speak"),
    ],
)
def test_a_prometheus_that_cannot_answer(status: int, text: str, says: str) -> None:
    with serving(lambda path: (status, text)) as url:
        done = CliRunner().invoke(advise_command, ["--prometheus", url, "--interval", "60"])
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_two_live_scrapes_of_vllm_and_sglang() -> None:
    counts: dict[str, int] = {}

    def answer(path: str) -> Answer:
        engine = path.split("/")[1]
        counts[path] = counts.get(path, 0) + 1
        return 200, {"vllm": vllm, "sglang": sglang}[engine](counts[path])

    with serving(answer) as url:
        done = CliRunner().invoke(
            advise_command, [f"{url}/vllm", f"{url}/sglang/metrics", "--interval", "0.1", "--json"]
        )
    assert done.exit_code in (0, 1), done.stderr
    assert counts == {"/vllm/metrics": 2, "/sglang/metrics": 2}
    seen = json.loads(done.stdout)["window"]
    assert seen["workers"] == 2
    assert seen["running"] == 10  # the ranks of one server are counted once
    assert seen["prompt_tokens"] == pytest.approx(40_000 + 81_289.02)
    assert seen["requests"] == 85
    assert seen["kv_usage"] == pytest.approx((0.5 + 0.28) / 2)


def test_sglang_alone() -> None:
    seen = window([sglang(1)], [sglang(2)], 30.0)
    assert seen.cached_share == pytest.approx(15_000 / 81_289.02)
    assert seen.ttft_mean_s == pytest.approx(0.2)
    assert seen.queue_mean_s == pytest.approx(0.04)
    assert seen.preemptions is None  # not reported is not zero


def test_nan_is_not_reported() -> None:
    assert window([vllm(1)], [vllm(2)], 60.0).ttft_mean_s is None
    assert "a" not in parse_metrics("a NaN\nvllm:b 1\nvllm:c +Inf\n")
    assert "vllm:c" not in parse_metrics("vllm:b 1\nvllm:c +Inf\n")


def test_one_engine_of_two_restarts() -> None:
    before = vllm(5, engine=0) + vllm(5, engine=1)
    after = vllm(6, engine=0) + vllm(2, engine=1)
    seen = window([before], [after], 60.0)
    assert seen.prompt_tokens == 40_000 + 80_000
    assert seen.kv_usage == pytest.approx(0.5)


def test_a_restart_that_has_already_counted_further_is_seen_by_its_start_time() -> None:
    seen = window([vllm(1, started=1.0e9)], [vllm(3, started=1.0e9 + 50)], 60.0)
    assert seen.prompt_tokens == 120_000
    assert window([vllm(1)], [vllm(3)], 60.0).prompt_tokens == 80_000


def test_a_histogram_that_began_anew_is_taken_whole() -> None:
    def page(*counts: int) -> str:
        edges = ("0.01", "0.1", "+Inf")
        return "\n".join(
            f'vllm:inter_token_latency_seconds_bucket{{le="{edge}"}} {count}'
            for edge, count in zip(edges, counts, strict=True)
        )

    seen = window([page(10, 900, 1000)], [page(100, 100, 100)], 60.0)
    assert seen.gap_p99_s == pytest.approx(0.0099)  # not 90 in the first bucket, and the others never below it


def test_nobody_there() -> None:
    with pytest.raises(RemoteError, match="cannot scrape"):
        scrape.fetch("127.0.0.1:9/metrics")
