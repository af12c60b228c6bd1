"""AReaL: any method that decides by token or sequence, as its loss; or its correction alone.

AReaL has no registry of losses: names are rebound in the process that trains.

    actor:
      use_decoupled_loss: true
      scheduling_spec:
        - cmd: python -m offdrift.adapters.contrib.areal
          env_vars: {OFFDRIFT_METHOD: a3po}

The command installs the method and goes on as AReaL's own worker. AReaL weighs each micro-batch by its tokens: losses
are token means over the step, whatever aggregate a method was published with. `keep="loss"` leaves AReaL its PPO loss
and replaces `apply_rejection_sampling`: the method's gates and weights, where `actor.rejection_sampling` is set.

With `actor._version: v2` AReaL starts its workers by a command of its own, and none of this acts: keep v1.

Reference: AReaL 1.0.4 (4aef98d8d) and 2.0.0 (cbff54d64), `trainer/ppo/actor.py`: `PPOActor._ppo_update`,
`grpo_loss_fn`, `PPOActorControllerV2`; `utils/functional/functional.py`: `apply_rejection_sampling`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from offdrift.adapters import proof
from offdrift.adapters.arguments import refuse_set, refuse_unknown
from offdrift.adapters.frameworks import Replacements, after_import, require
from offdrift.adapters.hooks import (
    HookConfig,
    LossHook,
    check_served,
    correction_only,
    hook_of,
    require_logprobs,
    zero_loss,
)
from offdrift.batch_info import BatchInfo
from offdrift.correction import Correction, Weight
from offdrift.errors import MethodError, ShapeError, check_choice
from offdrift.logprobs import LogProbs
from offdrift.methods import Method
from offdrift.segments import Segments

ACTOR = "areal.trainer.ppo.actor"
LOGGING = "areal.utils.logging"
FUNCTIONAL = "areal.utils.functional.functional"
SERVER = "areal.infra.rpc.rpc_server"

Keep = Literal["nothing", "loss"]

_INSTALLED: list[tuple[HookConfig, Method | None]] = []
"""What is installed in this process, one or none: the method, and what of it corrects AReaL's loss."""
_REPLACED = Replacements()


def install(
    method: str | None = None,
    *,
    keep: Keep = "nothing",
    settings: Mapping[str, Any] | None = None,
    record: str | os.PathLike[str] | None = None,
    on_idle: str | None = None,
) -> None:
    """Put the method into AReaL's actor in this process, now or once it is imported.

    Args: as `HookConfig.of` (`record` not with keep="loss"), and
        keep: "loss" keeps AReaL's PPO loss and takes the method's gates and weights alone.

    Raises: `EvidenceError`, `MethodError`: AReaL's hook is not given what the method needs.
    """
    check_choice("keep", keep, ("nothing", "loss"))
    config, only = HookConfig.of("areal", method, settings, record=record, on_idle=on_idle), None
    if keep == "loss":
        hints = {"version_lag": 'use keep="nothing", which knows version lags'}
        only = correction_only(config, instead='keep="nothing"', hints=hints)
    else:
        check_served(config, has={"logp_old", "version_lag"})
    uninstall()
    _INSTALLED.append((config, only))
    for module in (FUNCTIONAL, ACTOR):
        after_import(module, _rebind)


def uninstall() -> None:
    """Give AReaL its own functions back."""
    _INSTALLED.clear()
    _REPLACED.restore()


def _rebind(module: Any) -> None:
    """Replace AReaL's functions in one of its two modules, if a method is installed."""
    if not _INSTALLED:
        return
    only = _INSTALLED[0][1]
    if module.__name__ == FUNCTIONAL:
        if only is not None:
            _REPLACED.replace(module, "apply_rejection_sampling", functools.partial(apply_rejection_sampling, module))
        return
    require("areal")
    if only is None:
        _REPLACED.replace(module, "grpo_loss_fn", functools.partial(grpo_loss_fn, module))
    update, stats_tracker = module.PPOActor._ppo_update, module.stats_tracker

    @functools.wraps(update)
    def with_metrics(self: Any, data: Any) -> Any:
        """AReaL's update of a batch; its statistics also have the metrics of the last step."""
        result = update(self, data)
        hook = _hook()
        if not hook.metrics and not hook.reached:
            hook.adapter.end_step(hook.step)  # says which parts were never called
        stats_tracker.scalar(**hook.metrics)
        return result

    _REPLACED.replace(module.PPOActor, "_ppo_update", with_metrics)
    second = getattr(module, "PPOActorControllerV2", None)
    if second is not None:
        _REPLACED.replace(second, "ppo_update", _without_effect)


