"""A run directory for each test, and the key of its engine."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from envoy_sets import KEY, KEY_NAME


@pytest.fixture(autouse=True)
def _engine_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_NAME, KEY)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A run directory with a short name, as socket paths need it."""
    path = Path(tempfile.mkdtemp(prefix="inferact-"))
    yield path
    shutil.rmtree(path)
