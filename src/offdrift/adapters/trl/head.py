"""Exact divergences where TRL's fused head scores: from hidden states and heads, never from logits.

    add_fused_lm_head(model)                                             # TRL's, of both models
    add_fused_lm_head(reference)
    add_divergences(model, reference, into=found.append)
    model(**inputs, labels=labels, fused_lm_head=True)                   # found has those of its tokens

TRL's head gives the log-prob of each label and throws the rest away. What it reads is enough for both whole
distributions, a block of the vocabulary at a time (`divergence.hidden`).

Shape suffixes: n scored tokens, v vocabulary, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from offdrift.divergence.exact import ExactDivergences
from offdrift.divergence.hidden import Head, hidden_divergences
from offdrift.engines.output_head import head_of
from offdrift.errors import FrameworkError

Into = Callable[[ExactDivergences], Any]


def add_divergences(
    model: nn.Module,
    reference: nn.Module,
    into: Into,
    *,
    temperature: float = 1.0,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    when: Callable[[], bool] = torch.is_grad_enabled,
) -> None:
    """Let every scoring pass of a model with TRL's fused head also say how far it is from a reference, exactly.

        KL(mu || pi), KL(pi || mu), TV, chi2, entropies, log-probs of the labels        mu the reference, pi the model

    A pass `model(..., labels=labels, fused_lm_head=True)` runs the reference on the same inputs, without gradient, and
    hands `into` one number of each kind for every scored token, in the order of the labels. The model's own outputs and
    gradients are the same as before. Memory as `hidden_divergences`: nothing of size [tokens, vocabulary].

    Args:
        model: a causal language model after `add_fused_lm_head`, before PEFT, FSDP or DDP wrap it, as TRL's.
        reference: another one over the same vocabulary; or the model itself, with `within`.
        into: called once a pass with divergences on the model's device. Gradient: none, they are evidence.
        temperature: what TRL divides logits by (`GRPOConfig.temperature`), of both.
        within: entered around the reference's pass, such as a PEFT model's `disable_adapter`; it may not change the
            weights of the head in place, which TRL leaves without an adapter.
        when: asked before every scoring pass; absent: the passes that train.

    Raises: `FrameworkError` for a model without TRL's fused head, or whose head is not whole in one process;
        `EngineError` for one whose logits its configuration does not explain.

    Reference: Li et al., Trust Region Masking, arXiv:2512.23075v5, eq. 23 and Definition 2.2.
    """
    for name, part in (("model", model), ("reference", reference)):
        if "forward" not in vars(part):
            raise FrameworkError(
                f"{name} ({type(part).__name__}) has no fused head: call TRL's add_fused_lm_head on it first (TRL 1.16 "
                "has it, and its trainers call it themselves)"
            )
    score, score_reference = model.forward, reference.forward
    heads = head_of(model), head_of(reference)  # what their configurations mean; weights are looked up at every pass

    def forward(*arguments: Any, fused_lm_head: bool = False, **named: Any) -> Any:
        if not (fused_lm_head and when()):
            return score(*arguments, **({"fused_lm_head": True} if fused_lm_head else {}), **named)
        states, states_of_reference = _States(model), _States(reference)
        with states:
            outputs = score(*arguments, fused_lm_head=True, **named)
        head, labels = _now(heads[0], model), _labels(**named)
        with torch.no_grad(), within(), states_of_reference:
            score_reference(*arguments, fused_lm_head=True, **named)
            into(
                hidden_divergences(
                    states_of_reference.of(labels != -100),
                    _now(heads[1], reference),
                    states.of(labels != -100),
                    head,
                    tokens=labels[labels != -100],
                    temperature_rollout=temperature,
                    temperature=temperature,
                )
            )
        return outputs

    model.forward = forward


class ReferenceDistance:
    """Exact distance of a TRL trainer's policy from its reference, over the passes that train.

    Args:
        trainer: after its own `__init__`: with a `ref_model` (`beta` above 0), or with a PEFT model, whose reference is
            the model with its adapters off.

    Raises: `FrameworkError` where there is neither, and as `add_divergences`.
    """

    def __init__(self, trainer: Any) -> None:
        peft, reference = hasattr(trainer.model, "disable_adapter"), getattr(trainer, "ref_model", None)
        if reference is None and not peft:
            raise FrameworkError("exact_reference needs a reference policy: set beta above 0, or give a peft_config")
        model = trainer.model.get_base_model() if peft else trainer.model
        reference = model if reference is None else trainer.accelerator.unwrap_model(reference)
        within = trainer.model.disable_adapter if reference is model else nullcontext
        add_divergences(model, reference, self.add, temperature=trainer.temperature, within=within)
        self._parts: list[Tensor] = []

    def add(self, found: ExactDivergences) -> None:
        """Count the tokens of a pass."""
        if len(kl := found.kl_current_rollout):
            sums = [kl.sum(), found.tv.sum(), kl.new_tensor(float(len(kl))), kl.max()]
            self._parts.append(torch.stack(sums).double())

    def row(self, everyone: Callable[[list[float]], list[list[float]]]) -> dict[str, float]:
        """Metrics of the step, over all processes; {} where nothing was scored."""
        passes, self._parts = self._parts, []
        sums = torch.stack(passes) if passes else torch.zeros(1, 4)
        kl, tv, n, largest = zip(*everyone([*sums[:, :3].sum(0).tolist(), float(sums[:, 3].max())]), strict=True)
        if not sum(n):
            return {}
        means = {"reference/kl_exact": sum(kl) / sum(n), "reference/tv_exact": sum(tv) / sum(n)}
        return means | {"reference/kl_exact_max": max(largest)}


class _States:
    """The hidden states that a pass gives to its head, while this context is entered."""

    def __init__(self, model: nn.Module) -> None:
        self.backbone: Any = model.base_model
        self.last: Tensor | None = None

    def __enter__(self) -> _States:
        self.handle = self.backbone.register_forward_hook(self.note)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def note(self, _: nn.Module, __: Any, output: Any) -> None:
        """Keep the states that the backbone gives."""
        self.last = output.last_hidden_state.detach()

    def of(self, mask: Bool[Tensor, "b t"]) -> Float[Tensor, "n d"]:
        """The states at the places that score a label."""
        if self.last is None:
            raise FrameworkError("TRL's fused head did not run the model's backbone: no hidden states were seen")
        return self.last[:, : mask.shape[1]][mask]


def _labels(*, labels: Tensor | None = None, shift_labels: Tensor | None = None, **_: Any) -> Tensor:
    """The next token of each place, -100 where none is scored; pre-shifted ones as they are."""
    if shift_labels is not None:
        return shift_labels
    if labels is None:
        raise FrameworkError("a scoring pass without labels: TRL's fused head needs `labels` or `shift_labels`")
    return labels[:, 1:]


def _now(head: Head, model: Any) -> Head:
    """The head with the weights of the moment."""
    layer = model.get_output_embeddings()
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    if hasattr(weight, "full_tensor"):  # FSDP's, sharded
        weight, bias = weight.full_tensor(), None if bias is None else bias.full_tensor()
    if weight.shape != head.weight.shape:
        raise FrameworkError(
            f"the head of {type(model).__name__} has shape {tuple(weight.shape)} here and {tuple(head.weight.shape)} "
            "whole: exact divergences need it whole (ZeRO stage 3 is not supported)"
        )
    return replace(head, weight=weight, bias=bias)
