"""Random ragged batches, padded for the peers and packed for us, and what both sides make of them.

Everything is float64. Masks have holes, as those of tool calls have; one sequence is masked whole;
masked positions hold numbers that would show in any result they leaked into.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import Method

EMPTY_ROW = 3
"""The sequence all of whose tokens are masked."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Log-probs and advantages, `[sequences, time]`."""

    rollout: Tensor
    old: Tensor
    logp: Tensor
    ref: Tensor
    advantages: Tensor
    mask: Tensor
    """int64, as the peers' trainers have it."""

    @property
    def sequences(self) -> int:
        return self.mask.shape[0]

    @property
    def width(self) -> int:
        return self.mask.shape[1]

    @property
    def tokens(self) -> int:
        return int(self.mask.sum())

    @property
    def bypass(self) -> Batch:
        """The same with the rollout policy in the old one's place."""
        return replace(self, old=self.rollout)

    def pack(self, leaf: Tensor | None = None) -> LogProbs:
        logp = self.logp if leaf is None else leaf
        return LogProbs.pack(self.rollout, logp, self.old, logp_ref=self.ref, mask=self.mask)

    def rows(self, which: slice) -> Batch:
        """Some of the sequences."""
        fields = {name: getattr(self, name)[which] for name in self.__dataclass_fields__}
        return Batch(**fields)


def random_batch(
    seed: int, *, sequences: int = 14, longest: int = 19, far: bool = True, per_token: bool = True
) -> Batch:
    """A ragged batch whose sequences drifted by 1e-4 to 1 nat per token.

    Args:
        far: with log-ratios beyond 20 nats in two sequences, in both directions.
        per_token: an advantage for every token; else one per sequence.
    """
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    b, t = sequences, longest
    lengths = torch.randint(1, t + 1, (b,), generator=g)
    lengths[0] = t
    mask = (torch.arange(t) < lengths[:, None]) & (uniform(b, t) > 0.15)
    mask[0] = True
    mask[EMPTY_ROW] = False
    # Exact in float32: one peer passes them through Python lists.
    rollout = (-5 * uniform(b, t) ** 2 - 1e-3).float().double()
    old = rollout + _drift(g, b, -4.0, -0.3)[:, None] * (normal(b, t) + 1)
    logp = old + _drift(g, b, -3.0, 0.0)[:, None] * (normal(b, t) + 1)
    if far:
        rollout[0, 1], old[0, 1], logp[0, 1] = -31.0, -0.5, -0.4
        rollout[0, 2], old[0, 2], logp[0, 2] = -0.5, -30.0, -31.0
        rollout[5, 0], old[5, 0], logp[5, 0], mask[5, 0] = -1.0, -0.75, -28.0, True
        rollout[6, 0], old[6, 0], logp[6, 0], mask[6, 0] = -1.0, -29.0, -1.5, True
    advantages = normal(b, 1) + (0.5 * normal(b, t) if per_token else torch.zeros(b, t))
    advantages[uniform(b) < 0.15] = 0.0
    fields = {"rollout": rollout, "old": old, "logp": logp, "ref": logp + 0.4 * normal(b, t)}
    fields = {name: x.clamp(max=0.0) for name, x in fields.items()}
    fields["advantages"] = advantages
    garbage = {name: x.where(mask, -40 * uniform(b, t)) for name, x in fields.items()}
    return Batch(**garbage, mask=mask.long())


def one_sequence(*, old: list[float], logp: list[float], advantage: float) -> Batch:
    """A sequence made by hand; the rollout and the reference policy are the old one."""
    before, now = (torch.tensor([x], dtype=torch.float64) for x in (old, logp))
    mask = torch.ones(1, len(old), dtype=torch.int64)
    return Batch(
        rollout=before, old=before, logp=now, ref=before, advantages=torch.full_like(now, advantage), mask=mask
    )


def _drift(g: torch.Generator, sequences: int, low: float, high: float) -> Tensor:
    """Nats per token of each sequence: all magnitudes, up or down as a whole."""
    x = torch.logspace(low, high, sequences, dtype=torch.float64)
    x = x[torch.randperm(sequences, generator=g)]
    x = x.where(torch.rand(sequences, generator=g) < 0.5, -x)
    x[1:3] = torch.tensor([10**high, -(10**high)])
    return x


