"""The API keys of clients: where they are read from, whose they are, and how they are compared.

A file has one key a line, ``KEY`` or ``TENANT KEY``; ``#`` begins a comment. KEY is visible ASCII without spaces, at
least 16 characters, or ``sha256:`` and 64 hex digits of one, so that the file holds no secret. Keys of one tenant share
its prefix cache; a key without a name is a tenant of its own. The same lines, or the keys separated by commas, may be
in ``KVBATON_API_KEYS``. A file is read again when it changes; one that makes no sense then changes nothing.

Invariants: what is kept and compared are digests, each of them in constant time and all of them whatever matches; no
key is ever logged or shown. Knows nothing about HTTP or what a key opens.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbaton.types import LocalError

log = logging.getLogger(__name__)

VARIABLE = "KVBATON_API_KEYS"
MIN_KEY_CHARS, MAX_KEY_CHARS = 16, 512
MAX_KEYS = 1000  # each costs every request a comparison
MAX_FILE_BYTES = 1024 * 1024
LOOK_S = 1.0  # between two looks at the file
_KEY = re.compile(r"[!-~]+")
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class ApiKey:
    digest: bytes
    tenant: str


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def parse(text: str, where: str) -> tuple[ApiKey, ...]:
    """LocalError names the line, never what is in it."""
    found: dict[bytes, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2 or (len(words) == 2 and _TENANT.fullmatch(words[0]) is None):
            raise _bad(where, number, "is not KEY or TENANT KEY")
        digest = _digest(words[-1], where, number)
        tenant = words[0] if len(words) == 2 else f"key-{digest.hex()[:12]}"
        if digest in found:
            raise _bad(where, number, "repeats a key")
        found[digest] = ApiKey(digest, tenant)
    if len(found) > MAX_KEYS:
        raise LocalError(f"{where} has {len(found)} keys, at most {MAX_KEYS} are compared", field="api_keys")
    return tuple(found.values())


def _digest(word: str, where: str, number: int) -> bytes:
    if (hashed := _HASHED.fullmatch(word)) is not None:
        return bytes.fromhex(hashed.group(1))
    if not MIN_KEY_CHARS <= len(word) <= MAX_KEY_CHARS or _KEY.fullmatch(word) is None:
        what = f"has a key that is not {MIN_KEY_CHARS} to {MAX_KEY_CHARS} visible ASCII characters"
        raise _bad(where, number, what)
    return digest_of(word.encode())


def _bad(where: str, number: int, what: str) -> LocalError:
    return LocalError(f"line {number} of {where} {what}", field="api_keys", fix="openssl rand -hex 24 makes a good one")


class ApiKeys:
    """``find`` while requests come; ``follow`` in a task of the same loop."""

    def __init__(self, fixed: tuple[ApiKey, ...] = (), path: Path | None = None) -> None:
        """LocalError when the file cannot be read, others may read it, or there is no key at all."""
        self._fixed = fixed
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._keys = fixed
        self._hurry = asyncio.Event()
        if path is not None:
            self._seen = _signature(path)
            self._keys = (*fixed, *_read(path))
        if not self._keys:
            raise LocalError(f"{path or VARIABLE} has no API key", field="api_keys", fix="write one a line")

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, given: bytes) -> ApiKey | None:
        digest = digest_of(given)
        found = None
        for key in self._keys:  # all of them: how long it takes does not say which
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def refresh(self) -> bool:
        """Read the file again if it changed. A file that is gone or makes no sense leaves the keys as they were."""
        if self._path is None:
            return False
        try:
            seen = _signature(self._path)
            if seen == self._seen:
                return False
            keys = _read(self._path)
        except LocalError as error:
            seen = ()
            if self._seen:  # said once
                log.error("API keys stay as they were: %s", error)
            self._seen = seen
            return False
        self._seen, self._keys = seen, (*self._fixed, *keys)
        log.warning("API keys were read again: %d now", len(self._keys))
        return True

    def hurry(self) -> None:
        """Look at the file now (SIGHUP)."""
        self._seen = ()
        self._hurry.set()

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._hurry.wait()
            self._hurry.clear()
            self.refresh()


def load(path: str, environ: Mapping[str, str] | None = None) -> ApiKeys | None:
    """From the file of the settings and the variable; None: no keys are configured."""
    text = (os.environ if environ is None else environ).get(VARIABLE, "")
    fixed = parse(text.replace(",", "\n"), VARIABLE)
    if not path and not fixed:
        return None
    return ApiKeys(fixed, Path(path) if path else None)


def _signature(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError as error:
        raise LocalError(f"cannot read {path}: {error.strerror}", field="api_keys") from None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[ApiKey, ...]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise LocalError(f"cannot read {path}: {error.strerror}", field="api_keys") from None
    if len(raw) > MAX_FILE_BYTES:
        raise LocalError(f"{path} has more than {MAX_FILE_BYTES} bytes", field="api_keys")
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise LocalError(f"{path} is not text", field="api_keys") from None
    if status.st_mode & stat.S_IROTH and any(
        _HASHED.fullmatch(words[-1]) is None for line in text.splitlines() if (words := line.partition("#")[0].split())
    ):
        raise LocalError(f"everybody on this host may read the keys in {path}", field="api_keys", fix="chmod o= it")
    return parse(text, str(path))
