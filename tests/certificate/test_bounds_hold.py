"""No bound is ever violated: the exact worst error of enumerated policy pairs, row by row.

For every pair the reward in [0, 1] with the largest error is constructed, not sampled. The pairs
are random and structured: unrelated, near, sparse, nearly deterministic, filtered, biased in one
direction, drifting at one position. The sharp constants are attained at two tokens.
"""

import math
from collections import Counter
from collections.abc import Iterator

import jaxtyping
import numpy as np
import pytest
import torch

from offdrift.certificate import all_bounds
from offdrift.lab import (
    TabularPolicy,
    divergences,
    perturbed,
    random_policies,
    returns,
    tilted_pair,
    worst_rewards,
)
from offdrift.lab.enumerate import Divergences

TREES = [(2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (3, 3)]  # vocabulary, horizon
Pair = tuple[TabularPolicy, TabularPolicy]


def _filtered(policy: TabularPolicy, floor: float) -> TabularPolicy:
    """Tokens below `floor` cannot be drawn, as under top-p."""
    kept = [level.where(level >= floor, 0.0) for level in policy.levels]
    return TabularPolicy(tuple(level / level.sum(-1, keepdim=True) for level in kept))


def _biased(policy: TabularPolicy, bias: torch.Tensor) -> TabularPolicy:
    """Every context drifts towards token 0, by its pair's bias in nats."""
    push = torch.zeros(policy.vocab, dtype=torch.float64)
    push[0] = 1
    logits = (level.log() + bias[:, None, None] * push for level in policy.levels)
    return TabularPolicy(tuple(x.softmax(-1) for x in logits))


def families(pairs: int, vocab: int, horizon: int, seed: int) -> Iterator[tuple[str, Pair]]:
    g = torch.Generator().manual_seed(seed)
    size = {"vocab": vocab, "horizon": horizon, "generator": g}
    mu = random_policies(pairs, **size)
    other = random_policies(pairs, **size)
    yield "unrelated", (mu, other)
    yield "far", (mu, perturbed(mu, scale=1.0, generator=g))
    yield "near", (mu, perturbed(mu, scale=0.05, generator=g))
    yield "sparse", (mu, perturbed(mu, scale=4.0, touched=0.15, generator=g))
    flat = random_policies(pairs, spread=0.0, **size)
    yield "flat", (flat, perturbed(flat, scale=0.3, generator=g))
    sharp = random_policies(pairs, spread=6.0, **size)
    yield "sharp", (sharp, perturbed(sharp, scale=2.0, generator=g))
    yield "rollout filtered", (_filtered(mu, 0.2), other)
    yield "current filtered", (other, _filtered(mu, 0.2))
    bias = 2 * torch.rand(pairs, generator=g, dtype=torch.float64)
    yield "biased", (flat, _biased(flat, bias))
    yield "one position", (mu, mu.with_level(seed % horizon, other))


def bound_values(d: Divergences, i: int, horizon: int, constants: str) -> dict[str, float]:
    rows = all_bounds(
        horizon=horizon,
        delta=float(d.kl_max[i]),
        eps=float(d.tv_max[i]),
        kl_seq=float(d.kl_seq[i]),
        tv_seq=float(d.tv_seq[i]),
        mean_tv=d.mean_tv[i].numpy(),
        constants=constants,
    )
    return {b.name: b.value for b in rows}


def check_pairs(pairs: int, seed: int) -> tuple[Counter, dict[tuple[str, str], float]]:
    """Assert every row on every pair; counts per family, and error / bound where it is largest."""
    counts: Counter = Counter()
    tightest: dict[tuple[str, str], float] = {}
    for vocab, horizon in TREES:
        for family, (mu, pi) in families(pairs, vocab, horizon, seed):
            d, error = divergences(mu, pi), returns(mu, pi, worst_rewards(mu, pi)).error.abs()
            for i in range(pairs):
                counts[family] += 1
                for constants in ("paper", "sharp"):
                    for name, value in bound_values(d, i, horizon, constants).items():
                        where = f"{name}, {constants}: {family}, v={vocab}, T={horizon}, pair {i}"
                        assert float(error[i]) <= value * (1 + 1e-9) + 1e-14, where
                        if value > 1e-9:
                            key = name, constants
                            ratio = float(error[i]) / value
                            tightest[key] = max(tightest.get(key, 0.0), ratio)
    return counts, tightest


@pytest.fixture
def _without_shape_checks(monkeypatch: pytest.MonkeyPatch):
    """The checks cost many times the bounds themselves; every other test runs with them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.usefixtures("_without_shape_checks")
def test_no_bound_is_violated_on_enumerated_pairs():
    counts, tightest = check_pairs(pairs=340, seed=0)
    assert len(counts) == 10
    assert set(counts.values()) == {340 * len(TREES)}
    assert counts.total() == 20_400
    assert len(tightest) == 10 + 11
    # Both constants are tested where it matters: some pair comes close to every sharp bound but
    # the mixed ones, whose first position counts although nothing can have shifted there.
    for (name, constants), ratio in tightest.items():
        if not name.startswith("mixed"):
            floor = 0.9 if constants == "sharp" else 0.45
            assert ratio > floor, (name, constants, ratio)
    print(f"{counts.total():,} pairs, no violation; largest error / bound:")
    for (name, constants), ratio in sorted(tightest.items()):
        print(f"  {name:20} {constants:6} {ratio:.4f}")


def test_sharp_constants_are_attained_at_two_tokens():
    eps = 0.05
    mu, pi = tilted_pair(eps, horizon=2)
    rewards = worst_rewards(mu, pi)
    # Error weights are (pi - mu)(y1) (pi - mu)(y2) = +-eps^2: the reward says "both tokens agree".
    assert rewards.tolist() == [[1.0, 0.0, 0.0, 1.0]]
    error = float(returns(mu, pi, rewards).error)
    assert error == pytest.approx(2 * eps**2, rel=1e-12)
    values = bound_values(divergences(mu, pi), 0, 2, "sharp")
    attained = [n for n in values if not n.startswith("mixed")]
    assert len(attained) == 9
    for name in attained:
        assert 0.99 * values[name] <= error <= values[name] * (1 + 1e-12), name
    for name in ("coupling", "adaptive", "pointwise"):
        assert error == pytest.approx(values[name], rel=1e-12)


def test_smaller_constants_would_be_violated():
    # Two tokens, the agreement reward: half of the sharp constants is refuted by every row.
    mu, pi = tilted_pair(0.01, horizon=2)
    error = float(returns(mu, pi, worst_rewards(mu, pi)).error)
    values = bound_values(divergences(mu, pi), 0, 2, "sharp")
    violated = [n for n, v in values.items() if error > v * 0.99]
    assert len(violated) == 9


def test_rewards_in_another_range_scale_the_error():
    g = torch.Generator().manual_seed(7)
    mu = random_policies(200, vocab=2, horizon=3, generator=g)
    pi = perturbed(mu, scale=0.5, generator=g)
    low, high = -2.0, 3.0
    rewards = low + (high - low) * worst_rewards(mu, pi)
    error, d = returns(mu, pi, rewards).error.abs(), divergences(mu, pi)
    tightest = 0.0
    for i in range(200):
        rows = all_bounds(
            horizon=3,
            delta=float(d.kl_max[i]),
            eps=float(d.tv_max[i]),
            mean_tv=d.mean_tv[i].numpy(),
            constants="sharp",
            reward_range=high - low,
        )
        smallest = min(b.value for b in rows)
        assert float(error[i]) <= smallest
        tightest = max(tightest, float(error[i]) / smallest)
    assert 0.3 < tightest <= 1


def test_the_maximum_divergence_cannot_be_replaced_by_the_average():
    # Proposition 3.10: a context of probability p with KL 1 has delta = 1 and kl_seq = p.
    second = np.array([[0.5, 0.5], [0.5, 0.5]])
    q = (1 - math.sqrt(1 - math.exp(-2))) / 2  # KL(fair || (q, 1-q)) = -log(4 q (1-q)) / 2 = 1
    for p in (1e-1, 1e-3, 1e-6):
        first = torch.tensor([[[p, 1 - p]]], dtype=torch.float64)
        drifted = torch.tensor([[[q, 1 - q], [0.5, 0.5]]], dtype=torch.float64)
        mu = TabularPolicy((first, torch.from_numpy(second)[None]))
        d = divergences(mu, TabularPolicy((first, drifted)))
        assert float(d.kl_max) == pytest.approx(1.0)
        assert float(d.kl_seq) == pytest.approx(p)
