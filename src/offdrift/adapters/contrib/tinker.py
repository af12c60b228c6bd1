"""tinker and tinker-cookbook: any method as a pure function for `forward_backward_custom`.

    from offdrift.adapters.contrib.tinker import loss_of

    result = training_client.forward_backward_custom(data, loss_of("ipo")).result()

The data are those that tinker-cookbook builds for reinforcement learning: each datum holds `target_tokens`, the
sampler's `logprobs`, `advantages` and `mask`. One call is one step: methods that must see a step
whole are served, denominators are the call's own, and the loss is the method's aggregate, where tinker's losses are
sums. The function keeps nothing and imports nothing of tinker.

Reference: tinker 0.38.0, `lib/public_interfaces/training_client.py`: `TrainingClient._compute_custom_loss`;
tinker-cookbook 0.6.1, `rl/data_processing.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from offdrift.adapters.base import PREFIX, environ_metrics
from offdrift.adapters.hooks import HookConfig, check_served, require_logprobs
from offdrift.adapters.proof import prove
from offdrift.adapters.selection import Choice, parse_choice, select
from offdrift.batch_info import BatchInfo
from offdrift.errors import EvidenceError, MethodError, ShapeError, check_choice
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.segments import Segments
from offdrift.stats import summarize

Old = Literal["absent", "current"]
CustomLoss = Callable[[Sequence[Any], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]
"""What `forward_backward_custom` takes: of the data and the log-probs `[t]` of each datum, a loss and metrics."""
LOG = logging.getLogger("offdrift.tinker")
OWN = "the losses that tinker's server has (cross_entropy, importance_sampling, ppo, cispo)"
HINTS = {
    "logp_old": 'choose a method on="full", or give old="current" (the policy of this call stands for the old one)'
}


def loss_of(
    method: str | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    old: Old = "absent",
    horizon: int | None = None,
    metrics: Choice | None = None,
) -> CustomLoss:
    """The method as a loss for `forward_backward_custom`.

    Gradient: to the log-probs; tinker sends it to its server as weights.

    Args: as `HookConfig.of`, and
        old: "absent", or "current", which lets the policy of the call stand for the old one: right for the only update
            of a batch, where the two are the same.
        horizon: tokens per sequence, for aggregate="fixed".

    Returns: a function of data and log-probs; its metrics are the chosen ones, behind "offdrift/".

    Raises: `EvidenceError`, `MethodError`: tinker does not hand over what the method needs, or, when called, a datum
        holds none of the sampler's log-probs. `BadValueError`: a log-prob is NaN or positive.
    """
    check_choice("old", old, get_args(Old))
    config = HookConfig.of("tinker", method, settings, horizon=horizon)
    row = config.row
    check_served(config, has={"logp_old"} if old == "current" else set(), hints=HINTS, whole=True)
    if any(hasattr(part, "next") for part in row.parts):
        raise MethodError("the method adapts from step to step, and this function keeps nothing; choose another")
    if row.aggregate == "fixed" and not horizon:
        raise MethodError('aggregate="fixed" divides by tokens per sequence: give horizon= (the longest response)')
    choice = environ_metrics() if metrics is None else parse_choice(metrics)
    said: list[bool] = []

    def loss(data: Sequence[Any], logprobs_list: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        lengths = [len(x) for x in logprobs_list]
        logp = torch.cat(list(logprobs_list))
        rollout, advantages = (_column(data, lengths, name) for name in ("logprobs", "advantages"))
        mask = _column(data, lengths, "mask") != 0
        if not bool(mask.any()):
            return logp.where(torch.zeros_like(mask), 0.0).sum(), {}
        rollout = require_logprobs(rollout, mask, "logprobs", "sample with tinker, which returns them", beside=logp)
        segments = Segments.from_lengths(torch.tensor(lengths))
        anchor = logp.detach() if old == "current" else None
        packed = LogProbs.pack(rollout, logp, anchor, mask=mask, segments=segments)
        if not said:
            said.append(True)
            prove(LOG, "tinker", OWN, native=None, ours=torch.sum, at=logp.detach())
        token_advantages = packed.like_caller(advantages)
        result = policy_loss(packed, row, token_advantages, BatchInfo(observed="this_batch"), horizon=horizon)
        numbers = select(summarize(result.stats), choice)
        return result.loss, {f"{PREFIX}{name}": float(x) for name, x in numbers.items()}

    return loss


def _column(data: Sequence[Any], lengths: Sequence[int], name: str) -> Tensor:
    """A field of all data, end to end."""
    missing = [i for i, datum in enumerate(data) if name not in datum.loss_fn_inputs]
    if missing:
        names = ", ".join(data[missing[0]].loss_fn_inputs)
        raise EvidenceError(f"datum {missing[0]} holds {names}, but no {name}; build it as tinker-cookbook's rl does")
    parts = [datum.loss_fn_inputs[name].to_torch() for datum in data]
    if [len(x) for x in parts] != list(lengths):
        raise ShapeError(f"{name} of the data have lengths {[len(x) for x in parts][:8]}, log-probs {lengths[:8]}")
    return torch.cat(parts)
