"""Random ragged batches with every fact that any row of the method table may need.

A `Batch` is a set of columns, so that it can be cut, permuted, padded or masked before the library
sees any of it. Sequences drift by very different amounts, so that tight and wide limits both bind.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from offdrift.batch_info import BatchInfo, Observed
from offdrift.divergence.evidence import Distributions, Divergence
from offdrift.logprobs import LogProbs
from offdrift.loss import PolicyLoss, policy_loss
from offdrift.methods import Method
from offdrift.segments import Segments

VOCAB = 50
HORIZON = 12
PAIRS = ("rollout_current", "rollout_old", "old_current")
DIVERGENCES = tuple(f"{d}_{pair}" for pair in PAIRS for d in ("kl", "tv"))
SCALES = (3e-4, 0.03, 0.3, 0.3, 0.8)
"""Nats by which the tokens of a sequence drift, twice: from mu to old and from old to pi."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Columns: one number per token, one per sequence, and the lengths of each sequence's turns."""

    tokens: dict[str, Tensor]
    rewards: Tensor
    groups: Tensor
    turns: list[list[int]]

    @property
    def lengths(self) -> list[int]:
        return [sum(t) for t in self.turns]

    def column(self, name: str) -> list[list[float]]:
        """One column as a list of numbers per sequence."""
        return [x.tolist() for x in self.tokens[name].split(self.lengths)]

    def rows(self, chosen: list[int]) -> Tensor:
        """Indices of the tokens of the chosen sequences."""
        where = torch.arange(sum(self.lengths)).split(self.lengths)
        return torch.cat([where[i] for i in chosen])

    def chosen(self, chosen: list[int]) -> Batch:
        """Some sequences, in the given order."""
        rows = self.rows(chosen)
        return Batch(
            tokens={k: x[rows] for k, x in self.tokens.items()},
            rewards=self.rewards[chosen],
            groups=self.groups[chosen],
            turns=[self.turns[i] for i in chosen],
        )

    def with_tokens(self, **columns: Tensor) -> Batch:
        return replace(self, tokens={**self.tokens, **columns})


@dataclass(frozen=True, kw_only=True)
class Given:
    """A batch as `policy_loss` takes it; `leaf` is what the gradient is taken with respect to."""

    lp: LogProbs
    leaf: Tensor
    advantages: Tensor
    batch_info: BatchInfo


@dataclass(frozen=True, kw_only=True)
class Run:
    """Result of a row on a batch."""

    result: PolicyLoss
    grad: Tensor

    @property
    def loss(self) -> Tensor:
        return self.result.loss.detach()

    @property
    def keep(self) -> Tensor:
        return self.result.corrected.keep


def draw(seed: int, *, on_policy: bool = False, per_token: bool = False) -> Batch:
    """Eight sequences of 1 to 11 tokens, in turns, of three prompts; rewards of either sign.

    One sequence has advantage 0. In every other pair of seeds there are outliers: a token that the
    training engine finds e^12.5 less likely, one e^6 times more likely, and one that the update
    made e^5 times more likely; in the others, tokens that it moved by 0.45 nats, alone in their
    sequences. `per_token`: advantages vary within a sequence, and some are 0.
    """
    batch = _drawn(seed, on_policy, per_token)
    return replace(batch, tokens={k: x.clone() for k, x in batch.tokens.items()}, turns=[[*t] for t in batch.turns])


