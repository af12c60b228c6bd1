"""Exact KL and entropy with a gradient: penalties over the full vocabulary that fit in memory.

The backward pass recomputes both policies a few rows at a time and writes the gradient of the logits,
the only `[tokens, vocab]` tensor it allocates. The graph keeps the logits it was given and a few
numbers per token. The policy that is moved is always the current one; the other argument gets no gradient.

Where nothing is to be learned, nothing is: a -inf logit (a token the policy may not draw) gets
gradient 0, and so does every logit of a token whose incoming gradient is 0, whatever is in its row.
Otherwise a row that is no distribution gets NaN.

Shape suffixes: n tokens, v vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from offdrift.compiled import exact as one_sweep
from offdrift.divergence import kernels
from offdrift.divergence.chunks import RowFunction, by_rows
from offdrift.divergence.exact import log_policies, log_policy, plain_entropy, plain_policy, weighted
from offdrift.divergence.fused import check_pair, exact_divergences, one_read, route_of, temperature_of


def kl_rollout_current(
    logits_rollout: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    *,
    temperature: float | int = 1.0,
    compiled: bool | None = None,
) -> Float[Tensor, " n"]:
    """KL(mu || pi) of every token, for a loss: pulls pi over all of what the rollout policy does.

        KL = sum_a mu(a) log(mu(a) / pi(a))        d KL / d logits = (pi - mu) / temperature

    Args:
        logits_rollout: scores of the rollout policy as it was sampled (after temperature and
            filters), logits or log-probs, any float dtype. No gradient.
        logits: scores of the current policy, any float dtype; -inf is a token it cannot draw.
        temperature: what the current policy's logits are divided by, > 0.
        compiled: as in `exact_divergences`, whose number this is.

    Returns: nats, float32 or better. Where mu draws what pi cannot, +inf; the gradient there is that
        of the finite logits, which is finite.

    Gradient: to `logits`, in their dtype; once (a second derivative is refused).

    Raises: `ShapeError` and `BadValueError` as `exact_divergences`.

    Example:
        >>> mu, logits = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
        >>> kl = kl_rollout_current(mu, logits.requires_grad_())
        >>> kl.sum().backward()
        >>> kl.detach(), logits.grad
        (tensor([0.1438]), tensor([[-0.2500,  0.2500]]))
    """
    check_pair(logits_rollout, logits, temperature)
    return _ChunkedLoss.apply("kl_rollout_current", temperature, compiled, logits, logits_rollout.detach())


def kl_current_rollout(
    logits_rollout: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    *,
    temperature: float | int = 1.0,
    compiled: bool | None = None,
) -> Float[Tensor, " n"]:
    """KL(pi || mu) of every token, for a loss: keeps pi where the other policy is.

        KL = sum_a pi(a) log(pi(a) / mu(a))
        d KL / d logits = pi (log pi - log mu - KL) / temperature

    With a reference policy as the first argument this is the exact KL penalty of RLHF.

    Args: as `kl_rollout_current`.

    Returns: nats, float32 or better. Where pi draws what mu cannot, +inf; the gradient there has no
        limit and is NaN.

    Gradient: to `logits`, in their dtype; once (a second derivative is refused).

    Raises: `ShapeError` and `BadValueError` as `exact_divergences`.

    Example:
        >>> mu, logits = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
        >>> kl = kl_current_rollout(mu, logits.requires_grad_())
        >>> kl.sum().backward()
        >>> kl.detach(), logits.grad
        (tensor([0.1308]), tensor([[-0.2060,  0.2060]]))
    """
    check_pair(logits_rollout, logits, temperature)
    return _ChunkedLoss.apply("kl_current_rollout", temperature, compiled, logits, logits_rollout.detach())


def entropy(
    logits: Float[Tensor, "n v"], *, temperature: float | int = 1.0, compiled: bool | None = None
) -> Float[Tensor, " n"]:
    """Entropy of the current policy at every token, for a bonus or a constraint.

        H = -sum_a pi(a) log pi(a)        d H / d logits = -pi (log pi + H) / temperature

    Args: as `kl_rollout_current`.

    Returns: nats, float32 or better.

    Gradient: to `logits`, in their dtype; once (a second derivative is refused).

    Raises: `ShapeError` and `BadValueError` as `exact_divergences`.

    Example:
        >>> logits = torch.tensor([[0.25, 0.75]]).log().requires_grad_()
        >>> h = entropy(logits)
        >>> h.sum().backward()
        >>> h.detach(), logits.grad
        (tensor([0.5623]), tensor([[ 0.2060, -0.2060]]))
    """
    check_pair(logits, logits, temperature)
    return _ChunkedLoss.apply("entropy", temperature, compiled, logits)


class _ChunkedLoss(torch.autograd.Function):
    """Forward and backward in row chunks, and nothing of `[tokens, vocab]` kept in between.

    `of` is the field of `ExactDivergences` that this is; `policies` the current one's logits and the other's.
    """

    @staticmethod
    def forward(ctx: Any, of: str, temperature: float, compiled: bool | None, *policies: Tensor) -> Tensor:
        ctx.of, ctx.temperature, ctx.compiled = of, temperature, compiled
        normalizers: tuple[Tensor, ...] = ()
        both = (policies[-1], policies[0])
        if route_of(*policies, compiled=compiled) == "triton":
            fields, normalizers = kernels.with_normalizers(*both, temperature=temperature, tv=False)
            value = getattr(fields, of)
        elif (result := one_read(*both, temperature=temperature, compiled=compiled, tv=False)) is not None:
            fields, normalizers = result[0], result[1:]
            value = getattr(fields, of)
        elif of == "entropy":
            scale = temperature_of(policies[0], temperature)
            (value,) = by_rows(_entropy_rows, policies, scale, compiled=compiled, plain=_plain_entropy_rows)
        else:  # the loss is the very number that is measured
            fields = exact_divergences(*both, temperature=temperature, compiled=compiled)
            value = getattr(fields, of)
        ctx.num_policies = len(policies)
        ctx.save_for_backward(value, *policies, *normalizers)
        return value

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (upstream,), (value, *saved) = grad_outputs, ctx.saved_tensors
        policies, normalizers = saved[: ctx.num_policies], saved[ctx.num_policies :]
        logits, *others = policies
        both = (policies[-1], logits)
        if len(normalizers) == 1:
            gradient = one_sweep.gradient(ctx.of, upstream, value, both, *normalizers, temperature=ctx.temperature)
        elif normalizers:
            of_rows = kernels.Normalizers(*normalizers)
            gradient = kernels.gradient(ctx.of, upstream, value, *both, of_rows, ctx.temperature)
        else:
            gradient = torch.empty_like(logits)
            rows = (upstream, value, gradient, *policies)
            scale = temperature_of(logits, ctx.temperature)
            compiled_way, plain_way = _WRITE_GRADIENT[ctx.of]
            by_rows(compiled_way, rows, scale, compiled=ctx.compiled, plain=plain_way)
        return None, None, None, gradient, *(None for _ in others)


@no_type_check
def _write(out: Tensor, upstream: Tensor, slope: Tensor, logits: Tensor, temperature: Tensor) -> tuple[()]:
    """The chain rule, with 0 where nothing is to be learned, even if the slope is NaN there."""
    still = (upstream[:, None] == 0) | (logits == -math.inf)
    out.copy_(torch.where(still, 0.0, upstream[:, None] * slope / temperature))
    return ()


@no_type_check
def _write_kl_rollout_current(
    upstream: Tensor, _: Tensor, out: Tensor, logits: Tensor, rollout: Tensor, temperature: Tensor
) -> tuple[()]:
    moved = _policy(logits, temperature) - _policy(rollout, 1.0)
    return _write(out, upstream, moved, logits, temperature)


@no_type_check
def _policy(scores: Tensor, temperature: Tensor | float) -> Tensor:
    """Softmax of scores / temperature; exp of a rounded log-prob would lose a digit."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    powers = ((scores - scores.amax(-1, keepdim=True)) / temperature).exp()
    return powers / powers.sum(-1, keepdim=True)