def _without_effect(*_: Any, **__: Any) -> None:
    """Refuse AReaL's v2 controller: it starts workers by its own command, where the method would not act."""
    raise MethodError(
        "actor._version: v2 has AReaL start its workers by a command of its own, whatever scheduling_spec.cmd says: "
        "the method would not act in them; set actor._version: v1"
    )


def _be_heard() -> None:
    """Give this adapter's log an outlet where AReaL's logging is in force.

    At each logger of its own AReaL makes a new root, at WARNING and without a handler for loggers of others: what was
    proved and what acted would never be seen.
    """
    log = logging.getLogger("offdrift.areal")
    if LOGGING in sys.modules and not log.isEnabledFor(logging.INFO):
        outlet = logging.StreamHandler(sys.stdout)
        outlet.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
        log.addHandler(outlet)
        log.setLevel(logging.INFO)


def _hook() -> LossHook:
    """The hook of this process."""
    config, only = _INSTALLED[0]
    _be_heard()
    return hook_of(config, only=only, divides=False)


NEUTRAL: dict[str, Any] = {
    "rejection_sampling": None,
    "m2_threshold": None,
    "importance_sampling_level": "token",
    "use_sapo_loss": False,
    "use_cispo_loss": False,
}
"""Arguments of AReaL's `grpo_loss_fn` that choose another loss or correction, and their value without effect."""
STOOD_IN_FOR = ("eps_clip", "eps_clip_higher", "c_clip", "sapo_tau_pos", "sapo_tau_neg", "use_decoupled_loss")
"""Its numbers that the method's own stand in for, and a switch that has acted before the loss."""
LOGGED = ("vocab_min_logits", "vocab_max_logits", "vocab_mean_logits", "vocab_norm_logits")
"""Per token, for AReaL's statistics alone."""
REDUCTION = "loss_step"
"""What binds a micro-batch to `actor.loss_aggregation`, which AReaL has had since after 2.0.0."""
REUSED = "reuse_train_logp"
"""The `prox_logp_method` under which the policy at this update stands for the proximal one."""
PROXIMAL = ("recompute", "loglinear", "metrics", REUSED)


