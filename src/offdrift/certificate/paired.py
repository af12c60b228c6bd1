"""Two policies compared by fresh answers of both to the same prompts, without any log-prob.

Ratios of whole responses grow with their length, rewards do not. The difference of a prompt's two mean rewards lies in
[-1, 1] whatever the policies are, and what is hard about a prompt cancels in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from offdrift.certificate.confidence import Estimate, Looks, betting, check_alpha, cluster_means
from offdrift.certificate.prompts import (
    AVERAGED,
    DESIGNS,
    DRAWS,
    PromptDesign,
    design_without_groups,
    two_readings,
)
from offdrift.certificate.samples import unit_rewards
from offdrift.errors import BadValueError, RecordError, check_choice


class Answers(NamedTuple):
    """Rewarded answers of one policy."""

    prompts: Int[np.ndarray, " b"]
    """Key of each answer's prompt, equal where prompts are."""
    groups: Int[np.ndarray, " b"]
    """Number of the draw of a prompt that it answers; equal to `prompts` where none was drawn twice."""
    rewards: Float[np.ndarray, " b"]
    clusters: Int[np.ndarray, " b"] | None = None
    """Key of what its prompt shares with others."""
    grouped: bool = True
    """Whether draws of one prompt are told apart; else nobody knows which answers to it are of one draw."""


@dataclass(frozen=True)
class PairedCertificate:
    """A lower bound on J(B) - J(A) from fresh answers of both policies. In units of reward."""

    gain: Estimate
    """J(B) - J(A), over independent draws; one-sided."""
    rewards: tuple[float, float]
    """Sample means of the rewards of A and B, over draws."""
    answers: tuple[int, int]
    """Answers of A and of B."""
    prompts: int
    """Independent draws."""
    alpha_total: float
    looks: Looks
    design: PromptDesign | None

    @property
    def gain_low(self) -> float:
        """J(B) - J(A) is at least this, with probability 1 - alpha_total, see `looks`."""
        return self.gain.low

    @property
    def certified(self) -> bool:
        """Whether B is better, surely."""
        return self.gain.low > 0

    @property
    def verdict(self) -> str:
        """One sentence: what is guaranteed, or why nothing is."""
        what = f"of {self.prompts:,} prompts, where J changed by an estimated {self.gain.mean:+.3g}"
        confidence = f"with probability {1 - self.alpha_total:g} ({self.looks.covers}; fresh answers, paired)"
        provided = "; ".join(
            [
                AVERAGED[self.design],
                f"provided: {DRAWS[self.design]}",
                "each policy answered them anew, with weights that did not learn from these prompts, and no answer "
                "was left out by its reward or its length",
                self.looks.provided,
            ]
        )
        if self.certified:
            return f"J(B) exceeds J(A) by at least {self.gain.low:.4g} {confidence}; {provided}"
        return (
            f"no certificate: sampling error {self.gain.mean - self.gain.low:.3g} {what}. W{confidence[1:]} J(B) - "
            f"J(A) is at least {self.gain.low:.4g}; {provided}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "verdict": self.verdict,
            "certified": self.certified,
            "gain_low": self.gain.low,
            "alpha": self.gain.alpha,
            "alpha_total": self.alpha_total,
            "holds_for": self.looks.covers,
            "averages_over": AVERAGED[self.design],
            "prompts": self.prompts,
            "answers": list(self.answers),
            "rewards": list(self.rewards),
            "gain": asdict(self.gain),
        }


