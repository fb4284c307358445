"""Writing the configuration where Envoy watches for it."""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import yaml
from xxhash import xxh3_64_hexdigest

from extproc.config import Config
from extproc.envoyconfig.bootstrap import bootstrap
from extproc.envoyconfig.clusters import clusters, secret
from extproc.envoyconfig.routes import route_configuration
from extproc.envoyconfig.shapes import Json, typed_config
from extproc.rundir import RunDir

_BOOTSTRAP_HEAD = """\
# Envoy in front of Inferact, written by `inferact envoy-config`. What may be changed: see envoy/README.md.
"""
_PRIVATE = 0o600
_SHARED = 0o644


def write_all(config: Config, run: RunDir, drained: frozenset[str] = frozenset()) -> None:
    """Write everything that Envoy reads, and remove the keys that no node has any more. Raises `OSError`."""
    run.xds.mkdir(parents=True, exist_ok=True)
    write_secrets(config, run)
    _write_keyless(config, run, run, drained)
    remove_secrets(config, run)


def write_copy(config: Config, run: RunDir, out: RunDir) -> None:
    """Write bootstrap, CDS and RDS, which name the paths of `run`, elsewhere; no keys. Raises `OSError`."""
    out.xds.mkdir(parents=True, exist_ok=True)
    _write_keyless(config, run, out, frozenset())


def write_routes(config: Config, run: RunDir, drained: frozenset[str]) -> str:
    """Write RDS; the version of what was written. Raises `OSError`."""
    routes = route_configuration(config, drained)
    return _write_resources(run.routes, "envoy.config.route.v3.RouteConfiguration", [routes])


def write_bootstrap(config: Config, run: RunDir, out: RunDir) -> None:
    """Write what Envoy starts with. Raises `OSError`."""
    text = _BOOTSTRAP_HEAD + yaml.safe_dump(bootstrap(config, run), sort_keys=False, width=120)
    _replace(out.bootstrap, text)


def write_clusters(config: Config, run: RunDir, out: RunDir) -> str:
    """Write CDS; the version of what was written. Raises `OSError`."""
    return _write_resources(out.clusters, "envoy.config.cluster.v3.Cluster", clusters(config, run))


def write_secrets(config: Config, run: RunDir) -> None:
    """Write the keys of the nodes that have one. Raises `OSError`."""
    for node in config.nodes:
        if node.api_key_env:
            _replace(run.secret(node.id), json.dumps(secret(node, node.api_key(os.environ))), _PRIVATE)


def remove_secrets(config: Config, run: RunDir) -> None:
    """Remove the keys that no node has any more; last of all: until then clusters name them."""
    keep = {run.secret(node.id) for node in config.nodes if node.api_key_env}
    for path in run.xds.glob(run.secret("*").name):
        if path not in keep:
            path.unlink(missing_ok=True)


def _write_keyless(config: Config, run: RunDir, out: RunDir, drained: frozenset[str]) -> None:
    """Routes last, so that they never name an unknown cluster."""
    write_bootstrap(config, run, out)
    write_clusters(config, run, out)
    write_routes(config, out, drained)


def _write_resources(path: Path, message: str, resources: Iterable[Json]) -> str:
    """The version is a hash: the same resources have the same one, whoever wrote them."""
    body = [typed_config(message, **resource) for resource in resources]
    version = xxh3_64_hexdigest(json.dumps(body).encode())
    _replace(path, json.dumps({"version_info": version, "resources": body}, indent=1))
    return version


def _replace(path: Path, text: str, mode: int = _SHARED) -> None:
    """Write through a rename: Envoy sees the old file or the new one, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
