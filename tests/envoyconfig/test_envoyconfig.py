"""What Envoy is given to read: every resource is one it knows, and it takes every set of them."""

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from envoy_sets import SETS, folded, made, manager_of, node, objects, resources, written

from extproc.envoyconfig.clusters import clusters
from extproc.envoyconfig.shapes import Json
from extproc.launch.envoyprocess import envoy_binary


def known(resource: Json) -> Any:
    """The resource as Envoy's protobuf message; fails on unknown fields and enums, in nested types too."""
    for each in objects(resource):
        if "@type" in each:
            package, _, _ = each["@type"].removeprefix("type.googleapis.com/").rpartition(".")
            importlib.import_module(f"envoy_data_plane.{package}")  # which registers its messages
    any_message = importlib.import_module("envoy_data_plane.google.protobuf").Any
    return any_message.from_dict(resource).unpack()


# Of the message classes themselves, as they are imported.
@pytest.mark.filterwarnings("ignore::pydantic.PydanticDeprecatedSince212")
class TestEveryResource:
    @pytest.mark.parametrize("name", SETS)
    def test_is_made_of_fields_that_envoy_knows(self, name: str, folder: Path) -> None:
        run = written(folder, name)
        message = "type.googleapis.com/envoy.config.bootstrap.v3.Bootstrap"
        known({"@type": message, **yaml.safe_load(run.bootstrap.read_text())})
        for each in [*resources(run.clusters), *resources(run.routes)]:
            known(each)
        for path in run.xds.glob("secret-*"):
            for each in resources(path):
                known(each)

    def test_would_be_found_out_for_a_single_wrong_field(self, folder: Path) -> None:
        """The check itself: it looks into every nested type."""
        config, run = made(folder, "API key, base path and TLS")
        message = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
        (cluster,) = clusters(config, run)
        known({"@type": message, **cluster})
        (options,) = cluster["typed_extension_protocol_options"].values()
        places = list(objects(options))
        assert len(places) > 5
        for place in places:
            place["no_such_field"] = 1
            with pytest.raises(KeyError, match="no_such_field"):
                known({"@type": message, **cluster})
            del place["no_such_field"]


def assert_taken(path: Path) -> None:
    """Envoy finds nothing wrong in the file."""
    command = [envoy_binary(), "--mode", "validate", "-c", str(path), "--log-level", "warning"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "deprecated" not in done.stderr.lower(), done.stderr[-2000:]


@pytest.mark.envoy
class TestEnvoy:
    @pytest.mark.parametrize("name", SETS)
    def test_takes_every_set(self, name: str, folder: Path) -> None:
        run = written(folder, name)
        assert_taken(run.bootstrap)
        whole = folder / "whole.json"
        whole.write_text(json.dumps(folded(run)))
        assert_taken(whole)

    @pytest.mark.parametrize("drained", [{"a"}, {"a", "b"}])
    def test_takes_routes_without_the_drained(self, drained: set[str], folder: Path) -> None:
        run = written(folder, {"nodes": [node("a"), node("b")]}, frozenset(drained))
        whole = folder / "whole.json"
        whole.write_text(json.dumps(folded(run)))
        assert_taken(whole)

    @pytest.mark.parametrize("name", ["with space", "ünï-\N{GRINNING FACE}", "it's \"#: {}", "back\\slash"])
    def test_takes_a_run_directory_of_any_name(self, name: str, folder: Path) -> None:
        odd = folder / name
        odd.mkdir()
        assert_taken(written(odd, "API keys").bootstrap)

    @pytest.mark.parametrize(
        "mistake",
        [
            lambda static: static["static_resources"]["clusters"][-1].update(connect_timeout="-1s"),
            lambda static: routes_of(static)[0]["route"].update(cluster="no-such-cluster"),
            lambda static: routes_of(static)[0]["match"].update(path="no-slash", safe_regex={"regex": "("}),
        ],
    )
    def test_would_refuse_a_mistake(self, mistake: Callable[[Json], None], folder: Path) -> None:
        """The check itself: clusters and routes are really read."""
        static = folded(written(folder, "plain http"))
        mistake(static)
        whole = folder / "whole.json"
        whole.write_text(json.dumps(static))
        with pytest.raises(AssertionError):
            assert_taken(whole)


def routes_of(static: Json) -> list[Json]:
    """The routes in a bootstrap that holds them."""
    (host,) = manager_of(static)["route_config"]["virtual_hosts"]
    routes: list[Json] = host["routes"]
    return routes
