"""Diagnosis: metrics in, findings out. What is wrong, how it is known, why, and what to do."""

from offdrift.diagnosis.collapse import FeatureRecorder, Features, ahead, auroc, collapse
from offdrift.diagnosis.context import Context
from offdrift.diagnosis.escalation import Escalation, escalate
from offdrift.diagnosis.finding import Evidence, Finding
from offdrift.diagnosis.guard import lr_guard
from offdrift.diagnosis.judge import Watcher, diagnose, judge
from offdrift.diagnosis.proxies import VarianceProxies, variance_proxies
from offdrift.diagnosis.readings import READINGS
from offdrift.diagnosis.rules import Rules, load_rules
from offdrift.diagnosis.verdict import verdict

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
