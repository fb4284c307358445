"""The ratio over the last five minutes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.window import BUCKETS, WINDOW_S, RatioWindow

STEP_S = WINDOW_S / BUCKETS


def test_it_is_of_the_sums() -> None:
    window = RatioWindow()
    window.add(1, 10, 0.0)
    window.add(9, 10, 100.0)
    assert window.ratio(100.0) == 0.5
    assert (window.count, window.part, window.whole) == (2, 10, 20)


def test_there_is_none_without_anything() -> None:
    window = RatioWindow()
    assert window.ratio(0.0) is None
    window.add(0, 0, 1.0)
    assert window.ratio(1.0) is None


def test_what_is_older_than_the_window_does_not_count() -> None:
    window = RatioWindow()
    window.add(1, 1, 0.0)
    assert window.ratio(WINDOW_S - STEP_S) == 1
    assert window.ratio(WINDOW_S) is None
    window.add(0, 1, WINDOW_S)
    assert window.ratio(WINDOW_S) == 0
    assert window.count == 1


def test_asking_changes_nothing() -> None:
    window = RatioWindow()
    window.add(1, 2, 0.0)
    assert window.ratio(1e9) is None
    assert window.ratio(0.0) == 0.5


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 9), st.integers(1, 9)), max_size=60))
def test_it_is_that_of_a_plain_list(steps: list[tuple[float, int, int]]) -> None:
    window, now_s = RatioWindow(), 0.0
    added: list[tuple[int, int, int]] = []
    for gap_s, part, more in steps:
        now_s += gap_s
        window.add(part, part + more, now_s)
        added.append((int(now_s / STEP_S), part, part + more))
    kept = [(part, whole) for bucket, part, whole in added if bucket > int(now_s / STEP_S) - BUCKETS]
    assert window.count == len(kept)
    if kept:
        expected = sum(part for part, _ in kept) / sum(whole for _, whole in kept)
        assert window.ratio(now_s) == pytest.approx(expected)
