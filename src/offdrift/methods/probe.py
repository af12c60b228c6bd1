"""A small batch under drift with every input that a part may read; `describe` tries methods on it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import BatchInfo
from offdrift.correction import Correction
from offdrift.divergence.evidence import Distributions, Divergence
from offdrift.logprobs import LogProbs
from offdrift.methods.method import Method
from offdrift.objectives import Objective
from offdrift.segments import Segments


@dataclass(frozen=True)
class ProbeBatch:
    """Log-probs under three policies, advantages and `BatchInfo`, float64."""

    logprobs: LogProbs
    advantages: Float[Tensor, " n"]
    batch_info: BatchInfo


@cache
def batch() -> ProbeBatch:
    """Eight sequences of four prompts and up to three turns, under calm and under wild drift.

    Example:
        >>> len(batch().logprobs.segments), len(batch().logprobs.segments.groups)
        (8, 4)
    """
    draw = torch.Generator().manual_seed(0)
    turns = Segments.from_lengths([1, 2, 3, 2, 2, 3, 3, 4, 4, 4, 5, 3, 3, 5])
    groups = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    segments = Segments.from_lengths([1, 2, 3, 4, 6, 8, 12, 8], turns=turns, group_ids=groups)
    n = segments.num_tokens
    size = segments.spread(torch.tensor([0.3, 1e-4, 0.03, 0.3, 1.0, 0.01, 0.3, 1.5]).double())
    drift = size * torch.randn(2, n, generator=draw, dtype=torch.float64).clamp(-2, 2)
    rollout = -7 + 3 * torch.rand(n, generator=draw, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, -0.5, 1.5, 1.0, -1.0, 0.75, -1.25]).double()
    far = drift.sum(0).square()
    pairs = ("rollout_current", "rollout_old", "old_current")
    names = [f"{d}_{pair}" for d in ("kl", "tv") for pair in pairs]
    batch_info = BatchInfo(
        divergences={name: Divergence.exact(name, far) for name in names},
        entropy=1 + far.sin(),
        vocab=64,
        rewards=(torch.arange(len(segments)) % 3).double(),
        version_lag=(segments.seq_ids % 4).double(),
        distributions=Distributions.of_two(rollout + drift[0], rollout + drift.sum(0)),
    )
    logprobs = LogProbs(rollout, segments, rollout + drift.sum(0), rollout + drift[0], rollout)
    return ProbeBatch(logprobs, segments.spread(signs), batch_info)


def moved(token: int, by: float | int) -> ProbeBatch:
    """The batch with one token less likely under old and current policy, `by` nats each.

    Its divergences are those of the larger drift.
    """
    calm = batch()
    lp, step = calm.logprobs, torch.zeros_like(calm.advantages)
    step[token] = by
    assert lp.logp is not None
    assert lp.logp_old is not None
    far = {name: Divergence.exact(name, d.lo + step.square()) for name, d in calm.batch_info.divergences.items()}
    logprobs = LogProbs(lp.logp_rollout, lp.segments, lp.logp - 2 * step, lp.logp_old - step, lp.logp_ref)
    both = Distributions.of_two(logprobs.old, logprobs.current)
    return ProbeBatch(logprobs, calm.advantages, replace(calm.batch_info, divergences=far, distributions=both))


def token_losses(row: Method, given: ProbeBatch) -> Float[Tensor, " n"]:
    """Loss of every token before it is aggregated, regularizer included."""
    lp, batch_info = given.logprobs, given.batch_info
    lp = lp if row.anchor is None else row.anchor(lp, batch_info)
    corrected = row.correction(lp, given.advantages, batch_info)
    token_losses = row.objective(lp, given.advantages, batch_info)
    loss = (corrected.weight * token_losses.loss).where(corrected.keep, 0.0)
    return loss if token_losses.regularizer is None else loss + token_losses.regularizer


def push(objective: Objective, *, scale: float | int) -> Float[Tensor, " n"]:
    """Gradient of the batch's summed loss to every log pi, advantages times `scale`."""
    sample = batch()
    logp = sample.logprobs.current.clone().requires_grad_()
    logprobs = replace(sample.logprobs, logp=logp)
    token_losses = objective(logprobs, scale * sample.advantages, differentiable(sample.batch_info, logprobs))
    return torch.autograd.grad(token_losses.loss.sum(), logp)[0]


