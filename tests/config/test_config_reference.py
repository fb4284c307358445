"""The reference page of the configuration: up to date, and about every key."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from extproc.config import Config

SCRIPT = Path(__file__).parent.parent.parent / "docs" / "configuration.py"


def script() -> ModuleType:
    """The program that writes the page."""
    spec = importlib.util.spec_from_file_location("configuration", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_what_the_script_writes() -> None:
    assert SCRIPT.with_suffix(".md").read_text() == script().page(), "run python docs/configuration.py"


def test_every_key_is_explained() -> None:
    page = script()
    for path, model in page.sections("", Config):
        assert set(page.explanations(model)) >= set(model.model_fields), path
    rows = re.findall(r"^\| `\w+` \|.*\| (.*) \|$", page.page(), re.MULTILINE)
    assert rows and all(rows)


def test_keys_without_effect_are_marked() -> None:
    assert script().page().count("has no effect yet") == 1
