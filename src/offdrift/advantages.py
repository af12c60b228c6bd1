"""How good was a sequence, compared with its siblings? Rewards to advantages, without gradient.

Every estimator is vectorized over prompt groups. Groups are complete: sequences that a gate later
rejects still count in their siblings' baseline, because they were sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.errors import BadValueError, ShapeError
from offdrift.segments import Segments

AdvantageName = Literal["group_mean", "group_mean_std", "leave_one_out"]


def group_mean(rewards: Float[Tensor, " b"], segments: Segments) -> Float[Tensor, " b"]:
    """A_i = R_i - mean of the group. A group of one keeps its reward, R_i.

    Reference: Dr. GRPO, arXiv:2503.20783.
    """
    groups = segments.groups
    alone = groups.spread(groups.sizes) == 1
    return rewards - groups.spread(groups.mean(rewards)).where(~alone, 0.0)


def group_mean_std(
    rewards: Float[Tensor, " b"], segments: Segments, *, eps: float = 1e-6
) -> Float[Tensor, " b"]:
    """A_i = (R_i - mean) / (std + eps), std with n - 1. A group of one: R_i / (1 + eps).

    Reference: GRPO, arXiv:2402.03300, section 4.1.
    """
    groups = segments.groups
    centered = group_mean(rewards, segments)
    spread = groups.sum(centered.square()) / (groups.sizes - 1).clamp(min=1)
    std = spread.sqrt().where(groups.sizes > 1, 1.0)
    return centered / (groups.spread(std) + eps)


def leave_one_out(rewards: Float[Tensor, " b"], segments: Segments) -> Float[Tensor, " b"]:
    """A_i = R_i - mean of the *others* of the group. A group of one keeps its reward.

    Reference: RLOO, arXiv:2402.14740, eq. 8.
    """
    groups = segments.groups
    size = groups.spread(groups.sizes).to(rewards.dtype)
    return group_mean(rewards, segments) * size / (size - 1).clamp(min=1)


ADVANTAGES: dict[str, Callable[[Tensor, Segments], Tensor]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
}


def advantages(
    rewards: Float[Tensor, " b"], segments: Segments, *, how: AdvantageName = "group_mean_std"
) -> Float[Tensor, " n"]:
    """Advantage of every token: its sequence's, by the named estimator. Gradient: none.

    Args:
        rewards: one scalar per sequence, in the task's unit.
        segments: sequences and their prompt groups (`group_ids`).
        how: group_mean, group_mean_std or leave_one_out.

    Raises: `BadValueError` naming the sequence whose reward is not finite; `ShapeError`.

    Example:
        >>> s = Segments.from_lengths([2, 1], group_ids=torch.tensor([7, 7]))
        >>> advantages(torch.tensor([1.0, 0.0]), s, how="leave_one_out")
        tensor([ 1.,  1., -1.])
    """
    if len(rewards) != len(segments):
        raise ShapeError(f"{len(rewards)} rewards for {len(segments)} sequences")
    if not bool(rewards.isfinite().all()):
        i = int((~rewards.isfinite()).nonzero()[0])
        raise BadValueError(
            f"reward of sequence {i} is {rewards[i].item()}; give every sequence a finite reward "
            "or leave it out of the batch"
        )
    if how not in ADVANTAGES:
        raise BadValueError(f"how={how!r} is not an estimator; choose one of {sorted(ADVANTAGES)}")
    with torch.no_grad():
        # Equal float32 rewards have a float64 mean equal to them: nothing remains to be normalized.
        found = ADVANTAGES[how](rewards.double(), segments)
        return segments.spread(found.to(rewards.dtype))
