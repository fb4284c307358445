"""The drained nodes, kept in an SQLite file so that a drain outlives the service and Envoy."""

import asyncio
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_TABLE = "CREATE TABLE IF NOT EXISTS drains (node_id TEXT PRIMARY KEY NOT NULL) WITHOUT ROWID"


class DrainStoreError(Exception):
    """The file cannot be read or written; the message says which, why, and what to do."""


class DrainStore:
    """Remembers drained nodes by id, also those that are no longer configured: they may come back.

    One worker thread makes the calls, so they take effect in the order in which they were made.
    A call returns once its change is on the disk. Each raises `DrainStoreError`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="drains")

    async def load(self) -> set[str]:
        """The ids of the drained nodes; none when the file is new."""
        return await self._run(
            lambda db: {node_id for (node_id,) in db.execute("SELECT node_id FROM drains")}
        )

    async def drain(self, node_id: str) -> None:
        """Remember that the node is drained; harmless when it is already."""
        await self._run(lambda db: db.execute("INSERT OR IGNORE INTO drains VALUES (?)", (node_id,)))

    async def restore(self, node_id: str) -> None:
        """Forget that the node was drained; harmless when it was not."""
        await self._run(lambda db: db.execute("DELETE FROM drains WHERE node_id = ?", (node_id,)))

    async def _run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._transact, work)

    def _transact(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            os.close(
                os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            )  # SQLite itself would let all read it
            with closing(sqlite3.connect(self._path)) as db, db:
                db.execute("PRAGMA synchronous = EXTRA")  # FULL may lose the last commit with the power
                db.execute(_TABLE)
                return work(db)
        except (OSError, sqlite3.Error) as error:
            raise DrainStoreError(self._advice(error)) from error

    def _advice(self, error: OSError | sqlite3.Error) -> str:
        reason = error.strerror if isinstance(error, OSError) else error
        return (
            f"The drain store {self._path} cannot be used: {reason}. Check that this user may write there "
            "and that the disk has room; if so, the file is damaged: move it away to start with no drains."
        )
