"""What the ledger takes for right, and what for an offence."""

from collections.abc import Sequence
from typing import Any

import pytest
from chaos_ledger import (
    GROWTH_BYTES,
    GROWTH_FILES,
    OFFENCES,
    Arrival,
    End,
    Exchange,
    Footprint,
    Ledger,
    Remains,
    Verdict,
)
from chaos_schedule import RECOVERY_S, Api, Ask, Kind, NodePlan
from chaos_timeline import Span, Timeline

FLEET = (NodePlan("a", ("m",)), NodePlan("b", ("m",)), NodePlan("c", ("other",)))


def ask(stream: bool = False, model: str = "m", request_id: str = "r") -> Ask:
    return Ask(
        id=request_id,
        at_s=10.0,
        api=Api.CHAT,
        model=model,
        document=0,
        prompt_bytes=1000,
        max_tokens=3,
        stream=stream,
        include_usage=False,
        priority=None,
        leaves_after_s=None,
    )


def exchange(end: End, stream: bool = False, **seen: Any) -> Exchange:
    """A request from second 10 to second 12."""
    return Exchange(ask(stream), 10.0, 12.0, end, **seen)


def ledger(*faults: Span, drained: Sequence[Span] = ()) -> Ledger:
    timeline = Timeline(lambda: 0.0)
    timeline.faults += faults
    timeline.drained += drained
    return Ledger(FLEET, timeline)


def refused(status: int = 503, **seen: Any) -> Exchange:
    given: dict[str, Any] = {"reason": "no_available_node", "retry_after": True} | seen
    return exchange(End.REFUSED, status=status, **given)


BOTH_DOWN = (Span(Kind.KILL, "a", 9.0, 11.0), Span(Kind.DRAIN, "b", 10.5, 20.0))


def test_a_whole_answer_and_a_client_that_left_are_right() -> None:
    assert ledger().judge(exchange(End.WHOLE)) is Verdict.ANSWERED
    assert ledger().judge(exchange(End.LEFT)) is Verdict.LEFT


def test_a_garbled_answer_is_an_offence_whatever_happened() -> None:
    happened = (*BOTH_DOWN, Span(Kind.KILL_ENVOY, "", 9.0, 13.0))
    assert ledger(*happened).judge(exchange(End.GARBLED)) is Verdict.GARBLED


def test_a_refusal_is_right_while_no_node_of_the_model_was_well_from_beginning_to_end() -> None:
    assert ledger(*BOTH_DOWN).judge(refused()) is Verdict.NO_NODE
    assert ledger(*BOTH_DOWN).judge(refused(504, retry_after=False)) is Verdict.NO_NODE
    assert ledger(*BOTH_DOWN).judge(refused(500, reason="")) is Verdict.NO_NODE


@pytest.mark.parametrize("one", BOTH_DOWN)
def test_a_refusal_while_one_node_was_well_is_an_offence(one: Span) -> None:
    assert ledger(one).judge(refused()) is Verdict.FAILED
    assert ledger(one, Span(Kind.KILL, "c", 9.0, 11.0)).judge(refused()) is Verdict.FAILED


@pytest.mark.parametrize("kind", [Kind.SLOW, Kind.BLIND])
def test_slow_nodes_and_nodes_without_metrics_are_well(kind: Kind) -> None:
    down = (Span(Kind.KILL, "a", 9.0, 11.0), Span(kind, "b", 9.0, 11.0))
    assert ledger(*down).judge(refused()) is Verdict.FAILED


def test_a_request_under_which_three_nodes_broke_may_fail_though_a_fourth_was_well() -> None:
    def judged(*broke: str, came_to: str = "xyz") -> Verdict:
        timeline = Timeline(lambda: 0.0)
        timeline.faults += [Span(Kind.HANG, node, 9.0 + at, 10.5 + at) for at, node in enumerate(broke)]
        made = Ledger([NodePlan(node, ("m",)) for node in "wxyz"], timeline)
        made.arrivals = [Arrival(node, "r", 10.0 + at) for at, node in enumerate(came_to)]
        return made.judge(refused(500, reason=""))

    assert judged("x", "y", "z") is Verdict.ALL_BROKE
    assert judged("x", "y") is Verdict.FAILED
    assert judged("x", "y", "z", came_to="xy") is Verdict.FAILED
    assert judged("x", "y", "w") is Verdict.FAILED


def test_a_healed_node_has_a_while_to_be_noticed_and_no_more() -> None:
    killed = Span(Kind.KILL, "a", 9.0, 11.0)
    assert ledger(killed, Span(Kind.KILL, "b", 1.0, 10.1 - RECOVERY_S)).judge(refused()) is Verdict.NO_NODE
    assert ledger(killed, Span(Kind.KILL, "b", 1.0, 9.9 - RECOVERY_S)).judge(refused()) is Verdict.FAILED


def test_a_stall_of_the_machine_is_one_of_every_node() -> None:
    assert ledger(Span(Kind.STALL, "", 10.0, 11.0)).judge(refused()) is Verdict.NO_NODE


def test_a_503_of_the_router_says_when_to_come_back() -> None:
    assert ledger(*BOTH_DOWN).judge(refused(retry_after=False)) is Verdict.UNHELPFUL


@pytest.mark.parametrize("status", [400, 404, 413, 422, 500, 502])
def test_no_other_refusal_of_the_router_is_right(status: int) -> None:
    assert ledger(*BOTH_DOWN).judge(refused(status)) is Verdict.FAILED


