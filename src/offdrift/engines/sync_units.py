"""Parts of a model that can stay behind in a synchronization, and the evidence of one perturbed load about each.

A load puts w + delta, delta ~ f rms(w) N(0, 1), into trainer and engine. Where the engine kept w in one part k, the
two differ by what delta_k does to the log-probs. One backward pass compares the difference with that, for all parts at
once:

    d_t = log pi_t - log mu_t                h = gradient of sum_t d_t log pi_t
    z_k = <h_k, delta_k> / sqrt(sum_i (h_i delta_i)^2)

If part k arrived, d does not know the signs of delta_k, so z_k exceeds x with a probability of at most exp(-x^2 / 2),
whatever the noise is like (a self-normalized sum of random signs). If it stayed behind, z_k is about the square root of
the number of tokens, or of the directions in which the tokens' gradients point, where those are fewer. Sums over parts
say the same of layers, kinds and whole models. The size of each part's effect on log-probs follows from one backward
pass of log-probs with random signs.

Reference: self-normalized sums: B. Efron, Journal of the American Statistical Association 64 (1969), 1278-1302.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

GROUPS = ("embeddings", "attention", "mlp", "norms")


EVERYTHING = "all weights"
"""Name of the union of all parts."""


def weight_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The model's weights by what they do: `GROUPS`, each perhaps empty; shared ones once."""
    named = dict(model.named_parameters())
    groups: dict[str, list[nn.Parameter]] = {name: [] for name in GROUPS}
    for name, group in _group_names(model).items():
        groups[group].append(named[name])
    return groups


def _group_names(model: nn.Module) -> dict[str, str]:
    """The group of every named parameter."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    embedding = {id(p) for m in tables for p in m.parameters(recurse=False)}
    groups = {}
    for name, weight in model.named_parameters():
        if id(weight) in embedding:
            groups[name] = "embeddings"
        elif "norm" in name or "ln_" in name:
            groups[name] = "norms"
        else:
            groups[name] = "attention" if "attn" in name or "attention" in name else "mlp"
    return groups


@dataclass(frozen=True)
class Units:
    """Every tensor of a model, and of a tensor of experts each expert: the parts; and unions of them by name."""

    weights: tuple[nn.Parameter, ...]
    counts: tuple[int, ...]
    """Parts of each tensor: 1, or the number of experts."""
    parts: tuple[str, ...]
    """Names of the parts, tensor after tensor."""
    unions: tuple[str, ...]
    """Names of parts and unions: the parts first, then from small unions to large ones."""
    rows: Int[Tensor, " pairs"]
    columns: Int[Tensor, " pairs"]
    """Union and part of every membership."""
    whole: Bool[Tensor, " unions"]
    """Unions of whole tensors: no expert without the others."""

    @staticmethod
    def of(model: nn.Module, *, experts: bool = True) -> Units:
        """The units of a model; shared weights once, under their first name.

        Args:
            experts: every expert of a tensor of experts is a part; else the tensor is.
        """
        groups = _group_names(model)
        named = {name: w for name, w in model.named_parameters() if w.is_floating_point()}
        counts, parts, holders = [], [], []
        for name, weight in named.items():
            count = len(weight) if experts and weight.ndim == 3 and "expert" in name else 1
            counts.append(count)
            for i in range(count):
                parts.append(f"{name}[{i}]" if count > 1 else name)
                holders.append(_unions_of(name, groups[name], i if count > 1 else None))
        homes: dict[str, list[int]] = {}
        for i, names in enumerate(holders):
            for name in names:
                homes.setdefault(name, []).append(i)
        # A union of one part, or of the same parts as a smaller name, says nothing new.
        seen: dict[tuple[int, ...], str] = {(i,): name for i, name in enumerate(parts)}
        for name, at in sorted(homes.items(), key=lambda item: len(item[1])):
            seen.setdefault(tuple(at), EVERYTHING if len(at) == len(parts) else name)
        sizes = torch.tensor([len(at) for at in seen])
        rows = torch.arange(len(seen)).repeat_interleave(sizes)
        columns = torch.tensor([i for at in seen for i in at])
        tensors = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))[columns]
        full = torch.stack([rows, tensors]).unique(dim=1)
        of_full = torch.bincount(full[0], weights=torch.tensor(counts)[full[1]].double(), minlength=len(seen))
        weights = tuple(named.values())
        return Units(
            weights,
            tuple(counts),
            tuple(parts),
            unions=tuple(seen.values()),
            rows=rows,
            columns=columns,
            whole=sizes == of_full,
        )

    def summed(self, x: Float[Tensor, " parts"]) -> Float[Tensor, " unions"]:
        """Sum over the parts of each union."""
        return x.new_zeros(len(self.unions)).index_add_(0, self.rows, x[self.columns])

    def parts_of(self, union: int) -> Int[Tensor, " k"]:
        """Indices of the parts of a union."""
        return self.columns[self.rows == union]

    def tensor_of_part(self) -> Tensor:
        """Index of the tensor that each part belongs to, [parts]."""
        return torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))


def _unions_of(name: str, group: str, expert: int | None) -> list[str]:
    """Names of the unions that a part belongs to: its tensor, its modules, its kind over layers, its group, all."""
    words = name.split(".")
    modules = [".".join(words[:i]) for i in range(len(words) - 1, 0, -1)]
    kind = re.sub(r"\.\d+(?=\.)", ".*", name)
    layer = re.match(r"(.*?\.\d+)\.", name)
    unions = [] if expert is None else [name, f"{modules[0]}[{expert}]", f"{kind}[{expert}]"]
    unions += [*modules, kind, group, EVERYTHING]
    return unions if layer is None else [*unions, f"{layer[1]}: {group}"]


def evidence_of(
    units: Units,
    originals: Sequence[Tensor],
    logp: Float[Tensor, " n"],
    difference: Float[Tensor, " n"],
    spread: Float[Tensor, " n"],
) -> Float[Tensor, " unions"]:
    """z_k of every union after a load, from the trainer's log-probs with their graph, which is used up.

    Args:
        difference: d over `spread`, of the same tokens; outliers may be clipped.
        spread: what a log-prob moves by when logits move by 1: a token that is nearly sure hardly moves.
    """
    c, v = gradient_sums(units, logp, difference / spread, lambda i: moved_by(units, originals, i))
    deviation = units.summed(v).sqrt()
    return torch.where(deviation > 0, units.summed(c) / deviation, 0.0)


def effects_of(
    units: Units,
    logp: Float[Tensor, " n"],
    spread: Float[Tensor, " n"],
    factor: Callable[[int], Tensor | float],
    *,
    seed: int,
    keep: bool = False,
) -> Float[Tensor, " parts"]:
    """Effect of a random change of each part: root mean square over tokens of the change of log-probs over `spread`.

    The sum over tokens is one backward pass, of log-probs with random signs.

    Args:
        factor: of the tensor of this index: what each entry changes by, up to its sign.
        keep: keep the graph for another call.
    """
    signs = torch.randn(len(logp), generator=torch.Generator().manual_seed(seed)).sign()
    return (gradient_sums(units, logp, signs / spread, factor, keep=keep)[1] / len(logp)).sqrt()


def moved_by(units: Units, originals: Sequence[Tensor], i: int) -> Tensor:
    """Difference between a tensor's present and original values, float32."""
    return units.weights[i].detach().float() - originals[i].float()


