"""How probes and scrapes make a node healthy, degraded or offline."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.health import (
    CALM_S,
    FEWEST_ERRORS,
    FIRST_REST_S,
    FLAPPING_S,
    LONGEST_REST_S,
    METRICS_STALE_S,
    WINDOW_S,
    Event,
    HealthMachine,
)
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
        pytest.param([(REFUSED, DOWN), (OK, LAME), (OK, LAME)], id="a success brings it back, on trial"),
        pytest.param([(REFUSED, DOWN), *[(OK, LAME)] * 5, (OK, UP)], id="a quiet while recovers it"),
        pytest.param([(OK, UP), (FAIL, LAME), (OK, LAME), (OK, UP)], id="also after a single failure"),
        pytest.param(
            [(REFUSED, DOWN), *[(OK, LAME)] * 5, (FAIL, LAME), (OK, LAME), (OK, UP)],
            id="a failure during recovery makes it longer",
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
def test_a_node_whose_last_probes_succeeded_is_never_offline(events: list[Event], now_s: float) -> None:
    machine = HealthMachine(has_metrics=True, now_s=0.0)
    for event in [*events, *[OK] * 16]:
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


class TestOnRequests:
    """A machine whose probes and scrapes are fine."""

    def machine(self) -> HealthMachine:
        machine = HealthMachine(has_metrics=False, now_s=0.0)
        machine.on(OK, 0.0)
        return machine

    def test_errors_that_others_did_not_make_take_a_node_offline(self) -> None:
        machine = self.machine()
        told = [machine.on(Event.FAILED, 0.1 * i) for i in range(FEWEST_ERRORS)]
        assert told == [*[UP] * (FEWEST_ERRORS - 1), DOWN]
        assert machine.is_resting(0.1 * FEWEST_ERRORS)
        assert machine.lives
        assert str(FEWEST_ERRORS) in (machine.fault or "")

    def test_errors_among_more_answers_do_not(self) -> None:
        machine = self.machine()
        for i in range(30):
            assert machine.on(Event.SERVED, 0.1 * i) is UP
            assert machine.on(Event.SERVED, 0.1 * i) is UP
            assert machine.on(Event.FAILED, 0.1 * i) is UP

    def test_errors_far_apart_do_not(self) -> None:
        machine = self.machine()
        for i in range(20):
            assert machine.on(Event.FAILED, i * WINDOW_S / (FEWEST_ERRORS - 1) * 1.01) is UP

    def test_a_node_that_hung_is_offline_at_once(self) -> None:
        machine = self.machine()
        assert machine.on(Event.HUNG, 1.0) is DOWN

    def test_a_node_that_rests_comes_back_by_a_probe_to_one_request_then_to_more(self) -> None:
        machine = self.machine()
        machine.on(Event.HUNG, 1.0)
        assert machine.on(OK, 1.0 + FIRST_REST_S - 0.1) is DOWN
        limits, now_s, health = [], 1.0 + FIRST_REST_S, DOWN
        while health is not UP:
            health, now_s = machine.on(OK, now_s), now_s + 1.0
            limits.append(machine.limit)
        assert limits == [2, 4, 8, 16, 32, None]
        assert machine.fault is None

    def test_probes_bring_no_trust_back_while_a_request_may_hang(self) -> None:
        machine = self.machine()
        machine.on(Event.HUNG, 1.0)
        now_s = 1.0 + FIRST_REST_S
        for _ in range(10):
            machine.on(OK, now_s, in_flight=1, works=False)
        assert machine.limit == 1
        machine.on(OK, now_s, in_flight=1, works=True)
        machine.on(OK, now_s, in_flight=0, works=False)
        assert machine.limit == 4

    def test_answers_bring_trust_back_sooner(self) -> None:
        machine = self.machine()
        machine.on(Event.HUNG, 1.0)
        for _ in range(6):
            health = machine.on(Event.SERVED, 1.0 + FIRST_REST_S)
        assert (health, machine.limit) == (UP, None)

    def test_an_error_on_trial_sends_it_back_for_twice_as_long(self) -> None:
        machine, now_s, rests = self.machine(), 1.0, []
        machine.on(Event.HUNG, now_s)
        for _ in range(6):
            began_s = now_s
            while machine.on(OK, now_s) is DOWN:
                now_s += 0.5
            rests.append(now_s - began_s)
            assert machine.on(Event.FAILED, now_s) is DOWN
        assert rests == [FIRST_REST_S * 2**i for i in range(5)] + [LONGEST_REST_S]

    def test_a_node_whose_probes_flap_must_prove_itself_longer_each_time(self) -> None:
        machine, now_s, proofs = self.machine(), 0.0, []
        for _ in range(6):
            now_s += 1.0
            assert machine.on(REFUSED, now_s) is DOWN
            proofs.append(0)
            while machine.on(OK, now_s) is DOWN:
                proofs[-1] += 1
        assert proofs == [0, 3, 7, 15, 15, 15]
        machine.on(REFUSED, now_s + FLAPPING_S + 1.0)
        assert machine.on(OK, now_s + FLAPPING_S + 1.0) is LAME

    def test_out_of_memory_degrades_and_halves_what_it_gets_until_it_was_calm(self) -> None:
        machine = self.machine()
        assert machine.on(Event.OUT_OF_MEMORY, 10.0, in_flight=20) is LAME
        assert (machine.limit, machine.fault) == (10, "it ran out of memory")
        assert machine.on(Event.OUT_OF_MEMORY, 11.0, in_flight=10) is LAME
        assert machine.limit == 5
        assert machine.is_cautious(11.0 + CALM_S - 0.1)
        for _ in range(100):
            assert machine.on(Event.SERVED, 11.0 + CALM_S - 0.1) is LAME
        assert machine.limit == 5
        for _ in range(3):
            health = machine.on(OK, 11.0 + CALM_S)
        assert (health, machine.limit, machine.is_cautious(11.0 + CALM_S)) == (UP, None, False)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(Event)), st.floats(0, 30), st.integers(0, 100)), max_size=60))
def test_every_node_comes_back_once_all_is_well(story: list[tuple[Event, float, int]]) -> None:
    machine, now_s = HealthMachine(has_metrics=True, now_s=0.0), 0.0
    for event, after_s, in_flight in story:
        now_s += after_s
        health = machine.on(event, now_s, in_flight)
        assert machine.limit is None or machine.limit >= 1
        assert (health is DOWN) or not machine.is_resting(now_s)
    for _ in range(int(LONGEST_REST_S) + 60):
        now_s += 1.0
        machine.on(SEEN, now_s)
        health = machine.on(OK, now_s)
    assert (health, machine.limit) == (UP, None)
