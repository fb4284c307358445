"""The bootstrap and the advice in `envoy/`, against the configuration they were made from."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from extproc.config import load_config
from extproc.envoyconfig.files import write_copy
from extproc.launch.envoyprocess import envoy_binary
from extproc.rundir import RunDir

TOP = Path(__file__).parent.parent
EXAMPLE = TOP / "inferact.example.yaml"
BOOTSTRAP = TOP / "envoy" / "envoy.yaml"
README = (TOP / "envoy" / "README.md").read_text()
CERTIFICATE = TOP / "tests" / "data" / "tls" / "engine.pem"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """The files of the example, as `inferact envoy-config` writes them."""
    config = load_config(EXAMPLE)
    written = RunDir(tmp_path)
    write_copy(config, RunDir(config.scheduler.run_dir), written)
    return written


def bootstrap_at(folder: Path) -> str:
    """The bootstrap, with its paths moved to where this test may read and write."""
    return BOOTSTRAP.read_text().replace("/run/inferact", str(folder))


def validated(bootstrap: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """What Envoy says of a bootstrap."""
    path = folder / "validated.yaml"
    path.write_text(bootstrap)
    command = [envoy_binary(), "--mode", "validate", "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_bootstrap_is_what_envoy_config_writes_for_the_example(run: RunDir) -> None:
    advice = f"inferact envoy-config -c {EXAMPLE.name} --out DIR, and copy DIR/envoy.yaml"
    assert run.bootstrap.read_text() == BOOTSTRAP.read_text(), advice


@pytest.mark.envoy
def test_envoy_accepts_the_bootstrap(run: RunDir, tmp_path: Path) -> None:
    outcome = validated(bootstrap_at(tmp_path), tmp_path)
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.envoy
def test_the_tls_of_the_readme_works_where_it_is_to_be_inserted(run: RunDir, tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    for file in ("tls.crt", "tls.key"):
        snippet = snippet.replace(f"/etc/envoy/tls/{file}", str(CERTIFICATE))
    (line,) = re.findall(r"directly above the line `(.+?)`", README)
    above, found, below = bootstrap_at(tmp_path).partition(f"\n{line}\n")
    assert found
    outcome = validated(f"{above}\n{snippet.rstrip()}{found}{below}", tmp_path)
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.parametrize("name", re.findall(r"`(inferact:\w+)`", README))
def test_the_clusters_that_the_readme_names_are_there(name: str) -> None:
    clusters = yaml.safe_load(BOOTSTRAP.read_text())["static_resources"]["clusters"]
    assert name in {cluster["name"] for cluster in clusters}
