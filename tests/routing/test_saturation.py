"""What an engine's queue tells of how many requests it runs at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_fleet import decided, make_node, make_request, make_router

from extproc.routing.node import REPORT_FRESH_S, EngineReport
from extproc.routing.router import Router
from extproc.routing.saturation import FULL_KV_RATIO, engine_cap


def report(running: int | None, waiting: int | None = 0, kv: float | None = None) -> EngineReport:
    return EngineReport(0.0, running=running, waiting=waiting, kv_used_ratio=kv)


@pytest.mark.parametrize(
    ("cap", "told", "foreign", "expected"),
    [
        pytest.param(None, report(8), 0, None, id="nobody waits: no cap"),
        pytest.param(None, report(8, 1), 0, 8, id="one waits: what runs is all that can"),
        pytest.param(None, report(8, None), 0, None, id="no word of a queue: no cap"),
        pytest.param(None, report(8, 0, FULL_KV_RATIO), 0, 8, id="its memory is full"),
        pytest.param(8, report(12, 1), 0, 8, id="the first such report counts while they wait"),
        pytest.param(8, report(6, 1), 0, 6, id="but less is less"),
        pytest.param(None, report(8, 1), 5, 3, id="what others run is not ours"),
        pytest.param(None, report(8, 1), 9, 1, id="never no request at all"),
        pytest.param(16, report(16), 0, 18, id="it grows when nobody waits any more"),
        pytest.param(4, report(4), 0, 5, id="by one at least"),
        pytest.param(16, report(8), 0, None, id="and is gone when far more could run than do"),
        pytest.param(8, report(None, None), 0, None, id="an engine that says nothing has none"),
    ],
)
def test_a_report_moves_the_cap(
    cap: int | None, told: EngineReport, foreign: int, expected: int | None
) -> None:
    assert engine_cap(cap, told, foreign) == expected


@given(st.integers(1, 500), st.integers(1, 200))
def test_a_cap_is_gone_in_a_minute_without_a_queue(cap: int | None, running: int) -> None:
    for _ in range(60):
        cap = engine_cap(cap, report(running), 0)
    assert cap is None


class TestRouting:
    def tell(self, router: Router, at_s: float = 0.0, **said: float) -> None:
        for node in router.nodes.values():
            node.take_report(EngineReport(at_s, **said), ours=node.in_flight)
            router.reported(node)

    def test_new_work_waits_here_while_the_engine_has_a_queue(self) -> None:
        router = make_router(make_node("gpu"))
        decisions = [decided(router, make_request()) for _ in range(4)]
        self.tell(router, running=3, waiting=1)
        assert router.decide(make_request(), 0.0) is None
        for decision in decisions[:2]:
            decision.booking.release(0.0)
        decided(router, make_request())
        assert router.decide(make_request(), 0.0) is None

    def test_old_reports_stop_nothing(self) -> None:
        router = make_router(make_node("gpu"))
        decided(router, make_request())
        self.tell(router, running=1, waiting=1)
        assert router.decide(make_request(), REPORT_FRESH_S) is None
        assert router.decide(make_request(), REPORT_FRESH_S + 0.1) is not None

    def test_a_cap_of_ours_is_the_only_one(self) -> None:
        router = make_router(make_node("gpu"), cap=3)
        decided(router, make_request())
        self.tell(router, running=1, waiting=1)
        decided(router, make_request())

    def test_a_node_without_a_queue_is_taken_first(self) -> None:
        router = make_router(make_node("fast", hardware="h100-80g"), make_node("slow", hardware="a6000"))
        decided(router, make_request(affinity="fast"))
        fast = router.nodes["fast"]
        fast.take_report(EngineReport(0.0, running=1, waiting=2), ours=1)
        router.reported(fast)
        assert decided(router, make_request()).node.id == "slow"
