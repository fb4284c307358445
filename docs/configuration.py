"""Writes configuration.md from the models of the configuration: python docs/configuration.py."""

import ast
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from textwrap import dedent
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from extproc.config import Config
from extproc.config.explain import allowed
from extproc.config.pending import NO_EFFECT_YET

PAGE = Path(__file__).with_suffix(".md")
_HEAD = """\
# The configuration

Every key, written by `docs/configuration.py` from the models that check a file
([extproc/config](../extproc/config)). [inferact.example.yaml](../inferact.example.yaml) has them all in
their places. `inferact check -c FILE` prints what is in force, or `FILE:LINE: key: what is wrong, what is
allowed`. Unknown keys are errors. Relative paths start at the folder of the file. Keys of engines and the
admin key are never in it: they come from the environment.
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(_section(path, model) for path, model in sections("", Config))


def sections(path: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Every mapping of the file, by its path: `nodes[].tls`."""
    if path:
        yield path, model
    for name, field in model.model_fields.items():
        for inner in _models(field.annotation):
            many = "[]" if str(field.annotation).startswith("tuple") else ""
            yield from sections(f"{path}.{name}{many}".removeprefix("."), inner)


def _section(path: str, model: type[BaseModel]) -> str:
    texts = explanations(model)
    rows = (
        f"| `{name}` | {allowed(field, (name,))} | {_default(field)} | {texts[name]}{_pending(path, name)} |"
        for name, field in model.model_fields.items()
    )
    about = inspect.getdoc(model) or ""
    table = "| key | allowed | default | what it is |\n|---|---|---|---|\n" + "\n".join(rows)
    return f"\n## {path}\n\n{' '.join(about.split())}\n\n{table}\n"


def explanations(model: type[BaseModel]) -> dict[str, str]:
    """The text below each attribute, those of the classes above included."""
    found: dict[str, str] = {}
    for owner in reversed(
        [one for one in model.__mro__ if issubclass(one, BaseModel) and one is not BaseModel]
    ):
        (tree,) = ast.parse(dedent(inspect.getsource(owner))).body
        assert isinstance(tree, ast.ClassDef)
        for attribute, text in zip(tree.body, tree.body[1:], strict=False):
            match attribute, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(said))):
                    found[name] = " ".join(said.split())
    return found


def _pending(path: str, name: str) -> str:
    key = f"{path}.{name}".replace("[]", "")
    return " **Accepted, has no effect yet.**" if key in NO_EFFECT_YET else ""


def _default(field: FieldInfo) -> str:
    match field.default:
        case _ if field.is_required():
            return "required"
        case None:
            return ""
        case BaseModel() | {}:
            return "as below" if isinstance(field.default, BaseModel) else "none"
        case bool(value):
            return f"`{str(value).lower()}`"
        case Enum(value=value):
            return f"`{value}`"
        case "":
            return "empty"
        case value:
            return f"`{value}`"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The sections that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


if __name__ == "__main__":
    PAGE.write_text(page())
