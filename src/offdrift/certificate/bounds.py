"""All bounds on the error of the surrogate, with the paper's constants and with sharp ones.

For rewards in [0, 1] and `Error = J(pi) - J(mu) - L'(pi)`, `L' = E_mu[R sum_t (w_t - 1)]`, each row of Table 1 is
`4 x advantage factor x summed context shift` in the paper; `constants="sharp"` puts 2 in place of 4, attained at
T = 2. Names: T horizon, delta and eps the largest token KL and TV, kl_seq and tv_seq those of whole sequences,
mean_tv the mean TV per position; all are limits, checked and completed by `premises`. The functions for one bound
are its formula and check nothing. Those of `BEYOND` are not in the paper. Proofs, and what holds where pi draws what
mu cannot: docs/certificates.md.

Reference: Li et al., arXiv:2512.23075v5, Sections 3.1-3.4 and Table 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Unpack

import numpy as np
from jaxtyping import Float

from offdrift.certificate.inequalities import pinsker, total_shift, weighted_shift
from offdrift.certificate.premises import Limits, premises
from offdrift.errors import MethodError

CONSTANTS = {"paper": 4.0, "sharp": 2.0}
"""Factor of the product of advantage factor and context shift."""


def check_constants(constants: str) -> None:
    """Raise `MethodError` unless these are constants that bounds have."""
    if constants not in CONSTANTS:
        raise MethodError(f'constants = {constants!r}; choose "paper" or "sharp"')


# -- worst-case bounds, Section 3.2 -----------------------------------------------------------


def classical_tv(*, horizon: int, eps: float, constants: str = "paper") -> float:
    """No caps, TV: 4 eps^2 sum_t (t-1) = 2 T (T-1) eps^2 (eq. 11)."""
    return CONSTANTS[constants] * (horizon * (horizon - 1) // 2) * eps * eps


def classical_kl(*, horizon: int, delta: float, constants: str = "paper") -> float:
    """`classical_tv` with eps^2 <= delta/2: T (T-1) delta (eq. 11)."""
    pairs = horizon * (horizon - 1) // 2
    return CONSTANTS[constants] * pairs * delta / 2 if pairs else 0.0


def pinsker_marginal_kl(*, horizon: int, delta: float, constants: str = "paper") -> float:
    """4 min(1, sqrt(delta/2)) sum_t min(1, sqrt((t-1) delta/2)) (Theorem 3.3, eq. 12)."""
    return CONSTANTS[constants] * pinsker(delta) * total_shift(horizon, delta=delta)


def pinsker_marginal_tv(*, horizon: int, delta: float, eps: float, constants: str = "paper") -> float:
    """4 min(1, eps) sum_t min(1, sqrt((t-1) delta/2)) (Theorem 3.3, eq. 13)."""
    return CONSTANTS[constants] * eps * total_shift(horizon, delta=delta)


def mixed_kl(*, horizon: int, delta: float, kl_seq: float, constants: str = "paper") -> float:
    """4 T min(1, sqrt(delta/2)) min(1, sqrt(kl_seq/2)) (Theorem 3.4, eq. 15)."""
    return CONSTANTS[constants] * horizon * pinsker(delta) * pinsker(kl_seq)


def mixed_tv(*, horizon: int, eps: float, tv_seq: float, constants: str = "paper") -> float:
    """4 T min(1, eps) min(1, tv_seq) (Theorem 3.4, eq. 16)."""
    return CONSTANTS[constants] * horizon * eps * tv_seq


def coupling(*, horizon: int, eps: float, constants: str = "paper") -> float:
    """4 min(1, eps) sum_t min(1, (t-1) eps) (Theorem 3.5, eq. 17)."""
    return CONSTANTS[constants] * eps * total_shift(horizon, delta=math.inf, eps=eps)


def pointwise(
    *, horizon: int, delta: float, eps: float, kl_seq: float, tv_seq: float, constants: str = "sharp"
) -> float:
    """The minimum inside the sum; never above a Pinsker-Marginal, Mixed or Coupling bound.

        2 min(1, eps, sqrt(delta/2)) sum_t min(1, (t-1) eps, sqrt((t-1) delta/2), tv_seq,
                                               sqrt(kl_seq/2))

    Lemma 3.2 bounds the shift at each t by five terms; the paper takes one term for all t and then
    the minimum over the sums. Not in the paper.

    Example:
        >>> round(pointwise(horizon=4096, delta=1e-4, eps=5e-3, kl_seq=0.01, tv_seq=0.05), 4)
        2.0394
    """
    factor, cap = min(eps, pinsker(delta)), min(tv_seq, pinsker(kl_seq))
    return CONSTANTS[constants] * factor * total_shift(horizon, delta=delta, eps=eps, cap=cap)


def sequence_kl(*, horizon: int, kl_seq: float, constants: str = "sharp") -> float:
    """KL(mu || pi) of whole sequences itself: no trust region, no horizon, one constant. Not in the paper.

        |Error| <= KL_seq,   since   sum_t (w_t - 1) - (w - 1) = sum_t k3(w_t) - k3(w),   w = prod_t w_t

    k3(u) = u - 1 - log u >= 0; times R and averaged under mu the left side is -Error, and both terms on the right
    have the mean KL_seq. It holds for any two policies, and two tokens attain it.

    Args:
        kl_seq: sum over positions of the mean KL(rollout || current), nats.

    Example:
        >>> sequence_kl(horizon=4096, kl_seq=0.01)  # 2.4e-6 nat per token; the paper's unified bound: 4.1
        0.01
    """
    return kl_seq


def two_sided(*, horizon: int, kl_rewarded: float, kl_unrewarded: float, constants: str = "sharp") -> float:
    """Bound by the two sides of the identity behind `sequence_kl`, its KL split by the reward. Not in the paper.

        -E_mu[R sum_t k3(w_t)] <= Error <= E_mu[(1 - R) sum_t k3(w_t)],   k3(u) = u - 1 - log u

    for R in [0, 1]. The two parts add up to KL_seq. A lower bound on the gain needs only the first: where
    one answer in twenty is right, that is a small part of KL_seq.

    Args:
        kl_rewarded: E_mu[R sum_t k3(w_t)], nats.
        kl_unrewarded: E_mu[(1 - R) sum_t k3(w_t)], nats.

    Example:
        >>> two_sided(horizon=4096, kl_rewarded=0.001, kl_unrewarded=0.009)
        0.009
    """
    return max(kl_rewarded, kl_unrewarded)


def variance(*, horizon: int, chi2: float, reward_sd: float, constants: str = "sharp") -> float:
    """The reward's standard deviation times that of what the surrogate leaves out. Not in the paper.

        |Error| <= sd_mu(R) sqrt((1 + chi)^T - 1 - T chi)

    w - 1 - sum_t (w_t - 1) = sum_t (w_{<t} - 1)(w_t - 1) is a sum of martingale differences, whose second
    moments are E_mu[(w_{<t} - 1)^2 chi2(c_t)] <= ((1 + chi)^(t-1) - 1) chi; Cauchy-Schwarz. Below T chi = 1
    it is about sd T chi / sqrt(2), beyond exponential.

    Args:
        chi2: chi, the maximum over contexts of E_mu[w_t^2 | c] - 1.
        reward_sd: standard deviation of the reward under the rollout policy, at most 1/2.

    Example:
        >>> round(variance(horizon=3, chi2=0.1, reward_sd=0.2), 9)  # 1.331 - 1 - 0.3 = 0.031
        0.035213634
    """
    if horizon == 1 or 0 in (chi2, reward_sd):
        return 0.0
    log_growth = horizon * math.log1p(chi2)
    if log_growth > 700:
        return math.inf
    if horizon * chi2 >= 1:
        return reward_sd * math.sqrt(math.expm1(log_growth) - horizon * chi2)
    # The difference would cancel: its series sum_(k >= 2) C(T, k) chi^k has only positive terms.
    term, terms = horizon * chi2, []
    for k in range(2, min(horizon, 24) + 1):
        term *= (horizon - k + 1) / k * chi2
        terms.append(term)
    return reward_sd * math.sqrt(math.fsum(terms))


HELLINGER = 37.0
"""Largest |Error| / sum_t E_mu[H^2(c_t)] that the proof in docs/certificates.md allows; search reaches 4.6."""


def sequence_hellinger(*, horizon: int, hellinger_seq: float, constants: str = "sharp") -> float:
    """Hellinger's distance of tokens, summed over a sequence: no trust region, no support. Not in the paper.

        |Error| <= 37 sum_t E_mu[H^2(c_t)],   H^2(c) = 1 - sum_y sqrt(mu(y|c) pi(y|c))

    for any two policies. KL(mu || pi) is infinite as soon as pi cannot draw one token that mu can (a
    filtered current policy); H^2 is at most 1. For small drift H^2 is a quarter of KL, so that this bound
    is about nine times `sequence_kl`: it is worth having where KL is infinite or large on rare contexts.

    Args:
        hellinger_seq: sum over positions of the mean squared Hellinger distance, in [0, T].

    Example:
        >>> round(sequence_hellinger(horizon=4096, hellinger_seq=0.0025), 6)
        0.0925
    """
    return HELLINGER * hellinger_seq


# -- data-dependent bounds, Section 3.3 -------------------------------------------------------

MeanTV = Float[np.ndarray, " t"] | float


def adaptive_kl(*, horizon: int, delta: float, mean_tv: MeanTV, constants: str = "paper") -> float:
    """4 sum_t Dbar_t min(1, sqrt((T-t) delta/2)) (Theorem 3.6, eq. 18)."""
    return CONSTANTS[constants] * weighted_shift(mean_tv, horizon=horizon, delta=delta)


def adaptive_tv(*, horizon: int, eps: float, mean_tv: MeanTV, constants: str = "paper") -> float:
    """4 sum_t Dbar_t min(1, (T-t) eps) (Theorem 3.6, eq. 19)."""
    return CONSTANTS[constants] * weighted_shift(mean_tv, horizon=horizon, delta=math.inf, eps=eps)


def adaptive(*, horizon: int, delta: float, eps: float, mean_tv: MeanTV, constants: str = "paper") -> float:
    """4 sum_t Dbar_t min(1, (T-t) eps, sqrt((T-t) delta/2)), the hybrid (Theorem 3.6, eq. 20)."""
    return CONSTANTS[constants] * weighted_shift(mean_tv, horizon=horizon, delta=delta, eps=eps)


# -- closed forms: looser than the sums, easy to read -----------------------------------------


def pinsker_marginal_kl_upper(*, horizon: int, delta: float, constants: str = "paper") -> float:
    """(4/3) T^(3/2) delta >= `pinsker_marginal_kl`; eq. 14 writes an equality."""
    eps = pinsker(delta)
    return pinsker_marginal_tv_upper(horizon=horizon, delta=delta, eps=eps, constants=constants)


def pinsker_marginal_tv_upper(*, horizon: int, delta: float, eps: float, constants: str = "paper") -> float:
    """(8/3) T^(3/2) eps sqrt(delta/2) >= `pinsker_marginal_tv`; eq. 14 writes an equality.

    sqrt(delta/2) is capped at 1, above which it changes no term of the sum.
    """
    return CONSTANTS[constants] * 2 / 3 * horizon**1.5 * eps * pinsker(delta)


def coupling_upper(*, horizon: int, eps: float, constants: str = "paper") -> float:
    """min(2 T (T-1) eps^2, 4 T eps) >= `coupling`: uncapped, or capped throughout (Thm. 3.5)."""
    capped = CONSTANTS[constants] * horizon * eps
    return min(classical_tv(horizon=horizon, eps=eps, constants=constants), capped)


# -- all of them, and their minimum, Section 3.4 ----------------------------------------------


@dataclass(frozen=True)
class BoundRow:
    """One row of Table 1: its name on the screen, a formula, the premises it takes, and how it is listed."""

    label: str
    formula: Callable[..., float]
    uses: tuple[str, ...]
    route: str
    scaling: str
    equation: str
    unified: bool = True
    """Whether the unified bound takes the minimum over it too."""
    closed: Callable[..., float] | None = None
    """The closed form above the exact sum, where the paper gives one."""
    below: str | None = None
    """The premise that alone bounds L' - (J(pi) - J(mu)), where the two sides of the error differ."""


