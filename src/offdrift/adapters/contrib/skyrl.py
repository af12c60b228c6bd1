"""SkyRL: any method that decides by token or sequence, in its registry of policy losses.

Add two overrides to SkyRL's usual command:

    trainer.override_entrypoint=offdrift.adapters.contrib.skyrl
    trainer.algorithm.policy_loss_type=offdrift/dppo_tv

The entrypoint registers the method and hands over to SkyRL's own; a launcher of one's own calls `register("dppo_tv")`
before `validate_cfg` instead. SkyRL divides the advantages by its denominators (`trainer.algorithm.loss_reduction`) and
adds up the losses of unmasked tokens: methods whose loss is not proportional to the advantage are refused.

Reference: SkyRL 0.3.0 (a956457), `backends/skyrl_train/utils/ppo_utils.py`: `PolicyLossRegistry`, `ppo_policy_loss`,
`apply_loss_reduction_to_advantages_minibatch`; `workers/worker.py`: `_forward_backward_micro`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from offdrift.adapters import proof
from offdrift.adapters.frameworks import require
from offdrift.adapters.hooks import MICRO_BATCH_METRICS, HookConfig, LossHook, check_served, hook_of, zero_loss
from offdrift.errors import EvidenceError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.stats import summarize

PREFIX = "offdrift/"
OWN = (
    "tis_ratio_type",
    "sequence_mask_metric",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
)
"""SkyRL's switches of its own correction."""


@dataclass(frozen=True)
class RegisteredLoss:
    """A method as SkyRL's policy loss: a value without live state, which travels to the workers."""

    config: HookConfig

    def __call__(
        self,
        log_probs: Float[Tensor, "b t"],
        old_log_probs: Float[Tensor, "b t"] | None,
        advantages: Float[Tensor, "b t"],
        config: Any,
        loss_mask: Shaped[Tensor, "b t"] | None = None,
        rollout_logprobs: Float[Tensor, "b t"] | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        """The sum of the method's token losses over unmasked tokens, and the metrics.

        Args:
            log_probs: log pi; receives the gradient.
            old_log_probs: log pi_old, of SkyRL's own forward pass before the first update.
            advantages: divided by SkyRL's denominators already.
            config: SkyRL's `AlgorithmConfig`; a correction of its own must be off.
            loss_mask: nonzero where a token may train; None means everywhere.
            rollout_logprobs: log mu, of the inference engine.

        Raises: `EvidenceError` without rollout log-probs; `MethodError` if SkyRL corrects, too;
            `BadValueError` for NaN or a positive log-prob on an unmasked token;
            `FrameworkError` once, where SkyRL's own plain loss is not ours.
        """
        hook = hook_of(self.config, divides=False)
        theirs = getattr(config, "off_policy_correction", None)
        configured = [name for name in OWN if getattr(theirs, name, None) is not None]
        if configured:
            raise MethodError(
                f"trainer.algorithm.off_policy_correction.{configured[0]} is set, and has no effect under a policy "
                "loss of offdrift; remove it, and choose a method with the correction you want"
            )
        mask = torch.ones_like(log_probs) if loss_mask is None else loss_mask
        if rollout_logprobs is None:
            raise EvidenceError(
                "SkyRL gave no rollout_logprobs; set generator.sampling_params.logprobs=1, so that "
                "its engine returns the log-prob of every sampled token"
            )
        if not bool(mask.any()):
            return zero_loss(log_probs), {PREFIX + name: 0.0 for name in MICRO_BATCH_METRICS.values()}
        logprobs = LogProbs.pack(rollout_logprobs, log_probs, old_log_probs, mask=mask)
        result = hook.loss(logprobs, advantages)
        if not hook.proved:
            old = rollout_logprobs if old_log_probs is None else old_log_probs
            sample = proof.sample_of(log_probs, old, rollout_logprobs, advantages=advantages, mask=mask)
            _prove(hook, config, sample, mask=mask)
        metrics = summarize(result.stats)
        return result.loss, {PREFIX + name: metrics.get(ours, 0.0) for ours, name in MICRO_BATCH_METRICS.items()}


def _prove(hook: LossHook, config: Any, s: proof.Sample, *, mask: Tensor) -> None:
    """Once: SkyRL's own loss of the micro-batch with its clips is ours: its mask, its sum, its advantages."""
    # SkyRL has loaded this module by now; nobody else needs it to import ours.
    from skyrl.backends.skyrl_train.utils import ppo_utils as theirs

    plain, packed_mask = proof.changed(config, {"policy_loss_type": "regular"}), mask != 0

    def native(leaf: Tensor) -> Tensor:
        others = {"loss_mask": mask.double(), "rollout_logprobs": s.rollout}
        return theirs.ppo_policy_loss(leaf, s.old, s.advantages, plain, **others)[0]

    def ours(leaf: Tensor) -> Tensor:
        packed = LogProbs.pack(s.rollout, leaf, s.old, mask=packed_mask)
        return hook.plain(proof.clipped(config.eps_clip_low, config.eps_clip_high), packed, s.advantages).loss

    name = "skyrl.backends.skyrl_train.utils.ppo_utils.ppo_policy_loss"
    here = hasattr(theirs, "ppo_policy_loss")
    hook.prove(name, native=native if here else None, ours=ours, at=s.logp)


def register(method: str, **options: Any) -> str:
    """Put a method into SkyRL's registry; returns its name there, `offdrift/<method>`.

    Call it in the driver before `validate_cfg`; offdrift must be installed in the workers, too. Options
    are those of `HookConfig.of`, from the driver's environment. Registering a name again replaces it.

    Raises: `EvidenceError`, `MethodError`: SkyRL's hook cannot serve the method.
    """
    require("skyrl")
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    config = HookConfig.of("skyrl", method, **options)
    check_served(config, has={"logp_old"}, folded=True)
    name = PREFIX + method
    if name in PolicyLossRegistry.list_available():
        PolicyLossRegistry.unregister(name)
    PolicyLossRegistry.register(name, RegisteredLoss(config))
    return name


def main() -> None:
    """SkyRL's entrypoint, after registering the method that the command line names."""
    require("skyrl")
    from skyrl.train.entrypoints import main_base

    key = "trainer.algorithm.policy_loss_type="
    arguments = [a for a in sys.argv[1:] if not a.startswith("trainer.override_entrypoint=")]
    types = [a.removeprefix(key).strip("'\"") for a in arguments if a.startswith(key)]
    if not types or not types[-1].startswith(PREFIX):
        raise MethodError(f"this entrypoint needs {key}{PREFIX}METHOD; `offdrift methods` lists all rows")
    register(types[-1].removeprefix(PREFIX))
    sys.argv = [sys.argv[0], *arguments]
    main_base.main()
