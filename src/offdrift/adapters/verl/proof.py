"""verl's own plain loss and its own weights beside ours, once per process.

loss     `compute_policy_loss_vanilla` is `Clipped` with verl's clips, over verl's counts, with the driver's weights
driver   its token weights without a cap that binds are `Weight` on the mismatch, and every token is kept
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from offdrift.adapters import proof
from offdrift.adapters.verl.call import Call
from offdrift.correction import Correction, Weight
from offdrift.logprobs import LogProbs
from offdrift.loss import PolicyLoss
from offdrift.methods import Method

LOG = logging.getLogger("offdrift.verl")
CORE = "verl.trainer.ppo.core_algos"
VANILLA = "compute_policy_loss_vanilla"
OPEN = 1e6
"""A cap that no weight of a `proof.Sample` reaches."""

PROVED: set[str] = set()
"""What was held against verl's own in this process: aggregates of the loss, and "driver"."""


def prove_loss(call: Call, loss_of: Callable[[Method, Call], PolicyLoss]) -> None:
    """verl's own PPO loss is ours with its clips, its counts and the driver's weights; once for each aggregate.

    Raises: `FrameworkError` naming verl's function, if it is another one than is known.
    """
    if call.how in PROVED:
        return
    theirs, config = getattr(sys.modules.get(CORE), VANILLA, None), call.config
    if call.counts.get("global_batch_size") is None:
        # Without counts verl divides by the sequences that have a token, and we by all: the proof has none without.
        call = _rows(call, (call.mask != 0).any(1))
    sample = proof.sample_of(call.logp, call.old, call.old, advantages=call.advantages, mask=call.mask != 0)
    seen = replace(call, old=sample.old, advantages=sample.advantages)
    if call.weights is not None:
        seen = replace(seen, weights=call.weights.detach().double().where(call.mask != 0, 0.0))

    def native(leaf: Tensor) -> Tensor:
        inputs = (seen.old, leaf, seen.advantages, seen.mask, seen.how, config, seen.weights)
        return theirs(*inputs)[0]  # type: ignore[misc]

    def ours(leaf: Tensor) -> Tensor:
        low, high = (getattr(config, f"clip_ratio_{end}", None) for end in ("low", "high"))
        ends = [config.clip_ratio if x is None else x for x in (low, high)]
        plain = proof.clipped(*ends, dual=config.get("clip_ratio_c", 3.0))
        return loss_of(plain, replace(seen, logp=leaf)).loss

    name = f"{CORE}.{VANILLA} with loss_agg_mode={call.how!r}"
    here = theirs is not None and config is not None
    proof.prove(LOG, "verl", name, native=native if here else None, ours=ours, at=sample.logp)
    PROVED.add(call.how)


def _rows(call: Call, index: Tensor) -> Call:
    """Some of the sequences."""
    weights = None if call.weights is None else call.weights[index]
    fields = {name: getattr(call, name)[index] for name in ("old", "logp", "advantages", "mask")}
    return replace(call, **fields, weights=weights)


def prove_driver(theirs: Callable[..., Any] | None, batch: Any) -> None:
    """verl's own weights and mask of a batch are ours, where no cap binds and no gate rejects.

    Args:
        theirs: `compute_rollout_correction_and_add_to_batch`, before it was replaced.
        batch: verl's `DataProto`, of which a copy is used.

    Raises: `FrameworkError` naming verl's function.
    """
    if "driver" in PROVED:
        return
    tensors = batch.batch
    mask, old = tensors["response_mask"], tensors["old_log_probs"]
    sample = proof.sample_of(old, old, tensors["rollout_log_probs"], advantages=old, mask=mask != 0)

    def native(leaf: Tensor) -> Tensor:
        fields = {"old_log_probs": leaf.detach(), "rollout_log_probs": sample.rollout, "response_mask": mask.clone()}
        block = {"rollout_is": "token", "rollout_is_threshold": OPEN}
        made, _ = theirs(type(batch).from_dict(tensors=fields), block)  # type: ignore[misc]
        return made.batch["rollout_is_weights"] * made.batch["response_mask"]

    def ours(leaf: Tensor) -> Tensor:
        packed = LogProbs.pack(sample.rollout, None, leaf.detach(), mask=mask)
        corrected = (Correction() & Weight(on="mismatch", cap=OPEN))(packed)
        return packed.unpack(corrected.weight.where(corrected.keep, 0.0))

    name = "verl.trainer.ppo.rollout_corr_helper.compute_rollout_correction_and_add_to_batch"
    proof.prove(LOG, "verl", name, native=native if theirs is not None else None, ours=ours, at=sample.logp)
    PROVED.add("driver")
