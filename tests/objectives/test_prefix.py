"""CTPO and MinPRO: values of the methods table, oracles in plain loops, and the laws."""

import math

import pytest
import torch

from offdrift.logprobs import LogProbs
from offdrift.objectives.prefix import PrefixClipped, PrefixMinClipped
from offdrift.ratios import log_ratio
from offdrift.segments import Segments
from tests.objectives.checks import advantages_of, check_golden, check_loss_and_gradient
from tests.oracles.fixtures import double, fx_a, ragged

PAPER = PrefixClipped(dual_clip=None, gradient="unit")


def test_ctpo_values_of_the_methods_table():
    """The first ratio lies exactly on its bound, e^0.05. The table has 3/4 of its gradient there,
    an artifact of how `torch.max` and `clamp` split ties; here a token on its bound is unclipped:
    the gradients are -e^0.05 / 7 for -0.112636, and -e^0.05 / 8 for -0.09855667."""
    lp, a, _ = fx_a()
    on_bound = -math.exp(0.05)
    tokens = [[-1.051271, -1.073271, -1.090463, -1.105171], [0.487655, 0.525636, 0.536254, 0]]
    check_golden(
        PrefixClipped(), (lp, a), "token_mean", loss=-0.395804, tokens=tokens,
        grad=[[on_bound / 7, 0, 0, 0], [0, 0.07509079, 0.07660773, 0]],
    )  # fmt: skip
    assert on_bound / 7 * 3 / 4 == pytest.approx(-0.112636, abs=1e-6)
    assert on_bound / 8 * 3 / 4 == pytest.approx(-0.09855667, abs=1e-8)
    check_golden(
        PAPER, (lp, a), "seq_mean_token_mean", loss=-0.281765, tokens=tokens,
        grad=[[on_bound / 8, 0, 0, 0], [0.176982, 0.176982, 0.08937568, 0]],
    )  # fmt: skip


def ctpo_oracle(lp, a, *, on, dual_clip, gradient, growth):
    """The formula of the entry, one token at a time."""
    losses = []
    lengths = lp.segments.lengths.tolist()
    split = (log_ratio(lp, on=on).split(lengths), lp.current.split(lengths), a.split(lengths))
    for l, logp, ai in zip(*split, strict=True):  # noqa: E741
        for t in range(len(l)):
            c = l[: t + 1].clamp(-20, 20).sum()
            if gradient == "token":
                c = c.detach() + logp[t] - logp[t].detach()
            v, s = c.clamp(max=10).exp(), (t + 1) ** growth
            loss = torch.maximum(-ai[t] * v, -ai[t] * v.clamp(math.exp(-0.025 * s), math.exp(0.05 * s)))
            if dual_clip is not None and ai[t] < 0:
                loss = loss.clamp(max=float(-ai[t] * math.exp(dual_clip * s)))
            losses.append(loss)
    return torch.stack(losses)


@pytest.mark.parametrize(
    "options",
    [
        {"on": "staleness", "dual_clip": 0.05, "gradient": "token", "growth": 0.5},
        {"on": "staleness", "dual_clip": None, "gradient": "unit", "growth": 0.5},
        {"on": "full", "dual_clip": 0.1, "gradient": "unit", "growth": 1.0},
        {"on": "full", "dual_clip": None, "gradient": "token", "growth": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(2))
def test_ctpo_agrees_with_the_formula(seed, options):
    lp = ragged(seed, sequences=20, drift=0.06)
    a = advantages_of(lp, seed, per="token")
    got = PrefixClipped(**options)(lp, a)
    grad = check_loss_and_gradient(lp, got.loss, ctpo_oracle(lp, a, **options))
    # Clipped: where the loss is not the plain surrogate.
    c = torch.cat([x.cumsum(0) for x in log_ratio(lp, on=options["on"]).detach().split(lp.segments.lengths.tolist())])
    changed = (got.loss.detach() + a * c.exp()).abs() > 1e-12
    assert torch.equal(got.clipped, changed)
    assert 5 < int(changed.sum()) < 0.8 * len(a)
    assert grad.norm() > 1


@pytest.mark.parametrize(
    ("gradient", "l", "v", "flows"),
    [
        ("token", [6.0, 3.0], math.exp(9), [0, 1]),
        ("unit", [6.0, 3.0], math.exp(9), [1, 1]),
        # the sum passes 10: limited, no gradient
        ("token", [6.0, 6.0], math.exp(10), [0, 0]),
        ("unit", [6.0, 6.0], math.exp(10), [0, 0]),
        # one token beyond 20 is limited before the sum: 20 - 15 = 5
        ("unit", [90.0, -15.0], math.exp(5), [0, 1]),
        ("token", [90.0, -15.0], math.exp(5), [0, 1]),
    ],
)
def test_limits_of_the_prefix(gradient, l, v, flows):  # noqa: E741
    old = double([-100.0, -100.0])
    leaf = (old + double(l)).requires_grad_()
    lp = LogProbs.pack(old, leaf, old, segments=Segments.from_lengths([2]))
    objective = PrefixClipped(dual_clip=None, gradient=gradient)
    loss = objective(lp, double([-1.0, -1.0])).loss[1]
    loss.backward()
    assert loss.item() == pytest.approx(v, rel=1e-12)
    assert leaf.grad.tolist() == pytest.approx([v * f for f in flows], rel=1e-12)


@pytest.mark.parametrize(
    ("advantage", "l", "clipped"),
    [
        (1.0, 0.049, False), (1.0, 0.051, True), (1.0, -1.0, False),
        (-1.0, -0.024, False), (-1.0, -0.026, True),
        (-1.0, 0.069, False), (-1.0, 0.071, True),
    ],
)  # fmt: skip
def test_inside_and_beyond_each_limit_of_the_first_token(advantage, l, clipped):  # noqa: E741
    old = double([-1.0])
    leaf = (old + l).requires_grad_()
    lp = LogProbs.pack(old, leaf, old, segments=Segments.from_lengths([1]))
    got = PrefixClipped(dual_clip=0.07)(lp, double([advantage]))
    got.loss.sum().backward()
    assert got.clipped.item() == clipped
    expected = 0.0 if clipped else -advantage * math.exp(l)
    assert leaf.grad.item() == pytest.approx(expected, rel=1e-9)


def minpro_oracle(lp, a, *, on, eps_low, eps_high):
    losses = []
    lengths = lp.segments.lengths.tolist()
    for l, ai in zip(log_ratio(lp, on=on).split(lengths), a.split(lengths), strict=True):  # noqa: E741
        q = l.exp()
        for t in range(len(l)):
            m = min((x.item() for x in q[:t]), default=1.0)
            loss = torch.maximum(-ai[t] * q[t], -ai[t] * q[t].clamp(1 - eps_low, 1 + eps_high))
            losses.append(m * loss)
    return torch.stack(losses)


@pytest.mark.parametrize("on", ["full", "staleness"])
@pytest.mark.parametrize("seed", range(2))
def test_minpro_agrees_with_the_formula(seed, on):
    lp = ragged(seed, sequences=20)
    a = advantages_of(lp, seed, per="token")
    got = PrefixMinClipped(on=on, eps_low=0.1, eps_high=0.3)(lp, a)
    check_loss_and_gradient(lp, got.loss, minpro_oracle(lp, a, on=on, eps_low=0.1, eps_high=0.3))
    q = log_ratio(lp, on=on).detach().exp()
    expected = ((a > 0) & (q > 1.3)) | ((a < 0) & (q < 0.9))
    assert torch.equal(got.clipped, expected)
    assert int(expected.sum()) > 10
