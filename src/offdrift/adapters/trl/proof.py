"""A trainer's loss, proved once per run to take corrections as this adapter hands them over.

A weight and a mask are put into the advantages, which is right if and only if the loss is linear in their size. On
the log-probs of one micro-batch, without the model:

    open     with every weight 1 and every gate open, the loss and its gradient are the trainer's own
    linear   L(u A) + L((1 - u) A) - L(0) = L(A) for shares 0 < u < 1 that differ from token to token
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.adapters.trl import batch as trl_batch
from offdrift.adapters.trl.batch import Inputs, MicroBatch
from offdrift.correction import Corrected
from offdrift.errors import FrameworkError, OffdriftError
from offdrift.numerics import at_least_float32

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Of the sum of absolute gradients (for the loss) and of the largest (for a gradient): rounding of sums."""
HOME = "trl.trainer.grpo_trainer"
"""Where the losses are that this adapter knows."""
REPLACED = (
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
    "_generate_and_score_completions",
    "_calculate_rewards",
)
"""Methods of a `GRPOTrainer` that the mixin overrides."""
LOSSES = ("_compute_loss", "compute_loss")
"""Where a trainer has its loss: TRL's, which transformers' calls."""

Loss = Callable[[dict[str, Any], Tensor], Tensor]
"""The trainer's own loss of a micro-batch, given its inputs and the log-probs of its forward pass."""


def refuse_class(trainer: type, mixin: type) -> None:
    """Refuse a trainer that has nothing to override, or a loss of its own.

    Raises: `FrameworkError` naming the class and what to do.
    """
    behind = trainer.__mro__[trainer.__mro__.index(mixin) + 1 :]
    owners = {name: next((c for c in behind if name in vars(c)), None) for name in (*REPLACED, *LOSSES)}
    absent = [name for name in REPLACED if owners[name] is None]
    if absent:
        theirs = next((c for c in behind if c is not object), object)
        raise FrameworkError(
            f"{theirs.__module__}.{theirs.__qualname__} has no {', '.join(absent)}: it is no GRPOTrainer of TRL, and "
            "nothing would be corrected. Train with TRL's GRPOTrainer (num_iterations and steps_per_generation make "
            "it off-policy), or keep this trainer and write its tokens with offdrift.record for `offdrift audit`"
        )
    for name in LOSSES:
        owner = owners[name]
        home = getattr(vars(owner)[name], "__module__", "") if owner is not None else ""
        if owner is not None and home != HOME:
            unsloth = "Unsloth replaces TRL's loss, and " * ("unsloth" in f"{home} {owner.__module__}".lower())
            raise FrameworkError(
                f"{unsloth}{owner.__module__}.{owner.__qualname__}.{name} is a loss that this adapter does not know, "
                "so that a correction could mean something else in it. Use TRL's GRPOTrainer; a term of your own that "
                f'calls super() goes before the mixin: class Mine(Yours, {mixin.__name__}, GRPOTrainer), or mode="loss"'
                " with a method that has it"
            )


def bypassed(trainer: type, mixin: type) -> FrameworkError:
    """The error of a trainer whose loss was computed without a call of the mixin's, naming whose it is."""
    before = trainer.__mro__[: trainer.__mro__.index(mixin)]
    named = (f"{c.__module__}.{c.__qualname__}.{name}" for c in before for name in LOSSES if name in vars(c))
    theirs = next(named, f"{trainer.__module__}.{trainer.__qualname__}")
    return FrameworkError(
        f"{theirs} computes a loss that this adapter does not know and never calls super(): nothing would be "
        f"corrected, measured or recorded. Call super()._compute_loss and add to it, or leave {mixin.__name__} out and "
        "write the tokens with offdrift.record for `offdrift audit`"
    )


