"""Both sides of a hand-off side by side, and the page of documentation made from their tables.

``python -m kvbaton.transfer.session`` prints docs/handoff-lifecycle.md. Pure.
"""

from __future__ import annotations

from kvbaton.transfer import offering, pulling
from kvbaton.transfer.machine import markdown

DecodeSession = pulling.DecodeSession
PrefillSession = offering.PrefillSession

_INTRODUCTION = """\
# Life of a hand-off

Made from the transition tables in `kvbaton/transfer/offering.py` and `pulling.py` by
`python -m kvbaton.transfer.session`.

```
decode (pulls)                                   prefill (offers)
 new                                              new
  | Start{request, have_tokens}  ------------->    | to the engine
 waiting                                          queued
  |  <------------------------------------------   | Offer{ticket, blocks, generations, lease}
 pulling                                          offered
  |  <------------------------------------------   | Progress{tokens, layers} ... as layers are computed
  |  ~~~ reads (layer, blocks), shm or tcp ~~~~    |
  |  <------------------------------------------   | First{token}
  |  Renew{ticket} ----------------------------->  | while it reads, every third of the lease
  |  Ack{ticket} ------------------------------->  | everything is here and verified
 done                                             released
```

At every point `Abort`, `Failed`, a dead connection, a deadline or the end of the lease may come instead. An event that
is not in a table cannot be produced by the protocol: it raises, and changes nothing.
"""


def describe() -> str:
    """The whole page."""
    return "\n".join(
        [
            _INTRODUCTION,
            "## Decode side",
            "",
            markdown(pulling.TABLE),
            "",
            "## Prefill side",
            "",
            markdown(offering.TABLE),
            "",
        ]
    )


if __name__ == "__main__":
    print(describe(), end="")