def spread_of(logp: Float[Tensor, " n"], sum_pi_squared: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Norm of the gradient of a token's log-prob with respect to the logits, at least `LEAST_SPREAD`.

    |1_a - pi| = sqrt(1 - 2 pi_a + sum pi^2)
    """
    p = logp.detach().double().exp()
    return (1 - 2 * p + sum_pi_squared.detach().double()).clamp(min=LEAST_SPREAD**2).sqrt().float().cpu()


LEAST_SPREAD = 0.02
"""Below it float32 can't tell a log-prob's change from rounding."""


def gradient_sums(
    units: Units,
    logp: Float[Tensor, " n"],
    weights: Float[Tensor, " n"],
    factor: Callable[[int], Tensor | float],
    *,
    keep: bool = False,
) -> tuple[Float[Tensor, " parts"], Float[Tensor, " parts"]]:
    """Sums and sums of squares over the entries of each part: gradient of sum_t weights_t logp_t, times a factor.

    The gradient of one tensor exists at a time. Numbers of the user's in `.grad` stay.

    Args:
        factor: of the tensor of this index; tensors of a model on another device are there.
        keep: keep the graph for another call.
    """
    sums: dict[int, tuple[Tensor, Tensor]] = {}

    def take(i: int, weight: Tensor) -> None:
        assert weight.grad is not None
        product = (weight.grad.float() * factor(i)).reshape(units.counts[i], -1)
        sums[i] = (product.sum(1).double().cpu(), product.square().sum(1).double().cpu())
        weight.grad = None

    before = [w.grad for w in units.weights]
    handles = []
    for i, weight in enumerate(units.weights):
        weight.grad = None
        handles.append(weight.register_post_accumulate_grad_hook(lambda w, i=i: take(i, w)))
    try:
        torch.autograd.backward([logp], [weights.to(logp)], retain_graph=keep)
    finally:
        for handle in handles:
            handle.remove()
        for weight, grad in zip(units.weights, before, strict=True):
            weight.grad = grad
    none = [torch.zeros(count, dtype=torch.float64) for count in units.counts]
    first = torch.cat([sums.get(i, (zero, zero))[0] for i, zero in enumerate(none)])
    return first, torch.cat([sums.get(i, (zero, zero))[1] for i, zero in enumerate(none)])


@contextmanager
def with_gradients(model: nn.Module) -> Iterator[None]:
    """Every weight requires a gradient meanwhile, frozen ones too."""
    required = [(w, w.requires_grad) for w in model.parameters()]
    try:
        for w, _ in required:
            if w.is_floating_point():
                w.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for w, flag in required:
            w.requires_grad_(flag)


def scales_of(originals: Sequence[Tensor]) -> list[float]:
    """Root mean square of each tensor; a tensor of zeros has the median of the others."""
    sizes = [float(w.float().square().mean().sqrt()) for w in originals]
    others = sorted(s for s in sizes if s > 0) or [1.0]
    return [s or others[len(others) // 2] for s in sizes]


@torch.no_grad()
def perturb(
    weights: Sequence[nn.Parameter], originals: Sequence[Tensor], fractions: Sequence[float], *, seed: int
) -> None:
    """w <- w0 + fraction rms(w0) N(0, 1), a fraction for each tensor; 0 leaves it."""
    generator = torch.Generator().manual_seed(seed)
    for weight, original, fraction, size in zip(weights, originals, fractions, scales_of(originals), strict=True):
        noise = torch.randn(original.shape, generator=generator).to(original)
        weight.copy_(original + fraction * size * noise if fraction else original)


@torch.no_grad()
def put_back(units: Units, originals: Sequence[Tensor], union: int) -> dict[int, Tensor]:
    """Give the model the original weights of a union; returns what its tensors were, by index, for `put`."""
    moved: dict[int, Tensor] = {}
    first = torch.tensor([0, *units.counts]).cumsum(0)
    tensor = units.tensor_of_part()
    for part in units.parts_of(union).tolist():
        i = int(tensor[part])
        moved.setdefault(i, units.weights[i].detach().clone())
        at = slice(None) if units.counts[i] == 1 else part - int(first[i])
        units.weights[i][at] = originals[i][at]
    return moved


@torch.no_grad()
def put(units: Units, moved: Mapping[int, Tensor]) -> None:
    """Give the model these tensors."""
    for i, weight in moved.items():
        units.weights[i].copy_(weight)


def tied_ends(model: nn.Module, units: Units) -> tuple[int, list[nn.Module]]:
    """Index of the tensor that is embedding and output head at once, and the modules that share it, if any."""
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("output", "input")]
    shared = getattr(ends[0], "weight", None)
    at = [i for i, weight in enumerate(units.weights) if weight is shared]
    if not at or getattr(ends[1], "weight", None) is not shared:
        return 0, []
    return at[0], [end for end in ends if end is not None]


@contextmanager
def untied(end: nn.Module, weight: Tensor) -> Iterator[None]:
    """One of two modules that share a tensor has another one meanwhile."""
    shared: nn.Parameter = end.weight  # type: ignore[assignment]
    end.weight = nn.Parameter(weight.clone(), requires_grad=False)
    try:
        yield
    finally:
        end.weight = shared


@contextmanager
def restored(weights: Sequence[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Copies of the weights, which are put back bit for bit afterwards."""
    originals = [w.detach().clone() for w in weights]
    try:
        yield originals
    finally:
        with torch.no_grad():
            for weight, original in zip(weights, originals, strict=True):
                weight.copy_(original)


@contextmanager
def perturbed(model: nn.Module, *, fraction: float, seed: int) -> Iterator[None]:
    """The model with every weight w at w + fraction rms(w) N(0, 1), and afterwards as it was."""
    weights = [w for w in model.parameters() if w.is_floating_point()]
    with restored(weights) as originals:
        perturb(weights, originals, [fraction] * len(weights), seed=seed)
        yield


def least_z(units: Units, alpha: float) -> float:
    """z that no honest union reaches, of all of them, but with probability `alpha`: sqrt(2 log(unions / alpha)).

    Example:
        >>> round(math.sqrt(2 * math.log(300 / 1e-6)), 2)
        6.25
    """
    return math.sqrt(2 * math.log(len(units.unions) / alpha))
