"""What is served of a run: its last numbers, its findings, and when a step last came."""

import math
import re

import pytest

from offdrift.alarms.exposition import metric_name
from offdrift.alarms.live_metrics import LiveMetrics
from offdrift.stats.metrics import METRICS
from tests.alarms.receivers import FINDING, HOSTILE


def lines(live: LiveMetrics) -> dict[str, str]:
    rows = (line.rpartition(" ") for line in live.text().splitlines() if not line.startswith("#"))
    return {name: value for name, _, value in rows}


def test_rows_and_findings_are_served_by_run_and_source():
    live = LiveMetrics("runs/a", clock=lambda: 1000.5)
    live.show("none", {"step": 3, "update": 3, "full/k3": 0.25, "reward/mean": math.nan}, [])
    live.show("none", {"step": 4, "update": 4, "full/k3": 0.5, "made_up/x": 7}, [FINDING])
    live.show("tis", {"step": 2, "full/k3": 0.125}, [])
    served = lines(live)
    at = '{run="runs/a",source="none"}'
    assert served[f"offdrift_step{at}"] == "4"
    assert served[f"offdrift_step_timestamp_seconds{at}"] == "1000.5"
    assert served[f"offdrift_steps_total{at}"] == "2"
    assert served[f"offdrift_full_k3{at}"] == "0.5"
    assert served['offdrift_full_k3{run="runs/a",source="tis"}'] == "0.125"
    assert served['offdrift_other{run="runs/a",source="none",name="made_up/x"}'] == "7"
    assert f"offdrift_reward_mean{at}" not in served, "of an earlier step"
    assert served['offdrift_findings{run="runs/a",source="none",severity="act"}'] == "1"
    assert served['offdrift_findings{run="runs/a",source="tis",severity="act"}'] == "0"
    (finding,) = [name for name in served if name.startswith("offdrift_finding_step")]
    assert served[finding] == "40"
    assert 'rule="stale_engine"' in finding
    assert f'what="{FINDING["symptom"]}"' in finding


def test_nothing_is_served_twice_and_every_family_says_what_it_is():
    live = LiveMetrics("r")
    live.show("log", {"step": 1, **dict.fromkeys(METRICS, 0.5)}, [FINDING, {**FINDING, "rule": "b"}])
    names = [line.rpartition(" ")[0] for line in live.text().splitlines() if not line.startswith("#")]
    assert len(names) == len(set(names)) > len(METRICS)
    helped = re.findall(r"^# HELP (\S+) \S", live.text(), re.M)
    typed = re.findall(r"^# TYPE (\S+) (?:gauge|counter)$", live.text(), re.M)
    assert helped == typed
    assert {metric_name(name) for name in METRICS} < set(helped)


def test_a_parser_of_prometheus_reads_it_whatever_the_run_is_called():
    parser = pytest.importorskip("prometheus_client.parser")
    live = LiveMetrics(HOSTILE)
    live.show(HOSTILE, {"step": 1, HOSTILE: 2, **dict.fromkeys(METRICS, 0.5)}, [{**FINDING, "symptom": HOSTILE}])
    families = list(parser.text_string_to_metric_families(live.text()))
    assert len(families) == len(METRICS) + 7
    clean = HOSTILE.replace("\ud800", "?")
    labels = [sample.labels for family in families for sample in family.samples]
    assert {x["run"] for x in labels} == {clean}
    assert {x["what"] for x in labels if "what" in x} == {clean}
