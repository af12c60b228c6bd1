"""Typed rollout records with provenance, and their store."""

from offdrift.rollouts.records import EvidenceKind as EvidenceKind
from offdrift.rollouts.records import FullVocab as FullVocab
from offdrift.rollouts.records import HiddenStates as HiddenStates
from offdrift.rollouts.records import Provenance as Provenance
from offdrift.rollouts.records import Rollouts as Rollouts
from offdrift.rollouts.records import Sampling as Sampling
from offdrift.rollouts.records import TopK as TopK
