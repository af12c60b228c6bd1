"""Diagnosis: from the metrics of a run to findings on what is wrong, how it is known, why, and what to do."""

from offdrift.judge.collapse import (
    FeatureRecorder,
    Features,
    VarianceProxies,
    ahead,
    auroc,
    collapse,
    lr_guard,
    variance_proxies,
)
from offdrift.judge.findings import Context, Evidence, Finding, num_experts
from offdrift.judge.ladder import Escalation, escalate
from offdrift.judge.readings import READINGS
from offdrift.judge.rules import Rules, load_rules
from offdrift.judge.verdict import verdict
from offdrift.judge.watcher import Watcher, diagnose, judge

__all__ = [
    "READINGS",
    "Context",
    "Escalation",
    "Evidence",
    "FeatureRecorder",
    "Features",
    "Finding",
    "Rules",
    "VarianceProxies",
    "Watcher",
    "ahead",
    "auroc",
    "collapse",
    "diagnose",
    "escalate",
    "judge",
    "load_rules",
    "lr_guard",
    "num_experts",
    "variance_proxies",
    "verdict",
]
