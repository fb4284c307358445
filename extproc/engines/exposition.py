"""Prometheus text, read for a few metrics only: fast, and content with any bytes.

What is no sample is passed over, and so is a value that is no count, ratio or time: NaN, infinite, negative.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_MOST_LINES = 1024
"""A metric on more lines than this is not read: engines have a few label sets each, and reading must end."""
_LONGEST_LINE_BYTES = 16384
_LARGEST = 1e15

_AFTER_NAME = re.compile(
    rb"""
    [ \t]*+ (?: \{ (?P<labels> (?: [^"}]++ | "(?:[^"\\]|\\.)*+" )*+ ) \} )?
    [ \t]*+ (?P<value> [0-9.eE+-]++ ) (?: \s .* )?
    """,
    re.VERBOSE,
)
_LABEL = re.compile(rb'([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]|\\.)*+)"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a metric; escapes in label values are left as they are."""

    labels: dict[str, str]
    value: float


def read_samples(text: bytes, names: Iterable[str]) -> dict[str, list[Sample]]:
    """The samples of the metrics in `names`; a metric without any is absent."""
    text = b"\n" + text
    found = {}
    for name in names:
        if samples := _samples(text, b"\n" + name.encode()):
            found[name] = samples
    return found


def _samples(text: bytes, needle: bytes) -> list[Sample]:
    """Samples on the lines that start with the needle: a search for bytes beats a look at every line."""
    samples: list[Sample] = []
    start = text.find(needle)
    for _ in range(_MOST_LINES):
        if start < 0:
            return samples
        start += len(needle)
        end = text.find(b"\n", start, start + _LONGEST_LINE_BYTES)
        rest = text[start : end if end >= 0 else start + _LONGEST_LINE_BYTES]
        if rest[:1] in b"{ \t" and (sample := _sample(rest)):  # else a longer name
            samples.append(sample)
        start = text.find(needle, start)
    return []


def _sample(rest: bytes) -> Sample | None:
    match = _AFTER_NAME.fullmatch(rest)
    if match is None:
        return None
    try:
        value = float(match["value"])
    except ValueError:
        return None
    if not 0 <= value <= _LARGEST:
        return None
    labels = _LABEL.findall(match["labels"] or b"")
    return Sample({name.decode(): content.decode(errors="replace") for name, content in labels}, value)
