"""A feed is followed while it is whole; what is lost is asked for again, or said to be lost."""

import pytest
from kv_support import BLOCK_TOKENS, CLEARED, FedNode, Frames, frames, removed, stored

from extproc.engines.kvfeed import ASK_AGAIN_S, MOST_RESCUES, REPLAY_S, SILENT_S, SILENT_TOKENS
from extproc.routing.node import REPORT_FRESH_S
from extproc.telemetry import KnowledgeLevel


def block(number: int, at_s: float | None = None) -> Frames:
    """Message `number`, by which the engine stores a block."""
    tokens = list(range(number, number + BLOCK_TOKENS))
    return frames(number, stored([number + 1], tokens), at_s=at_s)


@pytest.fixture
def fed() -> FedNode:
    return FedNode()


@pytest.fixture
def replayed() -> FedNode:
    """One whose engine has been asked for the past, and had said nothing yet."""
    fed = FedNode(can_replay=True)
    fed.waits(0.0)
    assert fed.source.asked_from == [0]
    fed.source.asked_from.clear()
    return fed


def test_a_feed_from_the_engines_start_on_is_exact(fed: FedNode) -> None:
    assert not fed.exact
    fed.gets(block(0), block(1), frames(2, removed(1)))
    assert (fed.exact, fed.blocks, fed.node.events.messages) == (True, 1, 3)
    assert KnowledgeLevel.of(fed.node, fed.now_s) is KnowledgeLevel.EVENTS


def test_what_is_missing_is_asked_for(replayed: FedNode) -> None:
    replayed.gets(block(0))
    replayed.source.kept = [block(number) for number in range(5)]
    replayed.gets(block(3))
    assert replayed.source.asked_from == [1]
    assert (replayed.blocks, replayed.exact, replayed.node.events.gaps) == (5, True, 1)


def test_what_comes_once_more_after_it_was_repeated_is_passed_over(replayed: FedNode) -> None:
    replayed.source.kept = [block(number) for number in range(5)]
    replayed.gets(block(3), block(4), block(5))
    assert (replayed.blocks, replayed.node.events.messages) == (6, 6)


def test_a_late_listener_gets_the_past_repeated_at_once() -> None:
    late = FedNode(can_replay=True)
    late.source.kept = [block(number) for number in range(100)]
    late.reports(running=0)
    assert (late.source.asked_from, late.blocks, late.exact) == ([0], 100, True)
    late.gets(block(100))
    assert (late.source.asked_from, late.blocks, late.node.events.gaps) == ([0], 101, 0)


def test_a_past_of_which_only_the_end_is_kept_is_not_all() -> None:
    late = FedNode(can_replay=True)
    late.source.kept = [block(number) for number in range(50, 100)]
    late.gets(block(100))
    assert (late.blocks, late.exact) == (51, False)


def test_an_engine_that_has_said_nothing_yet_is_known_wholly(replayed: FedNode) -> None:
    replayed.reports(running=0)
    assert (replayed.exact, replayed.blocks) == (True, 0)


def test_an_engine_that_is_not_there_yet_is_not_known() -> None:
    early = FedNode(can_replay=True)
    early.source.answers = False
    early.waits(0.0)
    early.waits(REPLAY_S + 0.1)
    early.reports(running=0)
    assert not early.exact
    early.gets(block(0))
    assert early.exact


def test_a_gap_that_nobody_fills_is_the_end_of_exactness(fed: FedNode) -> None:
    fed.gets(block(0), block(2))
    assert (fed.exact, fed.blocks, fed.node.events.gaps) == (False, 1, 1)
    assert KnowledgeLevel.of(fed.node, fed.now_s) is not KnowledgeLevel.EVENTS


def test_an_engine_that_does_not_answer_in_time_has_left_a_gap(replayed: FedNode) -> None:
    replayed.source.answers = False
    replayed.gets(block(0), block(2))
    assert replayed.blocks == 1
    replayed.waits(REPLAY_S + 0.1)
    assert (replayed.exact, replayed.blocks) == (False, 1)
    replayed.gets(block(3))
    assert replayed.blocks == 2


