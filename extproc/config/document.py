"""A YAML file as plain data that remembers the line of every value.

PyYAML alone would take the last of two equal keys in silence and lose the lines, so the node tree is
walked here. Its pure Python loader is used on purpose: deep nesting there is an exception, not a crash.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import yaml

from extproc.config.problems import ConfigError, Location, Problem, spelled

_MAX_FILE_BYTES = 1 << 20
_MAX_VALUES = 100_000
_MAX_INTEGER = (1 << 63) - 1
_TAG = "tag:yaml.org,2002:"
_TEXT_TAGS = {f"{_TAG}{kind}" for kind in ("str", "timestamp", "value", "merge")}
_SCALAR_TAGS = {f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float")}
_UNPRINTABLE = "holds a line break or another character that cannot be printed"
_SYNTAX = {  # what PyYAML says, and what people understand; its own words may quote the file
    r"character '\t'": "a tab; indent with spaces",
    "cannot start any token": "text that starts with a sign such as `@` or `%` must be in quotes",
    "mapping values are not allowed here": "a `:` where none can be; put text that holds `: ` in quotes",
    "expected <block end>": "the indentation does not match the lines above",
    "could not find expected ':'": "a key without its `:`",
    "expected ',' or": "a `[` or `{` that is not closed, or a missing comma",
    "unexpected end of stream": "a quote that is not closed",
    "but found '<stream end>'": "the file ends inside a `[` or `{`",
    "expected the node content": "a value is missing before a closing `]` or `}`, or a `,`",
    "undefined alias": "an alias (`*name`) whose anchor (`&name`) does not come before it",
    "duplicate anchor": "an anchor (`&name`) that is defined twice",
    "but found another document": "a second document (`---`); a configuration is one document",
}


@dataclass(slots=True)
class Document:
    """The data of a file (mappings, lists, text, numbers, booleans, None), its lines, and mistakes so far."""

    file: str
    data: object = None
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def report(self, location: Location, message: str, line: int | None = None) -> None:
        """Add a problem at a location; without a line, at that of the nearest value the file does have."""
        nearest = (location[:length] for length in range(len(location), -1, -1))
        line = line or next((self.lines[place] for place in nearest if place in self.lines), None)
        self.problems.append(Problem(self.file, line, spelled(location), message))


def read_document(path: Path) -> Document:
    """Read a YAML file with a mapping at its top. Raises ConfigError where nothing in it can be judged."""
    document = Document(str(path))
    root = _compose(document.file, _read_text(path))
    if root is None:
        _refuse(document.file, None, "is empty: give at least `nodes`")
    if not isinstance(root, yaml.MappingNode):
        _refuse(document.file, _line(root), "must be a mapping with keys such as `scheduler` and `nodes`")
    document.lines[()] = _line(root)
    try:
        document.data = _Walk(document).value(root, ())
    except RecursionError:
        _refuse(document.file, None, "is nested too deeply, or holds an alias that contains itself")
    return document


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        _refuse(str(path), None, "no such file")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the name is not possible"
        _refuse(str(path), None, f"cannot be read: {reason}")
    if len(content) > _MAX_FILE_BYTES:
        _refuse(str(path), None, f"is too large: at most {_MAX_FILE_BYTES} bytes are read")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        _refuse(str(path), line, "is not UTF-8 text; save the file as UTF-8")


def _compose(file: str, text: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        said = f"{error.context} {error.problem}"
        plain = (meaning for words, meaning in _SYNTAX.items() if words in said)
        mark = error.problem_mark or error.context_mark
        reason = next(plain, "it cannot be understood here")
        _refuse(file, mark.line + 1 if mark else None, f"is not valid YAML: {reason}")
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        _refuse(file, line, "is not valid YAML: it holds a control character")
    except (ValueError, OverflowError):  # from chr() and int() inside PyYAML
        _refuse(file, None, "is not valid YAML: an escape that names no character, or an endless number")
    except RecursionError:
        _refuse(file, None, "is nested too deeply")


class _Walk:
    """Turns YAML nodes into data, and notes lines and mistakes in the document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._visits = 0
        self._scalars = yaml.constructor.SafeConstructor()

    def value(self, node: yaml.Node, location: Location) -> object:
        """The data of a node. Raises ConfigError for an alias bomb, RecursionError for endless nesting."""
        self._visit(node)
        self._document.lines.setdefault(location, _line(node))
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node, location)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.value(item, (*location, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in _TEXT_TAGS:
            return self._text(node, location)
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALAR_TAGS:
            return self._scalar(node, location)
        self._document.report(location, "has a YAML tag (`!...`) that has no meaning here; remove it")
        return None

    def _mapping(self, node: yaml.MappingNode, location: Location) -> dict[str, object]:
        data: dict[str, object] = {}
        for key, (key_node, value_node) in self._pairs(node, location).items():
            self._document.lines[*location, key] = _line(key_node)
            data[key] = self.value(value_node, (*location, key))
        return data

    def _pairs(self, node: yaml.MappingNode, location: Location) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """The mapping's own keys, and those that `<<: *anchor` or `<<: [*first, *second]` bring."""
        self._visit(node)
        pairs: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        sources: list[yaml.Node] = []
        for key_node, value_node in node.value:
            key, line = key_node.value, _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._document.report(location, "has a list or a mapping as a key; keys are text", line)
            elif key_node.tag == f"{_TAG}merge":
                sources += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            elif not key.isprintable():
                self._document.report((*location, key), _UNPRINTABLE, line)
            elif key in pairs:
                twice = f"appears twice, first on line {_line(pairs[key][0])}; keep one"
                self._document.report((*location, key), twice, line)
            else:
                pairs[key] = (key_node, value_node)
        for source in sources:
            if isinstance(source, yaml.MappingNode):
                pairs = self._pairs(source, location) | pairs
            else:
                self._document.report((*location, "<<"), "must be an alias of a mapping", _line(source))
        return pairs

    def _text(self, node: yaml.ScalarNode, location: Location) -> str:
        text: str = node.value
        if not text.isprintable():
            self._document.report(location, _UNPRINTABLE)
        return text

    def _scalar(self, node: yaml.ScalarNode, location: Location) -> object:
        try:
            value: object = self._scalars.construct_object(node)
        except (ValueError, KeyError, IndexError):  # `!!int x`, `0b_`: a form of number without a digit
            self._document.report(location, "is not the number or boolean that its form promises")
            return None
        if isinstance(value, int) and abs(value) > _MAX_INTEGER:
            self._document.report(location, "is a number far too large")
            return None
        return value

    def _visit(self, node: yaml.Node) -> None:
        """Count the work: a few lines of aliases can stand for billions of values."""
        self._visits += 1
        if self._visits > _MAX_VALUES:
            advice = f"stands for over {_MAX_VALUES} values; use fewer aliases"
            _refuse(self._document.file, _line(node), advice)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _refuse(file: str, line: int | None, message: str) -> NoReturn:
    raise ConfigError((Problem(file, line, "", message),)) from None
