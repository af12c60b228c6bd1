"""Coverage of certificates: how often they are wrong, and how often they speak, in worlds whose truth is known.

A world is a few prompts with their probabilities and, for each, both policies and a reward for every sequence, so
that every expectation that `certify` puts an interval around is a finite sum. A statement is false if a lower bound
lies above the gain, or an interval misses; a certificate speaks if it certifies an improvement. Repetition r of a
world is the same whatever the number of repetitions and of worlds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.certificate.batch import KL, TV, BatchEvidence
from offdrift.certificate.certify import certify
from offdrift.certificate.confidence import Estimate, Looks, clopper_pearson
from offdrift.certificate.guarantees import Certificate
from offdrift.certificate.regions import TrustRegion
from offdrift.certificate.samples import variables
from offdrift.divergence.evidence import Divergence
from offdrift.errors import BadValueError
from offdrift.logprobs import LogProbs
from offdrift.segments import Segments
from offdrift_lab.exact.policy import (
    TabularPolicy,
    divergences,
    perturbed,
    random_policies,
    returns,
    token_kl,
    token_tv,
)

Plant = Literal["none", "alpha", "answers"]
"""Mistakes that a check of certificates has to notice: "alpha" takes every interval at five times the alpha that it
states, "answers" counts the answers to one prompt as independent."""

SIGNIFICANCE = 0.05
"""Probability that any certificate is called false too often though none is: shared evenly by all rows."""


@dataclass(frozen=True)
class World:
    """Prompts, both policies and rewards in [0, 1], and how batches are drawn from them."""

    name: str
    about: str
    law: Float[Tensor, " p"]
    """Probability of each prompt."""
    mu: TabularPolicy
    """The rollout policy, one row of policies per prompt."""
    pi: TabularPolicy
    rewards: Float[Tensor, "p y"]
    region: TrustRegion
    prompts: int
    """Independent prompts of a batch."""
    answers: int
    """Sequences drawn for each prompt."""
    looks: int = 1
    """Batches of a run, each with a certificate of its own; a run's are false if any is."""

    @cached_property
    def gain(self) -> float:
        """J(pi) - J(mu), by enumeration."""
        each = returns(self.mu, self.pi, self.rewards)
        return float(self.law @ (each.current - each.rollout))

    @cached_property
    def population(self) -> Population:
        """Every sequence that can be drawn, with its evidence and its probability."""
        prompts, vocab, horizon = self.mu.pairs, self.mu.vocab, self.mu.horizon
        sequence = torch.arange(vocab**horizon)
        log_w, kl, tv = [], [], []
        for t, (mu, pi) in enumerate(zip(self.mu.levels, self.pi.levels, strict=True)):
            context = sequence // vocab ** (horizon - t)
            token = sequence // vocab ** (horizon - 1 - t) % vocab
            log_w.append((pi.log() - mu.log())[:, context, token])
            kl.append(token_kl(mu, pi)[:, context])
            tv.append(token_tv(mu, pi)[:, context])
        law = self.mu.law()
        possible = law > 0
        per_token = (torch.stack(x, -1)[possible].flatten() for x in (log_w, kl, tv))
        log_w, kl, tv = per_token
        rollout = torch.full_like(log_w, -1.0)
        logprobs = LogProbs(rollout, Segments.from_lengths([horizon] * int(possible.sum())), rollout + log_w)
        exact = {KL: Divergence.exact(KL, kl), TV: Divergence.exact(TV, tv.clamp(max=1.0))}
        return Population(
            BatchEvidence.of(logprobs, self.rewards[possible], region=self.region, divergences=exact),
            torch.arange(prompts)[:, None].expand_as(law)[possible].numpy(),
            law[possible].numpy(),
        )

    @cached_property
    def truths(self) -> dict[str, tuple[float, str]]:
        """The expectation behind each interval of a certificate, and which of its ends are used."""
        evidence, prompt, law = self.population
        host, region = evidence.to_host(), self.region
        accepted = self._inside & (host["worst"] <= (math.inf if region.tau is None else region.tau))
        weight = self.law.numpy()[prompt] * law
        of = variables(host, host["reward"], accepted, region)
        return {name: (float(weight @ x.values), x.sides) for name, x in of.items()}

    @cached_property
    def unseen(self) -> float:
        """The probability that a fresh prompt's sequences include one outside the region."""
        leaves = np.bincount(self.population.prompt, self.population.law * ~self._inside, self.mu.pairs)
        return float(self.law.numpy() @ (1 - (1 - leaves).clip(0) ** self.answers))

    @cached_property
    def _inside(self) -> Bool[np.ndarray, " y"]:
        host, region = self.population.evidence.to_host(), self.region
        return (host["kl_high"] <= region.delta) & (host["tv_high"] <= (1.0 if region.eps is None else region.eps))

    def draw(self, rng: np.random.Generator) -> BatchEvidence:
        """A batch: independent prompts, and independent answers to each."""
        rows = self.population.draw(self.law.numpy(), self.prompts, self.answers, rng)
        evidence = self.population.evidence
        groups = torch.arange(self.prompts).repeat_interleave(self.answers)
        return replace(evidence, columns=evidence.columns[torch.from_numpy(rows)], group_ids=groups)