class Outcome(NamedTuple):
    """What came of a batch, in the padded shape."""

    loss: Tensor
    gradient: Tensor
    keep: Tensor
    weight: Tensor


def ours(method: Method, batch: Batch, **options: Any) -> Outcome:
    """Loss and gradient of a method, by way of the packed batch."""
    leaf = batch.logp.clone().requires_grad_()
    packed = batch.pack(leaf)
    out = policy_loss(packed, method, packed.like_caller(batch.advantages), **options)
    (gradient,) = torch.autograd.grad(out.loss, leaf)
    keep = packed.unpack(out.corrected.keep)
    weight = packed.unpack(out.corrected.weight.detach())
    return Outcome(out.loss.detach(), gradient, keep, weight)


def theirs(function: Callable[[Tensor], Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
    """Loss and gradient of a peer, by way of the padded batch."""
    leaf = batch.logp.clone().requires_grad_()
    loss = function(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def same(actual: Tensor, expected: Tensor) -> None:
    """Equal to 1e-9; ratios up to e^20 are equal to as many digits as float64 keeps in a sum."""
    assert actual.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-9)


def agree(mine: Outcome, loss: Tensor, gradient: Tensor) -> None:
    """Both sides give one loss and one gradient, and there is something to compare."""
    same(mine.loss, loss)
    same(mine.gradient, gradient)
    assert int((gradient != 0).sum()) >= 20


def differ(actual: Tensor, expected: Tensor, by: float = 1e-3) -> None:
    """Further apart than any rounding."""
    assert float((actual - expected).abs().max()) > by


MODULES = {
    "core_algos": "verl.trainer.ppo.core_algos",
    "rollout_corr_helper": "verl.trainer.ppo.rollout_corr_helper",
    "tensordict_utils": "verl.utils.tensordict_utils",
}
NAMES = {
    "OmegaConf": "omegaconf",
    "TensorDict": "tensordict",
    "DataProto": "verl",
    "RolloutCorrectionConfig": "verl.trainer.config.algorithm",
    "ActorConfig": "verl.workers.config",
    "ppo_loss": "verl.workers.utils.losses",
    "calculate_debug_metrics": "verl.utils.debug.metrics",
}


@functools.cache
def load_verl() -> SimpleNamespace:
    """The parts of verl that are called; its imports warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = {name: import_module(path) for name, path in MODULES.items()}
        names = {name: getattr(import_module(path), name) for name, path in NAMES.items()}
    return SimpleNamespace(**modules, **names)


def actor(verl: SimpleNamespace, batch: Batch | None = None, **fields: Any) -> Any:
    """verl's actor configuration; with a batch, its loss divides by all that was sampled."""
    if batch is not None:
        fields["global_batch_info"] = {
            "dp_size": 1,
            "batch_num_tokens": batch.tokens,
            "global_batch_size": batch.sequences,
            "loss_scale_factor": fields.get("loss_scale_factor"),
        }
    return verl.ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **fields)


def verl_loss(
    verl: SimpleNamespace, name: str, batch: Batch, config: Any, how: str, weights: Any = None
) -> tuple[Tensor, Tensor]:
    """Loss and gradient of one of verl's registered policy losses."""
    function = verl.core_algos.get_policy_loss_fn(name)

    def loss(leaf: Tensor) -> Tensor:
        return function(
            old_log_prob=batch.old,
            log_prob=leaf,
            advantages=batch.advantages,
            response_mask=batch.mask,
            loss_agg_mode=how,
            config=config,
            rollout_is_weights=weights,
        )[0]

    return theirs(loss, batch)


def verl_correction(verl: SimpleNamespace, batch: Batch, **options: Any) -> tuple[Any, Tensor, dict]:
    """verl's weights, mask and metrics, on the mismatch of the batch."""
    weights, mask, metrics = verl.rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        batch.old, batch.rollout, batch.mask, **options
    )
    weights = None if weights is None else weights.batch["rollout_is_weights"]
    return weights, mask.bool(), {k.removeprefix("rollout_corr/"): v for k, v in metrics.items()}


MODES = {
    "token_mean": "token-mean",
    "seq_mean_token_sum": "seq-mean-token-sum",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "fixed": "seq-mean-token-sum-norm",
}
"""Our aggregate -> verl's."""
