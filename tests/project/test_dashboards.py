"""The dashboard, the alerts and the scrape configuration of `serving/dashboards/`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.tables import by_rows, table

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "serving" / "dashboards"
PAGE = ROOT / "tests" / "server" / "metrics.txt"
STORY = ROOT / "docs" / "troubleshooting.md"
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


def rules() -> list[dict[str, Any]]:
    """The rules, records included."""
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def promtool(*arguments: str | Path) -> None:
    checked = subprocess.run([str(PROMTOOL), *map(str, arguments)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_metric_of_a_query_is_on_the_page() -> None:
    there = set(re.findall(r"^(\w+)(?:\{.*\})? ", PAGE.read_text(), re.MULTILINE)) | OF_THE_PROCESS
    asked = [*queries(), *queries_of_the_page(), *(rule["expr"] for rule in rules())]
    asked += [variable["query"]["query"] for variable in board()["templating"]["list"] if variable["type"] == "query"]
    names = {name for text in asked for name in re.findall(r"\b(?:djl_trtllm|trtllm|process)_\w+", text)}
    records = {rule["record"] for rule in rules() if "record" in rule}
    assert records == {name for text in asked for name in re.findall(r"\bdjl_trtllm:[\w:]+", text)}
    assert len(names) > 20
    assert names <= there


def test_every_label_of_a_query_is_one_of_its_metric() -> None:
    page = PAGE.read_text()
    for text in [*queries(), *(rule["expr"] for rule in rules())]:
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


def queries_of_the_page() -> list[str]:
    """The lines of PromQL in the story of each alert."""
    blocks = re.findall(r"^```promql\n(.*?)^```", STORY.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@needs_promtool
def test_prometheus_accepts_every_query(tmp_path: Path) -> None:
    texts = [*queries(), *queries_of_the_page()]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(texts)]
    rule_file = tmp_path / "queries.yml"
    rule_file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", rule_file)


@needs_promtool
def test_prometheus_accepts_the_configuration_with_the_alerts() -> None:
    promtool("check", "config", FOLDER / "prometheus.yml")


CASES: dict[str, list[Any]] = table(__file__, "CASES")
"""Series in which an alert fires, its labels, and when; after 20 minutes if that is not said."""
NIGHT: dict[str, str] = table(__file__, "NIGHT")
"""Eight hours of two servers, of which the autoscaler takes one: few refusals, one error, a KV cache that fills."""


def test_every_alert_has_a_case_and_a_story() -> None:
    assert [rule["alert"] for rule in alerts()] == list(CASES)
    assert set(re.findall(r"`(DjlTrtllm\w+)`", STORY.read_text())) == set(CASES)


def firing(folder: Path, series: dict[str, str], fired: dict[str, dict[str, str]], times: Sequence[str]) -> None:
    """Compare with promtool what fires in these series; `fired` are the labels by the alert's name."""
    # Their texts are not repeated here.
    bare = [{key: value for key, value in each.items() if key != "annotations"} for each in rules()]
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": bare}]}))
    tests = [
        {
            "eval_time": time,
            "alertname": each["alert"],
            "exp_alerts": [{"exp_labels": {**fired[each["alert"]], **each["labels"]}}]
            if each["alert"] in fired
            else [],
        }
        for time in times
        for each in alerts()
    ]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    case = {"interval": "1m", "input_series": inputs, "alert_rule_test": tests}
    (folder / "test.yml").write_text(yaml.safe_dump({"rule_files": [str(folder / "rules.yml")], "tests": [case]}))
    promtool("test", "rules", folder / "test.yml")


@needs_promtool
@by_rows("alert", CASES)
def test_an_alert_fires_for_its_case_only(tmp_path: Path, alert: str) -> None:
    series, labels, *time = CASES[alert]
    if not any(name.startswith("up{") for name in series):
        series = {'up{job="djl-trtllm",instance="z"}': "1+0x500", **series}
    firing(tmp_path, series, {alert: labels}, time or ["20m"])


@needs_promtool
def test_nothing_fires_in_a_quiet_night(tmp_path: Path) -> None:
    firing(tmp_path, NIGHT, {}, ["6m", "30m", "1h", "2h", "250m", "302m", "310m", "6h", "405m", "8h"])
