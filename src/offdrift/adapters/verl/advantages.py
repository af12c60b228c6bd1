"""Advantage estimators for verl, each with a baseline over all siblings or over the kept ones.

A sequence counts as kept if a token of it still has weight: neither taken out of the response mask
nor given weight 0 by the driver's correction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from offdrift.advantages import advantages
from offdrift.advantages.table import ADVANTAGES
from offdrift.errors import BadValueError, EvidenceError
from offdrift.segments import Segments

KEPT = "/kept"
SKIPPED = {
    "gae": "verl's own also returns what its critic is trained on",
    "gdpo": "its reward components are configured in verl's own",
}
"""Estimators that are not registered, and why."""

BY_TOKEN = ("reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")
"""Estimators that discount or sum rewards from a token on; the others read a sequence's total."""

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]


def estimator_names() -> list[str]:
    """What is registered: each estimator by name, and with its baseline over kept siblings.

    Example:
        >>> estimator_names()[:4]
        ['grpo', 'grpo/kept', 'grpo_vectorized', 'grpo_vectorized/kept']
    """
    return [name + end for name in ADVANTAGES if name not in SKIPPED for end in ("", KEPT)]


def advantage_named(name: str) -> AdvantageFn:
    """The estimator as a function that verl's `register_adv_est` takes: padded in, padded out.

    `install()` has it called with the whole batch; verl alone hands over rewards, mask and groups.
    """
    row = name.removesuffix(KEPT)

    def estimate(
        token_level_rewards: Tensor, response_mask: Tensor, index: Any = None, config: Any = None, **batch: Any
    ) -> tuple[Tensor, Tensor]:
        rewards, mask = token_level_rewards, response_mask.bool()
        if not len(mask):
            raise BadValueError("empty batch: no sequence to estimate an advantage for")
        if index is None and ADVANTAGES[row].siblings:
            raise EvidenceError(
                f"offdrift/{row} needs the prompt of each sequence: non_tensor_batch['uid'], which this batch lacks"
            )
        groups = None if index is None else dense(index).to(mask.device)
        gamma = batch.pop("gamma", 1.0 if config is None else config.get("gamma", 1.0))
        weights = batch.get("rollout_is_weights")
        has_weight = mask if weights is None else mask & (weights != 0)
        columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)

        def tokens(key: str) -> Tensor | None:
            x = batch.get(key)
            return None if x is None else x[mask]

        # verl pays a sequence's reward at its last token, which the mask may have lost.
        total = rewards.where(mask | rewards.isfinite(), 0.0).sum(-1)
        packed = advantages(
            rewards[mask] if row in BY_TOKEN else total,
            Segments.from_lengths(mask.sum(-1), group_ids=groups),
            how=row,  # type: ignore[arg-type]
            baseline_over="kept" if name.endswith(KEPT) else "sampled",
            keep=has_weight.any(-1),
            gamma=float(gamma),
            greedy_rewards=batch.get("reward_baselines"),
            logp_old=tokens("old_log_probs"),
            sum_pi_squared=tokens("sum_pi_squared"),
            weight=tokens("rollout_is_weights"),
            position=columns[mask],
        )
        padded = torch.zeros_like(rewards)
        padded[mask] = packed.to(padded.dtype)
        return padded, padded.clone()

    estimate.__name__ = estimate.__qualname__ = f"offdrift_{name.replace('/', '_')}"
    return estimate


def dense(uids: Any) -> Int[Tensor, " b"]:
    """Numbers in place of verl's prompt ids, which are strings.

    Example:
        >>> dense(["b", "a", "b"])
        tensor([1, 0, 1])
    """
    _, numbers = np.unique(np.asarray([str(x) for x in uids]), return_inverse=True)
    return torch.as_tensor(numbers)
