"""The route table: where the service decides, and where Envoy goes on without it."""

from pathlib import Path

import pytest
from envoy_sets import SETS, made, node, objects

from extproc import headers
from extproc.config import Config
from extproc.envoyconfig.routes import route_configuration
from extproc.envoyconfig.shapes import ADMIN_CLUSTER, NOWHERE_CLUSTER, Json


def names_of_clusters(value: object) -> set[str]:
    """Every cluster that a resource sends something to."""
    return {each["cluster"] for each in objects(value) if "cluster" in each}


def fail_open(config: Config, drained: frozenset[str] = frozenset()) -> list[Json]:
    """The fail-open routes."""
    (host,) = route_configuration(config, drained)["virtual_hosts"]
    return [route for route in host["routes"] if route["name"] == "fail-open"]


def routed(config: Config, drained: frozenset[str] = frozenset()) -> Json:
    """The route of requests that the service decided."""
    (host,) = route_configuration(config, drained)["virtual_hosts"]
    (route,) = [route for route in host["routes"] if route["name"] == "routed"]
    return dict(route)


def attempts(route: Json) -> list[str]:
    """The nodes of a fail-open route: the first, and one for each retry."""
    plugin = route["route"]["inline_cluster_specifier_plugin"]["extension"]["typed_config"]
    matcher = plugin["cluster_matcher"]
    retries = matcher["matcher_tree"]["exact_match_map"]["map"]
    actions = [matcher["on_no_match"], *(retries[number] for number in sorted(retries))]
    return [action["action"]["typed_config"]["cluster"] for action in actions]


class TestRoutes:
    @pytest.mark.parametrize("name", SETS)
    def test_name_only_clusters_there_are(self, name: str, folder: Path) -> None:
        config, _ = made(folder, name)
        own = {ADMIN_CLUSTER, NOWHERE_CLUSTER}
        assert names_of_clusters(route_configuration(config)) <= own | {each.id for each in config.nodes}

    def test_know_drained_nodes_where_the_service_decides_and_nowhere_else(self, folder: Path) -> None:
        config, _ = made(folder, {"nodes": [node("a"), node("b"), node("c")]})
        drained = frozenset({"b"})
        assert names_of_clusters(routed(config, drained)) == {"a", "b", "c"}
        assert names_of_clusters(fail_open(config, drained)) == {"a", "c"}

    def test_answer_for_a_model_whose_nodes_are_all_drained(self, folder: Path) -> None:
        config, _ = made(folder, {"nodes": [node("a"), node("b", models=["k"])]})
        (host,) = route_configuration(config, frozenset({"a"}))["virtual_hosts"]
        answers = [
            route["direct_response"]["status"]
            for route in host["routes"]
            if {"exact": "m"} in [each.get("string_match") for each in objects(route["match"])]
        ]
        assert answers == [503]

    def test_match_each_node_of_each_header_to_itself(self, folder: Path) -> None:
        config, _ = made(folder, {"nodes": [node("a"), node("b")]})
        maps = [
            each
            for each in objects(routed(config))
            if "exact_match_map" in each and each["input"]["name"] in headers.FORGEABLE
        ]
        assert {each["input"]["name"] for each in maps} == {
            headers.CLUSTER,
            headers.RETRY_1,
            headers.RETRY_2,
        }
        for each in maps:
            chosen = each["exact_match_map"]["map"]
            assert {name: names_of_clusters(action) for name, action in chosen.items()} == {
                "a": {"a"},
                "b": {"b"},
            }

    def test_keep_the_admin_key_from_every_engine(self, folder: Path) -> None:
        config, _ = made(folder, "several nodes with weights")
        for route in [routed(config), *fail_open(config)]:
            assert headers.ADMIN_KEY in route["request_headers_to_remove"]

    @pytest.mark.parametrize(
        ("timeout_ms", "idle"), [(30_000, 30.0), (12_345_678, 12345.678), (1, 0.001), (86_399_999, 86399.999)]
    )
    def test_cut_an_answer_that_is_silent_for_the_request_timeout(
        self, timeout_ms: int, idle: float, folder: Path
    ) -> None:
        config, _ = made(folder, {"scheduler": {"request_timeout_ms": timeout_ms}, "nodes": [node()]})
        action = routed(config)["route"]
        assert float(action["idle_timeout"].removesuffix("s")) == idle
        assert action["timeout"] == "0s", "no answer is cut for its length"

    def test_limit_the_body_as_configured(self, folder: Path) -> None:
        config, _ = made(folder, {"scheduler": {"max_body_bytes": 123_456}, "nodes": [node()]})
        (host,) = route_configuration(config)["virtual_hosts"]
        assert host["request_body_buffer_limit"] == 123_456


class TestFailOpen:
    def test_starts_at_each_node_and_goes_on_to_the_two_that_follow(self, folder: Path) -> None:
        config, _ = made(folder, {"nodes": [node(name) for name in "abcd"]})
        assert [attempts(route) for route in fail_open(config)] == [
            ["a", "b", "c"],
            ["b", "c", "d"],
            ["c", "d", "a"],
            ["d", "a", "b"],
        ]

    def test_spreads_by_weight(self, folder: Path) -> None:
        config, _ = made(
            folder, {"nodes": [node("a", weight=0.2), node("b", weight=0.6), node("c", weight=0.2)]}
        )
        fractions = [route["match"].get("runtime_fraction") for route in fail_open(config)]
        reached = [each["default_value"]["numerator"] / 1e6 for each in fractions if each]
        assert reached == [0.2, 0.8], "Envoy draws once a request, so the shares add up"
        assert fractions[-1] is None, "and the last takes the rest"

    def test_leaves_out_weights_of_0_unless_there_are_no_others(self, folder: Path) -> None:
        mixed, _ = made(folder, {"nodes": [node("a"), node("spare", weight=0.0)]})
        assert names_of_clusters(fail_open(mixed)) == {"a"}
        spares, _ = made(folder, "weights of 0 only")
        assert names_of_clusters(fail_open(spares)) == {"a", "b"}
        assert names_of_clusters(fail_open(mixed, frozenset({"a"}))) == {"spare"}

    def test_sends_a_model_to_its_own_nodes_only(self, folder: Path) -> None:
        config, _ = made(folder, {"nodes": [node("a", models=["m"]), node("b", models=["k", "m"])]})
        for route in fail_open(config):
            (model,) = [
                each["string_match"]["exact"]
                for each in objects(route["match"]["dynamic_metadata"])
                if "string_match" in each
            ]
            assert set(attempts(route)) <= {each.id for each in config.nodes if model in each.serves}

    def test_leaves_out_nodes_that_would_need_another_name_in_the_body(self, folder: Path) -> None:
        config, _ = made(folder, "aliases")
        by_model: dict[str, set[str]] = {}
        for route in fail_open(config):
            (model,) = [
                each["string_match"]["exact"]
                for each in objects(route["match"]["dynamic_metadata"])
                if "string_match" in each
            ]
            by_model.setdefault(model, set()).update(attempts(route))
        assert by_model == {"gpt": {"b"}, "m": {"a", "b"}}
