"""The Grafana dashboard, the alert rules and the pages, against the metrics that there are."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql import asked, named
from telemetry_fleet import LABELS, Fleet, use_everything

TOP = Path(__file__).parent.parent
DASHBOARD: dict[str, Any] = json.loads((TOP / "envoy" / "grafana" / "inferact.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((TOP / "envoy" / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
SCRAPE = yaml.safe_load((TOP / "envoy" / "prometheus" / "scrape.yml").read_text())
ENVOY = {
    name: set(labels.split(",")) - {""}
    for name, _, labels in (
        line.partition(" ")
        for line in (TOP / "tests" / "data" / "envoy-1.40-metrics.txt").read_text().splitlines()
        if not line.startswith("#")
    )
}
KNOWN = LABELS | ENVOY
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [target for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = [target["expr"] for target in TARGETS] + [rule["expr"] for rule in RULES]
PAGES = (TOP / "README.md", *sorted((TOP / "docs").glob("*.md")), *sorted((TOP / "envoy").rglob("*.md")))
OF_PROMETHEUS = {"up"}
NO_METRICS = {"envoy_cluster_", "inferact_", "envoy_admin_port"}
"""A prefix of names, and a key of the configuration."""


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_and_label_of_an_expression_exists(expression: str) -> None:
    assert asked(expression).unknown(KNOWN) <= OF_PROMETHEUS


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_value_that_a_label_is_compared_to_can_come_up(expression: str) -> None:
    fleet = Fleet()
    use_everything(fleet)
    seen = {pair for _, pairs in fleet.samples() for pair in pairs}
    closed = {"status", "level", "source", "policy", "reason", "priority"}
    assert {pair for pair in asked(expression).values() if pair[0] in closed} <= seen


def test_what_does_not_exist_is_found() -> None:
    assert asked("sum by (mode) (inferact_requests_totals{node='a'})").unknown(KNOWN) == {
        "inferact_requests_totals",
        "inferact_requests_totals.node",
        "mode",
    }


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target["expr"][:40])
def test_a_legend_names_labels_of_the_result(target: dict[str, str]) -> None:
    found = asked(target["expr"])
    possible = {"instance", "job"}.union(*(KNOWN[name] for name in found.names()))
    kept = (found.labels & possible) or possible
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept | {"instance"}


def test_every_panel_has_a_title_of_its_own_and_says_what_it_shows() -> None:
    titles = [panel["title"] for panel in PANELS if panel["type"] != "stat"]
    assert len(DASHBOARD["panels"]) == len({panel["id"] for panel in DASHBOARD["panels"]})
    assert all(panel["description"] and panel["targets"] for panel in PANELS)
    assert titles


def test_panels_lie_beside_each_other_within_the_width() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert cells.isdisjoint(mine), panel["title"]
        cells |= mine


def test_the_dashboard_shows_every_metric_of_the_service() -> None:
    shown = set().union(*(asked(target["expr"]).names() for target in TARGETS))
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in LABELS} <= families


def test_alerts_have_names_of_their_own_and_tell_what_to_do() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names))
    for rule in RULES:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^#+ (.+)$", (TOP / page).read_text(), re.MULTILINE)
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, rule["alert"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_summary_uses_labels_that_its_metrics_have(rule: dict[str, Any]) -> None:
    labels = set().union(*(KNOWN.get(name, set()) for name in asked(rule["expr"]).names()))
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= labels


def test_the_jobs_that_alerts_name_are_scraped() -> None:
    jobs = {job["job_name"] for job in SCRAPE["scrape_configs"]}
    used = {value for rule in RULES for label, value in asked(rule["expr"]).values() if label == "job"}
    assert used == jobs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(TOP)))
def test_every_metric_that_a_page_names_exists(page: Path) -> None:
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in KNOWN}
    assert named(page.read_text()) <= families | set(KNOWN) | NO_METRICS
