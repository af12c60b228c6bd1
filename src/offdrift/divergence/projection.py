"""Projection of the current policy into a KL ball around the old one, token by token, with its gradient (TROLL).

Along the geometric path from the old policy q to the current one p everything is a function of one number s, by
x = log p - log q and its cumulant generating function under q, K(s) = log sum_a q_a e^(s x_a):

    log pi_s = log q + s x - K(s)        KL(pi_s || q) = s K'(s) - K(s)        d KL / d s = s K''(s)

with K' and K'' the mean and the variance of x under pi_s. The KL grows with s, so the s at which it is the bound is
found by Newton's method within a bracket. Computed in float64, a few rows at a time: memory beyond the results does not
grow with the number of tokens.

Shape suffixes: n tokens, v vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from offdrift.divergence.chunks import by_rows
from offdrift.divergence.evidence import Distributions
from offdrift.errors import BadValueError
from offdrift.numerics import at_least_float32

ROUNDING = 1e-13
"""Relative error of the bound at which the search stops."""
MOST_STEPS = 200
"""Of the search on a host, which ends where every row is found: Newton takes about six."""
STEPS_ELSEWHERE = 24
"""Of the search on an accelerator, which is never asked whether it has ended."""


class Projection(NamedTuple):
    """The projected policy at each token, as far as a loss reads it."""

    log_ratio: Float[Tensor, " n"]
    """log pi(y) - log pi_old(y) of the drawn token, nats; carries the gradient."""
    distance: Float[Tensor, " n"]
    """KL(current || projected), nats, with the projected policy held constant; carries the gradient."""
    multiplier: Float[Tensor, " n"]
    """eta of the bound; 0 inside the ball. No gradient."""
    outside: Bool[Tensor, " n"]
    """Whether the current policy was outside the ball."""
    logp_old: Float[Tensor, " n"]
    """log-prob of the drawn token under the old policy, nats. No gradient."""
    logp: Float[Tensor, " n"]
    """The same under the current policy, before the projection. No gradient."""


def project(distributions: Distributions, *, bound: float) -> Projection:
    """Project the current policy of every token into the ball KL(pi || pi_old) <= bound.

        pi = argmin KL(pi || pi_new)  subject to  KL(pi || pi_old) <= bound
        log pi = (log pi_new + eta log pi_old) / (1 + eta) - const,    eta >= 0,  eta (KL(pi || pi_old) - bound) = 0

    Inside the ball pi is the current policy. With s = 1 / (1 + eta), x = log pi_new - log pi_old, m and V the mean and
    the variance of x under pi, and y the drawn token:

        d log pi_y / d logits_b = s (1[b = y] - pi_b) - (s / V) (x_y - m) pi_b (x_b - m)       second term: outside only
        d distance / d logits_b = (1 - s) pi_new_b (x_b - E_new x)

    Args:
        distributions: of the old and the current policy; entries that either calls impossible are left out of pi.
        bound: of the KL, nats, > 0. It is met to rounding; on an accelerator, which is not asked when to stop, after 24
            steps of the search.

    Returns: see `Projection`; nats, float32 or better. Where the current policy can draw what the old one cannot,
        `distance` is +inf; where a drawn token is impossible under either, `log_ratio` is -inf.

    Gradient: to `distributions.logits`; once (a second derivative is refused).

    Raises: `BadValueError` if the bound is not positive and finite.

    Example:
        >>> old, new = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.1, 0.9]]).log()
        >>> there = project(Distributions(old, new, torch.tensor([1])), bound=0.05)
        >>> there.outside, round(float(there.log_ratio.exp()) / 2, 4)    # KL(0.6568 || 0.5) = 0.05
        (tensor([True]), 0.6568)

    Reference: Becker et al., TROLL, arXiv:2510.03817, the projection and its solution (its equations as on the authors'
        project page); over the whole vocabulary, where theirs keeps at most 256 entries of 1 - 1e-6 of the mass.
    """
    if not (isinstance(bound, int | float) and 0 < bound < math.inf):
        raise BadValueError(f"bound={bound!r} must be a positive, finite number of nats")
    d = distributions
    log_ratio, distance, s, *of_tokens = _Project.apply(d.logits, d.logits_old.detach(), d.tokens, float(bound))
    return Projection(log_ratio, distance, 1 / s - 1, s < 1, *of_tokens)


class _Place(NamedTuple):
    """A point of the path: the policy there, and mean and variance of x under it."""

    log_pi: Float[Tensor, "n v"]
    pi: Float[Tensor, "n v"]
    constant: Float[Tensor, " n"]
    mean: Float[Tensor, " n"]
    variance: Float[Tensor, " n"]


class _Path(NamedTuple):
    """The geometric path from the old policy to the current one."""

    log_old: Float[Tensor, "n v"]
    """-inf where either policy is 0."""
    x: Float[Tensor, "n v"]
    """log of their ratio; 0 where either policy is 0."""
    log_new: Float[Tensor, "n v"]

    @staticmethod
    def of(logits_old: Tensor, logits: Tensor) -> _Path:
        log_old, log_new = (x.double().log_softmax(-1) for x in (logits_old, logits))
        both = log_old.isfinite() & log_new.isfinite()
        return _Path(log_old.where(both, -math.inf), (log_new - log_old).where(both, 0.0), log_new)

    def at(self, s: Float[Tensor, " n"]) -> _Place:
        powers = self.log_old + s[:, None] * self.x
        constant = powers.logsumexp(-1)
        log_pi = powers - constant[:, None]
        pi = log_pi.exp()
        mean = torch.linalg.vecdot(pi, self.x)
        return _Place(log_pi, pi, constant, mean, torch.linalg.vecdot(pi, (self.x - mean[:, None]).square()))

    def rows(self, which: Tensor) -> _Path:
        return _Path(*(x[which] for x in self))

    def solve(self, bound: float) -> Float[Tensor, " n"]:
        """Return s of the projection: 1 inside the ball, else where the KL is the bound."""
        s = torch.ones_like(self.log_old[:, 0])
        place = self.at(s)
        outside = place.mean - place.constant > bound
        if not s.is_cpu:
            return self._root(bound).where(outside, s)
        which = outside.nonzero().squeeze(-1)
        if len(which):
            s[which] = self.rows(which)._root(bound)
        return s

    def _root(self, bound: float) -> Float[Tensor, " n"]:
        """Newton's method on the square root of the KL, which is nearly linear in s, within a bracket."""
        s = torch.ones_like(self.log_old[:, 0])
        low, high = torch.zeros_like(s), torch.ones_like(s)
        for _ in range(MOST_STEPS if s.is_cpu else STEPS_ELSEWHERE):
            place = self.at(s)
            kl = (s * place.mean - place.constant).clamp(min=0)
            above = kl > bound
            low, high = low.where(above, s), s.where(above, high)
            root = kl.sqrt()
            newton = s - 2 * root * (root - math.sqrt(bound)) / (s * place.variance)
            inside = (newton > low) & (newton < high)
            met = (kl - bound).abs() <= ROUNDING * bound
            s = s.where(met, newton.where(inside, (low + high) / 2))
            if s.is_cpu and bool((met | (high - low <= ROUNDING * high)).all()):
                break
        return s


