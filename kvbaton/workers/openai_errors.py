"""Errors in OpenAI's shape, and which status each kind of failure gets.

Knows nothing about requests or transport.
"""

from __future__ import annotations

import asyncio

import msgspec

from kvbaton.types import CapacityError, LocalError, RemoteError

_ENCODER = msgspec.json.Encoder()


class ApiError(Exception):
    """One answerable error. ``param`` names the offending field; ``code`` is for programs, ``message`` for people."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow  # the methods that a 405 must name
        self.challenge = ""  # how a 401 asks for a key

    def body(self) -> bytes:
        return _ENCODER.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.allow is not None:
            headers.append((b"allow", self.allow.encode()))
        if self.challenge:
            headers.append((b"www-authenticate", self.challenge.encode()))
        return headers


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after_s: int = 1) -> ApiError:
    return ApiError(503, message, type="server_error", code=code, retry_after_s=retry_after_s)


def model_not_found(name: str, served: str) -> ApiError:
    message = f"the model {name[:100]!r} is not served here; use {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def not_found_member(name: str, known: list[str]) -> ApiError:
    return ApiError(404, f"no member {name[:100]!r}; there are {', '.join(known)}", param="name", code="not_found")


def from_exception(error: BaseException) -> ApiError:
    """What a client is told about ``error``. Messages of unexpected errors stay in our log."""
    match error:
        case ApiError():
            return error
        case CapacityError():
            return unavailable(str(error), "no_capacity")
        case LocalError() if error.field is not None:
            return bad_request(str(error), error.field)
        case RemoteError():  # its text may hold addresses of our network; it is logged, not sent
            return ApiError(502, "the prefill worker failed", type="server_error", code="prefill_failed")
        case TimeoutError() | asyncio.TimeoutError():
            return ApiError(504, "the deadline of the request passed", type="server_error", code="deadline_exceeded")
        case _:
            return ApiError(500, "internal error", type="server_error", code="internal_error")
