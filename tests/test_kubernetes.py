"""The Kubernetes manifests, against Kubernetes' own schemas, the code, and each other."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate.utils import ValidationError

from extproc.config import load_config
from extproc.rundir import RunDir

TOP = Path(__file__).parent.parent
FOLDER = TOP / "envoy" / "kubernetes"
VERSIONS = ("1.29", "1.34")
KUSTOMIZATION: dict[str, Any] = yaml.safe_load((TOP / "envoy" / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    document
    for name in KUSTOMIZATION["resources"]
    for document in yaml.safe_load_all((TOP / "envoy" / name).read_text())
]
CONFIG = load_config(FOLDER / "inferact.yaml")


def found(kind: str, name: str) -> dict[str, Any]:
    """The object of that name."""
    (one,) = (one for one in OBJECTS if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return one


ROUTER = found("StatefulSet", "inferact")["spec"]["template"]["spec"]
SERVICE, ENVOY = ROUTER["initContainers"][0], ROUTER["containers"][0]
ENGINES = found("StatefulSet", "engine")["spec"]
ENGINE = ENGINES["template"]["spec"]["containers"][0]
COMPOSE = yaml.safe_load((TOP / "docker-compose.yml").read_text())["services"]


def mounts(container: dict[str, Any]) -> dict[str, str]:
    """Path: volume."""
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("one", OBJECTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_kubernetes_knows_every_field(one: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(one, version, strict=True)


def test_a_wrong_field_would_be_found() -> None:
    with pytest.raises(ValidationError):
        kubernetes_validate.validate(
            found("Service", "inferact") | {"spec": {"porst": []}}, "1.34", strict=True
        )


def test_the_files_that_become_config_maps_exist_and_are_mounted() -> None:
    for generated in KUSTOMIZATION["configMapGenerator"]:
        assert all((TOP / "envoy" / file).exists() for file in generated["files"])
    names = {Path(file).name for file in KUSTOMIZATION["configMapGenerator"][0]["files"]}
    used = {
        Path(word).name for word in (*SERVICE["args"], *ENVOY["command"]) if word.startswith("/etc/inferact/")
    }
    assert used == names


def test_selectors_find_the_pods() -> None:
    for name in ("inferact", "engine"):
        labels = found("StatefulSet", name)["spec"]["template"]["metadata"]["labels"]
        assert found("StatefulSet", name)["spec"]["selector"]["matchLabels"] == labels
        assert found("Service", name)["spec"]["selector"] == labels
        assert found("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"] == labels


def test_every_node_is_a_pod_under_its_stable_name() -> None:
    port = found("Service", "engine")["spec"]["ports"][0]["port"]
    pods = [f"engine-{index}" for index in range(ENGINES["replicas"])]
    assert [node.id for node in CONFIG.nodes] == pods
    assert [node.endpoint for node in CONFIG.nodes] == [f"http://{pod}.engine:{port}" for pod in pods]
    assert ENGINE["ports"][0]["containerPort"] == port
    assert f"--port={port}" in ENGINE["args"]
    assert {f"--model={model}" for node in CONFIG.nodes for model in node.models} <= set(ENGINE["args"])
    assert found("Service", "engine")["spec"]["clusterIP"] == "None"


def test_ports_and_the_run_directory_are_those_of_the_configuration() -> None:
    scheduler = CONFIG.scheduler
    assert ENVOY["ports"][0]["containerPort"] == scheduler.port
    assert str(scheduler.admin_port) in SERVICE["startupProbe"]["exec"]["command"][-1]
    assert str(scheduler.envoy_admin_port) in ENVOY["readinessProbe"]["exec"]["command"][-1]
    run = RunDir(scheduler.run_dir)
    assert mounts(SERVICE)[str(run.path)] == mounts(ENVOY)[str(run.path)] == "run"
    bootstrap = (TOP / "envoy" / "envoy.yaml").read_text()
    assert f"path: {run.clusters}" in bootstrap and f"port_value: {scheduler.port}\n" in bootstrap


def test_the_service_starts_before_envoy_and_stops_after_it() -> None:
    assert SERVICE["restartPolicy"] == "Always" and "startupProbe" in SERVICE
    assert SERVICE["args"][0] == "serve"


def test_a_stop_leaves_running_requests_the_time_that_they_may_take() -> None:
    (limit,) = (int(one["value"]) for one in ENVOY["env"] if one["name"] == "DRAIN_LIMIT_S")
    before = int(ENVOY["lifecycle"]["preStop"]["exec"]["command"][-1])
    timeout_s = CONFIG.scheduler.request_timeout_ms / 1000
    assert limit > timeout_s
    assert ROUTER["terminationGracePeriodSeconds"] > before + limit + timeout_s


def test_the_containers_are_those_of_compose() -> None:
    assert ENVOY["image"] == COMPOSE["envoy"]["image"]
    assert ENVOY["command"][4:] == COMPOSE["envoy"]["command"][4:]
    assert ROUTER["securityContext"]["runAsUser"] == int(COMPOSE["envoy"]["user"].partition(":")[0])
    extras = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert ENVOY["image"].endswith(re.findall("==(.+)", extras["envoy"][0])[0])


def test_every_mount_has_its_volume_and_every_key_comes_from_a_secret() -> None:
    for name in ("inferact", "engine"):
        spec = found("StatefulSet", name)["spec"]
        pod = spec["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
        used = set()
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            used |= set(mounts(container).values())
        assert used == volumes
    (key,) = (one for one in ENGINE["env"] if one["name"] == "INFERACT_ADMIN_KEY")
    assert key["valueFrom"] == {"secretKeyRef": {"name": "inferact", "key": "admin-key"}}


def test_no_container_may_more_than_it_needs() -> None:
    for container in (SERVICE, ENVOY):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_pod_can_start_and_stop_while_inferact_is_away() -> None:
    for action in ("drain", "restore"):
        environment = os.environ | {
            "INFERACT_URL": "http://127.0.0.1:1",
            "NODE": "a",
            "INFERACT_ADMIN_KEY": "k",
        }
        command = [sys.executable, str(FOLDER / "node.py"), action]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0 and f"could not {action}" in done.stderr
