"""verl's driver: the correction of the mismatch, advantages, and records.

A rejected token keeps its place in the response mask and gets weight 0, unlike in verl: denominators count what was
sampled, and a step from which everything was rejected is a step of size zero. A configured correction that verl does
not call is an error. An estimator's baseline is over all siblings, or over the kept ones: sequences of which a token
still has weight, neither taken out of the response mask nor given weight 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from offdrift.adapters.arguments import refuse_set
from offdrift.adapters.base import PREFIX, Adapter, OnIdle, recorder_of
from offdrift.adapters.verl.config import RolloutCorrection, read_rollout_correction
from offdrift.adapters.verl.losses import configured, driver_share, loss_share, signed
from offdrift.adapters.verl.proof import prove_driver
from offdrift.advantages import advantages
from offdrift.advantages.table import ADVANTAGES
from offdrift.errors import BadValueError, EvidenceError, LivenessError, MethodError, check_choice
from offdrift.logprobs import LogProbs
from offdrift.methods import Method, method, override
from offdrift.objectives import Reinforce
from offdrift.records.batch import Logged
from offdrift.segments import Segments

if TYPE_CHECKING:
    from offdrift.records.recorder import Recorder

LOG = logging.getLogger("offdrift.verl")


class Driver:
    """One training run's driver side.

    Args:
        row: whose parts on the mismatch correct; None takes verl's `rollout_correction` block.
        settings: single values of the row.
        record, on_idle, options: as for `Adapter`.
    """

    def __init__(
        self,
        row: str | Method | None = None,
        *,
        settings: Mapping[str, Any] = {},
        record: Recorder | str | Path | None = None,
        on_idle: OnIdle = "error",
        **options: Any,
    ) -> None:
        chosen = method(row) if isinstance(row, str) else row
        self.row = None if chosen is None else override(chosen, settings)
        check_choice("on_idle", on_idle, get_args(OnIdle))
        if isinstance(row, str) and self.row and loss_share(self.row) != loss_share(configured(row)):
            # The loss runs in workers, which read the environment: settings of it must stand there.
            pairs = ",".join(f"{path}={value}" for path, value in settings.items()) or "(nothing)"
            raise MethodError(
                f"install({row!r}) was given settings={dict(settings)}, some of which belong to the "
                "loss; that runs in verl's workers, and they would not hear of it: set OFFDRIFT_METHOD="
                f"{row} and OFFDRIFT_SETTINGS={pairs} for all processes "
                "(ray_kwargs.ray_init.runtime_env.env_vars)"
            )
        self._record, self._on_idle, self._options = record, on_idle, {**options, "on_idle": on_idle}
        self._adapter: Adapter | None = None
        self._recorder: Recorder | None = None
        self._steps, self._called = 0, False
        for part in (*self._share().gates, *self._share().weights):
            if signed(part):
                raise MethodError(
                    f"[{part.formula}] depends on the advantage, and verl corrects before it has "
                    "advantages; choose a part for all signs"
                )

    def describe(self) -> str:
        """Describe in one line which correction acts and what is recorded."""
        share = self._share()
        parts = "; ".join(p.formula for p in (*share.gates, *share.weights))
        row = f"[{parts or 'no part on the mismatch'}]"
        corrects = "algorithm.rollout_correction as it stands" if self.row is None else row
        return f"{corrects}; records {'nothing' if self._record is None else self._record}"

    def correct(
        self, batch: Any, config: Any, *, theirs: Callable[..., Any] | None = None
    ) -> tuple[Any, dict[str, float]]:
        """In the place of verl's `compute_rollout_correction_and_add_to_batch`, `theirs`.

        Writes `rollout_is_weights`, 0 where a gate rejected; leaves `response_mask` as it is.

        Raises: `BadValueError` for a log-prob that no policy can produce; `LivenessError` the first
            time, if a configured part cannot act; `MethodError` for two corrections at once.
        """
        tensors = batch.batch
        if self._adapter is None:
            block, wanted = self._wanted(config)
            LOG.info("algorithm.rollout_correction reads\n%s", block)
            self._adapter = Adapter(wanted, framework="verl", **self._options)
        adapter, self._called = self._adapter, True
        self._steps = int(batch.meta_info.get("global_steps", self._steps + 1))
        mask, old = tensors["response_mask"], tensors["old_log_probs"]
        weights = torch.zeros_like(old, dtype=torch.promote_types(old.dtype, torch.float32))
        metrics: dict[str, float] = {}
        if bool(mask.any()):
            packed = LogProbs.pack(tensors["rollout_log_probs"], None, old, mask=mask)
            corrected = adapter.correct(packed)
            weights = packed.unpack(corrected.weight.where(corrected.keep, 0.0))
            prove_driver(theirs, batch)
            metrics = adapter.end_step(self._steps)
        if adapter.method.correction.gates or adapter.method.correction.weights:
            tensors["rollout_is_weights"] = weights
        return batch, metrics

    def advantages(
        self, estimate: Callable[..., Any], data: Any, adv_estimator: Any, gamma: float, **options: Any
    ) -> Any:
        """In the place of verl's `compute_advantage`: our estimators see the whole batch.

        Raises: `LivenessError` if a correction is configured that verl did not call; `MethodError` for a setting of
            verl's estimator that ours would not read.
        """
        self._check_called(data.batch, options.get("config"))
        name, uids = str(getattr(adv_estimator, "value", adv_estimator)), data.non_tensor_batch.get("uid")
        if name.startswith(PREFIX):
            way_out = "leave it at its default, and choose an estimator (offdrift/dr_grpo divides by no deviation)"
            refuse_set(options, {"norm_adv_by_std_in_grpo": True}, whose="verl's own estimator", way_out=way_out)
            tensors = dict(data.batch.items())
            mask, rewards = tensors.pop("response_mask"), tensors.pop("token_level_rewards")
            estimator = advantage_named(name.removeprefix(PREFIX))
            data.batch["advantages"], data.batch["returns"] = estimator(
                rewards, mask, index=uids, gamma=gamma, **tensors
            )
        else:
            data = estimate(data, name, gamma=gamma, **options)
        if "responses" in data.batch:  # the v1 trainer keeps its tokens elsewhere
            self._steps = int(data.meta_info.get("global_steps", self._steps))
            self.record(data.batch, uids, step=self._steps)
        return data

    def record(self, tensors: Any, uids: Any, **stamps: Any) -> None:
        """Record a batch of padded tensors, if records are wanted; arguments as of `logged`."""
        if self._recorder is None:
            self._recorder = recorder_of(self._record, "verl")
        if self._recorder is not None:
            self._recorder.add(logged(tensors, uids, **stamps))

    @property
    def records(self) -> bool:
        """Whether `record` keeps anything."""
        return self._record is not None

    def close(self) -> None:
        """Write what is still waiting."""
        if self._recorder is not None:
            self._recorder.close()

    def _share(self) -> Any:
        return driver_share(Method(objective=Reinforce()) if self.row is None else self.row)

    def _wanted(self, config: Any) -> tuple[RolloutCorrection, Method]:
        """verl's block, and what corrects: the row's share or the block's parts."""
        block = read_rollout_correction(config)
        if self.row is None:
            return block, block.method
        parts = (*block.method.correction.gates, *block.method.correction.weights)
        if parts and not block.bypass:
            raise MethodError(
                "two corrections of the mismatch: algorithm.rollout_correction asks for "
                f"[{'; '.join(p.formula for p in parts)}] and install() for "
                f"[{self.row.describe()}]; set rollout_is and rollout_rs to null, or install() no row"
            )
        return block, Method(objective=Reinforce(), correction=self._share())

    def _check_called(self, tensors: Any, algorithm: Any) -> None:
        """A correction that is configured must have been called since the last batch."""
        called, self._called = self._called, False
        config = None if algorithm is None else algorithm.get("rollout_correction", None)
        block, wanted = self._wanted(config)
        parts = [p.formula for p in (*wanted.correction.gates, *wanted.correction.weights)]
        problem = None
        if block.bypass and self.row is None:
            try:  # the same configuration also has the actor's loss
                mode = str(config._get_root().actor_rollout_ref.actor.policy_loss.loss_mode)  # type: ignore[union-attr]
            except AttributeError:
                mode = "bypass_mode"
            if parts and mode != "bypass_mode" and not mode.startswith(PREFIX):
                problem = f"actor.policy_loss.loss_mode={mode!r} does not read it in bypass mode"
        elif parts and not called:
            problem = "verl calls it in decoupled mode with rollout_log_probs in the batch"
            if "rollout_log_probs" not in tensors:
                problem += "; set actor_rollout_ref.rollout.calculate_log_probs=true"
            elif block.bypass:
                problem += "; set bypass_mode=false, or choose a method on the full ratio as loss_mode"
        if problem is None:
            return
        message = f"[{'; '.join(parts)}] is configured and was never called: {problem}"
        if self._on_idle == "error":
            raise LivenessError(message)
        LOG.warning("%s", message)


