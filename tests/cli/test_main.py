"""The command line as a user meets it: verbs, help, exit codes, one line for bad input."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvbaton.cli import options
from kvbaton.cli.main import VERBS, kvbaton, main
from kvbaton.router.policy import REASONS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb in ("up", "worker", "router"):
        assert re.search(rf"^  {verb} ", shown, re.MULTILINE)


@pytest.mark.parametrize("verb", ["up", "worker", "router"])
def test_every_flag_says_what_it_does(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    assert "Usage: kvbaton" in capsys.readouterr().out
    command = kvbaton.get_command(None, verb)  # type: ignore[arg-type]
    assert command is not None
    for parameter in command.params:
        assert getattr(parameter, "help", None) or getattr(parameter, "hidden", False), parameter.name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["up", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (["up", "--prefill", "0"], "prefill"),
        (["up", "--colocated", "1", "--prefill", "1"], "--prefill"),
        (["up", "--port", "70000"], "router.port"),
        (["up", "--threshold-tokens", "-1"], "threshold_tokens"),
        (["up", "--config", "/nowhere.toml"], "/nowhere.toml"),
        (["worker", "--role", "wizard"], "role"),
        (["router"], "[[workers]]"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert told in shown.err and shown.out == ""


def test_a_router_without_a_key_says_which_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KVBATON_INTERNAL_KEY", raising=False)
    (tmp_path / "fleet.toml").write_text('[[workers]]\nurl = "http://127.0.0.1:1"\n')
    assert main(["router", "--config", str(tmp_path / "fleet.toml")]) == 2
    assert "KVBATON_INTERNAL_KEY" in capsys.readouterr().err


def test_a_port_that_is_taken(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVBATON_INTERNAL_KEY", "k")
    (tmp_path / "fleet.toml").write_text('[[workers]]\nurl = "http://127.0.0.1:1"\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["--config", str(tmp_path / "fleet.toml"), "--model", str(tiny_model_dir), "--port", port]
        assert main(["router", *arguments]) == 2
    told = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in told and "--port" in told


def test_the_command_line_loads_no_engine() -> None:
    script = (
        "import sys; from kvbaton.cli.main import main; main(['up', '--help'])\n"
        "assert not {'torch', 'transformers', 'tokenizers', 'starlette'} & set(sys.modules), 'heavy imports'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_every_flag_and_verb_is_documented() -> None:
    text = (DOCS / "api.md").read_text()
    groups = [group for name, group in vars(options).items() if name.endswith(("_FLAGS", "_FLAG")) and name.isupper()]
    assert len(groups) >= 8
    for names, *_ in (flag for group in groups for flag in group):
        assert f"`{names[0]}`" in text, names[0]
    for verb in ("up", "worker", "router"):
        assert verb in VERBS and f"kvbaton {verb}" in text


def test_every_reason_is_documented() -> None:
    text = (DOCS / "api.md").read_text()
    for reason, meaning in REASONS.items():
        assert f"| `{reason}` | {meaning} |" in text
