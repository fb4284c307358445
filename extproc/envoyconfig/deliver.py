"""Nodes that come and go while Envoy runs: what it must know, and in which order."""

import asyncio

from extproc.config import Config
from extproc.envoyconfig.files import (
    remove_secrets,
    write_bootstrap,
    write_clusters,
    write_routes,
    write_secrets,
)
from extproc.envoyconfig.told import await_clusters, await_routes
from extproc.rundir import RunDir


async def grow(config: Config, run: RunDir, drained: frozenset[str]) -> None:
    """Have Envoy know all nodes of the configuration, before requests are sent to them.

    Returns once it does, or where none answers. Raises `OSError`, also where Envoy does not take it.
    """
    await asyncio.to_thread(write_secrets, config, run)
    await asyncio.to_thread(write_bootstrap, config, run, run)
    await _deliver_clusters(config, run)
    await deliver_routes(config, run, drained)


async def shrink(config: Config, run: RunDir, drained: frozenset[str]) -> None:
    """Have Envoy forget all other nodes, after the last request to them. Raises as `grow`."""
    await deliver_routes(config, run, drained)
    await _deliver_clusters(config, run)
    await asyncio.to_thread(remove_secrets, config, run)


async def deliver_routes(config: Config, run: RunDir, drained: frozenset[str]) -> None:
    """Have Envoy take the routes. Raises as `grow`."""
    version = await asyncio.to_thread(write_routes, config, run, drained)
    await await_routes(config.scheduler.envoy_admin_port, version)


async def _deliver_clusters(config: Config, run: RunDir) -> None:
    version = await asyncio.to_thread(write_clusters, config, run, run)
    await await_clusters(config.scheduler.envoy_admin_port, version)