def logged(
    tensors: Any, uids: Any, *, step: int, rollout_version: Tensor | None = None, version: int | None = None
) -> Logged:
    """A padded batch of verl as canonical record: every sampled token, rejected or not.

    Args:
        tensors: `response_mask` and whichever of verl's other fields there are, `[b, width]`.
        uids: prompt of each sequence.
        step: optimizer step.
        rollout_version: version of the weights that drew each sequence.
        version: version of the weights being trained.
    """
    fields = {k: x for k, x in tensors.items() if isinstance(x, Tensor)}
    mask = fields["response_mask"].bool()
    scored = mask
    for name in ("rollout_log_probs", "old_log_probs"):
        scored = scored & ~fields[name].isnan() if name in fields else scored
    count, lengths = len(mask), scored.sum(-1)
    columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    whole = fields["attention_mask"][:, -mask.shape[1] :] if "attention_mask" in fields else mask
    score = fields.get("token_level_scores", fields.get("rm_scores"))

    def packed(name: str) -> Tensor | None:
        x = fields.get(name)
        return None if x is None else x[scored].detach()

    return Logged(
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        step=torch.full((count,), step),
        row=torch.arange(1, count + 1),
        response_lengths=whole.sum(-1),
        logp_rollout=packed("rollout_log_probs"),
        logp_old=packed("old_log_probs"),
        logp_ref=packed("ref_log_prob"),
        advantages=packed("advantages"),
        rewards=None if score is None else score.sum(-1),
        group_ids=None if uids is None else dense(uids),
        rollout_version=None if rollout_version is None else rollout_version.repeat_interleave(lengths),
        version=None if version is None else torch.full((count,), version),
        position=columns[scored],
        tokens=packed("responses"),
        trainable=mask.sum(-1),
        unscored={"log-probs/missing": (mask & ~scored).sum(-1)},
    )


# -- advantages ---------------------------------------------------------------------------------------

KEPT = "/kept"
SKIPPED = {
    "gae": "verl's own also returns what its critic is trained on",
    "gdpo": "its reward components are configured in verl's own",
    "rl_zvp": "verl passes no entropies to estimators",
}
"""Estimators that are not registered, and why."""

BY_TOKEN = ("reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")
"""Estimators that discount or sum rewards from a token on; the others read a sequence's total."""

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]


def estimator_names() -> list[str]:
    """Names of the registered advantage estimators: each as it is, and with its baseline over kept siblings.

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
