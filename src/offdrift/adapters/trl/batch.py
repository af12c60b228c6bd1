"""TRL's padded micro-batches to packed log-probs, and corrections back. Nothing here imports TRL.

A token trains if it is in the completion and no tool wrote it. One that the engine could not score
(vLLM says None, TRL makes it NaN) contributes nothing to the loss, and is counted; TRL itself takes its
ratio as 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.aggregate import AggregateName
from offdrift.batch_info import BatchInfo
from offdrift.correction import Corrected
from offdrift.logprobs import LogProbs
from offdrift.numerics import LOG_RATIO_LIMIT, at_least_float32
from offdrift.records.batch import Unpacked
from offdrift.segments import Segments

Inputs = Mapping[str, Any]
"""What TRL hands to its loss: padded [b, t] tensors by name."""

GROUP, VERSION = "offdrift_group", "offdrift_version"
REWARD, ENTROPY = "offdrift_reward", "offdrift_entropy"
"""What the trainer adds to it, one per sequence (entropy: per token)."""


@dataclass(frozen=True)
class MicroBatch:
    """A packed micro-batch: `n` trainable, scored tokens in `b` sequences."""

    logprobs: LogProbs
    advantages: Float[Tensor, " n"]
    batch_info: BatchInfo


def marked(
    output: Inputs, *, process: int, earlier: int, group: int, version: int, rewards: Tensor | None
) -> dict[str, Any]:
    """Return TRL's output for one generation with the group id, weight version and reward of each sequence added.

    Args:
        process: index of this one, which drew as many sequences as any other.
        earlier: batches of this size that all processes drew before.
        group: completions to a prompt.
        version: optimizer steps taken before.
        rewards: of all processes' sequences; with NaN, for one that no function scored, the batch has none.
    """
    b, device = len(output["completion_ids"]), output["completion_ids"].device
    places = torch.arange(process * b, (process + 1) * b, device=device)
    result = {**output, GROUP: (earlier * b + places) // group, VERSION: torch.full_like(places, version)}
    if rewards is not None and not bool(rewards.isnan().any()):
        result[REWARD] = rewards[places.to(rewards.device)].to(device)
    return result


def trainable(inputs: Inputs) -> Bool[Tensor, "b t"]:
    """Tokens of the completions that no tool wrote."""
    mask = inputs["completion_mask"].bool()
    tool = inputs.get("tool_mask")
    return mask if tool is None else mask & tool.bool()


def scored(inputs: Inputs) -> Bool[Tensor, "b t"]:
    """Trainable tokens whose log-prob the engine said."""
    mask, sampled = trainable(inputs), inputs.get("sampling_per_token_logps")
    return mask if sampled is None else mask & ~sampled.isnan()


def piece_of(
    inputs: Inputs, logp: Float[Tensor, "b t"], entropy: Float[Tensor, "b t"], *, vocab: int, version: int
) -> MicroBatch | None:
    """The micro-batch packed, at optimizer step `version`; None if it has no token that can be used.

    Without old log-probs the current ones are the old ones: TRL leaves them out where no update
    lies between generation and use. Without the engine's, the engine is taken to be the old policy.
    """
    mask = scored(inputs)
    if not bool(mask.any()):
        return None
    old = inputs.get("old_per_token_logps")
    old = logp.detach() if old is None else old
    sampled = inputs.get("sampling_per_token_logps")
    sampled = old if sampled is None else sampled
    lp = LogProbs.pack(
        sampled.to(torch.promote_types(sampled.dtype, logp.dtype)),  # vLLM's are float32
        logp,
        old,
        mask=mask,
        group_ids=inputs.get(GROUP),
    )
    if "tool_mask" in inputs:
        # A turn is a run of trainable tokens: what a tool wrote ends it.
        assert lp.kept is not None
        row, gap = lp.kept // mask.shape[1], lp.kept.diff() != 1
        cuts = ((row.diff() != 0) | gap).nonzero().squeeze(-1) + 1
        turns = Segments(torch.cat([lp.segments.cu_seqlens, cuts.to(lp.segments.cu_seqlens)]).unique())
        lp = replace(lp, segments=replace(lp.segments, turns=turns))
    advantages = inputs["advantages"]
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(mask)
    drawn, rewards = inputs.get(VERSION), inputs.get(REWARD)
    batch_info = BatchInfo(
        entropy=at_least_float32(lp.like_caller(inputs.get(ENTROPY, entropy)).detach()),
        vocab=vocab,
        rewards=None if rewards is None else at_least_float32(rewards),
        version_lag=None if drawn is None else lp.segments.spread(version - drawn),
    )
    return MicroBatch(lp, at_least_float32(lp.like_caller(advantages)), batch_info)


def corrected_inputs(inputs: Inputs, piece: MicroBatch, decided: Corrected, *, loss_type: str) -> dict[str, Any]:
    """TRL's inputs with the decisions in them.

    Every loss of TRL is linear in the size of the advantage and otherwise reads its sign alone: A w for
    kept tokens and 0 for all others is exactly a weight and a mask, with TRL's denominators untouched.
    VESPO alone puts the engine's ratio into its own weight, from `importance_sampling_ratio`, so the
    weight stands there.
    """
    changed = dict(inputs)
    lp, weight = piece.logprobs, decided.weight
    if loss_type == "vespo":
        changed["importance_sampling_ratio"] = lp.unpack(weight, fill=1.0)
        weight = torch.ones_like(weight)
    changed["advantages"] = lp.unpack((piece.advantages * weight).where(decided.keep, 0.0))
    return changed


def silenced(inputs: Inputs) -> dict[str, Any]:
    """TRL's inputs with which its policy term is 0, and its other terms are what they were."""
    return {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}


