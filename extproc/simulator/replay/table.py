"""A table of replays, for people."""

from rich import box
from rich.table import Table

from extproc.simulator.replay.report import Panel, Summary


def table(panel: Panel) -> Table:
    """The panel's policies. Times in seconds, but of a pick: microseconds."""
    made = Table(title=panel.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    made.padding = (0, 1, 0, 0)
    made.add_column("policy", no_wrap=True)
    headings = ["TTFT", "x best", "p50", "p90", "p99", "end", "hits", "spread", "pick us"]
    if refused := any(row.refused for _, row in panel.rows):
        headings.append("refused")
    for heading in headings:
        made.add_column(heading, justify="right", no_wrap=True)
    best_s = panel.rows[0][1].ttft_mean_s
    for policy, row in panel.rows:
        made.add_row(policy, *_numbers(row, best_s), *([str(row.refused)] if refused else []))
    return made


def _numbers(row: Summary, best_s: float) -> list[str]:
    times = (row.ttft_p50_s, row.ttft_p90_s, row.ttft_p99_s, row.latency_mean_s)
    return [
        _short(row.ttft_mean_s),
        _short(row.ttft_mean_s / best_s),
        *map(_short, times),
        f"{row.hit_ratio:.1%}",
        f"{row.load_spread:.2f}",
        f"{row.pick_mean_us:.0f}",
    ]


def _short(value: float) -> str:
    """At least two digits that tell something, in few characters."""
    if value >= 1000:
        return f"{value / 1000:.1f}k"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
