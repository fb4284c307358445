"""The metrics, as Prometheus reads them."""

import re
import sys
import threading

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from telemetry_fleet import LABELS, MODEL, Fleet, answer, use_everything

from extproc import __version__
from extproc.config import CachePolicy
from extproc.openai.usage import Usage
from extproc.routing.admission import Waiter
from extproc.routing.loads import Work
from extproc.routing.node import REPORT_FRESH_S, EngineReport, Health
from extproc.routing.outcome import Ended
from extproc.routing.window import WINDOW_S
from extproc.telemetry import CONTENT_TYPE, OTHER, RETRY_REASONS, Telemetry

REFERENCE = """\
# HELP inferact_requests_total Requests routed since scheduler start
# TYPE inferact_requests_total counter
# HELP inferact_kv_cache_used_ratio KV cache utilization (0.0-1.0)
# TYPE inferact_kv_cache_used_ratio gauge
# HELP inferact_prefix_hit_ratio Prefix cache hit rate (rolling 5m)
# TYPE inferact_prefix_hit_ratio gauge
# HELP inferact_request_latency_seconds Request latency histogram
# TYPE inferact_request_latency_seconds histogram
# HELP inferact_oom_events_total OOM events recovered by the scheduler
# TYPE inferact_oom_events_total counter
"""


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_help_and_type_of_the_reference_stand_word_for_word_even_before_any_event(fleet: Fleet) -> None:
    lines = fleet.telemetry.render().decode().splitlines()
    missing = [line for line in REFERENCE.splitlines() if line not in lines]
    assert missing == []


def test_every_metric_has_exactly_its_labels(fleet: Fleet) -> None:
    use_everything(fleet)
    labels: dict[str, set[str]] = {}
    for name, pairs in fleet.samples():
        names = {label for label, _ in pairs}
        assert labels.setdefault(name, names) == names
    assert labels == LABELS


def test_every_sample_belongs_to_a_metric_with_help_and_type(fleet: Fleet) -> None:
    use_everything(fleet)
    for family in text_string_to_metric_families(fleet.telemetry.render().decode()):
        assert family.documentation
        assert family.type in {"counter", "gauge", "histogram"}
        assert re.fullmatch("inferact_[a-z_]+", family.name)


def test_there_are_no_created_series(fleet: Fleet) -> None:
    use_everything(fleet)
    assert b"_created" not in fleet.telemetry.render()


def test_the_content_type_is_the_one_of_the_text_format() -> None:
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"


def test_the_registry_is_its_own(fleet: Fleet) -> None:
    use_everything(fleet)
    assert Fleet().value("requests_total", node="node-a", model=MODEL) == 0
    assert b"inferact" not in generate_latest(REGISTRY)


def test_a_served_request_counts_on_its_node_and_in_the_sums(fleet: Fleet) -> None:
    fleet.telemetry.served(fleet.node, MODEL, 0.7)
    fleet.telemetry.served(fleet.node, "llama", 0.3)
    assert fleet.value("requests_total", node="node-a", model=MODEL) == 1
    assert fleet.value("requests_total", node="node-a", model="llama") == 1
    assert fleet.value("request_latency_seconds_count", node="node-a") == 2
    assert fleet.value("request_latency_seconds_sum", node="node-a") == pytest.approx(1.0)
    assert fleet.telemetry.requests_routed == fleet.node.requests_total == 2
    assert list(fleet.node.latencies_s) == [0.7, 0.3]


def test_latency_buckets_hold_half_a_second_one_second_and_ten_minutes(fleet: Fleet) -> None:
    for duration_s in (0.5, 0.7, 1.0, 599.0, 601.0):
        fleet.telemetry.served(fleet.node, MODEL, duration_s)
    buckets = {
        le: fleet.value("request_latency_seconds_bucket", node="node-a", le=le)
        for le in ("0.5", "1.0", "600.0", "+Inf")
    }
    assert buckets == {"0.5": 1, "1.0": 3, "600.0": 4, "+Inf": 5}


