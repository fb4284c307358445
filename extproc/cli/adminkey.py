"""The admin key, from the environment: never from a command line, which others can read."""

from collections.abc import Mapping
from pathlib import Path

KEY = "INFERACT_ADMIN_KEY"
KEY_FILE = "INFERACT_ADMIN_KEY_FILE"


class AdminKeyError(Exception):
    """The admin key that the environment names cannot be used; the message says why, and never shows it."""


def admin_key(environ: Mapping[str, str]) -> str | None:
    """The key in `INFERACT_ADMIN_KEY`, or in the file that `INFERACT_ADMIN_KEY_FILE` names; `None`: no key.

    Raises `AdminKeyError`. An empty variable counts as unset; white space around a key is not part of it.
    """
    name, key = KEY, environ.get(KEY, "").strip()
    if not key and (path := environ.get(KEY_FILE)):
        name, key = KEY_FILE, _read(Path(path))
    if not key:
        return None
    if not (key.isascii() and key.isprintable()):
        raise AdminKeyError(
            f"{name} holds characters that no HTTP header can carry: use printable ASCII, one line"
        )
    return key


def _read(path: Path) -> str:
    try:
        key = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise AdminKeyError(f"{KEY_FILE} names {path}, which cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8
        raise AdminKeyError(f"{KEY_FILE} names {path}, which is not text") from error
    if not key:
        raise AdminKeyError(f"{KEY_FILE} names {path}, which is empty")
    return key