def grpo_loss_fn(
    module: Any,
    logprobs: Float[Tensor, ...],
    entropy: Float[Tensor, ...],
    input_data: Mapping[str, Any],
    *,
    current_version: int | None = None,
    prox_logp_method: str = "recompute",
    **theirs: Any,
) -> Float[Tensor, ""]:
    """AReaL's `grpo_loss_fn`: the mean over the micro-batch's tokens, which AReaL weighs by their number.

    Raises: `MethodError` for a setting that chooses AReaL's own loss; `FrameworkError` for one that is unknown,
        and once if AReaL's own loss is not the one that is known.
    """
    way_out = 'turn it off (sapo, cispo, gspo and m2po are methods here), or install(keep="loss")'
    refuse_set(theirs, NEUTRAL, whose="AReaL's own loss", way_out=way_out)
    refuse_unknown("areal", "grpo_loss_fn", theirs, known={*NEUTRAL, *STOOD_IN_FOR, *LOGGED, REDUCTION})
    refuse_reduction(theirs.get(REDUCTION), input_data)
    prox_logp_method = str(getattr(prox_logp_method, "value", prox_logp_method))
    check_choice("prox_logp_method", prox_logp_method, PROXIMAL)
    if input_data.get("teacher_logp") is not None:
        raise MethodError("AReaL's distillation loss (teacher_logp) is part of the loss that is replaced")
    mask, hook = input_data["loss_mask"].bool(), _hook()
    hook.reached = True
    if not bool(mask.any()):
        return zero_loss(logprobs)
    rollout, proximal = input_data["logprobs"], input_data.get("prox_logp")
    proximal = logprobs.detach() if prox_logp_method == REUSED else proximal
    old = module._resolve_proximal_logp(  # which refuses NaN, at masked positions, too
        prox_logp_gt=None if proximal is None else proximal.where(mask, 0.0),
        prox_logp_method=prox_logp_method,
        old_logp=rollout.where(mask, 0.0),
        logprobs=logprobs.detach().where(mask, 0.0),
        versions=input_data.get("versions"),
        current_version=current_version,
    )
    old = require_logprobs(old, mask, "prox_logp", "set actor.use_decoupled_loss and recompute it", beside=logprobs)
    cuts = input_data.get("cu_seqlens")
    packed = _packed(rollout, logprobs, old, mask, cuts)
    # AReaL shifts log-probs and masks to where a token is predicted, but neither ids nor versions nor turns:
    # those of the token that is predicted at t stand at t + 1, which is never in another sequence.
    of_tokens = {
        name: packed.like_caller(input_data[name].roll(-1, dims=-1)).long()
        for name in ("input_ids", "versions", "turn_ids")
        if input_data.get(name) is not None
    }
    if "turn_ids" in of_tokens:
        packed = replace(packed, segments=packed.segments.with_turns(of_tokens["turn_ids"]))
    recorded = {"tokens": "input_ids", "rollout_version": "versions"}
    version_lag = None
    if current_version is not None and "versions" in of_tokens:
        version_lag = (current_version - of_tokens["versions"]).clamp(min=0)
    result = hook.loss(
        packed,
        input_data["advantages"],
        column=None if mask.ndim > 1 or cuts is None else Segments(cuts.long()).position,
        tokens=packed.segments.num_tokens,
        also={ours: of_tokens[name] for ours, name in recorded.items() if name in of_tokens},
        batch_info=BatchInfo(version_lag=version_lag),
    )
    _prove_loss(module, hook, packed, logprobs, entropy, data={**input_data, "prox_logp": old}, theirs=theirs)
    tracker = module.stats_tracker
    tracker.denominator(n_valid_tokens=mask)
    tracker.stat(
        new_logp=logprobs.detach(),
        old_logp=rollout,
        entropy=entropy.detach().float(),
        importance_weight=packed.unpack(result.corrected.weight),
        approx_kl=logprobs.detach() - old,
        **{name: theirs[name] for name in LOGGED if theirs.get(name) is not None},
        denominator="n_valid_tokens",
    )
    return result.loss


def refuse_reduction(step: Any, input_data: Mapping[str, Any]) -> None:
    """Raise `MethodError` where AReaL would weigh the micro-batch by anything but its tokens."""
    if step is None:
        return
    reduction = type(step.bind(dict(input_data))).__name__
    if reduction != "TokenMean":
        raise MethodError(
            f"actor.loss_aggregation has AReaL average by {reduction}, and this loss is a mean over tokens: set "
            'actor.loss_aggregation: token_mean, or install(keep="loss"), which leaves the mean to AReaL'
        )


class _Silent:
    """Statistics that nobody keeps; some are scopes."""

    def __getattr__(self, _: str) -> Callable[..., Any]:
        return lambda *_, **__: nullcontext()


