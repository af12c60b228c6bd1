"""Routing of mixture-of-experts models: record it, compare it, replay it in another engine or a later pass.

A router's choice is discrete: two engines whose router logits differ in the last bit may send a
token to different experts, and then differ by whole nats. Routes are packed like tokens: for each
sequence its prompt and its response but the last token, which no engine computes.

Everything happens in forward hooks of the routers, so that it is there again wherever activations are computed again
(gradient checkpointing), and whatever wraps the model.

Shape suffixes: p positions, k experts per token, b sequences, t columns of a padded batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int, Integer, Shaped
from torch import Tensor, nn

from offdrift.engines.score import chunks, computed_cells, left_right_padded, score
from offdrift.errors import EngineError
from offdrift.records.rollouts import Rollouts, Routes, expert_dtype
from offdrift.segments import Segments, cumulative
from offdrift.stats.formulas import margin_counts

ACTIVATIONS = ("softmax", "sigmoid")
"""What routers make of their logits before they pick and weigh experts."""

PROBED = 32
"""Random states on which a router shows its rule."""
PROBE_SPREAD = 3.0
"""Standard deviation of the logits there: wide enough to tell the rules apart."""


def routers(model: nn.Module) -> list[nn.Module]:
    """The model's routers, first layer first; empty for a dense model."""
    return [m for m in model.modules() if "router" in type(m).__name__.lower()]


def routers_of_mixture(model: nn.Module) -> list[nn.Module]:
    """Return the model's routers, first layer first. Raises: `EngineError` for a dense model."""
    if layers := routers(model):
        return layers
    raise EngineError(f"{type(model).__name__} has no routers: no mixture of experts")


def router_biases(model: nn.Module) -> list[nn.Parameter]:
    """Biases of the routers, of their logits or of the choice alone, that an optimizer would train.

    Raises: `EngineError` where there is none.
    """
    named = [named for router in routers_of_mixture(model) for named in router.named_parameters()]
    biases = [p for name, p in named if name.endswith("bias") and p.requires_grad]
    if not biases:
        has_buffers = any(name.endswith("bias") for router in routers(model) for name, _ in router.named_buffers())
        why = (
            "are buffers, which this trainer never changes: they are frozen as it is" if has_buffers else "have no bias"
        )
        raise EngineError(f"the routers of {type(model).__name__} {why}")
    return biases


def route_lengths(rollouts: Rollouts) -> Int[Tensor, " b"]:
    """Positions of every sequence that engines compute: prompt and response but the last token.

    Raises: `EngineError` for episodes of several turns, which are prefilled anew at each turn.
    """
    if rollouts.turns is not None:
        raise EngineError("routes of episodes are not read: give rollouts of one turn")
    return rollouts.prompt_cu_seqlens.diff() + rollouts.lengths - 1


class RouterRule(NamedTuple):
    """Rule by which a router weighs the experts that it chose; a bias of the choice is in no weight.

    w_i = scale a(z)_i             or, normalized,   w_i = scale a(z)_i / sum over the chosen j of a(z)_j
    """

    activation: str
    normalized: bool
    scale: float

    def weights(self, logits: Float[Tensor, "m experts"], chosen: Int[Tensor, "m k"]) -> Float[Tensor, "m k"]:
        """Weights of these experts. Gradient: to the logits, of chosen experts alone where weights are normalized."""
        picked = logits.float().gather(-1, chosen.long())
        if self.activation == "softmax" and self.normalized:  # one over the chosen is the same
            return self.scale * picked.softmax(-1)
        if self.activation == "softmax":
            return self.scale * (picked - logits.float().logsumexp(-1, keepdim=True)).exp()
        picked = picked.sigmoid()
        return self.scale * (picked / picked.sum(-1, keepdim=True) if self.normalized else picked)


_rules: WeakKeyDictionary[nn.Module, RouterRule] = WeakKeyDictionary()


