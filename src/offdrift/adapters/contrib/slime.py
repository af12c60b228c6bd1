"""slime and miles: gates and weights as custom TIS function, a method as custom loss, records.

    --use-tis --custom-tis-function-path offdrift.adapters.contrib.slime.tis

keeps slime's objective and takes the correction of any method that compares the training engine with
the rollout engine (on="mismatch"). Rejected tokens lose their loss and stay in slime's denominators.

    --loss-type custom_loss --custom-loss-function-path offdrift.adapters.contrib.slime.loss

takes any whole method that decides by token or sequence (slime only).

    --rollout-data-postprocess-path offdrift.adapters.contrib.slime.record

records tokens, both log-probs, advantages and groups before each training phase, in the folder
OFFDRIFT_RECORD, to which all training processes can write.

The method is named by OFFDRIFT_METHOD, see `offdrift.adapters.base`. Under context parallelism the TIS function gathers
whole sequences over the group; the loss and the records are refused there.

Reference: slime 0.3.1 (624b824), `backends/megatron_utils/loss.py`: `policy_loss_function`,
`loss_function`; `cp_utils.py`; `actor.py`: `train_actor`; `ray/rollout.py`. miles 0.1.0 (31f1ca9),
`backends/training_utils/loss_hub/losses.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.adapters import proof
from offdrift.adapters.arguments import refuse_unknown
from offdrift.adapters.base import environ, recorder_of
from offdrift.adapters.frameworks import FRAMEWORKS, require
from offdrift.adapters.hooks import (
    HookConfig,
    LossHook,
    check_served,
    correction_only,
    decision_names,
    decisions,
    hook_of,
)
from offdrift.correction import Correction, Weight
from offdrift.errors import EvidenceError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments

if TYPE_CHECKING:
    from offdrift.records.batch import Unpacked

CONTEXT_PARALLEL = {
    "slime": "slime.backends.megatron_utils.cp_utils",
    "miles": "miles.backends.training_utils.cp_utils",
}
WITHOUT_MU = "its rollout function must fill Sample.rollout_log_probs"
WITHOUT_OLD = "add --get-mismatch-metrics, with which slime scores the tokens before it trains"

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
    parallel_state: Any = None,
    max_seq_lens: Any = None,
    **unknown: Any,
) -> tuple[Float[Tensor, " local"], list[Tensor], dict[str, Float[Tensor, " local"]]]:
    """slime's custom TIS function: the loss times the method's weights, zero where a gate rejects.

    The masks lose what is rejected only if `gate_scope` is "all": slime takes its entropy bonus and KL
    loss over them. With `--get-mismatch-metrics` and no `--use-tis`, it measures and changes nothing.

    Args:
        args: slime's arguments.
        pg_loss: slime's token losses, all samples end to end: this rank's share of them.
        train_log_probs: log pi_old of each sample's response, of the training engine.
        rollout_log_probs: log mu, of SGLang.
        loss_masks: nonzero where a token may train, of whole responses.
        total_lengths: of prompts and responses, tokens.
        response_lengths: tokens.
        parallel_state, max_seq_lens: miles' own, read by the context-parallel helpers of its other losses alone.

    Returns: token losses; masks of whole responses; metrics per token, which slime averages.

    Raises: `EvidenceError`, `MethodError`: this hook cannot serve the method.
        `BadValueError`: a trainable token's log-prob is NaN or positive.
        `FrameworkError`: slime passes what this hook does not know, or once, its own weights are others.
    """
    refuse_unknown(_framework(), "its custom TIS function", unknown)
    hook = _hook(_framework())
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
    if not hook.proved:
        lists = {"train": train_log_probs, "rollout": rollout_log_probs, "loss_masks": loss_masks}
        _prove_tis(hook, args, pg_loss, shares=(whole, local), **lists)

    def by_sample(x: Tensor) -> list[Tensor]:
        return list(logprobs.unpack(x).split(list(response_lengths)))

    by_token = decisions(logprobs, corrected, on="mismatch")
    metrics = {name: torch.cat(local(by_sample(x))) for name, x in by_token.items()}
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
    hook = _hook("slime", whole=True)
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
        if not batch.get("rollout_log_probs"):
            raise EvidenceError(f"slime gave no rollout_log_probs; {WITHOUT_MU}")
        segments, old = _segments(batch["response_lengths"], mask), batch.get("log_probs")
        rollout = torch.cat(list(batch["rollout_log_probs"]))
        old = torch.cat(list(old)) if old else None
        logprobs = LogProbs.pack(rollout, logp, old, mask=mask, segments=segments)
        advantages = torch.cat(list(batch["advantages"]))
        advantages = _over_denominators(args, batch, advantages, segments)
        result = hook.loss(logprobs, advantages, column=segments.position)
        if not hook.proved:
            _prove_loss(hook, args, batch, theirs=theirs, scored=scored, reducer=sum_of_sample_mean)
        by_token = decisions(logprobs, result.corrected, on="full")
        total, metrics = result.loss, {name: logprobs.unpack(x) for name, x in by_token.items()}
    else:
        # Zero, with a graph: every rank must run its backward pass.
        total = logp[mask != 0].sum() if len(logp) else 0 * logits.sum()
        metrics = dict.fromkeys(decision_names("full"), torch.zeros_like(logp.detach()))
    total = total - args.entropy_coef * entropy
    reported = {"loss": total.detach(), "entropy_loss": entropy.detach()}
    return total, reported | {name: sum_of_sample_mean(x) for name, x in metrics.items()}


LOSSES = {
    "slime": "slime.backends.megatron_utils.loss",
    "miles": "miles.backends.training_utils.loss_hub.losses",
}
"""Where the frameworks have their losses and their own TIS function."""
OPEN = {"tis_clip": 1e6, "tis_clip_low": 0.0}
PLAIN = {
    **{"use_tis": False, "get_mismatch_metrics": False, "use_opsm": False, "use_kl_loss": False},
    **{"advantage_estimator": "grpo", "use_rollout_logprobs": False, "custom_pg_loss_reducer_function_path": None},
    **{"entropy_coef": 0.0},
}
"""slime's arguments under which its policy loss is PPO's clip and nothing else."""
CAPTURE = "_maybe_capture_log_probs"
"""slime's note of a step's log-probs for its dump: not of the proof's."""


