"""The start configuration: what clients cannot forge, what the service sees and may do."""

import re
from pathlib import Path

from envoy_sets import lua_scripts, made, manager_of, objects

from extproc import headers
from extproc.envoyconfig.bootstrap import bootstrap
from extproc.envoyconfig.files import write_all
from extproc.envoyconfig.listener import HOLD_LIMIT, MESSAGE_TIMEOUT
from extproc.envoyconfig.shapes import Json
from extproc.openai.cut import HINTS_MEMBER, MEMBERS
from extproc.replies import HOLD_MARGIN_S, LONGEST_HOLD_S
from extproc.simulator.replay.formats import LOG_MEMBERS


class TestTheBootstrap:
    def test_does_not_change_with_the_nodes(self, folder: Path) -> None:
        first, second = (made(folder, name) for name in ("plain http", "API key, base path and TLS"))
        assert bootstrap(*first) == bootstrap(*second)

    def test_strips_every_header_that_a_client_could_forge(self, folder: Path) -> None:
        (early,) = manager_of(bootstrap(*made(folder, "plain http")))["early_header_mutation_extensions"]
        mutations = early["typed_config"]["mutations"]
        assert {each["remove"] for each in mutations if "remove" in each} == set(headers.FORGEABLE)
        prefix = {"prefix": "x-envoy-", "ignore_case": True}
        assert {"remove_on_match": {"key_matcher": prefix}} in mutations

    def test_strips_every_header_that_chooses_a_node_or_joins_log_entries(self) -> None:
        assert {headers.CLUSTER, headers.RETRY_1, headers.RETRY_2, headers.EXCHANGE} <= set(headers.FORGEABLE)

    def test_lets_the_service_set_what_clients_may_not(self, folder: Path) -> None:
        ext_proc = filter_of(bootstrap(*made(folder, "plain http")), "ext_proc")
        assert ext_proc["mutation_rules"] == {"allow_envoy": True}
        assert ext_proc["failure_mode_allow"] is True
        namespaces = [headers.METADATA_NAMESPACE, headers.DECISION_NAMESPACE]
        assert ext_proc["metadata_options"]["receiving_namespaces"]["untyped"] == namespaces

    def test_shows_no_credentials_to_the_service(self, folder: Path) -> None:
        ext_proc = filter_of(bootstrap(*made(folder, "plain http")), "ext_proc")
        shown = {each["exact"] for each in ext_proc["forward_rules"]["allowed_headers"]["patterns"]}
        assert shown == {":method", ":path", "content-type", "content-encoding", "x-request-id"}

    def test_lets_a_request_be_held_for_as_long_as_the_service_asks(self) -> None:
        assert float(HOLD_LIMIT.removesuffix("s")) == LONGEST_HOLD_S + HOLD_MARGIN_S
        assert float(MESSAGE_TIMEOUT.removesuffix("s")) <= HOLD_MARGIN_S

    def test_watches_the_files_that_are_written(self, folder: Path) -> None:
        config, run = made(folder, "plain http")
        write_all(config, run)
        sources = [each for each in objects(bootstrap(config, run)) if "watched_directory" in each]
        assert {each["path"] for each in sources} == {str(run.clusters), str(run.routes)}
        for each in sources:
            assert Path(each["path"]).exists()
            assert each["watched_directory"] == {"path": str(Path(each["path"]).parent)}

    def test_logs_the_id_that_joins_entries_for_attempts_and_requests(self, folder: Path) -> None:
        start = bootstrap(*made(folder, "plain http"))
        logs = [each for each in objects(start) if "additional_request_headers_to_log" in each]
        assert [each["additional_request_headers_to_log"] for each in logs] == [[headers.EXCHANGE]] * 2

    def test_logs_all_that_a_replay_reads(self, folder: Path) -> None:
        logs = manager_of(bootstrap(*made(folder, "plain http")))["access_log"]
        (written,) = [
            log["typed_config"]["log_format"] for log in logs if "log_format" in log["typed_config"]
        ]
        assert {"time", "request_id", "node", *LOG_MEMBERS} <= written["json_format"].keys()

    def test_knows_the_members_that_nobody_cuts_out_while_the_service_is_away(self, folder: Path) -> None:
        (script, _) = lua_scripts(bootstrap(*made(folder, "plain http")))
        quoted = re.search(r"local names = \{(.*)\}", script)
        assert quoted is not None
        assert quoted[1].split(", ") == [f"'\"{name}\"'" for name in MEMBERS if name != HINTS_MEMBER]


def filter_of(start: Json, name: str) -> Json:
    """The configuration of an HTTP filter in a bootstrap."""
    filters = manager_of(start)["http_filters"]
    (config,) = [each["typed_config"] for each in filters if each["name"] == f"envoy.filters.http.{name}"]
    return dict(config)
