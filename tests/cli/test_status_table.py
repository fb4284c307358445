"""The table of `inferact status` in terminals of any width."""

import pytest
from rich.console import Console

from extproc.cli.status import _overview

ID = "node-a100-in-rack-0042"
NODE = {
    "id": ID,
    "hardware": "a100-80g",
    "status": "healthy",
    "drained": True,
    "requests_in_flight": 3,
    "requests_total": 1240,
    "p99_latency_ms": 820,
    "models": ["meta-llama/Llama-3-8B-Instruct"],
}


def shown(width: int) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        console.print(_overview({"nodes": [NODE]}, width))
    return captured.get()


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 120, 160])
def test_the_id_stays_whole_and_every_line_fits(width: int) -> None:
    text = shown(width)
    assert ID in text and "…" not in text
    assert all(len(line) <= width for line in text.splitlines())


def test_the_narrower_the_terminal_the_fewer_columns() -> None:
    assert "Llama" in shown(160) and "820 ms" in shown(160)
    assert "Llama" not in shown(80) and "820 ms" not in shown(60)
    assert "drained" in shown(60)
