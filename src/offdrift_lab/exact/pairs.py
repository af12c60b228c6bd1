"""Pairs of policies to test bounds on, with their exact divergences and worst errors.

For masked surrogates: a guarantee without preconditions says J(pi) - J(mu) >= L'_masked - B_A -
price. With F(y) the weight of a sequence's reward in the error, and d(y) = pi(y) - mu(y), the left
side falls below L'_masked by

    sum_y R(y) (M (d - F) - d) = sum_{accepted} R (-F) + sum_{rejected} R (-d),

worst for the reward 1 where a term is positive. If the price is the rejected reward itself, the
second sum is paid for by it.

Reference: Li et al., arXiv:2512.23075v5, Proposition G.1, Remark G.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.errors import BadValueError
from offdrift_lab.exact.markov import (
    Automaton,
    MarkovPolicy,
    counter,
    drift_flip,
    drift_noise,
    drift_tilt,
    last_tokens,
    markov_divergences,
    pattern,
    product,
    prompts,
    random_markov,
    shifted,
    state_error_weights,
    walk,
)
from offdrift_lab.exact.policy import (
    Divergences,
    TabularPolicy,
    divergences,
    error_weights,
    over_prompts,
    perturbed,
    random_policies,
    token_kl,
    weights_by_sequence,
)
from offdrift_lab.exact.statements import STATEMENTS, Sides, all_sides


@dataclass(frozen=True)
class Masked:
    """Two accepted regions of `p` pairs, and what is exactly true about them."""

    tau: Float[Tensor, " p"]
    """Ratio region: |log w_t| <= tau at every token, tau the median over sequences; nan if none."""
    rejected: Float[Tensor, " p"]
    """Its rejected share, r."""
    overstated: Float[Tensor, " p"]
    """Its largest sum_{accepted} R (-F): what B_A must bound."""
    lost: Float[Tensor, " p"]
    """Its largest sum_{rejected} R (mu - pi)."""
    prefix_kl: Float[Tensor, " p"]
    """Trust region, KL <= delta_max / 2 at every context: E_mu[sum_t 1(contexts 1 .. t in it) KL]."""
    overstated_kl: Float[Tensor, " p"]
    """Its largest sum_{accepted} R (-F)."""


def masked(rollout: TabularPolicy, current: TabularPolicy) -> Masked:
    """Compute what is true of both regions, by enumeration."""
    shift, error = weights_by_sequence(rollout, current)
    law = rollout.law()
    possible = law > 0
    over = (-error).clamp(min=0)
    # max_t |log w_t| of every sequence; infinite where either policy cannot draw it.
    worst = rollout.levels[0].new_zeros(rollout.pairs, 1)
    for mu, pi in zip(rollout.levels, current.levels, strict=True):
        size = torch.where((mu > 0) & (pi > 0), (pi.log() - mu.log()).abs(), torch.inf)
        worst = torch.maximum(worst[..., None], size).flatten(1)
    tau = torch.where(possible, worst, torch.inf).median(dim=1).values
    accepted = (worst <= tau[:, None]) & possible
    region, prefix_kl = _inside(rollout, current)
    return Masked(
        tau=torch.where(tau < torch.inf, tau, torch.nan),
        rejected=(law * ~accepted).sum(1).clamp(max=1),
        overstated=(over * accepted).sum(1),
        lost=((-shift).clamp(min=0) * (possible & ~accepted)).sum(1),
        prefix_kl=prefix_kl,
        overstated_kl=(over * (region & possible)).sum(1),
    )


def _inside(rollout: TabularPolicy, current: TabularPolicy) -> tuple[Bool[Tensor, "p y"], Float[Tensor, " p"]]:
    """Sequences whose contexts all have at most half the largest KL, and their prefix KL."""
    kl = [token_kl(mu, pi) for mu, pi in zip(rollout.levels, current.levels, strict=True)]
    limit = torch.stack([x.amax(1) for x in kl]).amax(0)[:, None] / 2
    inside = torch.ones(rollout.pairs, 1, dtype=torch.bool)
    total = limit.new_zeros(rollout.pairs)
    for law, x in zip(rollout.context_laws(), kl):
        inside = inside & (x <= limit)
        total = total + (law * x.where(inside & (law > 0), 0.0)).sum(1)
        inside = inside.repeat_interleave(rollout.vocab, dim=1)
    return inside, total


# Enumerated pairs have at most 8 tokens and the worst of all rewards in [0, 1]; Markov pairs have up to a thousand and
# the worst functions of the last state, with the upper end of the TV of sequences. Sizes of drift span four decades.


TREES = [(2, 2), (2, 3), (2, 4), (2, 5), (2, 6), (2, 8), (3, 2), (3, 3), (3, 4), (3, 6), (3, 8)]
TREES += [(4, 2), (4, 3), (4, 4), (4, 6)]
"""Vocabulary and horizon of enumerated pairs."""
HORIZONS = (16, 64, 256, 1024)
"""Horizons of pairs that are followed by recursion."""
LARGEST = 1 << 21
"""Sequences, or states and positions, in one batch: bounds memory to a few hundred MB."""

_PROMPTS = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)


@dataclass(frozen=True)
class PairBatch:
    """Pairs of one kind, with everything the bounds take and the error they must hold for."""

    family: str
    vocab: int
    horizon: int
    enumerated: bool
    """Whether TV of sequences is exact and the rewards are the worst of all."""
    divergences: Divergences
    error: Float[Tensor, " p"]
    """The largest |J(pi) - J(mu) - L'(pi)| over rewards in [0, 1]."""
    masked: Masked | None = None
    """What masked surrogates overstate; only of enumerated pairs on one prompt."""
    sides: Mapping[str, Sides] = field(default_factory=dict)
    """Both sides of the statements beyond Table 1, by name; only of enumerated pairs on one prompt."""


