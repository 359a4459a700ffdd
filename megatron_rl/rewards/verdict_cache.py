"""Cache of judge verdicts, in a SQLite file or in memory.

Several processes on one machine may share a file. A file recorded by one run can replace the judge
in another run: a Judge without urls reads the recorded verdicts.
"""

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

from megatron_rl.errors import InfraError

_TABLE = "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, model TEXT, prompt TEXT, fields TEXT, verdict REAL NOT NULL)"
_BUSY_S, _POLL_S = 30.0, 0.02
T = TypeVar("T")


class VerdictCache:
    """Key-value store of verdicts; failures are never stored.

    The file must not be on a network file system, because SQLite uses a write-ahead log.
    """

    def __init__(self, path: str, *, read_only: bool, config_key: str = "task.judge.cache") -> None:
        """Open the file, or a cache in memory if `path` is empty.

        Raises ValueError if the file cannot be opened as a verdict cache. The error message
        contains `config_key`, the name of the setting.
        """
        self.path, self._key = path, config_key
        try:
            if path and read_only:
                self._file = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=_BUSY_S)
                self._file.execute("SELECT count(*) FROM verdicts")
                return
            self._file = sqlite3.connect(path or ":memory:", timeout=_BUSY_S, isolation_level=None)
            _enable_wal(self._file)
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.execute(_TABLE)
        except sqlite3.Error as error:
            raise ValueError(f"{config_key}={path}: {error}; give an existing verdict file, or a new file in an existing folder") from error

    def find(self, key: str) -> float | None:
        """Return the verdict stored under a key, or None if no verdict is stored."""
        row = self._run_query(lambda: self._file.execute("SELECT verdict FROM verdicts WHERE key = ?", (key,)).fetchone())
        return None if row is None else row[0]

    def store(self, key: str, *, model: str, prompt: str, fields: str, verdict: float) -> None:
        """Store a verdict, unless a verdict is already stored under the key."""
        row = (key, model, prompt, fields, verdict)
        self._run_query(lambda: self._file.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?, ?)", row))

    def __len__(self) -> int:
        with closing(self._file.execute("SELECT count(*) FROM verdicts")) as rows:
            return rows.fetchone()[0]

    def close(self) -> None:
        """Close the database."""
        self._file.close()

    def _run_query(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except sqlite3.Error as error:  # e.g. a full disk or a lock that is never released
            raise InfraError(f"{self._key}={self.path}: {error}") from error


def _enable_wal(file: sqlite3.Connection) -> None:
    """Switch to the write-ahead log, retrying for up to _BUSY_S seconds.

    If another process switches at the same time, SQLite does not wait but fails at once with
    SQLITE_BUSY (sqlite.org/wal.html, section 8).
    """
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            file.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
