"""Listening: the admin app on a TCP port for people, and on a Unix socket for Envoy."""

import asyncio
import logging
import os
import socket
from pathlib import Path

from aiohttp import web
from aiohttp.http import HttpProcessingError

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 5.0
_SOCKET_MODE = 0o660


class ListenError(OSError):
    """The admin app cannot listen; one line with the address, the reason, and what to do."""


class _Discreet(logging.Filter):
    """Keeps the bytes of a malformed request out of the log: they may hold the admin key."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
            record.exc_info = None
            record.msg, record.args = "a malformed request was refused", ()
        return True


logger.addFilter(_Discreet())


async def start_admin(app: web.Application, host: str, port: int, unix_path: Path) -> web.AppRunner:
    """Serve the app until the runner's `cleanup`. Port 0 takes a free one. Raises `ListenError`."""
    runner = web.AppRunner(app, access_log=None, logger=logger, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        await _listen_tcp(runner, host, port)
        await web.SockSite(runner, await asyncio.to_thread(_bound, unix_path)).start()
    except BaseException:
        await runner.cleanup()
        raise
    return runner


async def _listen_tcp(runner: web.AppRunner, host: str, port: int) -> None:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        remedy = "stop what has the port, or change scheduler.admin_host or scheduler.admin_port"
        raise _refused(f"{host}:{port}", error, remedy) from error


def _bound(path: Path) -> socket.socket:
    """A socket at the path that nobody can reach before it listens, and then only user and group."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        listener.bind(str(path))
        path.chmod(_SOCKET_MODE)
    except OSError as error:
        listener.close()
        raise _refused(str(path), error, "stop what has the socket, or change scheduler.run_dir") from error
    return listener


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that is gone; one that answers stays, and so does any other file."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def _refused(address: str, error: OSError, remedy: str) -> ListenError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return ListenError(f"The admin app cannot listen on {address}: {reason}; {remedy}.")
