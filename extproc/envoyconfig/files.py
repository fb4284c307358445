"""Writing the configuration where Envoy watches for it."""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import yaml

from extproc.config import Config
from extproc.envoyconfig.bootstrap import bootstrap
from extproc.envoyconfig.clusters import clusters, secret
from extproc.envoyconfig.routes import route_configuration
from extproc.envoyconfig.shapes import Json, typed_config
from extproc.rundir import RunDir

_BOOTSTRAP_HEAD = """\
# Envoy in front of Inferact. Written by `inferact envoy-config`; what may be changed, and how, is in envoy/README.md.
"""
_PRIVATE = 0o600
_SHARED = 0o644


def write_bootstrap(config: Config, run: RunDir) -> None:
    """Write Envoy's start configuration. Raises `OSError`."""
    text = _BOOTSTRAP_HEAD + yaml.safe_dump(bootstrap(config, run), sort_keys=False, width=120)
    _replace(run.bootstrap, text)


def write_clusters(config: Config, run: RunDir) -> None:
    """Write the secrets and CDS. Raises `OSError`."""
    for node in config.nodes:
        if node.api_key_env:
            _replace(run.secret(node.id), json.dumps(secret(node, node.api_key(os.environ))), _PRIVATE)
    _write_resources(run.clusters, "envoy.config.cluster.v3.Cluster", clusters(config, run))


def write_routes(config: Config, run: RunDir, drained: frozenset[str]) -> None:
    """Write RDS. Raises `OSError`."""
    routes = route_configuration(config, drained)
    _write_resources(run.routes, "envoy.config.route.v3.RouteConfiguration", [routes])


def write_all(config: Config, run: RunDir, drained: frozenset[str] = frozenset()) -> None:
    """Write everything that Envoy reads; routes last, so that they never name an unknown cluster."""
    run.xds.mkdir(parents=True, exist_ok=True)
    write_bootstrap(config, run)
    write_clusters(config, run)
    write_routes(config, run, drained)


def _write_resources(path: Path, message: str, resources: Iterable[Json]) -> None:
    body = {"resources": [typed_config(message, **resource) for resource in resources]}
    _replace(path, json.dumps(body, indent=1))


def _replace(path: Path, text: str, mode: int = _SHARED) -> None:
    """Write through a rename: Envoy sees the old file or the new one, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
