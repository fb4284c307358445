"""What answers teach: how fast nodes really are, how long answers get, how many bytes a token has."""

from collections import Counter

import pytest
from routing_fleet import MODEL, decided, make_node, make_request, make_router, new_prompt

from extproc.routing.node import Node
from extproc.routing.pace import ENOUGH, FASTEST, SLOWEST, Pace
from extproc.routing.router import Router


def pair() -> tuple[Router, Node, Node]:
    """Two nodes that are equal by their data sheets."""
    nodes = make_node("a"), make_node("b")
    return make_router(*nodes), *nodes


def answer(router: Router, number: int, ratios: dict[str, float]) -> str:
    """One request whose first token comes so many times as late as predicted; the node that had it."""
    now_s = number * 100.0
    decision = decided(router, new_prompt(number), now_s)
    first_token_s = now_s + decision.predicted_s * ratios[decision.node.id]
    router.first_token(decision, first_token_s)
    router.answered(decision, MODEL, 4000, 1, 0.0)
    decision.booking.release(first_token_s)
    return decision.node.id


def test_a_node_whose_first_tokens_are_late_gets_less() -> None:
    router, _, _ = pair()
    ratios = {"a": 3.0, "b": 1.0}
    for number in range(8 * ENOUGH):
        answer(router, number, ratios)
    assert Counter(answer(router, number, ratios) for number in range(100, 120)) == {"b": 20}


def test_a_node_that_decodes_slowly_gets_less() -> None:
    router, slow, _ = pair()
    for number in range(8 * ENOUGH):
        decision = decided(router, make_request(), number * 100.0)
        seconds = 30.0 if decision.node is slow else 3.0
        router.answered(decision, MODEL, 2, 256, seconds)
        decision.booking.release(number * 100.0 + seconds)
    assert decided(router, make_request(), 1e6).node.id == "b"


def test_a_few_answers_teach_nothing() -> None:
    pace = Pace()
    pace.add(0)
    for _ in range(ENOUGH - 1):
        pace.first_token(0, 5.0, 1.0)
        pace.decoded(0, 100, 10.0, 0.01)
    assert (pace.prefill[0], pace.decode[0]) == (1.0, 1.0)
    pace.first_token(0, 5.0, 1.0)
    pace.decoded(0, 100, 10.0, 0.01)
    assert (pace.prefill[0], pace.decode[0]) == (5.0, 10.0)


@pytest.mark.parametrize(("observed_s", "bound"), [(1e6, SLOWEST), (1e-6, FASTEST)])
def test_factors_have_bounds(observed_s: float, bound: float) -> None:
    pace = Pace()
    pace.add(0)
    for _ in range(ENOUGH):
        pace.first_token(0, observed_s, 1.0)
        pace.decoded(0, 100, observed_s, 0.01)
    assert (pace.prefill[0], pace.decode[0]) == (bound, bound)


def test_predictions_too_short_to_tell_and_answers_too_short_to_tell_count_for_nothing() -> None:
    pace = Pace()
    pace.add(0)
    for _ in range(10 * ENOUGH):
        pace.first_token(0, 5.0, 0.01)
        pace.decoded(0, 8, 5.0, 0.01)
        pace.decoded(0, 100, 0.0, 0.01)
    assert (pace.prefill[0], pace.decode[0]) == (1.0, 1.0)


def test_a_failed_attempt_does_not_make_its_node_look_slow() -> None:
    router, _, _ = pair()
    for number in range(4 * ENOUGH):
        now_s, request = number * 100.0, new_prompt(number)
        decision = decided(router, request, now_s)
        router.attempt_failed(decision, decision.node.id, request, now_s + 50.0)
        router.first_token(decision, now_s + 51.0)
        decision.booking.release(now_s + 51.0)
    assert set(router.pace.prefill) == {1.0}


def test_the_usual_length_of_answers_is_learned_and_bounded_by_what_was_asked() -> None:
    router, _, _ = pair()
    for _ in range(500):
        decision = decided(router, make_request(max_tokens=None))
        router.answered(decision, MODEL, 2, 40, 1.0)
        decision.booking.release(0.0)
    assert decided(router, make_request()).booking.work.output_tokens == pytest.approx(40, abs=1)
    assert decided(router, make_request(max_tokens=7)).booking.work.output_tokens == 7


def test_bytes_a_token_are_learned() -> None:
    router, _, _ = pair()
    text = "x" * 8000
    before = decided(router, make_request(prompt=text)).booking.work.prompt_tokens
    for _ in range(500):
        decision = decided(router, make_request(prompt=text))
        router.answered(decision, MODEL, 4000, 40, 1.0)
        decision.booking.release(0.0)
    after = decided(router, make_request(prompt=text)).booking.work.prompt_tokens
    assert before == pytest.approx(2000, rel=0.01)
    assert after == pytest.approx(4000, rel=0.01)
