"""Diagnosis: metrics in, findings out. What is wrong, how it is known, why, and what to do."""

from offdrift.judge.collapse import FeatureRecorder, Features, ahead, auroc, collapse
from offdrift.judge.context import Context
from offdrift.judge.findings import Evidence, Finding
from offdrift.judge.ladder import Escalation, escalate
from offdrift.judge.lr_guard import lr_guard
from offdrift.judge.proxies import VarianceProxies, variance_proxies
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
    "variance_proxies",
    "verdict",
]
