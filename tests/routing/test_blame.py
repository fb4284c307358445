"""Whose fault a failure was: what attempts and ends of requests make happen to nodes."""

from typing import Any

import pytest
from routing_fleet import decided, make_node, make_request, make_router

from extproc.routing.blame import (
    LEAST_HANG_S,
    LOG_LAG_S,
    MEMORY_EVENT_S,
    SILENT_TIMEOUTS,
    UNPAIRED_KEPT,
    Blame,
    Followed,
)
from extproc.routing.health import WINDOW_S, Event
from extproc.routing.node import REPORT_FRESH_S, EngineReport, Node
from extproc.routing.outcome import Attempt, Ended, Failure, Outcome
from extproc.routing.router import FALLBACKS, Decision

ERRORS = (Failure.ERROR, Failure.ENGINE_DEATH, Failure.UNREACHED, Failure.LOST)
SERVED, FAILED, HUNG, OUT_OF_MEMORY = Event.SERVED, Event.FAILED, Event.HUNG, Event.OUT_OF_MEMORY


class Story:
    """A fleet, and what its log says, one thing after the other. Requests go by a decision of the start."""

    def __init__(self, *nodes: Node) -> None:
        self.router = make_router(*nodes or (make_node(name) for name in "abc"))
        self.events: list[tuple[str, Event]] = []
        self.doubted: list[str] = []
        self.blame = Blame(self.router, self)
        self.now_s = 100.0
        self.first = self.asked()

    def happened(self, node_id: str, event: Event) -> None:
        self.events.append((node_id, event))

    def doubt(self, node_id: str) -> None:
        self.doubted.append(node_id)

    def asked(self, prompt: str = "hello") -> Decision:
        """A request is sent to a node now."""
        return decided(self.router, make_request(prompt=prompt), self.now_s)

    def fails(
        self,
        node_id: str,
        failure: Failure,
        key: str = "x",
        on: Decision | None = None,
        lasted_s: float = 0.1,
        by_envoy: bool = False,
    ) -> None:
        attempt = Attempt(key, node_id, failure, "why", lasted_s)
        self.blame.failed(attempt, None if by_envoy else on or self.first, self.now_s)

    def ends(
        self,
        node_id: str,
        key: str = "x",
        on: Decision | None = None,
        attempts: int = 1,
        by_envoy: bool = False,
        **facts: Any,
    ) -> Followed:
        said = {"status": 200, "ended": Ended.COMPLETE, "duration_s": 1.0, **facts}
        outcome = Outcome(node_id=node_id, attempts=attempts, **said)
        return self.blame.ended(key, outcome, None if by_envoy else on or self.first, self.now_s)

    def reports(self, node_id: str, work: int | None, kv_used_ratio: float | None = None) -> None:
        node = self.router.nodes[node_id]
        node.take_report(EngineReport(self.now_s, running=1, work=work, kv_used_ratio=kv_used_ratio), 0)

    def passes(self, seconds: float) -> None:
        self.now_s += seconds

    @property
    def news(self) -> list[tuple[str, Event]]:
        """What happened since the last look."""
        events, self.events = self.events, []
        return events


def test_a_very_short_wait_in_vain_is_no_hang() -> None:
    story = Story()
    story.reports("a", work=1)
    story.passes(REPORT_FRESH_S + 1.0)
    for number in range(2 * SILENT_TIMEOUTS):
        story.fails("a", Failure.TIMED_OUT, key=f"x{number}", lasted_s=LEAST_HANG_S / 2)
        story.passes(1.0)
    assert HUNG not in [event for _, event in story.news]