class Population(NamedTuple):
    """Every sequence that can be drawn, by prompt."""

    evidence: BatchEvidence
    prompt: Int[np.ndarray, " y"]
    law: Float[np.ndarray, " y"]
    """Probability of the sequence, given the prompt."""

    def draw(
        self, prompts: Float[np.ndarray, " p"], count: int, answers: int, rng: np.random.Generator
    ) -> Int[np.ndarray, " b"]:
        """Rows of `answers` sequences each for `count` prompts, a prompt's next to each other."""
        who = np.repeat(rng.choice(len(prompts), count, p=prompts / prompts.sum()), answers)
        last = np.searchsorted(self.prompt, np.arange(len(prompts)), side="right") - 1
        total = self.law.cumsum()
        before = np.concatenate([[0.0], total])[np.searchsorted(self.prompt, who)]
        rows = np.searchsorted(total, before + rng.random(len(who)) * (total[last[who]] - before), side="right")
        return np.minimum(rows, last[who])


# -- worlds -----------------------------------------------------------------------------------


def benign() -> World:
    """Thirty prompts, small drift that meets the trust region, and a gain of .057."""
    g = torch.Generator().manual_seed(0)
    mu = random_policies(30, vocab=3, horizon=4, generator=g)
    push = perturbed(mu, scale=1.0, generator=g)
    rewards = torch.rand(30, 81, generator=g, dtype=torch.float64)
    rewards = (rewards < torch.sigmoid(4 * (push.law() / mu.law()).log())).double()

    def towards(step: float) -> TabularPolicy:
        levels = zip(mu.levels, push.levels, strict=True)
        return TabularPolicy(tuple((m.log() + step * (p / m).log()).softmax(-1) for m, p in levels))

    def gain(step: float) -> float:
        each = returns(mu, towards(step), rewards)
        return float((each.current - each.rollout).mean())

    pi = towards(_root(lambda step: gain(step) - 0.057))
    d = divergences(mu, pi)
    region = TrustRegion(horizon=4, delta=float(d.kl_max.max()), eps=float(d.tv_max.max()))
    about = "small drift inside the trust region, a gain of .057"
    return World("benign", about, _evenly(30), mu=mu, pi=pi, rewards=rewards, region=region, prompts=64, answers=4)


def shared_fate() -> World:
    """Prompts that pi has become better or worse at by .3; their answers rise and fall together."""
    coin = _evenly(2)
    better, worse = torch.tensor([[0.2, 0.8], [0.8, 0.2]], dtype=torch.float64)
    mu = TabularPolicy((coin.expand(2, 1, 2),))
    pi = TabularPolicy((torch.stack([better, worse])[:, None],))
    rewards = torch.tensor([[0.0, 1.0]] * 2).double()
    about = "half of the prompts gain .3, the other half loses it; 16 answers each"
    return World(
        "shared-fate",
        about,
        coin,
        mu=mu,
        pi=pi,
        rewards=rewards,
        region=TrustRegion(horizon=1, delta=0.3),
        prompts=64,
        answers=16,
    )


def heavy_ratios() -> World:
    """Large drift everywhere: a product of ratios may be in the hundreds."""
    g = torch.Generator().manual_seed(2)
    mu = random_policies(30, vocab=3, horizon=4, generator=g)
    pi = perturbed(mu, scale=1.5, generator=g)
    rewards = (torch.rand(30, 81, generator=g, dtype=torch.float64) < 0.5).double()
    region = TrustRegion(horizon=4, delta=0.5, tau=1.5)
    about = "large drift, products of ratios in the hundreds, regions often left"
    return World(
        "heavy-ratios", about, _evenly(30), mu=mu, pi=pi, rewards=rewards, region=region, prompts=128, answers=1
    )


