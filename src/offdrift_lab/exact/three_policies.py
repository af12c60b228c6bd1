"""The discounted three-policy bound on exact decision processes: the bound, the truth, and what each distance costs.

States s, actions a, discount gamma, and three policies: `rollout` mu drew the data, `old` is the trainer at the weights
that drew them, `current` pi is to be judged. With d_mu = (1 - gamma) sum_t gamma^t Pr_mu(s_t = s),

    L_mu(pi) = J(mu) + E_{d_mu, pi}[A_mu] / (1 - gamma),     alpha_1 = max_s TV(mu, old),   alpha_0 = max_s TV(old, pi),
    |J(pi) - L_mu(pi)| <= C beta <= C (alpha_0 + alpha_1),   C = 2 eps_mu gamma / (1 - gamma)^2,

beta = max_s TV(mu, pi) and eps_mu = max |A_mu|. alpha_1 is the mismatch of the engines, alpha_0 the staleness. The
proof bounds the mean advantage by eps_mu, although it is a difference of two expectations, and the shift of the states
by 2 gamma beta / (1 - gamma), although two coupled paths part only once. Without these losses, from the same inputs,

    |J(pi) - L_mu(pi)| <= 2 eps_mu gamma beta min(1, 2 beta) / ((1 - gamma) (1 - gamma + gamma beta)),

which is of second order in the drift, as the error is, and attained (`hard_process`;
`offdrift.certificate.guarantees.three_policy` with sharp constants).

Reference: X. Wang, S. Zhang, "From Two Policies to Three", 2025, Lemmas 1 and 2, Theorems 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.certificate.guarantees import three_policy
from offdrift.errors import BadValueError, ShapeError
from offdrift_lab.exact.policy import refuse_rows, token_tv

CONSTANTS = ("paper", "sharp")


@dataclass(frozen=True)
class Process:
    """`p` discounted decision processes side by side.

    Args:
        moves: probability of the next state after state s and action a, float64.
        rewards: of action a in state s.
        start: law of the first state.
        gamma: discount, in [0, 1).

    Raises: `ShapeError` if the three disagree; `BadValueError` for a discount outside [0, 1) or a row that is not a
        distribution.
    """

    moves: Float[Tensor, "p s a s2"]
    rewards: Float[Tensor, "p _ _"]
    start: Float[Tensor, "p _"]
    gamma: float

    def __post_init__(self) -> None:
        p, states, actions, after = self.moves.shape
        if after != states or self.rewards.shape != (p, states, actions) or self.start.shape != (p, states):
            raise ShapeError(
                f"moves {tuple(self.moves.shape)}, rewards {tuple(self.rewards.shape)} and start "
                f"{tuple(self.start.shape)} are of no one process; give (p, s, a, s), (p, s, a) and (p, s)"
            )
        if not 0 <= self.gamma < 1:
            raise BadValueError(f"gamma = {self.gamma}; a discount lies in [0, 1)")
        refuse_rows("moves", self.moves)
        refuse_rows("start", self.start)

    def occupancy(self, policy: Float[Tensor, "p s a"]) -> Float[Tensor, "p s"]:
        """d, the discounted law of states: (1 - gamma) sum_t gamma^t Pr(s_t = s)."""
        kernel = (policy[..., None] * self.moves).sum(2)
        eye = torch.eye(kernel.shape[-1], dtype=kernel.dtype)
        return torch.linalg.solve(eye - self.gamma * kernel.mT, (1 - self.gamma) * self.start)

    def advantages(self, policy: Float[Tensor, "p s a"]) -> Float[Tensor, "p s a"]:
        """A(s, a) = Q(s, a) - V(s) of the policy's own returns."""
        kernel = (policy[..., None] * self.moves).sum(2)
        eye = torch.eye(kernel.shape[-1], dtype=kernel.dtype)
        values = torch.linalg.solve(eye - self.gamma * kernel, (policy * self.rewards).sum(-1))
        q = self.rewards + self.gamma * (self.moves @ values[:, None, :, None]).squeeze(-1)
        return q - values[..., None]

    def returns(self, policy: Float[Tensor, "p s a"]) -> Float[Tensor, " p"]:
        """J = E[sum_t gamma^t r_t]."""
        rewards = (policy * self.rewards).sum(-1)
        return (self.occupancy(policy) * rewards).sum(-1) / (1 - self.gamma)


