"""The service's log: one line a record, on stderr."""

import logging
import time
import traceback
from types import TracebackType

from extproc.config import LogLevel

_LEVELS = {
    LogLevel.DEBUG: logging.DEBUG,
    LogLevel.INFO: logging.INFO,
    LogLevel.WARN: logging.WARNING,
    LogLevel.ERROR: logging.ERROR,
}
_FRAMES_SHOWN = 4
_NEVER_DEBUGGED = ("grpc", "_cygrpc")
"""Their debug records are about themselves, not about requests."""
_CHATTY = ("asyncio", "aiohttp.access")
_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def log_to_stderr(level: LogLevel) -> None:
    """Send every record of at least this level to stderr: time (UTC), level, message."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine("%(asctime)s %(levelname)-7s %(message)s"))
    logging.raiseExceptions = False  # a closed terminal is no reason for more noise
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def set_level(level: LogLevel) -> None:
    """Log records of at least this level from now on."""
    logging.getLogger().setLevel(_LEVELS[level])
    quiet = max(logging.WARNING, _LEVELS[level])
    for name in _NEVER_DEBUGGED:
        logging.getLogger(name).setLevel(quiet)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.NOTSET if level is LogLevel.DEBUG else quiet)


class OneLine(logging.Formatter):
    """Whatever is logged takes one line; a traceback becomes its error and its last places."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line without control characters."""
        text = super().format(record).replace("\n", " ")
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)

    def formatException(self, ei: _Raised) -> str:  # noqa: N802
        """`(ValueError: what; at fleet.py:12, client.py:40)`."""
        kind, error, trace = ei
        if kind is None:
            return ""
        frames = traceback.extract_tb(trace)[-_FRAMES_SHOWN:]
        places = ", ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames)
        return f"({kind.__name__}: {error}; at {places})"
