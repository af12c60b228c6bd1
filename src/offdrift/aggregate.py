"""Per-token losses become one number; the denominator is always an argument.

Nothing here divides by a count it took from its own micro-batch: `normalizer` counts what was
*sampled* over all ranks and micro-batches of one optimizer step, so that the step does not depend
on how the batch was split, and a rejected sequence contributes zero instead of enlarging the rest.
`normalizer_of` gives one piece's share of that count; shares are added.
"""

from __future__ import annotations

from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from offdrift.errors import MethodError
from offdrift.segments import Segments

AggregateName = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed"]


def aggregate(
    token_loss: Float[Tensor, " n"],
    segments: Segments,
    *,
    how: AggregateName,
    normalizer: float | Float[Tensor, ""],
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
    """What this piece of a batch contributes to the denominator (tokens or sequences).

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