@dataclass(frozen=True)
class Judged:
    """The bound and the truth of `p` triples of policies."""

    tv_mismatch: Float[Tensor, " p"]
    """alpha_1 = max_s TV(mu, old)."""
    tv_staleness: Float[Tensor, " p"]
    """alpha_0 = max_s TV(old, pi)."""
    tv_whole: Float[Tensor, " p"]
    """beta = max_s TV(mu, pi), at most their sum."""
    advantage: Float[Tensor, " p"]
    """eps_mu = max |A_mu|, units of reward."""
    error: Float[Tensor, " p"]
    """J(pi) - L_mu(pi), units of reward."""
    paper: Float[Tensor, " p"]
    """C (alpha_0 + alpha_1)."""
    sharp: Float[Tensor, " p"]
    """The same inputs without what the proof gives away."""
    one_pair: Float[Tensor, " p"]
    """C beta, the two-policy bound."""
    without_mismatch: Float[Tensor, " p"]
    """|J - L| if `old` had drawn the data (mu = old)."""
    without_staleness: Float[Tensor, " p"]
    """|J - L| if the data were used before the update (pi = old)."""


def surrogate_error(
    process: Process, rollout: Float[Tensor, "p s a"], current: Float[Tensor, "p s a"]
) -> Float[Tensor, " p"]:
    """J(pi) - L_mu(pi) = (d_pi - d_mu) . E_pi[A_mu] / (1 - gamma), exactly.

    Reference: Wang and Zhang, 2025, the identity before Lemma 1.
    """
    shift = process.occupancy(current) - process.occupancy(rollout)
    mean = ((current - rollout) * process.advantages(rollout)).sum(-1)  # E_mu[A_mu] = 0 at every state
    return (shift * mean).sum(-1) / (1 - process.gamma)


def judge(
    process: Process,
    rollout: Float[Tensor, "p s a"],
    old: Float[Tensor, "p s a"],
    current: Float[Tensor, "p s a"],
    *,
    factor: float = 1.0,
) -> Judged:
    """Distances, bounds and the true error of every triple.

    Args:
        factor: multiplies every bound; below 1 a check of the bounds should notice.

    Raises: `BadValueError` for a row that is not a distribution.
    """
    for name, policy in (("rollout", rollout), ("old", old), ("current", current)):
        refuse_rows(name, policy)
    mismatch, staleness = token_tv(rollout, old).amax(-1), token_tv(old, current).amax(-1)
    total_tv, eps = token_tv(rollout, current).amax(-1), process.advantages(rollout).abs().amax((1, 2))

    def bounds(first: Tensor, second: Tensor, constants: str) -> Tensor:
        numbers = zip(eps.tolist(), first.clamp(max=1).tolist(), second.clamp(max=1).tolist(), strict=True)
        values = [
            three_policy(advantage=e, gamma=process.gamma, tv_mismatch=x, tv_staleness=y, constants=constants).error
            for e, x, y in numbers
        ]
        return factor * torch.tensor(values, dtype=torch.float64)

    return Judged(
        tv_mismatch=mismatch,
        tv_staleness=staleness,
        tv_whole=total_tv,
        advantage=eps,
        error=surrogate_error(process, rollout, current),
        paper=bounds(mismatch, staleness, "paper"),
        sharp=bounds(mismatch, staleness, "sharp"),
        one_pair=bounds(total_tv, torch.zeros_like(total_tv), "paper"),
        without_mismatch=surrogate_error(process, old, current).abs(),
        without_staleness=surrogate_error(process, rollout, old).abs(),
    )