def _prove_tis(
    hook: LossHook, args: Any, pg_loss: Tensor, *, train: Tensors, rollout: Tensors, loss_masks: Tensors, shares: Any
) -> None:
    """Once: slime's own truncated weights, with a cap that does not bind, are ours, token by token.

    Under context parallelism on this rank's share, ours by way of whole sequences and back: all ranks of a group come
    here together, since the masks that decide are of whole responses.
    """
    framework = _framework()
    theirs = getattr(sys.modules.get(LOSSES[framework]), "vanilla_tis_function", None)
    name = f"{LOSSES[framework]}.vanilla_tis_function"
    if theirs is None:
        return hook.prove(name, native=None, ours=torch.zeros_like, at=pg_loss.detach().double())
    gather, share = shares
    lengths, responses = [len(x) for x in train], [m.numel() for m in loss_masks]
    masks = [m.reshape(-1) for m in loss_masks]
    trained, mask = torch.cat(masks) != 0, torch.cat(share(masks)) != 0
    old, mu = torch.cat(list(train)), torch.cat(list(rollout))
    s = proof.sample_of(old, old, mu, advantages=pg_loss, mask=mask)

    def native(leaf: Tensor) -> Tensor:
        lists = {"train_log_probs": s.old.split(lengths), "rollout_log_probs": s.rollout.split(lengths)}
        made = theirs(proof.changed(args, OPEN), pg_loss=leaf, **lists, loss_masks=list(loss_masks))
        return made[0].where(mask, 0.0)

    def ours(leaf: Tensor) -> Tensor:
        mu, old = (torch.cat(gather(x.split(lengths))) for x in (s.rollout, s.old))
        packed = LogProbs.pack(mu, logp_old=old, mask=trained, segments=_segments(responses, trained))
        corrected = (Correction() & Weight(on="mismatch", cap=OPEN["tis_clip"]))(packed)
        weight = packed.unpack(corrected.weight.where(corrected.keep, 0.0)).split(responses)
        return _only(leaf, torch.cat(share(list(weight))))

    return hook.prove(name, native=native, ours=ours, at=s.advantages)


