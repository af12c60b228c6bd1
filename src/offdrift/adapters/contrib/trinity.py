"""Trinity-RFT: any method that decides by token or sequence, as its policy loss.

    algorithm:
      policy_loss_fn: offdrift.adapters.contrib.trinity.TrinityLoss
      policy_loss_fn_args:
        method: decoupled_ppo
        loss_agg_mode: token-mean                       # Trinity writes algorithm.loss_agg_mode over it
      bypass_old_logprobs: false                        # for methods on the mismatch of the two engines

Trinity imports the class by its path, in the driver and in every worker. Its entropy and KL losses stay its own.
Denominators are Trinity's: means over a micro-batch, which verl's engine adds up.

Reference: Trinity-RFT 0.6.0, `algorithm/policy_loss_fn/policy_loss_fn.py`: `PolicyLossFn`; `ppo_policy_loss.py`:
`PPOPolicyLossFn`; `algorithm/utils.py`: `aggregate_loss`; `trainer/verl/losses.py`: `TrinityPolicyLoss`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from offdrift.adapters import proof
from offdrift.adapters.frameworks import require
from offdrift.adapters.hooks import MICRO_BATCH_METRICS, HookConfig, LossHook, check_served, hook_of, zero_loss
from offdrift.aggregate import AggregateName
from offdrift.errors import LivenessError, MethodError, check_choice
from offdrift.logprobs import LogProbs
from offdrift.stats import summarize

PPO = "trinity.algorithm.policy_loss_fn.ppo_policy_loss"
PPO_SETTINGS = (
    *("clip_range", "clip_range_low", "clip_range_high", "clip_ratio_c"),
    *("enable_sequence_masking", "delta_sequence_masking", "fallback_to_policy_gradient"),
)
"""What Trinity's own PPO reads of `policy_loss_fn_args` besides `loss_agg_mode`; refused here, as any other name."""
SELECTED = ("old_log_probs", "advantages", "rollout_log_probs")
"""What Trinity is asked for, by verl's names; it adds the mask and the current log-probs."""
AGGREGATES: dict[str, AggregateName] = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "token_mean",  # a sum over tokens, divided by rows
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "token_mean",  # divided by the width of the micro-batch
}
"""Trinity's `loss_agg_mode` -> ours, under the counts of `_counts`."""


