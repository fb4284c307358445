"""How a process in the foreground is told to stop."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
HUNG_UP = 129
"""Exit code after the terminal was closed."""


def ends_with_terminal() -> bool:
    """Whether this process was started on a terminal, and not with `nohup`."""
    on_terminal = any(os.isatty(stream) for stream in (0, 1, 2))
    return on_terminal and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


class StopSignals:
    """SIGTERM and SIGINT, while its `with` block runs: the first sets `asked`, the second `urgent`.

    SIGHUP, which would end a process, calls `on_hangup`; `None`: it is a signal to stop like them.
    """

    def __init__(self, on_hangup: Callable[[], None] | None) -> None:
        self._on_hangup = on_hangup
        self.asked = asyncio.Event()
        self.urgent = asyncio.Event()
        self.exit_code = 0

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop, 0)
        loop.add_signal_handler(signal.SIGINT, self._stop, INTERRUPTED)
        if self._on_hangup is None:
            loop.add_signal_handler(signal.SIGHUP, self._stop, HUNG_UP)
        else:
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)

    def _stop(self, exit_code: int) -> None:
        if self.asked.is_set():
            logger.warning("stopping at once")
            self.urgent.set()
            return
        self.exit_code = exit_code
        logger.info("stopping: running requests may end; a second signal stops at once")
        self.asked.set()


async def done_before(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Whether the work is done; `False` when the event came first: the work is cancelled then.

    Raises what the work raises.
    """
    task, alarm = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, alarm}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        alarm.cancel()
        task.cancel()
        await asyncio.wait({task})
