"""Two real vLLM servers that both prefill and decode, and what `kvbaton compare` makes of them; `make test-vllm`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.vllm_fleet import BLOCK, KV_BYTES, MAX_CONTEXT, PYTHON, TEXTS, VllmFleet, running, text_of

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` installs vLLM"),
]


def test_compare_sets_one_pool_against_two(default_model_path: Path, tmp_path: Path) -> None:
    """The whole of `kvbaton compare`, small: what it finds on a shared test machine is not a result.

    The first here: servers that idle beside it would take memory for two more, and NIXL keeps a core of each busy.
    """
    flags = ["--engine=vllm", f"--engine-python={PYTHON}", "--engine-args=--enforce-eager", "--dtype=float32"]
    flags += [f"--max-context={MAX_CONTEXT}", "--kv-memory=1024", "--name=m", "--threshold-tokens=0"]
    flags += [f"--model={default_model_path}"]
    command = [sys.executable, "-m", "kvbaton.cli.main", "compare", "--colocated", "2", "--prefill", "1", "--decode"]
    command += ["1", "--json", "--quiet", "--out", str(tmp_path / "out"), "--rate", "0.5", "--duration", "16"]
    command += ["--input", "300", "--output", "8", "--max-other-cores", "64", "--max-drift", "1000"]
    command += [f"--up-flag={flag}" for flag in flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode in (0, 1), done.stderr  # 1: the verdict is no
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    assert found["verdict"]["decision"] and len(found["runs"]) == 4
    (rate,) = found["rates"]
    alone, split = (rate[style]["server"]["moved"] for style in ("a", "b"))
    assert alone["source"] == split["source"] == "vllm:nixl_bytes_transferred_sum", "the engines' own word"
    assert alone["bytes"] == 0 and not alone["prompt_tokens"]["moved"]
    num_moved = split["prompt_tokens"]["moved"]
    assert num_moved >= BLOCK, "not of every prompt: a decode server whose queue is not empty is sent no prefill"
    assert split["bytes"] >= (num_moved // BLOCK) * BLOCK * KV_BYTES
    assert "KV moved between workers (MB)" in (tmp_path / "out" / "report.md").read_text()


@pytest.fixture(scope="module")
def colocated(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmFleet]:
    with running(default_model_path, tmp_path_factory.mktemp("colocated"), "--colocated", "2") as fleet:
        yield fleet


def test_two_that_do_both_share_the_work(colocated: VllmFleet) -> None:
    for text in TEXTS:
        answer = colocated.complete(prompt=text)
        assert answer.status_code == 200 and answer.headers["x-kvbaton-decision"] != "remote"
        one, other = (text_of(colocated.complete(name, prompt=text)) for name in ("both-0", "both-1"))
        assert text_of(answer) == one == other
    for name in ("both-0", "both-1"):
        assert colocated.server(name).figure("vllm:generation_tokens_total")
        assert not colocated.server(name).figure("vllm:nixl_bytes_transferred_sum")
