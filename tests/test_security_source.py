"""What no module of the package may contain, found in its syntax: code that runs what it reads, secrets in the open,
calls that could be sent elsewhere."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "kvbaton").rglob("*.py"))
# They make objects, or run code, of what they read.
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle",
                     "xmlrpc", "telnetlib", "code", "codeop"}  # fmt: skip
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "yaml.load_all",
                   "yaml.unsafe_load", "yaml.full_load", "torch.jit.load", "jinja2.Environment", "jinja2.Template",
                   "Environment", "Template", "tempfile.mktemp", "ssl._create_unverified_context"}  # fmt: skip
SECRETS = {"key", "_key", "secret", "_fleet_key", "fleet_key", "internal_key", "tag", "digest", "ticket", "api_key"}
# Comparisons of what goes by such a name and is not secret, with why.
PUBLIC = {
    "event.ticket != self._agreed.ticket": "tells repeated messages apart, behind the connection that the book checks",
    "event.first.ticket != self._offer.ticket": "the same",
    "proof.fingerprint_digest != self._digest": "of a fingerprint, which both sides have said",
}


def dotted(node: ast.expr) -> str:
    """``a.b.c`` as it is written, ``?`` for what is no name."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT / "kvbaton"))


@cache
def trees() -> tuple[tuple[str, ast.Module], ...]:
    return tuple((relative(path), ast.parse(path.read_text())) for path in FILES)


def test_nothing_makes_objects_or_runs_code_of_what_it_reads() -> None:
    """SE-04 in the whole package: no pickle, no eval, no shell, no template outside of the sandbox."""
    assert len(FILES) > 200
    found = []
    for name, tree in trees():
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found += [f"{name}: imports {each}" for each in modules if each.partition(".")[0] in FORBIDDEN_MODULES]
        for function, call in calls(tree):
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            if function in FORBIDDEN_CALLS:
                found.append(f"{name}:{call.lineno}: {function}")
            if "shell" in given and ast.unparse(given["shell"]) != "False":
                found.append(f"{name}:{call.lineno}: a shell")
            if function == "torch.load" and ast.unparse(given.get("weights_only", ast.Constant(False))) != "True":
                found.append(f"{name}:{call.lineno}: torch.load without weights_only=True")
            if function in ("np.load", "numpy.load") and "allow_pickle" in given:
                found.append(f"{name}:{call.lineno}: numpy may unpickle")
    assert not found


def test_the_search_finds_what_it_is_for() -> None:
    """A scan that cannot fail says nothing."""
    bad = "import pickle\neval(x)\nsubprocess.run(a, shell=True)\ntorch.load(f)\nyaml.load(f)"
    tree = ast.parse(bad)
    assert {function for function, _ in calls(tree)} >= {"eval", "torch.load", "yaml.load"}
    assert any(isinstance(node, ast.Import) and node.names[0].name in FORBIDDEN_MODULES for node in ast.walk(tree))


def test_secrets_are_compared_in_constant_time() -> None:
    """No ``==`` with a key, a tag, a digest or a ticket on either side, but where the table says why."""
    found = []
    for name, tree in trees():
        if not name.startswith(("transfer/", "router/", "workers/", "cli/")):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
                sides = (node.left, *node.comparators)
                names = {side.attr if isinstance(side, ast.Attribute) else getattr(side, "id", "") for side in sides}
                said = ast.unparse(node)
                if names & SECRETS and not any(isinstance(side, ast.Constant) for side in sides) and said not in PUBLIC:
                    found.append(f"{name}:{node.lineno}: {said}")
    assert not found
    for name in ("router/door.py", "router/api_keys.py", "transfer/auth.py", "workers/server.py"):
        assert "hmac.compare_digest(" in (ROOT / "kvbaton" / name).read_text(), name


def test_calls_that_carry_the_fleets_key_follow_no_redirect() -> None:
    """aiohttp follows by default, and takes our header along."""
    found = []
    for name, tree in trees():
        if not name.startswith("router/"):
            continue
        for function, call in calls(tree):
            if function.rpartition(".")[0].endswith("session") and function.rpartition(".")[2] in (
                "get",
                "post",
                "request",
            ):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                found.append((f"{name}:{call.lineno}", given.get("allow_redirects")))
    assert len(found) >= 4 and {said for _, said in found} == {"False"}, found


def test_no_secret_is_an_argument_of_a_process() -> None:
    """A command line can be read by every user of a host: secrets go by the environment or by files."""
    import click

    from kvbaton.cli.main import VERBS, kvbaton

    context = click.Context(kvbaton)
    flags: set[str] = set()
    for verb in VERBS:
        command = kvbaton.get_command(context, verb)
        assert command is not None
        for each in (command, *(getattr(command, "commands", {}).values())):
            flags |= {option for parameter in each.params for option in parameter.opts}
    suspicious = {flag for flag in flags if any(word in flag for word in ("key", "secret", "token", "password"))}
    tokens = {flag for flag in suspicious if "tokens" in flag}  # of prompts
    harmless = {"--key-secret", "--fabric-key", "--tokenizer"}  # the name of a Secret, of a label, of a directory
    # A file's name; and OpenAI's for a load generator, which has OPENAI_API_KEY for it too.
    assert suspicious - tokens <= {"--api-keys", "--api-key", *harmless}, suspicious - tokens


@pytest.mark.parametrize(
    "name", ["router/gateway.py", "workers/server.py", "workers/generation.py", "engine/engine.py"]
)
def test_no_log_call_is_given_what_a_client_wrote(name: str) -> None:
    """Names of prompts, messages, bodies and texts are arguments of no log call on a request's way."""
    words = {"prompt", "prompts", "messages", "raw", "body", "text", "raw_body", "prompt_token_ids", "content"}
    found = []
    for function, call in calls(ast.parse((ROOT / "kvbaton" / name).read_text())):
        if function in ("log.debug", "log.info", "log.warning", "log.error", "log.exception", "log_event"):
            used = {getattr(node, "id", getattr(node, "attr", "")) for each in call.args for node in ast.walk(each)}
            found += [f"line {call.lineno}"] if used & words else []
    assert not found