class TestAnAnswerThatFailed:
    @pytest.mark.parametrize("failure", ERRORS)
    def test_counts_against_its_node_once_another_has_served(self, failure: Failure) -> None:
        story = Story()
        story.fails("a", failure)
        assert story.news == []
        story.ends("b", attempts=2)
        assert story.news == [("b", SERVED), ("a", FAILED)]

    def test_counts_against_each_node_that_had_it(self) -> None:
        story = Story()
        story.fails("a", Failure.ERROR)
        story.fails("b", Failure.LOST)
        story.ends("c", attempts=3)
        assert story.news == [("c", SERVED), ("a", FAILED), ("b", FAILED)]

    def test_does_not_count_again_against_a_node_that_fell_since(self) -> None:
        story = Story()
        story.fails("a", Failure.LOST)
        story.passes(1.0)
        story.router.nodes["a"].fell_s = story.now_s
        story.passes(60.0)
        story.ends("b", attempts=2)
        assert story.news == [("b", SERVED)]

    @pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
    def test_blames_nobody_if_no_other_node_gave_an_answer(self, status: int) -> None:
        story = Story()
        story.fails("a", Failure.ENGINE_DEATH)
        story.fails("b", Failure.ENGINE_DEATH)
        story.ends("b", attempts=2, status=status, ended=Ended.ERROR)
        assert story.news == []

    @pytest.mark.parametrize("ended", [Ended.CLIENT_LEFT, Ended.BROKEN, Ended.ERROR])
    def test_blames_nobody_if_the_answer_of_the_other_is_not_whole(self, ended: Ended) -> None:
        story = Story()
        story.fails("a", Failure.ERROR)
        story.ends("b", attempts=2, ended=ended)
        assert story.news == []

    def test_blames_nobody_if_the_same_node_did_better_next_time(self) -> None:
        """Where Envoy chose by itself, the only node is its own fallback."""
        story = Story()
        story.fails("a", Failure.LOST)
        story.ends("a", attempts=2)
        assert story.news == [("a", SERVED)]

    def test_blames_nobody_if_its_queue_was_full(self) -> None:
        story = Story()
        story.fails("a", Failure.OVERLOADED)
        story.ends("b", attempts=2)
        assert story.news == [("b", SERVED)]
        assert story.doubted == []

    def test_is_paired_with_the_end_of_its_own_request(self) -> None:
        story = Story()
        story.fails("a", Failure.ERROR, "x")
        story.fails("b", Failure.ERROR, "y")
        story.ends("c", "y", attempts=2)
        assert story.news == [("c", SERVED), ("b", FAILED)]
        assert story.blame.unpaired == 1

    def test_is_told_as_followed_by_another_whatever_became_of_that(self) -> None:
        story = Story()
        story.fails("a", Failure.ERROR)
        story.fails("b", Failure.ERROR)
        followed = story.ends("b", attempts=2, status=500, ended=Ended.ERROR)
        assert [attempt.node_id for attempt in followed.attempts] == ["a"]

    def test_of_a_node_that_is_gone_is_passed_over(self) -> None:
        story = Story()
        story.fails("gone", Failure.OUT_OF_MEMORY)
        story.ends("b", attempts=2)
        story.ends("gone")
        assert story.news == [("b", SERVED)]
        assert story.doubted == []


