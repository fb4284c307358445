"""What the handlers of the admin app share: the parts of the service, and how they answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from extproc.config import Config
from extproc.drains import DrainStore
from extproc.reload import Reloader
from extproc.routing.admission import Admission
from extproc.routing.router import Router
from extproc.telemetry import Telemetry


@dataclass(slots=True, kw_only=True)
class AdminContext:
    """The parts of the service that the admin app reads, and the few it may change.

    `config` tells the configuration in force, `reloader` replaces it (`None`: there is no file).
    `ready` says why no request can be routed (`None`: it can). `on_drain_change` carries a drain or a
    restore to Envoy; it is awaited before the answer, one call at a time. `clock` is the router's.
    """

    config: Callable[[], Config]
    router: Router
    admission: Admission
    telemetry: Telemetry
    drains: DrainStore
    admin_key: str | None = field(repr=False)
    ready: Callable[[], str | None]
    on_drain_change: Callable[[], Awaitable[None]]
    reloader: Reloader | None = None
    config_errors: list[str] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    started_s: float = field(init=False)
    started_unix_s: int = field(init=False)
    drain_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.started_s = self.clock()
        self.started_unix_s = int(time.time())


CONTEXT = web.AppKey("context", AdminContext)


def json_answer(value: object) -> web.Response:
    """200 with the value (anything that msgspec encodes)."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
