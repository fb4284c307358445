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
    ("cap", "earlier", "told", "foreign", "expected"),
    [
        pytest.param(None, report(8), report(8), 0, None, id="nobody waits: no cap"),
        pytest.param(None, report(8), report(8, 1), 0, None, id="one may have come within a step"),
        pytest.param(None, None, report(8, 1), 0, None, id="so may one in the first report of all"),
        pytest.param(None, report(8, 1), report(8, 1), 0, 9, id="they stay: what runs is all that can"),
        pytest.param(None, report(8, 9), report(4, 9), 0, 5, id="even if it becomes less"),
        pytest.param(None, report(8, 9), report(11, 6), 0, None, id="it still takes more"),
        pytest.param(None, report(8, None), report(8, None), 0, None, id="no word of a queue: no cap"),
        pytest.param(None, None, report(16, 0, FULL_KV_RATIO), 0, 18, id="its memory is full"),
        pytest.param(None, None, report(0, 0, 0.99), 0, None, id="of what nobody uses"),
        pytest.param(9, report(8, 1), report(12, 1), 0, 13, id="it follows while more run"),
        pytest.param(None, report(8, 4), report(8, 4), 6, 5, id="what others run is not ours"),
        pytest.param(None, report(8, 4), report(8, 4), 12, 2, id="never no request at all"),
        pytest.param(16, report(16, 1), report(16), 0, 18, id="it grows when nobody waits any more"),
        pytest.param(4, report(4, 1), report(4), 0, 5, id="by one at least"),
        pytest.param(16, report(16, 1), report(8), 0, None, id="gone when far more could run than do"),
        pytest.param(16, report(16, 1), report(0), 0, None, id="an engine that began anew has none"),
        pytest.param(8, report(8, 1), report(None, None), 0, None, id="nor one that says nothing"),
    ],
)
def test_a_report_moves_the_cap(
    cap: int | None, earlier: EngineReport | None, told: EngineReport, foreign: int, expected: int | None
) -> None:
    assert engine_cap(cap, earlier, told, foreign) == expected


@given(st.integers(1, 500), st.integers(1, 200))
def test_a_cap_is_gone_in_a_minute_without_a_queue(cap: int | None, running: int) -> None:
    told = report(running)
    for _ in range(60):
        cap = engine_cap(cap, told, told, 0)
    assert cap is None


class TestRouting:
    def tell(self, router: Router, *at_s: float, **said: int) -> None:
        for one_s in at_s:
            for node in router.nodes.values():
                node.take_report(EngineReport(one_s, **said), ours=node.in_flight)
                router.reported(node)

    def test_new_work_waits_here_while_the_engine_has_a_queue(self) -> None:
        router = make_router(make_node("gpu"))
        decisions = [decided(router, make_request()) for _ in range(4)]
        self.tell(router, 0.0, 1.0, running=2, waiting=2)
        assert router.decide(make_request(), 1.0) is None
        for decision in decisions[:2]:
            decision.booking.release(1.0)
        decided(router, make_request(), 1.0)
        assert router.decide(make_request(), 1.0) is None

    def test_old_reports_stop_nothing(self) -> None:
        router = make_router(make_node("gpu"))
        for _ in range(2):
            decided(router, make_request())
        self.tell(router, 0.0, 1.0, running=1, waiting=1)
        assert router.decide(make_request(), 1.0 + REPORT_FRESH_S) is None
        assert router.decide(make_request(), 1.1 + REPORT_FRESH_S) is not None

    def test_a_queue_of_long_ago_is_not_that_of_now(self) -> None:
        router = make_router(make_node("gpu"))
        for _ in range(3):
            decided(router, make_request())
        self.tell(router, 0.0, 60.0, running=1, waiting=2)
        assert router.decide(make_request(), 60.0) is not None

    def test_a_cap_of_ours_is_the_only_one(self) -> None:
        router = make_router(make_node("gpu"), cap=3)
        for _ in range(2):
            decided(router, make_request())
        self.tell(router, 0.0, 1.0, running=1, waiting=1)
        decided(router, make_request(), 1.0)

    def test_nothing_waits_while_another_node_has_no_queue(self) -> None:
        """Where it goes is a matter of cost: a queue may be shorter than the way without the prefix."""
        router = make_router(make_node("fast", hardware="h100-80g"), make_node("slow", hardware="a6000"))
        fast = router.nodes["fast"]
        for _ in range(3):
            decided(router, make_request(affinity="fast"))
        for at_s in (0.0, 1.0):
            fast.take_report(EngineReport(at_s, running=1, waiting=2), ours=3)
            router.reported(fast)
        assert decided(router, make_request(), 1.0) is not None
        assert router.decide(make_request(affinity="fast"), 1.0) is None
