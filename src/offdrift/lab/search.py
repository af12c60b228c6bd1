"""Does any bound fail? Every bound of the library on every pair, and how close each comes.

Tightness is |Error| / bound, at most 1 if the bound holds. The bounds are those of
`offdrift.certificate`, called pair by pair; nothing is reimplemented here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from offdrift.certificate import all_bounds
from offdrift.certificate.bounds import BEYOND, CONSTANTS, ROWS
from offdrift.certificate.guarantees import masked_guarantee
from offdrift.certificate.regions import sample_ratio_error
from offdrift.lab.pairs import Batch

RELATIVE = 1e-9
"""Rounding allowed in a quotient of error and bound.

All are sums of products of at most T + 1 float64 factors. What cancels in them is at most T times
as large as the bound, so relative errors stay below some T^2 2^-53: 1e-10 at a thousand tokens.
"""

TABLE = [(n, c) for c in CONSTANTS for n in ROWS if not (c == "paper" and n in BEYOND)]
OTHERS = [("masked_ratio", "paper"), ("masked_ratio", "sharp"), ("masked_kl", "sharp")]
ROW_NAMES = TABLE + OTHERS
"""Every bound with every choice of constants: Table 1, then the guarantees without preconditions.

`masked_ratio` and `masked_kl` bound what a masked surrogate overstates, over sequences with small
ratios and over those inside a trust region that others leave.
"""


@dataclass(frozen=True)
class Outcome:
    """What a batch of pairs showed."""

    family: str
    vocab: int
    horizon: int
    enumerated: bool
    eps: Float[np.ndarray, " p"]
    """Largest token TV of each pair."""
    tightness: Float[np.ndarray, "p r"]
    """|Error| / bound, one column per entry of `ROW_NAMES`; nan where both are 0, or not checked."""
    checked: Bool[np.ndarray, "p r"]
    violated: Bool[np.ndarray, "p r"]


@dataclass(frozen=True)
class Row:
    """One bound over many pairs."""

    bound: str
    constants: str
    checked: int
    violations: int
    largest: float
    """Largest tightness; 0 if nothing drifted."""
    median: float
    where: str
    """The kind of pair where it was largest."""


def bound_values(batch: Batch) -> Float[np.ndarray, "p r"]:
    """The bounds of Table 1 for every pair, from the library, one column per entry of `TABLE`."""
    d = batch.divergences
    columns = [x.detach().tolist() for x in (d.kl_max, d.tv_max, d.kl_seq, d.tv_seq)]
    mean_tv = d.mean_tv.detach().numpy()
    rows = []
    for i, (delta, eps, kl_seq, tv_seq) in enumerate(zip(*columns, strict=True)):
        found = {
            (bound.name, constants): bound.value
            for constants in CONSTANTS
            for bound in all_bounds(
                horizon=batch.horizon,
                delta=delta,
                eps=min(eps, 1.0),  # a rounding above 1 is not a TV
                kl_seq=kl_seq,
                tv_seq=min(tv_seq, 1.0),
                mean_tv=mean_tv[i].clip(max=1.0),
                constants=constants,
            )
        }
        rows.append([found[key] for key in TABLE])
    return np.array(rows)


def other_values(batch: Batch) -> tuple[Float[np.ndarray, "p o"], Float[np.ndarray, "p o"]]:
    """Errors and their bounds, one column per entry of `OTHERS`; nan where one does not apply."""
    errors = np.full((len(batch.error), len(OTHERS)), np.nan)
    values = errors.copy()
    if batch.masked is None:
        return errors, values
    m = batch.masked
    errors[:, 0] = (m.overstated + m.lost).numpy()
    errors[:, 1] = m.overstated.numpy()
    errors[:, 2], values[:, 2] = m.overstated_kl.numpy(), m.prefix_kl.numpy()
    tv_seq = batch.divergences.tv_seq.clamp(max=1).tolist()
    for i, (tau, r, tv) in enumerate(zip(m.tau.tolist(), m.rejected.tolist(), tv_seq, strict=True)):
        if not math.isnan(tau):
            paper, sharp = (sample_ratio_error(horizon=batch.horizon, tau=tau, constants=c) for c in CONSTANTS)  # fmt: skip
            price = masked_guarantee(error=paper, rejected=r, tv_seq=tv)
            values[i, :2] = price.error + price.price, sharp
    return errors, values


def rounding(batch: Batch) -> Float[np.ndarray, " p"]:
    """What rounding of the policies themselves may add to an error, in units of the reward.

    The theorems are about rows that sum to 1; in float64 they do to v 2^-53 or so, and the
    difference of two rows sums to 0 as well as that. At position t it is multiplied with the
    shift of the contexts, whose L1 norm is at most 2 min(1, (t-1) eps).
    """
    eps = batch.divergences.tv_max.detach().numpy()
    reach = np.minimum(1.0, batch.horizon * eps)
    return 2.0**-52 * 2 * batch.vocab * batch.horizon * reach


def check(batch: Batch, *, factor: float = 1.0) -> Outcome:
    """Compare every bound with the worst error of every pair.

    Args:
        factor: what to multiply every bound with; below 1, sharp constants become wrong ones.
    """
    table, (errors, values) = bound_values(batch), other_values(batch)
    errors = np.hstack([np.tile(batch.error.detach().numpy()[:, None], len(TABLE)), errors])
    values = factor * np.hstack([table, values])
    checked = np.ones_like(values, dtype=bool)
    checked[:, len(TABLE) :] = ~np.isnan(values[:, len(TABLE) :])
    allowed = values * (1 + RELATIVE) + rounding(batch)[:, None]
    violated = ~(errors <= allowed) & checked  # nan is a violation too
    nothing = ~checked | ((values == 0) & ~violated)
    with np.errstate(divide="ignore", invalid="ignore"):
        tightness = np.where(nothing, np.nan, errors / values)
    eps = batch.divergences.tv_max.detach().numpy()
    return Outcome(batch.family, batch.vocab, batch.horizon, batch.enumerated, eps, tightness, checked, violated)  # fmt: skip


def summarize(outcomes: Iterable[Outcome]) -> list[Row]:
    """Every bound over all of these pairs; none of them: no rows."""
    found = list(outcomes)
    if not found:
        return []
    tightness = np.concatenate([o.tightness for o in found])
    checked = np.concatenate([o.checked for o in found])
    violated = np.concatenate([o.violated for o in found])
    kinds = [f"{o.family}, V={o.vocab}, T={o.horizon}" for o in found]
    kind = np.repeat(np.arange(len(found)), [len(o.eps) for o in found])
    rows = []
    for column, (name, constants) in enumerate(ROW_NAMES):
        ratio = tightness[:, column]
        known = ratio[~np.isnan(ratio)]
        best = int(np.nanargmax(ratio)) if known.size else 0
        rows.append(
            Row(
                bound=name,
                constants=constants,
                checked=int(checked[:, column].sum()),
                violations=int(violated[:, column].sum()),
                largest=float(ratio[best]) if known.size else 0.0,
                median=float(np.median(known)) if known.size else 0.0,
                where=kinds[kind[best]] if known.size else "",
            )
        )
    return rows


def of_drift(outcome: Outcome, low: float, high: float) -> Outcome:
    """The pairs whose largest token TV is at least `low` and below `high`."""
    chosen = (outcome.eps >= low) & (outcome.eps < high)
    return replace(
        outcome,
        eps=outcome.eps[chosen],
        tightness=outcome.tightness[chosen],
        checked=outcome.checked[chosen],
        violated=outcome.violated[chosen],
    )
