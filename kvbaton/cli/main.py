"""``kvbaton``: the verbs, and what every one of them does alike.

Exit codes: 0 done; 1 the answer is no, or a peer failed; 2 bad input, with one line that names the field and the fix.
stdout carries the result, stderr the progress. Verbs import what is heavy when they run, so that ``kvbaton kv`` never
waits for an engine it does not need.
"""

from __future__ import annotations

import importlib
import sys

import click

from kvbaton import __version__
from kvbaton.types import KvbatonError, RemoteError

# In the order of --help: serve, then decide, measure and operate.
VERBS: dict[str, str] = {
    "up": "kvbaton.cli.up",
    "worker": "kvbaton.cli.worker",
    "router": "kvbaton.cli.router",
    "fleet": "kvbaton.cli.fleet_commands",
    "kv": "kvbaton.cli.plan_commands",
    "plan": "kvbaton.cli.plan_commands",
    "advise": "kvbaton.cli.plan_commands",
    "bench": "kvbaton.cli.bench_commands",
    "compare": "kvbaton.cli.bench_commands",
    "verify": "kvbaton.cli.bench_commands",
    "profile": "kvbaton.cli.bench_commands",
    "link": "kvbaton.cli.bench_commands",
    "route": "kvbaton.cli.route_commands",
    "deploy": "kvbaton.cli.deploy_commands",
    "timeline": "kvbaton.cli.timeline_commands",
    "drill": "kvbaton.cli.drill_commands",
    "soak": "kvbaton.cli.soak_command",
    "doctor": "kvbaton.cli.doctor_command",
}


class Verbs(click.Group):
    """Finds ``<verb>_command`` in the module that ``VERBS`` names; a verb that is not there yet is not offered."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [verb for verb in VERBS if self.get_command(ctx, verb) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = getattr(importlib.import_module(VERBS[cmd_name]), f"{cmd_name}_command", None)
        return command if isinstance(command, click.Command) else None


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="kvbaton")
def kvbaton() -> None:
    """Disaggregated prefill and decode for language models: decide, run, prove, operate."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command line; the exit code."""
    try:
        result = kvbaton.main(arguments, prog_name="kvbaton", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except KvbatonError as error:
        field = f"{error.field}: " if error.field and error.field not in str(error) else ""
        click.echo(f"kvbaton: {field}{error}", err=True)
        return 1 if isinstance(error, RemoteError) else 2
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
