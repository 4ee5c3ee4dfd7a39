"""The Grafana dashboard is valid, and shows exactly the metrics that are exported."""

import json
import pathlib
import re
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from telegrad.insight.prometheus import register
from tests.insight.accounts import made_up
from tests.insight.test_prometheus import EVENTS

FILE = pathlib.Path(__file__).parents[2] / "docs/insight/grafana.json"


@pytest.fixture(scope="module")
def board() -> Any:
    return json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    registry = CollectorRegistry()
    registered = register(registry, made_up)
    for event in EVENTS:
        registered.counters(event)
    text = generate_latest(registry).decode()
    registered.close()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    return found


def queries(board: Any) -> list[tuple[str, str]]:
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    return [(target["expr"], target["legendFormat"]) for target in targets]


def test_the_dashboard_is_valid(board: Any) -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= board.keys()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {each["name"] for each in board["templating"]["list"]}
    for panel in panels:
        place = panel["gridPos"]
        assert panel["title"]
        assert place["x"] + place["w"] <= 24
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat", "table")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
    assert set(re.findall(r"\$\{?(\w+)", FILE.read_text())) - {"__rate_interval", "__all"} <= variables


def test_no_panel_covers_another(board: Any) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_each_metric_and_each_label_is_in_a_scrape(board: Any, samples: dict[str, set[str]]) -> None:
    asked = queries(board) + [(each["definition"], "") for each in board["templating"]["list"] if "definition" in each]
    for query, shown in asked:
        names = set(re.findall(r"telegrad_\w+", query))
        assert names
        assert names <= samples.keys(), query
        labels = set().union(*(samples[name] for name in names))
        grouped = re.findall(r"(?:by|on|group_left) ?\(([^)]*)\)", query)
        inside = re.findall(r"(\w+)[!=]~?\"", query)
        used = {label.strip() for group in grouped for label in group.split(",")} | set(inside)
        assert used | set(re.findall(r"{{(\w+)}}", shown)) <= labels, query


def test_every_exported_metric_is_shown(board: Any, samples: dict[str, set[str]]) -> None:
    shown = {name for query, _ in queries(board) for name in re.findall(r"telegrad_\w+", query)}
    ways = ("_bucket", "_sum", "_count", "_created")  # the samples of a histogram
    family = {name: re.sub("|".join(f"{way}$" for way in ways), "", name) for name in (*samples, *shown)}
    missing = {family[name] for name in samples} - {family[name] for name in shown}
    assert missing == {"telegrad_phase_age_seconds", "telegrad_stage_actions_total"}
