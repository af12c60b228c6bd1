"""If all policies agree, a row is the policy gradient; where a row's formula says otherwise, that."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offdrift.laws.batches import draw, masked, packed, run
from offdrift.methods import METHODS
from tests.laws.definitions import Sequence, sequences_of
from tests.laws.formulas import covariances
from tests.laws.rows import ROWS

SEEDS = range(6)


def saturated(step: list[Sequence]) -> list[list[float]]:
    """W = 1 / (1 + 0.1)."""
    return [[-a / 1.1 for a in s.a] for s in step]


def shaped(step: list[Sequence]) -> list[list[float]]:
    """d/du of u / (u + 0.1) at u = 1."""
    return [[-a * 0.1 / 1.1**2 for a in s.a] for s in step]


def through_the_prefix(step: list[Sequence]) -> list[list[float]]:
    """Token s is in the prefix of every later token t: -(1/T) sum over t >= s of A_t."""
    return [[-sum(s.a[t:]) / len(s) for t in range(len(s))] for s in step]


def entropy_groups(step: list[Sequence]) -> list[list[float]]:
    """Mean over the top fifth by entropy and the rest, then over both: -A / (groups |group|)."""
    found = []
    for s in step:
        n = len(s)
        top = math.ceil(n / 5)
        last = sorted(s.entropy, reverse=True)[top - 1]
        groups = 1 if n == top else 2
        found.append([-a / (groups * (top if h >= last else n - top)) for a, h in zip(s.a, s.entropy)])
    return found


def regression(step: list[Sequence]) -> list[list[float]]:
    """The residual without drift: 2 beta (V - R) with beta = 1e-3, V = log mean e^R of the prompt."""
    found = []
    for s in step:
        rewards = [q.reward for q in step if q.group == s.group]
        value = math.log(sum(map(math.exp, rewards)) / len(rewards))
        found.append([2e-3 * (value - s.reward)] * len(s))
    return found


def preference(step: list[Sequence]) -> list[list[float]]:
    """At margin 0 the best answer of n is pushed by beta n / 2 with beta = 0.1, the worst by as much the other way."""
    found = []
    for s in step:
        rewards = [q.reward for q in step if q.group == s.group]
        sign = (s.reward == min(rewards)) - (s.reward == max(rewards))
        found.append([sign * 0.05 * len(rewards)] * len(s))
    return found


def over_surprisal(step: list[Sequence]) -> list[list[float]]:
    """-A / T over the answer's mean surprisal."""
    return [[-a / -sum(s.pi) for a in s.a] for s in step]


def half_of_negatives(step: list[Sequence]) -> list[list[float]]:
    return [[-a / len(s) * (0.5 if a < 0 else 1.0) for a in s.a] for s in step]


def classes(step: list[Sequence]) -> list[list[float]]:
    """All scores are 0: n / tau / (1 + answers of its class) for a right answer, less that for a wrong one."""
    found = []
    for s in step:
        siblings = [q for q in step if q.group == s.group]
        same = sum((q.mean_a > 0) == (s.mean_a > 0) for q in siblings)
        push = 0.0 if same == len(siblings) else 2 * len(siblings) / (1 + same) * (-1 if s.mean_a > 0 else 1)
        found.append([push / len(s)] * len(s))
    return found


EXCEPTIONS: dict[str, tuple[str, Callable[[list[Sequence]], list[list[float]]]]] = {
    "shaped_is": ("w / (w + 0.1) is below 1 at w = 1", saturated),
    "logit_fusion_shaped": ("the slope of u / (u + 0.1) is 0.083 at u = 1", shaped),
    "ctpo_paper": ("early tokens collect every later advantage", through_the_prefix),
    "espo": ("groups of a sequence weigh alike, not tokens", entropy_groups),
    "oapl": ("fits rewards; reads no advantages", regression),
    "asympo": ("divides by the answer's surprisal", over_surprisal),
    "spo_scaled": ("negatives count half", half_of_negatives),
    "real": ("two classes of answers", classes),
    "online_dpo": ("compares rewards; reads no advantages", preference),
}
"""Rows that are not the policy gradient even on policy: why, and what they are instead."""

BY_CHANCE = "clip_cov"
"""Leaves out one token of high covariance, on policy, too."""


# A product of ratios pushes each of its tokens by the sum of their advantages.
UNLAWFUL = (*EXCEPTIONS, BY_CHANCE, "st_ppo, product", "ctpo, linear")
LAWFUL = [n for n in ROWS if n in METHODS or not n.startswith(UNLAWFUL)]


def minus_advantage(name: str, step: list[Sequence]) -> Tensor:
    """What the law says: -A, or -A / T where the row takes the mean of each sequence."""
    if name in EXCEPTIONS:
        rows = EXCEPTIONS[name][1](step)
    else:
        mean = ROWS[name].aggregate == "seq_mean_token_mean"
        rows = [[-a / (len(s) if mean else 1) for a in s.a] for s in step]
    return torch.tensor([x for r in rows for x in r], dtype=torch.float64)


@pytest.mark.parametrize("name", LAWFUL)
def test_the_gradient_of_the_summed_loss_is_minus_the_advantage(name):
    compared = nonzero = 0
    for seed in SEEDS:
        batch = draw(seed, on_policy=True)
        given, mask = masked(batch, seed)
        got = run(ROWS[name], given)
        expected = minus_advantage(name, sequences_of(batch))
        if name == BY_CHANCE:
            step = sequences_of(batch)
            cov = torch.tensor([x for q in covariances(step) for x in q])
            chosen = (got.grad[mask] == 0) & (expected != 0)
            assert int(chosen.sum()) == min(1, int(((cov > 1) & (cov < 5)).sum()))
            assert ((cov[chosen] > 1) & (cov[chosen] < 5)).all()
            expected = expected.where(~chosen, 0.0)
        torch.testing.assert_close(got.grad[mask], expected, rtol=1e-9, atol=1e-12)
        assert (got.grad[~mask] == 0).all()
        assert int((~mask).sum()) > 5
        compared += expected.numel()
        nonzero += int((expected != 0).sum())
    assert compared > 120
    assert nonzero > 100


@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_rejected_limited_or_clipped(name):
    """On policy no gate, limit or clip has a reason to act; chance has (`BY_CHANCE`)."""
    got = run(METHODS[name], packed(draw(0, on_policy=True)))
    assert got.keep.all()
    assert not got.result.corrected.limited.any()
    clipped = got.result.stats.to_host().get("objective/clipped", 0)
    assert clipped == (1 if name == BY_CHANCE else 0)


def test_exceptions_are_rows_that_break_the_law():
    for name in EXCEPTIONS:
        step = sequences_of(draw(0, on_policy=True))
        mean = METHODS[name].aggregate == "seq_mean_token_mean"
        law = [-a / (len(s) if mean else 1) for s in step for a in s.a]
        assert minus_advantage(name, step).tolist() != pytest.approx(law), name