def test_an_engine_that_clears_its_cache_makes_a_feed_exact_again(fed: FedNode) -> None:
    fed.gets(block(0), block(2), frames(3, CLEARED))
    assert (fed.exact, fed.blocks) == (True, 0)


def test_so_does_one_that_has_stored_as_many_blocks_as_it_has(fed: FedNode) -> None:
    fed.reports(kv_capacity_tokens=3 * BLOCK_TOKENS)
    fed.gets(block(0), block(2), block(3))
    assert not fed.exact
    fed.gets(block(4))
    assert fed.exact


def test_an_engine_that_starts_anew_holds_nothing(fed: FedNode) -> None:
    fed.gets(block(0), block(1), block(2))
    fed.gets(block(0, at_s=50.0))
    assert (fed.exact, fed.blocks, fed.node.events.gaps) == (True, 1, 0)


def test_a_new_start_that_was_missed_shows_in_its_numbers(replayed: FedNode) -> None:
    replayed.gets(*map(block, range(10)))
    replayed.source.kept = [block(number, at_s=50.0 + number) for number in range(4)]
    replayed.gets(block(4, at_s=54.0))
    assert (replayed.source.asked_from, replayed.blocks, replayed.exact) == ([0], 5, True)


def test_a_new_start_behind_a_gap_shows_in_the_metrics(replayed: FedNode) -> None:
    replayed.gets(block(0, at_s=10.0), block(1, at_s=11.0))
    replayed.source.kept = [block(number, at_s=50.0 + number) for number in range(6)]
    replayed.gets(block(6, at_s=56.0))
    replayed.reports(started_unix_s=45.0)
    assert replayed.blocks == 0
    replayed.waits(0.1)
    assert (replayed.source.asked_from, replayed.blocks) == ([2, 0], 6)
    replayed.source.kept = []
    replayed.gets(block(6, at_s=56.0))
    assert (replayed.blocks, replayed.exact) == (7, True)


def test_metrics_of_the_start_that_is_known_change_nothing(fed: FedNode) -> None:
    fed.reports(started_unix_s=5.0)
    fed.gets(block(0, at_s=10.0))
    fed.reports(started_unix_s=5.0)
    assert (fed.exact, fed.blocks) == (True, 1)


def test_a_message_that_cannot_be_read_is_a_loss(fed: FedNode) -> None:
    fed.gets(block(0), (frames(1)[0], b"\xc1"), block(2))
    assert (fed.exact, fed.blocks, fed.node.events.unreadable, fed.node.events.gaps) == (False, 1, 1, 0)


@pytest.mark.parametrize("garbage", [(b"", b""), (b"\xff" * 8, b""), (b"\xff" * 8, frames(0)[1])])
def test_garbage_ends_nothing(fed: FedNode, garbage: Frames) -> None:
    fed.gets(block(0), garbage)
    assert not fed.exact
    fed.gets(block(0, at_s=60.0))
    assert fed.blocks == 1


def test_a_number_that_no_engine_gets_to_leaves_the_feed_to_go_on(replayed: FedNode) -> None:
    replayed.gets(block(0), frames(2**63, CLEARED), frames(2**64 - 1, CLEARED))
    assert replayed.node.events.unreadable == 2
    replayed.source.kept = [block(number) for number in range(4)]
    replayed.gets(block(3))
    assert (replayed.source.asked_from, replayed.blocks) == ([1], 3)


def computes(fed: FedNode, tokens: int, seconds: float = 1.0) -> None:
    """Time goes by, and the engine tells how many prompt tokens it has computed."""
    fed.waits(seconds)
    fed.reports(prefix_queries=tokens + 100, prefix_hits=100)