@no_type_check
def _write_kl_current_rollout(
    upstream: Tensor, kl: Tensor, out: Tensor, logits: Tensor, rollout: Tensor, temperature: Tensor
) -> tuple[()]:
    log_mu, log_pi = log_policies(rollout, logits, temperature)
    kl = torch.where(kl == math.inf, math.nan, kl)
    slope = weighted(log_pi.exp(), log_pi - log_mu - kl[:, None])
    return _write(out, upstream, slope, logits, temperature)


@no_type_check
def _write_entropy(upstream: Tensor, entropy: Tensor, out: Tensor, logits: Tensor, temperature: Tensor) -> tuple[()]:
    log_pi = log_policy(logits, temperature)
    slope = -weighted(log_pi.exp(), log_pi + entropy[:, None])
    return _write(out, upstream, slope, logits, temperature)


@no_type_check
def _entropy_rows(logits: Tensor, temperature: Tensor) -> tuple[Tensor]:
    log_pi = log_policy(logits, temperature)
    return (-weighted(log_pi.exp(), log_pi).sum(-1),)


# The same for plain operators: see `exact`.


def _plain_entropy_rows(logits: Tensor, temperature: Tensor) -> tuple[Tensor]:
    return (plain_entropy(*plain_policy(logits, temperature)),)