ROWS = {
    "classical_kl": BoundRow(
        "Classical KL", classical_kl, ("delta",), route="KL, no caps", scaling="T²", equation="eq. 11", unified=False
    ),
    "classical_tv": BoundRow(
        "Classical TV", classical_tv, ("eps",), route="TV, no caps", scaling="T²", equation="eq. 11", unified=False
    ),
    "coupling": BoundRow(
        "Coupling", coupling, ("eps",), route="TV", scaling="T", equation="eq. 17", closed=coupling_upper
    ),
    "pinsker_marginal_kl": BoundRow(
        "Pinsker-Marginal KL",
        pinsker_marginal_kl,
        ("delta",),
        route="KL",
        scaling="T^1.5",
        equation="eq. 12",
        closed=pinsker_marginal_kl_upper,
    ),
    "pinsker_marginal_tv": BoundRow(
        "Pinsker-Marginal TV",
        pinsker_marginal_tv,
        ("delta", "eps"),
        route="TV + KL",
        scaling="T^1.5",
        equation="eq. 13",
        closed=pinsker_marginal_tv_upper,
    ),
    "mixed_kl": BoundRow("Mixed KL", mixed_kl, ("delta", "kl_seq"), route="KL", scaling="T", equation="eq. 15"),
    "mixed_tv": BoundRow("Mixed TV", mixed_tv, ("eps", "tv_seq"), route="TV", scaling="T", equation="eq. 16"),
    "adaptive_kl": BoundRow(
        "Adaptive KL", adaptive_kl, ("delta", "mean_tv"), route="KL", scaling="data", equation="eq. 18", unified=False
    ),
    "adaptive_tv": BoundRow(
        "Adaptive TV", adaptive_tv, ("eps", "mean_tv"), route="TV", scaling="data", equation="eq. 19", unified=False
    ),
    "adaptive": BoundRow(
        "Adaptive", adaptive, ("delta", "eps", "mean_tv"), route="TV + KL", scaling="data", equation="eq. 20"
    ),
    "pointwise": BoundRow(
        "Pointwise", pointwise, ("delta", "eps", "kl_seq", "tv_seq"), route="TV + KL", scaling="T", equation="eq. 10"
    ),
    "sequence_kl": BoundRow("Sequence KL", sequence_kl, ("kl_seq",), route="KL", scaling="data", equation=""),
    "two_sided": BoundRow(
        "Two-sided",
        two_sided,
        ("kl_rewarded", "kl_unrewarded"),
        route="KL by reward",
        scaling="data",
        equation="",
        below="kl_rewarded",
    ),
    "variance": BoundRow("Variance", variance, ("chi2", "reward_sd"), route="χ²", scaling="exp T", equation=""),
    "sequence_hellinger": BoundRow(
        "Hellinger", sequence_hellinger, ("hellinger_seq",), route="Hellinger", scaling="data", equation=""
    ),
}
"""Every bound, in the order of Table 1; then those of `BEYOND`."""

