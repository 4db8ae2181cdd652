"""The dashboard, the alerts and the scrape configuration of `serving/dashboards/`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.tables import table

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "serving" / "dashboards"
PAGE = ROOT / "tests" / "server" / "metrics.txt"
PROMTOOL = shutil.which("promtool")
OF_THE_PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "process_max_fds"}
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus has it)"
)


def board() -> dict[str, Any]:
    """Grafana's dashboard."""
    found: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
    return found


def queries() -> list[str]:
    """The queries of all panels, with the variables as Grafana fills them in."""
    texts = [target["expr"] for panel in board()["panels"] for target in panel["targets"]]
    return [text.replace("$__rate_interval", "1m").replace("$model", ".*").replace("$instance", ".*") for text in texts]


def alerts() -> list[dict[str, Any]]:
    """The rules."""
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def promtool(*arguments: str | Path) -> None:
    checked = subprocess.run([str(PROMTOOL), *map(str, arguments)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_metric_of_a_query_is_on_the_page() -> None:
    there = set(re.findall(r"^(\w+)(?:\{.*\})? ", PAGE.read_text(), re.MULTILINE)) | OF_THE_PROCESS
    asked = [*queries(), *(rule["expr"] for rule in alerts())]
    asked += [variable["query"]["query"] for variable in board()["templating"]["list"] if variable["type"] == "query"]
    names = {name for text in asked for name in re.findall(r"\b(?:djl_trtllm|trtllm|process)_\w+", text)}
    assert len(names) > 20
    assert names <= there


def test_every_label_of_a_query_is_one_of_its_metric() -> None:
    page = PAGE.read_text()
    for text in [*queries(), *(rule["expr"] for rule in alerts())]:
        for name, matchers in re.findall(r"\b((?:djl_)?trtllm_\w+)\{([^}]*)\}", text):
            labels = set(re.findall(r"(\w+)(?:=~|!~|!=|=)", matchers)) - {"instance", "job"}
            (sample, *_) = re.findall(rf"^{name}\{{(.*)\}} ", page, re.MULTILINE) or [""]
            assert labels <= set(re.findall(r'(\w+)="', sample)), (name, labels)


def test_panels_have_titles_of_their_own_and_do_not_overlap() -> None:
    panels = board()["panels"]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


@needs_promtool
def test_prometheus_accepts_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries())]
    rule_file = tmp_path / "queries.yml"
    rule_file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", rule_file)


@needs_promtool
def test_prometheus_accepts_the_configuration_with_the_alerts() -> None:
    promtool("check", "config", FOLDER / "prometheus.yml")


CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = table(__file__, "CASES")


def test_every_alert_has_a_case() -> None:
    assert [rule["alert"] for rule in alerts()] == list(CASES)


@needs_promtool
@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_for_its_case_only(tmp_path: Path, alert: str) -> None:
    series, labels = CASES[alert]
    (rule,) = [rule for rule in alerts() if rule["alert"] == alert]
    # Its own texts are not repeated here.
    bare = {key: value for key, value in rule.items() if key != "annotations"}
    others = [{key: value for key, value in each.items() if key != "annotations"} for each in alerts()]
    rule_file = tmp_path / "rules.yml"
    rule_file.write_text(yaml.safe_dump({"groups": [{"name": "alerts", "rules": others}]}))
    fired = [{"exp_labels": {**labels, **bare["labels"]}}]
    tests = [
        {"eval_time": "20m", "alertname": each["alert"], "exp_alerts": fired if each["alert"] == alert else []}
        for each in alerts()
    ]
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": tests,
    }
    test_file = tmp_path / "test.yml"
    test_file.write_text(yaml.safe_dump({"rule_files": [str(rule_file)], "tests": [case]}))
    promtool("test", "rules", test_file)
