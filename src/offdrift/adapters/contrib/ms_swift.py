"""ms-swift: gates and weights of any method on the mismatch, in its GRPO trainer's own loss.

ms-swift imports the files of `--external_plugins` before its trainers. A file of two lines is enough:

    from offdrift.adapters.contrib import ms_swift
    ms_swift.install("icepop")

`--rollout_importance_sampling_mode token_truncate` (any mode) has ms-swift ask for weights at all; the method's replace
those of the mode. ms-swift multiplies token losses by them, KL included, and keeps its denominators: a rejected token
has weight 0 and still counts. Its Megatron trainer has another loss, which is not covered.

Reference: ms-swift 4.6.0, `rlhf_trainers/grpo_trainer.py`: `GRPOTrainer._get_rollout_is_correction`,
`_apply_rollout_importance_sampling`.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from offdrift.adapters import proof
from offdrift.adapters.frameworks import Replacements, after_import, require
from offdrift.adapters.hooks import HookConfig, LossHook, correction_only, hook_of, require_logprobs
from offdrift.correction import Correction, Weight
from offdrift.errors import MethodError
from offdrift.logprobs import LogProbs
from offdrift.methods import Method

TRAINER = "swift.rlhf_trainers.grpo_trainer"
MEGATRON = "swift.megatron.trainers.grpo_trainer"
CORRECTION, WEIGHTS = "_get_rollout_is_correction", "_apply_rollout_importance_sampling"
OPEN = 1e6
"""A threshold that no weight of the proof reaches."""

_INSTALLED: list[tuple[HookConfig, Method]] = []
"""What is installed in this process, one or none: the method, and its gates and weights."""
_REPLACED = Replacements()


def install(method: str | None = None, **options: Any) -> None:
    """Have ms-swift's GRPO trainer in this process weigh tokens by the method, now or once it is imported.

    Args: as `HookConfig.of`, without `record`: ms-swift hands over no advantages here.

    Raises: `EvidenceError`, `MethodError`: a part of the method compares other policies than the engine's and the
        trainer's at the sampling weights, or needs advantages.
    """
    config = HookConfig.of("ms-swift", method, **options)
    if config.record is not None:
        raise MethodError("ms-swift's hook sees no advantages to record; drop record= and OFFDRIFT_RECORD")
    only = correction_only(config, instead="TRL's own trainer (OffdriftGRPOTrainer)")
    uninstall()
    _INSTALLED.append((config, only))
    for module in (TRAINER, MEGATRON):
        after_import(module, _rebind)


def uninstall() -> None:
    """Give ms-swift its own correction back."""
    _INSTALLED.clear()
    _REPLACED.restore()


def _rebind(module: Any) -> None:
    if not _INSTALLED:
        return
    require("ms-swift")
    if module.__name__ == MEGATRON:
        raise MethodError("ms-swift's Megatron trainer has another loss, which this adapter does not reach")
    made = module.GRPOTrainer.__init__

    @functools.wraps(made)
    def checked(self: Any, *positional: Any, **named: Any) -> None:
        """ms-swift's own, which then must have been told to correct."""
        made(self, *positional, **named)
        _check_asked(self)

    _REPLACED.replace(module.GRPOTrainer, CORRECTION, correction)
    _REPLACED.replace(module.GRPOTrainer, "__init__", checked)


def _check_asked(trainer: Any) -> None:
    """Raise if ms-swift was not told to correct."""
    if trainer.rollout_importance_sampling_mode is None:
        raise MethodError(
            "ms-swift asks for no weights, so that the method would do nothing: give "
            "--rollout_importance_sampling_mode token_truncate (any mode; the method's weights replace it)"
        )


def correction(
    trainer: Any,
    old_per_token_logps: Float[Tensor, "b t"],
    rollout_per_token_logps: Float[Tensor, "b t"],
    completion_mask: Shaped[Tensor, "b t"],
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """In the place of `_get_rollout_is_correction`: log-ratios for ms-swift's metrics, and the method's weights.

    Raises: `MethodError` if ms-swift was not told to correct; `EvidenceError`, `BadValueError` for log-probs that are
        missing, NaN or positive; once, `FrameworkError` if ms-swift's own weights are not the ones that are known.
    """
    _check_asked(trainer)
    config, only = _INSTALLED[0]
    hook, mask = hook_of(config, only=only, divides=False), completion_mask != 0
    log_ratio = old_per_token_logps - rollout_per_token_logps
    if not bool(mask.any()):
        return log_ratio, torch.zeros_like(log_ratio)
    way_out = "ms-swift must draw with vLLM (--use_vllm true), which returns them"
    rollout, old = rollout_per_token_logps, old_per_token_logps
    rollout = require_logprobs(rollout, mask, "rollout_per_token_logps", way_out, beside=old)
    packed = LogProbs.pack(rollout, logp_old=old, mask=mask)
    corrected = hook.correct(packed)
    _prove(hook, trainer, old, rollout, mask)
    return log_ratio, packed.unpack(corrected.weight.where(corrected.keep, 0.0)).to(log_ratio.dtype)


def _prove(hook: LossHook, trainer: Any, old: Tensor, rollout: Tensor, mask: Tensor) -> None:
    """Once: ms-swift's own token weights, with a threshold that does not bind, are ours."""
    if hook.proved:
        return
    theirs = getattr(type(trainer), WEIGHTS, None)
    sample = proof.sample_of(old, old, rollout, advantages=old, mask=mask)
    threshold = {"rollout_importance_sampling_mode": "token_truncate", "rollout_importance_sampling_threshold": OPEN}

    def native(leaf: Tensor) -> Tensor:
        weights = theirs(SimpleNamespace(**threshold), leaf.detach() - sample.rollout, mask)  # type: ignore[misc]
        return weights.where(mask, 0.0)

    def ours(leaf: Tensor) -> Tensor:
        packed = LogProbs.pack(sample.rollout, logp_old=leaf.detach(), mask=mask)
        return packed.unpack((Correction() & Weight(on="mismatch", cap=OPEN))(packed).weight)

    name = f"{TRAINER}.GRPOTrainer.{WEIGHTS}"
    hook.prove(name, native=None if theirs is None else native, ours=ours, at=sample.logp)