def rare_catastrophe() -> World:
    """One prompt in 25 is lost altogether, the others gain as much as that takes away."""
    rare = 0.04
    small = rare * 0.98 / (1 - rare)
    heads = torch.tensor([[0.5, 0.5 + small], [0.99, 0.01]], dtype=torch.float64)
    mu, pi = (TabularPolicy((torch.stack([1 - p, p], -1)[:, None],)) for p in heads.T)
    rewards = torch.tensor([[0.0, 1.0]] * 2).double()
    law = torch.tensor([1 - rare, rare], dtype=torch.float64)
    about = "a prompt in 25 is lost altogether, which a batch of 64 may not show; no gain on average"
    return World(
        "rare-catastrophe",
        about,
        law,
        mu=mu,
        pi=pi,
        rewards=rewards,
        region=TrustRegion(horizon=1, delta=0.05),
        prompts=64,
        answers=4,
    )


def filtered() -> World:
    """Each policy draws from its own most likely tokens, so that supports differ both ways."""
    g = torch.Generator().manual_seed(3)
    unfiltered = random_policies(30, vocab=4, horizon=3, spread=1.5, generator=g)
    drifted = perturbed(unfiltered, scale=0.3, generator=g)

    def top(policy: TabularPolicy, mass: float) -> TabularPolicy:
        levels = []
        for level in policy.levels:
            order = level.sort(-1, descending=True)
            nucleus = order.values.cumsum(-1) - order.values < mass
            level = level * torch.zeros_like(level).scatter(-1, order.indices, nucleus.double())
            levels.append(level / level.sum(-1, keepdim=True))
        return TabularPolicy(tuple(levels))

    mu, pi = top(unfiltered, 0.9), top(drifted, 0.9)
    rewards = (torch.rand(30, 64, generator=g, dtype=torch.float64) < 0.5).double()
    about = "both policies under top-p 0.9: each draws tokens that the other never does"
    region = TrustRegion(horizon=3, delta=0.1)
    return World("filtered", about, _evenly(30), mu=mu, pi=pi, rewards=rewards, region=region, prompts=64, answers=4)


def several_looks() -> World:
    """A run of sixteen updates that gain nothing, each with a certificate from fresh prompts."""
    world = shared_fate()
    return replace(world, name="several-looks", about="sixteen certificates of a run that gains nothing", looks=16)


WORLDS: dict[str, Callable[[], World]] = {
    "benign": benign,
    "shared-fate": shared_fate,
    "heavy-ratios": heavy_ratios,
    "rare-catastrophe": rare_catastrophe,
    "filtered": filtered,
    "several-looks": several_looks,
}


def _evenly(prompts: int) -> Float[Tensor, " p"]:
    return torch.full((prompts,), 1 / prompts, dtype=torch.float64)


def _root(f: Callable[[float], float], low: float = 0.0, high: float = 1.0) -> float:
    """Find the root of an increasing function."""
    if not f(low) < 0 < f(high):
        raise BadValueError(f"no root between {low} and {high}: {f(low):g} and {f(high):g}")
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return (low + high) / 2


# -- simulation -------------------------------------------------------------------------------


class Judgement(NamedTuple):
    """One statement of a certificate, beside the truth."""

    alpha: float
    """The probability of being false that it states."""
    false: bool
    width: float
    speaks: bool | None = None
    """Whether it certifies an improvement; None for what does not."""
    claims: bool = True
    """False for what offdrift does not call a certificate and shows for comparison."""


def simulate(
    world: World, repetitions: int, *, alpha: float = 0.05, seed: int = 0, plant: Plant = "none"
) -> Iterator[dict[str, Judgement]]:
    """Certify `repetitions` independent batches (or runs of several), and judge each certificate by the truth.

    Args:
        alpha: probability of error that every certificate states.
        plant: a mistake to make, to see that it is noticed.
    """
    for repetition in range(repetitions):
        rng = np.random.default_rng([seed, *world.name.encode(), repetition])
        batches = [world.draw(rng) for _ in range(world.looks)]
        if plant == "answers":
            batches = [replace(batch, group_ids=None) for batch in batches]
        factor = 5 if plant == "alpha" else 1
        if world.looks == 1:
            yield judge(world, certify(batches[0], alpha=factor * alpha), 1 / factor)
        else:
            spent = [certify(b, alpha=factor * alpha, looks=Looks(at=t)) for t, b in enumerate(batches, 1)]
            each = [certify(batch, alpha=factor * alpha) for batch in batches]
            yield {
                "any of the run, alpha spent": _run(world, spent, alpha),
                "any of the run, alpha each": _run(world, each, alpha)._replace(claims=False),
            }


