"""How probes and scrapes make a node healthy, degraded or offline."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.health import METRICS_STALE_S, Event, HealthMachine
from extproc.routing.node import Health

OK, FAIL, REFUSED = Event.PROBE_OK, Event.PROBE_FAILED, Event.PROBE_REFUSED
SEEN, UNSEEN = Event.SCRAPE_OK, Event.SCRAPE_FAILED
UP, LAME, DOWN = Health.HEALTHY, Health.DEGRADED, Health.OFFLINE


@pytest.mark.parametrize(
    "story",
    [
        pytest.param([(OK, UP), (OK, UP)], id="the first success makes it healthy"),
        pytest.param([(OK, UP), (FAIL, LAME)], id="one failure degrades"),
        pytest.param([(OK, UP), (FAIL, LAME), (FAIL, DOWN)], id="two failures in a row take it offline"),
        pytest.param([(OK, UP), (REFUSED, DOWN)], id="a refused connection takes it offline at once"),
        pytest.param([(FAIL, LAME), (FAIL, DOWN), (FAIL, DOWN)], id="it may never come up"),
        pytest.param([(REFUSED, DOWN), (OK, LAME), (OK, UP)], id="two successes in a row recover it"),
        pytest.param([(OK, UP), (FAIL, LAME), (OK, LAME), (OK, UP)], id="also after a single failure"),
        pytest.param(
            [(REFUSED, DOWN), (OK, LAME), (FAIL, LAME), (OK, LAME), (OK, UP)],
            id="a failure during recovery starts it anew",
        ),
        pytest.param(
            [(OK, UP), (FAIL, LAME), (OK, LAME), (FAIL, LAME), (OK, LAME)],
            id="every other probe lost is degraded for good, and never offline",
        ),
        pytest.param([(OK, UP), (UNSEEN, UP), (UNSEEN, UP)], id="a lost scrape or two mean nothing"),
        pytest.param([(REFUSED, DOWN), (SEEN, DOWN)], id="a good scrape does not bring it back"),
        pytest.param([(SEEN, LAME), (OK, UP)], id="metrics alone do not make it healthy"),
    ],
)
def test_health_follows_the_probes(story: list[tuple[Event, Health]]) -> None:
    machine = HealthMachine(has_metrics=True, now_s=0.0)
    events = [event for event, _ in story]
    assert [machine.on(event, 0.1 * i) for i, event in enumerate(events)] == [health for _, health in story]


def test_metrics_unseen_for_long_degrade_a_node_and_come_back_with_the_first_scrape() -> None:
    machine = HealthMachine(has_metrics=True, now_s=0.0)
    machine.on(SEEN, 5.0)
    late_s = 5.0 + METRICS_STALE_S
    assert machine.on(OK, late_s) is UP
    assert machine.on(UNSEEN, late_s + 0.1) is LAME
    assert machine.on(OK, late_s + 0.2) is LAME
    assert machine.on(SEEN, late_s + 0.3) is UP


def test_metrics_never_seen_degrade_a_node_after_the_same_time() -> None:
    machine = HealthMachine(has_metrics=True, now_s=50.0)
    assert machine.on(OK, 50.0 + METRICS_STALE_S) is UP
    assert machine.on(OK, 50.1 + METRICS_STALE_S) is LAME


def test_an_engine_without_metrics_is_judged_by_its_probes_alone() -> None:
    machine = HealthMachine(has_metrics=False, now_s=0.0)
    assert machine.on(OK, 10 * METRICS_STALE_S) is UP


@settings(deadline=None)
@given(st.lists(st.sampled_from([OK, FAIL, SEEN, UNSEEN])), st.floats(0, 1000))
def test_a_node_whose_last_probe_succeeded_is_never_offline(events: list[Event], now_s: float) -> None:
    machine = HealthMachine(has_metrics=True, now_s=0.0)
    for event in [*events, OK]:
        health = machine.on(event, now_s)
    assert health is not DOWN


@settings(deadline=None)
@given(st.lists(st.sampled_from(list(Event))))
def test_scrapes_neither_take_a_node_offline_nor_bring_it_back(events: list[Event]) -> None:
    with_scrapes = HealthMachine(has_metrics=True, now_s=0.0)
    without = HealthMachine(has_metrics=True, now_s=0.0)
    for event in events:
        health = with_scrapes.on(event, 1e6)
        if event not in (SEEN, UNSEEN):
            assert (health is DOWN) == (without.on(event, 1e6) is DOWN)