class TrinityLoss:
    """A method as Trinity's policy loss: a value without live state, which travels to the workers."""

    def __init__(
        self,
        backend: str = "verl",
        *,
        method: str | None = None,
        settings: Mapping[str, Any] | None = None,
        record: str | None = None,
        on_idle: str | None = None,
        loss_agg_mode: str | None = None,
        **others: Any,
    ) -> None:
        """Take `algorithm.policy_loss_fn_args`.

        Args: `backend` from Trinity; `method` to `on_idle` as `HookConfig.of`, and
            loss_agg_mode: any name; Trinity writes `algorithm.loss_agg_mode` over it where the key is there.
            **others: settings of Trinity's own losses, which are refused.

        Raises: `MethodError`: no method, no `loss_agg_mode`, a method, backend or setting that cannot be served;
            `EvidenceError`: the method needs what Trinity does not hand over.
        """
        require("trinity")
        if backend != "verl":
            raise MethodError(
                f"Trinity's {backend} trainer calls its policy loss on one sequence at a time, without counts of the "
                "others; this adapter serves its verl trainer (trainer.trainer_type: verl)"
            )
        if others:
            raise MethodError(
                f"algorithm.policy_loss_fn_args has {', '.join(others)}, which other losses of Trinity read and this "
                "one does not: remove it, and write the method's own numbers as settings (`offdrift methods NAME`)"
            )
        if loss_agg_mode is None:
            raise MethodError(
                "algorithm.policy_loss_fn_args needs loss_agg_mode (token-mean, say): Trinity writes "
                "algorithm.loss_agg_mode over it, and over nothing where it is absent"
            )
        check_choice("loss_agg_mode", loss_agg_mode, tuple(AGGREGATES))
        config = HookConfig.of("trinity", method, settings, record=record, on_idle=on_idle)
        check_served(config, has={"logp_old"})
        self.mode = loss_agg_mode
        merged = {**json.loads(config.settings), "aggregate": AGGREGATES[loss_agg_mode]}
        self.config = replace(config, settings=json.dumps(merged, sort_keys=True))

    @property
    def select_keys(self) -> list[str]:
        """Columns of verl's batch that the loss is called with."""
        return list(SELECTED)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """`algorithm.policy_loss_fn_args` where there are none: the method is OFFDRIFT_METHOD's."""
        return {"method": None, "loss_agg_mode": "token-mean"}

    def __call__(
        self,
        logprob: Float[Tensor, "b t"],
        *,
        old_log_probs: Float[Tensor, "b t"],
        rollout_log_probs: Float[Tensor, "b t"],
        advantages: Float[Tensor, "b t"],
        response_mask: Shaped[Tensor, "b t"],
        **kwargs: Any,
    ) -> tuple[Float[Tensor, ""], dict[str, float]]:
        """The method's loss of one micro-batch, and metrics.

        Args:
            logprob: log pi; receives the gradient.
            old_log_probs: log pi_old; with `bypass_old_logprobs` Trinity puts the rollout's here.
            rollout_log_probs: log mu, of the engine that sampled.
            response_mask: nonzero where a token may train.
            **kwargs: what other losses of Trinity asked for; not read.

        Raises: `LivenessError` once, where the method compares two engines and Trinity passed one of them twice;
            `BadValueError` for NaN or a positive log-prob on an unmasked token;
            `FrameworkError` once, where Trinity's own plain loss is not ours.
        """
        hook, mask = hook_of(self.config), response_mask != 0
        if not bool(mask.any()):
            return zero_loss(logprob), {f"offdrift/{name}": 0.0 for name in MICRO_BATCH_METRICS.values()}
        if not hook.proved:
            self._require_two_engines(old_log_probs, rollout_log_probs, mask)
        packed = LogProbs.pack(rollout_log_probs, logprob, old_log_probs, mask=mask)
        tokens, sequences = _counts(self.mode, mask)
        result = hook.loss(packed, advantages, tokens=tokens, sequences=sequences)
        if not hook.proved:
            s = proof.sample_of(logprob, old_log_probs, rollout_log_probs, advantages=advantages, mask=mask)
            _prove(hook, s, mode=self.mode, mask=mask)
        numbers = summarize(result.stats)
        return result.loss, {
            f"offdrift/{name}": float(numbers.get(ours, 0.0)) for ours, name in MICRO_BATCH_METRICS.items()
        }

    def _require_two_engines(self, old: Tensor, rollout: Tensor, mask: Tensor) -> None:
        """Raise where a part compares the training with the sampling engine, and their log-probs are copies."""
        parts = [part.formula for part in self.config.row.parts if getattr(part, "on", None) == "mismatch"]
        if parts and self.config.on_idle == "error" and torch.equal(old[mask], rollout[mask]):
            raise LivenessError(
                f"{self.config.method} compares the log-probs of two engines [{'; '.join(parts)}], and Trinity passed "
                "the sampling engine's twice: set algorithm.bypass_old_logprobs=false, or choose a method on the full "
                "ratio; on_idle: warn goes on regardless"
            )

    def __repr__(self) -> str:
        return f"TrinityLoss({self.config.method!r}, loss_agg_mode={self.mode!r})"


def _counts(mode: str, mask: Tensor) -> tuple[float, float]:
    """Trinity's denominators of one micro-batch (`aggregate_loss`), as `tokens` and `sequences` of `LossHook.loss`."""
    rows, width = (float(n) for n in mask.shape)
    tokens = {"token-mean": float(mask.sum()), "seq-mean-token-sum": rows, "seq-mean-token-sum-norm": width}
    return tokens.get(mode, 1.0), rows


def _prove(hook: LossHook, s: proof.Sample, *, mode: str, mask: Tensor) -> None:
    """Once: Trinity's own PPO loss of the micro-batch, with its clips and its mean, is ours."""
    module = import_module(PPO)  # Trinity imports its losses one by one, when they are asked for
    theirs, (tokens, sequences) = getattr(module, "PPOPolicyLossFn", None), _counts(mode, mask)

    def native(leaf: Tensor) -> Tensor:
        plain = theirs(backend="verl", clip_range=0.2, loss_agg_mode=mode)  # type: ignore[misc]
        columns = {"old_log_probs": s.old, "advantages": s.advantages, "response_mask": mask}
        return plain(logprob=leaf, **columns)[0]

    def ours(leaf: Tensor) -> Tensor:
        packed = LogProbs.pack(s.rollout, leaf, s.old, mask=mask)
        plain = proof.clipped(0.2, dual=3.0, aggregate=AGGREGATES[mode])
        return hook.plain(plain, packed, s.advantages, tokens=tokens, sequences=sequences).loss

    name = f"{PPO}.PPOPolicyLossFn with loss_agg_mode={mode!r}"
    hook.prove(name, native=native if theirs is not None else None, ours=ours, at=s.logp)
