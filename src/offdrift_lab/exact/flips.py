"""The bias that flipped routes leave in the gradient of token-level weights, exactly, over T, K and delta.

With probability phi the rollout engine's router takes the next best expert in place of the least one chosen, so that
two of the K memberships of a token differ:

    mu = (1 - phi) pi + phi pi',     delta = (1/K) sum_i Pr[m_i^roll != m_i^train] = 2 phi / K.

Token-level importance sampling ascends the surrogate, E_mu[A sum_t w_t grad log pi] = grad L'(pi), so that its bias
is the gradient of what the surrogate leaves out: grad J - grad L' = grad Error. It is taken by recursion over
positions, with respect to the router's and the experts' logits.

To first order in phi the bias along a direction is -phi E_pi[R sum_{s != t} u_s v_t] with u = pi'/pi - 1 and v the
score, both of mean 0 given the tokens before. For s < t the terms of different t are orthogonal, and
E[(sum_{s < t} u_s)^2 v_t^2] <= (t - 1) chi^2 F with chi^2 and F the largest conditional mean squares; so too for s > t.
By Cauchy-Schwarz |bias| <= phi T sd(R) sqrt(2 chi^2 F): of order T K delta at most, whatever the reward. Whether that
is attained depends on the reward.

Reference: the survey's Problem 3 (conjecture |Bias| = Theta(T K delta)); surrogate: Li et al., arXiv:2512.23075v5,
eq. 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.errors import BadValueError
from offdrift.stats.seeds import over_seeds
from offdrift_lab.exact.markov import Automaton, MarkovPolicy, markov_divergences, markov_returns, return_gradient, walk
from offdrift_lab.exact.routing import Mixture

TASKS = ("threshold", "chain", "walk")
"""Rewards in [0, 1] that add up differently over T tokens.

    threshold  1 if steps up lead by a standard deviation: the policy does not see the lead, so that drift adds up
    chain      every token may be fatal, once in T on average: all tokens matter alike
    walk       the last of 9 places: old tokens are forgotten
"""
PLACES, LIVING = 4, 3


@dataclass(frozen=True)
class RoutedWorld:
    """`p` mixtures of experts that answer one task of T tokens."""

    task: str
    machine: Automaton
    horizon: int
    rewards: Float[Tensor, " s"]
    mixture: Mixture
    """One level: the contexts that the policy tells apart."""
    context: tuple[int, ...]
    """For each state the context that the policy sees in it."""

    def policy(self, rows: Float[Tensor, "p c v"]) -> MarkovPolicy:
        """The policy with these rows. Gradient: to them."""
        return MarkovPolicy(self.machine, rows[:, None, list(self.context)], self.horizon)

    def with_leaves(self) -> RoutedWorld:
        """Return the world, its mixture's parameters requiring gradients."""
        return replace(self, mixture=self.mixture.moved([torch.zeros_like(x) for x in self.mixture.parameters()]))

    def own(self) -> Float[Tensor, "p c v"]:
        """The trainer's rows, by its own routes. Gradient: to the mixture's parameters."""
        return self.mixture.rows(self.mixture.gates(self.mixture.routes()))[0]

    def flipped(self) -> Float[Tensor, "p c v"]:
        """The rows with every route flipped."""
        return self.mixture.rows(self.mixture.gates(self.mixture.next_best()))[0]


