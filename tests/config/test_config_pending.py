"""Keys that load, and that change nothing yet: each is named, once, where the user wrote it."""

from pathlib import Path

import pytest
from config_files import NODE, load, marked_line, node, scheduler

from extproc.config import Problem
from extproc.config.pending import NO_EFFECT_YET


def notes(folder: Path, text: str) -> list[Problem]:
    found: list[Problem] = []
    load(folder, text, note=found.append)
    return found


PENDING = [
    (scheduler("# above", "xds_listen: 127.0.0.1:9003  # here"), "scheduler.xds_listen"),
]


@pytest.mark.parametrize(("text", "key"), PENDING, ids=[key for _, key in PENDING])
def test_a_key_without_effect_is_named_with_its_line(tmp_path: Path, text: str, key: str) -> None:
    [note] = notes(tmp_path, text)
    place = f"{tmp_path / 'inferact.yaml'}:{marked_line(text)}"
    assert str(note) == f"{place}: {key}: accepted, has no effect yet"


def test_every_such_key_is_tried_here() -> None:
    assert {key.replace("[0]", "") for _, key in PENDING} == set(NO_EFFECT_YET)


@pytest.mark.parametrize(
    "text",
    [
        NODE,
        f"{NODE}kv_cache: {{policy: adaptive, pin_system_prompts: true, eviction_threshold_pct: 75}}\n",
        f"{NODE}batching: {{strategy: static, max_batch_size: 8, max_wait_ms: 5}}\n",
        f"{NODE}kv_cache:\nbatching:\n",
        node("kv_events: {endpoint: 'tcp://10.0.0.1:5557'}"),
    ],
)
def test_nothing_is_said_of_defaults_or_of_what_happens_anyway(tmp_path: Path, text: str) -> None:
    assert notes(tmp_path, text) == []
