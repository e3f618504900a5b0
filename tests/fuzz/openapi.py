"""``python -m tests.fuzz.openapi``: schemathesis against the router's own description, with a real fleet behind it.

Router, workers and sockets are the product's, the engines are scripted. Its own checks are on, but for the one that
wants all that the schema allows to be accepted, which no schema can say of prompts and vocabularies; and one of ours: a
refusal names the field. Exit code 1 when anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from pathlib import Path

HOOKS = Path(__file__).with_name("openapi_checks.py")
TESTS = Path(__file__).resolve().parents[1]


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.openapi", description=__doc__)
    parser.add_argument("--examples", type=int, default=200, help="of each operation")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from router.fleet import running_fleet

    from .model_targets import byte_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = byte_tokenizer(Path(folder))
        async with running_fleet(tokenizer, {"p0": "prefill", "d0": "decode"}) as fleet:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{fleet.url}/openapi.json"),
                *("--checks", "all", "--exclude-checks", "positive_data_acceptance"),
                *("--phases", "examples,coverage,fuzzing", "--mode", "all", "--max-examples", str(options.examples)),
                *("--seed", str(options.seed), "--continue-on-failure", "--warnings", "off", "--no-color"),
                *("--suppress-health-check", "all", "--generation-database", "none"),
                cwd=folder,
                env={**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)},
            )
            code = await process.wait()
            await fleet.settled()
            fleet.check_idle()
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
