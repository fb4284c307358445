"""One cluster a node: how it is reached, trusted, and given what is its own."""

import json
import re
from pathlib import Path

import pytest
from envoy_sets import CA, KEY_NAME, lua_scripts, made, node
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from extproc.config import NodeConfig
from extproc.envoyconfig.clusters import clusters
from extproc.envoyconfig.shapes import ADMIN_CLUSTER, EXTPROC_CLUSTER, NOWHERE_CLUSTER


class TestClusters:
    def test_are_named_as_the_nodes(self, folder: Path) -> None:
        config, run = made(folder, "odd ids")
        assert [each["name"] for each in clusters(config, run)] == [each.id for each in config.nodes]

    def test_of_the_service_are_never_a_nodes(self) -> None:
        for name in (EXTPROC_CLUSTER, ADMIN_CLUSTER, NOWHERE_CLUSTER):
            with pytest.raises(ValidationError):
                NodeConfig(**node(name))

    @pytest.mark.parametrize(
        ("endpoint", "kind", "authority"),
        [
            ("http://10.0.0.1:8000", "STATIC", "10.0.0.1:8000"),
            ("http://10.0.0.1", "STATIC", "10.0.0.1"),
            ("http://[::1]:8000", "STATIC", "[::1]:8000"),
            ("https://[::1]", "STATIC", "[::1]"),
            ("http://engine.test", "STRICT_DNS", "engine.test"),
            ("https://engine.test:443", "STRICT_DNS", "engine.test"),
            ("https://engine.test:80", "STRICT_DNS", "engine.test:80"),
        ],
    )
    def test_reach_the_endpoint_by_address_or_name(
        self, endpoint: str, kind: str, authority: str, folder: Path
    ) -> None:
        (cluster,) = clusters(*made(folder, {"nodes": [node(endpoint=endpoint)]}))
        assert cluster["type"] == kind
        (lb_endpoint,) = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
        assert lb_endpoint["endpoint"]["hostname"] == authority
        assert ("transport_socket" in cluster) is endpoint.startswith("https")

    @pytest.mark.parametrize(
        ("endpoint", "sni", "san"),
        [
            ("https://engine.test", None, ("DNS", "engine.test")),
            ("https://engine.test", "other.test", ("DNS", "other.test")),
            ("https://10.0.0.1", "engine.test", ("DNS", "engine.test")),
            ("https://10.0.0.1", None, ("IP_ADDRESS", "10.0.0.1")),
            ("https://[2001:db8::1]", None, ("IP_ADDRESS", "2001:db8::1")),
        ],
    )
    def test_verify_that_the_certificate_names_the_engine(
        self, endpoint: str, sni: str | None, san: tuple[str, str], folder: Path
    ) -> None:
        tls = {"sni": sni, "ca_file": CA} if sni else {"ca_file": CA}
        (cluster,) = clusters(*made(folder, {"nodes": [node(endpoint=endpoint, tls=tls)]}))
        context = cluster["transport_socket"]["typed_config"]
        validation = context["common_tls_context"]["validation_context"]
        assert validation["trusted_ca"] == {"filename": CA}
        (matcher,) = validation["match_typed_subject_alt_names"]
        assert (matcher["san_type"], matcher["matcher"]) == (san[0], {"exact": san[1]})
        assert context.get("sni") == (san[1] if san[0] == "DNS" else None)

    def test_keep_requests_as_they_are_while_no_node_has_a_key_or_a_base_path(self, folder: Path) -> None:
        assert lua_scripts(clusters(*made(folder, "plain http"))) == []

    def test_all_start_from_the_clients_own_headers_once_a_node_has_a_key(self, folder: Path) -> None:
        """Else the key of the node that failed would go to the next."""
        made_clusters = clusters(*made(folder, "API keys"))
        assert [len(lua_scripts(each)) for each in made_clusters] == [1, 1]
        injected = ["credential_injector" in json.dumps(each) for each in made_clusters]
        assert injected == [True, False]


class TestScripts:
    def test_prepend_the_base_path(self, folder: Path) -> None:
        (script, _) = lua_scripts(clusters(*made(folder, "base paths")))
        assert 'headers:replace(":path", "/engine-a/v2" .. kept:get("inferact.path"))' in script

    @settings(max_examples=300, deadline=None)
    @given(st.text(st.sampled_from('"\\\n\r\0]][=%$/.;()ab~ \N{SNOWMAN}'), max_size=12))
    def test_cannot_be_broken_out_of(self, path: str) -> None:
        try:
            data = {"nodes": [node(endpoint=f"http://10.0.0.1/{path}", api_key_env=KEY_NAME)]}
            config, run = made(Path("run"), data)
        except ValidationError:
            return
        (script,) = lua_scripts(clusters(config, run))
        (plain,) = lua_scripts(clusters(*made(Path("run"), "API key, base path and TLS")))
        literal = f'"{config.nodes[0].base_path}"'
        assert re.fullmatch(r'"[^"\\\n\r\0]*"', literal), "a Lua string that ends where it should"
        assert script == plain.replace('"/base"', literal), "and nothing else differs"
