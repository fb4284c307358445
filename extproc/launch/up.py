"""Running in the foreground: the service alone (`serve`), or with Envoy in front of it (`up`)."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from extproc.config import Config, HostPort
from extproc.launch.demo import DemoFleet
from extproc.launch.envoyprocess import EnvoyProcess
from extproc.launch.stopping import StopSignals, done_before, ends_with_terminal
from extproc.routing.node import Node
from extproc.service import Service

logger = logging.getLogger(__name__)

_FIRST_PROBES_S = 3.0
"""How long the first look at the nodes may take: a probe begins within 1 s, and gives up after 2."""


async def serve(config: Config, path: Path, admin_key: str | None) -> int:
    """Run the service, on a configuration that was loaded from `path`, until a signal; the exit code.

    Raises what `Service.start` raises.
    """
    service = Service(config, admin_key, path)
    async with contextlib.AsyncExitStack() as at_end:
        signals = at_end.enter_context(StopSignals(service.reload))
        at_end.push_async_callback(service.stop, 0)
        if await done_before(signals.asked, service.start()):
            scheduler = config.scheduler
            logger.info(
                "ready: Envoy is expected at %s; the admin app is at http://%s, admin calls are %s",
                scheduler.extproc_address,
                HostPort(scheduler.admin_host, scheduler.admin_port),
                "on" if admin_key else "off: no INFERACT_ADMIN_KEY is set",
            )
            await signals.asked.wait()
            await done_before(signals.urgent, service.stop())
    return signals.exit_code


async def up(
    config: Config,
    path: Path,
    admin_key: str | None,
    ready: Callable[[Collection[Node]], None],
    demo: DemoFleet | None = None,
) -> int:
    """Run the service, then Envoy, until a signal, or the end of the terminal; the exit code.

    `ready` is called with the nodes once requests can be sent. Raises `EnvoyError`, also when Envoy ends by
    itself, and what `Service.start` raises.
    """
    service, envoy = Service(config, admin_key, path), EnvoyProcess(config)
    async with contextlib.AsyncExitStack() as at_end:  # from the last to the first
        on_hangup = None if ends_with_terminal() else service.reload
        signals = at_end.enter_context(StopSignals(on_hangup))
        if demo is not None:
            at_end.push_async_callback(demo.stop)
        at_end.push_async_callback(service.stop, 0)
        at_end.push_async_callback(envoy.stop)
        if await done_before(signals.asked, _start(service, envoy, demo)):
            ready(service.router.nodes.values())
            await done_before(signals.asked, envoy.watch())
            await done_before(
                signals.urgent, _drain(envoy, service.config.scheduler.request_timeout_ms / 1000)
            )
    return signals.exit_code


async def _start(service: Service, envoy: EnvoyProcess, demo: DemoFleet | None) -> None:
    if demo is not None:
        await demo.start()
    await service.start()
    await envoy.start()
    await service.fleet.first_probes(_FIRST_PROBES_S)


async def _drain(envoy: EnvoyProcess, limit_s: float) -> None:
    try:
        async with asyncio.timeout(limit_s):
            await envoy.drain()
    except TimeoutError:
        logger.warning("some requests were still running after %g s; they are cut", limit_s)
