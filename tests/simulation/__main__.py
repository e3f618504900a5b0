"""``python -m tests.simulation``: run seeds, or replay one and tell its story.

python -m tests.simulation --seeds 10000            how many failed, and which
python -m tests.simulation --seed 17 --story        what happened in one
"""

from __future__ import annotations

import argparse
import sys
import time

from .run import run_seed, run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--story", action="store_true", help="print what happened")
    options = parser.parse_args()
    if options.seed is not None:
        result = run_seed(options.seed)
        if options.story or result.error:
            print("\n".join(result.story), result.traceback, sep="\n")
        print(f"seed {result.seed}: {result.error or 'holds'}; {result.counts}")
        return 1 if result.error else 0
    started_s = time.monotonic()
    total = run_seeds(options.first, options.seeds, options.processes)
    for failed in total.failed:
        print(f"seed {failed.seed}: {failed.error}")
    seconds = time.monotonic() - started_s
    print(f"{total.num_seeds} seeds in {seconds:.0f} s, {len(total.failed)} failed; {total.counts}")
    print(f"a failing seed replays: python -m tests.simulation --seed {total.failed[0].seed}" if total.failed else "")
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