def _prove_loss(
    hook: LossHook, args: Any, batch: Mapping[str, Any], *, theirs: Any, scored: Mapping[str, Any], reducer: Any
) -> None:
    """Once: slime's own policy loss of the micro-batch is ours with its clips, on its denominators.

    The log-probs stand in for its forward pass: logits are not read again.
    """
    mask = torch.cat(list(batch["loss_masks"])) != 0
    lengths = list(batch["response_lengths"])
    columns = [torch.cat(list(x)) for x in (scored["log_probs"], batch["rollout_log_probs"], batch["advantages"])]
    logp, mu, advantages = columns
    old = torch.cat(list(batch["log_probs"])) if batch.get("log_probs") else logp
    s = proof.sample_of(logp, old, mu, advantages=advantages, mask=mask)
    lists = {"log_probs": s.old.split(lengths), "rollout_log_probs": s.rollout.split(lengths)}
    seen = {**batch, **lists, "advantages": s.advantages.split(lengths)}

    def native(leaf: Tensor) -> Tensor:
        entropy = [x.detach() for x in scored["entropy"]]
        scores = None, {"log_probs": list(leaf.split(lengths)), "entropy": entropy}
        with _standing_in(theirs, {"get_log_probs_and_entropy": lambda *_, **__: scores, CAPTURE: lambda *_: None}):
            return theirs.policy_loss_function(proof.changed(args, PLAIN), seen, leaf, reducer)[0]

    def ours(leaf: Tensor) -> Tensor:
        segments = _segments(lengths, mask)
        packed = LogProbs.pack(s.rollout, leaf, s.old, mask=mask, segments=segments)
        shares = _over_denominators(args, batch, s.advantages, segments)
        plain = proof.clipped(args.eps_clip, args.eps_clip_high, getattr(args, "eps_clip_c", None))
        return hook.plain(plain, packed, shares).loss

    here = hasattr(theirs, "policy_loss_function")
    hook.prove(f"{LOSSES['slime']}.policy_loss_function", native=native if here else None, ours=ours, at=s.logp)


@contextmanager
def _standing_in(module: Any, names: Mapping[str, Any]) -> Iterator[None]:
    """For a while, other functions under names that a module has."""
    originals = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name in originals:
        setattr(module, name, names[name])
    try:
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)


def _over_denominators(args: Any, batch: Mapping[str, Any], advantages: Tensor, segments: Segments) -> Tensor:
    """The advantages divided by slime's denominators, unless those are of the whole step."""
    if args.calculate_per_token_loss:
        return advantages
    tokens = torch.stack([torch.as_tensor(n) for n in batch["rollout_mask_sums"]]).to(advantages)
    return advantages / segments.spread(tokens.clamp(min=1))


@functools.cache
def _hook(framework: str, whole: bool = False) -> LossHook:
    """The hook of this process: gates and weights alone, or the `whole` method."""
    if framework in FRAMEWORKS:
        require(framework)
    config = replace(HookConfig.of(framework), record=None)  # OFFDRIFT_RECORD is for `record`
    if whole:
        check_served(config, has={"logp_old"}, folded=True)
        return hook_of(config, divides=False)
    only = correction_only(config, instead=f"--custom-loss-function-path {__name__}.loss")
    return hook_of(config, only=only, divides=False)


def _framework() -> str:
    """Return the framework that loaded this module. miles is a fork of slime and calls the same hooks."""
    return "miles" if "miles" in sys.modules and "slime" not in sys.modules else "slime"


