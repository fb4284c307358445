"""Envoy's start configuration: the listener, the service's clusters, and where the rest is read from."""

from extproc.config import Config
from extproc.envoyconfig.clusters import own_clusters
from extproc.envoyconfig.listener import listener, watched
from extproc.envoyconfig.shapes import Json, tcp, typed
from extproc.rundir import RunDir

MAX_CONNECTIONS = 50_000
"""Clients' connections at a time."""


def bootstrap(config: Config, run: RunDir) -> Json:
    """The whole bootstrap: it changes with `scheduler.*` only, never with the nodes' comings and goings."""
    return {
        "node": {"id": "inferact", "cluster": "inferact"},
        "admin": {"address": tcp("127.0.0.1", config.scheduler.envoy_admin_port)},
        "dynamic_resources": {"cds_config": watched(str(run.clusters), str(run.xds))},
        "static_resources": {"listeners": [listener(config, run)], "clusters": own_clusters(config, run)},
        "overload_manager": {"resource_monitors": [_connections()]},
    }


def _connections() -> Json:
    """More connections than this are refused. Memory has no limit here: it depends on the machine."""
    return typed(
        "envoy.resource_monitors.global_downstream_max_connections",
        "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        max_active_downstream_connections=MAX_CONNECTIONS,
    )
