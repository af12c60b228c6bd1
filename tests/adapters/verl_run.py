"""verl's own functions, run on one CPU: a micro-batch through `ppo_loss`, a batch through its driver."""

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from offdrift.adapters import verl as plugin
from tests.parity.peers import Batch, actor, load_verl

BYPASS = {"rollout_correction": {"bypass_mode": True}}
"""What tells the actor that old log-probs are the rollout's."""

GARBAGE = (float("nan"), 1e9, -1e9, float("inf"))


@functools.cache
def real_verl() -> SimpleNamespace:
    """verl with our policy losses and estimators registered, as its plugin loader does it."""
    verl = load_verl()
    plugin.register(verl.core_algos)
    return verl


def config(name: str, how: str = "token-mean", *, bypass: bool = False, **fields: Any) -> Any:
    """verl's actor configuration with `offdrift/<name>` (or verl's own loss) as `loss_mode`."""
    verl = real_verl()
    policy_loss = verl.OmegaConf.create({"loss_mode": name, **(BYPASS if bypass else {})})
    return actor(verl, policy_loss=policy_loss, loss_agg_mode=how, **fields)


def pushed(
    config: Any,
    batch: Batch,
    *,
    leaf: Tensor | None = None,
    weights: Tensor | None = None,
    tokens: int | None = None,
    sequences: int | None = None,
    ranks: int = 1,
    through: Any = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Loss, gradient and metrics of verl's real `ppo_loss` on one micro-batch, or of what calls it (`through`)."""
    verl, (b, t) = real_verl(), batch.mask.shape
    fields = {
        "old_log_probs": batch.old,
        "response_mask": batch.mask,
        "advantages": batch.advantages,
        "ref_log_prob": batch.ref,
        "prompts": torch.zeros(b, 1, dtype=torch.int64),
        "responses": torch.zeros(b, t, dtype=torch.int64),
        "attention_mask": torch.ones(b, 1 + t, dtype=torch.int64),
    }
    if weights is not None:
        fields["rollout_is_weights"] = weights
    data = verl.TensorDict(fields, batch_size=b)
    verl.tensordict_utils.assign_non_tensor(data, dp_size=ranks, batch_num_tokens=tokens, global_batch_size=sequences)
    leaf = batch.logp.clone().requires_grad_() if leaf is None else leaf
    # Unpadded model output: each position predicts the next token.
    flat = torch.cat([leaf, leaf.new_zeros(b, 1)], dim=1).flatten()
    through = functools.partial(verl.ppo_loss, config) if through is None else through
    loss, metrics = through({"log_probs": flat}, data)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, metrics


def proto(batch: Batch, **more: Tensor) -> Any:
    """The batch as verl's driver holds it, two sequences to a prompt."""
    tensors = {
        "old_log_probs": batch.old,
        "rollout_log_probs": batch.rollout,
        "response_mask": batch.mask.clone(),
        **more,
    }
    return real_verl().DataProto.from_dict(tensors=tensors)
