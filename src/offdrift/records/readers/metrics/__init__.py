"""Metrics that frameworks and trackers already write, read as one row per step under this library's names."""

from offdrift.records.readers.metrics.find import MetricLog as MetricLog
from offdrift.records.readers.metrics.find import find_metrics as find_metrics
