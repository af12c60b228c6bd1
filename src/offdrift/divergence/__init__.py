"""Divergences of two policies at each token, and the grade of evidence of each.

A name is imported when it is first used: who needs no logits imports no kernels.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offdrift.divergence.evidence import Divergence as Divergence
    from offdrift.divergence.evidence import Grade as Grade
    from offdrift.divergence.exact import ExactDivergences as ExactDivergences
    from offdrift.divergence.fused import exact_divergences as exact_divergences
    from offdrift.divergence.fused import route as route
    from offdrift.divergence.head import Head as Head
    from offdrift.divergence.hidden import hidden_divergences as hidden_divergences
    from offdrift.divergence.interval import tail_log_ratio as tail_log_ratio
    from offdrift.divergence.interval import topk_divergences as topk_divergences
    from offdrift.divergence.losses import entropy as entropy
    from offdrift.divergence.losses import kl_current_rollout as kl_current_rollout
    from offdrift.divergence.losses import kl_rollout_current as kl_rollout_current
    from offdrift.divergence.sampled import abs_log_ratio as abs_log_ratio
    from offdrift.divergence.sampled import k1 as k1
    from offdrift.divergence.sampled import k2 as k2
    from offdrift.divergence.sampled import k3 as k3

_HOME = {
    "Divergence": "evidence",
    "Grade": "evidence",
    "ExactDivergences": "exact",
    "exact_divergences": "fused",
    "route": "fused",
    "Head": "head",
    "hidden_divergences": "hidden",
    "tail_log_ratio": "interval",
    "topk_divergences": "interval",
    "entropy": "losses",
    "kl_current_rollout": "losses",
    "kl_rollout_current": "losses",
    "abs_log_ratio": "sampled",
    "k1": "sampled",
    "k2": "sampled",
    "k3": "sampled",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
