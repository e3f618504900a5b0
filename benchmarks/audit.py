"""``make audit``: bandit over the package, each finding held against docs/security.md; pip-audit over the environment.

A finding without a row in the page's table fails, and so does a row without a finding: what is explained is what is
there. Advisories come from a service: where it cannot be reached, that is said, with the number of packages of which
nothing is known, and only ``--strict`` fails for it. A checkout of the Python advisory database (``--advisories``)
tells what it knows, and from which day that is. Knows nothing about what a finding means.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.advisories import advisories_for, normalized

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "security.md"
_ROW = re.compile(r"^\| (B\d{3}(?:, B\d{3})*) \| (.+?) \| .+ \|$", re.MULTILINE)
_EVERYWHERE = "everywhere"


def explained(page: str) -> set[tuple[str, str]]:
    """(finding, file in the package or ``everywhere``) of the table."""
    found = set()
    for kinds, where in _ROW.findall(page):
        files = re.findall(r"`([^`]+)`", where) or [_EVERYWHERE]
        found |= {(kind, file) for kind in kinds.split(", ") for file in files}
    return found


def unexplained(findings: set[tuple[str, str]], known: set[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Findings that no row explains, and rows that explain nothing."""
    kinds = {kind for kind, file in known if file == _EVERYWHERE}
    new = [f"{kind} in {file}" for kind, file in sorted(findings) if kind not in kinds and (kind, file) not in known]
    there = {kind for kind, _ in findings}
    idle = [f"{kind} in {file}" for kind, file in sorted(known) if file != _EVERYWHERE and (kind, file) not in findings]
    return new, idle + [f"{kind} {_EVERYWHERE}" for kind in sorted(kinds - there)]


def run_bandit() -> set[tuple[str, str]]:
    command = [sys.executable, "-m", "bandit", "-q", "-r", str(ROOT / "kvbaton"), "-f", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode not in (0, 1):
        raise SystemExit(f"bandit failed: {done.stderr.strip()}")
    results: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return {(each["test_id"], str(Path(each["filename"]).relative_to(ROOT / "kvbaton"))) for each in results}


def run_pip_audit() -> tuple[list[str], int, int]:
    """Advisories, and how many packages were looked up and how many could not be."""
    command = [sys.executable, "-m", "pip_audit", "-f", "json", "--progress-spinner", "off", "--timeout", "15"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        return [], 0, 0
    told = [f"{each['name']} {each['version']}: {one['id']}" for each in packages for one in each.get("vulns", ())]
    unknown = sum("skip_reason" in each for each in packages)
    return told, len(packages) - unknown, unknown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strict", action="store_true", help="fail where advisories cannot be read")
    parser.add_argument("--advisories", type=Path, metavar="DIR", help="a checkout of pypa/advisory-database")
    options = parser.parse_args()
    strict = options.strict
    findings = run_bandit()
    new, idle = unexplained(findings, explained(PAGE.read_text()))
    print(f"bandit: {len(findings)} kinds of finding by file, {len(new)} not explained in docs/security.md")
    for each in new:
        print(f"  {each}")
    for each in idle:
        print(f"  docs/security.md explains {each}, which is not there")
    advisories, num_known, num_unknown = run_pip_audit()
    if num_known:
        print(f"pip-audit: {num_known} packages looked up, {len(advisories)} advisories, {num_unknown} not to be found")
    else:
        print(f"pip-audit: NOT DONE: no advisory could be read; nothing is known of {num_unknown or 'the'} packages")
    if options.advisories is not None:
        installed = {normalized(each.metadata["Name"]): each.version for each in distributions()}
        kept, newest = advisories_for(installed, options.advisories)
        print(f"advisory database up to {newest}: {len(installed)} packages looked up, {len(kept)} advisories")
        advisories += kept
    for each in advisories:
        print(f"  {each}")
    return 1 if new or idle or advisories or (strict and not num_known) else 0


if __name__ == "__main__":
    sys.exit(main())
