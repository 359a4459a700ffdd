"""Verdicts that were given before: a SQLite file that the processes of one machine may share, or memory where there is no file.

A file made by one run answers another in which no judge is running (Judge without urls): a recorded judge.
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
    """Only verdicts are kept; failures never are. The file must not lie on a network file system (SQLite's write-ahead log)."""

    def __init__(self, path: str, *, read_only: bool, config_key: str = "task.judge.cache") -> None:
        """Raises ValueError, under the setting `config_key`, where the file cannot be opened as what it should be."""
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
            raise ValueError(f"{config_key}={path}: {error}; name a file of verdicts, or one in a folder that exists") from error

    def find(self, key: str) -> float | None:
        row = self._run_query(lambda: self._file.execute("SELECT verdict FROM verdicts WHERE key = ?", (key,)).fetchone())
        return None if row is None else row[0]

    def store(self, key: str, *, model: str, prompt: str, fields: str, verdict: float) -> None:
        row = (key, model, prompt, fields, verdict)
        self._run_query(lambda: self._file.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?, ?)", row))

    def __len__(self) -> int:
        with closing(self._file.execute("SELECT count(*) FROM verdicts")) as rows:
            return rows.fetchone()[0]

    def close(self) -> None:
        self._file.close()

    def _run_query(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except sqlite3.Error as error:  # a full disk, a lock that nobody gives back
            raise InfraError(f"{self._key}={self.path}: {error}") from error


def _enable_wal(file: sqlite3.Connection) -> None:
    """SQLite waits for no other process that begins one: it says at once that the file is locked (sqlite.org/wal.html, 8)."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            file.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)
