"""``kvbaton router --head-timeout``: what the flag says is how long a client may take for the head of its request."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from router.processes import Process

DEADLINE_S = 120.0


def refusal_of_half_a_head(port: int) -> tuple[bytes, dict[str, str]]:
    """The status line and the error that a client gets which says no more than this."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        raw = b""
        while part := client.recv(65536):
            raw += part
    head, _, body = raw.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], json.loads(body)["error"]


@pytest.mark.parametrize("where", ["flag", "file", "both"])
def test_the_flag_and_the_file_say_how_long_a_head_may_take(where: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """The flag wins. The limit is named in the refusal, and the usual one of 20 s is another."""
    config = tmp_path / "fleet.toml"
    in_file = {"flag": "", "file": "head_timeout_s = 0.25\n", "both": "head_timeout_s = 3600.0\n"}[where]
    config.write_text(f'[router]\n{in_file}[[workers]]\nname = "w"\nurl = "http://127.0.0.1:9"\nrole = "both"\n')
    flag = [] if where == "file" else ["--head-timeout", "0.25"]
    arguments = ["router", "--config", str(config), "--model", str(tiny_model_dir), "--name", "tiny", *flag]
    router = Process("router", arguments, tmp_path / "router.log")
    try:
        router.start()
        status, error = refusal_of_half_a_head(router.port)
    finally:
        router.kill()
    assert status.startswith(b"HTTP/1.1 408") and error["code"] == "head_timeout"
    assert "0.25 s" in error["message"]