def test_no_answer_is_lost_but_for_a_restart_of_envoy() -> None:
    assert ledger(*BOTH_DOWN).judge(exchange(End.NO_ANSWER)) is Verdict.LOST
    for from_s, until_s, verdict in (
        (11.0, 13.0, Verdict.ENVOY_AWAY),
        (8.0, 10.5, Verdict.ENVOY_AWAY),
        (8.0, 9.9, Verdict.LOST),
        (12.1, 13.0, Verdict.LOST),
    ):
        assert ledger(Span(Kind.STOP_ENVOY, "", from_s, until_s)).judge(exchange(End.NO_ANSWER)) is verdict
    for kind in (Kind.KILL_SERVICE, Kind.STOP_SERVICE, Kind.FREEZE_SERVICE):
        assert ledger(Span(kind, "", 11.0, 13.0)).judge(exchange(End.NO_ANSWER)) is Verdict.LOST


@pytest.mark.parametrize(
    "kind", [Kind.KILL, Kind.DIE, Kind.HANG, Kind.FREEZE, Kind.OUT_OF_MEMORY, Kind.FLAKY]
)
def test_a_stream_may_be_cut_by_the_fault_of_its_own_node(kind: Kind) -> None:
    cut = exchange(End.CUT, stream=True, status=200, node="a")
    assert ledger(Span(kind, "a", 11.0, 13.0)).judge(cut) is Verdict.NODE_BROKE
    assert ledger(Span(kind, "b", 11.0, 13.0)).judge(cut) is Verdict.TRUNCATED
    assert ledger(Span(kind, "a", 12.5, 13.0)).judge(cut) is Verdict.TRUNCATED


@pytest.mark.parametrize("kind", [Kind.DRAIN, Kind.BUSY, Kind.SICK, Kind.SLOW, Kind.BLIND, Kind.KILL_SERVICE])
def test_what_does_not_break_a_node_may_not_cut_its_streams(kind: Kind) -> None:
    cut = exchange(End.CUT, stream=True, status=200, node="a")
    assert ledger(Span(kind, "a", 9.0, 13.0)).judge(cut) is Verdict.TRUNCATED


def test_an_answer_that_is_no_stream_is_never_cut_by_its_node() -> None:
    cut = exchange(End.CUT, status=200, node="a")
    assert ledger(Span(Kind.KILL, "a", 11.0, 13.0)).judge(cut) is Verdict.TRUNCATED


def test_a_request_on_a_node_that_does_not_serve_its_model_is_an_offence() -> None:
    book = ledger()
    book.exchanges.append(exchange(End.WHOLE))
    book.arrivals += [Arrival("a", "r", 10.1), Arrival("c", "r", 10.2), Arrival("b", "not over yet", 10.3)]
    assert [arrival.node for arrival, _ in book.wrong_arrivals()] == ["c"]
    assert ["wrong node" in fault for fault in book.faults()] == [True]


@pytest.mark.parametrize(
    ("from_s", "until_s", "wrong"),
    [
        (9.0, 20.0, True),
        (10.05, 20.0, False),  # decided before the drain was answered, for all we know
        (9.0, 10.05, False),  # restored before the request came
    ],
)
def test_a_request_sent_after_the_drain_on_the_drained_node_is_an_offence(
    from_s: float, until_s: float, wrong: bool
) -> None:
    book = ledger(drained=[Span(Kind.DRAIN, "a", from_s, until_s)])
    book.exchanges.append(exchange(End.WHOLE))
    book.arrivals += [Arrival("a", "r", 10.1), Arrival("b", "r", 10.1)]
    assert len(list(book.wrong_arrivals())) == wrong


def test_an_offence_is_told_with_what_was_going_on() -> None:
    book = ledger(Span(Kind.KILL, "b", 9.0, 11.0), Span(Kind.FLAKY, "a", 30.0, 31.0))
    book.exchanges.append(refused(trouble="what the router said"))
    book.arrivals.append(Arrival("b", "r", 10.25))
    (told,) = book.faults()
    assert told.startswith("failed: r ")
    for part in ("10.00 to 12.00", "503", "no_available_node", "b at 10.25", "what the router said"):
        assert part in told
    assert "kill of b from 9.00 to 11.00" in told
    assert "flaky" not in told


def test_what_is_left_at_the_end_is_an_offence() -> None:
    assert ledger().faults() == []
    for remains in (
        Remains(booked={"a": 0, "b": 1}),
        Remains(queued=1),
        Remains(in_engines={"a": 2}),
        Remains(unwell=["a"]),
        Remains(crashes=["Envoy ended by itself"]),
        Remains(after=Footprint(0, GROWTH_FILES + 1)),
        Remains(after=Footprint(GROWTH_BYTES + 1, 0)),
    ):
        book = ledger()
        book.remains = remains
        assert len(book.faults()) == 1


def test_the_ledger_counts_every_request_once() -> None:
    book = ledger(Span(Kind.KILL, "b", 9.0, 11.0))
    book.exchanges += [exchange(End.WHOLE, status=200, attempts=2), exchange(End.NO_ANSWER), refused()]
    lines = dict(line.split(maxsplit=1) for line in str(book).splitlines() if line[0] in "salf")
    assert lines["sent"] == "3"
    assert lines["answered"] == lines["lost"] == lines["failed"] == "1"
    assert "retried                        1 (2 attempts: 1)" in str(book)
    assert "200: 1, 503: 1, none: 1" in str(book)
    assert "median 0.0 s, at most 0.0 s" in str(book)
    assert all(verdict in str(book) for verdict in OFFENCES)


def test_a_span_holds_from_before_the_fault_until_after_the_healing() -> None:
    now = iter((1.0, 2.0))
    timeline = Timeline(lambda: next(now))
    with timeline.during(Kind.KILL, "a"):
        assert str(timeline.faults[0]) == "kill of a from 1.00 to the end"
    assert str(timeline.faults[0]) == "kill of a from 1.00 to 2.00"
