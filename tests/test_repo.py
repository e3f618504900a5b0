"""The rules of the repository that no single module can break unseen: layers, purity, sizes, style, packaging."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvbaton"
MAX_FILE_LINES = 500
MAX_ROOM_LINES = 8000
MAX_TEST_FILE_LINES = 650  # tables of cases read well in one place

# No clock, socket, thread, chance or torch: time and chance are arguments. A trailing slash means the whole package.
PURE = (
    "bench/goodput.py",
    "bench/stats.py",
    "bench/verdict.py",
    "engine/scheduler.py",
    "engine/sequence.py",
    "engine/step_plan.py",
    "kv/blocks.py",
    "kv/compat.py",
    "kv/layout.py",
    "kv/reshard.py",
    "observe/ratio.py",
    "plan/",
    "router/cost.py",
    "router/explain.py",
    "router/kv_feed.py",
    "router/kv_index.py",
    "router/learning.py",
    "router/lifecycle.py",
    "router/measured.py",
    "router/policy.py",
    "router/prefix_index.py",
    "router/routing_history.py",
    "router/views.py",
    "router/registry.py",
    "router/regression.py",
    "router/rollout.py",
    "transfer/machine.py",
    "transfer/offering.py",
    "transfer/placement.py",
    "transfer/pulling.py",
    "transfer/ranges.py",
    "transfer/session.py",
    "ui/history.py",
    "ui/spread.py",
    "ui/state.py",
)
IMPURE_IMPORTS = {
    "asyncio",
    "concurrent",
    "multiprocessing",
    "secrets",
    "select",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
    "uuid",
}
# Extras that the package itself imports when they are there.
OPTIONAL = ("engine", "kubernetes", "mooncake", "nixl", "otel", "parquet", "vllm")
# Where the name to import differs from the name to install.
IMPORT_NAMES = {
    "mooncake_transfer_engine_non_cuda": "mooncake",
    "opentelemetry_sdk": "opentelemetry",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
}


def requirement_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def python_files(*tops: str) -> list[Path]:
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py") if "__pycache__" not in path.parts)


def pure_files() -> list[Path]:
    found: list[Path] = []
    for name in PURE:
        path = PACKAGE / name
        found += sorted(path.glob("*.py")) if name.endswith("/") else [path]
    return found


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported_names(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


def hidden_inputs(tree: ast.AST) -> list[str]:
    """Draws from the shared generator (anything of ``random`` but the class ``Random``), and readings of the date."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (
            (node.value.id == "random" and node.attr != "Random")
            or (node.value.id in ("datetime", "date") and node.attr in ("now", "utcnow", "today"))
        )
    ]


@pytest.mark.parametrize("path", pure_files(), ids=relative)
def test_pure_modules_take_time_and_chance_as_arguments(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not imported_names(tree) & IMPURE_IMPORTS
    assert not hidden_inputs(tree)


def test_imports_only_point_down() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_functions_are_short_and_names_are_real() -> None:
    """Statements, arguments and complexity of each function, and what pyflakes finds; style at large is `make lint`."""
    ruff = Path(sys.executable).parent / "ruff"
    command = [ruff, "check", "-q", "--select", "E9,F,C90,PLR0913,PLR0915", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_are_short() -> None:
    sources = [*python_files("kvbaton", "benchmarks", "tests"), *PACKAGE.glob("*/_native/*.*")]
    lines = {relative(path): len(path.read_text().splitlines()) for path in sources}
    limit = {name: MAX_TEST_FILE_LINES if name.startswith("tests/") else MAX_FILE_LINES for name in lines}
    assert not {name: number for name, number in lines.items() if number > limit[name]}


def test_a_room_can_be_read_in_an_afternoon() -> None:
    """See docs/architecture.md, where this departs from the first design."""
    sizes = {
        room.name: sum(len(p.read_text().splitlines()) for p in room.rglob("*.*") if p.suffix in (".py", ".cpp", ".h"))
        for room in PACKAGE.iterdir()
        if room.is_dir() and room.name != "__pycache__"
    }
    assert len(sizes) >= 10
    assert not {name: size for name, size in sizes.items() if size > MAX_ROOM_LINES}


def test_subpackages_import_nothing_by_themselves() -> None:
    assert not [relative(path) for path in PACKAGE.glob("*/__init__.py") if path.read_text().strip()]


def test_every_module_says_what_it_is() -> None:
    silent = [
        relative(path)
        for path in python_files("kvbaton", "benchmarks")
        if path.name != "__init__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent


def test_planner_never_loads_torch() -> None:
    """In a process of its own, since some other test of this one has surely loaded it."""
    modules = [f"kvbaton.plan.{path.stem}" for path in (PACKAGE / "plan").glob("*.py") if path.stem != "__init__"]
    program = "import importlib, sys\n"
    program += f"for name in {sorted(modules)!r}: importlib.import_module(name)\n"
    program += "heavy = {'torch', 'transformers', 'asyncio', 'socket'} & set(sys.modules)\n"
    program += "sys.exit(', '.join(sorted(heavy)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"importing the planner loads {done.stderr}"


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    explained = (ROOT / "docs" / "dependencies.md").read_text()
    assert not [one for one in wanted if f"`{requirement_name(one)}`" not in explained]


def test_every_import_is_a_declared_dependency() -> None:
    """What the package imports at run time is in the base dependencies or in the extra that names it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *(one for name in OPTIONAL for one in extras[name])]
    names = {requirement_name(one).replace("-", "_").lower() for one in declared}
    allowed = names | {IMPORT_NAMES[name] for name in names & IMPORT_NAMES.keys()}
    allowed |= {*sys.stdlib_module_names, "kvbaton"}
    found = {
        f"{relative(path)}: {name}"
        for path in python_files("kvbaton")
        for name in imported_names(ast.parse(path.read_text()))
        if name not in allowed
    }
    assert not found
