"""Which methods train a lower bound of the return's gain: what of each objective certifies itself.

A method pushes log pi of a token by some g(A, m, s): A the advantage, m the mismatch ratio pi_old / mu,
s = pi / pi_old. What it maximizes is the integral of that push,

    Phi(A, m, s) = integral from 1 to s of g(A, m, u) d log u

(for a surrogate with a value f this is m (f(s) - f(1)), for a stopped weight c it is A c log s where c is
constant). Rewards R lie in [0, 1], advantages are A = R - b, b in [0, 1] a function of the prompt. Where, for every s,

    Phi <= A m (s - 1) + (1 - R) k3(m s),   k3(w) = w - 1 - log w,

the objective that is trained certifies itself (docs/certificates.md, eq. 12):

    J(pi) - J(mu) >= E_mu[ sum_t (Phi_t + A (m_t - 1)) ] - KL_seq(mu || pi)

if pi draws nothing mu cannot (not needed where b = 0). The integral is taken numerically on a grid, from
the parts of the row; nothing is typed in for any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import BatchInfo
from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.methods import probe
from offdrift.methods.describe import units
from offdrift.methods.method import Method
from offdrift.segments import Segments

EVERY, POSITIVE, NONE = "every baseline", "no baseline", "none known"
STATEMENTS = {
    EVERY: "the summed objective less KL_seq is a lower bound of the gain, for A = R - b(prompt)",
    POSITIVE: "the same where the advantage is the reward itself, b = 0",
    NONE: "looks at more than one token, or promises more than policies keep",
}
REWARDS, BASELINES = (0.0, 0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)
MISMATCHES = (0.02, 0.4, 0.9, 1.1, 2.5, 50.0)
STEPS, WIDEST = 1200, 4.0
"""Grid points on each side of s = 1, and the largest |log s|, nats."""


@dataclass(frozen=True)
class LowerBound:
    """What is known of a row: for which baselines the statement holds."""

    baselines: str
    """One of `STATEMENTS`, where rollout engine and trainer agree (m = 1)."""
    under_mismatch: bool
    """Whether it holds for every mismatch m, too."""


def integrated_push(row: Method, advantage: float, mismatch: float, *, correct: bool) -> Float[Tensor, " s"]:
    """Phi(A, m, s) on the grid of log s, for a response of one token.

    Args:
        correct: reward of the response, 1 or 0, for methods that look at it.
    """
    log_s = torch.linspace(-WIDEST, WIDEST, 2 * STEPS + 1, dtype=torch.float64)
    n = len(log_s)
    old = torch.full((n,), -9.0, dtype=torch.float64)
    logp = (old + log_s).requires_grad_()
    rollout = old - torch.tensor(mismatch, dtype=torch.float64).log()
    segments = Segments.from_lengths([1] * n, group_ids=torch.arange(n))
    logprobs = LogProbs(rollout, segments, logp, old)
    far = (old - rollout + log_s).square() / 2
    names = (f"{d}_{pair}" for d in ("kl", "tv") for pair in ("rollout_current", "rollout_old", "old_current"))
    batch_info = BatchInfo(
        divergences={name: Divergence.exact(name, far) for name in names},
        entropy=torch.ones(n, dtype=torch.float64),
        vocab=64,
        rewards=torch.full((n,), float(correct), dtype=torch.float64),
        version_lag=torch.zeros(n, dtype=torch.float64),
    )
    advantages = torch.full((n,), advantage, dtype=torch.float64)
    batch = probe.Batch(logprobs, advantages, batch_info)
    push = -torch.autograd.grad(probe.token_losses(row, batch).sum(), logp)[0]
    steps = (push[1:] + push[:-1]) / 2 * (log_s[1] - log_s[0])
    total = torch.cat([torch.zeros(1, dtype=torch.float64), steps.cumsum(0)])
    return total - total[STEPS]


@cache
def lower_bound(row: Method) -> LowerBound:
    """For which baselines and mismatches the objective of a method certifies itself.

    Rows that look at more than one token at a time (sequence and prefix ratios, groups, the whole step,
    gates that reject sequences) are `NONE`: `certify` has a statement of its own for masked surrogates.

    Example:
        >>> from offdrift.methods import method
        >>> lower_bound(method("ppo_clip"))
        LowerBound(baselines='every baseline', under_mismatch=False)
    """
    if units(row) != {"token"} or row.looks_ahead:
        return LowerBound(NONE, False)
    for baselines, values in ((EVERY, BASELINES), (POSITIVE, (0.0,))):
        cases = [(reward, b) for reward in REWARDS for b in values if reward != b]
        if all(_certified(row, reward, b, 1.0) for reward, b in cases):
            agree = all(_certified(row, reward, b, m) for reward, b in cases for m in MISMATCHES)
            return LowerBound(baselines, agree)
    return LowerBound(NONE, False)


def _certified(row: Method, reward: float, baseline: float, mismatch: float) -> bool:
    """Whether Phi <= A m (s - 1) + (1 - R) k3(m s) on the grid, up to the rule's error at jumps of the push."""
    log_s = torch.linspace(-WIDEST, WIDEST, 2 * STEPS + 1, dtype=torch.float64)
    advantage = reward - baseline
    phi = integrated_push(row, advantage, mismatch, correct=reward > 0)
    w = mismatch * log_s.exp()
    limit = advantage * (w - mismatch) + (1 - reward) * (w - 1 - w.log())
    allowed = WIDEST / STEPS * abs(advantage) * mismatch * log_s.abs().clamp(max=2).exp() * 2
    return bool((phi <= limit + allowed).all())
