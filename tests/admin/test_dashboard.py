"""The dashboard's files: that they are served, and what else the browser is told to let in."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from admin_app import App

import admin

TOP = Path(__file__).parent.parent.parent
FILES = sorted((Path(admin.__file__).parent / "static").iterdir())
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
TEXTS = {file.name: file.read_text() for file in FILES}


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/", "/dashboard/index.html", "/dashboard?x=1"])
async def test_the_page_is_served_without_a_key(app: App, path: str) -> None:
    response = await app.client.get(path)
    assert (response.status, response.content_type, response.charset) == (200, "text/html", "utf-8")
    assert await response.text() == TEXTS["index.html"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
async def test_every_file_is_served_as_what_it_is(app: App, file: Path) -> None:
    response = await app.client.get(f"/dashboard/{file.name}")
    assert (response.status, response.content_type) == (200, TYPES[file.suffix])
    assert await response.text() == TEXTS[file.name]


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/main.js", "/dashboard/style.css"])
async def test_nothing_but_its_own_files_may_run_or_be_asked(app: App, path: str) -> None:
    response = await app.client.get(path)
    policy = dict(
        rule.strip().split(" ", 1) for rule in response.headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy)
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert response.headers["Cache-Control"] == "no-cache"


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/x",
        "/dashboard/..%2Fapp.py",
        "/dashboard/%2e%2e/app.py",
        "/dashboard/main.js/",
        "/dashboards",
    ],
)
async def test_nothing_else_is_there(app: App, path: str) -> None:
    response = await app.client.get(path)
    assert response.status == 404
    assert (await response.json())["error"]["code"] == "not_found"


async def test_it_is_only_read(app: App) -> None:
    assert (await app.client.head("/dashboard")).status == 200
    assert (await app.client.post("/dashboard")).status == 405


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_reaches_for_another_site_or_makes_markup_of_text(file: Path) -> None:
    text = TEXTS[file.name].replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(
        r"https?://|\bon\w+=|style=|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_import_and_link_is_a_file(file: Path) -> None:
    linked = re.findall(r'(?:from "\./|(?:src|href)="/dashboard/)([\w.]+)"', TEXTS[file.name])
    assert set(linked) <= {other.name for other in FILES}


def test_every_file_is_in_the_package() -> None:
    settings = tomllib.loads((TOP / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["admin"]
    for file in FILES:
        assert any(fnmatch(f"static/{file.name}", pattern) for pattern in patterns)