@functools.cache
def _drawn(seed: int, on_policy: bool, per_token: bool) -> Batch:
    """`draw`, once: of what it gives, each caller gets tokens that it may write to."""
    g = torch.Generator().manual_seed(seed)
    uniform = lambda n: torch.rand(n, generator=g, dtype=torch.float64)  # noqa: E731
    normal = lambda n: torch.randn(n, generator=g, dtype=torch.float64)  # noqa: E731
    lengths = torch.randint(1, 12, (8,), generator=g)
    n = int(lengths.sum())
    spread = lambda x: x.repeat_interleave(lengths)  # noqa: E731
    scale = spread(torch.tensor(SCALES, dtype=torch.float64)[torch.randint(0, 5, (8,), generator=g)])
    mu = -3 * uniform(n) - 0.01
    down, up, fast = torch.randperm(n, generator=g)[:3].tolist()
    first, second = torch.zeros(2, n, dtype=torch.float64)
    if seed // 2 % 2 == 0 and not on_policy:
        mu[up], mu[fast] = -9.0, -8.0
        first[down], first[up], second[fast] = -12.5, 6.0, 5.0
    elif not on_policy:
        second[down], second[up], second[fast] = -0.45, 0.45, -0.45
    old = (mu + first + scale * normal(n)).clamp(max=-1e-3)
    pi = (old + second + scale * normal(n)).clamp(max=-1e-3)
    ref = (mu + 0.3 * normal(n)).clamp(max=-1e-3)
    per_sequence = normal(8) * 2
    per_sequence[int(torch.randint(0, 8, (1,), generator=g))] = 0.0
    a = spread(per_sequence)
    if per_token:
        a = (a + normal(n)) * (uniform(n) > 0.15)
    lag = spread(torch.randint(0, 9, (8,), generator=g)) + torch.randint(0, 2, (n,), generator=g)
    if on_policy:
        old, pi, ref, lag = mu.clone(), mu.clone(), mu.clone(), 0 * lag
    tokens = {"mu": mu, "old": old, "pi": pi, "ref": ref, "a": a}
    tokens |= {"entropy": 2.5 * uniform(n), "lag": lag.double()}
    for pair, x in zip(PAIRS, (pi - mu, old - mu, pi - old)):
        kl = 0.1 * x.square().clamp(max=10)
        tokens |= {f"kl_{pair}": kl, f"tv_{pair}": (kl / 2).sqrt().clamp(max=1)}
    groups = torch.tensor([7, 1, 4])[torch.randint(0, 3, (8,), generator=g)]
    turns = [_cut(length, g) for length in lengths.tolist()]
    return Batch(tokens=tokens, rewards=uniform(8) - 0.5, groups=groups, turns=turns)


def wild() -> Iterator[Batch]:
    """Batches of short sequences under every kind of drift, and of a long calm one with a single outlier."""
    for seed in range(8):
        batch = draw(seed, per_token=seed % 2 == 0)
        yield batch
        yield batch.with_tokens(old=batch.tokens["mu"])  # the engines agree
        yield batch.with_tokens(old=batch.tokens["pi"])  # nothing is stale
    for calm, far in ((-3.0, 0.5), (-3.0, -0.5), (-3.0, 1.2), (-3.0, -1.2), (-0.3, -0.5)):
        for on in ("old", "pi"):
            yield one_outlier(calm, far, on)


