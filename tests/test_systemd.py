"""The systemd units, against the code, the containers, and systemd itself where there is one."""

import re
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

from extproc.config import Config
from extproc.rundir import RunDir

TOP = Path(__file__).parent.parent
FOLDER = TOP / "envoy" / "systemd"
README = (FOLDER / "README.md").read_text()
UNITS = sorted(FOLDER.glob("*.service"))


class Unit(ConfigParser):
    """A unit file: a key may come twice, and keeps its case."""

    def __init__(self, name: str) -> None:
        super().__init__(strict=False, interpolation=None, delimiters="=")
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.text = (FOLDER / name).read_text()
        self.read_string(self.text)


SERVICE, ENVOY = Unit("inferact.service"), Unit("inferact-envoy.service")


def test_envoy_starts_after_the_service_and_so_stops_before_it() -> None:
    assert ENVOY["Unit"]["After"] == ENVOY["Unit"]["Wants"] == "inferact.service"


def test_both_run_as_one_user_in_the_run_directory_of_the_readme() -> None:
    (run_dir,) = re.findall(r"`scheduler.run_dir` is `(\S+)`", README)
    assert f"/var/lib/{SERVICE['Service']['StateDirectory']}" == run_dir == ENVOY["Service"]["ReadWritePaths"]
    assert str(RunDir(Path(run_dir)).routes) in ENVOY["Service"]["ExecStartPre"]
    assert SERVICE["Service"]["User"] == ENVOY["Service"]["User"]


def test_envoy_runs_with_the_options_of_the_containers() -> None:
    command = ENVOY["Service"]["ExecStart"].split()
    container = yaml.safe_load((TOP / "docker-compose.yml").read_text())["services"]["envoy"]["command"]
    assert command[command.index("--log-level") :] == container[container.index("--log-level") :]
    assert (TOP / "envoy" / Path(command[1]).name).exists()


def test_a_stop_leaves_running_requests_the_time_that_they_may_take() -> None:
    (limit,) = re.findall(r"^Environment=DRAIN_LIMIT_S=(\d+)$", ENVOY.text, re.MULTILINE)
    timeout_s = Config.model_fields["scheduler"].default.request_timeout_ms / 1000
    assert float(ENVOY["Service"]["TimeoutStopSec"]) > float(limit) > timeout_s
    assert float(SERVICE["Service"]["TimeoutStopSec"]) > timeout_s
    assert ENVOY["Service"]["KillMode"] == "mixed", "Envoy itself must not get the signal"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_knows_every_key_and_value(unit: Path, tmp_path: Path) -> None:
    """Programs and users are those of the machine that it is for: here they become true and root."""
    text = re.sub(r"^(Exec\w+=)\S+", r"\1/bin/true", unit.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^(User|Group)=.*", r"\1=root", text, flags=re.MULTILINE)
    for other in UNITS:
        (tmp_path / other.name).write_text(text if other == unit else "[Service]\nExecStart=/bin/true\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert unit.name not in done.stderr, done.stderr
