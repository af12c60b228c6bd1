"""ROLL: any method that decides by token or sequence, as a worker class.

    system_envs: {OFFDRIFT_METHOD: icepop}
    actor_train:
      worker_cls: offdrift.adapters.contrib.roll.Worker            # RLVR: the method's loss
      # offdrift.adapters.contrib.roll.AgenticWorker               # agentic pipelines: the same
      # offdrift.adapters.contrib.roll.CorrectingWorker            # ROLL's loss, the method's correction
      # offdrift.adapters.contrib.roll.AgenticCorrectingWorker
      # offdrift.adapters.contrib.roll.CorrectingPGWorker          # the same under ROLL's pg_variant
      # offdrift.adapters.contrib.roll.AgenticCorrectingPGWorker

A `Worker` replaces ROLL's loss; its counts of tokens and samples in the step are the denominators. A correcting worker
replaces `compute_train_infer_correction`: the method's gates and weights on the mismatch of the two engines, in the
worker, and in the pipeline where that corrects (`enable_old_logprobs_recompute`). Once per process, either is held
against what it replaces: ROLL's loss with its clips, its correction without bounds. The loss that a correcting worker
keeps, whatever its variant, must be multiplied by the weights token by token. Each inherits from the worker
that ROLL's pipeline takes by default, the ones with PG in their name from the worker that reads
`actor_train.pg_variant`.

Reference: ROLL 0.3.0 (8eb27cc2), `pipeline/rlvr/actor_worker.py`: `ActorWorker.loss_func`;
`pipeline/rlvr/actor_pg_worker.py`; `pipeline/agentic/agentic_actor_worker.py`,
`agentic_actor_pg_worker.py`; `configs/worker_config.py`; `utils/train_infer_corrections.py`.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from offdrift.adapters import proof
from offdrift.adapters.frameworks import Replacements, require
from offdrift.adapters.hooks import (
    HookConfig,
    LossHook,
    check_served,
    correction_only,
    hook_of,
    metric_parts,
    require_logprobs,
    zero_loss,
)
from offdrift.correction import Correction, Weight
from offdrift.errors import FrameworkError, LivenessError, MethodError
from offdrift.logprobs import LogProbs

CORRECTIONS = "roll.utils.train_infer_corrections"
RLVR = "roll.pipeline.rlvr.actor_worker"
AGENTIC = "roll.pipeline.agentic.agentic_actor_worker"
"""Where the workers are that ROLL's pipelines take when `worker_cls` is not set."""
RLVR_PG = "roll.pipeline.rlvr.actor_pg_worker"
AGENTIC_PG = "roll.pipeline.agentic.agentic_actor_pg_worker"
"""Where the workers are that read `actor_train.pg_variant`."""
COMPUTE = "compute_train_infer_correction"

WAYS_OUT = {
    "infer_logprobs": "set actor_infer.generating_args.logprobs: 1, which has the engine return them",
    "old_log_probs": "set enable_old_logprobs_recompute: true",
    "ref_log_probs": "set enable_reference: true",
}

_REPLACED = Replacements()


def __getattr__(name: str) -> Any:
    if name not in WORKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _worker(name)


@functools.cache
def _worker(name: str) -> type:
    """One of the classes that ROLL's `worker_cls` can name."""
    module, base, ours = WORKERS[name]
    theirs = getattr(_import(module), base)
    if ours is not _Loss:
        install()
    return type(name, (ours, theirs), {"__module__": __name__, "__doc__": _worker.__doc__})


def install() -> None:
    """Have ROLL's workers and pipelines in this process correct by the method that OFFDRIFT_METHOD names.

    Raises: `EvidenceError`, `MethodError`: ROLL's hook is not given what the method needs.
    """
    module = _import(CORRECTIONS)
    _hook()
    _REPLACED.replace(module, COMPUTE, train_infer_correction, everywhere=True)


def uninstall() -> None:
    """Give ROLL its own correction back."""
    _REPLACED.restore()


