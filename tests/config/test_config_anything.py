"""Whatever a configuration file holds, it loads or every problem is explained; nothing else happens."""

from pathlib import Path
from typing import Any

import yaml
from config_files import REFERENCE
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from extproc.config import (
    Batching,
    Config,
    ConfigError,
    CustomProfile,
    Engine,
    KvCache,
    KvEvents,
    NodeConfig,
    Scheduler,
    Tls,
    load_config,
)


def loads_or_explains(folder: Path, content: bytes) -> None:
    path = folder / "inferact.yaml"
    path.write_bytes(content)
    try:
        config = load_config(path)
    except ConfigError as error:
        assert error.problems
        assert all(problem.message and str(problem).isprintable() for problem in error.problems)
    else:
        assert config.nodes


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SECTIONS = (Config, Scheduler, NodeConfig, CustomProfile, Engine, KvEvents, Tls, KvCache, Batching)
KEYS = st.sampled_from(sorted({key for section in SECTIONS for key in section.model_fields}))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.dates()
    | st.binary(max_size=4)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a document."""
    entries = list(value.items()) if isinstance(value, dict) else []
    entries += enumerate(value) if isinstance(value, list) else []
    return [place for key, inner in entries for place in [(value, key), *places(inner)]]


class TestAnything:
    @FUZZ
    @given(content=st.binary(max_size=200))
    @example(content=b'nodes: ["\\ud800"]')
    @example(content=b'"\\ud800": 1')
    @example(content=b"? {a: b}\n: c")
    @example(content=b"nodes: !!set {a}")
    def test_bytes(self, tmp_path: Path, content: bytes) -> None:
        loads_or_explains(tmp_path, content)

    @FUZZ
    @given(text=st.text(alphabet="ab01:-,[]{}&*!|>'\"%@`#?<~\\ \n\t", max_size=60))
    def test_text_that_looks_like_yaml(self, tmp_path: Path, text: str) -> None:
        loads_or_explains(tmp_path, text.encode())

    @FUZZ
    @given(document=st.dictionaries(KEYS, VALUES, max_size=5))
    def test_documents(self, tmp_path: Path, document: dict[str, Any]) -> None:
        loads_or_explains(tmp_path, yaml.safe_dump(document).encode())

    @FUZZ
    @given(data=st.data())
    def test_a_good_file_with_one_value_replaced(self, tmp_path: Path, data: st.DataObject) -> None:
        document = yaml.safe_load(REFERENCE)
        container, key = data.draw(st.sampled_from(places(document)))
        container[key] = data.draw(VALUES)
        loads_or_explains(tmp_path, yaml.safe_dump(document).encode())
