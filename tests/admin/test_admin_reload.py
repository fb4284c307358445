"""`POST /admin/reload`."""

from pathlib import Path

import pytest
import yaml
from admin_app import CONFIG, KEY, App

from extproc.config import Config, load_config
from extproc.reload import Reloader

HEADERS = {"x-inferact-admin-key": KEY}


def write(path: Path, **sections: object) -> None:
    path.write_text(yaml.safe_dump(CONFIG | sections))


@pytest.fixture
def path(app: App, tmp_path: Path) -> Path:
    """The configuration file, from which the app's is loaded."""
    path = tmp_path / "inferact.yaml"
    write(path)
    in_force = [load_config(path)]

    async def apply(config: Config) -> None:
        in_force.append(config)

    app.context.config = lambda: in_force[-1]
    app.context.reloader = Reloader(path, app.context.config, apply)
    app.context.config_errors = app.context.reloader.errors
    return path


async def test_tells_what_differs_and_puts_it_in_force(app: App, path: Path) -> None:
    write(path, kv_cache={"policy": "lru"})
    setting = {"key": "kv_cache.policy", "old": "prefix-aware", "new": "lru"}
    expected = {"added": [], "removed": [], "changed": [], "settings": [setting], "needs_restart": []}
    for query, left in (("?dry_run=true", expected), ("", expected), ("?dry_run=false", None)):
        response = await app.client.post(f"/admin/reload{query}", headers=HEADERS)
        assert response.status == 200
        assert await response.json() == (left or expected | {"settings": []})


async def test_a_refused_file_is_told_with_its_lines_and_shown_in_status(app: App, path: Path) -> None:
    write(path, nodes=[])
    response = await app.client.post("/admin/reload", headers=HEADERS)
    error = (await response.json())["error"]
    assert (response.status, error["code"]) == (422, "invalid_configuration")
    assert ": nodes: " in error["message"] and error["message"].startswith(f"{path}:")
    status = await (await app.client.get("/status")).json()
    assert status["config_errors"] == [error["message"]]


async def test_needs_the_admin_key(app: App, path: Path) -> None:
    assert (await app.client.post("/admin/reload")).status == 401


async def test_another_dry_run_than_true_or_false_is_refused(app: App, path: Path) -> None:
    response = await app.client.post("/admin/reload?dry_run=maybe", headers=HEADERS)
    assert (response.status, (await response.json())["error"]["param"]) == (400, "dry_run")


async def test_without_a_file_there_is_nothing_to_reload(app: App) -> None:
    assert (await app.client.post("/admin/reload", headers=HEADERS)).status == 404
