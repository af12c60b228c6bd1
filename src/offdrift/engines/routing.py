"""Routing of mixture-of-experts models: record it, compare it, replay it in another engine.

A router's choice is discrete: two engines whose router logits differ in the last bit may send a
token to different experts, and then differ by whole nats. Routes are packed like tokens: for each
sequence its prompt and its response but the last token, which no engine computes.

Shape suffixes: p positions, k experts per token, b sequences, t columns of a padded batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from offdrift.engines.score import Padded, chunks, left_right_padded, score
from offdrift.errors import EngineError
from offdrift.records.rollouts import Rollouts
from offdrift.segments import Segments

ACTIVATIONS = ("softmax", "sigmoid")
"""What routers make of their logits before they pick and weigh experts."""


def routers(model: nn.Module) -> list[nn.Module]:
    """The model's routers, first layer first; empty for a dense model."""
    return [m for m in model.modules() if "router" in type(m).__name__.lower()]


def route_lengths(rollouts: Rollouts) -> Int[Tensor, " b"]:
    """Positions of every sequence that engines compute: prompt and response but the last token.

    Raises: `EngineError` for episodes of several turns, which are prefilled anew at each turn.
    """
    if rollouts.turns is not None:
        raise EngineError("routes of episodes are not read: give rollouts of one turn")
    return rollouts.prompt_cu_seqlens.diff() + rollouts.lengths - 1


@torch.no_grad()
def routes_of(model: nn.Module, rollouts: Rollouts, *, token_budget: int = 8192) -> Int[Tensor, "p layers k"]:
    """Experts that a model of transformers chooses when it scores these tokens, `token_budget` padded tokens at a time.

    Raises: `EngineError` if the model has no routers, or they keep their choice to themselves.
    """
    layers = routers(model)
    if not layers:
        raise EngineError(f"{type(model).__name__} has no routers: no mixture of experts")
    chosen: list[Tensor] = []  # per layer of one forward pass, [b t, k]
    by_piece: list[Tensor] = []
    rows: list[Tensor] = []
    segments = Segments.from_lengths(route_lengths(rollouts))

    def record(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
        chosen.append(_parts(module, output)[2])

    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        for piece in chunks(rollouts, token_budget=token_budget):
            part = rollouts.select(piece)
            chosen.clear()
            score(model, part)
            at = _places(left_right_padded(part))
            by_piece.append(torch.stack([experts.cpu()[at] for experts in chosen], dim=1))
            rows.append(segments.rows(piece))
    finally:
        for handle in handles:
            handle.remove()
    routes = torch.cat(by_piece)
    return torch.empty_like(routes).index_copy_(0, torch.cat(rows), routes)


@contextmanager
def replayed(model: nn.Module, rollouts: Rollouts, routes: Int[Tensor, "p layers k"]) -> Iterator[None]:
    """Score exactly this batch, once and in one forward pass, with these experts: their weights are the model's own.

    Raises: `EngineError` if the number of layers differs, or a router weighs its experts in a way
        that cannot be repeated for others.
    """
    layers = routers(model)
    if len(layers) != routes.shape[1]:
        raise EngineError(f"routes of {routes.shape[1]} layers, the model has {len(layers)}")
    at = _places(left_right_padded(rollouts))

    def impose(layer: int) -> Any:
        def hook(module: nn.Module, _: tuple[Any, ...], output: Any) -> Any:
            logits, weights, chosen = _parts(module, output)
            imposed = chosen.clone()
            imposed[at.to(chosen.device)] = routes[:, layer].to(chosen)
            return logits, _weigher(module, logits, weights, chosen)(imposed), imposed

        return hook

    handles = [m.register_forward_hook(impose(i)) for i, m in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def flips(one: Int[Tensor, "p layers k"], other: Int[Tensor, "p layers k"]) -> Bool[Tensor, "p layers"]:
    """Where two engines choose different sets of experts; their order says nothing.

    The mean of this is the share of routing decisions with any difference. It is not the survey's
    flip rate per expert, which is `flip_rate`.
    """
    return (one.sort(-1).values != other.sort(-1).values).any(-1)


def flip_rate(
    one: Int[Tensor, "p layers k"], other: Int[Tensor, "p layers k"], *, experts: int
) -> Float[Tensor, "p layers"]:
    """Share of a layer's experts whose membership differs between two engines; its mean is delta.

        delta = (1/K) sum_i Pr[m_i^roll != m_i^train],   m_i = 1 where expert i is chosen

    K counts all experts of a layer, not the k chosen ones: the survey's conjecture is about "a sparse
    top-k MoE with K experts". One expert exchanged for another changes two memberships, so it counts
    2/K here and 1 in `flips`.

    Args:
        one: experts that one engine chose, without repetition.
        other: experts that the other engine chose at the same positions.
        experts: K, the number of experts in each layer.

    Raises: `EngineError` if a chosen expert is not one of the K.

    Example:
        >>> a, b = torch.tensor([[[0, 1]], [[2, 3]]]), torch.tensor([[[1, 0]], [[2, 4]]])
        >>> flip_rate(a, b, experts=8).flatten().tolist()
        [0.0, 0.25]

    Reference: survey of off-policy RL for LLMs, 2026, problem 3 (delta) and problem 4 (its budget).
    """
    largest = int(torch.maximum(one.max(), other.max())) if one.numel() else -1
    if largest >= experts:
        raise EngineError(f"expert {largest} was chosen, but experts={experts}; give all of a layer")
    shared = (one.unsqueeze(-1) == other.unsqueeze(-2)).any(-1).sum(-1)
    return (one.shape[-1] + other.shape[-1] - 2 * shared).float() / experts


def _parts(module: nn.Module, output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, weights and experts of a router's output."""
    good = isinstance(output, tuple) and len(output) == 3
    if good and not output[2].is_floating_point() and output[1].shape == output[2].shape:
        return output
    raise EngineError(
        f"the router {type(module).__name__} does not return logits, weights and experts; its "
        "choice can be neither read nor replayed"
    )


def _weigher(
    module: nn.Module, logits: Float[Tensor, "m experts"], weights: Float[Tensor, "m k"], chosen: Int[Tensor, "m k"]
) -> Callable[[Tensor], Tensor]:
    """How this router weighs the experts it chose: the one rule that gives its own weights."""

    def rule(activation: str, normalized: bool) -> Callable[[Tensor], Tensor]:
        dim = {"dim": -1} if activation == "softmax" else {}

        def weigh(experts: Tensor) -> Tensor:
            p = getattr(torch, activation)(logits.float(), **dim)
            picked = p.gather(-1, experts.long())
            picked = picked / picked.sum(-1, keepdim=True) if normalized else picked
            return picked.to(weights.dtype)

        return weigh

    for activation, normalized in itertools.product(ACTIVATIONS, (True, False)):
        weigh = rule(activation, normalized)
        if torch.allclose(weigh(chosen), weights, atol=1e-5, rtol=1e-2):
            return weigh
    raise EngineError(
        f"the router {type(module).__name__} weighs its experts by a rule that is not known here; "
        "its routing cannot be replayed"
    )


def _places(inputs: Padded) -> Int[Tensor, " p"]:
    """Cells of the padded batch, row after row, that hold the positions of routes: all real ones but the last."""
    real = inputs.attention.bool()
    followed = real & real.roll(-1, 1)
    followed[:, -1] = False
    return followed.flatten().nonzero().flatten().cpu()
