"""`StepPolicy`: whether an optimizer may step on a batch that has no gradient, or little of one.

A gate that rejects every sequence, or groups whose rewards are all equal, leave a gradient of exactly 0. Optimizers
with momentum step all the same: AdamW by its mean of earlier gradients, Muon at full size whatever its mean has shrunk
to, and both by their weight decay. A policy says what happens instead; `guard` installs it in an optimizer that
somebody else's training loop calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from offdrift.errors import BadValueError

EmptyStep = Literal["step", "skip", "decay", "clear"]
"""At a step whose whole gradient is 0.

step: the optimizer's own, by momentum and weight decay. skip: weights and optimizer stay as they are. decay: weights
stay, means of gradients shrink as at a gradient of 0. clear: weights stay, means of gradients become 0.
"""
MOMENTA = {"exp_avg": "betas", "momentum_buffer": "momentum"}
"""Means of gradients in the states of torch's optimizers, and the setting that says how fast they decay."""


@dataclass(frozen=True)
class StepPolicy:
    """Policy of an optimizer at a step with no gradient, and with few accepted sequences.

        lr of the step = lr min(1, acceptance / min_acceptance)

    Means of squared gradients are left as they are at empty steps, also by `decay` and `clear`: they scale steps and
    have no direction, and one that had decayed over many empty steps would make the next step too large.

    Gradient: none.

    Raises: `BadValueError` for an unknown `empty`, or `min_acceptance` outside [0, 1].

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> StepPolicy("decay").settle(optimizer)
        >>> optimizer.state[weight]["momentum_buffer"]
        tensor([0.9000, 0.9000])
        >>> StepPolicy(min_acceptance=0.5).scale(0.125)
        0.25

    Reference: this library, docs/empty-batches.md.
    """

    empty: EmptyStep = "skip"
    min_acceptance: float = 0.0
    """Share of accepted sequences below which the step shrinks in proportion; 0: never."""

    def __post_init__(self) -> None:
        if self.empty not in ("step", "skip", "decay", "clear"):
            raise BadValueError(f'empty = {self.empty!r}; expected "step", "skip", "decay" or "clear"')
        if not 0 <= self.min_acceptance <= 1:
            raise BadValueError(f"min_acceptance = {self.min_acceptance}; expected a share from 0 to 1")

    def scale(self, acceptance: float) -> float:
        """Factor of a step's learning rate at a share of accepted sequences, from 0 to 1."""
        if self.min_acceptance == 0:
            return 1.0
        return min(1.0, acceptance / self.min_acceptance)

    @torch.no_grad()
    def settle(self, optimizer: Any) -> None:
        """Decay or clear the optimizer's means of gradients after an empty step; nothing for other policies.

        Args:
            optimizer: of torch, or one that wraps such an optimizer's `state` and `param_groups`.

        Raises: `BadValueError` if the optimizer keeps a state in which no mean of gradients is known.
        """
        if self.empty not in ("decay", "clear"):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                means = {name: state[name] for name in MOMENTA if isinstance(state.get(name), Tensor)}
                if not means and any(isinstance(x, Tensor) and x.numel() > 1 for x in state.values()):
                    raise BadValueError(
                        f"the state of {type(optimizer).__name__} holds {', '.join(map(str, state))}; expected "
                        f'{" or ".join(MOMENTA)}, so that its mean of gradients can be found: use empty="skip"'
                    )
                for name, mean in means.items():
                    mean.mul_(0.0 if self.empty == "clear" else _decay(group, MOMENTA[name]))


def _decay(group: dict[str, Any], setting: str) -> float:
    """The factor of a mean of gradients per step."""
    value = group[setting]
    return float(value[0] if isinstance(value, tuple | list) else value)


@dataclass
class StepGuard:
    """Steps that a guarded optimizer was asked for; `remove()` takes the guard off."""

    policy: StepPolicy
    asked: int = 0
    """Calls of `optimizer.step()`."""
    empty: int = 0
    """Of them, with a gradient of 0."""
    scale: float = 1.0
    """Factor of the last step's learning rate."""
    handles: list[Any] = field(default_factory=list, repr=False)

    def remove(self) -> None:
        """Let the optimizer step as before."""
        while self.handles:
            self.handles.pop().remove()


def guard(
    optimizer: Any,
    policy: StepPolicy | None = None,
    *,
    acceptance: Callable[[], float] | None = None,
    group: Any = None,
) -> StepGuard:
    """Apply a policy to an optimizer whose `step()` is called elsewhere, as in TRL's and verl's loops.

    Hooks of `torch.optim.Optimizer` run before and after each step. An empty one loses its gradients (`None` in place
    of 0), and parameters without a gradient are left alone by every optimizer of torch, with their states and their
    weight decay. With several processes a step is empty where the gradients of all are 0.

    Args:
        optimizer: of torch; wrappers such as accelerate's are looked through.
        policy: `StepPolicy()`, which skips empty steps, if absent.
        acceptance: share of accepted sequences of the step that is about to be taken, the same in all processes.
        group: processes that step together; all if absent.

    Returns: counts of steps, with `remove()`.

    Raises: `BadValueError` if no optimizer of torch is found, or `min_acceptance` is set and `acceptance` is not.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = torch.optim.AdamW([weight], lr=0.1)
        >>> steps = guard(optimizer)
        >>> for gradient in (1.0, 0.0, 0.0):
        ...     weight.grad = torch.tensor([gradient])
        ...     optimizer.step()
        >>> round(weight.item(), 3), steps.asked, steps.empty
        (-0.1, 3, 2)

    Reference: this library, docs/empty-batches.md.
    """
    policy = policy or StepPolicy()
    while not isinstance(optimizer, Optimizer) or type(optimizer).__module__.startswith("accelerate."):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise BadValueError(f"{type(optimizer).__name__} is not an optimizer of torch and wraps none")
        optimizer = inner
    if policy.min_acceptance > 0 and acceptance is None:
        raise BadValueError("min_acceptance needs acceptance=, a function that gives the step's share of sequences")
    steps, rates = StepGuard(policy), []

    def before(optimizer: Any, *_: Any) -> None:
        steps.asked += 1
        steps.scale = 1.0
        if not _has_gradient(optimizer, group):
            steps.empty += 1
            if policy.empty != "step":
                policy.settle(optimizer)
                optimizer.zero_grad(set_to_none=True)
        elif acceptance is not None:
            steps.scale = policy.scale(acceptance())
        rates[:] = [g["lr"] for g in optimizer.param_groups]
        for g in optimizer.param_groups if steps.scale < 1 else ():
            g["lr"] = g["lr"] * steps.scale

    def after(optimizer: Any, *_: Any) -> None:
        for g, rate in zip(optimizer.param_groups, rates, strict=True):
            g["lr"] = rate

    steps.handles += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    return steps


@torch.no_grad()
def _has_gradient(optimizer: Any, group: Any) -> bool:
    """Whether any gradient of any process is not 0; NaN counts as not 0. One transfer to the host."""
    local = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    local = [x.to_local() if hasattr(x, "to_local") else x for x in local]
    device = local[0].device if local else torch.device("cpu")
    present = torch.zeros((), device=device)
    for gradient in local:
        present = torch.maximum(present, gradient.ne(0).any().to(present))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(present, torch.distributed.ReduceOp.MAX, group=group)
    return bool(present)
