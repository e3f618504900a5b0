"""Which blocks one level of the shared KV tier holds, least recently used out first; many processes, one SQLite file.

    add --> held --touched by find--> held (newest)        pinned: find's promise that it stays until it was read
             |
             +-- beyond ``max_bytes``, oldest first, unless pinned --> victim

Invariants: what is held never exceeds ``max_bytes``; what is being read is no victim; of a chain the tail is older than
the head, so that a prefix survives its continuations. Every change is one transaction: a process that is killed has
made it whole or not at all, and the kernel frees its lock. ``publish`` and ``retire`` run inside of it, so that files
and index change together; each returns what takes it back, which is done when the change comes to nothing. A pin ends
by itself: a reader that was killed does not keep it. Knows nothing about files, hashes, or what a block means; time is
an argument.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Undo = Callable[[], None]  # raises nothing
BUSY_S = 5.0  # for another process's transaction, which takes milliseconds unless it hangs
_SCHEMA = """
CREATE TABLE IF NOT EXISTS blocks (
    key BLOB PRIMARY KEY, num_bytes INTEGER NOT NULL, used INTEGER NOT NULL, pinned_until_s REAL NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON blocks (used);
CREATE TABLE IF NOT EXISTS totals (one INTEGER PRIMARY KEY CHECK (one = 1), num_bytes INTEGER, tick INTEGER);
INSERT OR IGNORE INTO totals VALUES (1, 0, 0);
"""


def _nothing() -> None: ...


def _no_file(key: bytes) -> Undo:
    return _nothing


@dataclass(frozen=True)
class Added:
    victims: tuple[bytes, ...] = ()  # no longer held
    num_refused: int = 0  # not taken: everything else is pinned, or it is larger than the level


class TierIndex:
    """``path`` ":memory:" is one that nobody shares, for a simulation."""

    def __init__(self, path: Path | str, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()  # one connection, whichever thread
        self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        # Killing a process loses nothing with these; a power cut may, and then checksums tell.
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = OFF")
        self._db.executescript(_SCHEMA)
        self.num_bytes = self._total()  # as of our last change; others make some too

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __len__(self) -> int:
        with self._lock:
            return int(self._db.execute("SELECT count(*) FROM blocks").fetchone()[0])

    def held_keys(self) -> list[bytes]:
        with self._lock:
            return [row[0] for row in self._db.execute("SELECT key FROM blocks")]

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return self._has(key)

    def find(self, chain: Sequence[bytes], now_s: float, pin_s: float) -> int:
        """How many leading keys of ``chain`` are held. They count as used now, and stay for ``pin_s``."""
        with self._lock, self._transaction():
            count = self._num_leading(chain)
            self._touch(chain[:count], now_s + pin_s)
        return count

    def touch(self, chain: Sequence[bytes]) -> None:
        """Those of ``chain`` that are held count as used now."""
        with self._lock, self._transaction():
            self._touch(chain, 0.0)

    def add(
        self,
        chain: Sequence[tuple[bytes, int]],
        now_s: float,
        publish: Callable[[bytes], Undo] = _no_file,
        retire: Callable[[bytes], Undo] = _no_file,
    ) -> Added:
        """Hold these (key, bytes), given in chain order; says who had to go for them."""
        with self._lock, self._transaction() as done:
            self._touch([key for key, _ in chain], 0.0)  # what is held of it is the last to go for the rest
            room = self.max_bytes - self._total()
            fresh = [(key, size) for key, size in chain if not self._has(key)]
            needed = sum(size for _, size in fresh)
            victims = list(self._choose_victims(needed - room, now_s))
            room += sum(size for _, size in victims)
            taken: list[tuple[bytes, int]] = []
            for key, size in fresh:  # heads first: without one its tail is worth nothing
                if size > room:
                    break
                room -= size
                taken.append((key, size))
            for key, _ in victims:
                done.append(retire(key))
            for key, _ in taken:
                done.append(publish(key))
            self._db.executemany("DELETE FROM blocks WHERE key = ?", [(key,) for key, _ in victims])
            rows = [(key, size) for key, size in taken]
            self._db.executemany("INSERT INTO blocks (key, num_bytes, used) VALUES (?, ?, 0)", rows)
            self._grow(sum(size for _, size in taken) - sum(size for _, size in victims))
            self._touch([key for key, _ in chain], 0.0)
        return Added(tuple(key for key, _ in victims), len(fresh) - len(taken))

    def remove(self, keys: Iterable[bytes], retire: Callable[[bytes], Undo] = _no_file) -> None:
        """Forget them: gone, or found to be wrong."""
        with self._lock, self._transaction() as done:
            for key in keys:
                row = self._db.execute("SELECT num_bytes FROM blocks WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    self._db.execute("DELETE FROM blocks WHERE key = ?", (key,))
                    self._grow(-row[0])
                    done.append(retire(key))

    def check(self) -> None:
        """Assert the invariants; ``sqlite3.DatabaseError`` when the file is damaged."""
        with self._lock:
            found = self._db.execute("PRAGMA quick_check").fetchone()[0]
            if found != "ok":
                raise sqlite3.DatabaseError(found)
            total = self._db.execute("SELECT coalesce(sum(num_bytes), 0) FROM blocks").fetchone()[0]
            assert total == self._total(), f"{total} bytes are held, {self._total()} counted"
            assert total <= self.max_bytes, f"{total} bytes are held, {self.max_bytes} allowed"

    def begin(self, retire: Callable[[bytes], Undo] = _no_file) -> None:
        """Nobody else is here: pins of an earlier life mean nothing, and ``max_bytes`` may have been larger."""
        with self._lock, self._transaction() as done:
            self._db.execute("UPDATE blocks SET pinned_until_s = 0 WHERE pinned_until_s != 0")
            victims = list(self._choose_victims(self._total() - self.max_bytes, 0.0))
            for key, size in victims:
                self._db.execute("DELETE FROM blocks WHERE key = ?", (key,))
                self._grow(-size)
                done.append(retire(key))

    # -- under the lock ------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[list[Undo]]:
        """All of it or nothing, of what was done to files too: its undoing is put on the list."""
        done: list[Undo] = []
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield done
            num_bytes = self._total()
            self._db.execute("COMMIT")
        except BaseException:
            for undo in reversed(done):  # before others may change the same files
                undo()
            if self._db.in_transaction:  # SQLite itself gives up some, as when the disk is full
                self._db.execute("ROLLBACK")
            raise
        self.num_bytes = num_bytes

    def _has(self, key: bytes) -> bool:
        return self._db.execute("SELECT 1 FROM blocks WHERE key = ?", (key,)).fetchone() is not None

    def _num_leading(self, chain: Sequence[bytes]) -> int:
        for index, key in enumerate(chain):
            if not self._has(key):
                return index
        return len(chain)

    def _total(self) -> int:
        return int(self._db.execute("SELECT num_bytes FROM totals").fetchone()[0])

    def _grow(self, num_bytes: int) -> None:
        self._db.execute("UPDATE totals SET num_bytes = num_bytes + ?", (num_bytes,))

    def _touch(self, chain: Sequence[bytes], pinned_until_s: float) -> None:
        """The head is the newest."""
        tick = self._db.execute("SELECT tick FROM totals").fetchone()[0]
        rows = [(tick + n, pinned_until_s, key) for n, key in enumerate(reversed(chain), 1)]
        statement = "UPDATE blocks SET used = ?, pinned_until_s = max(pinned_until_s, ?) WHERE key = ?"
        self._db.executemany(statement, rows)
        self._db.execute("UPDATE totals SET tick = tick + ?", (len(chain),))

    def _choose_victims(self, num_bytes: int, now_s: float) -> Iterator[tuple[bytes, int]]:
        if num_bytes <= 0:
            return
        oldest = "SELECT key, num_bytes FROM blocks WHERE pinned_until_s <= ? ORDER BY used"
        for key, size in self._db.execute(oldest, (now_s,)):
            yield key, size
            num_bytes -= size
            if num_bytes <= 0:
                return
