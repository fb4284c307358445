"""What is wrong with a configuration file, where, and what would be right."""

from dataclasses import dataclass

Location = tuple[str | int, ...]
"""The way from the top of the document to a value: ("nodes", 2, "hardware")."""

_LONGEST_KEY = 64


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake: file, line (None: the file as a whole), key such as `nodes[2].hardware`, and advice."""

    file: str
    line: int | None
    key: str
    message: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (place, self.key, self.message) if part)


class ConfigError(Exception):
    """The configuration cannot be used; `problems` holds every reason, in the order of the file."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def spelled(location: Location) -> str:
    """The location as people write it: `nodes[2].hardware`."""
    text = ""
    for step in location:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{printable(step)}" if text else printable(step)
    return text


def printable(key: str) -> str:
    """The key, or an escaped and shortened form of it when it would upset a terminal or a log."""
    return key if key.isprintable() and 0 < len(key) <= _LONGEST_KEY else ascii(key[:_LONGEST_KEY])