def test_a_feed_that_is_silent_while_the_engine_works_falls_back_within_seconds(fed: FedNode) -> None:
    fed.gets(block(0))
    computes(fed, 0)
    computes(fed, SILENT_TOKENS + 1)
    assert fed.exact, "a step may take its time"
    computes(fed, SILENT_TOKENS + 1, SILENT_S + 0.1)
    assert not fed.exact


def test_a_silent_feed_that_goes_on_without_a_gap_is_trusted_again(fed: FedNode) -> None:
    fed.gets(block(0))
    computes(fed, 0)
    computes(fed, SILENT_TOKENS + 1)
    computes(fed, SILENT_TOKENS + 1, SILENT_S + 0.1)
    fed.gets(block(1))
    assert fed.exact


def test_a_feed_that_was_silent_for_the_time_of_a_step_was_never_doubted(fed: FedNode) -> None:
    fed.gets(block(0))
    computes(fed, 0)
    computes(fed, SILENT_TOKENS + 1)
    fed.gets(block(1))
    computes(fed, SILENT_TOKENS + 1, SILENT_S + 0.1)
    assert fed.exact


def test_an_engine_is_asked_whether_it_has_said_nothing(replayed: FedNode) -> None:
    replayed.gets(block(0))
    computes(replayed, 0)
    computes(replayed, SILENT_TOKENS + 1)
    replayed.source.kept = [block(1)]
    computes(replayed, SILENT_TOKENS + 1, SILENT_S + 0.1)
    replayed.waits(0.1)
    assert (replayed.source.asked_from, replayed.blocks, replayed.exact) == ([1], 2, True)


def test_a_feed_that_only_ever_comes_when_it_is_asked_for_is_not_trusted(replayed: FedNode) -> None:
    replayed.gets(block(0))
    trusted = []
    for number in range(1, MOST_RESCUES + 1):
        computes(replayed, 2 * number * SILENT_TOKENS)
        computes(replayed, (2 * number + 1) * SILENT_TOKENS + 1)
        replayed.source.kept = [block(number)]
        computes(replayed, (2 * number + 1) * SILENT_TOKENS + 1, SILENT_S + 0.1)
        replayed.waits(0.1)
        trusted.append(replayed.exact)
    assert trusted == [True] * (MOST_RESCUES - 1) + [False]
    replayed.gets(block(MOST_RESCUES + 1))
    assert replayed.exact, "it has come by itself"


def test_an_engine_that_does_not_even_answer_that_is_not_trusted(replayed: FedNode) -> None:
    replayed.source.answers = False
    replayed.gets(block(0))
    computes(replayed, 0)
    computes(replayed, SILENT_TOKENS + 1)
    computes(replayed, SILENT_TOKENS + 1, SILENT_S + 0.1)
    computes(replayed, SILENT_TOKENS + 1, REPLAY_S + 0.1)
    assert not replayed.exact


def test_an_engine_that_was_too_busy_to_answer_is_asked_again(replayed: FedNode) -> None:
    replayed.source.answers = False
    replayed.gets(block(0))
    computes(replayed, 0)
    computes(replayed, SILENT_TOKENS + 1)
    computes(replayed, SILENT_TOKENS + 1, SILENT_S + 0.1)
    computes(replayed, SILENT_TOKENS + 1, REPLAY_S + 0.1)
    replayed.source.answers = True
    computes(replayed, SILENT_TOKENS + 1, ASK_AGAIN_S - 0.1)
    assert (replayed.exact, len(replayed.source.asked_from)) == (False, 1)
    computes(replayed, SILENT_TOKENS + 1, 0.2)
    replayed.waits(0.1)
    assert (replayed.exact, len(replayed.source.asked_from)) == (True, 2), "it has said nothing more"


def test_nothing_is_known_of_an_engine_that_is_not_heard_in_any_way(fed: FedNode) -> None:
    fed.gets(block(0))
    fed.waits(REPORT_FRESH_S + 0.1)
    assert not fed.exact
    fed.reports(running=0)
    assert fed.exact
