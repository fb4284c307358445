"""The configuration file, read again: what has changed is put in force, or the file is refused as a whole."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final

from extproc.config import Config, ConfigError, Problem, load_config
from extproc.config.difference import Difference, applicable, difference
from extproc.drains import DrainStoreError

logger = logging.getLogger(__name__)

WATCH_S: Final = 0.5
"""How often the file is looked at. A change counts once the file has stayed the same from look to look."""

_Signature = tuple[int, int, int, int] | None


class ReloadError(Exception):
    """The file is refused, and nothing has changed; `reasons`: one line each, with file and line if known."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class Reloader:
    """Reads `path`, on request and when it changes. `in_force` is the configuration that `apply` replaces."""

    def __init__(
        self, path: Path, in_force: Callable[[], Config], apply: Callable[[Config], Awaitable[None]]
    ) -> None:
        self.errors: list[str] = []
        """Why the file was refused the last time."""
        self._path = path
        self._in_force = in_force
        self._apply = apply
        self._lock = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._asked: set[asyncio.Task[None]] = set()
        self._is_over = False

    def start(self) -> None:
        """Begin to watch the file. What it says now counts too: it may have changed since it was loaded."""
        self._watching = asyncio.create_task(self._watch(), name="watch the configuration")

    async def stop(self) -> None:
        """Read it no more, and apply nothing from then on."""
        tasks = [*self._asked, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._lock:  # an admin call may hold it
            self._is_over = True

    async def reload(self, dry_run: bool = False) -> Difference:
        """What differs, which is in force now unless it is a `dry_run`. Raises `ReloadError`."""
        async with self._lock:
            if self._is_over:
                raise ReloadError(["The service is stopping."])
            old = self._in_force()
            notes: list[Problem] = []
            try:
                new = await asyncio.to_thread(load_config, self._path, os.environ, notes.append)
                changes = difference(old, new)
                if not dry_run and (wanted := applicable(old, new)) != old:
                    await self._apply(wanted)
            except (ConfigError, DrainStoreError, OSError) as error:
                raise self._refused(error, dry_run) from None
            if not dry_run:
                self.errors.clear()
                _log(changes, notes)
            return changes

    def ask(self) -> None:
        """Reload soon; a refusal is logged."""
        logger.info("reading %s again", self._path)
        task = asyncio.create_task(self._attempt(), name="reload")
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)

    def _refused(self, error: Exception, dry_run: bool) -> ReloadError:
        match error:
            case ConfigError():
                reasons = list(map(str, error.problems))
            case OSError():
                reasons = [f"{self._path}: cannot be applied: {error.strerror}"]
            case _:
                reasons = [f"{self._path}: cannot be applied: {error}"]
        if not dry_run:
            self.errors[:] = reasons
            logger.error(
                "the configuration is refused, and the one before stays in force: %s", "; ".join(reasons)
            )
        return ReloadError(reasons)

    async def _attempt(self) -> None:
        try:
            await self.reload()
        except ReloadError:
            pass  # which is logged
        except Exception:
            logger.exception("reloading the configuration failed")

    async def _watch(self) -> None:
        """By looking: that works where files are replaced, behind links that change, and over networks."""
        read: _Signature | str = "nothing"
        before = await asyncio.to_thread(_signature, self._path)
        while True:
            await asyncio.sleep(WATCH_S)
            now = await asyncio.to_thread(_signature, self._path)
            if now == before and now != read:
                read = now
                await self._attempt()
            before = now


def _log(changes: Difference, notes: Iterable[Problem]) -> None:
    if not changes:
        logger.debug("configuration reloaded: nothing differs")
        return
    logger.info("configuration reloaded: %s", changes)
    for note in notes:
        logger.warning("%s", note)


def _signature(path: Path) -> _Signature:
    """What differs when a file does, through all links; `None`: there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size