class TestOneClientsBadRequests:
    def test_that_fail_everywhere_take_no_node_offline(self) -> None:
        story = Story()
        for number in range(200):
            for node_id in "abc":
                story.fails(node_id, Failure.ENGINE_DEATH, f"x-{number}")
            story.ends("c", f"x-{number}", attempts=3, status=500, ended=Ended.ERROR)
            story.passes(0.01)
        assert story.news == []

    def test_that_fail_on_the_only_node_do_not_take_it_offline(self) -> None:
        story = Story(make_node("a"))
        for number in range(200):
            story.fails("a", Failure.ENGINE_DEATH, f"x-{number}")
            story.ends("a", f"x-{number}", status=500, ended=Ended.ERROR)
        assert story.news == []

    def test_that_break_streams_take_no_node_offline_if_nobody_else_asks(self) -> None:
        story = Story()
        for number in range(200):
            asked = story.asked(f"prompt {number}")
            story.passes(0.01)
            story.ends("abc"[number % 3], on=asked, ended=Ended.ERROR, ttft_s=0.005)
        assert story.news == []

    def test_that_break_streams_again_and_again_count_once(self) -> None:
        """Even if others are served elsewhere meanwhile."""
        story = Story()
        for number in range(200):
            asked = story.asked("the same prompt")
            story.passes(0.01)
            story.ends("abc"[number % 3], "good")
            story.ends("abc"[(number + 1) % 3], "bad", on=asked, ended=Ended.ERROR, ttft_s=0.005)
        assert [event for _, event in story.news].count(FAILED) == 1

    def test_that_break_streams_never_take_the_last_node_of_a_model(self) -> None:
        """Nodes that serve other models are no proof of anything."""
        story = Story(make_node("a"), make_node("b", "another-model"))
        for number in range(50):
            asked = story.asked(f"prompt {number}")
            story.passes(0.01)
            story.ends("b", "good")
            story.ends("a", "bad", on=asked, ended=Ended.BROKEN, ttft_s=0.005)
        assert ("a", FAILED) not in story.news


class TestAStreamThatBreaksOff:
    @pytest.mark.parametrize("ended", [Ended.BROKEN, Ended.ERROR])
    def test_counts_if_another_node_served_meanwhile_and_this_one_did_not(self, ended: Ended) -> None:
        story = Story()
        asked = story.asked()
        story.passes(1.0)
        story.ends("b", "good")
        story.ends("a", "bad", on=asked, ended=ended, ttft_s=0.5)
        assert story.news == [("b", SERVED), ("a", FAILED)]

    def test_does_not_count_if_the_node_served_others_meanwhile(self) -> None:
        story = Story()
        asked = story.asked()
        story.passes(1.0)
        story.ends("a", "good")
        story.ends("b", "good")
        story.ends("a", "bad", on=asked, ended=Ended.ERROR, ttft_s=0.5)
        assert ("a", FAILED) not in story.news

    def test_does_not_count_if_others_served_only_before(self) -> None:
        story = Story()
        story.ends("b", "good")
        story.passes(1.0)
        asked = story.asked()
        story.ends("a", "bad", on=asked, ended=Ended.ERROR, ttft_s=0.5)
        assert ("a", FAILED) not in story.news

    def test_counts_again_for_another_prompt_or_later(self) -> None:
        story = Story()
        for prompt, wait_s in (("one", 0.0), ("two", 0.0), ("one", WINDOW_S)):
            story.passes(wait_s)
            asked = story.asked(prompt)
            story.passes(1.0)
            story.ends("b", "good")
            story.ends("a", "bad", on=asked, ended=Ended.ERROR, ttft_s=0.5)
        assert story.news.count(("a", FAILED)) == 3

    @pytest.mark.parametrize("ended", [Ended.BROKEN, Ended.ERROR, Ended.TIMED_OUT])
    def test_makes_its_node_doubted(self, ended: Ended) -> None:
        story = Story()
        story.ends("a", ended=ended, ttft_s=0.5)
        assert story.doubted == ["a"]

    def test_before_its_first_token_is_held_against_the_prompt(self) -> None:
        """Engines send the status of a stream at once, before they do anything."""
        for ttft_s, suspected in ((None, True), (0.5, False)):
            story = Story()
            asked = story.asked()
            story.ends("a", on=asked, ended=Ended.BROKEN, ttft_s=ttft_s)
            story.router.quarantine.died("a", story.now_s)
            assert story.router.quarantine.dead_nodes(asked.blocks.fingerprint) == int(suspected)

    def test_because_the_client_left_says_nothing(self) -> None:
        story = Story()
        story.ends("a", ended=Ended.CLIENT_LEFT)
        assert (story.news, story.doubted) == ([], [])


