"""``python -m tests.fuzz``: every parser of outside bytes under a coverage-guided fuzzer; a table of what was run.

python -m tests.fuzz --inputs 1000000           all of them, which is what `make fuzz` does
python -m tests.fuzz --only GGUF --inputs 5000  some
python -m tests.fuzz --plain --inputs 20000     without guidance, which is quicker to begin
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from .plain import try_inputs
from .table import all_targets
from .target import Target

ROOT = Path(__file__).resolve().parents[2]
MOST_GROWN_MIB = 96  # corpus and coverage of the fuzzer itself are some of it
MIB = 1024 * 1024
# Many targets read files: a disk would be most of what is measured.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass
class Row:
    name: str
    inputs: int = 0
    seconds: float = 0.0
    grown_mib: float = 0.0
    crashes: int = 0
    note: str = ""

    @property
    def good(self) -> bool:
        return not self.crashes and not self.note and self.grown_mib <= MOST_GROWN_MIB


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="over all targets")
    parser.add_argument("--only", help="targets whose name holds this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--keep", type=Path, help="where inputs that broke something go")
    options = parser.parse_args()
    targets = [each for each in all_targets() if options.only is None or options.only.lower() in each.name.lower()]
    shares = sum(each.share for each in targets)
    numbers = [ceil(options.inputs * each.share / shares) for each in targets]
    sys.path.insert(0, str(ROOT / "tests"))
    work = plain if options.plain else guided
    with ThreadPoolExecutor(1 if options.plain else options.processes) as pool:
        pairs = zip(targets, numbers, strict=True)
        rows = list(pool.map(lambda pair: shown(work(*pair, options.seed, options.keep)), pairs))
    print(f"\n{'target':<32}{'inputs':>10}{'seconds':>9}{'RSS':>11}{'crashes':>9}")
    for row in rows:
        grown = f"{row.grown_mib:+.1f} MiB"
        print(f"{row.name:<32}{row.inputs:>10,}{row.seconds:>9.1f}{grown:>11}{row.crashes:>9}  {row.note}")
    total = sum(row.inputs for row in rows)
    bad = [row.name for row in rows if not row.good]
    print(f"{total:,} inputs, {len(rows)} targets, {sum(row.crashes for row in rows)} crashes")
    print(f"not good: {', '.join(bad)}" if bad else "no crash, no hang, no growth")
    return 1 if bad else 0


def shown(row: Row) -> Row:
    told = f"{row.inputs:,} inputs in {row.seconds:.1f} s, {row.crashes} crashes {row.note}"
    print(f"{row.name}: {told}", file=sys.stderr)
    return row


def plain(target: Target, number: int, seed: int, keep: Path | None) -> Row:
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        run, began_s = target.prepare(Path(folder)), time.monotonic()
        finds = try_inputs(target, run, number, seed)
    for find in finds:
        print(f"{target.name}: {find}", file=sys.stderr)
    return Row(target.name, number, time.monotonic() - began_s, 0.0, len(finds))


def guided(target: Target, number: int, seed: int, keep: Path | None) -> Row:
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=MEMORY) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tests.fuzz.guided", target.name, "--inputs", str(number)]
        done = subprocess.run(
            [*command, "--seed", str(seed), "--folder", name], cwd=ROOT, capture_output=True, text=True, check=False
        )
        broken = [path for path in folder.iterdir() if path.name.startswith(("crash-", "timeout-", "oom-"))]
        result = folder / "result.json"
        row = Row(target.name)
        if result.is_file():
            told = json.loads(result.read_text())
            row = Row(target.name, told["inputs"], told["seconds"], told["grown_bytes"] / MIB)
        row.crashes = len(broken)
        if not result.is_file() or broken:
            row.note = f"ended with {done.returncode}" if not result.is_file() else "see above"
            print(f"{target.name}:\n{done.stderr[-20_000:]}", file=sys.stderr)
        for path in broken:
            print(f"{target.name}: {path.name}: {path.read_bytes()[:400]!r}", file=sys.stderr)
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{target.name.replace(' ', '-').replace('/', '-')}-{path.name}").write_bytes(path.read_bytes())
        return row


if __name__ == "__main__":
    sys.exit(main())
