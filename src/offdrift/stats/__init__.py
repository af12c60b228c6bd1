"""Mergeable statistics and the metrics computed from them.

Comparisons over seeds are imported when they are first used: a log is of one run.
"""

import importlib
import typing

from offdrift.stats.alphas import Alphas as Alphas
from offdrift.stats.drift import DriftStats as DriftStats
from offdrift.stats.formulas import Metric as Metric
from offdrift.stats.histogram import Histogram as Histogram
from offdrift.stats.metrics import METRICS as METRICS
from offdrift.stats.metrics import summarize as summarize
from offdrift.stats.signature import signature as signature

if typing.TYPE_CHECKING:
    from offdrift.stats.seeds import Comparison as Comparison
    from offdrift.stats.seeds import Mean as Mean
    from offdrift.stats.seeds import compare_all as compare_all
    from offdrift.stats.seeds import over_seeds as over_seeds
    from offdrift.stats.seeds import paired as paired

_OF_SEEDS = ("Comparison", "Mean", "compare_all", "over_seeds", "paired")


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_SEEDS})


def __getattr__(name: str) -> typing.Any:
    if name in _OF_SEEDS:
        return getattr(importlib.import_module("offdrift.stats.seeds"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
