"""OpenRLHF: any method that decides by token or sequence, as its actor's policy loss.

OpenRLHF's actor builds `PolicyLoss` by name. `install` puts ours under that name, in the actor's
process, as soon as OpenRLHF's actor is imported there. Ray runs it in every worker of a job:

    ray job submit --runtime-env-json '{
      "worker_process_setup_hook": "offdrift.adapters.contrib.openrlhf.install",
      "env_vars": {"OFFDRIFT_METHOD": "icepop"}}' -- python -m openrlhf.cli.train_ppo_ray ...

OpenRLHF records the engine's log-probs only with `--algo.advantage.is_correction_level` other than "off" (until 0.11.1
with `--algo.advantage.is_correction_enable`). The method replaces the correction named there, and all of OpenRLHF's
loss but KL and entropy. The denominators are OpenRLHF's counts of tokens and sequences in the step.

Reference: OpenRLHF 0.11.2, `models/loss.py`: `PolicyLoss`, `aggregate_loss`;
`trainer/ray/ppo_actor.py`: `ActorPPOTrainer`. Until 0.11.1 the loss returns four values, then five.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from offdrift.adapters import proof
from offdrift.adapters.arguments import refuse_unknown
from offdrift.adapters.frameworks import Replacements, after_import, require
from offdrift.adapters.hooks import HookConfig, LossHook, check_served, hook_of, require_logprobs, zero_loss
from offdrift.errors import MethodError
from offdrift.logprobs import LogProbs
from offdrift.loss import PolicyLoss as PolicyResult

ACTOR = "openrlhf.trainer.ray.ppo_actor"
RECORD = (
    "give --algo.advantage.is_correction_level token (OpenRLHF until 0.11.1: "
    "--algo.advantage.is_correction_enable), which has vLLM record them"
)
WAYS_OUT = {"rollout_log_probs": RECORD, "old_log_probs": "have the actor score the samples"}

_INSTALLED: list[HookConfig] = []
"""What is installed in this process: one, or none."""
_REPLACED = Replacements()


def install(method: str | None = None, **options: Any) -> None:
    """Have OpenRLHF's actor in this process build the method's loss, now or once it is imported.

    Args: as `HookConfig.of`.

    Raises: `EvidenceError`, `MethodError`: OpenRLHF's loss is not given what the method needs.
    """
    config = HookConfig.of("openrlhf", method, **options)
    check_served(config, has={"logp_old"})
    _INSTALLED[:] = [config]
    after_import(ACTOR, _rebind)


def uninstall() -> None:
    """Give OpenRLHF its own loss back; losses that were built stay ours."""
    _INSTALLED.clear()
    _REPLACED.restore()


def _rebind(module: Any) -> None:
    if not _INSTALLED or _REPLACED:
        return
    require("openrlhf")
    trainer = module.ActorPPOTrainer
    ppo_train = trainer.ppo_train
    five = "is_correction_level" in inspect.signature(module.PolicyLoss.__init__).parameters

    @functools.wraps(ppo_train)
    def with_metrics(self: Any, *args: Any, **kwargs: Any) -> Any:
        """OpenRLHF's training of a batch; its status also has the metrics of the last step."""
        status = ppo_train(self, *args, **kwargs)
        hook = getattr(self.actor_loss_fn, "hook", None)
        return status if hook is None else {**status, **hook.metrics}

    ours = functools.partial(PolicyLoss, values=5 if five else 4)
    _REPLACED.replace(module, "PolicyLoss", ours)
    _REPLACED.replace(trainer, "ppo_train", with_metrics)


STOOD_IN_FOR = (
    *("clip_eps_low", "clip_eps_high", "dual_clip", "token_level_loss", "policy_loss_type"),
    *("is_correction_level", "is_correction_mode", "is_correction_gating", "is_correction_threshold"),
    *("enable_vllm_is_correction", "vllm_is_truncated_threshold", "vllm_is_correction_type"),
)
"""Settings of OpenRLHF's loss that the method's own stand in for: clips, aggregate, and its correction (the last three
until 0.11.1)."""


PLAIN: dict[str, Any] = {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "dual_clip": None, "token_level_loss": True}
"""Settings of OpenRLHF's plain PPO loss, and their defaults."""