@torch.no_grad()
def rule_of(router: nn.Module) -> RouterRule:
    """The rule that gives a router's own weights on random states; each router is asked once.

    Raises: `EngineError` for a router whose choice can be neither read nor replayed.
    """
    if router in _rules:
        return _rules[router]
    weight = getattr(router, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise EngineError(f"the router {type(router).__name__} has no weight matrix; its routing cannot be replayed")
    states = torch.randn(PROBED, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    spread = _parts(router, router(states))[0].float().std().clamp(min=torch.finfo(torch.float32).tiny)
    logits, weights, chosen = _parts(router, router(states * (PROBE_SPREAD / spread).to(states)))
    scales = dict.fromkeys((1.0, float(getattr(router, "routed_scaling_factor", 1.0))))
    for rule in itertools.starmap(RouterRule, itertools.product(ACTIVATIONS, (True, False), scales)):
        if torch.allclose(rule.weights(logits, chosen).to(weights.dtype), weights, atol=1e-5, rtol=1e-2):
            return _rules.setdefault(router, rule)
    raise EngineError(
        f"the router {type(router).__name__} weighs its experts by a rule that is not known here; "
        "its routing cannot be replayed"
    )


class Choices:
    """Experts that a model's routers chose by themselves in its latest pass, at each of its cells, layer by layer."""

    def __init__(self, layers: int, at: Int[Tensor, " p"] | None = None) -> None:
        self._experts: list[Tensor] = [torch.empty(0)] * layers
        self._gates, self._margins = [*self._experts], [*self._experts]
        self.num_experts = 0
        self._at = at
        """Cells that positions are in; None: every cell."""

    @torch.no_grad()
    def note(self, layer: int, logits: Tensor, weights: Tensor, chosen: Tensor) -> None:
        """Take in what the router of a layer put out."""
        z, chosen, self.num_experts = logits.float(), chosen.long(), logits.shape[-1]
        others = z.scatter(-1, chosen, -torch.inf).amax(-1)
        self._margins[layer] = z.gather(-1, chosen).amin(-1) - others
        self._gates[layer] = weights
        self._experts[layer] = chosen.to(expert_dtype(self.num_experts))

    def _placed(self, by_layer: list[Tensor]) -> Tensor:
        return torch.stack(by_layer if self._at is None else [x[self._at.to(x.device)] for x in by_layer], 1).detach()

    @property
    def experts(self) -> Integer[Tensor, "p layers k"]:
        """Experts of every position, on the model's device."""
        return self._placed(self._experts)

    @property
    def gates(self) -> Float[Tensor, "p layers k"]:
        """Their weights."""
        return self._placed(self._gates)

    def routes(self, rollouts: Rollouts, *, gates: bool = False) -> Routes:
        """Those of the batch that the pass was over, on the host; with `gates` the weights, too."""
        weights = self.gates.cpu() if gates else None
        return Routes(self.experts.cpu(), cumulative(route_lengths(rollouts)), weights)

    @property
    def margins(self) -> Float[Tensor, "p layers"]:
        """By how much the least chosen expert's logit exceeds the largest other one, h_(K) - h_(K+1).

        Below 0 where something beside the logits decides, such as a bias or a limit to groups of experts.
        """
        return self._placed(self._margins)


@contextmanager
def watched(
    model: nn.Module, *, at: Tensor | None = None, impose: Callable[..., Any] | None = None
) -> Iterator[Choices]:
    """Note what the model's routers choose in passes meanwhile, and let `impose(layer, router, *output)` replace it.

    Raises: `EngineError` for a dense model.
    """
    layers = routers_of_mixture(model)
    choices = Choices(len(layers), at)

    def hook_of(layer: int) -> Callable[..., Any]:
        def hook(module: nn.Module, _: tuple[Any, ...], output: Any) -> Any:
            parts = _parts(module, output)
            choices.note(layer, *parts)
            return None if impose is None else impose(layer, module, *parts)

        return hook

    handles = [layer.register_forward_hook(hook_of(i)) for i, layer in enumerate(layers)]
    try:
        yield choices
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replayed(model: nn.Module, rollouts: Rollouts, routes: Routes | None) -> Iterator[Choices]:
    """Passes over exactly this batch send its tokens to these experts; without routes, to the routers' own.

    Experts are weighed by the model's own logits, so that gradients reach its routers, or by `routes.gates` where
    there are any, and then none does. A backward pass belongs inside: it may compute activations again.

    Yields: what the routers would have chosen, given what came before.

    Raises: `EngineError` if the routes are those of another model or batch, or a router weighs its experts in a way
        that cannot be repeated for others.
    """
    at = computed_cells(left_right_padded(rollouts)).to(next(model.parameters()).device)
    if routes is None:
        with watched(model, at=at) as choices:
            yield choices
        return
    layers, lengths = routers_of_mixture(model), route_lengths(rollouts)
    if len(layers) != routes.experts.shape[1]:
        raise EngineError(f"routes of {routes.experts.shape[1]} layers, the model has {len(layers)}")
    if not torch.equal(routes.cu_seqlens.diff(), lengths):
        raise EngineError(f"routes of {len(routes.experts)} positions, the batch has {int(lengths.sum())}")
    rules = [rule_of(layer) for layer in layers]
    experts = routes.experts.to(at.device).long()
    gates = None if routes.gates is None else routes.gates.to(at.device)

    def impose(layer: int, module: nn.Module, logits: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        imposed = chosen.clone()
        imposed[at] = experts[:, layer].to(chosen.dtype)
        if gates is None:
            return logits, rules[layer].weights(logits, imposed).to(weights.dtype), imposed
        frozen = weights.clone()  # the rest keeps the router in the graph, as wrappers of the model expect
        frozen[at] = gates[:, layer].to(weights.dtype)
        return logits, frozen, imposed

    with watched(model, at=at, impose=impose) as choices:
        yield choices


def routed(
    model: nn.Module, rollouts: Rollouts, *, replays: bool, watch: bool = False
) -> AbstractContextManager[Choices | None]:
    """`replayed` with the experts that the rollouts carry; without replay, with `watch` to see what routers choose."""
    if replays or watch:
        return replayed(model, rollouts, rollouts.routes if replays else None)
    return nullcontext()


@torch.no_grad()
def routes_of(model: nn.Module, rollouts: Rollouts, *, token_budget: int = 8192) -> Routes:
    """Experts that a model of transformers chooses when it scores these tokens, `token_budget` padded tokens at a time.

    Raises: `EngineError` if the model has no routers, or they keep their choice to themselves.
    """
    routers_of_mixture(model)
    parts, sequences = [], []
    for piece in chunks(rollouts, token_budget=token_budget):
        part = rollouts.select(piece)
        with replayed(model, part, None) as choices:
            score(model, part)
        parts.append(choices.routes(part))
        sequences.append(piece)
    return Routes.joined(parts).select(torch.cat(sequences).argsort())


def flips(one: Integer[Tensor, "p layers k"], other: Integer[Tensor, "p layers k"]) -> Bool[Tensor, "p layers"]:
    """Mark where two engines choose different sets of experts; their order says nothing.

    The mean of this is the share of routing decisions with any difference. It is not the survey's
    flip rate per expert, which is `flip_rate`.
    """
    return (one.sort(-1).values != other.sort(-1).values).any(-1)


def flip_rate(
    one: Integer[Tensor, "p layers k"], other: Integer[Tensor, "p layers k"], *, experts: int
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


def at_predictions(rollouts: Rollouts, at: Shaped[Tensor, " p"]) -> Shaped[Tensor, " n"]:
    """Values at positions, for each response token the one at the position that predicts it."""
    starts, prompts = cumulative(route_lengths(rollouts)), rollouts.prompt_cu_seqlens.diff()
    segments = Segments(rollouts.cu_seqlens)
    return at[((starts[:-1] + prompts - 1)[segments.seq_ids] + segments.position).to(at.device)]


@torch.no_grad()
def routing_sums(
    choices: Choices, rollouts: Rollouts, *, replays: bool, kl: Float[Tensor, " n"] | None = None
) -> dict[str, Tensor]:
    """Sums of the metrics `router/...`: what routers would have chosen in a pass, against the recorded experts.

    Args:
        replays: whether the pass sent tokens to those.
        kl: KL(rollout || current) of every token, where it is known, nats.
    """
    assert rollouts.routes is not None
    experts, margins = choices.experts, choices.margins
    recorded = rollouts.routes.experts.to(experts.device)
    flipped = flips(experts, recorded)
    tokens = at_predictions(rollouts, flipped.any(1))
    counts = margin_counts(margins.flatten())
    sums = {
        "flips": flipped.sum(),
        "flipped_tokens": tokens.sum(),
        "decisions": torch.tensor(flipped.numel()),
        "margin": margins.double().sum(),
        "bytes": torch.tensor(recorded.numel() * recorded.itemsize),
        **{f"margin_bin_{i}": n for i, n in enumerate(counts)},
    }
    if not replays:
        sums["delta"] = flip_rate(experts, recorded, experts=choices.num_experts).double().sum()
    if kl is not None:
        for name, where in (("kl_at_flips", tokens), ("kl_elsewhere", ~tokens)):
            sums |= {name: kl[where].double().sum(), f"{name}/n": where.sum()}
    return {f"router/{name}": x for name, x in sums.items()}


def _parts(module: nn.Module, output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, weights and experts of a router's output."""
    good = isinstance(output, tuple) and len(output) == 3
    if good and not output[2].is_floating_point() and output[1].shape == output[2].shape:
        return output
    raise EngineError(
        f"the router {type(module).__name__} does not return logits, weights and experts; its "
        "choice can be neither read nor replayed"
    )
