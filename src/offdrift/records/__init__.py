"""Typed rollout records with provenance, and their store."""

from offdrift.records.provenance import Provenance as Provenance
from offdrift.records.provenance import Sampling as Sampling
from offdrift.records.rollouts import EvidenceKind as EvidenceKind
from offdrift.records.rollouts import FullVocab as FullVocab
from offdrift.records.rollouts import HiddenStates as HiddenStates
from offdrift.records.rollouts import Rollouts as Rollouts
from offdrift.records.rollouts import TopK as TopK
