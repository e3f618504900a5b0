"""``kvbaton route``: look at a routing decision again.

Reads what the router logged, decides once more from that alone, and says whether the result is the same. Knows nothing
about a running fleet.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from kvbaton.types import LocalError

_MILLISECONDS = (
    *("overhead", "queue", "prefill", "exposed", "admission", "first_step", "ttft", "tpot", "harm", "later", "cost"),
)


@click.command("route")
@click.option(
    "--explain",
    "source",
    metavar="RECORD",
    required=True,
    help="A file with lines of the router's log; - reads stdin.",
)
@click.option("--request-id", help="Only the decision of this request.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def route_command(source: str, request_id: str | None, as_json: bool) -> int:
    """Replay a routing decision from its record, with all terms of the placements that were compared.

    RECORD is a file with one or more lines of the router's log, or one record alone. With several the last one is
    shown, and all are replayed. Exit code 0: every replay agrees; 1: one differs; 2: there is no record.
    """
    from kvbaton.router.explain import read_record, replay

    lines = _lines(source, request_id)
    replays = [replay(read_record(line)) for line in lines]
    shown = replays[-1]
    num_differing = sum(not each.agrees for each in replays)
    if as_json:
        decision = shown.decision
        names = ("reason", "prefill", "decode")
        answer: dict[str, Any] = {
            "agrees": num_differing == 0,
            "num_records": len(replays),
            "num_differing": num_differing,
            "record": shown.record,
            "replayed": {name: getattr(decision, name) for name in names} if decision is not None else None,
            "differences": shown.differences,
        }
        click.echo(msgspec.json.format(msgspec.json.encode(answer), indent=1).decode())
    else:
        click.echo(_text(shown))
        if len(replays) > 1:
            click.echo(f"{len(replays)} records replayed, {num_differing} differ")
    return 1 if num_differing else 0


def _lines(source: str, request_id: str | None) -> list[bytes]:
    """The records in a file: its lines that have one, or all of it."""
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise LocalError(f"cannot read {source}: {error.strerror}", field="--explain") from None
    lines = [line for line in raw.splitlines() if b'"route":{' in line.replace(b'"route": {', b'"route":{')]
    if request_id is not None:
        lines = [line for line in lines if request_id.encode() in line]
        if not lines:
            fix = "take one from the x-kvbaton-request-id header"
            raise LocalError(f"no decision of request {request_id}", field="--request-id", fix=fix)
    return lines or [raw]


def _text(shown: Any) -> str:
    from kvbaton.router.cost import TERMS
    from kvbaton.router.explain import place_name
    from kvbaton.router.policy import REASONS

    record = shown.record
    request = record.request
    chosen = place_name(record.prefill, record.decode)
    out = [
        f"{record.reason}: {REASONS[record.reason]}",
        f"  placed on {chosen}; {request.num_prompt_tokens:,} prompt tokens, {request.num_sequences} sequence(s)",
    ]
    if record.placements:
        limits = record.config
        out += [
            f"  limits: TTFT {limits.ttft_slo_s * 1e3:g} ms, TPOT {limits.tpot_slo_s * 1e3:g} ms, "
            f"so a millisecond of TPOT costs {limits.ttft_slo_s / limits.tpot_slo_s:g} of TTFT; "
            f"the best {len(record.placements)} of {record.num_placements} placements, in ms:",
            "",
        ]
        head = ["", "placement", *_MILLISECONDS, "violation"]
        rows = [
            ["*" if place_name(each.prefill, each.decode) == chosen else "", place_name(each.prefill, each.decode)]
            + [f"{each.terms[name + '_s'] * 1e3:.2f}" for name in _MILLISECONDS]
            + [f"{each.terms['violation']:.3f}"]
            for each in record.placements
        ]
        out += _table([head, *rows])
        out += ["", *(f"  {name}: {meaning}" for name, meaning in TERMS.items())]
    else:
        out += ["", *(f"  {name}: {value:g}" for name, value in record.terms.items())]
    if shown.agrees:
        return "\n".join([*out, "", "the replay agrees"])
    return "\n".join([*out, "", "the replay DIFFERS:", *(f"  {each}" for each in shown.differences)])


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            text.ljust(widths[i]) if i < 2 else text.rjust(widths[i])  # names to the left, numbers to the right
            for i, text in enumerate(row)
        )
        for row in rows
    ]
