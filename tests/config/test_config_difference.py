"""What differs between two configurations."""

from typing import Any

import msgspec
import pytest

from extproc.config import Config
from extproc.config.difference import NodeChange, applicable, difference, starts_anew

A = {"id": "a", "hardware": "a100-80g", "backend": "vllm", "endpoint": "http://a:8000", "models": ["m"]}
B = A | {"id": "b", "endpoint": "http://b:8000"}
EVENTS = {"kv_events": {"endpoint": "tcp://a:5557"}}


def config(*nodes: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate({"nodes": nodes or (A,), **sections})


def test_equal_configurations_differ_in_nothing_however_they_are_written() -> None:
    written_out = config(A | {"weight": 1.0}, scheduler={"port": 9000}, kv_cache={"policy": "prefix-aware"})
    assert not difference(config(), written_out)


def test_nodes_come_and_go_by_their_ids() -> None:
    told = difference(config(A, B), config(B, A | {"id": "c"}))
    assert (told.added, told.removed, told.changed) == (("c",), ("a",), ())


def test_an_order_that_changes_is_none() -> None:
    assert not difference(config(A, B), config(B, A))


@pytest.mark.parametrize(
    ("before", "change", "anew"),
    [
        ({}, {"weight": 0.5}, False),
        ({}, {"models": ["m", "n"], "model_aliases": {"small": "m"}}, False),
        (EVENTS, {"weight": 0.5}, False),
        (EVENTS, {"models": ["m", "n"]}, True),
        ({}, {"endpoint": "http://c:8000"}, True),
        ({}, {"hardware": "h100-80g", "weight": 0.5}, True),
        ({}, {"backend": "tgi"}, True),
        ({}, {"api_key_env": "KEY"}, True),
        ({}, EVENTS, True),
    ],
)
def test_a_changed_node_is_told_with_its_keys_and_whether_it_starts_anew(
    before: dict[str, Any], change: dict[str, Any], anew: bool
) -> None:
    old, new = config(A | before, B), config(A | before | change, B)
    (told,) = difference(old, new).changed
    assert (told.node, set(told.keys), told.starts_anew) == ("a", set(change), anew)
    assert starts_anew(old.nodes[0], new.nodes[0]) is anew


def test_settings_are_told_with_their_values() -> None:
    new = config(kv_cache={"policy": "lru"}, batching={"max_batch_size": 4}, scheduler={"max_queue": 7})
    told = {setting.key: (setting.old, setting.new) for setting in difference(config(), new).settings}
    assert told == {
        "scheduler.max_queue": (10_000, 7),
        "kv_cache.policy": ("prefix-aware", "lru"),
        "batching.max_batch_size": (None, 4),
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", 9100),
        ("host", "127.0.0.1"),
        ("admin_port", 9101),
        ("envoy_admin_port", 9102),
        ("run_dir", "elsewhere"),
        ("extproc_listen", "127.0.0.1:9005"),
    ],
)
def test_what_needs_a_restart_is_told_and_stays_as_it_was(key: str, value: object) -> None:
    old, new = config(), config(scheduler={key: value, "max_queue": 7})
    told = difference(old, new)
    assert [setting.key for setting in told.needs_restart] == [f"scheduler.{key}"]
    assert [setting.key for setting in told.settings] == ["scheduler.max_queue"]
    left = difference(old, applicable(old, new))
    assert (left.needs_restart, left.settings) == ((), told.settings)


def test_it_can_be_told_as_json_and_in_a_line() -> None:
    new = config(A | {"weight": 0.5}, A | {"id": "c"}, scheduler={"port": 1, "max_queue": 7})
    told = difference(config(A, B), new)
    as_json = msgspec.json.decode(msgspec.json.encode(told))
    assert as_json["changed"] == [{"node": "a", "keys": ["weight"], "starts_anew": False}]
    assert told.changed == (NodeChange("a", ("weight",), False),)
    assert str(told) == (
        "added: c; removed: b; changed: a (weight); set: scheduler.max_queue; "
        "not before a restart: scheduler.port"
    )
