"""Traces of real traffic: who asked when, how long prompts and answers were, which prefixes they shared."""

import csv
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from itertools import count, pairwise
from pathlib import Path
from typing import Annotated

import msgspec

UNIT_TOKENS = 512
"""Tokens of one prefix unit; the last unit of a prompt may be shorter."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `units` name its prompt's blocks of 512 tokens: equal ids, equal prompts up to there."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    units: tuple[int, ...]
    id: int = 0
    """Its number in the trace."""


class TraceError(ValueError):
    """A trace that cannot be read: one line that names file, line and fault."""


class Part(StrEnum):
    """Which half of a trace: constants are chosen on one and judged on the other."""

    FIRST = "first"
    SECOND = "second"
    ALL = "all"


def read_trace(path: Path, seed: int = 0) -> list[TraceRequest]:
    """The requests of a trace in order of arrival, the first at 0 s. Raises `TraceError`.

    The clock of a trace may be coarse (Mooncake's conversation trace ticks every 3 s): arrivals are
    spread evenly, by `seed`, over the shortest time between two ticks.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise TraceError(f"{path}: unknown kind of trace; known are {', '.join(_READERS)}.")
    try:
        requests = list(reader(path))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}.") from None
    if not requests:
        raise TraceError(f"{path}: no requests in it.")
    return _spread(requests, random.Random(f"{seed} arrivals"))


def part_of(requests: Sequence[TraceRequest], part: Part) -> list[TraceRequest]:
    """A half of the requests by number, its clock set to 0 at its start."""
    middle = len(requests) // 2
    halves = {Part.FIRST: requests[:middle], Part.SECOND: requests[middle:], Part.ALL: requests}
    chosen = halves[part]
    start_s = chosen[0].arrival_s if chosen else 0.0
    return [replace(request, arrival_s=request.arrival_s - start_s) for request in chosen]


def scaled(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests `factor` times as fast, in the same order."""
    return [replace(request, arrival_s=request.arrival_s / factor) for request in requests]


def rate(requests: Sequence[TraceRequest]) -> float:
    """Requests a second, from the first arrival to the last. Raises `TraceError`: no time between."""
    seconds = requests[-1].arrival_s - requests[0].arrival_s
    if seconds <= 0:
        raise TraceError("all requests arrive at the same time.")
    return len(requests) / seconds


def _spread(requests: list[TraceRequest], rng: random.Random) -> list[TraceRequest]:
    ticks = sorted({request.arrival_s for request in requests})
    step_s = min((after - before for before, after in pairwise(ticks)), default=0.0)
    start_s = ticks[0]
    later = [
        replace(request, arrival_s=request.arrival_s - start_s + rng.uniform(0, step_s))
        for request in requests
    ]
    later.sort(key=lambda request: request.arrival_s)
    return [replace(request, id=number) for number, request in enumerate(later)]


class _MooncakeRow(msgspec.Struct):
    timestamp: Annotated[int, msgspec.Meta(ge=0)]  # milliseconds
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    hash_ids: list[int]


def _read_mooncake(path: Path) -> Iterator[TraceRequest]:
    """JSON lines as Mooncake published them (FAST 2025)."""
    decoder = msgspec.json.Decoder(_MooncakeRow)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise TraceError(f"{path}:{number}: {error}.") from None
            units = -(-row.input_length // UNIT_TOKENS)
            if len(row.hash_ids) != units:
                raise TraceError(
                    f"{path}:{number}: {len(row.hash_ids)} hash_ids; "
                    f"{row.input_length} tokens in blocks of {UNIT_TOKENS} make {units}."
                )
            yield TraceRequest(row.timestamp / 1000, row.input_length, row.output_length, tuple(row.hash_ids))


_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def _read_azure(path: Path) -> Iterator[TraceRequest]:
    """CSV as Azure published it (2023). It tells no prefixes: every unit is new."""
    new_unit = count()
    with path.open(encoding="utf-8", errors="replace", newline="") as lines:
        rows = csv.reader(lines)
        if (header := next(rows, None)) != _AZURE_COLUMNS:
            raise TraceError(f"{path}:1: columns {header}; expected {_AZURE_COLUMNS}.")
        start: datetime | None = None
        for row in rows:
            try:
                at_text, prompt_text, output_text = row
                at, prompt, output = datetime.fromisoformat(at_text), int(prompt_text), int(output_text)
                if prompt < 1 or output < 1:
                    raise ValueError("fewer than one token")
                start = start or at
                arrival_s = (at - start).total_seconds()
            except (ValueError, TypeError) as error:
                raise TraceError(f"{path}:{rows.line_num}: {error}.") from None
            units = tuple(next(new_unit) for _ in range(-(-prompt // UNIT_TOKENS)))
            yield TraceRequest(arrival_s, prompt, output, units)


# A reader of the service's own access log belongs here: it brings arrival, tokens and block hashes too.
_READERS: dict[str, Callable[[Path], Iterator[TraceRequest]]] = {
    ".jsonl": _read_mooncake,
    ".csv": _read_azure,
}
