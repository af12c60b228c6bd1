"""Exact divergences without a `[tokens, vocab]` temporary, by the fastest route of the device.

On CUDA the Triton kernels; on CPUs, if compiling pays, the library of `compiled.exact`, which reads each row of logits
once from memory. Elsewhere, in float64, or where neither can be had, `exact.definition` a few rows at a time, compiled
by torch if that pays, else in its plain form: a row is read three times (largest entry, normalizer, sums), the second
and third time from the cache.

Shape suffixes: n tokens, v vocabulary.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.compiled import exact as one_sweep
from offdrift.divergence import chunks, kernels
from offdrift.divergence.exact import ExactDivergences, definition, plain_divergences
from offdrift.divergence.head import check_positive
from offdrift.errors import ShapeError

Route = Literal["triton", "compiled", "plain"]


def route(
    device: torch.device, *dtypes: torch.dtype, entries: int = chunks.COMPILE_FROM, compiled: bool | None = None
) -> Route:
    """Choose how `exact_divergences` computes inputs of these dtypes and so many entries each, `one_read` aside.

    "triton" only if `compiled` leaves the choice open; "compiled" turns into "plain" once a compiler
    has failed in this process.
    """
    if compiled is None and kernels.available(device, *dtypes):
        return "triton"
    return chunks.way(device, entries, compiled)


@torch.no_grad()
def exact_divergences(
    logits_rollout: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    *,
    tokens: Int[Tensor, " n"] | None = None,
    temperature: float | int = 1.0,
    compiled: bool | None = None,
    tv: bool = True,
) -> ExactDivergences:
    """Compute both KLs, TV, chi-squared, entropies and sampled log-probs at every token, in bounded memory.

        KL(p || q) = sum_a p(a) log(p(a) / q(a))      TV = 1/2 sum_a |mu(a) - pi(a)|
        chi2 = sum_a pi(a)^2 / mu(a) - 1              H(p) = -sum_a p(a) log p(a)

    Zeros, infinities and rows that are no distribution behave as in `exact.definition`. Beyond the
    results: compiled, two rows of float32 for each thread of a CPU; plain, about ten temporaries of 256
    to 512 KiB (of one row, if larger). Neither grows with `n`.

    Args:
        logits_rollout: scores of the rollout policy as it was sampled, logits or log-probs, any
            float dtype; -inf is a token it could not draw.
        logits: scores of the current policy, logits or log-probs, any float dtype.
        tokens: the drawn tokens, whose log-probs come along; NaN where one is not in the vocabulary.
        temperature: what the current policy's logits are divided by; the rollout policy's evidence
            already is what was sampled.
        compiled: None compiles from 2^14 entries on (from 2^24 where torch's compiler has to, as for float64), or
            where the user asked for compiled passes (`OFFDRIFT_COMPILE=1`), and not where the user refused
            (`OFFDRIFT_COMPILE=0`); True compiles and lets a failure of torch's compiler through; False is plain.
            `TORCH_COMPILE_DISABLE=1` in the environment never compiles.
        tv: False leaves TV out, NaN in its place: it alone takes a second sweep, because its kink moves with
            the normalizers. Of the plain way it saves nothing.

    Returns: nats and probabilities, float32 or better. Gradient: none, it is evidence; `losses` has
        the divergences that carry one.

    Raises:
        ShapeError: the two are not `[tokens, vocab]` of one shape, the vocabulary is empty, or there
            is not one drawn token per row.
        BadValueError: a temperature that is not positive and finite.

    Example:
        >>> mu, pi = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
        >>> d = exact_divergences(mu, pi, tokens=torch.tensor([1]))
        >>> d.kl_rollout_current, d.tv, d.chi2, d.logp
        (tensor([0.1438]), tensor([0.2500]), tensor([0.2500]), tensor([-0.2877]))

    Reference: Li et al., Trust Region Masking, arXiv:2512.23075v5, eq. 23 (KL) and
    Definition 2.2 (TV).
    """
    check_pair(logits_rollout, logits, temperature)
    if tokens is not None and tokens.shape != logits.shape[:1]:
        raise ShapeError(
            f"tokens has shape {tuple(tokens.shape)}, logits has {tuple(logits.shape)}; give the one "
            "token that was drawn from each row"
        )
    if route_of(logits_rollout, logits, compiled=compiled) == "triton":
        return kernels.with_normalizers(logits_rollout, logits, tokens, temperature, tv=tv)[0]
    result = one_read(logits_rollout, logits, tokens, temperature, compiled=compiled, tv=tv)
    if result is not None:
        return result[0]
    token_ids = torch.zeros_like(logits[:, 0], dtype=torch.int64) if tokens is None else tokens.long()
    rows = (logits_rollout, logits, token_ids)
    scale = temperature_of(logits, temperature)
    fields = ExactDivergences(*chunks.by_rows(definition, rows, scale, compiled=compiled, plain=plain_divergences))
    if not tv:
        fields = fields._replace(tv=torch.full_like(fields.tv, math.nan))
    return fields if tokens is not None else fields._replace(logp_rollout=None, logp=None)


def one_read(
    logits_rollout: Float[Tensor, "n v"],
    logits: Float[Tensor, "n v"],
    tokens: Int[Tensor, " n"] | None = None,
    temperature: float | int = 1.0,
    *,
    compiled: bool | None,
    tv: bool,
) -> tuple[ExactDivergences, Float[Tensor, "4 n"]] | None:
    """`exact_divergences` by the library of `compiled.exact`, and its normalizers; None where another way has to."""
    if not chunks.pays(logits.numel(), compiled):
        return None
    result = one_sweep.divergences(logits_rollout, logits, tokens, temperature, tv=tv)
    if result is None:
        return None
    fields = ExactDivergences(*result[0])
    return fields if tokens is not None else fields._replace(logp_rollout=None, logp=None), result[1]


def route_of(*policies: Float[Tensor, "n v"], compiled: bool | None) -> Route:
    """The route of these logits."""
    dtypes = (x.dtype for x in policies)
    return route(policies[0].device, *dtypes, entries=policies[0].numel(), compiled=compiled)


def temperature_of(logits: Float[Tensor, "n v"], temperature: float | int) -> Float[Tensor, ""]:
    """The temperature as a tensor, so that one compiled kernel serves every temperature."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return torch.tensor(temperature, dtype=dtype, device=logits.device)


def check_pair(logits_rollout: Tensor, logits: Tensor, temperature: float | int) -> None:
    """Raise unless these are two policies over the same tokens, and a temperature."""
    if logits_rollout.shape != logits.shape or logits.ndim != 2 or logits.shape[1] == 0:
        raise ShapeError(
            f"logits_rollout has shape {tuple(logits_rollout.shape)}, logits has "
            f"{tuple(logits.shape)}; both must be [tokens, vocab] over the same tokens and the same "
            "vocabulary (cut padding entries off the larger one)"
        )
    check_positive(temperature=temperature)
