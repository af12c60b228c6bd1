"""Surrogates that routing replay optimizes, with the experts of another policy, exactly.

At every context s a router chooses among experts z and the expert draws the token,

    pi(a | s) = sum_z omega(z | s) pi(a | s, z),    omega = softmax of the router's logits over its K largest.

Three policies share this form: `mu` drew the sequences with a router whose logits are perturbed (another engine),
`old` is the trainer at the same weights, `pi` has been updated. The surrogate L(pi) = J(mu) + E_mu[R sum_t (w_t - 1)]
is that of the policy which the forward pass computes, and replay changes this policy:

    own        omega of pi on its own K experts
    r3         omega of pi, renormalized on the experts that mu chose
    r2         omega of pi, renormalized on the experts that old chose
    reference  omega of old: experts and gate weights

Distances are alpha_0 = max_s TV(old, pi) and alpha_1 = max_s TV(mu, old), of the policies themselves; what a loss sees
under replay are the same of the policies that its forward passes compute.

References: Bridging the three policies, section on routing replay (L, L^R3 and L^ref-replay); R3: Ma et al.,
arXiv:2510.11370; surrogate: Li et al., arXiv:2512.23075v5, eq. 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.errors import BadValueError, ShapeError
from offdrift_lab.exact.policy import TabularPolicy, divergences, returns

SCHEMES = ("own", "r3", "r2", "reference")


@dataclass(frozen=True)
class Mixture:
    """Routers and experts of `p` policies at every context; contexts as in `TabularPolicy`.

    Args:
        router: for position t = 1 .. T the logits of the experts `[p, v^(t-1), e]`.
        experts: for each position the logits of the tokens of every expert `[p, v^(t-1), e, v]`.
        top_k: experts that act at a context, K.

    Raises: `ShapeError` if the two disagree; `BadValueError` for a K that is no number of these experts.
    """

    router: tuple[Float[Tensor, "p _ e"], ...]
    experts: tuple[Float[Tensor, "_ _ _ v"], ...]
    top_k: int

    def __post_init__(self) -> None:
        for t, (router, experts) in enumerate(zip(self.router, self.experts, strict=True)):
            if experts.shape[:3] != router.shape:
                raise ShapeError(
                    f"router[{t}] has shape {tuple(router.shape)} and experts[{t}] {tuple(experts.shape)}; give "
                    "(p, contexts, experts) and (p, contexts, experts, vocabulary)"
                )
        count = self.router[0].shape[2]
        if not 1 <= self.top_k <= count:
            raise BadValueError(f"top_k = {self.top_k}; there are {count} experts, so 1 to {count} of them can act")

    def routes(self) -> tuple[Bool[Tensor, "p _ e"], ...]:
        """The K experts with the largest logits at each context."""
        result = []
        for logits in self.router:
            chosen = torch.zeros_like(logits, dtype=torch.bool)
            result.append(chosen.scatter(-1, logits.topk(self.top_k, dim=-1).indices, True))
        return tuple(result)

    def gates(self, routes: Sequence[Bool[Tensor, "p _ e"]]) -> tuple[Float[Tensor, "p _ e"], ...]:
        """omega: the router's softmax on these experts. Gradient: to `router`, within the routes."""
        return tuple(
            logits.masked_fill(~chosen, -torch.inf).softmax(-1)
            for logits, chosen in zip(self.router, routes, strict=True)
        )

    def next_best(self) -> tuple[Bool[Tensor, "p _ e"], ...]:
        """The routes of a flip: the least expert chosen makes way for the largest other one.

        Raises: `BadValueError` if every expert acts: there is no other one.
        """
        count = self.router[0].shape[2]
        if self.top_k == count:
            raise BadValueError(f"top_k = {count} of {count} experts: all of them act, so no route can flip")
        result = []
        for logits in self.router:
            order = logits.topk(self.top_k + 1, dim=-1).indices
            ids = torch.cat([order[..., : self.top_k - 1], order[..., self.top_k :]], -1)
            result.append(torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, True))
        return tuple(result)

    def rows(self, gates: Sequence[Float[Tensor, "p _ e"]]) -> tuple[Float[Tensor, "p _ v"], ...]:
        """pi(a | s) with these gates, at every context. Gradient: to `experts` and the gates."""
        return tuple(
            (omega[..., None] * logits.softmax(-1)).sum(2) for omega, logits in zip(gates, self.experts, strict=True)
        )

    def policy(self, gates: Sequence[Float[Tensor, "p _ e"]] | None = None) -> TabularPolicy:
        """pi(a | s), with the policy's own gates or with these. Gradient: to `experts` and the gates."""
        return TabularPolicy(self.rows(self.gates(self.routes()) if gates is None else gates))

    def parameters(self) -> tuple[Tensor, ...]:
        """Routers, then experts."""
        return (*self.router, *self.experts)

    def moved(self, change: Sequence[Tensor]) -> Mixture:
        """This mixture with `change` added to its parameters, which then require gradients."""
        new = [(x + d).detach().requires_grad_() for x, d in zip(self.parameters(), change, strict=True)]
        return Mixture(tuple(new[: len(self.router)]), tuple(new[len(self.router) :]), self.top_k)


