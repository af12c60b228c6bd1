"""`policy_loss`: compare, correct, push, aggregate, count. Nothing else happens here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from offdrift.aggregate import aggregate, normalizer_of
from offdrift.correction import Corrected
from offdrift.divergence.evidence import Divergence
from offdrift.errors import ShapeError
from offdrift.logprobs import LogProbs
from offdrift.methods import Method
from offdrift.stats.drift import DriftStats


@dataclass(frozen=True)
class PolicyLoss:
    """What one batch contributes to a step."""

    loss: Float[Tensor, ""]
    """To be minimized; carries the gradient to `logp`, also when everything was rejected (zero)."""
    corrected: Corrected
    """What gates and weight decided, per token."""
    stats: DriftStats
    """Mergeable statistics of the batch; still on its device."""


def policy_loss(
    logprobs: LogProbs,
    method: Method,
    advantages: Float[Tensor, " n"],
    *,
    divergences: Mapping[str, Divergence] | None = None,
    normalizer: float | Float[Tensor, ""] | None = None,
    horizon: int | None = None,
) -> PolicyLoss:
    """Loss of one batch, or of one piece of it, under a method.

        loss = sum over kept tokens of  weight * objective(advantage)  / normalizer

    Rejected tokens contribute exactly zero and stay in the normalizer (Algorithm 1 divides by the
    number of sequences sampled, not accepted).

    Args:
        logprobs: packed log-probs; `logp` carries the gradient.
        method: a row of `METHODS` or any other composition.
        advantages: per token, signed; no gradient is taken through them.
        divergences: exact or interval divergences of this batch, by name, where gates need them.
        normalizer: what the sum is divided by, over all pieces and ranks of the step; None if this
            batch is the whole step.
        horizon: tokens per sequence, for aggregate="fixed".

    Raises: `EvidenceError` if the method needs what the batch does not carry; `ShapeError`.

    Example:
        >>> import torch
        >>> from offdrift.methods import method
        >>> from offdrift.segments import Segments
        >>> lp = LogProbs.pack(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.9]),
        ...                    segments=Segments.from_lengths([2]))
        >>> policy_loss(lp, method("trm_max_k2"), torch.ones(2)).loss
        tensor(-2.1052)

    Reference: Li et al., arXiv:2512.23075v5, eq. 22 and Algorithm 1.
    """
    if advantages.shape != logprobs.logp_rollout.shape:
        raise ShapeError(
            f"advantages have shape {tuple(advantages.shape)}, the batch has "
            f"{logprobs.logp_rollout.numel()} tokens; spread them with segments.spread or "
            "logprobs.like_caller"
        )
    segments, how = logprobs.segments, method.aggregate
    advantages = advantages.detach()
    corrected = method.correction(logprobs, divergences, advantages)
    pushed = method.objective(logprobs, advantages)
    # where, not a product: a rejected token's loss may be huge, and huge * 0 is how NaN is born.
    token_loss = (corrected.weight * pushed.loss).where(corrected.keep, 0.0)
    if normalizer is None:
        normalizer = normalizer_of(segments, how=how, horizon=horizon)
    loss = aggregate(token_loss, segments, how=how, normalizer=normalizer)
    stats = DriftStats.of(logprobs, corrected, divergences=divergences, clipped=pushed.clipped)
    return PolicyLoss(loss, corrected, stats)