class TestAWholeAnswer:
    def test_is_good_news_of_its_node(self) -> None:
        story = Story()
        story.ends("b")
        assert story.news == [("b", SERVED)]

    def test_clears_its_prompt(self) -> None:
        story = Story()
        asked = story.asked()
        for node_id in "ab":
            story.fails(node_id, Failure.LOST, on=asked)
            story.router.quarantine.died(node_id, story.now_s)
        assert story.router.quarantine.holds(asked.blocks.fingerprint, story.now_s)
        story.ends("c", on=asked, attempts=3)
        assert not story.router.quarantine.holds(asked.blocks.fingerprint, story.now_s)

    @pytest.mark.parametrize("status", [400, 404, 422])
    def test_that_is_the_clients_own_error_says_nothing(self, status: int) -> None:
        """A server may refuse requests well when its engine is long dead."""
        story = Story()
        story.ends("a", status=status, ended=Ended.ERROR)
        assert story.news == []


class TestALostConnection:
    @pytest.mark.parametrize("failure", [Failure.LOST, Failure.UNREACHED, Failure.ENGINE_DEATH])
    def test_makes_the_node_doubted_at_once(self, failure: Failure) -> None:
        story = Story()
        story.fails("a", failure)
        assert story.doubted == ["a"]

    @pytest.mark.parametrize(
        ("failure", "suspected"),
        [
            (Failure.LOST, True),
            (Failure.ENGINE_DEATH, True),
            (Failure.UNREACHED, False),
            (Failure.TIMED_OUT, False),
            (Failure.ERROR, False),
            (Failure.OVERLOADED, False),
            (Failure.OUT_OF_MEMORY, False),
        ],
    )
    def test_is_held_against_a_prompt_that_the_engine_had(self, failure: Failure, suspected: bool) -> None:
        story = Story()
        asked = story.asked()
        story.fails("a", failure, on=asked)
        story.router.quarantine.died("a", story.now_s)
        assert story.router.quarantine.dead_nodes(asked.blocks.fingerprint) == int(suspected)

    def test_of_a_request_that_envoy_routed_by_itself_suspects_no_prompt(self) -> None:
        story = Story()
        story.fails("a", Failure.LOST, by_envoy=True)
        story.router.quarantine.died("a", story.now_s)
        assert story.router.quarantine.dead_nodes(0) == 0
        assert story.router.quarantine.dead_nodes(story.first.blocks.fingerprint) == 0


class TestOutOfMemory:
    def test_is_one_event_a_node_and_second(self) -> None:
        story = Story()
        for number in range(32):
            story.fails("a", Failure.OUT_OF_MEMORY, f"x-{number}")
        story.fails("b", Failure.OUT_OF_MEMORY, "y")
        assert story.news == [("a", OUT_OF_MEMORY), ("b", OUT_OF_MEMORY)]
        story.passes(MEMORY_EVENT_S)
        story.fails("a", Failure.OUT_OF_MEMORY, "z")
        assert story.news == [("a", OUT_OF_MEMORY)]

    def test_is_recovered_once_with_the_first_request_that_another_served(self) -> None:
        story = Story()
        for key in ("x-1", "x-2", "x-3"):
            story.fails("a", Failure.OUT_OF_MEMORY, key)
        failed = story.ends("b", "x-1", attempts=2, status=500, ended=Ended.ERROR)
        assert failed.out_of_memory == ()
        assert story.ends("b", "x-2", attempts=2).out_of_memory == ("a",)
        assert story.ends("b", "x-3", attempts=2).out_of_memory == ()
        assert ("a", FAILED) not in story.news, "it has been told, and does more than an error"

    def test_again_is_recovered_again(self) -> None:
        story = Story()
        for _ in range(2):
            story.fails("a", Failure.OUT_OF_MEMORY)
            assert story.ends("b", attempts=2).out_of_memory == ("a",)
            story.passes(MEMORY_EVENT_S)

    def test_on_both_nodes_is_recovered_on_both(self) -> None:
        story = Story()
        story.fails("a", Failure.OUT_OF_MEMORY)
        story.fails("b", Failure.OUT_OF_MEMORY)
        assert story.ends("c", attempts=3).out_of_memory == ("a", "b")


