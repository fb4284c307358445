"""`inferact up`: what it prints works, and nothing is left of it when it ends."""

import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cli_support import (
    LIMIT_S,
    LOG_LINE,
    environment,
    inferact,
    inferact_process,
    running,
    url_of,
    write_config,
)
from demo_support import MODEL, Demo, demo, long_request, until

pytestmark = [
    pytest.mark.envoy,
    pytest.mark.xdist_group("inferact up"),  # one demo for the module, and not on every worker
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """A demo for tests that leave it as it was."""
    with demo(tmp_path_factory.mktemp("demo")) as running_demo:
        yield running_demo


def shell(demo: Demo, line: str) -> str:
    """What a line that was printed for a shell writes."""
    done = subprocess.run(
        line,
        shell=True,
        cwd=demo.command.folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# what it prints


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_printed_curl_works(shared: Demo) -> None:
    answer = json.loads(shell(shared, shared.printed(r"\n  (curl [^\n]+)")))
    assert answer["model"] == MODEL and answer["choices"]


def test_the_printed_python_works(shared: Demo) -> None:
    lines = shared.printed(r"\n(  from openai.*?content\))").splitlines()
    script = "\n".join(line.removeprefix("  ") for line in lines)
    assert "Simulated" in shell(shared, shlex.join([sys.executable, "-c", script]))


def test_the_printed_status_drain_and_restore_work(shared: Demo) -> None:
    node = next(iter(shared.nodes()))
    shell(shared, shared.printed(r"\n  drain +([^\n]+)"))
    assert shared.nodes()[node]["drained"]
    assert node in shell(shared, shared.printed(r"\n  status +([^\n]+)"))
    shell(shared, shared.printed(r"\n  restore +([^\n]+)"))
    assert not shared.nodes()[node]["drained"]


def test_a_request_is_explained_by_the_id_of_its_answer(shared: Demo) -> None:
    key, url = shared.printed(r"INFERACT_ADMIN_KEY=(\S+)"), ("--url", f"http://127.0.0.1:{shared.port + 1}")
    served = shared.chat()
    asked = inferact("explain", served.headers["x-request-id"], *url, INFERACT_ADMIN_KEY=key)
    assert asked.out.startswith(f"{served.headers['x-inferact-node']} was chosen: ")
    body = shared.folder / "body.json"
    body.write_bytes(served.request.content)
    tried = inferact("explain", "--body", body, "--json", *url, INFERACT_ADMIN_KEY=key)
    nodes = {line["node"] for line in json.loads(tried.out)["candidates"]}
    assert nodes == set(shared.nodes())


def test_the_printed_addresses_and_files_are_there(shared: Demo) -> None:
    for url in (shared.printed(r"metrics +(\S+?),"), shared.printed(r"own: (\S+)")):
        assert httpx.get(url, trust_env=False).status_code == 200
    assert list(Path(shared.printed(r"logs +(\S+)/\*\.log")).glob("*.log"))
    assert inferact("check", "-c", shared.printed(r"settings +(\S+)")).code == 0


def test_two_nodes_serve_a_second_model(shared: Demo) -> None:
    models = [node["models"] for node in shared.nodes().values()]
    assert [len(names) for names in models] == [2, 2, 1]
    assert all(MODEL in names for names in models)


def test_the_key_is_a_fresh_one_and_is_in_no_file(shared: Demo) -> None:
    key = shared.printed(r"INFERACT_ADMIN_KEY=(\S+)")
    assert len(key) >= 32
    files = [path for path in shared.folder.rglob("*") if path.is_file()]
    assert files and not any(key.encode() in path.read_bytes() for path in files)
    assert key not in shared.command.err


def test_it_logs_one_readable_line_a_record(shared: Demo) -> None:
    assert all(LOG_LINE.fullmatch(line) for line in shared.command.err.splitlines())


def test_a_drain_waits_for_running_requests(shared: Demo) -> None:
    key, node = shared.printed(r"INFERACT_ADMIN_KEY=(\S+)"), "node-a100-01"
    admin = ("--url", f"http://127.0.0.1:{shared.port + 1}")
    with long_request(shared, **{"x-inferact": {"node_affinity": node}}) as outcome:
        drained = inferact_process("drain", node, "--wait", *admin, INFERACT_ADMIN_KEY=key)
        until(lambda: outcome)
    inferact("restore", node, *admin, INFERACT_ADMIN_KEY=key)
    assert drained.out == f"{node} is drained; 0 requests running\n"
    assert "waiting for 1 request" in drained.err
    assert isinstance(outcome[0], httpx.Response) and outcome[0].status_code == 200


def test_a_second_demo_at_the_same_port_is_refused_and_told_of_another(shared: Demo) -> None:
    settings = (shared.folder / "inferact.yaml").read_text()
    again = ("up", "--demo", "--port", shared.port)
    complaint = inferact(*again, folder=shared.command.folder).complaint
    assert "another inferact runs" in complaint and "up --demo --port " in complaint
    assert (shared.folder / "inferact.yaml").read_text() == settings


def test_a_second_demo_at_another_port_runs_in_the_same_folder(shared: Demo, tmp_path: Path) -> None:
    (tmp_path / ".inferact").symlink_to(shared.folder.parent)
    with demo(tmp_path) as second:
        assert (second.chat().status_code, shared.chat().status_code) == (200, 200)


# how it ends


def test_ctrl_c_lets_running_requests_end_and_leaves_nothing(tmp_path: Path) -> None:
    with demo(tmp_path) as ours:
        with long_request(ours) as outcome:
            ours.command.signal(signal.SIGINT)
            ours.command.wait_for("stopping")
            until(lambda: refused(ours))
            assert not outcome, "the request is still running"
        assert ours.command.wait() == 130
        assert isinstance(outcome[0], httpx.Response) and outcome[0].status_code == 200
        assert not ours.processes()
        assert "Traceback" not in ours.command.err


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    with demo(tmp_path) as ours:
        with long_request(ours) as outcome:
            ours.command.signal(signal.SIGINT)
            ours.command.wait_for("stopping")
            ours.command.signal(signal.SIGINT)
            assert ours.command.wait() == 130
        assert isinstance(outcome[0], httpx.HTTPError)
        assert not ours.processes()


def test_the_end_of_its_terminal_ends_it_all(tmp_path: Path) -> None:
    master, slave = pty.openpty()
    try:
        with demo(tmp_path, stdin=slave) as ours:
            ours.command.signal(signal.SIGHUP)
            assert ours.command.wait() == 129
            assert not ours.processes()
    finally:
        os.close(master)
        os.close(slave)


def test_a_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    with demo(tmp_path) as ours:
        assert len(ours.processes()) == 5
        ours.command.signal(signal.SIGKILL)
        ours.command.wait()
        until(lambda: not ours.processes())


def test_a_dead_envoy_ends_it_with_the_reason_and_the_log(tmp_path: Path) -> None:
    with demo(tmp_path) as ours:
        os.kill(ours.process("envoy.yaml"), signal.SIGKILL)
        assert ours.command.wait() == 1
        complaint = ours.command.err.splitlines()[-1]
        assert "Envoy ended (killed by SIGKILL)" in complaint and str(ours.folder / "envoy.log") in complaint
        assert not ours.processes()


def test_a_dead_node_is_logged_and_the_others_serve(tmp_path: Path) -> None:
    with demo(tmp_path, INFERACT_ADMIN_KEY="my-own-key") as ours:
        os.kill(ours.process("node-h100-01"), signal.SIGKILL)
        ours.command.wait_for("node-h100-01 ended (killed by SIGKILL)")
        assert {ours.chat().status_code for _ in range(8)} == {200}
        assert "my-own-key" not in ours.command.out + ours.command.err
        ours.command.signal(signal.SIGTERM)
        assert ours.command.wait() == 0
        assert not ours.processes()


def refused(demo: Demo) -> bool:
    """Whether new connections are refused."""
    try:
        httpx.get(f"{demo.url}/healthz", trust_env=False)
    except httpx.TransportError:
        return True
    return False


# with a configuration


def test_with_a_configuration_it_runs_its_nodes_and_says_what_lacks(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with running("up", "-c", config, folder=tmp_path) as command:
        said = command.wait_for("0 of 2 nodes answer")
        assert inferact("status", "--url", url_of(config)).code == 0
        command.signal(signal.SIGTERM)
        assert command.wait() == 0
    assert "there is no admin key" in said
    assert "restore" not in said


def test_an_envoy_that_does_not_start_is_one_line(tmp_path: Path) -> None:
    false = shutil.which("false")
    assert false is not None
    complaint = inferact_process("up", "-c", write_config(tmp_path), INFERACT_ENVOY=false).complaint
    assert "Envoy did not start" in complaint and "envoy.log" in complaint
