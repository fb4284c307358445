"""A decision as the service tells it."""

import msgspec

from extproc.cli.client import Answer, ClientError
from extproc.reports import DecisionReport


def read_decision(answer: Answer) -> DecisionReport:
    """The decision in an answer. Raises `ClientError` where the service speaks otherwise."""
    try:
        return msgspec.convert(answer, DecisionReport)
    except msgspec.ValidationError as error:
        message = f"the service's answer is of another version than this command: {error} (--json shows it)"
        raise ClientError(message) from error
