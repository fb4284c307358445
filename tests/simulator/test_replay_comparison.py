"""A recorded load on the fleet of a configuration: who asks for what, and one policy against another."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from replay_support import node_config, request, sharing

from extproc.config import Batching, CachePolicy, Config
from extproc.simulator.replay.comparison import Load, compare, load_on
from extproc.simulator.replay.report import Summary
from extproc.simulator.replay.traces import TraceRequest

FLEET = Config(
    nodes=(
        node_config("a", models=["small-8b"]),
        node_config("b", models=["small-8b"], model_aliases={"chat": "small-8b"}),
        node_config("c", models=["other"]),
    )
)


def asking(*models: str) -> list[TraceRequest]:
    return [replace(sharing(i, 1, 2, arrival_s=float(i)), model=model) for i, model in enumerate(models)]


def asked(load: Load) -> tuple[list[str], list[str]]:
    """The models of its requests, and its nodes."""
    return [one.model for one in load.requests], [node.id for node in load.nodes]


def test_requests_ask_for_what_they_name_where_it_is_served() -> None:
    load = load_on(FLEET, asking("chat", "other", "small-8b"))
    assert asked(load) == (["chat", "other", "small-8b"], ["a", "b", "c"])
    assert load.notes == ()


def test_others_ask_for_the_first_nodes_first_model_and_idle_nodes_are_left_out() -> None:
    load = load_on(FLEET, asking("", "gpt-x", "chat"))
    assert asked(load) == (["small-8b", "small-8b", "chat"], ["a", "b"])
    unknown, idle = load.notes
    assert "2 requests" in unknown and "`small-8b`" in unknown
    assert idle.endswith(": c.")


def test_a_given_model_is_what_all_ask_for() -> None:
    load = load_on(FLEET, asking("chat", "gpt-x"), "other")
    assert asked(load) == (["other", "other"], ["c"])
    assert [note.partition(":")[2] for note in load.notes] == [" a, b."]


def test_a_load_without_shared_prefixes_is_said_to_tell_no_policies_apart() -> None:
    (note,) = load_on(FLEET, [replace(request(i), model=name) for i, name in enumerate(FLEET.models)]).notes
    assert "shared prefixes" in note


def untouched(requests: Sequence[TraceRequest], name: str) -> Sequence[TraceRequest]:
    return requests


def compared(config: Config, requests: Sequence[TraceRequest]) -> dict[str, Summary]:
    load = load_on(config, requests, "small-8b")
    return dict(compare(config, load, list(CachePolicy), 0, untouched))


def conversations() -> list[TraceRequest]:
    """Ten that take turns, each prompt six units long of which the last is new."""
    return [
        sharing(i, *range(100 * (i % 10), 100 * (i % 10) + 5), 10_000 + i, arrival_s=0.7 * i)
        for i in range(200)
    ]


def test_policies_are_compared_under_the_same_load() -> None:
    rows = compared(FLEET, conversations())
    assert list(rows) == list(CachePolicy)
    assert {row.requests for row in rows.values()} == {200}
    assert rows["prefix-aware"].hit_ratio > rows["lru"].hit_ratio


def test_a_comparison_repeats_itself_but_for_the_real_time_of_picks() -> None:
    def numbers() -> list[Summary]:
        rows = compared(FLEET, conversations()).values()
        return [msgspec.structs.replace(row, pick_mean_us=0.0, pick_p99_us=0.0) for row in rows]

    assert numbers() == numbers()


def test_the_cap_and_the_cache_settings_of_the_configuration_count() -> None:
    burst = [sharing(i, i, i + 1, output_tokens=200) for i in range(0, 60, 2)]
    capped = FLEET.model_copy(update={"batching": Batching(max_batch_size=2)})
    assert compared(capped, burst)["lru"].ttft_p99_s > 2 * compared(FLEET, burst)["lru"].ttft_p99_s


def test_who_watches_is_handed_every_replay_by_its_name() -> None:
    seen: list[tuple[str, int]] = []

    def watch(requests: Sequence[TraceRequest], name: str) -> Sequence[TraceRequest]:
        seen.append((name, len(requests)))
        return requests

    load = load_on(FLEET, asking("other", "other"))
    compare(FLEET, load, [CachePolicy.LRU, CachePolicy.ADAPTIVE], 0, watch)
    assert seen == [("lru", 2), ("adaptive", 2)]