def judge(world: World, certificate: Certificate, stated: float = 1.0) -> dict[str, Judgement]:
    """Every statement of a certificate, beside the truth.

    Args:
        stated: factor of alpha by which statements are judged; 1 but for a planted mistake.
    """
    alpha = certificate.alpha * stated
    result = {"certificate": _gain(world, certificate.gain_low, alpha)}
    for guarantee in certificate.guarantees:
        if not guarantee.provided:
            result[f"by {guarantee.name}"] = _gain(world, certificate.gain_of(guarantee), alpha)
    if certificate.bound is not None and world.unseen == 0:  # its premise holds
        error = abs(world.gain - world.truths["surrogate"][0])
        result["bound B*"] = Judgement(alpha, error > certificate.bound.value, certificate.bound.value - error)
    if certificate.unseen is not None:
        width = certificate.unseen - world.unseen
        result["unseen"] = Judgement(alpha, width < 0, width)
    intervals = {name: _interval(e, *world.truths[name], e.alpha * stated) for name, e in certificate.estimates.items()}
    anything = any(x.false for x in (*result.values(), *intervals.values()))
    result["all of it together"] = Judgement(alpha, anything, math.nan)
    if "gain" in certificate.asymptotic:
        low = certificate.asymptotic["gain"].low
        result["normal interval"] = _gain(world, low, alpha)._replace(claims=False)
    return result | {f"interval of {name}": x for name, x in intervals.items()}


def _gain(world: World, low: float, alpha: float) -> Judgement:
    return Judgement(alpha, low > world.gain, world.gain - low, low > 0)


def _interval(e: Estimate, truth: float, sides: str, alpha: float) -> Judgement:
    width = {"low": truth - e.low, "high": e.high - truth, "both": e.high - e.low}[sides]
    return Judgement(alpha, not e.low <= truth <= e.high, width)


def _run(world: World, certificates: list[Certificate], alpha: float) -> Judgement:
    """The certificates of a run as one statement: false if any is, and it speaks if any does."""
    best = max(c.gain_low for c in certificates)
    return _gain(world, best, alpha)


@dataclass
class Tally:
    """Judgements of one statement in one world, added up."""

    alpha: float
    claims: bool
    repetitions: int = 0
    false: int = 0
    spoke: int | None = None
    widths: list[float] = field(default_factory=list)

    def add(self, one: Judgement) -> None:
        """Count one more."""
        self.repetitions += 1
        self.false += one.false
        self.widths.append(one.width)
        if one.speaks is not None:
            self.spoke = (self.spoke or 0) + one.speaks


Tallies = dict[tuple[str, str], Tally]


def count(tallies: Tallies, world: World, judgements: dict[str, Judgement]) -> None:
    """Add a repetition's judgements to those of its world."""
    for name, one in judgements.items():
        tallies.setdefault((world.name, name), Tally(one.alpha, one.claims)).add(one)


class CoverageRate(NamedTuple):
    """Rate at which a statement was false in a world, with an exact 95 % interval."""

    world: str
    statement: str
    claims: bool
    """Whether offdrift states it with this alpha; otherwise it is shown for comparison."""
    alpha: float
    repetitions: int
    false: int
    share: float
    low: float
    high: float
    speaks: float | None
    """Share of repetitions that certified an improvement."""
    width: float | None
    """Mean distance from the truth."""
    refuted: bool
    """Whether it is false significantly more often than alpha, all rows judged together."""


def summarize(tallies: Tallies) -> list[CoverageRate]:
    """One row for each world and statement.

    A row is refuted if an exact one-sided interval for its share lies above alpha; the intervals' error
    probability is shared by all rows, so that with all certificates right any is refuted with probability
    at most `SIGNIFICANCE`.
    """
    level = SIGNIFICANCE / max(1, sum(t.claims for t in tallies.values()))
    rows = []
    for (world, statement), t in tallies.items():
        exact = clopper_pearson(t.false, t.repetitions)
        surely = clopper_pearson(t.false, t.repetitions, alpha=level, sides="low").low
        width = float(np.mean(t.widths))
        rows.append(
            CoverageRate(
                world,
                statement,
                t.claims,
                alpha=t.alpha,
                repetitions=t.repetitions,
                false=t.false,
                share=exact.mean,
                low=exact.low,
                high=exact.high,
                speaks=None if t.spoke is None else t.spoke / t.repetitions,
                width=width if math.isfinite(width) else None,
                refuted=t.claims and surely > t.alpha,
            )
        )
    return rows
