"""`Certificate`: what a batch guarantees about the true return, and when; as numbers and as a sentence.

A `Guarantee` is one lower bound, surrogate - error - price:

    J(pi) - J(mu) >= surrogate - error - price

`error` bounds how much the surrogate overstates, `price` what rejected sequences may cost. Rewards lie in [0, 1].
For any set of accepted sequences, M = 1 on it, and k3(u) = u - 1 - log u,

    J(pi) - J(mu) >= L'_masked - E_mu[M sum_t k3(w_t)] - E_mu[(1 - M) R]

since rewards are >= 0 (docs/certificates.md, "Under a mask"): the price of rejecting is the reward that was
rejected; the paper's TV_seq bounds the other side, which a lower bound does not need.

Reference: Li et al., arXiv:2512.23075v5, Theorem 4.2, Proposition G.1. The inequality above is not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from offdrift.certificate.bounds import Bound, check_constants
from offdrift.certificate.confidence import Estimate, Looks
from offdrift.certificate.prompts import AVERAGED, DRAWS, PromptDesign
from offdrift.certificate.regions import TrustRegion
from offdrift.errors import BadValueError
from offdrift.notebook import box, brief, chart, columns_of, frame, paragraph, table
from offdrift.texts import as_json


@dataclass(frozen=True)
class Guarantee:
    """J(pi) - J(mu) >= surrogate - error - price, if what is `provided` holds.

    Example:
        >>> round(masked_guarantee(error=0.05, rejected=0.10, tv_seq=0.02).gain(0.30), 4)
        0.13
    """

    name: str
    surrogate: str
    """What it starts from: "surrogate", L' = E_mu[R sum_t (w_t - 1)], "surrogate_masked", with M
    inside, or "gain", the product of ratios itself."""
    error: float
    price: float
    provided: tuple[str, ...]
    """Preconditions, in words; none for a guarantee that holds for any two policies."""

    def gain(self, surrogate: float) -> float:
        """The guaranteed J(pi) - J(mu); improvement is certified where it is above 0."""
        return surrogate - self.error - self.price

    def scaled(self, factor: float) -> Guarantee:
        """Rescale the guarantee to rewards in a range of size `factor`."""
        return replace(self, error=factor * self.error, price=factor * self.price)


def masked_guarantee(
    *, error: float, rejected: float, tv_seq: float | None = None, constants: str = "paper"
) -> Guarantee:
    """Proposition G.1: a guarantee for any accepted region, without a precondition on the policies.

        J(pi) - J(mu) >= L'_masked - B_A - r - TV_seq           (paper)
        J(pi) - J(mu) >= L'_masked - B_A - E_mu[(1 - M) R]      (sharp)

    Args:
        error: B_A, the most by which L'_masked overstates the accepted gain: the measured
            E_mu[sum_t 1(prefix accepted) KL(c_t)], or `sample_ratio_error`.
        rejected: r, the share of sequences rejected; for sharp constants the mean rejected reward
            will do.
        tv_seq: TV of whole sequences, for the paper's price.
        constants: "paper" or "sharp".

    Raises: `BadValueError` for numbers that no region can have; `MethodError` for other constants.

    Example:
        >>> best = masked_guarantee(error=0.05, rejected=0.10, constants="sharp")
        >>> round(best.gain(0.30), 4)
        0.15

    Reference: Li et al., arXiv:2512.23075v5, Proposition G.1, eq. 104.
    """
    check_constants(constants)
    for name, value, largest in (("error", error, math.inf), ("rejected", rejected, 1.0)):
        if not 0 <= value <= largest:
            raise BadValueError(f"{name} = {value}; it lies in [0, {largest:g}]")
    if constants == "sharp":
        return Guarantee("masked", "surrogate_masked", error, rejected, ())
    if tv_seq is None or not 0 <= tv_seq <= 1:
        raise BadValueError(
            f"tv_seq = {tv_seq}; the paper's price needs the TV of whole sequences, in [0, 1] "
            "(sqrt(kl_seq / 2) bounds it)"
        )
    return Guarantee("masked", "surrogate_masked", error, rejected + tv_seq, ())


def three_policy(
    *, advantage: float, gamma: float, tv_mismatch: float, tv_staleness: float, constants: str = "paper"
) -> Guarantee:
    """Three-policy TRPO: the discounted bound with the drift split between engine and updates.

        J(pi) >= L_mu(pi) - C (alpha_0 + alpha_1),   C = 2 eps_mu gamma / (1 - gamma)^2            (paper)
        J(pi) >= L_mu(pi) - 2 eps_mu gamma beta min(1, 2 beta) / ((1 - gamma) (1 - gamma + gamma beta))  (sharp)

    with beta = min(1, alpha_0 + alpha_1). For discounted returns of any scale, not rewards in [0, 1]; the surrogate is
    L_mu(pi) - J(mu) = E[A_mu] / (1 - gamma) over mu's states and pi's actions.

    The sharp one has the same inputs. |E_pi[A_mu]| = |sum_a (pi - mu) A_mu| is at most 2 beta eps_mu, not only eps_mu,
    since E_mu[A_mu] = 0 at every state; and of two paths that are coupled action by action a share (1 - beta)^t is
    still together after t actions, so that the states' laws differ by 2 gamma beta / (1 - gamma + gamma beta) at most.

    Args:
        advantage: eps_mu, largest |A_mu| over states and actions.
        gamma: discount, in [0, 1).
        tv_mismatch: alpha_1, largest TV(rollout, old) over states.
        tv_staleness: alpha_0, largest TV(old, current) over states.
        constants: "paper" or "sharp".

    Raises: `BadValueError` for numbers that no three policies have; `MethodError` for other constants.

    Example:
        >>> found = three_policy(advantage=1.0, gamma=0.9, tv_mismatch=0.002, tv_staleness=0.001)
        >>> round(found.error, 6)
        0.54
        >>> sharp = three_policy(advantage=1.0, gamma=0.9, tv_mismatch=0.002, tv_staleness=0.001, constants="sharp")
        >>> round(sharp.error, 6)
        0.003155

    Reference: X. Wang, S. Zhang, "From Two Policies to Three", 2025, Theorem 2.
    """
    check_constants(constants)
    if not 0 <= gamma < 1:
        raise BadValueError(f"gamma = {gamma}; a discount lies in [0, 1)")
    if not 0 <= advantage < math.inf:
        raise BadValueError(f"advantage = {advantage}; give the largest |A|, a number >= 0")
    for name, value in (("tv_mismatch", tv_mismatch), ("tv_staleness", tv_staleness)):
        if not 0 <= value <= 1:
            raise BadValueError(f"{name} = {value}; a total variation lies in [0, 1]")
    drift = min(1.0, tv_mismatch + tv_staleness)
    if constants == "paper":
        error = 2 * advantage * gamma / (1 - gamma) ** 2 * drift
    else:
        mean = advantage * min(1.0, 2 * drift)
        error = 2 * mean * gamma * drift / ((1 - gamma) * (1 - gamma + gamma * drift))
    return Guarantee("three-policy", "surrogate", error, 0.0, ())


VIOLATED, UNMEASURED = "violated by a token of the sample", "not measured"
"""What is said of a premise that fell, and of one that nothing was measured for."""
Status = Literal["falsified", "not falsified", "known", "unknown"]

ALWAYS = (
    "answered by one rollout policy whose log-probs were recorded",
    "the current policy did not learn from these prompts",
)
"""What every confidence statement takes for granted, besides `Looks.provided` and, before it, `prompts.DRAWS`."""

ABOUT = "J = E[R], the mean reward of a response"
"""What every certificate is about; aggregation and normalization of the trained objective may raise another return."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Certificate:
    """Statements of a batch about J(pi) - J(mu). Rewards, J, surrogates and bounds in units of reward.

    All intervals of `estimates` and the limit `unseen` hold together with probability 1 - alpha;
    each carries its own share. All certificates that `looks` names hold together with probability
    1 - alpha_total.
    """

    region: TrustRegion
    constants: str
    alpha: float
    """Largest probability that a statement of this certificate is wrong: its share of `alpha_total`."""
    alpha_total: float
    """Largest probability that a statement of any certificate of `looks` is wrong."""
    looks: Looks
    """Which certificates share `alpha_total`."""
    sequences: int
    prompts: int
    """Independent draws."""
    grades: Mapping[str, str]
    """Evidence grade of each divergence; the weakest, if tokens differ."""
    premises: Mapping[str, Status]
    """Whether KL <= delta ("kl") and, if a limit was given, TV <= eps ("tv") held in the batch.
    A batch can falsify them; "known" is what the caller vouched for; "unknown" is without evidence."""
    delta_seen: tuple[float, float]
    """Ends of the largest token KL of the batch, nats: a sampled maximum, not a global one."""
    eps_seen: tuple[float, float]
    """Ends of the largest token TV."""
    mean_tv: Float[np.ndarray, " horizon"]
    """Dbar_t of the batch per position, upper ends, limited by the region; 0 after the end."""
    kl_seq: float
    """Mean KL of whole sequences, upper end, nats."""
    unseen: float | None
    """A fresh prompt's sequences include one outside the region with at most this probability."""
    estimates: Mapping[str, Estimate]
    """Rigorous intervals; ends that nothing bounds are those of the variable's range."""
    asymptotic: Mapping[str, Estimate]
    """Normal intervals of the same means: asymptotic, not a guarantee. No verdict uses them."""
    bound: Bound | None
    """B*: the unified bound at the upper ends of its inputs; None where its premises fell or
    nothing is known."""
    guarantees: tuple[Guarantee, ...]
    """Lower bounds on J(pi) - J(mu) that this batch supports, if its record is right (`record_refuted`)."""
    fresh: bool
    """Whether the batch was drawn independently of the current policy, and nothing was chosen by its rewards."""
    design: PromptDesign | None = None
    """Of prompts that come more than once or share a source; None where none does."""
    assumes: frozenset[str] = frozenset()
    """What the evidence itself takes for granted."""
    refuted: int = 0
    """Sequences that contradict `assumes`: if any, no upper end is used."""
    unscored: int = 0
    """Sequences with a token that the engine did not score. Its ratio counts as 0, so that means of
    ratios are lower ends; `asymptotic` is empty."""

    @property
    def precondition(self) -> Status:
        """The worst of `premises`."""
        order = ("falsified", "unknown", "not falsified", "known")
        return min(self.premises.values(), key=order.index, default="known")  # type: ignore[return-value]

    @property
    def unfounded(self) -> frozenset[str]:
        """Estimates that nothing stands behind: their ends are the region's own limits, not bounds.

        Sums that the region limits say nothing where its premises fell or were never measured.
        """
        measured = all(self.grades[name] != "sampled" for name in self.premises)
        stands = self.precondition in ("not falsified", "known") and not self.refuted
        prefix = (
            frozenset() if measured and not self.refuted else frozenset({"prefix_kl", "prefix_error", "prefix_shift"})
        )
        return prefix if stands else prefix | {"kl_seq", "shift"}

    @property
    def record_refuted(self) -> bool:
        """Whether the recorded log-probs are not those of the policy that drew, with confidence.

            E_mu[w] = sum of pi over what mu draws <= 1,    refuted if the lower end of the mean ratio exceeds 1

        A right record is refuted with probability `estimates["mean_ratio"].alpha` at most. Nothing is said of a policy
        that learned from these sequences, which raised their ratios.
        """
        return self.fresh and self.estimates["mean_ratio"].low > 1

    @property
    def best(self) -> Guarantee | None:
        """The guarantee with the largest gain; None without rewards."""
        return max(self.guarantees, key=self.gain_of, default=None)

    def gain_of(self, guarantee: Guarantee) -> float:
        """The lower end of J(pi) - J(mu) by one of the guarantees."""
        return guarantee.gain(self.estimates[guarantee.surrogate].low)

    @property
    def gain_low(self) -> float:
        """J(pi) - J(mu) is at least this, with probability 1 - alpha_total, see `looks`; -inf if nothing covers."""
        best = self.best
        return -math.inf if best is None or not self.fresh or self.record_refuted else self.gain_of(best)

    @property
    def certified(self) -> bool:
        """Whether improvement is certified."""
        return self.gain_low > 0

    @property
    def margin(self) -> float | None:
        """L' - B* with the sample mean of L': the paper's margin, an estimate."""
        if self.bound is None or "surrogate" not in self.estimates:
            return None
        return self.estimates["surrogate"].mean - self.bound.value

    @property
    def advice(self) -> str | None:
        """Advice on what to record instead, where top-k evidence leaves open whether a token met the KL limit."""
        low, high = self.delta_seen
        if self.grades["kl"] in ("exact", "sampled") or not low <= self.region.delta < high:
            return None
        return (
            f"the top-k record leaves the largest KL of a token anywhere from {low:.3g} to {high:.3g} nat, "
            f"so that KL <= {self.region.delta:g} can not be seen to hold: what lies outside the top k could be "
            'anywhere. Record the whole vocabulary or hidden states (evidence "full" or "hidden"), a larger k, '
            "or state a tail_log_ratio_cap"
        )

    @property
    def holds_for(self) -> str:
        """Subject of the confidence, and the share that this certificate spends of it, if not all."""
        if self.alpha == self.alpha_total:
            return self.looks.covers
        return f"{self.looks.covers}, which spends {self.alpha:.2g} of {self.alpha_total:g}"

    @property
    def averages_over(self) -> str:
        """The prompts that J is a mean over."""
        return AVERAGED[self.design]

    @property
    def verdict(self) -> str:
        """One sentence: what is guaranteed, or why nothing is."""
        best = self.best
        if best is None:
            return "no certificate: the batch has no rewards"
        if not self.fresh:
            return (
                "no certificate: the current policy learned from these very prompts, so that no "
                "interval covers; draw new ones"
            )
        if self.record_refuted:
            ratio = self.estimates["mean_ratio"]
            return (
                f"no certificate: the record is refuted. The mean ratio of sequences is {ratio.mean:.4g}, at least "
                f"{ratio.low:.4g} but for a probability of {ratio.alpha:.2g}, and of log-probs of the policy that drew "
                "it is at most 1. They are another distribution's: look at temperature, top-p and top-k of the "
                "rollouts, at the version of the weights, and whether log-probs are raw (`offdrift check`)"
            )
        confidence = f"with probability {1 - self.alpha_total:g} ({self.holds_for}; {best.name})"
        assumed = [] if best.surrogate == "gain" else sorted(self.assumes)
        drawn = f"{DRAWS[self.design]}, {ALWAYS[0]}"
        provided = "; ".join([*best.provided, *assumed, drawn, *ALWAYS[1:], self.looks.provided])
        provided = f"{self.averages_over}; provided: {provided}"
        if self.certified:
            return f"J improves by at least {self.gain_low:.4g} {confidence}; {provided}"
        reasons = "; ".join(text for _, text in sorted(self._reasons(), reverse=True))
        return f"no certificate: {reasons}. W{confidence[1:]} J changes by at least {self.gain_low:.4g}; {provided}"

    def _reasons(self) -> list[tuple[float, str]]:
        """Why nothing is certified, with how much each costs."""
        gain = self.estimates["gain"]
        error = gain.mean - gain.low
        words = f"sampling error {error:.3g} over {gain.n} independent prompts, where J changed by an estimated "
        # The error falls with the root of their number.
        enough = f" (about {gain.n * (error / gain.mean) ** 2:,.0f} prompts could tell)" if gain.mean > 0 else ""
        reasons = [(error, f"{words}{gain.mean:+.3g}{enough}")]
        limits = {"kl": f"KL <= {self.region.delta:g}", "tv": f"TV <= {self.region.eps or 0:g}"}
        for name, status in self.premises.items():
            if status in ("falsified", "unknown"):
                reasons.append((math.inf, f"{limits[name]} is {VIOLATED if status == 'falsified' else UNMEASURED}"))
        if self.refuted:
            words = " and ".join(sorted(self.assumes))
            reasons.append((math.inf, f"{self.refuted} sequences contradict {words}"))
        if self.unscored:
            words = "sequences have a token that the engine did not score, which counts as ratio 0"
            reasons.append((math.inf, f"{self.unscored} of {self.sequences} {words}"))
        if self.advice is not None:
            reasons.append((math.inf, self.advice))
        if self.bound is not None:
            surrogate = self.estimates["surrogate"].mean
            text = f"B* = {self.bound.value:.3g} ({self.bound.name}) against L' = {surrogate:+.3g}"
            reasons.append((self.bound.value, text))
        return reasons

    def as_metrics(self) -> dict[str, float | str | None]:
        """Numbers for a log, by name; None where something is not known."""
        means = {k: e.mean for k, e in self.estimates.items()}
        falsified = {"falsified": 1.0, "unknown": None}.get(self.precondition, 0.0)
        delta_hat = None if self.grades["kl"] == "sampled" else self.delta_seen[1]
        eps_hat = None if self.grades["tv"] == "sampled" else self.eps_seen[1]
        metrics = {
            "bound": None if self.bound is None else self.bound.value,
            "row": None if self.bound is None else self.bound.name,
            "margin": self.margin,
            "falsified": falsified,
            "delta_hat": delta_hat,
            "eps_hat": eps_hat,
            "kl_seq": self.kl_seq,
            "acceptance": means["acceptance"],
            "surrogate": means.get("surrogate"),
            "surrogate_low": None if "surrogate" not in means else self.estimates["surrogate"].low,
            "surrogate_masked": means.get("surrogate_masked"),
            "gain": means.get("gain"),
            "gain_low": self.gain_low,
            "certified": float(self.certified),
            "route": None if self.best is None else self.best.name,
            "unseen": self.unseen,
            "alpha": self.alpha,
            "look": self.looks.at,
            "mean_ratio": means["mean_ratio"],
            "record_refuted": float(self.record_refuted),
        }
        return {f"certificate/{name}": _plain(x) for name, x in metrics.items()}

    @property
    def metrics(self) -> dict[str, float | str | None]:
        """Numbers for a log, by name: `as_metrics`."""
        return self.as_metrics()

    def to_frame(self) -> Any:
        """The guarantees as a frame of pandas or polars, a row for each: what it starts from, its cost, its gain.

        Raises: `OffdriftError` if neither is installed.
        """
        return frame(columns_of(self._rows()) or {name: [] for name in ("name", "gain")})

    def to_json(self, indent: int | None = None) -> str:
        """Everything (`as_dict`) as JSON; null for infinite and missing numbers."""
        return as_json(self.as_dict(), indent)

    def __repr__(self) -> str:
        """The start of the verdict, and the amount of evidence."""
        counts = f"{self.sequences:,} sequences, {self.prompts:,} prompts, {self.constants} constants"
        return brief(f"Certificate: {self.verdict}", f"  {counts}, alpha {self.alpha:.3g}")

    def _repr_html_(self) -> str:
        head = ("guarantee", "starts from, at least", "error", "price", "gain, at least")
        keys = ("surrogate_low", "error", "price", "gain")
        rows = [(row["name"], *(f"{row[key]:.4g}" for key in keys)) for row in self._rows()]
        level = "ok" if self.certified else "watch"
        word = "Certified" if self.certified else "No certificate"
        shape = chart(self.mean_tv.tolist(), name="mean TV by position")
        along = table([("mean TV by position", shape)]) if shape else ""
        shown = table(rows, head) if rows and not self.record_refuted else ""
        return box(paragraph(self.verdict, strong=word, level=level), shown, along)

    def _rows(self) -> list[dict[str, Any]]:
        """Every guarantee beside what it starts from and what it comes to."""
        return [
            {
                "name": g.name,
                "surrogate": g.surrogate,
                "surrogate_low": self.estimates[g.surrogate].low,
                "error": g.error,
                "price": g.price,
                "gain": self.gain_of(g),
                "provided": "; ".join(g.provided),
            }
            for g in self.guarantees
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; infinite and missing numbers are None."""
        proven = {k: None if k in self.unfounded else e for k, e in self.estimates.items()}
        other = {"look": self.looks.at, "of": self.looks.of, "anytime": self.looks.anytime, "about": ABOUT}
        other |= {"estimates": proven, "guarantees": [{**vars(g), "gain": self.gain_of(g)} for g in self.guarantees]}
        return _plain({name: other[name] if name in other else getattr(self, name) for name in FIELDS.split()})


FIELDS = (
    "verdict certified gain_low alpha alpha_total holds_for look of anytime about averages_over constants region "
    "sequences prompts fresh grades assumes refuted record_refuted unscored premises delta_seen eps_seen kl_seq unseen "
    "advice mean_tv estimates asymptotic bound margin guarantees"
)
"""Keys of `Certificate.as_dict`, in its order."""


def _plain(x: Any) -> Any:
    """Convert to JSON's types: None for numbers that are not finite, dicts for dataclasses, lists for the rest."""
    if is_dataclass(x):
        x = vars(x)
    if isinstance(x, Mapping):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, np.ndarray):
        x = x.tolist()
    if isinstance(x, list | tuple | frozenset):
        return [_plain(v) for v in (sorted(x) if isinstance(x, frozenset) else x)]
    return None if isinstance(x, float) and not math.isfinite(x) else x
