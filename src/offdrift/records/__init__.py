"""Typed rollout records with provenance, and their store.

A name is imported when it is first used: the readers of logs need none of them.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from offdrift.records.provenance import Provenance as Provenance
    from offdrift.records.provenance import Sampling as Sampling
    from offdrift.records.rollouts import EvidenceKind as EvidenceKind
    from offdrift.records.rollouts import FullVocab as FullVocab
    from offdrift.records.rollouts import HiddenStates as HiddenStates
    from offdrift.records.rollouts import Rollouts as Rollouts
    from offdrift.records.rollouts import TopK as TopK

_HOME = {
    **dict.fromkeys(("Provenance", "Sampling"), "provenance"),
    **dict.fromkeys(("EvidenceKind", "FullVocab", "HiddenStates", "Rollouts", "TopK"), "rollouts"),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


def __getattr__(name: str) -> typing.Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
