"""Typed rollout records with provenance, and their store.

The records need torch and are imported when first used: writing a file whole or not at all (`atomic`) does not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offdrift.records.rollouts import EvidenceKind as EvidenceKind
    from offdrift.records.rollouts import FullVocab as FullVocab
    from offdrift.records.rollouts import HiddenStates as HiddenStates
    from offdrift.records.rollouts import Provenance as Provenance
    from offdrift.records.rollouts import Rollouts as Rollouts
    from offdrift.records.rollouts import Sampling as Sampling
    from offdrift.records.rollouts import TopK as TopK

_RECORDS = ("EvidenceKind", "FullVocab", "HiddenStates", "Provenance", "Rollouts", "Sampling", "TopK")


def __getattr__(name: str) -> Any:
    if name not in _RECORDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from offdrift.records import rollouts

    return getattr(rollouts, name)
