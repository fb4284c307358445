"""The example configuration, which is also the list of every key: whole, valid, and true of the defaults."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from extproc.config import Batching, Config, KvCache, Problem, Scheduler, load_config
from extproc.config.pending import NO_EFFECT_YET

EXAMPLE = Path(__file__).parent.parent / "inferact.example.yaml"
NOT_THE_DEFAULT = {"run_dir", "extproc_listen", "extproc_tls", "xds_listen"}
COMMENTED_KEY = re.compile(r"^( *)# ( *(- )?[a-z0-9_-]+:( |$))", re.MULTILINE)


def keys(model: type[BaseModel]) -> Iterator[tuple[type[BaseModel], str]]:
    """Every key of a section and of those in it."""
    for name, field in model.model_fields.items():
        yield model, name
        for section in sections(field.annotation):
            yield from keys(section)


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections(part)


def set_in(section: BaseModel) -> Iterator[tuple[type[BaseModel], str]]:
    """Every key that a loaded configuration sets."""
    for name in section.model_fields_set:
        yield type(section), name
        value = getattr(section, name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, BaseModel):
                yield from set_in(each)


@pytest.fixture
def everything(tmp_path: Path) -> Config:
    """The example with every key in force."""
    path = tmp_path / "inferact.yaml"
    path.write_text(COMMENTED_KEY.sub(r"\1\2", EXAMPLE.read_text()))
    return load_config(path)


def test_every_key_is_in_it_and_all_together_are_valid(everything: Config) -> None:
    assert set(keys(Config)) - set(set_in(everything)) == set()


def test_it_is_valid_as_it_stands_and_there_is_nothing_to_say_of_it() -> None:
    notes: list[Problem] = []
    assert len(load_config(EXAMPLE, note=notes.append).nodes) == 3
    assert notes == []


def test_the_values_behind_a_comment_are_the_defaults(everything: Config) -> None:
    default = Scheduler()
    for key in Scheduler.model_fields.keys() - NOT_THE_DEFAULT:
        assert getattr(everything.scheduler, key) == getattr(default, key), key
    assert everything.kv_cache == KvCache()
    assert everything.batching == Batching(max_batch_size=everything.batching.max_batch_size)


def test_the_keys_without_effect_are_marked() -> None:
    text = EXAMPLE.read_text()
    for key in NO_EFFECT_YET:
        section, _, name = key.rpartition(".")
        mark = rf"{name}:.*no effect yet|{section}: +# accepted, has no effect yet"
        assert re.search(mark, text), key
