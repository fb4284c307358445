"""What a service must have for itself: its run directory and its ports. Checked before anything starts."""

import contextlib
import errno
import fcntl
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from extproc.config import Config, HostPort
from extproc.config.models import ENVOY_ADMIN_HOST

_REASONS = {
    errno.EADDRINUSE: "is taken by another program",
    errno.EACCES: "is not for this user, as no port under 1024 is",
    errno.EADDRNOTAVAIL: "is no address of this machine",
}

_HOSTS = {"port": "host", "admin_port": "admin_host"}
"""Keys of listeners, with those of their addresses where these have one of their own."""


class ClaimError(Exception):
    """It cannot be had; the message says what to do."""


@contextlib.contextmanager
def run_dir_claimed(path: Path, another: str) -> Iterator[None]:
    """Hold the run directory: a second service there would take the sockets of the first.

    `another` says how to choose one. Raises `ClaimError`. The claim ends with the process, however that ends.
    """
    with contextlib.ExitStack() as held:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((path / "lock").open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClaimError(f"another inferact runs in {path}: stop it first, or {another}") from None
        except OSError as error:
            raise ClaimError(
                f"the run directory {path} cannot be used: {error.strerror}; {another}"
            ) from error
        yield


def check_ports(config: Config, remedy: Callable[[str], str], with_envoy: bool) -> None:
    """Whether every TCP address of the service (and of its Envoy) is free. Raises `ClaimError`.

    `remedy` says how to move a listener, given its key in `scheduler`.
    """
    for key, address in _addresses(config, with_envoy).items():
        try:
            _try_to_bind(address)
        except OSError as error:
            reason = _REASONS.get(error.errno or 0, f"cannot be listened on ({error.strerror})")
            if error.errno == errno.EADDRNOTAVAIL:
                key = _HOSTS.get(key, key)
            raise ClaimError(f"{address} {reason}: {remedy(key)}") from error


def _addresses(config: Config, with_envoy: bool) -> dict[str, HostPort]:
    scheduler = config.scheduler
    envoy = {
        "port": HostPort(scheduler.host, scheduler.port),
        "envoy_admin_port": HostPort(ENVOY_ADMIN_HOST, scheduler.envoy_admin_port),
    }
    service = {"admin_port": HostPort(scheduler.admin_host, scheduler.admin_port)}
    if isinstance(scheduler.extproc_listen, HostPort):
        service["extproc_listen"] = scheduler.extproc_listen
    return envoy | service if with_envoy else service


def _try_to_bind(address: HostPort) -> None:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a former run may linger
        probe.bind(address)
