"""Advantage estimators: from rewards to advantages, by name, without gradient.

A name is imported when it is first used: what only names an estimator waits for none.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from offdrift.advantages.base import Credit as Credit
    from offdrift.advantages.table import ADVANTAGES as ADVANTAGES
    from offdrift.advantages.table import Estimator as Estimator
    from offdrift.advantages.table import advantages as advantages
    from offdrift.advantages.token import generalized_advantage as generalized_advantage
    from offdrift.advantages.token import returns_to_go as returns_to_go

AdvantageName = typing.Literal[
    "grpo",
    "grpo_vectorized",
    "dr_grpo",
    "batch_mean",
    "grpo_passk",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
    "gdpo",
    "reinforce_plus_plus_baseline",
    "gae",
    "reinforce_plus_plus",
    "remax",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "opob",
    "rl_zvp",
]
"""Estimators of this library; those of the user's are in `ADVANTAGES` besides."""

_HOME = {
    "Credit": "base",
    **dict.fromkeys(("ADVANTAGES", "Estimator", "advantages"), "table"),
    **dict.fromkeys(("generalized_advantage", "returns_to_go"), "token"),
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


def __getattr__(name: str) -> typing.Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
