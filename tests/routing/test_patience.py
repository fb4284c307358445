"""How long a request may wait, by how long answers take."""

from extproc.routing.patience import ANSWERS_KEPT, Patience


def test_is_all_of_the_time_while_nothing_is_known() -> None:
    patience = Patience()
    patience.answered("other", 9.0)
    assert patience.longest_s("m", 30.0) == 30.0


def test_leaves_time_for_nine_answers_in_ten() -> None:
    patience = Patience()
    for tenth in range(1, 11):
        patience.answered("m", float(tenth))
    assert patience.longest_s("m", 30.0) == 21.0


def test_is_half_of_the_time_at_least() -> None:
    patience = Patience()
    patience.answered("m", 29.0)
    assert patience.longest_s("m", 30.0) == 15.0


def test_goes_by_the_latest_answers() -> None:
    patience = Patience()
    for seconds in (20.0, 5.0):
        for _ in range(ANSWERS_KEPT):
            patience.answered("m", seconds)
    assert patience.longest_s("m", 60.0) == 55.0
