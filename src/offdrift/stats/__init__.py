"""Mergeable statistics and the metrics computed from them."""

from offdrift.stats.drift import DriftStats as DriftStats
from offdrift.stats.formulas import Metric as Metric
from offdrift.stats.histogram import Histogram as Histogram
from offdrift.stats.metrics import METRICS as METRICS
from offdrift.stats.metrics import summarize as summarize
from offdrift.stats.signature import signature as signature