def problem_of(
    loss: Loss,
    inputs: Inputs,
    logp: Float[Tensor, "b t"],
    piece_of: Callable[[dict[str, Any], Tensor], MicroBatch | None],
    *,
    loss_type: str,
    opened: bool,
) -> str:
    """Describe a part of the trainer's loss that the adapter would miss or count wrongly; "" if there is none.

    Advantages that are 0 become 1 and -1 in turn, so that a first batch without any proves something.

    Args:
        loss: called three to five times; what it writes down must be thrown away.
        piece_of: the micro-batch packed, from its inputs and log-probs.
        opened: whether corrections are put into this loss at all, rather than taking its place.
    """
    given, leaf = _sane(inputs, logp)
    u = torch.linspace(0.1, 0.9, leaf.numel(), dtype=leaf.dtype, device=leaf.device).view_as(leaf)
    advantages = given["advantages"]
    by_token = (advantages if advantages.ndim == 2 else advantages[:, None]).expand_as(leaf)
    try:
        own = _with_gradient(loss, given, leaf)
        if opened:
            found = _with_gradient(lambda x, at: loss(*_open(x, at, piece_of, loss_type)), given, leaf)
            if not _same(found, own):
                return f"with every weight 1 and every gate open its loss is {found[0]:.6g}, and by itself {own[0]:.6g}"
        parts = [_with_gradient(loss, {**given, "advantages": a}, leaf) for a in (u * by_token, (1 - u) * by_token)]
        nothing = _with_gradient(loss, {**given, "advantages": torch.zeros_like(by_token)}, leaf)
    except OffdriftError:
        raise
    except Exception as error:
        return f"it ends with {type(error).__name__}: {str(error)[:200]}"
    joined = tuple(a + b - n for a, b, n in zip(*parts, nothing, strict=True))
    if not _same(joined, own):
        return f"it is not linear in the advantages (two parts of {joined[0]:.6g} for {own[0]:.6g})"
    return ""


def _sane(inputs: Inputs, logp: Tensor) -> tuple[dict[str, Any], Tensor]:
    """The inputs with advantages everywhere and every token scored, and log-probs near the old policy's."""
    given = dict(inputs)
    advantages = at_least_float32(given["advantages"])
    signs = torch.ones_like(advantages)
    signs[1::2] = -1
    given["advantages"] = advantages.where(advantages != 0, signs)
    if given.get("old_per_token_logps") is None:
        given["old_per_token_logps"] = logp.detach()
    given["old_per_token_logps"] = at_least_float32(given["old_per_token_logps"])
    leaf = trl_batch.harmless(given, at_least_float32(logp.detach()), torch.zeros_like(trl_batch.trainable(given)))
    if given.get("sampling_per_token_logps") is not None:
        sampled = given["sampling_per_token_logps"]
        given["sampling_per_token_logps"] = sampled.where(~sampled.isnan(), given["old_per_token_logps"].to(sampled))
    if given.get("importance_sampling_ratio") is not None:
        given["importance_sampling_ratio"] = torch.ones_like(given["importance_sampling_ratio"])
    return given, leaf.detach()


def _open(given: dict[str, Any], logp: Tensor, piece_of: Any, loss_type: str) -> tuple[dict[str, Any], Tensor]:
    """Return the inputs that the adapter passes to the loss when every gate is open and every weight is 1."""
    piece = piece_of(given, logp)
    if piece is None:
        nowhere = torch.zeros_like(trl_batch.trainable(given))
        changed = trl_batch.silenced(given)
        return changed, trl_batch.harmless(changed, logp, nowhere)
    every = torch.ones_like(piece.advantages, dtype=torch.bool)
    decided = Corrected(every, torch.ones_like(piece.advantages), ~every, {})
    changed = trl_batch.corrected_inputs(given, piece, decided, loss_type=loss_type)
    return changed, trl_batch.harmless(changed, logp, piece.logprobs.unpack(every))


def _with_gradient(loss: Loss, given: dict[str, Any], logp: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logp.clone().requires_grad_()
    with torch.enable_grad():
        value = loss(dict(given), leaf)
        (gradient,) = torch.autograd.grad(value, leaf, allow_unused=True)
    return value.detach(), torch.zeros_like(leaf) if gradient is None else gradient


def _same(found: tuple[Tensor, ...], own: tuple[Tensor, ...]) -> bool:
    (loss, gradient), (own_loss, own_gradient) = found, own
    if gradient.shape != own_gradient.shape or not bool(own_gradient.isfinite().all()):
        return gradient.shape == own_gradient.shape  # a loss that is broken by itself proves nothing
    part, sizes = TOLERANCE[own_gradient.dtype], own_gradient.abs()
    near = bool(((gradient - own_gradient).abs() <= part * sizes.max()).all())
    return near and bool((loss - own_loss).abs() <= part * (sizes.sum() + own_loss.abs()))
