"""Writes the golden manifests anew: ``python -m deploy.write_golden`` from the directory ``tests``."""

from __future__ import annotations

from deploy.test_kubernetes import GOLDEN, SPECS

from kvbaton.deploy.write import as_yaml, render_files


def main() -> None:
    for name, spec in SPECS.items():
        (GOLDEN / name).mkdir(parents=True, exist_ok=True)
        for file, found in render_files(spec).items():
            if file != "monitoring.yaml":
                (GOLDEN / name / file).write_text(as_yaml(found))


if __name__ == "__main__":
    main()