class _Project(torch.autograd.Function):
    """The projection with its closed-form gradient; both passes a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, logits_old: Tensor, tokens: Tensor, bound: float) -> tuple[Tensor, ...]:
        rows_of = functools.partial(_project_rows, bound=bound)
        log_ratio, distance, s, *of_tokens = by_rows(rows_of, (logits, logits_old, tokens), compiled=False)
        ctx.save_for_backward(logits, logits_old, tokens, s)
        ctx.mark_non_differentiable(s, *of_tokens)
        dtype = at_least_float32(logits[:0]).dtype
        return log_ratio.to(dtype), distance.to(dtype), s, *of_tokens

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        logits, logits_old, tokens, s = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        rows = (gradient, logits, logits_old, tokens, s, *grad_outputs[:2])
        by_rows(_write_gradient, rows, compiled=False)
        return gradient, None, None, None


def _project_rows(logits: Tensor, logits_old: Tensor, tokens: Tensor, *, bound: float) -> tuple[Tensor, ...]:
    path = _Path.of(logits_old, logits)
    s = path.solve(bound)
    place = path.at(s)
    of_tokens = [_of_drawn(x.double().log_softmax(-1), tokens) for x in (logits_old, logits)]
    log_ratio = _of_drawn(place.log_pi, tokens) - _of_drawn(path.log_old, tokens)
    log_ratio = log_ratio.where(log_ratio.isfinite(), -math.inf)
    # log new - log pi = (1 - s) x + K where both policies draw; elsewhere the projected policy never does.
    new = path.log_new.exp()
    unreachable = path.log_old.isinf() & (new > 0)
    distance = (1 - s) * torch.linalg.vecdot(new, path.x) + place.constant
    return log_ratio, distance.clamp(min=0).where(~unreachable.any(-1), math.inf), s, *of_tokens


def _write_gradient(
    out: Tensor, logits: Tensor, logits_old: Tensor, tokens: Tensor, s: Tensor, of_ratio: Tensor, of_distance: Tensor
) -> tuple[()]:
    path = _Path.of(logits_old, logits)
    place, new = path.at(s), path.log_new.exp()
    off = path.x - place.mean[:, None]
    turned = (_of_drawn(off, tokens) / place.variance).where(s < 1, 0.0)  # what moves s moves the whole path
    slope = -place.pi * (1 + turned[:, None] * off)
    slope.scatter_add_(-1, tokens.long()[:, None], torch.ones_like(slope[:, :1]))
    slope *= (s * of_ratio).where(of_ratio != 0, 0.0)[:, None]
    pull = new * (path.x - torch.linalg.vecdot(new, path.x)[:, None])
    slope += ((1 - s) * of_distance)[:, None] * pull
    out.copy_(slope.where(logits != -math.inf, 0.0))
    return ()


def _of_drawn(rows: Tensor, tokens: Tensor) -> Float[Tensor, " n"]:
    return rows.gather(-1, tokens.long()[:, None]).squeeze(-1)