def _context_parallel(
    args: Any, total: Sequence[int], response: Sequence[int]
) -> tuple[Callable[[Tensors], list[Tensor]], Callable[[Tensors], list[Tensor]]]:
    """From this rank's share of each sample to whole responses, and back."""
    if cp_size(args) == 1:
        return list, list
    if getattr(args, "qkv_format", "thd") != "thd":
        raise MethodError(f"context parallelism over --qkv-format {args.qkv_format} is not known; use thd")
    theirs = import_module(CONTEXT_PARALLEL[_framework()])

    def by(function: Callable[..., Tensor]) -> Callable[[Tensors], list[Tensor]]:
        return lambda xs: [function(x, t, r).detach() for x, t, r in zip(xs, total, response, strict=True)]

    return by(theirs.all_gather_with_cp), by(theirs.slice_log_prob_with_cp)


def _segments(lengths: Sequence[int], mask: Tensor) -> Segments:
    return Segments.from_lengths(torch.tensor(list(lengths), device=mask.device))


def _only(pg_loss: Tensor, weight: Tensor) -> Tensor:
    """The loss times its weight; exactly zero without one, whatever it was."""
    return (pg_loss * weight).where(weight > 0, 0.0)


def cp_size(args: Any) -> int:
    """Ranks among which context parallelism cuts each sequence; 1 without it."""
    return getattr(args, "context_parallel_size", 1)


def record(args: Any, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
    """slime's hook on the data of a rollout before it is trained on: records it in OFFDRIFT_RECORD.

    Of each tensor-parallel group one process writes, in the last pipeline stage.

    Raises: `EvidenceError` without log-probs of either engine; `MethodError` without OFFDRIFT_RECORD
        or under context parallelism.
    """
    from megatron.core import mpu

    if cp_size(args) > 1:
        raise MethodError("context parallelism cuts slime's log-probs: record without it")
    if mpu.get_tensor_model_parallel_rank() != 0 or not mpu.is_pipeline_last_stage():
        return
    for name, way_out in (("rollout_log_probs", WITHOUT_MU), ("log_probs", WITHOUT_OLD)):
        if not rollout_data.get(name):
            raise EvidenceError(f"slime's rollout data holds no {name}; {way_out}")
    folder = environ("RECORD")
    if not folder:
        raise MethodError("recording slime's rollouts needs OFFDRIFT_RECORD, a folder")
    _recorder(folder).add(unpacked(args, rollout_id, rollout_data))  # type: ignore[union-attr]


def unpacked(args: Any, rollout_id: int, data: Mapping[str, Any]) -> Unpacked:
    """slime's rollout data of one process, response tokens end to end."""
    from offdrift.records.batch import Unpacked

    lengths = torch.as_tensor(data["response_lengths"])

    def cat(name: str) -> Tensor | None:
        return torch.cat(list(data[name])) if data.get(name) else None

    def column(name: str) -> Tensor | None:
        return torch.as_tensor(data[name]) if data.get(name) is not None else None

    index, rewards = column("sample_indices"), column("raw_reward")
    if rewards is not None and data.get("partition") is not None:
        rewards = rewards[torch.as_tensor(data["partition"])]  # slime passes those of all processes
    responses = [t[len(t) - r :] for t, r in zip(data["tokens"], lengths.tolist(), strict=True)]
    return Unpacked(
        step=torch.tensor(rollout_id),
        logp_rollout=cat("rollout_log_probs"),
        logp_old=cat("log_probs"),
        logp_ref=cat("ref_log_probs"),
        tokens=torch.cat(responses),
        mask=cat("loss_masks"),
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        advantages=cat("advantages"),
        rewards=rewards,
        group_ids=None if index is None else index // args.n_samples_per_prompt,
        truncated=column("truncated"),
        response_lengths=lengths,
    )


_recorder = functools.cache(functools.partial(recorder_of, framework="slime"))
"""The recorder of a folder, one in a process."""