@torch.no_grad()
def _plain_kl_rollout_current(
    upstream: Tensor, _: Tensor, out: Tensor, logits: Tensor, rollout: Tensor, temperature: Tensor
) -> tuple[()]:
    moved = plain_policy(logits, temperature)[1].sub_(plain_policy(rollout, None)[1])
    return _plain_write(out, upstream, moved, logits, temperature)


@torch.no_grad()
def _plain_kl_current_rollout(
    upstream: Tensor, kl: Tensor, out: Tensor, logits: Tensor, rollout: Tensor, temperature: Tensor
) -> tuple[()]:
    dtype = torch.promote_types(logits.dtype, rollout.dtype)
    log_pi, pi = plain_policy(logits.to(dtype), temperature)
    log_mu, _ = plain_policy(rollout.to(dtype), None)
    kl = torch.where(kl == math.inf, math.nan, kl)
    slope = log_pi.sub_(log_mu).sub_(kl[:, None]).mul_(pi)
    return _plain_write(out, upstream, slope, logits, temperature)


@torch.no_grad()
def _plain_entropy(upstream: Tensor, entropy: Tensor, out: Tensor, logits: Tensor, temperature: Tensor) -> tuple[()]:
    log_pi, pi = plain_policy(logits, temperature)
    slope = log_pi.add_(entropy[:, None]).mul_(pi).neg_()
    return _plain_write(out, upstream, slope, logits, temperature)


def _plain_write(out: Tensor, upstream: Tensor, slope: Tensor, logits: Tensor, temperature: Tensor) -> tuple[()]:
    """`_write` in fewer passes; takes the slope."""
    out.copy_(slope.mul_((upstream / temperature)[:, None]))
    filtered = logits == -math.inf
    if filtered.any():
        out.masked_fill_(filtered, 0.0)
    out[upstream == 0] = 0.0
    return ()


_WRITE_GRADIENT: dict[str, tuple[RowFunction, RowFunction]] = {
    "kl_rollout_current": (_write_kl_rollout_current, _plain_kl_rollout_current),
    "kl_current_rollout": (_write_kl_current_rollout, _plain_kl_current_rollout),
    "entropy": (_write_entropy, _plain_entropy),
}
"""Compiled and plain, of rows of (incoming gradient, value, where to write, *policies), and the temperature."""