def differentiable(batch_info: BatchInfo, logprobs: LogProbs) -> BatchInfo:
    """The `BatchInfo` with a KL of old and current policy that has a gradient, and distributions that have one."""
    name = "kl_old_current"
    calm = batch().logprobs
    start = (calm.current - calm.old).square() / 2
    kl = batch_info.divergences[name].lo + (logprobs.current - logprobs.old).square() / 2 - start
    both = Distributions.of_two(logprobs.old, logprobs.current)
    divergences = {**batch_info.divergences, name: Divergence.exact(name, kl)}
    return replace(batch_info, divergences=divergences, distributions=both)


def corrected(correction: Correction, *, scale: float | int) -> Float[Tensor, " n"]:
    """Weight of every token of the batch, 0 where a gate rejects; advantages times `scale`."""
    sample = batch()
    decided = correction(sample.logprobs, scale * sample.advantages, sample.batch_info)
    return decided.weight.where(decided.keep, 0.0)


STEPS, WIDEST = 1200, 4.0
"""Grid points on each side of s = 1, and the largest |log s|, nats."""


GRID = torch.linspace(-WIDEST, WIDEST, 2 * STEPS + 1, dtype=torch.float64)
"""log s, nats."""
BESIDE, NO_SLOPE = torch.tensor([-1e-9, 1e-9], dtype=torch.float64), 1e-7
"""log s just below and above 1, and what slopes there are off by."""
ROUNDING = 1e-12
"""What sums of a few thousand float64 numbers are off by, relative to the largest."""


def integrated_push(row: Method, advantage: float, mismatch: float, *, correct: bool) -> Float[Tensor, " s"]:
    """Return what a method maximizes, for a response of one token, on the grid of log s.

        Phi(A, m, s) = integral from 1 to s of g(A, m, u) d log u

    g is the push on log pi of a token with advantage A, mismatch ratio m = pi_old / mu and s = pi / pi_old. For
    a surrogate with a value f it is m (f(s) - f(1)), for a constant stopped weight c it is A c log s.

    Args:
        correct: reward of the response, 1 or 0, for methods that look at it.
    """
    return _from_1(_trapezoids(token_push(row, advantage, mismatch, correct=correct)))


def integral_error(push: Float[Tensor, " s"], steepest: float) -> Float[Tensor, " s"]:
    """Return a limit of what the trapezoids of `integrated_push` are off by.

    Of second order in the step where the push is smooth, so that a wrong slope at s = 1 cannot hide in it, and half a
    cell where it jumps, as at a clip: from that cell on, not before.

    Args:
        push: at the points of the grid.
        steepest: the largest slope of a smooth push against log s, in units of max(1, s).
    """
    step, rise = WIDEST / STEPS, push.diff().abs()
    smooth = steepest * step * GRID.exp().clamp(min=1)
    jumps = rise > torch.maximum(smooth[1:], smooth[:-1])
    curved = step**2 * torch.maximum(smooth[1:], smooth[:-1])
    return _from_1(torch.where(jumps, step * rise / 2, curved)).abs() + ROUNDING * (1 + push.abs())


def _trapezoids(push: Float[Tensor, " s"]) -> Float[Tensor, " cells"]:
    return (push[1:] + push[:-1]) / 2 * (WIDEST / STEPS)


def _from_1(cells: Float[Tensor, " cells"]) -> Float[Tensor, " s"]:
    """The sum of a grid's cells from s = 1 on, negative to the left of it."""
    total = torch.cat([torch.zeros(1, dtype=torch.float64), cells.cumsum(0)])
    return total - total[STEPS]


def token_push(
    row: Method, advantage: float, mismatch: float, *, correct: bool, log_s: Float[Tensor, " s"] = GRID
) -> Float[Tensor, " s"]:
    """Return the push on log pi, g of `integrated_push`, at values of log s."""
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
        distributions=Distributions.of_two(old, logp),
    )
    advantages = torch.full((n,), advantage, dtype=torch.float64)
    batch = ProbeBatch(logprobs, advantages, batch_info)
    return -torch.autograd.grad(token_losses(row, batch).sum(), logp)[0]