LABELS = {name: row.label for name, row in ROWS.items()} | {"unified": "Unified B*"}
"""Names of the bounds on the screen."""

BEYOND = frozenset({"pointwise", "sequence_kl", "two_sided", "variance", "sequence_hellinger"})
"""Bounds that are not in the paper: only with sharp constants."""


@dataclass(frozen=True)
class Bound:
    """|Error| <= value, and where that comes from."""

    name: str
    value: float
    """In units of the reward."""
    route: str
    scaling: str
    """Growth with the horizon T; "data" if it depends on where the divergence is."""
    equation: str
    unified: bool = True
    """Whether the unified bound takes the minimum over it too."""
    closed_form: float | None = None
    """The paper's closed form, never below the exact `value`."""
    note: str = ""
    """Which premises were tightened, and why."""
    below: float | None = None
    """J(pi) - J(mu) >= L' - below, where one side of the error has a bound of its own; else `value` is both's."""

    def scaled(self, factor: float) -> Bound:
        """Rescale the bound to rewards in a range of size `factor`."""
        closed, below = (None if x is None else factor * x for x in (self.closed_form, self.below))
        return replace(self, value=factor * self.value, closed_form=closed, below=below)


def all_bounds(*, constants: str = "paper", **limits: Unpack[Limits]) -> list[Bound]:
    """Every bound on |J(pi) - J(mu) - L'(pi)| that the given divergences allow.

    Args:
        constants: "paper", or "sharp": half of them, and the rows of `BEYOND` too.
        limits: as in `premises`; without `mean_tv` there are no adaptive rows, and bounds that are not in the
            paper are left out if their own premises are absent.

    Returns: one `Bound` per row, in the order of Table 1.

    Raises: `BadValueError` or `ShapeError` for divergences that no pair of policies can have;
        `MethodError` for other constants.

    Example:
        >>> {b.name: round(b.value, 1) for b in all_bounds(horizon=4096, delta=1e-4, kl_seq=0.01)
        ...     if b.name.endswith("kl")}
        {'classical_kl': 1677.3, 'pinsker_marginal_kl': 34.9, 'mixed_kl': 8.2}

    Reference: Li et al., arXiv:2512.23075v5, Table 1.
    """
    check_constants(constants)
    checked, reward_range = premises(**limits), limits.get("reward_range", 1.0)
    unit = replace(checked, reward_sd=checked.reward_sd / reward_range)  # formulas are about rewards in [0, 1]
    bounds = []
    for name, row in ROWS.items():
        inputs = {field: getattr(unit, field) for field in ("horizon", *row.uses)}
        if any(x is None for x in inputs.values()) or (name in BEYOND and constants == "paper"):
            continue
        notes = (checked.notes[field] for field in row.uses if field in checked.notes)
        about = (row.route, row.scaling, row.equation, row.unified)
        bound = Bound(
            name,
            row.formula(**inputs, constants=constants),
            *about,
            closed_form=row.closed and row.closed(**inputs, constants=constants),
            note="; ".join(notes),
            below=None if row.below is None else inputs[row.below],
        )
        bounds.append(bound.scaled(float(reward_range)))
    return bounds


def tightest(bounds: list[Bound]) -> Bound:
    """The unified bound among these rows: the smallest of the candidates, the first on ties.

    Reference: Li et al., arXiv:2512.23075v5, Theorem 3.8, eq. 21.
    """
    return min((b for b in bounds if b.unified), key=lambda b: b.value)


def unified(*, constants: str = "paper", **limits: Unpack[Limits]) -> Bound:
    """The unified bound B*, as the row that attains it; `L' - B* > 0` certifies improvement.

        B* = min{PM-KL, PM-TV, Mixed-KL, Mixed-TV, Coupling, Adaptive}

    and with sharp constants those of `BEYOND` too. Without `mean_tv` the adaptive row is omitted.

    Args, Raises: as in `all_bounds`.

    Example:
        >>> best = unified(horizon=4096, delta=1e-4, eps=5e-3, kl_seq=0.01, tv_seq=0.05)
        >>> best.name, round(best.value, 3)
        ('mixed_tv', 4.096)

    Reference: Li et al., arXiv:2512.23075v5, Theorem 3.8, eq. 21.
    """
    return tightest(all_bounds(constants=constants, **limits))
