"""Reading traces: Mooncake's JSON lines, Azure's CSV, and the access log of Inferact's own Envoy."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain, count, islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, TypeAlias

import msgspec

from extproc import headers
from extproc.openai.request import Api
from extproc.openai.usage import read_usage
from extproc.routing.lane import FIRST_BYTES_PER_TOKEN
from extproc.simulator.replay.traces import UNIT_TOKENS, TraceError, TraceRequest, in_order, tick_s

MOST_TOKENS: Final = 10_000_000
"""The longest prompt or answer that is taken for one."""
MOST_DAYS: Final = 31
"""The longest trace: one clock that was set wrong makes a replay of years."""
STREAM_BYTES_PER_TOKEN: Final = 240
"""What a chunk of a stream, which carries a token, takes with its JSON around."""

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Lines: TypeAlias = Iterable[tuple[int, bytes]]
"""Lines that are not blank, with their numbers."""
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace as read; `notes` are sentences on what was left out, and what guessed."""

    requests: list[TraceRequest]
    notes: tuple[str, ...] = ()
    is_coarse: bool = False
    """Whether its clock ticks so slowly that many requests share a tick (Mooncake's: up to 3 s)."""


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of trace: how its first line tells, what its lines hold, and who reads them."""

    begins: Callable[[bytes], bool]
    holds: str
    read: Callable[[Path, Lines], Trace]


def read_trace(path: Path, seed: int = 0) -> Trace:
    """A trace of any known format, the first request at 0 s. Raises `TraceError`.

    Arrivals are spread, by `seed`, over the ticks of a coarse clock.
    """
    try:
        with path.open("rb") as file:
            lines = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
            first = next(lines, None)
            if first is None:
                raise TraceError(f"{path}: the file is empty.")
            trace = _format_of(path, *first).read(path, chain([first], lines))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}.") from None
    if not trace.requests:
        raise TraceError(" ".join((f"{path}: no requests in it.", *trace.notes)))
    days = in_order(trace.requests)[-1].arrival_s / 86400
    if days > MOST_DAYS:
        raise TraceError(f"{path}: it spans {days:.0f} days; a replay takes {MOST_DAYS}. Cut the file.")
    spread_s = tick_s(trace.requests) if trace.is_coarse else 0.0
    return replace(trace, requests=in_order(trace.requests, seed, spread_s))


def _format_of(path: Path, number: int, line: bytes) -> Format:
    for known in FORMATS:
        if known.begins(line):
            return known
    kinds = "; ".join(known.holds for known in FORMATS)
    raise TraceError(f"{path}:{number}: no trace of a known format. Known are: {kinds}.")


def _members(line: bytes) -> frozenset[str]:
    """The names in a line that is a JSON object."""
    try:
        return frozenset(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
    except _UNREADABLE:
        return frozenset()


def _fail(path: Path, number: int, error: object, expected: str) -> NoReturn:
    raise TraceError(f"{path}:{number}: {str(error).rstrip('.')}. Expected: {expected}.") from None


def _decoded(path: Path, lines: Lines, kind: type[Any], expected: str) -> Iterator[tuple[int, Any]]:
    """JSON lines, read as `kind`."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in lines:
        try:
            yield number, decoder.decode(line)
        except _UNREADABLE as error:
            _fail(path, number, error, expected)


