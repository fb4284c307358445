"""A chart of replays as SVG text: time to first token and load per node, for light and dark pages."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from extproc.simulator.replay.report import Panel, Summary

_WIDTH = 1000
_NAMES = 150  # width of the column of names
_TTFT = (_NAMES, 620)  # left and right of the distribution
_LOAD = (680, _WIDTH - 20)
_ROW = 24
_HEAD = 64
_FOOT = 34
_STYLE = """
svg { color-scheme: light dark; font: 12px system-ui, sans-serif; --ink: #1f2328; --faint: #8c959f;
  --line: #d0d7de; --paper: #fff; --spread: #54aeff; --mark: #0550ae; --load: #2da44e; --over: #bc4c00 }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6edf3; --faint: #8b949e; --line: #30363d; --paper: #0d1117; --spread: #1f6feb;
    --mark: #a5d6ff; --load: #3fb950; --over: #f0883e } }
text { fill: var(--ink) } .faint { fill: var(--faint) } .title { font-weight: 600; font-size: 14px }
.paper { fill: var(--paper) } .grid { stroke: var(--line) }
.end { text-anchor: end } .middle { text-anchor: middle }
.spread { stroke: var(--spread); stroke-width: 8; stroke-linecap: round; opacity: .6 }
.median { fill: var(--mark) } .mean { stroke: var(--mark); stroke-width: 2.5 }
.load { fill: var(--load) } .over { fill: var(--over) }
"""


def draw(panels: Sequence[Panel]) -> str:
    """An SVG document with the panels below each other."""
    height = sum(_height(panel) for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        "<title>Time to first token and load per node, by policy</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
    ]
    top = 0
    for panel in panels:
        parts.append(f'<g transform="translate(0 {top})">')
        parts.extend(_panel(panel))
        parts.append("</g>")
        top += _height(panel)
    parts.append("</svg>\n")
    return "\n".join(parts)


def _height(panel: Panel) -> int:
    return _HEAD + len(panel.rows) * _ROW + _FOOT


def _panel(panel: Panel) -> Iterator[str]:
    bottom = _HEAD + len(panel.rows) * _ROW
    yield _text(20, 26, panel.title, "title")
    yield _text(
        _TTFT[0],
        48,
        "time to first token, seconds; dot: median, bar: mean, band: median to 99th percentile",
        "faint",
    )
    yield _text(_LOAD[0], 48, "prefill seconds of each node; line: the mean", "faint")
    scale = _Scale.over([summary for _, summary in panel.rows])
    for decade in scale.decades():
        x = scale.x(decade)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_HEAD - 8}" y2="{bottom}"/>'
        yield _text(x, bottom + 16, f"{decade:g}", "faint middle")
    for index, (name, summary) in enumerate(panel.rows):
        yield f'<g transform="translate(0 {_HEAD + index * _ROW})">'
        yield _text(_NAMES - 14, 13, name, "end")
        yield from _distribution(summary, scale)
        yield from _loads(summary.node_loads)
        yield "</g>"


@dataclass(frozen=True, slots=True)
class _Scale:
    """Seconds to pixels, logarithmic."""

    low: float
    high: float

    @classmethod
    def over(cls, summaries: Sequence[Summary]) -> "_Scale":
        shown = [
            _log(seconds)
            for summary in summaries
            for seconds in (summary.ttft_p50_s, summary.ttft_mean_s, summary.ttft_p99_s)
        ]
        return cls(min(shown) - 0.1, max(shown) + 0.1)

    def x(self, seconds: float) -> float:
        left, right = _TTFT
        return left + (_log(seconds) - self.low) / (self.high - self.low) * (right - left)

    def decades(self) -> list[float]:
        return [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1)]


def _log(seconds: float) -> float:
    return math.log10(max(seconds, 1e-3))


def _distribution(summary: Summary, scale: _Scale) -> Iterator[str]:
    median, mean, p99 = (
        scale.x(value) for value in (summary.ttft_p50_s, summary.ttft_mean_s, summary.ttft_p99_s)
    )
    label = f"mean {summary.ttft_mean_s:.3g} s, p99 {summary.ttft_p99_s:.3g} s"
    yield f"<g><title>{label}</title>"
    yield f'<line class="spread" x1="{median:.1f}" x2="{p99:.1f}" y1="9" y2="9"/>'
    yield f'<circle class="median" cx="{median:.1f}" cy="9" r="4.5"/>'
    yield f'<line class="mean" x1="{mean:.1f}" x2="{mean:.1f}" y1="2" y2="16"/></g>'


def _loads(loads: Sequence[float]) -> Iterator[str]:
    """A bar a node; the row's height is twice the mean, and what exceeds it is cut off in another colour."""
    left, right = _LOAD
    pitch = (right - left) / len(loads)
    full = _ROW - 4
    for index, load in enumerate(loads):
        height = min(load / 2, 1.0) * full
        kind = "over" if load > 2 else "load"
        yield (
            f'<rect class="{kind}" x="{left + index * pitch:.1f}" y="{full - height:.1f}" '
            f'width="{pitch * 0.8:.1f}" height="{height:.1f}"><title>{load:.2f} of the mean</title></rect>'
        )
    yield f'<line class="grid" x1="{left}" x2="{right}" y1="{full / 2}" y2="{full / 2}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y}" class="{kind}">{escape(text)}</text>'
