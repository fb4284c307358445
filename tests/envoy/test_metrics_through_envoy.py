"""Envoy's own metrics: those that dashboard, alerts and pages use are there, and count."""

import re
from pathlib import Path

import pytest
from envoy_stack import Stack

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]
RECORDED = Path(__file__).parent.parent / "data" / "envoy-1.40-metrics.txt"
SAMPLE = re.compile(r"^(\w+)\{(.*?)\} ", re.MULTILINE)


async def exported(stack: Stack) -> dict[str, set[str]]:
    """Every metric that Envoy exports now, with its labels."""
    port = stack.service.config.scheduler.envoy_admin_port
    text = (await stack.client.get(f"http://127.0.0.1:{port}/stats/prometheus")).text
    found: dict[str, set[str]] = {}
    for name, labels in SAMPLE.findall(text):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


async def test_the_metrics_that_we_rely_on_are_exported_with_their_labels(stack: Stack) -> None:
    assert (await stack.chat()).status_code == 200
    there = await exported(stack)
    for line in RECORDED.read_text().splitlines():
        if not line.startswith("#"):
            name, _, labels = line.partition(" ")
            assert there.get(name) == set(labels.split(",")) - {""}, name