TabularPair = tuple[TabularPolicy, TabularPolicy]
Maker = Callable[[int, int, int, torch.Generator], TabularPair]
"""Pairs, vocabulary, horizon and generator to rollout and current policies."""


def enumerated(
    family: str, vocab: int, horizon: int, mu: TabularPolicy, pi: TabularPolicy, statements: Collection[str] = ()
) -> PairBatch:
    """Exact divergences and worst error of pairs that can be enumerated. Gradient: to both.

    Args:
        statements: names of `lab.statements.STATEMENTS` to evaluate, too.
    """
    error = error_weights(mu, pi).clamp(min=0).sum(1)
    sides = all_sides(mu, pi, statements)
    return PairBatch(family, vocab, horizon, enumerated=True, divergences=divergences(mu, pi), error=error, sides=sides)


def followed(family: str, mu: MarkovPolicy, pi: MarkovPolicy) -> PairBatch:
    """Divergences and worst error over rewards of the last state. Gradient: to both."""
    d = markov_divergences(mu, pi)
    error = state_error_weights(mu, pi).clamp(min=0).sum(1)
    limits = Divergences(d.kl_max, d.tv_max, d.kl_seq, d.tv_seq_high, d.mean_tv)
    return PairBatch(family, mu.vocab, mu.horizon, enumerated=False, divergences=limits, error=error)


def batches(pairs: int, *, seed: int, longest: int = HORIZONS[-1]) -> Iterator[PairBatch]:
    """That many pairs, as evenly as possible over all kinds and sizes, in random order.

    Args:
        longest: leave out horizons above this.

    Raises: `BadValueError` unless `pairs` is at least 1.
    """
    if pairs < 1:
        raise BadValueError(f"pairs = {pairs}; at least 1 pair must be checked")
    g = torch.Generator().manual_seed(seed)
    cells = [cell for cell in _cells() if cell.horizon <= longest]
    for place, number in enumerate(torch.randperm(len(cells), generator=g).tolist()):
        share = pairs * (place + 1) // len(cells) - pairs * place // len(cells)
        cell = cells[number]
        while share > 0:
            yield cell.make(min(share, cell.most), g)
            share -= cell.most


def _unrelated(n: int, vocab: int, horizon: int, g: torch.Generator) -> TabularPair:
    first, second = (random_policies(n, vocab=vocab, horizon=horizon, generator=g) for _ in "ab")
    return first, second


def _noise(
    n: int,
    vocab: int,
    horizon: int,
    g: torch.Generator,
    *,
    spread: float = 1.0,
    largest: float = 2.0,
    touched: float = 1.0,
) -> TabularPair:
    """Noise of all sizes up to `largest` nats, on a share of the contexts."""
    mu = random_policies(n, vocab=vocab, horizon=horizon, spread=spread, generator=g)
    return mu, perturbed(mu, scale=_sizes(n, largest, g), touched=touched, generator=g)


def _biased(n: int, vocab: int, horizon: int, g: torch.Generator, *, spread: float = 1.0) -> TabularPair:
    """Every context drifts towards token 0."""
    mu = random_policies(n, vocab=vocab, horizon=horizon, spread=spread, generator=g)
    push = torch.eye(vocab, dtype=torch.float64)[0] * _sizes(n, 2.0, g)[:, None, None]
    return mu, TabularPolicy(tuple((x.log() + push).softmax(-1) for x in mu.levels))


def _rare(n: int, vocab: int, horizon: int, g: torch.Generator) -> TabularPair:
    """One token nearly always, the same at every context; the current policy less so."""
    first = torch.eye(vocab, dtype=torch.float64)[0]
    sure = 3 + 9 * torch.rand(n, 1, generator=g, dtype=torch.float64)
    logits = sure * first + 0.1 * torch.randn(n, vocab, generator=g, dtype=torch.float64)
    drifted = logits - _sizes(n, 6.0, g)[:, None] * first
    mu, pi = (tuple(x.softmax(-1)[:, None].expand(-1, vocab**t, -1) for t in range(horizon)) for x in (logits, drifted))
    return TabularPolicy(mu), TabularPolicy(pi)