def test_decisions_are_told_apart_below_a_millisecond(fleet: Fleet) -> None:
    fleet.telemetry.decided(40e-6)
    fleet.telemetry.decided(400e-6)
    assert fleet.value("decision_seconds_bucket", le="5e-05") == 1
    assert fleet.value("decision_seconds_bucket", le="0.0005") == 2


def test_all_that_can_happen_to_a_configured_node_starts_at_zero(fleet: Fleet) -> None:
    assert fleet.value("requests_total", node="node-b", model=MODEL) == 0
    assert fleet.value("requests_total", node="node-b", model="llama") == 0
    assert fleet.value("request_latency_seconds_count", node="node-b") == 0
    assert fleet.value("oom_events_total", node="node-b") == 0
    assert fleet.value("rejections_total", reason="queue_full") == 0
    assert fleet.value("failopen_requests_total") == 0


def test_a_drain_shows(fleet: Fleet) -> None:
    fleet.node.drained = True
    assert (fleet.value("node_drained", node="node-a"), fleet.value("node_drained", node="node-b")) == (1, 0)


def test_single_events_are_counted(fleet: Fleet) -> None:
    use_everything(fleet)
    assert fleet.value("retries_total", node="node-b", reason="503") == 1
    assert fleet.value("rejections_total", reason="queue_full") == 1
    assert fleet.value("queue_wait_seconds_sum") == pytest.approx(0.2)
    assert fleet.value("loop_lag_seconds_count") == 1
    assert fleet.value("failopen_requests_total") == 1
    assert fleet.value("oom_events_total", node="node-a") == 1
    assert fleet.value("build_info", version=__version__) == 1


@pytest.mark.parametrize("reason", sorted(RETRY_REASONS))
def test_known_retry_reasons_keep_their_name(fleet: Fleet, reason: str) -> None:
    fleet.telemetry.retried("node-a", reason)
    assert fleet.value("retries_total", node="node-a", reason=reason) == 1


@pytest.mark.parametrize("name", ["", "gpt-9", 'x",node="forged"} 1\nfake', "é" * 500, "node-A", "\ud800"])
def test_names_from_outside_make_no_series(fleet: Fleet, name: str) -> None:
    fleet.telemetry.retried(name, "503")
    fleet.telemetry.oom(name)
    fleet.telemetry.retried("node-a", name)
    fleet.telemetry.served(fleet.node, name, 0.1)
    fleet.telemetry.served(fleet.node, name, 0.1)
    assert name not in {value for _, pairs in fleet.samples() for _, value in pairs}
    assert fleet.value("retries_total", node="node-a", reason=OTHER) == 1
    assert fleet.value("requests_total", node="node-a", model=OTHER) == 2


def test_prompt_tokens_are_counted_by_where_their_kv_came_from(fleet: Fleet) -> None:
    for usage in (Usage(100, 10, 60), Usage(50, 10, 0), Usage(7, 1, None)):
        fleet.telemetry.answered(fleet.node, answer(usage))
    tokens = {
        source: fleet.value("prompt_tokens_total", node="node-a", source=source)
        for source in ("cached", "computed", "unknown")
    }
    assert tokens == {"cached": 60, "computed": 90, "unknown": 7}
    assert fleet.value("output_tokens_total", node="node-a") == 21


def test_only_whole_streams_can_lack_a_usage(fleet: Fleet) -> None:
    fleet.telemetry.answered(fleet.node, answer(ttft_s=0.1))
    for other in (
        answer(),  # no stream: detokenize has none
        answer(Usage(1), ttft_s=0.1),
        answer(ended=Ended.CLIENT_LEFT, ttft_s=0.1),
        answer(ended=Ended.BROKEN, ttft_s=0.1),
        answer(ended=Ended.ERROR, ttft_s=0.1),
    ):
        fleet.telemetry.answered(fleet.node, other)
    assert fleet.value("streams_without_usage_total", node="node-a") == 1
    assert fleet.value("ttft_seconds_count", node="node-a") == 5


def test_counters_of_answers_begin_at_zero(fleet: Fleet) -> None:
    assert fleet.value("streams_without_usage_total", node="node-b") == 0
    assert fleet.value("output_tokens_total", node="node-b") == 0
    for source in ("cached", "computed", "unknown"):
        assert fleet.value("prompt_tokens_total", node="node-b", source=source) == 0