def make_world(
    task: str, *, horizon: int, experts: int, top_k: int, pairs: int, seed: int, spread: float = 1.0
) -> RoutedWorld:
    """Random mixtures on one of `TASKS`.

    Args:
        spread: standard deviation of the experts' logits: how far a flip moves the policy.

    Raises: `BadValueError` for another task, a horizon below 2, or a K that is no number of these experts.
    """
    if task not in TASKS:
        raise BadValueError(f"task {task!r}; choose from {', '.join(TASKS)}")
    if horizon < 2:
        raise BadValueError(f"horizon = {horizon}; drift adds up over at least 2 tokens")
    generator = torch.Generator().manual_seed(seed)
    if task == "chain":
        dead, vocab = LIVING, LIVING + 1
        states = torch.cat([torch.tensor([dead]), torch.arange(LIVING)]).repeat(LIVING + 1, 1)
        states[dead] = dead
        machine = Automaton(states, torch.tensor([1.0] + [0.0] * LIVING, dtype=torch.float64))
        rewards, contexts = torch.tensor([1.0] * LIVING + [0.0], dtype=torch.float64), LIVING + 1
        context = tuple(range(contexts))
    elif task == "walk":
        machine, vocab, contexts = walk(3, PLACES), 3, 2 * PLACES + 1
        rewards = torch.arange(contexts, dtype=torch.float64) / (contexts - 1)
        context = tuple(range(contexts))
    else:
        machine, vocab, contexts = walk(3, horizon), 3, 1
        rewards = (torch.arange(2 * horizon + 1) > horizon + math.sqrt(2 * horizon / 3)).double()
        context = (0,) * (2 * horizon + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    router, logits = normal(pairs, contexts, experts), spread * normal(pairs, contexts, experts, vocab)
    if task == "chain":  # odds of 1 to T - 1
        logits[..., 0] += logits[..., 1:].logsumexp(-1) - math.log(horizon - 1)
    if task == "threshold":  # as many steps up as down on average
        order = router.argsort(-1, descending=True)
        router, logits = router.gather(-1, order), _balanced(logits, router.gather(-1, order), top_k)
    mixture = Mixture((router,), (logits,), top_k)
    return RoutedWorld(task, machine, horizon, rewards=rewards, mixture=mixture, context=context)


def _balanced(logits: Float[Tensor, "p c e v"], router: Float[Tensor, "p c e"], top_k: int) -> Tensor:
    """The experts' logits with last and first token tilted so that the mixture gives both the same probability."""
    omega = router[..., :top_k].softmax(-1)
    low, high = torch.full_like(router[..., :1, None], -20.0), torch.full_like(router[..., :1, None], 20.0)
    tilt = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    for _ in range(60):
        middle = (low + high) / 2
        rows = (omega[..., None] * (logits[:, :, :top_k] + middle * tilt).softmax(-1)).sum(2)
        too_high = (rows[..., -1] > rows[..., 0])[..., None, None]
        low, high = torch.where(too_high, low, middle), torch.where(too_high, middle, high)
    return logits + low * tilt


@dataclass(frozen=True)
class Flips:
    """Effects of flips at one rate on the gradient of token-level importance sampling, for `p` worlds."""

    bias: Float[Tensor, " p"]
    """Norm of the bias that flips add to that of the dense drift, over all parameters."""
    gradient: Float[Tensor, " p"]
    """Norm of grad J."""
    kl_token: Float[Tensor, " p"]
    """Mean KL(rollout || current) of a token as a log measures it, the route that drew it being known, nats."""


def flip_bias(world: RoutedWorld, phi: float, *, dense: Float[Tensor, "p c v"] | None = None) -> Flips:
    """The exact bias of E_mu[A sum_t w_t grad log pi] that flips cause, by recursion over positions.

    Args:
        phi: probability that a token's route flips; K delta = 2 phi.
        dense: drift of the rollout's log-probs besides, nats; its own bias is subtracted.

    Raises: `BadValueError` for a phi outside [0, 1].
    """
    if not 0 <= phi <= 1:
        raise BadValueError(f"phi = {phi}; a probability of a flip lies in [0, 1]")
    world = world.with_leaves()
    trainer, other = world.own(), world.flipped().detach()
    rollout_rows = trainer.detach()
    if dense is not None:
        rollout_rows, other = (rollout_rows.log() + dense).softmax(-1), (other.log() + dense).softmax(-1)
    current = world.policy(trainer)

    def error_gradient(rollout: Tensor) -> Float[Tensor, "p parameters"]:
        error = markov_returns(world.policy(rollout), current, world.rewards[None]).error.sum()
        gradients = torch.autograd.grad(error, world.mixture.parameters(), retain_graph=True)
        return torch.cat([g.flatten(1) for g in gradients], 1)

    bias = error_gradient((1 - phi) * rollout_rows + phi * other)
    if dense is not None:
        bias = bias - error_gradient(rollout_rows)
    j = return_gradient(current, world.rewards[None]).detach()
    rows = (current.tokens.log() * j).sum()  # its gradient is that of J: dJ/dlogit of the softmax rows
    parameter_gradients = torch.autograd.grad(rows, world.mixture.parameters())
    with torch.no_grad():
        routes = ((1 - phi, rollout_rows), (phi, other))
        marginal = world.policy((1 - phi) * rollout_rows + phi * other)
        laws = marginal.laws()[:, :-1].mean(1)  # of states, over positions
        kl = torch.zeros(len(trainer), dtype=torch.float64)
        for share, rows_of in routes:
            each = (rows_of * (rows_of.log() - trainer.log())).sum(-1)[:, list(world.context)]
            kl = kl + share * (laws * each).sum(1)
    return Flips(bias.norm(dim=1), torch.cat([g.flatten(1) for g in parameter_gradients], 1).norm(dim=1), kl)


@dataclass(frozen=True)
class Exponent:
    """The power of one quantity in another, fitted in each world."""

    task: str
    swept: str
    """"delta", "T", "T_last" (the last doubling alone), "K" (2 experts act) or "K_sparse" (a quarter of them)."""
    mean: float
    low: float
    high: float
    """95 % interval of the mean over worlds."""
    relative: float
    """The same of |bias| / |grad J|."""
    worlds: int


@dataclass(frozen=True)
class FlipCell:
    """One setting of the experiment: medians over worlds."""

    task: str
    horizon: int
    experts: int
    top_k: int
    flips: float
    """K delta = 2 phi, memberships that flip per token."""
    spread: float
    """Standard deviation of the experts' logits."""
    bias: float
    gradient: float
    kl_token: float
    dense_bias: float
    """Of a dense drift of the log-probs with the same token KL in each world."""


SPREADS = (0.25, 0.5, 2.0)
"""Of experts' logits: how much a flip moves the policy, at the same K delta."""


def flip_cells(
    *, horizons: Sequence[int], rates: Sequence[float], counts: Sequence[int], tasks: Sequence[str]
) -> Iterator[tuple[str, dict[str, float | int], str]]:
    """Task, setting and name of the sweep of every cell; those of the base belong to several sweeps."""
    base: dict[str, float | int] = {"horizon": 32, "experts": 8, "top_k": 2, "flips": 2e-4, "spread": 1.0}
    for task in tasks:
        yield from ((task, base | {"horizon": t}, "T") for t in horizons)
        yield from ((task, base | {"flips": x}, "delta") for x in rates)
        yield from ((task, base | {"experts": k}, "K") for k in counts)
        yield from ((task, base | {"experts": k, "top_k": max(1, k // 4)}, "K_sparse") for k in counts)
        yield from ((task, base | {"spread": x}, "spread") for x in SPREADS)


def flip_experiment(
    cells: Iterable[tuple[str, dict[str, float | int], str]], *, pairs: int, seed: int, dense_kl: float = 0.0
) -> Iterator[tuple[FlipCell, str, dict[str, Tensor]]]:
    """Every cell with its sweep, and the numbers of its worlds.

    Args:
        pairs: worlds of each cell.
        dense_kl: KL per token of a dense drift of the rollout engine, the same in every cell, nats; what is measured is
            the bias that flips add to it.
    """
    done: dict[tuple[str, tuple[float, ...]], tuple[FlipCell, dict[str, Tensor]]] = {}
    for task, setting, sweep in cells:
        key = task, tuple(setting.values())
        if key in done:
            yield done[key][0], sweep, done[key][1]
            continue
        horizon, experts, top_k = (int(setting[name]) for name in ("horizon", "experts", "top_k"))
        phi = setting["flips"] / 2
        sizes = {"horizon": horizon, "experts": experts, "top_k": top_k, "spread": setting["spread"]}
        world = make_world(task, pairs=pairs, seed=seed, **sizes)  # type: ignore[arg-type]
        noise_of = torch.randn(
            world.own().shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64
        )
        dense = None if dense_kl == 0 else noise_of * _scale(world, noise_of, torch.full((pairs,), dense_kl))
        flips = flip_bias(world, phi, dense=dense)
        alike = noise_of * _scale(world, noise_of, flips.kl_token)
        other = dense_bias(world, alike)
        numbers = {"bias": flips.bias, "gradient": flips.gradient, "kl_token": flips.kl_token, "dense": other}
        medians = [float(x.median()) for x in numbers.values()]
        done[key] = FlipCell(task, horizon, experts, top_k, setting["flips"], setting["spread"], *medians), numbers
        yield done[key][0], sweep, numbers


def dense_bias(world: RoutedWorld, dense: Float[Tensor, "p c v"]) -> Float[Tensor, " p"]:
    """Norm of the bias of token-level importance sampling where the rollout's log-probs drift and no route flips."""
    world = world.with_leaves()
    trainer = world.own()
    rollout = (trainer.detach().log() + dense).softmax(-1)
    error = markov_returns(world.policy(rollout), world.policy(trainer), world.rewards[None]).error.sum()
    gradients = torch.autograd.grad(error, world.mixture.parameters())
    return torch.cat([g.flatten(1) for g in gradients], 1).norm(dim=1)


def _scale(world: RoutedWorld, noise_of: Float[Tensor, "p c v"], kl: Float[Tensor, " p"]) -> Float[Tensor, "p 1 1"]:
    """The size of the noise at which a token's mean KL is `kl` in each world; KL is nearly quadratic in it."""
    trainer, size = world.own().detach(), torch.full_like(kl, 1e-2)
    for _ in range(12):
        rollout = (trainer.log() + size[:, None, None] * noise_of).softmax(-1)
        size = size * (kl / markov_divergences(world.policy(rollout), world.policy(trainer)).mean_kl.mean(1)).sqrt()
    return size[:, None, None]


def exponents(cells: Sequence[tuple[FlipCell, str, dict[str, Tensor]]]) -> list[Exponent]:
    """The power of the bias in delta, T and K for every task, with 95 % intervals over worlds.

    In T from 16 tokens on. Sweeps over K hold delta fixed: the bias is measured at equal K delta, of which delta is the
    K-th part, and is of first order in it.
    """
    rows = []
    of = {"delta": "flips", "T": "horizon", "T_last": "horizon", "K": "experts", "K_sparse": "experts"}
    for task in dict.fromkeys(cell.task for cell, _, _ in cells):
        for sweep, field in of.items():
            chosen = [
                (getattr(cell, field), numbers)
                for cell, name, numbers in cells
                if cell.task == task
                and name == sweep.removesuffix("_last")
                and (field != "horizon" or cell.horizon >= 16)
            ]
            chosen = sorted(chosen, key=lambda pair: pair[0])[-2:] if sweep == "T_last" else chosen
            if len(chosen) < 2:
                continue
            x = np.log([value for value, _ in chosen])
            y = np.stack([numbers["bias"].log().numpy() for _, numbers in chosen])
            relative = y - np.stack([numbers["gradient"].log().numpy() for _, numbers in chosen])
            fixed = 1.0 if field == "experts" else 0.0
            slopes, relative_slopes = (np.polyfit(x, values, 1)[0] + fixed for values in (y, relative))
            over_worlds = over_seeds(slopes.tolist())
            rows.append(
                Exponent(
                    task,
                    sweep,
                    over_worlds.mean,
                    low=over_worlds.low,
                    high=over_worlds.high,
                    relative=float(relative_slopes.mean()),
                    worlds=len(slopes),
                )
            )
    return rows


def explained(cells: Sequence[tuple[FlipCell, str, dict[str, Tensor]]]) -> list[dict[str, float | str]]:
    """Share of log |bias| that each predictor explains over all cells and worlds of a task, by a fitted power (R^2)."""
    rows: list[dict[str, float | str]] = []
    for task in dict.fromkeys(cell.task for cell, _, _ in cells):
        of_task = [(cell, numbers) for cell, _, numbers in cells if cell.task == task]
        y = np.concatenate([n["bias"].log().numpy() for _, n in of_task])
        each = [len(n["bias"]) for _, n in of_task]
        tkd = np.repeat([math.log(c.horizon * c.flips) for c, _ in of_task], each)
        kd = np.repeat([math.log(c.flips) for c, _ in of_task], each)
        kl = np.concatenate([n["kl_token"].log().numpy() for _, n in of_task])
        tkl = kl + np.repeat([math.log(c.horizon) for c, _ in of_task], each)
        predictors = {"T K delta": tkd, "K delta": kd, "token KL": kl, "T KL": tkl}
        dense = float(np.median([float((n["dense"] / n["bias"]).median()) for _, n in of_task]))
        squares = {name: float(np.corrcoef(x, y)[0, 1] ** 2) for name, x in predictors.items()}
        rows.append({"task": task, **squares, "dense_over_flips": dense})
    return rows
