"""What the READMEs say, where a program can check it."""

import re
from pathlib import Path

import pytest

from extproc.cli import app
from extproc.config import load_config
from extproc.config.pending import NO_EFFECT_YET
from extproc.openai.cut import MEMBERS
from extproc.openai.errors import ErrorCode

TOP = Path(__file__).parent.parent
PAGES = (
    *(TOP / "README.md", TOP / "envoy" / "README.md"),
    *(TOP / "docs" / "replay.md", TOP / "docs" / "reload.md"),
)


@pytest.fixture(params=PAGES, ids=lambda page: page.parent.name)
def page(request: pytest.FixtureRequest) -> Path:
    """Each page for users."""
    path: Path = request.param
    return path


def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_commands_exist(page: Path) -> None:
    known = {command.name for command in app.registered_commands}
    named = set(re.findall(r"(?:`|bin/|^)inferact ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert named and named <= known


def test_the_configuration_by_example_is_valid(tmp_path: Path) -> None:
    (snippet,) = re.findall(r"```yaml\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    path = tmp_path / "inferact.yaml"
    path.write_text(snippet)
    assert load_config(path).nodes[1].weight == 0.5


def test_error_codes_exist() -> None:
    named = re.findall(r"^\| [45]\d\d `(\w+)`", PAGES[0].read_text(), re.MULTILINE)
    assert named and set(named) <= {code.value for code in ErrorCode}


def test_the_example_configuration_is_valid_and_sets_no_key_without_effect() -> None:
    notes: list[object] = []
    assert load_config(TOP / "inferact.example.yaml", note=notes.append).nodes
    assert notes == []


def test_keys_without_effect_are_listed_as_such() -> None:
    section = PAGES[0].read_text().partition("## Not there yet")[2].partition("\n## ")[0]
    for key in NO_EFFECT_YET:
        top, _, rest = key.partition(".")
        names = (f"`{top}.*`", f"`{top}[].{rest}`", f"`{key}`", f"`{key}: static`")
        assert any(name in section for name in names), key


def test_members_that_engines_never_get_are_listed() -> None:
    assert all(f"`{name}`" in PAGES[0].read_text() for name in MEMBERS)