def test_the_hit_ratio_is_that_of_answers_where_the_engine_has_no_metrics(fleet: Fleet) -> None:
    fleet.telemetry.answered(fleet.node, answer(Usage(100, 10, 60)))
    fleet.telemetry.answered(fleet.node, answer(Usage(1000, 10, None)))
    assert fleet.value("prefix_hit_ratio", node="node-a") == 0.6
    fleet.node.prefix_hit_ratio = 0.4
    assert fleet.value("prefix_hit_ratio", node="node-a") == 0.4
    fleet.node.prefix_hit_ratio = None
    fleet.clock.now_s += WINDOW_S
    assert fleet.value("prefix_hit_ratio", node="node-a") is None


def test_cached_tokens_of_answers_are_better_knowledge_than_metrics(fleet: Fleet) -> None:
    fleet.node.report = EngineReport(fleet.clock(), running=1)
    fleet.telemetry.answered(fleet.node, answer(Usage(100, 10, None)))
    assert fleet.value("knowledge_level", node="node-a", level="metrics") == 1
    fleet.telemetry.answered(fleet.node, answer(Usage(100, 10, 0)))
    assert fleet.value("knowledge_level", node="node-a", level="metrics") == 0
    assert fleet.value("knowledge_level", node="node-a", level="usage") == 1
    fleet.clock.now_s += WINDOW_S
    assert fleet.value("knowledge_level", node="node-a", level="hardware") == 1


def test_events_are_the_best_knowledge_while_they_tell_all(fleet: Fleet) -> None:
    fleet.telemetry.answered(fleet.node, answer(Usage(100, 10, 0)))
    fleet.node.events.exact = True
    assert fleet.value("knowledge_level", node="node-a", level="events") == 1
    assert fleet.value("knowledge_level", node="node-a", level="usage") == 0
    fleet.node.events.exact = False
    assert fleet.value("knowledge_level", node="node-a", level="usage") == 1


def test_messages_of_events_are_counted_where_there_may_be_some(fleet: Fleet) -> None:
    fleet.node.events.messages, fleet.node.events.gaps = 7, 1
    assert fleet.value("kv_event_messages_total", node="node-a") == 7
    assert fleet.value("kv_event_gaps_total", node="node-a") == 1
    assert fleet.value("kv_event_errors_total", node="node-a") == 0
    assert fleet.value("kv_event_messages_total", node="node-b") is None


def test_the_prediction_error_is_that_of_five_minutes(fleet: Fleet) -> None:
    assert fleet.value("prediction_error_ratio", node="node-a") is None
    fleet.node.predictions.add(30, 200, fleet.clock())
    assert fleet.value("prediction_error_ratio", node="node-a") == 0.15
    fleet.clock.now_s += WINDOW_S
    assert fleet.value("prediction_error_ratio", node="node-a") is None


def test_what_nobody_knows_has_no_sample(fleet: Fleet) -> None:
    fleet.node.report = EngineReport(fleet.clock(), running=1)
    assert fleet.value("kv_cache_used_ratio", node="node-a") is None
    assert fleet.value("prefix_hit_ratio", node="node-a") is None


def test_a_known_zero_is_a_sample(fleet: Fleet) -> None:
    fleet.node.report = EngineReport(fleet.clock(), kv_used_ratio=0.0)
    fleet.node.prefix_hit_ratio = 0.0
    assert fleet.value("kv_cache_used_ratio", node="node-a") == 0
    assert fleet.value("prefix_hit_ratio", node="node-a") == 0


def test_a_stale_report_has_no_sample(fleet: Fleet) -> None:
    fleet.node.report = EngineReport(fleet.clock(), kv_used_ratio=0.421)
    assert fleet.value("kv_cache_used_ratio", node="node-a") == 0.421
    assert fleet.value("knowledge_level", node="node-a", level="metrics") == 1
    fleet.clock.now_s += REPORT_FRESH_S + 0.1
    assert fleet.value("kv_cache_used_ratio", node="node-a") is None
    assert fleet.value("knowledge_level", node="node-a", level="metrics") == 0
    assert fleet.value("knowledge_level", node="node-a", level="hardware") == 1