def random_triples(
    pairs: int, *, states: int, actions: int, gamma: float, largest: float = 3.0, generator: torch.Generator
) -> tuple[Process, Float[Tensor, "p s a"], Float[Tensor, "p s a"], Float[Tensor, "p s a"]]:
    """Processes with sparse random moves, rewards in [0, 1], and two independent drifts of all sizes.

    Args:
        largest: standard deviation of the largest drift of logits, nats; sizes are even over four decades.

    Returns: the process, then the rollout, the old and the current policy.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def sizes() -> Tensor:
        exponents = torch.rand(pairs, 1, 1, generator=generator, dtype=torch.float64)
        return largest * 10 ** (-4 * exponents)

    # Spread logits: a few likely successors, so that an action decides where one goes.
    moves = (3 * normal(pairs, states, actions, states)).softmax(-1)
    rewards = torch.rand(pairs, states, actions, generator=generator, dtype=torch.float64)
    start = normal(pairs, states).softmax(-1)
    logits = normal(pairs, states, actions)
    old = logits + sizes() * normal(pairs, states, actions)
    current = old + sizes() * normal(pairs, states, actions)
    return (
        Process(moves, rewards, start, gamma),
        logits.softmax(-1),
        old.softmax(-1),
        current.softmax(-1),
    )


def hard_process(beta: float, gamma: float) -> tuple[Process, Tensor, Tensor, Tensor]:
    """A process on which the sharp bound is attained.

    Actions 0 and 1 are as likely under mu, with advantages 1 and -1. State 0, the start, is left by action 2 alone, for
    state 1, for good, and with advantage -1; mu never takes it. pi moves a share beta from action 0 to 2 in state 0,
    and from action 1 to 0 in state 1: mean advantages of -2 beta and 2 beta, where a path is 1 action from the other.

    Returns: one process, mu, mu again as the old policy, and pi.

    Raises: `BadValueError` for a beta outside [0, 1/2].

    Example:
        >>> judged = judge(*hard_process(0.1, 0.9))
        >>> round(float(judged.error / judged.sharp), 9), round(float(judged.error / judged.paper), 4)
        (1.0, 0.1053)
    """
    if not 0 <= beta <= 0.5:
        raise BadValueError(f"beta = {beta}; a fair choice can be shifted by a TV of 0 to 0.5")
    moves = torch.zeros(1, 2, 3, 2, dtype=torch.float64)
    moves[0, 0, :2, 0] = moves[0, 0, 2, 1] = moves[0, 1, :, 1] = 1
    mu = torch.tensor([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]], dtype=torch.float64)
    pi = torch.tensor([[[0.5 - beta, 0.5, beta], [0.5 + beta, 0.5 - beta, 0.0]]], dtype=torch.float64)
    # Both states are worth 0 under mu, so that rewards are advantages.
    rewards = torch.tensor([[[1.0, -1.0, -1.0], [1.0, -1.0, 0.0]]], dtype=torch.float64)
    start = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    return Process(moves, rewards, start, gamma), mu, mu, pi


def batches(
    pairs: int, *, gammas: tuple[float, ...], seed: int, factor: float = 1.0, most: int = 500
) -> Iterator[tuple[float, int, Judged]]:
    """Random triples judged, so many at a time: discount, states, and the judgements."""
    generator = torch.Generator().manual_seed(seed)
    cells = [(gamma, states) for gamma in gammas for states in (2, 4, 8)]
    for i, (gamma, states) in enumerate(cells):
        left = pairs * (i + 1) // len(cells) - pairs * i // len(cells)
        while left > 0:
            count = min(left, most)
            triple = random_triples(count, states=states, actions=3, gamma=gamma, generator=generator)
            yield gamma, states, judge(*triple, factor=factor)
            left -= count


def merged(parts: list[Judged]) -> Judged:
    """All triples together."""
    return Judged(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Judged)})


def violations(judged: Judged, bound: str) -> int:
    """Triples whose error exceeds a bound ("paper", "sharp" or "one_pair"), beyond rounding."""
    value = getattr(judged, bound)
    return int((judged.error.abs() > value * (1 + 1e-9) + 1e-12).sum())


def tightness(judged: Judged, bound: str) -> Float[Tensor, " p"]:
    """|error| / bound; 0 where the bound is 0."""
    value = getattr(judged, bound)
    return torch.where(value > 0, judged.error.abs() / value, 0.0)


@dataclass(frozen=True)
class Advice:
    """Counts of triples where removing the larger distance leaves the smaller error, by how much larger it is."""

    low: float
    """The larger distance is at least so many times the other."""
    high: float
    triples: int
    right: int
    left: float
    """Median of the error that is left over the error before, the larger distance removed."""
    left_other: float
    """The same with the smaller one removed."""


EDGES = (1.0, 1.5, 3.0, 10.0, 100.0, float("inf"))


def advice(judged: Judged) -> list[Advice]:
    """The rule "invest in the larger of mismatch and staleness", held against the truth."""
    ratio = judged.tv_mismatch / judged.tv_staleness
    to_mismatch, factor = ratio > 1, torch.maximum(ratio, 1 / ratio)
    removed = torch.where(to_mismatch, judged.without_mismatch, judged.without_staleness)
    other = torch.where(to_mismatch, judged.without_staleness, judged.without_mismatch)
    rows = []
    for low, high in pairwise(EDGES):
        chosen = (factor >= low) & (factor < high)
        if not bool(chosen.any()):
            continue
        error = judged.error.abs()[chosen].clamp(min=1e-300)
        rows.append(
            Advice(
                low,
                high,
                int(chosen.sum()),
                right=int((removed < other)[chosen].sum()),
                left=float((removed[chosen] / error).median()),
                left_other=float((other[chosen] / error).median()),
            )
        )
    return rows
