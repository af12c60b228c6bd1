"""The text format, read back by Prometheus' own parser where it is installed."""

import math

import pytest

from offdrift.alarms.exposition import Family, exposition, metric_name
from offdrift.stats.metrics import METRICS
from tests.alarms.receivers import HOSTILE


def test_numbers_and_labels_are_written_as_the_format_says():
    values = (1, 0.1, 1e-300, math.inf, -math.inf, math.nan)
    family = Family("x", "gauge", "a\\b\nc", [({"i": str(i)}, value) for i, value in enumerate(values)])
    assert exposition([family, Family("empty", "gauge", "")]).splitlines() == [
        "# HELP x a\\\\b\\nc",
        "# TYPE x gauge",
        'x{i="0"} 1',
        'x{i="1"} 0.1',
        'x{i="2"} 1e-300',
        'x{i="3"} +Inf',
        'x{i="4"} -Inf',
        'x{i="5"} NaN',
    ]


def test_a_hostile_label_stays_one_label():
    text = exposition([Family("x", "gauge", "h", [({"what": HOSTILE}, 1)])])
    assert text.count("\n") == 3
    text.encode()
    parser = pytest.importorskip("prometheus_client.parser")
    ((sample,),) = ([f.samples[0]] for f in parser.text_string_to_metric_families(text))
    assert sample.labels == {"what": HOSTILE.replace("\ud800", "?")}


def test_no_two_metrics_of_the_table_share_a_name():
    names = [metric_name(name) for name in METRICS]
    assert len(names) > 200
    assert len(set(names)) == len(names)
