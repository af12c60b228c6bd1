"""Mergeable statistics and the metrics computed from them."""

from offdrift.stats.drift import DriftStats as DriftStats
from offdrift.stats.histogram import Histogram as Histogram
from offdrift.stats.signature import signature as signature
from offdrift.stats.summary import METRICS as METRICS
from offdrift.stats.summary import Metric as Metric
from offdrift.stats.summary import summarize as summarize