def one_outlier(logp: float, far: float, on: str) -> Batch:
    """Two hundred tokens of which one moves, between the engines (`old`) or by the updates (`pi`)."""
    n = 200
    calm = torch.full((n,), logp, dtype=torch.float64)
    moved = calm.clone()
    moved[n // 2] += far
    tokens = {"mu": calm, "old": moved if on == "old" else calm, "pi": moved, "ref": calm, "a": torch.ones_like(calm)}
    tokens |= {"entropy": torch.ones_like(calm), "lag": torch.ones_like(calm)}
    for pair, (one, other) in zip(PAIRS, (("mu", "pi"), ("mu", "old"), ("old", "pi")), strict=True):
        kl = 0.1 * (tokens[other] - tokens[one]).square()
        tokens |= {f"kl_{pair}": kl, f"tv_{pair}": (kl / 2).sqrt()}
    return Batch(tokens=tokens, rewards=torch.ones(1).double(), groups=torch.zeros(1, dtype=torch.int64), turns=[[n]])


def _cut(length: int, g: torch.Generator) -> list[int]:
    first = int(torch.randint(1, length + 1, (1,), generator=g))
    return [first, length - first] if first < length else [length]


def segments_of(turns: list[list[int]], groups: Tensor | None) -> Segments:
    cut = Segments.from_lengths([n for t in turns for n in t])
    return Segments.from_lengths([sum(t) for t in turns], turns=cut, group_ids=groups)


def packed(batch: Batch) -> Given:
    """The columns as they are."""
    t, leaf = batch.tokens, batch.tokens["pi"].clone().requires_grad_()
    segments = segments_of(batch.turns, batch.groups)
    lp = LogProbs.pack(t["mu"], leaf, t["old"], logp_ref=t["ref"], segments=segments)
    return with_batch_info(lp, leaf, batch.rewards, t)


def padded(batch: Batch, seed: int) -> tuple[Given, Tensor]:
    """The columns as `[sequences, time]` with junk between and after the real tokens; no turns."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(batch.lengths), max(batch.lengths) + 4, dtype=torch.bool)
    for i, n in enumerate(batch.lengths):
        mask[i, torch.randperm(mask.shape[1], generator=g)[:n]] = True
    t = _with_junk(batch.tokens, mask, g)
    leaf = t["pi"].requires_grad_()
    lp = LogProbs.pack(t["mu"], leaf, t["old"], logp_ref=t["ref"], mask=mask, group_ids=batch.groups)
    return with_batch_info(lp, leaf, batch.rewards, t), mask


def masked(batch: Batch, seed: int) -> tuple[Given, Tensor]:
    """The columns as one longer stream with junk in every turn, and the turns of that stream."""
    g = torch.Generator().manual_seed(seed)
    pieces, turns = [], []
    for sequence in batch.turns:
        junk = torch.randint(0, 4, (len(sequence),), generator=g).tolist()
        turns.append([n + k for n, k in zip(sequence, junk)])
        for n, k in zip(sequence, junk):
            pieces.append(torch.randperm(n + k, generator=g) < n)
    mask = torch.cat(pieces)
    t = _with_junk(batch.tokens, mask, g)
    leaf = t["pi"].requires_grad_()
    segments = segments_of(turns, batch.groups)
    lp = LogProbs.pack(t["mu"], leaf, t["old"], logp_ref=t["ref"], mask=mask, segments=segments)
    return with_batch_info(lp, leaf, batch.rewards, t), mask


def _with_junk(tokens: dict[str, Tensor], mask: Tensor, g: torch.Generator) -> dict[str, Tensor]:
    junk = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e9, -1e9], dtype=torch.float64)
    filled = {}
    for name, x in tokens.items():
        filled[name] = junk[torch.randint(0, len(junk), mask.shape, generator=g)]
        filled[name][mask] = x
    return filled


def with_batch_info(lp: LogProbs, leaf: Tensor, rewards: Tensor, t: dict[str, Tensor]) -> Given:
    """A batch with its columns as `BatchInfo`; KL(old || pi) has the gradient log pi - log pi_old, and distributions
    are over two tokens, the drawn one and the rest."""
    clean = {k: lp.like_caller(x) for k, x in t.items() if k not in ("mu", "old", "pi", "ref")}
    curve = (lp.current - lp.old).square() / 2
    clean["kl_old_current"] = clean["kl_old_current"] + (curve - curve.detach())
    batch_info = BatchInfo(
        divergences={k: Divergence.exact(k, clean[k]) for k in DIVERGENCES},
        entropy=clean["entropy"],
        vocab=VOCAB,
        rewards=rewards,
        version_lag=clean["lag"],
        distributions=Distributions.of_two(lp.old, lp.current),
    )
    return Given(lp=lp, leaf=leaf, advantages=clean["a"], batch_info=batch_info)


def run(row: Method, given: Given, *, observed: Observed | Literal["this_batch"] = "this_batch", **options: Any) -> Run:
    """Loss and gradient; the plain sum unless `normalizer` says otherwise."""
    options = {"normalizer": 1.0, **options}
    result = policy_loss(given.lp, row, given.advantages, replace(given.batch_info, observed=observed), **options)
    (grad,) = torch.autograd.grad(result.loss, given.leaf, retain_graph=True)
    return Run(result=result, grad=grad)


def seen(row: Method, given: Given) -> Observed:
    """Observations of the row's parts on this batch, as a trainer asks for them before the loss."""
    lp = given.lp if row.anchor is None else row.anchor(given.lp, given.batch_info)
    return row.observe(lp, given.advantages, given.batch_info)