class TestATimeout:
    """Of an attempt that lasted for 10 s; the engine reported each second."""

    def timed_out(self, *work: int | None, kv: tuple[float | None, ...] = ()) -> Story:
        story = Story()
        story.reports("a", work[0], kv[0] if kv else None)
        for second, counted in enumerate(work):
            story.passes(1.0)
            story.reports("a", counted, kv[second] if kv else None)
        story.fails("a", Failure.TIMED_OUT, lasted_s=float(len(work)))
        return story

    def test_is_a_hang_if_the_engine_did_nothing_meanwhile(self) -> None:
        assert self.timed_out(*[7] * 10).news == [("a", HUNG)]

    def test_is_a_hang_if_the_engine_stopped_at_some_time(self) -> None:
        assert self.timed_out(1, 2, 3, 4, *[4] * 6).news == [("a", HUNG)]

    def test_is_none_of_an_engine_that_generates(self) -> None:
        assert self.timed_out(*range(10)).news == []

    def test_is_none_of_an_engine_that_fills_its_memory_with_a_long_prompt(self) -> None:
        assert self.timed_out(*[7] * 10, kv=tuple(second / 10 for second in range(10))).news == []

    def test_is_none_if_the_node_served_another_request(self) -> None:
        story = Story()
        story.reports("a", 7)
        story.ends("a", "other")
        story.passes(10.0)
        story.reports("a", 7)
        story.fails("a", Failure.TIMED_OUT, lasted_s=10.0 - LOG_LAG_S / 2)
        assert story.news == [("a", SERVED)]

    def test_is_none_while_nothing_is_known_of_its_second_half(self) -> None:
        story = Story()
        story.reports("a", 7)
        story.passes(1.0)
        story.fails("a", Failure.TIMED_OUT, lasted_s=0.5)
        assert story.news == []

    def test_is_a_hang_if_the_engine_does_not_even_report_any_more(self) -> None:
        story = Story()
        story.reports("a", 7)
        story.passes(REPORT_FRESH_S + 1.0)
        story.fails("a", Failure.TIMED_OUT, lasted_s=REPORT_FRESH_S)
        assert story.news == [("a", HUNG)]

    def test_of_an_engine_without_a_counter_is_a_hang_only_after_others(self) -> None:
        story = Story()
        for number in range(SILENT_TIMEOUTS):
            assert story.news == []
            story.passes(10.0)
            story.fails("a", Failure.TIMED_OUT, f"x-{number}", lasted_s=9.0)
        assert story.news == [("a", HUNG)]

    def test_of_an_engine_without_a_counter_is_forgotten_when_it_serves(self) -> None:
        story = Story()
        for number in range(3 * SILENT_TIMEOUTS):
            story.ends("a", "good")
            story.passes(10.0)
            story.fails("a", Failure.TIMED_OUT, f"x-{number}", lasted_s=9.0)
        assert ("a", HUNG) not in story.news

    def test_is_never_an_error_as_well(self) -> None:
        story = self.timed_out(*range(10))
        story.ends("b", attempts=2)
        assert story.news == [("b", SERVED)]

    def test_makes_the_node_doubted(self) -> None:
        assert self.timed_out(*[7] * 10).doubted == ["a"]

    @pytest.mark.parametrize(("status", "ttft_s"), [(504, None), (200, None), (200, 0.5)])
    def test_that_ends_the_request_is_a_hang_too(self, status: int, ttft_s: float | None) -> None:
        """An answer that is no stream has one attempt; a stream may have its status, or even tokens."""
        story = Story()
        asked = story.asked()
        for _ in range(30):
            story.reports("a", 7)
            story.passes(1.0)
        story.ends("a", on=asked, status=status, ended=Ended.TIMED_OUT, duration_s=30.0, ttft_s=ttft_s)
        assert story.news == [("a", HUNG)]
        assert story.doubted == ["a"]

    def test_is_counted_from_when_the_node_got_the_request_and_not_from_when_it_was_queued(self) -> None:
        story = Story()
        for second in range(28):
            story.reports("a", second)
            story.passes(1.0)
        asked = story.asked()
        for _ in range(4):
            story.reports("a", 28)
            story.passes(1.0)
        story.ends("a", on=asked, status=504, ended=Ended.TIMED_OUT, duration_s=30.0)
        assert story.news == [("a", HUNG)]

    def test_of_the_second_node_is_counted_from_the_end_of_the_first(self) -> None:
        story = Story()
        asked = story.asked()
        story.passes(20.0)
        story.fails("a", Failure.LOST, on=asked, lasted_s=20.0)
        story.ends("b", "other")
        for _ in range(8):
            story.reports("b", 7)
            story.passes(1.0)
        story.ends("b", on=asked, attempts=2, status=504, ended=Ended.TIMED_OUT, duration_s=28.0)
        assert story.news == [("b", SERVED)], "it served when the attempt began"
        story.passes(1.0)
        again = story.asked()
        for _ in range(8):
            story.reports("b", 7)
            story.passes(1.0)
        story.ends("b", on=again, status=504, ended=Ended.TIMED_OUT, duration_s=8.0)
        assert story.news == [("b", HUNG)]


