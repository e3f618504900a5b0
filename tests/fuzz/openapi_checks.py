"""What schemathesis is to check besides its own: a refusal says which field it is about. Loaded by it, not by us."""

from __future__ import annotations

from typing import Any

import schemathesis

# Said of a body that is none, and of a connection: there is no field to name.
WITHOUT_FIELD = ("the body", "HTTP", "use POST", "there is nothing at")


@schemathesis.check
def a_refusal_names_the_field(ctx: Any, response: Any, case: Any) -> None:
    if not 400 <= response.status_code < 500 or response.status_code == 405:
        return
    error = response.json()["error"]
    assert error["message"] and error["type"], error
    named = error["param"] is not None or any(each in error["message"] for each in WITHOUT_FIELD)
    assert named, f"no field is named: {error}"
