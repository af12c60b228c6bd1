"""Aggregation of per-token losses to one number; the denominator is always an argument.

`normalizer` counts what was *sampled* over all ranks and micro-batches of one optimizer step, so that the step does
not depend on how the batch was split, and a rejected sequence contributes zero instead of enlarging the rest.
"""

from __future__ import annotations

from typing import Literal, get_args

from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.errors import MethodError
from offdrift.segments import Segments

AggregateName = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed"]

NormalizerName = Literal["sampled", "accepted", "verl_trainer"]
"""What counts in the denominators, over the whole step:

    sampled       every sampled token and sequence; T_i all tokens of a sequence (default)
    accepted      kept tokens, sequences with a kept token; T_i kept tokens: a step of few accepted
                  sequences is as large as one of many (verl without a global batch size)
    verl_trainer  kept tokens, every sampled sequence; T_i kept tokens (verl's trainer)
"""


def aggregate(
    token_loss: Float[Tensor, " n"], segments: Segments, *, how: AggregateName, normalizer: float | Float[Tensor, ""]
) -> Float[Tensor, ""]:
    """Sum the per-token losses, each weighted as `how` says, and divide by `normalizer`.

        token_mean            sum_t L_t / tokens
        seq_mean_token_mean   sum_i (1/T_i) sum_t L_it / sequences
        seq_mean_token_sum    sum_i sum_t L_it / sequences        (Algorithm 1)
        fixed                 sum_i sum_t L_it / (sequences * horizon)

    Args:
        token_loss: zero where a gate rejected; T_i counts those tokens too.
        normalizer: tokens, or sequences (times the horizon): the sum of `normalizer_of`.

    Gradient: to `token_loss`.

    Example:
        >>> import torch
        >>> s = Segments.from_lengths([4, 3])
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0])
        >>> aggregate(x, s, how="seq_mean_token_mean", normalizer=2.0)
        tensor(11.2500)

    Reference: Li et al., arXiv:2512.23075v5, Algorithm 1 (divide by N sampled); GRPO,
    arXiv:2402.03300; DAPO, arXiv:2503.14476 (token mean); Dr. GRPO, arXiv:2503.20783 (fixed).
    """
    if how not in get_args(AggregateName):
        raise MethodError(f"aggregate={how!r} is not one of {get_args(AggregateName)}")
    if how == "seq_mean_token_mean":
        return segments.mean(token_loss).sum() / normalizer
    return token_loss.sum() / normalizer


def normalizer_of(segments: Segments, *, how: AggregateName, horizon: int | None = None) -> float:
    """Contribution of this piece of a batch to the denominator (tokens or sequences).

    Args:
        horizon: tokens per sequence to divide by, for "fixed".

    Raises: `MethodError` if "fixed" lacks its horizon.
    """
    if how == "token_mean":
        return float(segments.num_tokens)
    if how == "fixed":
        if horizon is None:
            raise MethodError('aggregate="fixed" needs horizon= (tokens per sequence)')
        return float(len(segments) * horizon)
    return float(len(segments))


def accepted_counts(segments: Segments, keep: Bool[Tensor, " n"]) -> dict[str, Tensor]:
    """Contribution of a piece to the counts that `accepted_scale` compares; they add up.

    Gradient: none.
    """
    accepted = segments.sum(keep.double())
    return {
        "tokens": segments.cu_seqlens[-1].double(),
        "sequences": segments.cu_seqlens.new_tensor(len(segments)).double(),
        "kept_tokens": accepted.sum(),
        "kept_sequences": (accepted > 0).double().sum(),
    }


def accepted_scale(
    segments: Segments, keep: Bool[Tensor, " n"], counts: dict[str, Tensor], *, how: AggregateName, name: NormalizerName
) -> Float[Tensor, " n"] | Float[Tensor, ""]:
    """Factor of a token's loss that makes dividing by sampled counts divide by others.

    Args:
        counts: `accepted_counts`, summed over all pieces and ranks of the step.
        name: whose denominators, see `NormalizerName`.

    Gradient: none. Where nothing was kept the factor is finite, and the loss zero.

    Example:
        >>> import torch
        >>> s, keep = Segments.from_lengths([4, 3]), torch.arange(7) < 4
        >>> accepted_scale(s, keep, accepted_counts(s, keep), how="token_mean", name="accepted")
        tensor(1.7500, dtype=torch.float64)

    Reference: verl 0.9, `agg_loss`.
    """
    if how == "token_mean":
        return counts["tokens"] / counts["kept_tokens"].clamp(min=1)
    scale = counts["sequences"] / counts["kept_sequences"].clamp(min=1)
    scale = scale if name == "accepted" else scale.new_ones(())
    if how != "seq_mean_token_mean":
        return scale
    accepted = segments.sum(keep.double()).clamp(min=1)
    return scale * segments.spread(segments.lengths / accepted)
