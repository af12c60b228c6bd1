"""Which part of a method runs where inside verl, and which methods cannot run there.

verl's driver knows the rollout and the old policy, and its policy loss the old and the current one, or
in bypass mode the rollout and the current one. A row is cut in two, `driver_share` (its parts on the
mismatch) and `loss_share` (the rest), and each is used where its policies are known.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from offdrift.correction import Correction
from offdrift.correction.compose import factors
from offdrift.errors import EvidenceError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import METHODS, Method
from offdrift.segments import Segments


def driver_share(row: Method) -> Correction:
    """The gates and weights that verl's driver can apply: those on the mismatch."""
    of = row.correction
    return Correction(
        tuple(g for g in of.gates if g.on == "mismatch"),
        tuple(w for w in of.weights if w.on == "mismatch"),
    )


def loss_share(row: Method) -> Method:
    """The method without its driver's share."""
    of, gone = row.correction, driver_share(row)
    rest = Correction(
        tuple(g for g in of.gates if g not in gone.gates),
        tuple(w for w in of.weights if w not in gone.weights),
    )
    return replace(row, correction=rest)


@functools.cache
def missing(row: Method) -> tuple[str, ...]:
    """What the method needs and verl's policy loss is not handed; empty if it can run.

    Example:
        >>> missing(METHODS["trm_max"]), missing(METHODS["icepop"])
        (('divergences of whole distributions',), ())
    """
    share = loss_share(row)
    lags = any(getattr(g, "statistic", "") == "version_lag" for g in row.correction.gates)
    needs = row.needs | {"version_lag"} if lags else row.needs
    found = [f"{name} of the batch" for name in sorted(needs)]
    if row.needs_divergences:
        found.append("divergences of whole distributions")
    if reads_rollout(share) and share.needs_old:
        found.append("rollout and old log-probs at once")
    if any(str(getattr(p, "unit", "")).startswith("turn") for p in row.parts) or any(
        type(p).__name__ == "TurnNormalized" for p in row.parts
    ):
        found.append("turns")
    if row.penalty is not None:
        found.append("log-probs of the reference policy (use actor.use_kl_loss with another row)")
    if row.lr_scale is not None:
        found.append("the learning rate, which this method scales")
    if hasattr(row.objective, "next"):
        found.append("the end of a step, where its objective adapts")
    driven = driver_share(row)
    if any(signed(p) for p in (*driven.gates, *driven.weights)):
        found.append("advantages in the driver's correction, which comes before them")
    return tuple(found) or _tried(share)


def _tried(share: Method) -> tuple[str, ...]:
    """What two sequences of one token, with what verl passes, are refused for."""
    logp = torch.tensor([-1.0, -2.0])
    bare = LogProbs.pack(logp, logp, logp, segments=Segments.from_lengths([1, 1]))
    try:
        policy_loss(bare, replace(share, aggregate="token_mean"), torch.tensor([1.0, -1.0]))
    except EvidenceError as e:
        return ("prompt groups" if "group_ids" in str(e) else str(e),)
    return ()


def signed(part: Any) -> bool:
    """Whether the part treats tokens by the sign of their advantage."""
    return getattr(part, "advantage", "any") != "any"


def reads_rollout(share: Method) -> bool:
    """Whether the loss compares with the rollout policy: such a method needs bypass mode."""
    return any("mismatch" in factors(getattr(p, "on", None)) for p in share.parts)


def modes(row: Method) -> str:
    """In which of verl's modes the row's loss can run: "bypass", "decoupled", "either" or "none"."""
    if missing(row):
        return "none"
    if reads_rollout(loss_share(row)):
        return "bypass"
    share = driver_share(row)
    return "decoupled" if share.gates or share.weights else "either"


def runnable() -> dict[str, str]:
    """Rows whose loss runs inside verl, and in which mode: "bypass", "decoupled" or "either".

    Example:
        >>> rows = runnable()
        >>> rows["trm_max_k2"], rows["icepop"], rows["ppo_clip"], "trm_max" in rows
        ('bypass', 'decoupled', 'either', False)
    """
    found = {name: modes(row) for name, row in METHODS.items()}
    return {name: mode for name, mode in found.items() if mode != "none"}
