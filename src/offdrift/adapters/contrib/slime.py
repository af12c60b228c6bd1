"""slime and miles: gates and weights as the custom TIS function, or in slime the whole loss.

    --use-tis --custom-tis-function-path offdrift.adapters.contrib.slime.tis

keeps slime's objective and takes the correction of any method that compares the training engine with
the rollout engine (on="mismatch"). Rejected tokens lose their loss and stay in slime's denominators.

    --loss-type custom_loss --custom-loss-function-path offdrift.adapters.contrib.slime.loss

takes the whole method, and so any that decides by token or sequence (slime only).

The method is named by OFFDRIFT_METHOD, see `adapter_from_env`. Under context parallelism the TIS
function gathers whole sequences over the group, as sequence-level decisions need them; the loss is
refused there.

Reference: slime 0.3.1 (624b824), `backends/megatron_utils/loss.py`: `policy_loss_function`,
`loss_function`; `cp_utils.py`. miles 0.1.0 (31f1ca9), `backends/training_utils/loss_hub/losses.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.adapters import environment
from offdrift.adapters.frameworks import FRAMEWORKS, require
from offdrift.adapters.hooks import (
    Attached,
    attach,
    check_served,
    chosen,
    correction_alone,
    decision_names,
    decisions,
)
from offdrift.errors import EvidenceError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments

CONTEXT_PARALLEL = {
    "slime": "slime.backends.megatron_utils.cp_utils",
    "miles": "miles.backends.training_utils.cp_utils",
}
WITHOUT_MU = "its rollout function must fill Sample.rollout_log_probs"

Tensors = Sequence[Tensor]


def tis(
    args: Any,
    *,
    pg_loss: Float[Tensor, " local"],
    train_log_probs: Tensors,
    rollout_log_probs: Tensors | None,
    loss_masks: Tensors,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **_: Any,
) -> tuple[Float[Tensor, " local"], list[Tensor], dict[str, Float[Tensor, " local"]]]:
    """slime's custom TIS function: the loss times the method's weights, zero where a gate rejects.

    The masks lose what is rejected only if `gate_scope` is "all": slime takes its entropy bonus and
    KL loss over them, too, and its denominators from neither.

    With `--get-mismatch-metrics` and no `--use-tis`, it measures and changes nothing.

    Args:
        args: slime's arguments.
        pg_loss: slime's token losses, all samples end to end: this rank's share of them.
        train_log_probs: log pi_old of each sample's response, of the training engine.
        rollout_log_probs: log mu, of SGLang.
        loss_masks: nonzero where a token may train, of whole responses.
        total_lengths: of prompts and responses, tokens.
        response_lengths: tokens.

    Returns: token losses; masks of whole responses; metrics per token, which slime averages.

    Raises: `EvidenceError`, `MethodError`: this hook cannot serve the method.
        `BadValueError`: a trainable token's log-prob is NaN or positive.
    """
    hook = _tis_hook(_framework())
    if rollout_log_probs is None:
        raise EvidenceError(f"slime gave no rollout_log_probs; {WITHOUT_MU}")
    whole, local = _context_parallel(args, total_lengths, response_lengths)
    mask = torch.cat([m.reshape(-1) for m in loss_masks])
    if not bool(mask.any()):
        zero = torch.zeros_like(pg_loss.detach())
        metrics = dict.fromkeys(decision_names("mismatch"), zero)
        return (_only(pg_loss, zero) if args.use_tis else pg_loss), list(loss_masks), metrics
    logprobs = LogProbs.pack(
        torch.cat(whole(rollout_log_probs)),
        logp_old=torch.cat(whole(train_log_probs)),
        mask=mask,
        segments=_segments(response_lengths, mask),
    )
    corrected = hook.correct(logprobs, applied=bool(args.use_tis))

    def by_sample(x: Tensor) -> list[Tensor]:
        return list(logprobs.unpack(x).split(list(response_lengths)))

    found = decisions(logprobs, corrected, on="mismatch")
    metrics = {name: torch.cat(local(by_sample(x))) for name, x in found.items()}
    if not args.use_tis:
        return pg_loss, list(loss_masks), metrics
    weight = torch.cat(local(by_sample(corrected.weight.where(corrected.keep, 0.0))))
    masks = list(loss_masks)
    if hook.method.gate_scope == "all":
        keep = by_sample(corrected.keep.to(mask.dtype))
        masks = [m * k.reshape(m.shape) for m, k in zip(masks, keep, strict=True)]
    return _only(pg_loss, weight), masks, metrics


def loss(
    args: Any,
    batch: Mapping[str, Any],
    logits: Float[Tensor, "one t v"],
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """slime's custom loss: the whole method over slime's denominators, and slime's entropy bonus.

    Each sample counts by its mean over its rollout's tokens, or each token as one with
    `--calculate-per-token-loss`, whatever aggregate the method was published with.

    Args:
        args: slime's arguments.
        batch: a micro-batch; `log_probs`, `rollout_log_probs`, `advantages`, `loss_masks`, lengths.
        logits: of the packed micro-batch.
        sum_of_sample_mean: slime's reducer, used for metrics and entropy.

    Raises: as `tis`; `MethodError` also for context parallelism and for slime's own KL loss.
    """
    hook = _loss_hook()
    _check_loss(args)
    # slime has loaded this module by now; nobody else needs it to import ours.
    from slime.backends.megatron_utils import loss as theirs

    _, scored = theirs.get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        **theirs.get_rollout_top_p_logprob_kwargs(args, batch),
    )
    logp, mask = torch.cat(list(scored["log_probs"])), torch.cat(list(batch["loss_masks"]))
    entropy = sum_of_sample_mean(torch.cat(list(scored["entropy"])))
    if bool(mask.any()):
        total, metrics = _pushed(args, batch, hook, logp, mask)
    else:
        # Zero, with a graph: every rank must run its backward pass.
        total = logp[mask != 0].sum() if len(logp) else 0 * logits.sum()
        metrics = dict.fromkeys(decision_names("full"), torch.zeros_like(logp.detach()))
    total = total - args.entropy_coef * entropy
    reported = {"loss": total.detach(), "entropy_loss": entropy.detach()}
    return total, reported | {name: sum_of_sample_mean(x) for name, x in metrics.items()}


# -- which method ---------------------------------------------------------------------------------


@functools.cache
def _tis_hook(framework: str) -> Attached:
    """Gates and weights of the method of this process, without its objective."""
    _require(framework)
    name, row = chosen(framework)
    instead = f"--custom-loss-function-path {__name__}.loss"
    only = correction_alone(name, row, framework=framework, instead=instead)
    parts = (*row.correction.gates, *row.correction.weights)
    said = f"its {'; '.join(p.formula for p in parts)}; the objective is {framework}'s own"
    return attach(framework, name, only, on_idle=environment.on_idle(), said=said)


@functools.cache
def _loss_hook() -> Attached:
    """The whole method of this process."""
    _require("slime")
    name, row = chosen("slime")
    check_served(row, framework="slime", has={"logp_old"}, folded=True)
    return attach("slime", name, row, on_idle=environment.on_idle())


def _framework() -> str:
    """Which of the two loaded us: miles is a fork of slime, and has slime's hooks."""
    return "miles" if "miles" in sys.modules and "slime" not in sys.modules else "slime"


