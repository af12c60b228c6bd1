"""Certify a batch: lower bounds on the true return's gain, and the estimates behind them.

Three guarantees are computed, and the largest counts. All are lower bounds on J(pi) - J(mu); none
needs the current policy's support inside the rollout policy's, since what mu cannot draw has a
reward >= 0 and is counted as 0.

    direct   E_mu[R (prod_t w_t - 1)]                       no trust region at all: a mean bounded below
    TRM      L'_masked - B*' - E_mu[(1 - M) R]              no premise: B* of accepted prefixes, exact KL
    masked   L'_masked - B_A - E_mu[(1 - M) R]              Proposition G.1, for limits on sampled ratios

B*' is the smallest row of Table 1 for the pair (mu, pi'), pi' being pi as long as every context so far meets the
limits and mu afterwards (docs/certificates.md, eq. 7); where the measured overstatement is smaller, it takes the place
of B*'. Where evidence is not exact, or with the paper's constants, TRM is Theorem 4.2 instead, L' - B*, provided
KL <= delta everywhere. The direct guarantee has nearly all of alpha: its variable begins at -1 and has the gain itself
as its mean. Large ratios are not cut, and there is no baseline (measured: docs, "Coverage and power").

A sampled maximum is not a global one: `unseen` limits the probability that a fresh prompt leaves
the region, by the number of independent prompts that did not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool

from offdrift.certificate.batch import KL, TV, BatchEvidence, HostEvidence
from offdrift.certificate.bounds import CONSTANTS, ROWS, Bound, all_bounds, check_constants, tightest
from offdrift.certificate.confidence import Estimate, Looks, check_alpha
from offdrift.certificate.guarantees import Certificate as Certificate
from offdrift.certificate.guarantees import Guarantee, Status, masked_guarantee
from offdrift.certificate.inequalities import pinsker
from offdrift.certificate.prompts import DESIGNS, PromptDesign
from offdrift.certificate.regions import TrustRegion, sample_ratio_error
from offdrift.certificate.samples import OF_REWARDS, estimates, normal_intervals, power_curve, unit_rewards, unseen
from offdrift.divergence.evidence import Grade
from offdrift.errors import BadValueError, check_choice


class LoggedNumber(NamedTuple):
    """One row of `Certificate.as_metrics`."""

    unit: str
    meaning: str
    larger_is: str


LOGGED = {
    "certificate/bound": LoggedNumber(
        "reward",
        "B*: largest |J(pi) - J(mu) - L'| if the trust region holds at every context, at the "
        "upper ends of its inputs' intervals; none where its premise fell",
        "worse",
    ),
    "certificate/row": LoggedNumber("", "which bound attains B*", "neither"),
    "certificate/margin": LoggedNumber(
        "reward", "L' - B*, with the sample mean of L': above 0 the paper's condition holds, as an estimate", "better"
    ),
    "certificate/falsified": LoggedNumber(
        "",
        "1 if a token of the batch left the trust region, so that its premise is false; 0 if none"
        " did, which proves nothing",
        "worse",
    ),
    "certificate/delta_hat": LoggedNumber(
        "nat", "largest KL(mu || pi) of a token of the batch, upper end; a sampled maximum, not a global one", "worse"
    ),
    "certificate/eps_hat": LoggedNumber("1", "largest TV of a token of the batch, upper end", "worse"),
    "certificate/kl_seq": LoggedNumber(
        "nat",
        "mean KL(mu || pi) of whole sequences, upper ends: |J(pi) - J(mu) - L'| is at most its "
        "expectation, for any two policies and rewards in [0, 1]",
        "worse",
    ),
    "certificate/acceptance": LoggedNumber(
        "1", "share of sequences that no gate rejected and that surely lie in the trust region", "better"
    ),
    "certificate/surrogate": LoggedNumber("reward", "L' = E_mu[R sum_t (w_t - 1)], sample mean", "better"),
    "certificate/surrogate_low": LoggedNumber(
        "reward", "lower end of L': rigorous, and vacuous for long sequences", "better"
    ),
    "certificate/surrogate_masked": LoggedNumber("reward", "L' over accepted sequences, sample mean", "better"),
    "certificate/gain": LoggedNumber(
        "reward",
        "E_mu[R (prod_t w_t - 1)], sample mean of J(pi) - J(mu): what the direct guarantee starts from",
        "better",
    ),
    "certificate/gain_low": LoggedNumber(
        "reward",
        "J(pi) - J(mu) is at least this, with probability 1 - alpha of the recipe for all certificates of the run "
        'together (`certificate.looks = "once"`: for each by itself), by the best guarantee; none after a batch\'s '
        "first update, since the policy has learned from it",
        "better",
    ),
    "certificate/certified": LoggedNumber(
        "",
        '1 if gain_low is above 0: false anywhere in the run with probability alpha at most (`looks = "once"`: '
        "of n updates that gain nothing up to n alpha are expected, and false)",
        "better",
    ),
    "certificate/route": LoggedNumber("", "the guarantee that says most: direct, masked or TRM", "neither"),
    "certificate/unseen": LoggedNumber(
        "1", "a fresh prompt's sequences include one outside the trust region with at most this probability", "worse"
    ),
    "certificate/alpha": LoggedNumber(
        "1",
        "what this certificate spends of the run's alpha: at look t of one of k arms, 6 alpha / (pi^2 t^2 k); all of "
        'alpha with `certificate.looks = "once"`',
        "neither",
    ),
    "certificate/look": LoggedNumber("", "number of this look in the run, one per batch; none with `once`", "neither"),
    "certificate/mean_ratio": LoggedNumber(
        "1", "mean over sequences of prod_t w_t: at most 1 in expectation if the recorded policy drew them", "neither"
    ),
    "certificate/record_refuted": LoggedNumber(
        "",
        "1 if that mean is surely above 1: recorded log-probs are not those of the policy that drew, and nothing is "
        "certified; for a right record with probability alpha / 144 at most",
        "worse",
    ),
}
"""Every number of `Certificate.as_metrics`, in its order."""


def certify(
    batch: BatchEvidence,
    *,
    reward_range: tuple[float, float] = (0.0, 1.0),
    alpha: float = 0.05,
    looks: Looks | None = None,
    constants: str = "sharp",
    assume: Collection[str] = (),
    fresh: bool = True,
    prompts: PromptDesign | None = None,
) -> Certificate:
    """Derive what a batch guarantees about J(pi) - J(mu), with probability 1 - alpha.

    One policy, one look, unless `looks` says otherwise: alpha is then the probability of error of this
    certificate alone, and among k of them (one per update, per checkpoint, per region) one is wrong with
    probability up to k alpha.

    Args:
        batch: the evidence, with the region that is certified.
        reward_range: smallest and largest possible reward. Rewards are rescaled to [0, 1] with it,
            results back; a reward outside is refused.
        alpha: largest probability that any statement is wrong, of all certificates that `looks` names.
        looks: the certificates that are to hold together; None: only this one. Where it is anytime valid, the
            batch's sequences are in order of arrival, the answers to a prompt together, and a later look's
            batch begins with an earlier one's.
        constants: of the bounds, "sharp" or "paper" (and the paper's price of rejection).
        assume: premises that you know to hold at every reachable context: "kl", "tv". The batch
            can still falsify them.
        fresh: whether the batch was drawn independently of the current policy. It was not if that
            policy has been trained on these prompts' sequences already (a second epoch or
            minibatch): then nothing is certified.
        prompts: where prompts come more than once or depend on each other, what the batch's `group_ids` number:
            "listed" distinct prompts, "drawn" groups of answers, each to a draw of its own, or "clustered" sources that
            prompts share. The verdict says what J then averages over.

    Raises: `BadValueError` for an empty batch, rewards that are NaN or out of range, responses
        longer than the region's horizon, alpha outside (0, 1); `MethodError` for other constants or
        premises.

    Example:
        >>> import torch
        >>> from offdrift.logprobs import LogProbs
        >>> from offdrift.segments import Segments
        >>> lp = LogProbs.pack(torch.full((400,), -1.0), torch.full((400,), -1.0),
        ...                    segments=Segments.from_lengths([1] * 400))
        >>> batch = BatchEvidence.of(lp, torch.ones(400), region=TrustRegion(horizon=4, delta=0.05))
        >>> round(certify(batch).gain_low, 3)  # policies agree on what was drawn, and that is all
        -0.009

    Reference: Li et al., arXiv:2512.23075v5, Theorems 3.8 and 4.2, Proposition G.1; the direct
    guarantee: P. Thomas, G. Theocharous, M. Ghavamzadeh, "High-Confidence Off-Policy Evaluation",
    AAAI 2015.
    """
    check_alpha(alpha)
    looks, alpha_total = looks or Looks(), alpha
    alpha = looks.share(alpha_total)
    _check_choices(constants, assume, prompts)
    host, region, size = _on_host(batch), batch.region, reward_range[1] - reward_range[0]
    rewards = unit_rewards(host["reward"], reward_range) if batch.rewarded else None
    grades = {"kl": batch.grades[KL], "tv": batch.grades[TV]}
    premises = _premises(host, region, grades, assume)
    refuted = int(host["refuted"].sum())  # if any, no upper end of a capped interval is valid
    # The region's limits were measured at every token, so that leaving it is noticed.
    measured = not refuted and all(grades[name] is not Grade.SAMPLED for name in premises)
    outside = _outside(host, region)
    accepted = _accepted(host, region, outside if measured else None)
    intervals = estimates(host, rewards, accepted, region, alpha=alpha, anytime=looks.anytime)
    stand = all(status in ("not falsified", "known") for status in premises.values())
    bound = _unified(region, intervals["kl_seq"], intervals["shift"], constants) if stand and not refuted else None
    exact = all(grades[k] is Grade.EXACT for k in ("kl", *premises))
    guarantees = _guarantees(
        intervals, bound, region, premises=premises, predictable=measured and exact, constants=constants
    )
    unscored = int((host["unscored"] > 0).sum())
    normal: dict[str, Estimate] = {}
    if rewards is not None and not unscored:  # an unscored token has only a lower end of its ratio
        normal = normal_intervals(host, rewards, accepted, alpha=alpha)
    return Certificate(
        region=region,
        constants=constants,
        alpha=alpha,
        alpha_total=alpha_total,
        looks=looks,
        sequences=len(batch),
        prompts=intervals["acceptance"].n,
        grades={k: str(g) for k, g in grades.items()},
        premises=premises,
        delta_seen=(float(host["kl_low"].max()), float(host["kl_high"].max())),
        eps_seen=(float(host["tv_low"].max()), float(host["tv_high"].max())),
        mean_tv=host.tv_by_position / len(batch),
        kl_seq=float(host["kl_total"].mean()),
        unseen=unseen(host, outside, alpha=alpha, anytime=looks.anytime) if measured else None,
        estimates={k: e.scaled(size) if k in OF_REWARDS else e for k, e in intervals.items()},
        asymptotic={k: e.scaled(size) for k, e in normal.items()},
        bound=None if bound is None else bound.scaled(size),
        guarantees=tuple(g.scaled(size) for g in guarantees),
        fresh=fresh,
        design=prompts,
        assumes=batch.assumes,
        refuted=refuted,
        unscored=unscored,
    )


def power(
    batch: BatchEvidence,
    *,
    reward_range: tuple[float, float] = (0.0, 1.0),
    alpha: float = 0.05,
    looks: Looks | None = None,
) -> dict[int, float]:
    """Estimate the probability of a certificate of this gain, by number of prompts.

    The batch's own prompts stand for all: samples of each size are drawn from them with replacement, and the
    direct guarantee is asked whether J(pi) - J(mu) > 0. A plan, not a guarantee: `confidence.power` says what it
    cannot know. Empty without rewards.

    Args: as in `certify`, of the planned batch.

    Raises: `BadValueError` as `certify`, for rewards and alpha.
    """
    check_alpha(alpha)
    if not batch.rewarded:
        return {}
    host = batch.to_host()
    return power_curve(host, unit_rewards(host["reward"], reward_range), alpha=(looks or Looks()).share(alpha))


def _guarantees(
    intervals: dict[str, Estimate],
    bound: Bound | None,
    region: TrustRegion,
    premises: dict[str, Status],
    predictable: bool,
    constants: str,
) -> list[Guarantee]:
    """The guarantees that the batch supports, for rewards in [0, 1]; none without rewards.

    Args:
        predictable: whether each context's limits are decided before its token is drawn, as the
            KL of accepted prefixes requires. They are with exact evidence; with top-k intervals they
            are not, because the drawn token is part of the record.
    """
    if "gain" not in intervals:
        return []
    guarantees = [Guarantee("direct", "gain", 0.0, 0.0, ())]
    ratios = []
    if region.tau is not None:
        ratios.append(sample_ratio_error(horizon=region.horizon, tau=region.tau, constants=constants))
    if constants == "sharp":
        rejected = intervals["rejected_reward"].high
        if predictable and min(region.delta, region.token_tv) < np.inf:
            prefixes = _unified(region, intervals["prefix_kl"], intervals["prefix_shift"], constants)
            error = min(prefixes.value, intervals["prefix_error"].high)
            guarantees.append(Guarantee("TRM", "surrogate_masked", error, rejected, ()))
        guarantees += [masked_guarantee(error=error, rejected=rejected, constants="sharp") for error in ratios]
    elif ratios and bound is not None:  # TV_seq is estimated under KL <= delta
        priced = masked_guarantee(
            error=ratios[0], rejected=1 - intervals["acceptance"].low, tv_seq=pinsker(intervals["kl_seq"].high)
        )
        guarantees.append(replace(priced, provided=_conditions(region, premises)))
    if bound is not None and not (predictable and constants == "sharp"):
        conditions = _conditions(region, premises)
        guarantees.append(Guarantee("TRM", "surrogate", bound.value, 0.0, conditions))
    return guarantees


def _unified(region: TrustRegion, kl_seq: Estimate, shift: Estimate, constants: str) -> Bound:
    """B* with every expectation at the upper end of its interval, for rewards in [0, 1]."""
    limits = {"horizon": region.horizon, "delta": region.delta, "eps": region.token_tv}
    rows = all_bounds(**limits, kl_seq=kl_seq.high, constants=constants)
    row = ROWS["adaptive"]
    adaptive = CONSTANTS[constants] * shift.high
    return tightest([*rows, Bound("adaptive", adaptive, row.route, row.scaling, row.equation)])


def _check_choices(constants: str, assume: Collection[str], prompts: PromptDesign | None) -> None:
    check_constants(constants)
    if prompts is not None:
        check_choice("prompts", prompts, DESIGNS)
    for name in assume:
        check_choice("assume", name, ("kl", "tv"))


def _on_host(batch: BatchEvidence) -> HostEvidence:
    """The evidence in numpy, of a batch whose sequences are there and at most as long as the horizon."""
    if len(batch) == 0:
        raise BadValueError("the batch has no sequences; there is nothing to certify")
    host, region = batch.to_host(), batch.region
    longest = int(host["length"].argmax())
    if host["length"][longest] > region.horizon:
        raise BadValueError(
            f"sequence {longest} has {host['length'][longest]:.0f} tokens, horizon = "
            f"{region.horizon}; the horizon is the longest possible response"
        )
    return host


def _outside(host: HostEvidence, region: TrustRegion) -> Bool[np.ndarray, " sequences"]:
    """Sequences of which some token may lie outside the region, by the upper ends of its divergences."""
    outside = ~(host["kl_high"] <= region.delta)
    return outside if region.eps is None else outside | ~(host["tv_high"] <= region.eps)


def _accepted(
    host: HostEvidence, region: TrustRegion, outside: Bool[np.ndarray, " sequences"] | None
) -> Bool[np.ndarray, " sequences"]:
    """Sequences that the gates and the region keep; `outside` is None where the region was not measured."""
    accepted = host["kept"] > 0
    if outside is not None:
        accepted &= ~outside
    return accepted if region.tau is None else accepted & (host["worst"] <= region.tau)


def _premises(
    host: HostEvidence, region: TrustRegion, grades: dict[str, Grade], assume: Collection[str]
) -> dict[str, Status]:
    """Status of each premise that the region states."""
    limits = {"kl": (region.delta, np.inf), "tv": (region.eps, 1.0)}
    status: dict[str, Status] = {}
    for name, (limit, largest) in limits.items():
        if limit is None or limit >= largest:
            continue  # no limit
        if float(host[f"{name}_low"].max()) > limit:
            status[name] = "falsified"
        elif name in assume:
            status[name] = "known"
        else:
            status[name] = "unknown" if grades[name] is Grade.SAMPLED else "not falsified"
    return status


def _conditions(region: TrustRegion, premises: dict[str, Status]) -> tuple[str, ...]:
    words = {"kl": f"KL(rollout || current) <= {region.delta:g}", "tv": f"TV <= {region.eps or 0:g}"}
    return tuple(f"{words[k]} at every reachable context ({status})" for k, status in premises.items())