def _new_units() -> Callable[[int], tuple[int, ...]]:
    """Gives prompts of so many tokens units that no other has: for traces that tell no prefixes."""
    unit = count()
    return lambda tokens: tuple(next(unit) for _ in range(-(-tokens // UNIT_TOKENS)))


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # milliseconds
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]


_MOONCAKE = "Mooncake's JSON lines, with timestamp (ms), input_length, output_length (tokens) and hash_ids"


def _read_mooncake(path: Path, lines: Lines) -> Trace:
    """As published with the paper (FAST 2025)."""
    requests = []
    for number, line in _decoded(path, lines, _MooncakeLine, _MOONCAKE):
        units = -(-line.input_length // UNIT_TOKENS)
        if len(line.hash_ids) != units:
            found = f"{len(line.hash_ids)} hash_ids for {line.input_length} tokens"
            _fail(path, number, found, f"{units}, one for each {UNIT_TOKENS} tokens")
        arrival_s = line.timestamp / 1000
        requests.append(TraceRequest(arrival_s, line.input_length, line.output_length, tuple(line.hash_ids)))
    return Trace(requests, is_coarse=True)


_AZURE_COLUMNS = b"TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE = f"Azure's CSV, with the columns {_AZURE_COLUMNS.decode()}"


def _read_azure(path: Path, lines: Lines) -> Trace:
    """As published since 2023. It tells no prefixes: every unit is new."""
    requests, units = [], _new_units()
    start: datetime | None = None
    for number, line in islice(lines, 1, None):
        try:
            at_text, prompt_text, output_text = line.decode().strip().split(",")
            at, prompt, output = datetime.fromisoformat(at_text), int(prompt_text), int(output_text)
            start = start or at
            arrival_s = (at - start).total_seconds()
        except (ValueError, TypeError) as error:  # times with and without a zone are no pair
            _fail(path, number, error, _AZURE)
        if not (1 <= prompt <= MOST_TOKENS and 1 <= output <= MOST_TOKENS):
            _fail(path, number, f"{prompt} and {output} tokens", f"1 to {MOST_TOKENS}")
        requests.append(TraceRequest(arrival_s, prompt, output, units(prompt)))
    return Trace(requests)


_Bytes: TypeAlias = Annotated[int, msgspec.Meta(ge=0)] | Literal["-"] | None
"""What Envoy writes where it knows no value differs by the format of its log."""


class _LogLine(msgspec.Struct):
    """What a replay needs of a line of the access log."""

    time: Annotated[datetime, msgspec.Meta(tz=True)]
    path: str | None
    route: str | None
    status: int
    model: str | None = None
    request_bytes: _Bytes = None
    response_bytes: _Bytes = None
    usage: str | None = None
    """As the engine sent it: JSON within JSON."""
    first_token_us: str | None = None
    """Streams only."""

    @property
    def answered(self) -> bool:
        """Whether a node generated text for it."""
        return (
            self.route in (headers.ROUTED, headers.FAIL_OPEN)
            and self.status == 200
            and Api.from_path(self.path or "") in (Api.CHAT_COMPLETIONS, Api.COMPLETIONS, Api.RESPONSES)
        )

    def lengths(self) -> tuple[int, int, bool]:
        """Tokens of the prompt and of the answer, and whether one of them is guessed from bytes."""
        usage = read_usage((self.usage or "").encode())
        per_token = FIRST_BYTES_PER_TOKEN if _absent(self.first_token_us) else STREAM_BYTES_PER_TOKEN
        prompt, output = (usage.prompt_tokens, usage.output_tokens) if usage else (0, 0)
        return (
            prompt or _guess(self.request_bytes, FIRST_BYTES_PER_TOKEN),
            output or _guess(self.response_bytes, per_token),
            not (prompt and output),
        )


def _guess(size: _Bytes, bytes_per_token: float) -> int:
    return max(round(size / bytes_per_token), 1) if isinstance(size, int) else 1


def _absent(value: str | None) -> bool:
    return value in (None, "-")


LOG_MEMBERS: Final = frozenset(_LogLine.__struct_fields__)
"""What the log should hold of each request; it must hold the first four."""
_FIRST_LOG_MEMBERS = frozenset({"time", "path", "route", "status"})
_LOG = "Inferact's access log, a JSON line a request, with time, path, route and status"


def _read_log(path: Path, lines: Lines) -> Trace:
    """It tells lengths and times, and no prefixes: every unit is new."""
    requests, units = [], _new_units()
    others = guesses = 0
    for number, line in _decoded(path, lines, _LogLine, _LOG):
        if not line.answered:
            others += 1
            continue
        prompt, output, guessed = line.lengths()
        if max(prompt, output) > MOST_TOKENS:
            _fail(path, number, f"{prompt} and {output} tokens", f"1 to {MOST_TOKENS}")
        guesses += guessed
        model = "" if _absent(line.model) else line.model
        requests.append(TraceRequest(line.time.timestamp(), prompt, output, units(prompt), model=model))
    notes = []
    if others:
        notes.append(
            f"Left out: {others} lines of the log that are not of a generated answer with status 200."
        )
    if guesses:
        notes.append(
            f"Guessed from bytes: the lengths of {guesses} requests, of which the log has no tokens."
        )
    return Trace(requests, tuple(notes))


FORMATS: Final = (
    Format(lambda line: _members(line) >= {"input_length", "hash_ids"}, _MOONCAKE, _read_mooncake),
    Format(lambda line: line.strip() == _AZURE_COLUMNS, _AZURE, _read_azure),
    Format(lambda line: _members(line) >= _FIRST_LOG_MEMBERS, _LOG, _read_log),
)
"""What can be read."""
