"""Envoy's start configuration: the listener, the service's clusters, and where the rest is read from."""

from extproc.config import Config
from extproc.envoyconfig.clusters import own_clusters
from extproc.envoyconfig.listener import listener, watched
from extproc.envoyconfig.shapes import Json, tcp
from extproc.rundir import RunDir


def bootstrap(config: Config, run: RunDir) -> Json:
    """The whole bootstrap: it changes with `scheduler.*` only, never with the nodes' comings and goings."""
    return {
        "node": {"id": "inferact", "cluster": "inferact"},
        "admin": {"address": tcp("127.0.0.1", config.scheduler.envoy_admin_port)},
        "dynamic_resources": {"cds_config": watched(str(run.clusters), str(run.xds))},
        "static_resources": {"listeners": [listener(config, run)], "clusters": own_clusters(config, run)},
    }