class TestWhatEnvoyRoutedByItself:
    """A client may send one key with all its requests, and entries may be told late."""

    @pytest.mark.parametrize("failure", ERRORS)
    def test_counts_against_no_node(self, failure: Failure) -> None:
        story = Story()
        story.fails("a", failure, by_envoy=True)
        story.ends("b", attempts=2, by_envoy=True)
        assert story.news == [("b", SERVED)]

    def test_is_never_a_hang(self) -> None:
        story = Story()
        for _ in range(30):
            story.reports("a", 7)
            story.passes(1.0)
        story.fails("a", Failure.TIMED_OUT, lasted_s=10.0, by_envoy=True)
        facts = {"status": 504, "ended": Ended.TIMED_OUT, "duration_s": 20.0}
        story.ends("a", attempts=2, by_envoy=True, **facts)
        assert story.news == []
        assert story.doubted == ["a", "a"]

    def test_breaks_streams_without_being_counted(self) -> None:
        story = Story()
        story.passes(1.0)
        story.ends("b", "good")
        story.ends("a", "bad", ended=Ended.ERROR, ttft_s=0.5, by_envoy=True)
        assert story.news == [("b", SERVED)]

    def test_tells_of_lost_memory_as_ever(self) -> None:
        story = Story()
        story.fails("a", Failure.OUT_OF_MEMORY, by_envoy=True)
        assert story.ends("b", attempts=2, by_envoy=True).out_of_memory == ("a",)
        assert story.news == [("a", OUT_OF_MEMORY), ("b", SERVED)]


class TestMemory:
    def test_is_bounded_by_requests_and_attempts(self) -> None:
        story = Story()
        for number in range(UNPAIRED_KEPT + 10):
            story.fails("a", Failure.ERROR, f"x-{number}")
        assert story.blame.unpaired == UNPAIRED_KEPT
        for _ in range(100):
            story.fails("a", Failure.ERROR, "the same")
        assert story.blame.unpaired == UNPAIRED_KEPT + FALLBACKS

    def test_of_prompts_that_broke_streams_lasts_as_long_as_the_window(self) -> None:
        story = Story()
        for number in range(100):
            asked = story.asked(f"prompt {number}")
            story.passes(1.0)
            story.ends("b", "good")
            story.ends("a", "bad", on=asked, ended=Ended.ERROR, ttft_s=0.5)
        assert len(story.blame._broken_s) <= WINDOW_S + 1