@pytest.mark.parametrize("health", Health)
def test_a_node_is_in_one_state_at_a_time(fleet: Fleet, health: Health) -> None:
    fleet.node.health = health
    states = {state: fleet.value("node_status", node="node-a", status=state.value) for state in Health}
    assert states == {state: float(state is health) for state in Health}


@pytest.mark.parametrize(
    ("configured", "in_force"),
    [("lru", "lru"), ("prefix-aware", "prefix-aware"), ("adaptive", "lru")],
)
def test_the_policy_in_force_is_the_one_that_is_active(configured: str, in_force: str) -> None:
    fleet = Fleet(configured)
    active = {name.value: fleet.value("policy_active", policy=name) for name in CachePolicy}
    assert active == {name.value: float(name == in_force) for name in CachePolicy}


def test_requests_in_flight_follow_the_bookings(fleet: Fleet) -> None:
    booking = fleet.router.book(fleet.node, Work(100.0, 10.0, 1.0), fleet.clock())
    assert fleet.value("requests_in_flight", node="node-a") == 1
    booking.release(fleet.clock())
    assert fleet.value("requests_in_flight", node="node-a") == 0


def test_the_queue_is_counted_by_priority_without_those_who_left() -> None:
    fleet = Fleet(cap=1)
    waiting = [fleet.submit(priority) for priority in (5, 5, 0, 10, 10, 10)][2:]
    left = waiting[-1]
    assert isinstance(left, Waiter)
    fleet.admission.leave(left)
    depths = {priority: fleet.value("queue_depth", priority=str(priority)) for priority in range(11)}
    assert depths == {priority: {0: 1, 10: 2}.get(priority, 0) for priority in range(11)}


def test_a_removed_node_keeps_its_counts_and_loses_its_state(fleet: Fleet) -> None:
    use_everything(fleet)
    removed = fleet.router.nodes.pop("node-a")
    fleet.telemetry.served(removed, MODEL, 0.7)  # a request that it still had
    fleet.telemetry.oom("node-a")
    assert fleet.value("requests_total", node="node-a", model=MODEL) == 2
    assert fleet.value("oom_events_total", node="node-a") == 1
    assert fleet.telemetry.requests_routed == 2
    for gauge in ("kv_cache_used_ratio", "prefix_hit_ratio", "requests_in_flight", "engine_cap"):
        assert fleet.value(gauge, node="node-a") is None


def test_a_scrape_in_a_thread_survives_a_fleet_that_changes(fleet: Fleet) -> None:
    failures: list[Exception] = []
    scraper = threading.Thread(target=_scrape, args=(fleet.telemetry, failures))
    nodes, spare = fleet.router.nodes, fleet.router.nodes["node-b"]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        scraper.start()
        while scraper.is_alive():
            for number in range(50):
                nodes[f"node-{number}"] = spare
            for number in range(50):
                del nodes[f"node-{number}"]
    finally:
        sys.setswitchinterval(before)
    assert failures == []


def _scrape(telemetry: Telemetry, failures: list[Exception]) -> None:
    try:
        for _ in range(20):
            telemetry.render()
    except Exception as error:
        failures.append(error)


def test_the_series_of_a_node_that_left_end(fleet: Fleet) -> None:
    use_everything(fleet)
    fleet.router.set_nodes(node for node in fleet.router.nodes.values() if node.id != "node-a")
    fleet.telemetry.forget("node-a")
    labels = [dict(labels) for _, labels in fleet.samples()]
    assert {one["node"] for one in labels if "node" in one} == {"node-b"}


def test_a_node_that_comes_back_counts_from_zero(fleet: Fleet) -> None:
    fleet.telemetry.served(fleet.node, MODEL, 0.7)
    fleet.telemetry.forget("node-a")
    fleet.telemetry.served(fleet.node, MODEL, 0.7)
    assert fleet.value("requests_total", node="node-a", model=MODEL) == 1