def _import(name: str) -> Any:
    require("roll")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        raise FrameworkError(
            f"{name} cannot be imported: {e}. ROLL is https://github.com/alibaba/ROLL, installed from "
            "its repository; the package called roll on PyPI is something else"
        ) from e


@functools.cache
def _hook(whole: bool = False) -> LossHook:
    """The hook of this process: gates and weights alone, or the `whole` method."""
    config = HookConfig.of("roll")
    if whole:
        check_served(config, has={"logp_old", "logp_ref"})
        return hook_of(config)
    return hook_of(config, only=correction_only(config, instead="the class Worker or AgenticWorker"))


class _Loss:
    """Base class that gives a ROLL worker the method's whole loss, in place of ROLL's."""

    strategy: Any
    pipeline_config: Any

    def loss_func(self, data: Any, output_tensor: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The method's part of the step's loss, and of its metrics.

        Args:
            data: ROLL's `DataProto`: response_mask `[batch, time]`; old_log_probs, infer_logprobs,
                advantages `[batch, time - 1]`; counts of the step in its meta information.
            output_tensor: logits; receives the gradient.

        Raises: `EvidenceError` without the engine's log-probs; `MethodError` if ROLL's own terms are on;
            `FrameworkError` once, where ROLL's own plain loss is not ours.
        """
        hook, batch = _hook(whole=True), data.batch
        own = self.pipeline_config.train_infer_correction
        dropped = {
            "use_kl_loss": self.pipeline_config.use_kl_loss,
            "entropy_loss_coef": self.pipeline_config.entropy_loss_coef > 0,
            "train_infer_correction.is_weight.enabled": own.is_weight.enabled,
            "train_infer_correction.filters": any(f.enabled for f in own.filters),
            "actor_train.pg_variant": _variant(self.pipeline_config) is not None,
            "dual_clip_loss": self.pipeline_config.dual_clip_loss,
            "importance_sampling": getattr(self.pipeline_config, "importance_sampling", "token") != "token",
            "ratio_type": getattr(self.pipeline_config, "ratio_type", "token") != "token",
        }
        named = ", ".join(name for name, on in dropped.items() if on)
        if named:
            raise MethodError(
                f"{named}: part of ROLL's own loss, which this worker replaces; turn it off (a KL penalty "
                "can be the method's), or use a CorrectingWorker, which keeps ROLL's loss"
            )
        trained, mask = "final_response_mask", batch.get("final_response_mask", None)
        if mask is None:
            trained, mask = "response_mask", batch["response_mask"][:, 1:]
        tokens, samples = (
            data.meta_info[key].get(trained, data.meta_info[key]["response_mask"])
            for key in ("batch_num_tokens", "global_valid_samples")
        )
        logp = self.strategy.op_compute_log_probs(
            logits=output_tensor, input_ids=batch["input_ids"], attention_mask=batch["response_mask"]
        )
        if not bool((mask != 0).any()):
            return zero_loss(logp), {"actor/offdrift/loss@sum": 0.0}
        old = self.get_old_log_probs_with_cache(data, logp)  # type: ignore[attr-defined]
        fields = {"infer_logprobs": batch.get("infer_logprobs", None), "old_log_probs": old}
        if hook.method.needs_reference:
            fields["ref_log_probs"] = batch.get("ref_log_probs", None)
        rollout, old, *ref = (
            require_logprobs(x if x is not None and len(x) else None, mask, name, WAYS_OUT[name], beside=logp)
            for name, x in fields.items()
        )
        logprobs = LogProbs.pack(rollout, logp, old, logp_ref=ref[0] if ref else None, mask=mask)
        result = hook.loss(
            logprobs,
            self._weighted(data, batch["advantages"], hook),
            tokens=tokens,
            sequences=samples,
            also={"tokens": logprobs.like_caller(batch["input_ids"][:, 1:])},
        )
        if not hook.proved:
            sample = proof.sample_of(logp, old, rollout, advantages=batch["advantages"], mask=mask)
            self._prove(hook, data, sample, mask=mask, counts={"tokens": tokens, "sequences": samples})
        metrics = {**metric_parts(result, tokens), "loss": float(result.loss.detach())}
        loss = result.loss * getattr(self.pipeline_config, "rl_loss_coef", 1.0)
        return loss, {f"actor/offdrift/{key}@sum": value for key, value in metrics.items()}

    def _prove(self, hook: LossHook, data: Any, s: proof.Sample, *, mask: Tensor, counts: dict[str, Any]) -> None:
        """Once: ROLL's own loss of the micro-batch is ours with its clips, its weights of samples and its counts.

        The log-probs stand in for its forward pass. Its token mean adds up whole rows, masked tokens included, whose
        advantages it has as zero.
        """
        settings, trained = self.pipeline_config, mask != 0
        aggregate = "token_mean" if hook.method.aggregate == "token_mean" else "seq_mean_token_mean"
        advantages = s.advantages.where(trained, 0.0)
        # Not recomputed, ROLL's weights would be its correction's; so they are those of the data, ones here.
        instead = {"loss_agg_mode": aggregate.replace("_", "-"), "enable_old_logprobs_recompute": True}
        columns = {"old_log_probs": s.old, "infer_logprobs": s.rollout, "ref_log_probs": s.old}
        columns |= {"advantages": advantages, "train_infer_is_weight": torch.ones_like(s.old)}
        meta = {key: dict(x) if isinstance(x, dict) else x for key, x in data.meta_info.items()}
        moved = _Like(data, batch={**data.batch, **columns}, meta_info=meta)
        native_loss = super().loss_func.__func__  # type: ignore[misc]

        def native(leaf: Tensor) -> Tensor:
            strategy = _Like(self.strategy, op_compute_log_probs=lambda **_: leaf)
            attributes = {"strategy": strategy, "pipeline_config": proof.changed(settings, instead)}
            worker = _Like(self, get_old_log_probs_with_cache=lambda *_: s.old, **attributes)
            return native_loss(worker, moved, leaf)[0]

        def ours(leaf: Tensor) -> Tensor:
            packed = LogProbs.pack(s.rollout, leaf, s.old, mask=mask)
            names = ("pg_clip_low", "pg_clip_high") if settings.use_pg_clip_range else ("pg_clip", "pg_clip")
            plain = proof.clipped(*(getattr(settings, name) for name in names), aggregate=aggregate)
            weighted = self._weighted(data, advantages, hook)
            return hook.plain(plain, packed, weighted, **counts).loss * getattr(settings, "rl_loss_coef", 1.0)

        name = f"{native_loss.__module__}.{native_loss.__qualname__}"
        hook.prove(name, native=native, ours=ours, at=s.logp)

    def _weighted(self, data: Any, advantages: Float[Tensor, "b t"], hook: LossHook) -> Float[Tensor, "b t"]:
        """Advantages times ROLL's weights of samples, which is the loss times them."""
        weigh = getattr(self, "compute_sample_weights", None)
        if weigh is None:
            return advantages
        weights = weigh(data, data.batch["response_mask"][:, 1:].long())
        if not hook.proportional and not bool((weights == 1).all()):
            raise MethodError(
                "difficulty_loss_weight and length_loss_weight weigh samples, and the loss of this "
                f"method ({hook.method.describe()}) is not proportional to the advantage; turn them off"
            )
        return advantages * weights[:, None]


class _Like:
    """An object with some attributes changed; the original stays."""

    def __init__(self, original: Any, **instead: Any) -> None:
        self.__dict__.update(instead, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


def _variant(config: Any) -> str | None:
    return getattr(config.actor_train, "pg_variant", None)


class _Correction:
    """Base class that adds the method's gates and weights to a ROLL worker and keeps ROLL's own loss."""

    strategy: Any
    pipeline_config: Any
    proved = False
    """Whether ROLL's loss was found to be multiplied by the weights, in this process."""
    reads_variant = False
    """Whether ROLL's worker reads `actor_train.pg_variant`."""

    def loss_func(self, data: Any, output_tensor: Tensor) -> Any:
        """ROLL's own loss. Raises: `MethodError` for a variant that would be ignored, or for one that lacks."""
        variant = _variant(self.pipeline_config)
        if variant is None and self.reads_variant:
            raise MethodError(
                "actor_train.pg_variant is not set, and ROLL's PG workers have no default: set it "
                f"(topr, vanilla, tis, cispo, kimi15, ppo), or name {__name__}.CorrectingWorker "
                "(AgenticCorrectingWorker)"
            )
        if variant is not None and not self.reads_variant:
            raise MethodError(
                f"actor_train.pg_variant: {variant} has no effect in ROLL's default worker, whose loss "
                f"is PPO's; name {__name__}.CorrectingPGWorker (AgenticCorrectingPGWorker), or drop it"
            )
        result = super().loss_func(data, output_tensor)  # type: ignore[misc]
        if not type(self).proved:
            self._prove(data, output_tensor)
        return result

    def _prove(self, data: Any, output_tensor: Tensor) -> None:
        """Once: ROLL's loss of the micro-batch without weights is the one with every weight 1, and token by token its
        gradient is multiplied by the weight, whatever the variant.

        Raises: `FrameworkError` naming the loss and its variant.
        """
        batch, native_loss = data.batch, super().loss_func.__func__  # type: ignore[misc]
        mask = batch.get("final_response_mask", None)
        mask = (batch["response_mask"][:, 1:] if mask is None else mask) != 0
        if not bool(mask.any()):
            return
        with torch.no_grad():
            logp = self.strategy.op_compute_log_probs(
                logits=output_tensor, input_ids=batch["input_ids"], attention_mask=batch["response_mask"]
            )
            old = self.get_old_log_probs_with_cache(data, logp)  # type: ignore[attr-defined]
        rollout = batch.get("infer_logprobs", None)
        rollout = old if rollout is None or not len(rollout) else rollout
        s = proof.sample_of(logp, old, rollout, advantages=batch["advantages"], mask=mask)
        columns = {"old_log_probs": s.old, "infer_logprobs": s.rollout, "ref_log_probs": s.old}
        columns["advantages"] = s.advantages.where(mask, 0.0)
        settings = proof.changed(self.pipeline_config, {"enable_old_logprobs_recompute": True})

        def total(leaf: Tensor, weight: Tensor | None) -> Tensor:
            own = settings.train_infer_correction
            weighed = proof.changed(own, {"is_weight": proof.changed(own.is_weight, {"enabled": weight is not None})})
            instead = {"train_infer_is_weight": torch.ones_like(leaf) if weight is None else weight}
            meta = {key: dict(x) if isinstance(x, dict) else x for key, x in data.meta_info.items()}
            moved = _Like(data, batch={**batch, **columns, **instead}, meta_info=meta)
            scored = {
                "op_compute_log_probs": lambda **_: leaf,
                "op_compute_entropy": lambda **_: torch.zeros_like(leaf),
            }
            config = proof.changed(settings, {"train_infer_correction": weighed})
            attributes = {"strategy": _Like(self.strategy, **scored), "pipeline_config": config}
            like = _Like(self, get_old_log_probs_with_cache=lambda *_: s.old, **attributes)
            return native_loss(like, moved, leaf)[0]

        # No two tokens of a row alike, one of them rejected.
        weights = torch.linspace(0.0, 2.0, s.logp.shape[1], dtype=s.logp.dtype, device=s.logp.device).expand_as(s.logp)
        none, ones = torch.zeros_like(s.logp), torch.ones_like(s.logp)

        def native(leaf: Tensor) -> Tensor:
            weighted = total(leaf, weights) - total(leaf, none)
            return torch.stack([weighted - weighted.detach(), total(leaf, None)])

        def ours(leaf: Tensor) -> Tensor:
            at = leaf.detach().requires_grad_()
            (slope,) = torch.autograd.grad(total(at, ones) - total(at, none), at)
            weighted = (weights * slope * leaf).sum()
            return torch.stack([weighted - weighted.detach(), total(leaf, ones)])

        name = f"{native_loss.__module__}.{native_loss.__qualname__} with pg_variant={_variant(self.pipeline_config)!r}"
        proof.prove(_hook().adapter.log, "roll", name, native=native, ours=ours, at=s.logp)
        type(self).proved = True


class _CorrectionPG(_Correction):
    reads_variant = True


WORKERS: dict[str, tuple[str, str, type]] = {
    "Worker": (RLVR, "ActorWorker", _Loss),
    "AgenticWorker": (AGENTIC, "ActorWorker", _Loss),
    "CorrectingWorker": (RLVR, "ActorWorker", _Correction),
    "AgenticCorrectingWorker": (AGENTIC, "ActorWorker", _Correction),
    "CorrectingPGWorker": (RLVR_PG, "ActorPGWorker", _CorrectionPG),
    "AgenticCorrectingPGWorker": (AGENTIC_PG, "ActorWorker", _CorrectionPG),
}
"""Of each class that `worker_cls` can name: ROLL's module and class, and what goes before it."""


def train_infer_correction(
    cfg: Any,
    response_mask: Shaped[Tensor, "b t"],
    old_log_probs: Float[Tensor, "b t"],
    infer_log_probs: Float[Tensor, "b t"],
    global_valid_samples: Any = None,
    global_valid_tokens: Any = None,
) -> tuple[Float[Tensor, "b t"], Int[Tensor, "b t"], dict[str, float]]:
    """`compute_train_infer_correction`: weights, zero where a gate rejects; masks; metrics.

    ROLL's token mean adds up whole rows whatever the mask says, so that a weight of zero is what
    rejects. The pipeline calls without counts, on the whole batch: that is a step.
    """
    if not cfg.is_weight.enabled:
        raise LivenessError(
            "ROLL drops the weights, and under token-mean the rejections, that this correction "
            "returns: set train_infer_correction.is_weight.enabled: true"
        )
    hook, mask = _hook(), response_mask != 0
    keep, weight = mask.long(), torch.zeros_like(old_log_probs)
    if not bool(mask.any()):
        return weight, keep, {}
    infer_log_probs = require_logprobs(
        infer_log_probs, mask, "infer_logprobs", WAYS_OUT["infer_logprobs"], beside=old_log_probs
    )
    logprobs = LogProbs.pack(infer_log_probs, logp_old=old_log_probs, mask=mask)
    corrected = hook.correct(logprobs)
    kept = logprobs.unpack(corrected.keep.long())
    weight = logprobs.unpack(corrected.weight.where(corrected.keep, 0.0)).to(old_log_probs.dtype)
    if not hook.proved:
        _prove_correction(hook, cfg, old_log_probs, infer_log_probs, mask=mask)
    if global_valid_tokens is not None:
        return weight, kept, {}
    hook.end_step()
    return weight, kept, {f"actor/{name}": value for name, value in hook.metrics.items()}


OPEN = {"weight_type": "token", "upper_bound": None, "detach": True}
"""ROLL's weights as they are, without a bound."""


def _prove_correction(hook: LossHook, cfg: Any, old: Tensor, rollout: Tensor, *, mask: Tensor) -> None:
    """Once: the weights of ROLL's own correction, without bounds and filters, are ours, token by token."""
    s = proof.sample_of(old, old, rollout, advantages=torch.zeros_like(old), mask=mask)
    theirs = _REPLACED.original(COMPUTE)
    without = proof.changed(cfg, {"is_weight": proof.changed(cfg.is_weight, OPEN), "filters": []})

    def native(leaf: Tensor) -> Tensor:
        weight, keep, _ = theirs(without, mask.long(), s.old, s.rollout)
        return (leaf * weight * keep).where(mask, 0.0)

    def ours(leaf: Tensor) -> Tensor:
        packed = LogProbs.pack(s.rollout, logp_old=s.old, mask=mask)
        corrected = (Correction() & Weight(on="mismatch"))(packed)
        return leaf * packed.unpack(corrected.weight.where(corrected.keep, 0.0))

    name = f"{CORRECTIONS}.{COMPUTE}"
    hook.prove(name, native=None if theirs is None else native, ours=ours, at=s.advantages)