def random_mixture(
    pairs: int,
    *,
    vocab: int = 3,
    horizon: int = 3,
    experts: int = 4,
    top_k: int = 2,
    generator: torch.Generator,
) -> Mixture:
    """Routers and experts with independent standard normal logits."""
    contexts = [vocab**t for t in range(horizon)]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Mixture(
        tuple(normal(pairs, c, experts) for c in contexts),
        tuple(normal(pairs, c, experts, vocab) for c in contexts),
        top_k,
    )


def noise(mixture: Mixture, *, router: float, experts: float, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Normal changes of the parameters with these standard deviations."""
    scales = [router] * len(mixture.router) + [experts] * len(mixture.experts)
    return tuple(
        torch.randn(x.shape, generator=generator, dtype=x.dtype) * scale
        for x, scale in zip(mixture.parameters(), scales, strict=True)
    )


def under(scheme: str, current: Mixture, *, mu: Mixture, old: Mixture) -> TabularPolicy:
    """The policy that a forward pass of `current` computes under a scheme of `SCHEMES`.

    Gradient: to the parameters of `current`; to its router not under "reference".

    Raises: `BadValueError` for another scheme.
    """
    if scheme == "own":
        return current.policy()
    if scheme == "r3":
        return current.policy(current.gates(mu.routes()))
    if scheme == "r2":
        return current.policy(current.gates(old.routes()))
    if scheme == "reference":
        return current.policy([omega.detach() for omega in old.gates(old.routes())])
    raise BadValueError(f"scheme {scheme!r}; choose from {', '.join(SCHEMES)}")


@dataclass(frozen=True)
class Replayed:
    """One scheme's surrogate for `p` worlds, at the updated policy."""

    surrogate: Float[Tensor, " p"]
    """L - J(mu)."""
    alpha_0: Float[Tensor, " p"]
    """max_s TV(old, pi) of the policies that the forward passes compute."""
    alpha_1: Float[Tensor, " p"]
    """max_s TV(mu, old) of these."""
    cosine: Float[Tensor, " p"]
    """Between the gradients of this surrogate and of the one with own routes."""
    router_share: Float[Tensor, " p"]
    """Share of the gradient's squared norm that is the router's."""
    variance: Float[Tensor, " p"]
    """Of the gradient's estimate from one sequence of mu: E|g - E g|^2, advantage R - J(mu)."""


def replayed(mu: Mixture, old: Mixture, pi: Mixture, rewards: Float[Tensor, "p y"]) -> dict[str, Replayed]:
    """Every scheme's surrogate, gradient and distances, by enumeration of all sequences.

    Args:
        rewards: of every sequence, numbered in base v, in [0, 1].
    """
    pi = pi.moved([torch.zeros_like(x) for x in pi.parameters()])
    rolled, routers = mu.policy(), len(pi.router)
    law = rolled.law().detach()
    advantage = rewards - (law * rewards).sum(1, keepdim=True)
    result: dict[str, Replayed] = {}
    own_mean = torch.empty(0)
    for scheme in SCHEMES:
        policy, before = under(scheme, pi, mu=mu, old=old), under(scheme, old, mu=mu, old=old)
        each = _gradients(_ratio_sums(rolled, policy) * advantage, pi.parameters())
        gradients = torch.cat([g.flatten(2) for g in each], 2)  # [y, p, parameters]
        share = law.T[..., None]
        mean = (share * gradients).sum(0)
        own_mean = mean if scheme == "own" else own_mean
        norm = mean.norm(dim=1)
        of_router = torch.cat([g.flatten(2) for g in each[:routers]], 2)
        result[scheme] = Replayed(
            surrogate=returns(rolled, policy, rewards).surrogate.detach(),
            alpha_0=divergences(before, policy).tv_max.detach(),
            alpha_1=divergences(rolled, before).tv_max.detach(),
            cosine=(own_mean * mean).sum(1) / (own_mean.norm(dim=1) * norm),
            router_share=(share * of_router).sum(0).square().sum(1) / norm.square(),
            variance=(share * (gradients - mean).square()).sum((0, 2)),
        )
    return result


def ascended(
    scheme: str, mu: Mixture, old: Mixture, rewards: Float[Tensor, "p y"], *, steps: int, lr: float
) -> tuple[Mixture, Float[Tensor, " p"]]:
    """Gradient ascent on a scheme's surrogate from `old`, exact gradients, data of `mu` throughout.

    Returns: the policy, and J of it with its own routes, as the next rollout would have it.
    """
    pi = old.moved([torch.zeros_like(x) for x in old.parameters()])
    rolled = mu.policy()
    for _ in range(steps):
        surrogate = returns(rolled, under(scheme, pi, mu=mu, old=old), rewards).surrogate.sum()
        gradients = torch.autograd.grad(surrogate, pi.parameters(), materialize_grads=True)
        pi = pi.moved([lr * g for g in gradients])
    return pi, (pi.policy().law() * rewards).sum(1).detach()


def experiment(
    pairs: int, *, experts: int, top_k: int, mismatch: float, update: float, steps: int, seed: int, lr: float = 1.0
) -> list[dict[str, float | str | None]]:
    """One row a scheme: medians over `pairs` random worlds, and the mean gain of J by ascent.

    Args:
        mismatch: standard deviation of the noise between the router logits of `mu` and `old`.
        update: of the noise between all parameters of `old` and `pi`.
        steps, lr: of the ascent on each surrogate from `old`.

    Returns: `surrogate_error` is the median of |L^scheme - L| over that of |L| (None where this is 0),
        `variance_ratio` the median of a gradient's variance over that with own routes, `gain` the mean of
        J(ascended) - J(old) with its standard error `gain_se`.
    """
    generator = torch.Generator().manual_seed(seed)
    old = random_mixture(pairs, experts=experts, top_k=top_k, generator=generator)
    mu = old.moved(noise(old, router=mismatch, experts=0.0, generator=generator))
    pi = old.moved(noise(old, router=update, experts=update, generator=generator))
    rewards = torch.rand(pairs, old.policy().law().shape[1], generator=generator, dtype=torch.float64)
    before = (old.policy().law() * rewards).sum(1).detach()
    by_scheme = replayed(mu, old, pi, rewards)
    baseline = by_scheme["own"]
    scale = baseline.surrogate.abs().median()
    rows: list[dict[str, float | str | None]] = []
    for scheme, numbers in by_scheme.items():
        gain = ascended(scheme, mu, old, rewards, steps=steps, lr=lr)[1] - before
        error = (numbers.surrogate - baseline.surrogate).abs().median()
        rows.append(
            {
                "scheme": scheme,
                "surrogate_error": float(error / scale) if scale else None,
                "alpha_0_seen": float(numbers.alpha_0.median()),
                "alpha_1_seen": float(numbers.alpha_1.median()),
                "cosine": float(numbers.cosine.median()),
                "router_share": float(numbers.router_share.median()),
                "variance_ratio": float((numbers.variance / baseline.variance).median()),
                "variance_lower": float((numbers.variance < baseline.variance).double().mean()),
                "gain": float(gain.mean()),
                "gain_se": float(gain.std() / pairs**0.5),
            }
        )
    return rows


def _ratio_sums(mu: TabularPolicy, pi: TabularPolicy) -> Float[Tensor, "p y"]:
    """sum_t w_t of every sequence."""
    total = mu.levels[0].new_zeros(mu.pairs, 1)
    for m, p in zip(mu.levels, pi.levels, strict=True):
        total = (total[..., None] + p / m.detach()).flatten(1)
    return total


def _gradients(values: Float[Tensor, "p y"], parameters: Sequence[Tensor]) -> list[Float[Tensor, "y ..."]]:
    """Gradient of every sequence's value; worlds do not touch each other, so they share a backward pass."""
    chosen = torch.eye(values.shape[1], dtype=values.dtype)[:, None, :].expand(-1, values.shape[0], -1)
    each = torch.autograd.grad(values, parameters, chosen, is_grads_batched=True, allow_unused=True)
    return [x.new_zeros(len(chosen), *x.shape) if g is None else g for x, g in zip(parameters, each, strict=True)]
