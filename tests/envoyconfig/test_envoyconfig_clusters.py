"""One cluster a node: how it is reached, trusted, and given what is its own."""

import json
import re
from pathlib import Path

import pytest
from envoy_sets import CA, KEY_NAME, lua_scripts, made, node
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from extproc import headers
from extproc.config import NodeConfig
from extproc.engines.backends import dialect_for
from extproc.envoyconfig.clusters import clusters
from extproc.envoyconfig.shapes import ADMIN_CLUSTER, EXTPROC_CLUSTER, NOWHERE_CLUSTER


def rewriting(resource: object) -> list[str]:
    """The scripts that change requests."""
    return [script for script in lua_scripts(resource) if "envoy_on_request" in script]


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
        assert rewriting(clusters(*made(folder, "plain http"))) == []

    def test_all_start_from_the_clients_own_headers_once_a_node_has_a_key(self, folder: Path) -> None:
        """Else the key of the node that failed would go to the next."""
        made_clusters = clusters(*made(folder, "API keys"))
        assert [len(rewriting(each)) for each in made_clusters] == [1, 1]
        injected = ["credential_injector" in json.dumps(each) for each in made_clusters]
        assert injected == [True, False]

    def test_read_failing_answers_in_the_words_of_the_nodes_engine(self, folder: Path) -> None:
        backends = ("vllm", "tgi", "sglang", "llamacpp", "custom")
        config, run = made(folder, {"nodes": [node(each, backend=each) for each in backends]})
        for made_node, cluster in zip(config.nodes, clusters(config, run), strict=True):
            (script,) = lua_scripts(cluster)
            for signature in dialect_for(made_node).signatures:
                assert f'failure = "{signature.failure}"' in script
                assert all(f'"{text}"' in script for text in signature.texts)


@pytest.mark.parametrize("backend", ["vllm", "tgi", "sglang", "llamacpp", "custom"])
def test_the_words_of_engines_fit_in_a_script_and_in_bodies_in_lower_case(backend: str) -> None:
    for signature in dialect_for(NodeConfig(**node(backend=backend))).signatures:
        assert set(signature.statuses) <= set(headers.RETRIED_STATUS), "else no answer is read for it"
        for text in signature.texts:
            assert not set(text) & set('"\\\n'), "a Lua string that ends where it should"
            assert text == text.lower()


class TestScripts:
    def test_prepend_the_base_path(self, folder: Path) -> None:
        (script, _) = rewriting(clusters(*made(folder, "base paths")))
        assert 'headers:replace(":path", "/engine-a/v2" .. kept:get("inferact.path"))' in script

    @settings(max_examples=300, deadline=None)
    @given(st.text(st.sampled_from('"\\\n\r\0]][=%$/.;()ab~ \N{SNOWMAN}'), max_size=12))
    def test_cannot_be_broken_out_of(self, path: str) -> None:
        try:
            data = {"nodes": [node(endpoint=f"http://10.0.0.1/{path}", api_key_env=KEY_NAME)]}
            config, run = made(Path("run"), data)
        except ValidationError:
            return
        (script,) = rewriting(clusters(config, run))
        (plain,) = rewriting(clusters(*made(Path("run"), "API key, base path and TLS")))
        literal = f'"{config.nodes[0].base_path}"'
        assert re.fullmatch(r'"[^"\\\n\r\0]*"', literal), "a Lua string that ends where it should"
        assert script == plain.replace('"/base"', literal), "and nothing else differs"
