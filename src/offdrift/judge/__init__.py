"""Diagnosis: from the metrics of a run to findings on what is wrong, how it is known, why, and what to do."""

from offdrift.judge.decision import decide as decide
from offdrift.judge.findings import Context as Context
from offdrift.judge.findings import Evidence as Evidence
from offdrift.judge.findings import Finding as Finding
from offdrift.judge.findings import num_experts as num_experts
from offdrift.judge.readings import READINGS as READINGS
from offdrift.judge.regime import regime as regime
from offdrift.judge.rules import Rules as Rules
from offdrift.judge.rules import load_rules as load_rules
from offdrift.judge.verdict import escalate as escalate
from offdrift.judge.verdict import verdict as verdict
from offdrift.judge.watcher import Watcher as Watcher
from offdrift.judge.watcher import diagnose as diagnose
from offdrift.judge.watcher import judge as judge