class PolicyLoss(torch.nn.Module):
    """The method in the place of OpenRLHF's `PolicyLoss`.

    Args:
        values: how many values OpenRLHF unpacks.
        theirs: OpenRLHF's own settings. Clips and corrections are the method's instead; what would
            contradict it is refused.
    """

    def __init__(self, *, values: int = 5, **theirs: Any) -> None:
        super().__init__()
        refuse_unknown("openrlhf", "PolicyLoss", theirs, known=STOOD_IN_FOR)
        if theirs.get("policy_loss_type", "ppo") != "ppo":
            raise MethodError(
                f"--actor.policy_loss_type {theirs['policy_loss_type']} chooses OpenRLHF's own loss, "
                "which is replaced; drop it (offdrift's gspo is OFFDRIFT_METHOD=gspo)"
            )
        if not _INSTALLED:
            raise MethodError("no method is installed in this process; call install() in it first")
        self.hook: LossHook = hook_of(_INSTALLED[0])
        self._values = values
        self._plain = {name: theirs[name] for name in PLAIN if name in theirs}

    def forward(
        self,
        log_probs: Float[Tensor, "b t"],
        old_log_probs: Float[Tensor, "b t"],
        advantages: Float[Tensor, "b t"],
        action_mask: Shaped[Tensor, "b t"] | None = None,
        rollout_log_probs: Float[Tensor, "b t"] | None = None,
        dp_size: int = 1,
        batch_num_tokens: Tensor | float | None = None,
        global_batch_size: Tensor | float | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Loss, share of clipped tokens, KL estimates of old to current and of rollout to old, and
        from 0.11.2 on the share of tokens that were rejected or met a limit.

        Args:
            log_probs: log pi; receives the gradient.
            old_log_probs: log pi_old, of the training engine.
            action_mask: nonzero where a token may train; None means everywhere.
            rollout_log_probs: log mu, of vLLM.
            dp_size: what the optimizer's averaging over ranks divides by.
            batch_num_tokens: of the step over all ranks; None if this batch is the step.
            global_batch_size: its sequences with a trainable token.

        Raises: `EvidenceError` without the engine's log-probs; `BadValueError` for NaN or a positive
            log-prob on a trainable token; once, `FrameworkError` if OpenRLHF's own loss is not the one known.
        """
        mask = torch.ones_like(log_probs) if action_mask is None else action_mask
        if not bool((mask != 0).any()):
            zero = zero_loss(log_probs)
            return (zero, *[zero.detach()] * (self._values - 1))
        fields = {"rollout_log_probs": rollout_log_probs, "old_log_probs": old_log_probs}
        rollout, old = (require_logprobs(x, mask, name, WAYS_OUT[name], beside=log_probs) for name, x in fields.items())
        counts = {"dp_size": dp_size, "batch_num_tokens": batch_num_tokens, "global_batch_size": global_batch_size}
        logprobs, result = self._result(self.hook.loss, log_probs, old, rollout, advantages, mask=mask, counts=counts)
        self._prove(proof.sample_of(log_probs, old, rollout, advantages=advantages, mask=mask != 0), mask, counts)
        sums = dict(zip(result.stats.sum_names, result.stats.sums, strict=True))
        clipped = sums.get("objective/clipped", torch.zeros_like(sums["n"])) / sums["n"]
        moved = (logprobs.old - logprobs.current.detach()).mean()
        mismatch = (logprobs.logp_rollout - logprobs.old).mean()
        beyond = (~result.corrected.keep | result.corrected.limited).float().mean()
        values = (result.loss * dp_size, clipped.float(), moved, mismatch, beyond)
        return values[: self._values]

    @staticmethod
    def _result(
        loss: Callable[..., PolicyResult],
        log_probs: Tensor,
        old: Tensor,
        rollout: Tensor,
        advantages: Tensor,
        mask: Tensor,
        counts: Mapping[str, Any],
    ) -> tuple[LogProbs, PolicyResult]:
        """The log-probs packed, and a loss of them over OpenRLHF's counts."""
        logprobs = LogProbs.pack(rollout, log_probs, old, mask=mask)
        lengths, tokens, sequences = logprobs.segments.lengths, counts["batch_num_tokens"], counts["global_batch_size"]
        result = loss(
            logprobs,
            advantages,
            tokens=lengths.sum() if tokens is None else tokens,
            sequences=(lengths > 0).sum() if sequences is None else sequences,
        )
        return logprobs, result

    def _prove(self, sample: proof.Sample, mask: Tensor, counts: Mapping[str, Any]) -> None:
        """Once: OpenRLHF's own PPO loss is ours with its clips and its aggregate."""
        if self.hook.proved:
            return
        theirs = _REPLACED.original("PolicyLoss")
        low, high, dual, by_token = (self._plain.get(name, x) for name, x in PLAIN.items())
        aggregate = "token_mean" if by_token else "seq_mean_token_mean"
        plain = functools.partial(self.hook.plain, proof.clipped(low, high, dual, aggregate=aggregate))
        s = sample

        def ours(leaf: Tensor) -> Tensor:
            _, result = self._result(plain, leaf, s.old, s.rollout, s.advantages, mask=mask, counts=counts)
            return result.loss * counts["dp_size"]

        def native(leaf: Tensor) -> Tensor:
            loss = theirs(**self._plain)
            return loss(leaf, s.old, s.advantages, action_mask=mask, rollout_log_probs=s.rollout, **counts)[0]

        name = "openrlhf.models.loss.PolicyLoss"
        self.hook.prove(name, native=None if theirs is None else native, ours=ours, at=s.logp)