def harmless(inputs: dict[str, Any], logp: Float[Tensor, "b t"], live: Bool[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Log-probs with which 0 times TRL's ratio is 0: it exponentiates log-ratios as they are.

    Untouched at live tokens, and at others within 20 nats of the old policy. Old log-probs at tokens
    that do not train become 0 in `inputs`.

    Args:
        live: tokens that may push the policy.

    Gradient: to `logp`, except where it was replaced.
    """
    mask, old = trainable(inputs), inputs.get("old_per_token_logps")
    if old is None:
        return logp.where(mask, 0.0)
    old = old.where(mask, 0.0)
    inputs["old_per_token_logps"] = old
    near = (logp.detach() - old).abs() <= LOG_RATIO_LIMIT
    return logp.where(live | (mask & near), old)


def denominator(window: Sequence[Inputs], *, aggregate: AggregateName, horizon: int) -> float:
    """Return what these micro-batches add to the step's denominator: tokens, sequences, or sequences times horizon."""
    if aggregate == "token_mean":
        return float(torch.stack([scored(inputs).sum() for inputs in window]).sum())
    sequences = sum(len(inputs["completion_mask"]) for inputs in window)
    return float(sequences * horizon if aggregate == "fixed" else sequences)


def recorded(
    inputs: Inputs,
    logp: Float[Tensor, "b t"],
    entropy: Float[Tensor, "b t"],
    *,
    version: int,
    ends: Sequence[int],
    decode: Callable[[list[list[int]]], list[str]],
) -> Unpacked:
    """The micro-batch as a record, before it is masked or packed.

    Where TRL has no old log-probs, the current ones are recorded as the old if there are the engine's to compare them
    with. Compared with each other they would only show that a copy is equal.

    Args:
        version: optimizer steps taken before the update that uses it, which TRL numbers one more.
        ends: token ids that end a completion.
        decode: token ids of some sequences to text.
    """
    ids, present = inputs["completion_ids"], inputs["completion_mask"].bool()
    width = ids.shape[1]
    emptied = ~present.any(-1)  # what TRL does to truncated completions, if told to
    lengths = present.sum(-1).where(~emptied, width)
    last = ids.gather(1, (lengths - 1)[:, None]).squeeze(1)
    truncated = emptied | ~torch.isin(last, ids.new_tensor(list(ends)))
    inside = torch.arange(width, device=ids.device) < lengths[:, None]
    old, sampled = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
    return Unpacked(
        step=ids.new_tensor(version + 1),
        logp_rollout=sampled,
        logp_old=logp.detach() if old is None and sampled is not None else old,
        logp=logp.detach(),
        logp_ref=inputs.get("ref_per_token_logps"),
        tokens=ids,
        entropy=inputs.get(ENTROPY, entropy).detach(),
        mask=trainable(inputs),
        advantages=inputs["advantages"],
        rollout_version=inputs.get(VERSION),
        version=ids.new_tensor(version),
        rewards=inputs.get(REWARD),
        group_ids=inputs.get(GROUP),
        truncated=truncated.long(),
        response_lengths=lengths,
        prompts=tuple(decode(_lists(inputs["prompt_ids"], inputs["prompt_mask"].bool()))),
        completions=tuple(decode(_lists(ids, inside))),
    )


def _lists(ids: Int[Tensor, "b t"], present: Bool[Tensor, "b t"]) -> list[list[int]]:
    return [row[here].tolist() for row, here in zip(ids.cpu(), present.cpu(), strict=True)]
