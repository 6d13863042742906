"""The Grafana dashboard and the alert rules of deploy/ use figures that the gateway exports."""

import json
import re
from typing import Any

import pytest
import yaml
from tinkermq.actors.gateway.limits import Counters, pool_text

from tests.support.configs import REPOSITORY

FOLDER = REPOSITORY / "deploy" / "monitoring"
SUFFIXES = {"counter": ("",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def exported() -> set[str]:
    """Return the names in `/metrics` of a gateway."""
    text = (Counters().text() + pool_text({}, [], [], [])).decode()
    kinds: list[tuple[str, str]] = re.findall(r"^# TYPE (\w+) (\w+)$", text, flags=re.MULTILINE)
    return {name + suffix for name, kind in kinds for suffix in SUFFIXES[kind]}


def dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / "grafana.json").read_text())


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return group["rules"]


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yaml"])
def test_every_figure_that_is_asked_for_is_exported(file: str) -> None:
    named = set(re.findall(r"\btinkermq_\w+", (FOLDER / file).read_text()))
    assert named
    assert named - exported() == set()


def test_every_figure_of_the_pool_is_on_the_dashboard() -> None:
    shown = set(re.findall(r"\btinkermq_\w+", json.dumps(dashboard())))
    left_out = {"tinkermq_actor_figure"}  # one for each figure of each role
    details = re.compile(r"_(?:created|sum|count)$")
    assert {name for name in exported() - shown if not details.search(name)} == left_out


def test_panels_do_not_overlap_and_alerts_say_what_happened() -> None:
    panels = dashboard()["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == len(panels)
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules())
    assert len({rule["alert"] for rule in rules()}) == len(rules())