def _one_position(n: int, vocab: int, horizon: int, g: torch.Generator) -> TabularPair:
    mu, other = _unrelated(n, vocab, horizon, g)
    return mu, mu.with_level(int(torch.randint(horizon, (), generator=g)), other)


def _filtered(n: int, vocab: int, horizon: int, g: torch.Generator, *, side: int) -> TabularPair:
    """Unrelated policies. One of them, 0 the rollout or 1 the current, draws no token below half the uniform share."""
    pair = list(_unrelated(n, vocab, horizon, g))
    levels = [level.where(level >= 0.5 / vocab, 0.0) for level in pair[side].levels]
    pair[side] = TabularPolicy(tuple(level / level.sum(-1, keepdim=True) for level in levels))
    return pair[0], pair[1]


FAMILIES: dict[str, Maker] = {
    "unrelated": _unrelated,
    "noise": _noise,
    "noise, uniform rollout": partial(_noise, spread=0.0),
    "noise, sharp rollout": partial(_noise, spread=6.0, largest=4.0),
    "sparse": partial(_noise, largest=4.0, touched=0.15),
    "biased": _biased,
    "biased, uniform rollout": partial(_biased, spread=0.0),
    "rare tokens": _rare,
    "one position": _one_position,
    "rollout filtered": partial(_filtered, side=0),
    "current filtered": partial(_filtered, side=1),
}
"""Kinds of enumerated pairs; "several prompts" is another."""


@dataclass(frozen=True)
class PairCell:
    """One kind of pairs at one size."""

    horizon: int
    most: int
    """Pairs at a time."""
    make: Callable[[int, torch.Generator], PairBatch]


def _one_prompt(family: str, make: Maker, vocab: int, horizon: int, n: int, g: torch.Generator) -> PairBatch:
    mu, pi = make(n, vocab, horizon, g)
    return replace(enumerated(family, vocab, horizon, mu=mu, pi=pi, statements=STATEMENTS), masked=masked(mu, pi))


def _several_prompts(vocab: int, horizon: int, n: int, g: torch.Generator) -> PairBatch:
    each = enumerated("several prompts", vocab, horizon, *_noise(n * len(_PROMPTS), vocab, horizon, g))
    error = each.error.unflatten(0, (n, len(_PROMPTS))) @ _PROMPTS
    return replace(each, divergences=over_prompts(each.divergences, _PROMPTS), error=error)


MACHINES: dict[str, Automaton] = {
    "parity": counter(2, 2),
    "majority": walk(3, 3),
    "last token": last_tokens(4),
    "pattern": pattern(3, [1, 0, 1]),
    "parity and last token": product(counter(3, 2), last_tokens(3)),
    "majority, two prompts": prompts(walk(2, 2), [0.7, 0.3]),
}
"""Automata of the policies and their rewards."""
DRIFTS = ("noise", "noise at every position", "flip", "tilt", "rare tokens")


def _markov_batch(drift: str, name: str, machine: Automaton, horizon: int, n: int, g: torch.Generator) -> PairBatch:
    stationary = drift != "noise at every position"
    mu = random_markov(machine, n, horizon=horizon, stationary=stationary, generator=g)
    sizes = _sizes(n, 2.0, g)
    if drift == "rare tokens":  # a few in a sequence of any length, or fewer
        sure = math.log(horizon) + 6 * torch.rand(n, generator=g, dtype=torch.float64)
        mu, push, sizes = shifted(mu, drift_tilt(mu), scale=sure), -drift_tilt(mu), 3 * sizes
    elif drift == "flip":
        push = drift_flip(mu, generator=g)
    else:
        push = drift_tilt(mu) if drift == "tilt" else drift_noise(mu, generator=g)
    return followed(f"{name}: {drift}", mu, shifted(mu, push, scale=sizes))


def _cells() -> list[PairCell]:
    """All kinds at all sizes: enumerated pairs, then Markov pairs."""
    cells = []
    for vocab, horizon in TREES:
        most = max(1, LARGEST // vocab**horizon)
        makers = [partial(_one_prompt, f, m, vocab, horizon) for f, m in FAMILIES.items()]
        cells += [PairCell(horizon, most, make) for make in makers]
        several = partial(_several_prompts, vocab, horizon)
        cells.append(PairCell(horizon, max(1, most // len(_PROMPTS)), several))
    for name, machine in MACHINES.items():
        for horizon in HORIZONS:
            most = max(1, LARGEST // (horizon * machine.states))
            makers = [partial(_markov_batch, drift, name, machine, horizon) for drift in DRIFTS]
            cells += [PairCell(horizon, most, make) for make in makers]
    return cells


def _sizes(n: int, largest: float, g: torch.Generator) -> Float[Tensor, " p"]:
    """Sizes of drift, evenly spread over four orders of magnitude."""
    return largest * 10 ** (-4 * torch.rand(n, generator=g, dtype=torch.float64))
