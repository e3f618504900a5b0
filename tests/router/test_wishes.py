"""Headers in which a client says how long it waits and whether its stream may be continued."""

from __future__ import annotations

import pytest

from kvbaton.router.wishes import Wishes, read_wishes
from kvbaton.workers.openai_errors import ApiError


def test_without_headers_the_settings_hold() -> None:
    assert read_wishes({}, 600.0) == Wishes(600.0, True)


@pytest.mark.parametrize(("raw", "timeout_s"), [(b"1500", 1.5), (b"1", 0.001), (b"999999999", 600.0)])
def test_a_deadline_only_narrows(raw: bytes, timeout_s: float) -> None:
    assert read_wishes({b"x-request-timeout-ms": raw}, 600.0).timeout_s == timeout_s


@pytest.mark.parametrize("raw", [b"", b"0", b"-1", b"1e3", b"1.5", b"x", "\u0663".encode(), b"1" * 13])
def test_a_deadline_without_sense_is_named(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_wishes({b"x-request-timeout-ms": raw}, 600.0)
    assert (caught.value.status, caught.value.param) == (400, "x-request-timeout-ms")


def test_replay() -> None:
    assert read_wishes({b"x-kvbaton-replay": b"Never"}, 1.0).replay is False
    assert read_wishes({b"x-kvbaton-replay": b"allow"}, 1.0).replay is True
    with pytest.raises(ApiError) as caught:
        read_wishes({b"x-kvbaton-replay": b"maybe"}, 1.0)
    assert caught.value.param == "x-kvbaton-replay"
