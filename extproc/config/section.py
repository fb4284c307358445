"""What every section of the configuration has in common, and errors that name a place below it."""

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from extproc.config.problems import Location


class Section(BaseModel):
    """A mapping of the file: unknown keys are errors, and nothing changes once it is loaded.

    Checks that look at several keys run on the key they blame, and see the keys above it in `info.data`
    (where a key that is itself wrong is missing, and they keep quiet).
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, hide_input_in_errors=True
    )


def faults(messages: Mapping[Location, str]) -> ValidationError:
    """Errors at places below the field that is being validated."""
    return ValidationError.from_exception_data(
        "configuration",
        [
            InitErrorDetails(
                type=PydanticCustomError("advice", "{text}", {"text": text}), loc=place, input=None
            )
            for place, text in messages.items()
        ],
    )


def repeated(names: Iterable[object]) -> dict[int, int]:
    """Where a name comes again: its position, and that of its first use."""
    firsts: dict[object, int] = {}
    return {
        index: first for index, name in enumerate(names) if (first := firsts.setdefault(name, index)) != index
    }
