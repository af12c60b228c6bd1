"""Clip-Cov and KL-Cov: limits on the tokens whose covariance of log-prob and advantage is largest.

Entropy falls with that covariance, and a few tokens make up most of it: Clip-Cov removes some of them from the loss
at random, KL-Cov keeps the highest where they are. Both need the whole step. No choice depends on how the step was
split: chance is a key that every token computes from its own values.

Reference: Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models",
arXiv:2505.22617.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo, StepSums
from offdrift.correction.acceptance import token_keys
from offdrift.correction.statistics import divergence_of
from offdrift.errors import EvidenceError, MethodError, check_choice, check_number, check_range
from offdrift.logprobs import LogProbs
from offdrift.numerics import clamped, ratio
from offdrift.objectives.base import PerToken, TokenLoss
from offdrift.objectives.clipped import ppo_clip
from offdrift.objectives.reinforce import importance_sampled
from offdrift.ratios import RatioName, log_ratio, stopped_log_ratio

Penalty = Literal["abs", "k2", "k3", "exact"]
TIE = 1e-12
"""How much a key may move a covariance: ties break by chance, and nothing else changes its place."""


def covariance(advantages: Float[Tensor, " n"], logp: Float[Tensor, " n"], seen: StepSums) -> Float[Tensor, " n"]:
    """Each token's share of the covariance over a step, (A_t - mean A)(log pi_t - mean log pi).

    Args:
        seen: the `advantages` and `logp` of all tokens of the step, over which the means are taken.

    Gradient: none.

    Example:
        >>> a, logp = torch.tensor([1.0, -1.0]), torch.tensor([-0.5, -1.5])
        >>> covariance(a, logp, {"advantages": a, "logp": logp})
        tensor([0.5000, 0.5000], dtype=torch.float64)

    Reference: Cui et al., arXiv:2505.22617.
    """
    mean_a, mean_x = (seen[name].double().mean() for name in ("advantages", "logp"))
    return (advantages.detach().double() - mean_a) * (logp.detach().double() - mean_x)


@dataclass(frozen=True, kw_only=True)
class CovClipped:
    """Clip-Cov: PPO clipping, and no loss at all on a few random tokens of high covariance.

        candidates  cov_low < cov_t < cov_high, and not clipped by PPO
        chosen      max(1, int(fraction N)) of the candidates at random, N tokens in the step
        L = max(-A u, -A clip(u, 1 - eps_low, 1 + eps_high)), 0 where chosen

    Identical sequences are chosen together (see `token_keys`). `next` changes the seed.

    Args:
        fraction: of the tokens of the step, (0, 1].
        cov_low: covariance above which a token may be chosen, nats times advantage.
        cov_high: covariance below which it may be.
        seed: of the choice; one per step.

    Gradient: to `logp`, as PPO where not chosen; none through the covariance.

    Reference: Cui et al., arXiv:2505.22617; verl, `clip_cov`, which chooses on every rank by itself.
    The authors' recipe has eps_high = 1. Aggregate as `token_mean`.
    """

    on: RatioName = "staleness"
    eps_low: float = 0.2
    eps_high: float = 0.2
    fraction: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    seed: int = 0
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, ("full", "staleness"))
        check_range(self)
        for name in ("fraction", "cov_low", "cov_high", "seed"):
            check_number(name, getattr(self, name))
        _check_fraction(self.fraction)
        if not self.cov_low < self.cov_high:
            raise MethodError(f"cov_low={self.cov_low} must be below cov_high={self.cov_high}")

    @property
    def formula(self) -> str:
        return (
            f"L = max(-A u, -A clip(u, 1 - {self.eps_low:g}, 1 + {self.eps_high:g})), "
            f"0 on a random {self.fraction:g} of the tokens with "
            f"{self.cov_low:g} < cov(A, log pi) < {self.cov_high:g}, u = ratio({self.on})"
        )

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        observed = batch_info.seen_by(self, logprobs, advantages)
        loss, clipped, _ = self._ppo(log_ratio(logprobs, on=self.on), advantages)
        assert clipped is not None
        step = self._between(covariance(observed["advantages"], observed["logp"], observed))
        keys = observed["key"].where(step, torch.inf)
        last = -_smallest_chosen(-keys, self.fraction)
        inside = self._between(covariance(advantages, logprobs.current, observed)) & ~clipped
        chosen = inside & (token_keys(logprobs, seed=self.seed) <= last)
        return TokenLoss(loss.where(~chosen, 0.0), clipped | (chosen & (advantages != 0)))

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """Advantages, log-probs and keys; a token that PPO clips has an infinite key."""
        observed = _observed(logprobs, advantages, self.seed)
        _, clipped, _ = self._ppo(stopped_log_ratio(logprobs, on=self.on), observed["advantages"])
        assert clipped is not None
        return {**observed, "key": observed["key"].where(~clipped, torch.inf)}

    def next(self, seen: StepSums) -> CovClipped:
        """Return the objective with another seed, for the next step."""
        return replace(self, seed=self.seed + 1)

    def _ppo(self, x: Float[Tensor, " n"], advantages: Float[Tensor, " n"]) -> TokenLoss:
        return ppo_clip(x, advantages, eps_low=self.eps_low, eps_high=self.eps_high)

    def _between(self, cov: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
        return (self.cov_low < cov) & (cov < self.cov_high)


@dataclass(frozen=True, kw_only=True)
class CovPenalized:
    """KL-Cov: a penalty for moving, on the tokens of highest covariance; no clip.

        L = -A u + coef p(log u) 1[t in S],   S the max(1, int(fraction N)) tokens of largest cov

        abs  |log u|          what the implementations have
        k2   (log u)^2 / 2
        k3   u - 1 - log u    unbiased for KL(old || pi) on tokens of the old policy
        exact  KL(old || pi)  the paper's, over the whole vocabulary: `divergences["kl_old_current"]`

    The exact penalty needs that divergence with its gradient (`engines.score.old_divergences`);
    without it the batch is refused. Equal covariances are told apart by
    `token_keys`. A token of S with A = 0 carries the penalty alone.

    Args:
        fraction: of the tokens of the step, (0, 1]; sources differ by orders of magnitude (verl
            2e-4; the authors `k_percent` 0.2, or 0.02 for the larger model).
        coef: weight of the penalty; verl documents 1 and ships 0.1.
        penalty: see above; log-ratios are clamped to +-20.

    Gradient: to `logp`, -A u, and on S coef times sign(log u), log u, or u - 1; the exact penalty's
    goes to the logits of the current policy, coef (pi - old).

    Reference: Cui et al., arXiv:2505.22617, eq. 14; verl, `kl_cov`, which chooses on every rank by itself.
    Aggregate as `token_mean`.
    """

    on: RatioName = "staleness"
    fraction: float = 2e-4
    coef: float = 1.0
    penalty: Penalty = "abs"
    gradient = "unit"

    def __post_init__(self) -> None:
        check_choice("on", self.on, ("full", "staleness"))
        check_choice("penalty", self.penalty, get_args(Penalty))
        for name in ("fraction", "coef"):
            check_number(name, getattr(self, name))
        _check_fraction(self.fraction)
        if self.penalty == "exact" and self.on != "staleness":
            raise MethodError(
                'penalty="exact" is KL(old || current), so on must be "staleness"; on="full" would '
                "compare the ratio with another policy"
            )
        if self.coef < 0:
            raise MethodError(f"coef={self.coef} must not be negative: it would reward moving")

    @property
    def exact(self) -> bool:
        """Whether it reads a divergence of whole distributions."""
        return self.penalty == "exact"

    @property
    def reads(self) -> str | None:
        """The key of `divergences` that it reads; None if it reads none."""
        return "kl_old_current" if self.exact else None

    @property
    def formula(self) -> str:
        words = {"abs": "|log u|", "k2": "(log u)^2 / 2", "k3": "(u - 1 - log u)", "exact": "KL(old || current)"}
        p = words[self.penalty]
        return (
            f"L = -A u + {self.coef:g} {p} on the {self.fraction:g} of the tokens with the largest "
            f"cov(A, log pi), u = ratio({self.on})"
        )

    def __call__(self, logprobs: LogProbs, advantages: PerToken, batch_info: BatchInfo = NO_INFO) -> TokenLoss:
        observed = batch_info.seen_by(self, logprobs, advantages)
        x = log_ratio(logprobs, on=self.on)
        step = covariance(observed["advantages"], observed["logp"], observed) - TIE * observed["key"]
        last = _smallest_chosen(step, self.fraction)
        score = covariance(advantages, logprobs.current, observed) - TIE * token_keys(logprobs)
        penalty = self.coef * self._penalty(x, batch_info)
        return TokenLoss(importance_sampled(x, advantages) + penalty.where(score >= last, 0.0))

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """Advantages, log-probs and keys of all tokens. Gradient: none."""
        return _observed(logprobs, advantages, 0)

    def _penalty(self, x: Float[Tensor, " n"], batch_info: BatchInfo) -> Float[Tensor, " n"]:
        if self.exact:
            kl = divergence_of(batch_info, "kl", on="staleness").lo
            if x.requires_grad and not kl.requires_grad:
                raise EvidenceError(
                    "kl_old_current carries no gradient, so this penalty would push nothing; give "
                    "engines.score.old_divergences(logits_old, logits) with the logits of this forward pass"
                )
            return kl
        x = clamped(x)
        if self.penalty == "abs":
            return x.abs()
        return x.square() / 2 if self.penalty == "k2" else ratio(x) - 1 - x


def _observed(logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, seed: int) -> StepSums:
    if advantages is None:
        raise MethodError("the covariance of log-probs and advantages needs advantages; give them")
    return {
        "advantages": advantages.detach().double(),
        "logp": logprobs.current.detach().double(),
        "key": token_keys(logprobs, seed=seed),
    }


def _smallest_chosen(x: Float[Tensor, " n"], fraction: float) -> Float[Tensor, ""]:
    """The smallest of the largest `fraction` of the values, at least one; NaN of nothing."""
    if not len(x):
        return x.new_full((), torch.nan)
    return x.topk(max(1, int(fraction * len(x)))).values[-1]


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise MethodError(f"fraction={fraction} must lie in (0, 1]; it is a share of the tokens")