def _prove_loss(
    module: Any,
    hook: LossHook,
    packed: LogProbs,
    logprobs: Tensor,
    entropy: Tensor,
    data: Mapping[str, Any],
    theirs: Mapping[str, Any],
) -> None:
    """Once: AReaL's own PPO loss is ours with its clips, on its shapes and masks."""
    if hook.proved:
        return
    original, mask = _REPLACED.original("grpo_loss_fn"), data["loss_mask"].bool()
    sample = proof.sample_of(logprobs, data["prox_logp"], data["logprobs"], advantages=data["advantages"], mask=mask)
    inputs = {**data, "logprobs": sample.rollout, "prox_logp": sample.old, "advantages": sample.advantages}
    clips = [theirs.get(name) for name in ("eps_clip", "eps_clip_higher", "c_clip")]

    accepted = {} if original is None else inspect.signature(original).parameters
    settings = {name: x for name, x in theirs.items() if name in accepted and name not in LOGGED}

    def native(leaf: Tensor) -> Tensor:
        tracker, module.stats_tracker = module.stats_tracker, _Silent()
        try:
            return original(  # type: ignore[misc]
                leaf, entropy.detach(), dict(inputs), current_version=None, **settings
            )
        finally:
            module.stats_tracker = tracker

    def ours(leaf: Tensor) -> Tensor:
        again = _packed(sample.rollout, leaf, sample.old, mask, data.get("cu_seqlens"))
        return hook.plain(proof.clipped(*clips), again, sample.advantages, tokens=packed.segments.num_tokens).loss

    hook.prove(f"{ACTOR}.grpo_loss_fn", native=None if original is None else native, ours=ours, at=sample.logp)


OPEN: dict[str, Any] = {"level": "token", "metric": "ratio", "action": "clamp", "upper": 1e6, "lower": None}
"""AReaL's rejection sampling with every gate open: what is left is the weight."""


def _prove_correction(
    hook: LossHook, packed: LogProbs, proximal: Tensor, old: Tensor, *, cuts: Any, config: Any
) -> None:
    """Once: AReaL's own weights and mask are ours, where no bound binds."""
    if hook.proved:
        return
    original = _REPLACED.original("apply_rejection_sampling")
    mask = packed.unpack(torch.ones_like(packed.logp_rollout, dtype=torch.bool))
    sample = proof.sample_of(proximal, proximal, old, advantages=old, mask=mask)
    plain = Correction() & Weight(on="mismatch", cap=OPEN["upper"])

    def native(leaf: Tensor) -> Tensor:
        corrected = original(leaf.detach(), sample.rollout, mask, cuts, proof.changed(config, OPEN))
        return (corrected.behave_imp_weight * corrected.loss_mask).where(mask, 0.0)

    def ours(leaf: Tensor) -> Tensor:
        again = _packed(sample.rollout, None, leaf.detach(), mask, cuts)
        return again.unpack(plain(again).weight)

    name = f"{FUNCTIONAL}.apply_rejection_sampling"
    hook.prove(name, native=None if original is None or config is None else native, ours=ours, at=sample.logp)


def apply_rejection_sampling(
    module: Any,
    proximal_logprobs: Float[Tensor, ...],
    old_logprobs: Float[Tensor, ...],
    loss_mask: Shaped[Tensor, ...],
    cu_seqlens: Tensor | None,
    config: Any,
) -> Any:
    """AReaL's `apply_rejection_sampling`: masks and weights; AReaL keeps its loss and its denominators."""
    hook = _hook()
    hook.reached = True
    if not bool((loss_mask != 0).any()):
        return module.RejectionSamplingResult(loss_mask, torch.zeros_like(old_logprobs), 0.0)
    packed = _packed(old_logprobs, None, proximal_logprobs, loss_mask, cu_seqlens)
    corrected = hook.correct(packed)
    _prove_correction(hook, packed, proximal_logprobs, old_logprobs, cuts=cu_seqlens, config=config)
    keep = packed.unpack(corrected.keep.to(loss_mask.dtype))
    weight = packed.unpack(corrected.weight.where(corrected.keep, 0.0))
    filtered = float((~corrected.keep | corrected.limited).float().mean())
    return module.RejectionSamplingResult(keep, weight.to(old_logprobs.dtype), filtered)


def _packed(rollout: Tensor, logp: Tensor | None, old: Tensor, mask: Tensor, cuts: Tensor | None) -> LogProbs:
    if mask.ndim == 1 and cuts is None:
        raise ShapeError("AReaL gave packed tokens without cu_seqlens; sequences cannot be told apart")
    segments = Segments(cuts.long()) if mask.ndim == 1 and cuts is not None else None
    return LogProbs.pack(rollout, logp, old, mask=mask, segments=segments)


if __name__ == "__main__":
    # The module that others import, not this copy of it.
    from offdrift.adapters.contrib import areal

    areal.install()
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