def _require(framework: str) -> None:
    if framework in FRAMEWORKS:
        require(framework)


# -- one micro-batch ------------------------------------------------------------------------------


def _pushed(
    args: Any, batch: Mapping[str, Any], hook: Attached, logp: Tensor, mask: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics per token; slime's denominators are in the advantages."""
    if not batch.get("rollout_log_probs"):
        raise EvidenceError(f"slime gave no rollout_log_probs; {WITHOUT_MU}")
    segments = _segments(batch["response_lengths"], mask)
    old = batch.get("log_probs")
    logprobs = LogProbs.pack(
        torch.cat(list(batch["rollout_log_probs"])),
        logp,
        torch.cat(list(old)) if old else None,
        mask=mask,
        segments=segments,
    )
    advantages = torch.cat(list(batch["advantages"]))
    if not args.calculate_per_token_loss:
        tokens = torch.stack([torch.as_tensor(n) for n in batch["rollout_mask_sums"]]).to(logp)
        advantages = advantages / segments.spread(tokens.clamp(min=1))
    place = logprobs.like_caller(segments.position)
    result = hook.loss(logprobs, logprobs.like_caller(advantages), place)
    found = decisions(logprobs, result.corrected, on="full")
    return result.loss, {name: logprobs.unpack(x) for name, x in found.items()}


def _check_loss(args: Any) -> None:
    if cp_size(args) > 1:
        raise MethodError(
            "context parallelism cuts sequences, which this loss needs whole; use "
            f"--custom-tis-function-path {__name__}.tis, or --context-parallel-size 1"
        )
    if args.use_kl_loss and args.kl_loss_coef != 0:
        raise MethodError(
            "--use-kl-loss belongs to slime's policy_loss and has no effect on a custom loss; drop it, "
            "or put the KL into the rewards with --kl-coef"
        )


def _context_parallel(
    args: Any, total: Sequence[int], response: Sequence[int]
) -> tuple[Callable[[Tensors], list[Tensor]], Callable[[Tensors], list[Tensor]]]:
    """From this rank's share of each sample to whole responses, and back."""
    if cp_size(args) == 1:
        return list, list
    if getattr(args, "qkv_format", "thd") != "thd":
        raise MethodError(
            f"context parallelism over --qkv-format {args.qkv_format} is not known; use thd"
        )
    theirs = import_module(CONTEXT_PARALLEL[_framework()])

    def each(function: Callable[..., Tensor], xs: Tensors) -> list[Tensor]:
        return [function(x, t, r).detach() for x, t, r in zip(xs, total, response, strict=True)]

    return (
        functools.partial(each, theirs.all_gather_with_cp),
        functools.partial(each, theirs.slice_log_prob_with_cp),
    )


def _segments(lengths: Sequence[int], mask: Tensor) -> Segments:
    return Segments.from_lengths(torch.tensor(list(lengths), device=mask.device))


def _only(pg_loss: Tensor, weight: Tensor) -> Tensor:
    """The loss times its weight; exactly zero without one, whatever it was."""
    return (pg_loss * weight).where(weight > 0, 0.0)


def cp_size(args: Any) -> int:
    """Ranks among which context parallelism cuts each sequence; 1 without it."""
    return getattr(args, "context_parallel_size", 1)
