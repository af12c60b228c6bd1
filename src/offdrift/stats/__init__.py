"""Mergeable statistics and the metrics computed from them."""

from offdrift.stats.alphas import Alphas as Alphas
from offdrift.stats.drift import DriftStats as DriftStats
from offdrift.stats.formulas import Metric as Metric
from offdrift.stats.histogram import Histogram as Histogram
from offdrift.stats.metrics import METRICS as METRICS
from offdrift.stats.metrics import summarize as summarize
from offdrift.stats.paired import Comparison as Comparison
from offdrift.stats.paired import Mean as Mean
from offdrift.stats.paired import compare_all as compare_all
from offdrift.stats.paired import over_seeds as over_seeds
from offdrift.stats.paired import paired as paired
from offdrift.stats.signature import signature as signature
