"""Keys that a configuration may have already, and that change nothing yet."""

from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any, Final

from extproc.config.document import Document
from extproc.config.problems import Location, Problem, spelled

NO_EFFECT_YET: Final[Mapping[str, object]] = {"scheduler.xds_listen": None}
"""Each with the value that asks for what happens anyway (`None`: only its absence does)."""


def pending(document: Document) -> Iterator[Problem]:
    """Say so of every such key that a valid document holds, in its order."""
    for location, line in document.lines.items():
        key = ".".join(step for step in location if isinstance(step, str))
        if key in NO_EFFECT_YET and _value(document.data, location) != NO_EFFECT_YET[key]:
            yield Problem(document.file, line, spelled(location), "accepted, has no effect yet")


def _value(data: Any, location: Location) -> object:
    return reduce(getitem, location, data)
