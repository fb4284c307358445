"""Log records as lines."""

import logging
import sys

import pytest

from extproc.logs import OneLine


def line(message: str, *args: object, failed: bool = False) -> str:
    """A record as it is written."""
    error = sys.exc_info() if failed else None
    record = logging.LogRecord("any", logging.WARNING, "any.py", 1, message, args, error)
    record.created, record.msecs = 0.0, 42.0
    return OneLine("%(asctime)s %(levelname)-7s %(message)s").format(record)


def test_a_record_is_time_level_and_message() -> None:
    assert line("node %s is up", "a") == "1970-01-01T00:00:00.042Z WARNING node a is up"


@pytest.mark.parametrize("text", ["a\nb", "a\r\nb", "a\x1b[31mb", "a\u2028b", "a\x00b"])
def test_nothing_in_a_message_can_end_the_line_or_steer_a_terminal(text: str) -> None:
    assert line("%s", text).isprintable()


def test_an_exception_is_told_in_the_same_line_with_its_place() -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        text = line("a step failed", failed=True)
    assert text.isprintable()
    assert "a step failed (ValueError: first second; at test_logs.py:" in text