def certify_fresh(
    a: Answers,
    b: Answers,
    *,
    reward_range: tuple[float, float] = (0.0, 1.0),
    alpha: float = 0.05,
    looks: Looks | None = None,
    prompts: PromptDesign | None = None,
) -> PairedCertificate:
    """Derive a lower bound on J(B) - J(A) from rewards of fresh answers to the same prompts.

        d_x = mean of B's rewards on x - mean of A's,   in [-1, 1],   E[d] = J(B) - J(A)

    The lower end of the mean of d by betting, over prompts, draws or clusters. It needs no log-prob, no ratio and no
    premise about the policies, and does not depend on how far apart they are.

    Args:
        a, b: answers of the two policies, any number to each prompt.
        reward_range: smallest and largest possible reward.
        alpha: largest probability that the statement is wrong, of all that `looks` names.
        looks: the certificates that are to hold together.
        prompts: where prompts come more than once or depend on each other, as in `certify`. Of "drawn" prompts both
            policies answer each draw, and draws of one prompt are paired in their order.

    Raises: `RecordError` if the policies did not answer the same prompts, or, without `prompts`, one prompt in several
        draws (where nobody knows the draws: some prompts more often than others); `BadValueError` for rewards that are
        out of range, no answers, or an alpha outside (0, 1).

    Example:
        >>> x = np.arange(200)
        >>> right = x % 2 == 0
        >>> a, b = (Answers(x, x, r.astype(float)) for r in (right & (x % 8 > 0), right))
        >>> proof = certify_fresh(a, b)
        >>> round(proof.gain.mean, 3), round(proof.gain_low, 3)
        (0.125, 0.075)

    Reference: I. Waudby-Smith, A. Ramdas, arXiv:2010.09686, section 4.
    """
    check_alpha(alpha)
    if prompts is not None:
        check_choice("prompts", prompts, DESIGNS)
    looks, sides = looks or Looks(), {"A": a, "B": b}
    units: dict[str, np.ndarray] = {}
    designs: list[PromptDesign | None] = []
    for name, side in sides.items():
        if not len(side.rewards):
            raise BadValueError(f"{name} has no answers; there is nothing to compare")
        distinct, draws = len(np.unique(side.prompts)), len(np.unique(side.groups))
        try:
            design = prompts if side.grouped else design_without_groups(side.prompts, prompts)
        except RecordError as e:
            raise RecordError(f"{name}: {e}") from e
        if draws > distinct and design is None:
            raise RecordError(f"{name}: {two_readings(draws, distinct)}")
        designs.append(design)
        units[name] = _ordered(side) if prompts == "drawn" else side.prompts
    one, other = (set(ids.tolist()) for ids in units.values())
    if one != other:
        raise RecordError(
            f"{len(one - other):,} prompts have answers of A alone and {len(other - one):,} of B alone; a pair needs "
            "both, and leaving out prompts may favor one policy. Have both answer the same prompts"
        )
    keys = np.unique(units["A"])
    scaled = {name: unit_rewards(side.rewards, reward_range) for name, side in sides.items()}
    means = {name: cluster_means(scaled[name], units[name]) for name in sides}
    difference = means["B"] - means["A"]
    if prompts == "clustered":
        difference = cluster_means(difference, _clusters(a, b, keys))
    difference = np.random.default_rng(0).permutation(difference)
    found = betting(difference, low=-1.0, high=1.0, alpha=looks.share(alpha), sides="low")
    size, low = reward_range[1] - reward_range[0], reward_range[0]
    return PairedCertificate(
        gain=replace(found.scaled(size), method="betting, paired"),
        rewards=(low + size * float(means["A"].mean()), low + size * float(means["B"].mean())),
        answers=(len(a.rewards), len(b.rewards)),
        prompts=len(difference),
        alpha_total=alpha,
        looks=looks,
        design=prompts or next((design for design in designs if design), None),
    )


def _ordered(side: Answers) -> Int[np.ndarray, " b"]:
    """A number for each draw of a prompt, by which the same draws of two policies are known: prompt, and which time."""
    groups, first, of = np.unique(side.groups, return_index=True, return_inverse=True)
    times: dict[int, int] = {}
    number = np.zeros(len(groups), dtype=np.int64)
    for i in np.argsort(first, kind="stable"):
        key = int(side.prompts[first[i]])
        number[i] = hash((key, times.setdefault(key, 0)))
        times[key] += 1
    return number[of]


def _clusters(a: Answers, b: Answers, keys: Int[np.ndarray, " g"]) -> Int[np.ndarray, " g"]:
    """The cluster of each prompt. Raises: `RecordError` if a prompt is of several, or of none."""
    of: Mapping[int, set[int]] = {int(key): set() for key in keys}
    for side in (a, b):
        if side.clusters is None:
            raise RecordError("clusters of prompts are not named in the answers of both policies")
        for key, cluster in zip(side.prompts.tolist(), side.clusters.tolist(), strict=True):
            of[key].add(cluster)
    several = sum(len(found) > 1 for found in of.values())
    if several:
        raise RecordError(f"{several:,} prompts are of several clusters, which are then no independent draws")
    return np.array([next(iter(of[int(key)])) for key in keys], dtype=np.int64)
