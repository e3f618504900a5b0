"""``kvbaton route --explain``: agrees, differs, or says what is wrong with its input."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbaton.cli.main import main
from kvbaton.router.explain import record
from kvbaton.router.policy import PolicyConfig, decide
from kvbaton.router.views import MemberView, RequestView


def line(streams: int = 30, **config: Any) -> dict[str, Any]:
    members = [MemberView("prefill-0", "prefill", 0, 0, 8_192), MemberView("decode-0", "decode", streams, 0, 8_192)]
    decision = decide(RequestView(3_000, 1, 3_000, 3_100), members, PolicyConfig(**config), 0, True)
    request_id = f"{streams:024x}"
    raw = msgspec.json.encode({"message": "request", "request_id": request_id, "route": record(decision)})
    found: dict[str, Any] = json.loads(raw)
    return found


def written(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines) + "\n")
    return str(path)


def test_a_log_is_replayed_and_its_last_decision_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path / "router.log", {"message": "draining"}, line(0), "not json", line(30))
    assert main(["route", "--explain", log]) == 0
    out = capsys.readouterr().out
    assert "remote: a prefill worker computes the prompt" in out
    assert "prefill-0 > decode-0" in out and "queue" in out and "harm" in out
    assert "the replay agrees" in out and "2 records replayed, 0 differ" in out


def test_one_request_is_picked_by_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = written(tmp_path / "router.log", line(0), line(30))
    assert main(["route", "--explain", log, "--request-id", f"{0:024x}", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["agrees"] and answer["num_records"] == 1
    assert answer["record"]["reason"] == answer["replayed"]["reason"] == "local_cheaper"
    assert main(["route", "--explain", log, "--request-id", "nobody"]) == 2
    assert "--request-id" in capsys.readouterr().err


def test_a_record_alone_from_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raw = json.dumps(line()["route"], indent=2).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    assert main(["route", "--explain", "-"]) == 0
    assert "the replay agrees" in capsys.readouterr().out


def test_a_static_decision_shows_its_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", "--explain", written(tmp_path / "one", line(threshold_tokens=64))]) == 0
    assert "threshold_tokens: 64" in capsys.readouterr().out


def test_a_decision_that_was_not_made_so_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    false = line()
    false["route"]["reason"] = "local_cheaper"
    false["route"]["placements"][0]["terms"]["queue_s"] += 0.1
    assert main(["route", "--explain", written(tmp_path / "one", false)]) == 1
    out = capsys.readouterr().out
    assert "DIFFERS" in out and "recorded 'local_cheaper', replayed 'remote'" in out and "queue_s" in out
    assert main(["route", "--explain", written(tmp_path / "both", false, line())]) == 1
    assert "2 records replayed, 1 differ" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "hello", "{}", '{"route": {"reason": 5}}'])
def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main(["route", "--explain", written(tmp_path / "bad", text)]) == 2
    assert "record" in capsys.readouterr().err
    assert main(["route", "--explain", str(tmp_path / "absent")]) == 2
