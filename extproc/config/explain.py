"""Pydantic's errors in plain English: what is wrong, what is allowed, what was probably meant."""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from enum import Enum
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from extproc.config.models import Config
from extproc.config.problems import Location

_PLAIN_TEXT = re.compile(r"[\w. +-]{1,32}")
_LONGEST_SHOWN = 32
_PERCENTAGE = re.compile(r"(100|[0-9]{1,2}(?:\.[0-9]{1,3})?) ?%")
_ELSEWHERE = {"admin_key": "a key has no place in this file: set INFERACT_ADMIN_KEY in the environment"}
_PLAIN_TYPES = {str: "text", bool: "true or false"}


def explained(error: ValidationError) -> Iterator[tuple[Location, str]]:
    """Where each mistake is, and what to say about it."""
    for details in error.errors(include_url=False):
        if details["type"] == "too_short" and details["input"]:
            continue  # the list only lacks its invalid items, which have errors of their own
        location = tuple(step for step in details["loc"] if step != "[key]")
        yield location, _advice(details, location)


def _advice(details: ErrorDetails, location: Location) -> str:
    owner, field = _look_up(location)
    match details["type"]:
        case "value_error":
            return str(details["ctx"]["error"])
        case "advice":
            return details["msg"]
        case "extra_forbidden":
            return _unknown_key(str(location[-1]), list(owner.model_fields))
        case "missing":
            return f"is required: {allowed(field, location)}"
    got = details["input"]
    kind = "the text " if isinstance(got, str) and details["type"].endswith("_type") else ""
    shown = _shown(got, may_be_secret=not _is_number(field))
    advice = f"must be {allowed(field, location)}; got {kind}{shown}"
    if isinstance(got, str) and (ratio := _meant_ratio(got, field)) is not None:
        return f"{advice}: write {ratio:g}"
    if details["type"] == "string_type" and isinstance(got, bool | int | float):
        return f"{advice}: put it in quotes"
    return advice + _suggestion(got, _choices(field)) if isinstance(got, str) else advice


def _unknown_key(key: str, known: list[str]) -> str:
    if key in _ELSEWHERE:
        return f"unknown key; {_ELSEWHERE[key]}"
    return "unknown key" + (_suggestion(key, known) or f"; known here: {', '.join(known)}")


def _is_number(field: FieldInfo | None) -> bool:
    """Whether the field holds a number: nobody pastes a secret there."""
    annotation = field and field.annotation
    return any(_classes(annotation, int)) or any(_classes(annotation, float))


def _meant_ratio(text: str, field: FieldInfo | None) -> float | None:
    """What a percentage stands for where a number is wanted that need not be whole; `None`: it is none."""
    match = _PERCENTAGE.fullmatch(text)
    return float(match[1]) / 100 if match and any(_classes(field and field.annotation, float)) else None


def _suggestion(word: str, known: list[str]) -> str:
    """What was probably meant; empty where nothing is near."""
    word = word.lower()
    longer = [name for name in known if word and name.startswith(word)]
    likely = longer or get_close_matches(word, known, 1)
    return f"; did you mean `{likely[0]}`?" if likely else ""


def _look_up(location: Location) -> tuple[type[BaseModel], FieldInfo | None]:
    """The section that holds the location's last key, and that key's field (None: there is none)."""
    section: type[BaseModel] = Config
    field: FieldInfo | None = None
    for name in (step for step in location if isinstance(step, str)):
        if field is not None:
            section = next(_classes(field.annotation, BaseModel), section)
        field = section.model_fields.get(name)
    return section, field


def allowed(field: FieldInfo | None, location: Location) -> str:
    """What the key at that location may hold, in words."""
    if field is None:
        return "text"
    whole = not isinstance(location[-1], int)
    if choices := _choices(field):
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if description := (field.description if whole else None) or next(_descriptions(field.annotation), None):
        return description
    for section in _classes(field.annotation, BaseModel):
        return f"a mapping with the keys {', '.join(section.model_fields)}"
    return next(name for kind, name in _PLAIN_TYPES.items() if any(_classes(field.annotation, kind)))


def _choices(field: FieldInfo | None) -> list[str]:
    return [str(member.value) for kind in _classes(field and field.annotation, Enum) for member in kind]


def _classes(annotation: Any, kind: type) -> Iterator[type[Any]]:
    """The subclasses of `kind` that an annotation such as `Role | None` or `tuple[NodeConfig, ...]` names."""
    if isinstance(annotation, type) and issubclass(annotation, kind):
        yield annotation
    for part in get_args(annotation):
        yield from _classes(part, kind)


def _descriptions(annotation: Any) -> Iterator[str]:
    """What the annotation's parts say of what they allow."""
    for part in get_args(annotation):
        notes = getattr(part, "__metadata__", ())
        yield from (note.description for note in notes if isinstance(note, FieldInfo) and note.description)


def _shown(value: object, may_be_secret: bool) -> str:
    """The value, if it is short and plain; never what might be a secret pasted in the wrong place."""
    match value:
        case None:
            return "nothing"
        case bool():
            return f"`{str(value).lower()}`"
        case str() if may_be_secret and not _PLAIN_TEXT.fullmatch(value):
            return "(not shown: it may be a secret)"
        case str() if len(value) > _LONGEST_SHOWN or not value.isprintable():
            return "(not shown: it is long, or holds odd characters)"
        case int() | float() | str():
            return f"`{value}`"
        case dict():
            return "a mapping"
        case list():
            return "a list" if value else "an empty list"
    return "something else"
