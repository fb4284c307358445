"""`inferact serve` as a process, and the commands that talk to it."""

import json
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_support import (
    KEY,
    LIMIT_S,
    LOG_LINE,
    Running,
    inferact,
    inferact_process,
    running,
    url_of,
    write_config,
)

pytestmark = pytest.mark.xdist_group("inferact serve")  # one service for the module

READY = "ready: "


@dataclass(frozen=True)
class Served:
    """A service that runs, and where."""

    command: Running
    config: Path
    url: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One service for all tests that leave it as it was."""
    folder = tmp_path_factory.mktemp("serve")
    config = write_config(folder)
    with running("serve", "-c", config, folder=folder, INFERACT_ADMIN_KEY=KEY) as command:
        command.wait_for(READY)
        yield Served(command, config, url_of(config))


# status


def test_status_is_a_table_of_nodes(served: Served) -> None:
    status = inferact("status", "--url", served.url)
    assert status.code == 0
    assert all(text in status.out for text in ("node-0", "node-1", "a100-80g", "a-model"))


def test_status_is_json_for_programs(served: Served) -> None:
    status = json.loads(inferact("status", "--url", served.url, "--json").out)
    assert [node["id"] for node in status["nodes"]] == ["node-0", "node-1"]


def test_the_url_may_come_from_the_environment(served: Served) -> None:
    assert inferact("status", INFERACT_URL=f"{served.url}/").code == 0


def test_watching_goes_on_until_ctrl_c(served: Served, tmp_path: Path) -> None:
    with running("status", "--watch", "--json", "--url", served.url, folder=tmp_path) as watch:
        deadline_s = time.monotonic() + LIMIT_S
        while watch.out.count("\n") < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        watch.signal(signal.SIGINT)
        assert watch.wait() == 0
    assert all(json.loads(line)["nodes"] for line in watch.out.splitlines())
    assert "Traceback" not in watch.err


# drain and restore


def test_a_node_is_drained_and_restored(served: Served) -> None:
    drained = inferact("drain", "node-0", "--wait", "--url", served.url, INFERACT_ADMIN_KEY=KEY)
    assert (drained.code, drained.out) == (0, "node-0 is drained; 0 requests running\n")
    assert "drained" in inferact("status", "--url", served.url).out
    restored = inferact("restore", "node-0", "--url", served.url, "--json", INFERACT_ADMIN_KEY=KEY)
    assert json.loads(restored.out)["drained"] is False


def test_the_key_may_be_in_a_file(served: Served, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    env = {"INFERACT_ADMIN_KEY_FILE": str(tmp_path / "key")}
    assert inferact("restore", "node-0", "--url", served.url, **env).code == 0


@pytest.mark.parametrize("command", ["drain", "restore"])
@pytest.mark.parametrize(
    ("node", "env", "telling"),
    [
        ("node-0", {}, "set INFERACT_ADMIN_KEY"),
        ("node-0", {"INFERACT_ADMIN_KEY": "wrong"}, "check INFERACT_ADMIN_KEY"),
        ("node-9", {"INFERACT_ADMIN_KEY": KEY}, "node-0, node-1"),
        ("../x?y=1", {"INFERACT_ADMIN_KEY": KEY}, "node-0, node-1"),
        ("node-0", {"INFERACT_ADMIN_KEY": "clé"}, "ASCII"),
    ],
    ids=["no key", "wrong key", "unknown node", "odd node", "unsendable key"],
)
def test_a_refusal_is_one_line_that_says_what_to_do(
    served: Served, command: str, node: str, env: dict[str, str], telling: str
) -> None:
    complaint = inferact(command, node, "--url", served.url, **env).complaint
    assert telling in complaint
    assert not any(value in complaint for value in env.values())


def test_without_an_admin_key_the_service_says_how_to_get_one(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with running("serve", "-c", config, folder=tmp_path) as command:
        command.wait_for(READY)
        outcome = inferact("drain", "node-0", "--url", url_of(config), INFERACT_ADMIN_KEY=KEY)
    assert outcome.complaint.count("start the service with INFERACT_ADMIN_KEY") == 1
    assert "admin calls are off" in command.err


def test_a_drain_survives_a_restart(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    for expected in (False, True):
        with running("serve", "-c", config, folder=tmp_path, INFERACT_ADMIN_KEY=KEY) as command:
            command.wait_for(READY)
            status = json.loads(inferact("status", "--json", "--url", url_of(config)).out)
            assert status["nodes"][1]["drained"] is expected
            drained = inferact("drain", "node-1", "--url", url_of(config), INFERACT_ADMIN_KEY=KEY)
            assert drained.code == 0
            command.signal(signal.SIGTERM)
            command.wait()


# the life of a service


def test_it_says_where_its_admin_app_is_and_that_admin_calls_are_on(served: Served) -> None:
    assert f"the admin app is at {served.url}, admin calls are on" in served.command.err


def test_its_debug_log_is_about_requests_and_nodes_alone(tmp_path: Path) -> None:
    with running("serve", "-c", write_config(tmp_path, log_level="debug"), folder=tmp_path) as command:
        command.wait_for(READY)
        command.signal(signal.SIGTERM)
        assert command.wait() == 0
        assert "AsyncIOEngine" not in command.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_stops_it_without_delay_when_nothing_runs(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with running("serve", "-c", write_config(tmp_path), folder=tmp_path) as command:
        command.wait_for(READY)
        command.signal(number)
        assert command.wait() == code
        assert "Traceback" not in command.err and "stopping" in command.err


def nodes_of(config: Path) -> list[str]:
    """Ids of the nodes that the service has."""
    status = json.loads(inferact("status", "--json", "--url", url_of(config)).out)
    return [node["id"] for node in status["nodes"]]


def test_sighup_puts_a_changed_configuration_in_force(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with running("serve", "-c", config, folder=tmp_path) as command:
        command.wait_for(READY)
        config.write_text(config.read_text().replace("node-1", "node-new"))
        command.signal(signal.SIGHUP)
        command.wait_for("configuration reloaded: added: node-new; removed: node-1")
        assert nodes_of(config) == ["node-0", "node-new"]


def test_a_change_of_the_file_is_put_in_force_without_a_signal(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with running("serve", "-c", config, folder=tmp_path) as command:
        command.wait_for(READY)
        config.write_text(config.read_text() + "kv_cache: {policy: lru}\n")
        command.wait_for("configuration reloaded: set: kv_cache.policy")


def test_a_broken_file_is_refused_on_sighup_with_its_line_and_changes_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with running("serve", "-c", config, folder=tmp_path) as command:
        command.wait_for(READY)
        config.write_text(config.read_text().replace("node-1", "node 1"))
        command.signal(signal.SIGHUP)
        said = command.wait_for("stays in force")
        assert re.search(r"inferact\.yaml:\d+: nodes\[1\]\.id: ", said) and "Traceback" not in said
        assert nodes_of(config) == ["node-0", "node-1"]


def test_it_logs_one_readable_line_a_record(served: Served) -> None:
    lines = served.command.err.splitlines()
    assert lines and all(LOG_LINE.fullmatch(line) for line in lines)


def test_its_log_keeps_to_the_level_of_the_configuration(tmp_path: Path) -> None:
    config = write_config(tmp_path, log_level="error")
    with running("serve", "-c", config, folder=tmp_path) as command:
        deadline_s = time.monotonic() + LIMIT_S
        while inferact("status", "--url", url_of(config)).code:
            assert time.monotonic() < deadline_s
        command.signal(signal.SIGTERM)
        assert command.wait() == 0
        assert command.err == ""


def test_a_second_service_in_the_same_run_directory_is_refused(served: Served, tmp_path: Path) -> None:
    run_dir = served.config.parent / "run"
    second = write_config(tmp_path, run_dir=str(run_dir))
    complaint = inferact_process("serve", "-c", second).complaint
    assert str(run_dir) in complaint and "`scheduler.run_dir`" in complaint
    assert inferact("status", "--url", served.url).code == 0
