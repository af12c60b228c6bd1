"""prime-rl: any method that decides by token or sequence, as its custom loss.

    [trainer.loss]
    type = "custom"
    import_path = "offdrift.adapters.contrib.prime_rl.loss"
    kwargs = { method = "dppo_tv" }

prime-rl calls the function once per sequence, adds the results up, and divides by the number of loss tokens of the
whole step over all ranks: a token mean, whatever aggregate a method was published with. It hands over no log-probs of
an old policy. With `old="current"` the policy at this, the only update of a batch stands for it: staleness is zero.

Reference: prime-rl 0.8.0 (559b447), `trainer/rl/loss.py`: `LossInputs`, `LossOutputs`, `compute_loss`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from offdrift.adapters import proof
from offdrift.adapters.arguments import refuse_unknown
from offdrift.adapters.frameworks import require
from offdrift.adapters.hooks import HookConfig, LossHook, check_served, decision_names, decisions, hook_of
from offdrift.errors import MethodError, check_choice
from offdrift.logprobs import LogProbs

HINTS = {
    "logp_old": 'choose a method on="full", or give old="current" (the policy at this update '
    "stands for the old one, so that staleness is zero)"
}


KNOWN = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "loss_weights")
"""Fields of prime-rl's `LossInputs` that are used; `ref_logprobs` by methods with a reference."""


def loss(
    inputs: Any,
    *,
    method: str | None = None,
    settings: Mapping[str, Any] | None = None,
    old: str = "absent",
    record: str | None = None,
    on_idle: str | None = None,
) -> Any:
    """prime-rl's custom loss of one sequence: the sum of the method's token losses.

    Metrics are per token, so that prime-rl's own statistics run over all tokens of the step:
    `offdrift/full/k3`, `offdrift/weight`, `offdrift/rejected`, `offdrift/limited`.

    Args: as `HookConfig.of`, and
        inputs: prime-rl's `LossInputs`. `loss_weights` multiply the token losses.
        old: "absent", or "current", which lets the policy before this update stand for the old one.

    Returns: prime-rl's `LossOutputs`.

    Raises: `EvidenceError`, `MethodError`: prime-rl does not hand over what the method needs.
        `BadValueError`: a loss token's log-prob is NaN or positive.
        `FrameworkError`: prime-rl hands over a field that this hook does not know, or once, has another loss.
    """
    # prime-rl has loaded this module by now; nobody else needs it to import ours.
    from prime_rl.trainer.rl.loss import LossOutputs

    fields = getattr(inputs, "__dict__", {})
    refuse_unknown("prime-rl", "its custom loss", fields, known=KNOWN)
    hook = _hook(method, json.dumps(settings, sort_keys=True), old, record, on_idle)
    mask: Tensor = inputs.loss_mask
    logp: Tensor = inputs.trainer_logprobs
    if not bool(mask.any()):
        # The sum of nothing keeps the graph, and no masked NaN gets near it.
        nothing = logp[mask]
        return LossOutputs(loss=nothing.sum(), metrics=dict.fromkeys(decision_names("full"), nothing.detach()))
    advantages, weights = inputs.advantages, inputs.loss_weights
    if weights is not None:
        if not hook.proportional and not bool((weights[mask] == 1).all()):
            raise MethodError(
                "prime-rl gives weights per token (rl_weights), and the loss of this method "
                f"({hook.method.describe()}) is not proportional to the advantage; choose one that is"
            )
        advantages = inputs.advantages * weights
    ref: Tensor | None = inputs.ref_logprobs if hook.method.needs_reference else None
    logprobs = LogProbs.pack(
        inputs.inference_logprobs[None],
        logp[None],
        logp.detach()[None] if old == "current" else None,
        logp_ref=ref[None] if ref is not None else None,
        mask=mask[None],
    )
    result = hook.loss(logprobs, advantages[None])
    _prove(hook, inputs)
    return LossOutputs(loss=result.loss, metrics=decisions(logprobs, result.corrected, on="full"))


OPEN = {"ipo_threshold": 2.0, "eps": 1e6, "adv_tau": 1.0, "kl_tau": 0.0}
OPEN |= {"max_importance_ratio": 1e30, "score_centering": False}
"""prime-rl's IPO loss with its gate open and without its KL, its cap and its centering: the importance ratio times the
advantage. 0.8.0 reads `eps`, and `kl_tau`; since its losses are classes it has no KL and a cap."""


def _prove(hook: LossHook, inputs: Any) -> None:
    """Once: prime-rl's own loss of a sequence is ours without a gate, weights of its tokens included."""
    if hook.proved:
        return
    # Not earlier, as above.
    from prime_rl.trainer.rl import loss as theirs

    mask, rollout, weights = inputs.loss_mask, inputs.inference_logprobs, inputs.loss_weights
    sample = proof.sample_of(inputs.trainer_logprobs, rollout, rollout, advantages=inputs.advantages, mask=mask)
    weights = None if weights is None else weights.detach().double().where(mask, 0.0)
    plain = proof.clipped(1.0, 1e6, on="full")

    # Functions became classes in September 2026.
    name = "IPOLoss" if hasattr(theirs, "IPOLoss") else "ipo_loss_fn"
    here = hasattr(theirs, name)

    def native(leaf: Tensor) -> Tensor:
        columns = {"trainer_logprobs": leaf, "inference_logprobs": sample.rollout, "advantages": sample.advantages}
        columns |= {"ref_logprobs": None, "loss_mask": mask, "loss_weights": weights}
        inputs, config = theirs.LossInputs(**columns), SimpleNamespace(**OPEN)
        return (
            theirs.ipo_loss_fn(inputs, config) if name == "ipo_loss_fn" else theirs.IPOLoss(config).loss(inputs)
        ).loss

    def ours(leaf: Tensor) -> Tensor:
        packed = LogProbs.pack(sample.rollout[None], leaf[None], None, mask=mask[None])
        advantages = sample.advantages if weights is None else sample.advantages * weights
        return hook.plain(plain, packed, advantages[None]).loss

    hook.prove(f"prime_rl.trainer.rl.loss.{name}", native=native if here else None, ours=ours, at=sample.logp)


@functools.cache
def _hook(method: str | None, settings: str, old: str, record: str | None, on_idle: str | None) -> LossHook:
    """The hook of this process; settings are JSON, so that they can be hashed."""
    require("prime-rl")
    check_choice("old", old, ("absent", "current"))
    config = HookConfig.of("prime-rl", method, json.loads(settings), record=record, on_idle=on_idle)
    check_served(config, has={"logp_ref"} | ({"logp_old"} if old == "current" else set()), hints=HINTS)
    return hook_of(config, divides=False)
