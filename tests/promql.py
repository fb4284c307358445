"""What a PromQL expression asks for."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import promql_parser as promql

_VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$node": ".*"}
_OWN_LABELS = frozenset({"job", "instance", "le"})
"""Those that Prometheus adds, and that of every histogram."""


@dataclass
class Asked:
    """The selectors of an expression, and the labels that it groups and joins by."""

    selectors: list[promql.VectorSelector] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)

    def names(self) -> set[str]:
        """The metrics."""
        return {selector.name for selector in self.selectors}

    def unknown(self, known: dict[str, set[str]]) -> set[str]:
        """Metrics, and labels of theirs, that are not among the known ones."""
        unknown = {name for name in self.names() if name not in known}
        for selector in self.selectors:
            allowed = known.get(selector.name, set()) | _OWN_LABELS
            unknown |= {
                f"{selector.name}.{m.name}" for m in selector.matchers.matchers if m.name not in allowed
            }
        anywhere = _OWN_LABELS.union(*(known.get(name, set()) for name in self.names()))
        return unknown | (self.labels - anywhere)

    def values(self) -> Iterator[tuple[str, str]]:
        """Every label with a value that it is compared to."""
        for selector in self.selectors:
            for matcher in selector.matchers.matchers:
                yield from ((matcher.name, value) for value in matcher.value.split("|"))


def asked(expression: str) -> Asked:
    """Parse an expression, Grafana's variables in it too. Raises ValueError."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    found = Asked()
    _visit(promql.parse(expression), found)
    return found


def named(text: str) -> set[str]:
    """The metrics that a page names in backticks, with their labels cut off."""
    return set(re.findall(r"`((?:inferact|envoy)_[a-z0-9_]+)(?:\{[^`]*\})?`", text))


def _visit(node: promql.Expr, found: Asked) -> None:
    match node:
        case promql.VectorSelector():
            found.selectors.append(node)
        case promql.MatrixSelector():
            found.selectors.append(node.vector_selector)
        case promql.Call():
            for argument in node.args:
                _visit(argument, found)
        case promql.BinaryExpr():
            if node.modifier:
                found.labels.update(node.modifier.group_labels or ())
                found.labels.update(node.modifier.matching.labels if node.modifier.matching else ())
            _visit(node.lhs, found)
            _visit(node.rhs, found)
        case promql.AggregateExpr():
            found.labels.update(node.modifier.labels if node.modifier else ())
            _visit(node.expr, found)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            _visit(node.expr, found)
