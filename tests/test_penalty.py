"""KL to the reference: every estimator's stated bias by exact enumeration, in value and gradient."""

import inspect
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from offdrift.errors import EvidenceError, MethodError, ShapeError
from offdrift.penalty import ESTIMATORS, Adaptive, EstimatorName, KLPenalty, kl_estimate, penalized_rewards
from offdrift.segments import Segments
from tests.oracles.fixtures import double, fx_a

LOGP, REF = double([-0.5, -1.0, -2.0]), double([-0.7, -0.8, -2.0])
LOGITS, REF_PROBS = double([0.2, -0.3, 0.5]), double([0.5, 0.3, 0.2])
BEHAVIOR = double([0.4, 0.4, 0.2])
KL_GRADIENT = [-0.188597, -0.112169, 0.300767]
OTHER_GRADIENT = [-0.16175, -0.09484075, 0.25659]  # of KL(ref || pi)
CORRECTED = "k3_corrected"
ON_POLICY = [e for e in ESTIMATORS if e != CORRECTED]


def exactly(actual: Tensor, expected, atol: float = 1e-12) -> None:
    expected = expected if isinstance(expected, Tensor) else double(expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def golden(actual: Tensor, expected) -> None:
    exactly(actual, expected, atol=1e-6)


def value_and_gradient(estimator: str, logp: Tensor = LOGP, ref: Tensor = REF, **options):
    leaf = logp.clone().requires_grad_()
    value = kl_estimate(leaf, ref, estimator=estimator, **options)  # type: ignore[arg-type]
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


# -- goldens -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", [0.2, -0.2, 0.0], [1.0, 1.0, 1.0]),
        ("abs", [0.2, 0.2, 0.0], [1.0, -1.0, 0.0]),
        ("k2", [0.02, 0.02, 0.0], [0.2, -0.2, 0.0]),
        ("k3", [0.01873075, 0.02140276, 0.0], [0.181269, -0.221403, 0.0]),
        ("k1+", [0.2, -0.2, 0.0], [0.2, -0.2, 0.0]),
        ("abs+", [0.2, 0.2, 0.0], [0.2, -0.2, 0.0]),
        ("k2+", [0.02, 0.02, 0.0], [0.2, -0.2, 0.0]),
        ("k3+", [0.01873075, 0.02140276, 0.0], [0.2, -0.2, 0.0]),
    ],
)
def test_goldens_of_every_estimator(estimator, value, gradient):  # kl.k1 ... kl.straight_through
    got = value_and_gradient(estimator)
    golden(got[0], value)
    golden(got[1], gradient)
    d = LOGP - REF
    closed = {"k1": d, "abs": d.abs(), "k2": d**2 / 2, "k3": torch.exp(-d) + d - 1}
    exactly(got[0], closed[estimator.removesuffix("+")])


def test_value_limit_reproduces_the_saturation_of_the_golden():  # kl.k3, kl.k3sat.val
    five = double([-5.0])
    value, gradient = value_and_gradient("k3", five, double([0.0]))
    golden(value, [142.413159])
    exactly(gradient, 1 - torch.exp(-five))
    value, gradient = value_and_gradient("k3", five, double([0.0]), value_limit=10.0)
    assert (value.item(), gradient.item()) == (10.0, 0.0)
    # straight through, the limit is on the value alone
    value, gradient = value_and_gradient("k3+", five, double([0.0]), value_limit=10)
    assert (value.item(), gradient.item()) == (10.0, -5.0)


def test_value_limit_has_two_sides_and_leaves_what_is_inside():
    d = double([-3.0, -0.5, 0.5, 3.0])
    value, gradient = value_and_gradient("k1", d, torch.zeros_like(d), value_limit=2.0)
    exactly(value, [-2.0, -0.5, 0.5, 2.0])
    exactly(gradient, [0.0, 1.0, 1.0, 0.0])


def test_golden_of_the_corrected_estimate():  # kl.un.tok, kl.un.mean
    ref, log_q = double([-0.2, 0.1, 0.05]), double([1.1, 0.8, 1.5]).log()
    value = kl_estimate(torch.zeros_like(ref), ref, estimator=CORRECTED, log_ratio=log_q, ratio_gradient=False)
    golden(value, [0.02060383, 0.00413673, 0.00190664])
    golden(value.mean(), 0.0088824)


def test_kl_tau_is_k2_of_the_full_ratio_with_twice_the_coefficient():  # klt.tok, klt.mean
    lp, _, _ = fx_a()
    got = 2 * 1e-3 * kl_estimate(lp.current, lp.logp_rollout, estimator="k2").detach()
    golden(lp.unpack(got), [[2.25e-05, 6.25e-05, 2.25e-05, 0.00064], [1.69e-05, 4e-05, 7.84e-05, 0.0]])
    golden(got.mean(), 0.00012611)
    exactly(got, 1e-3 * (lp.current - lp.logp_rollout).detach() ** 2)


# -- the exact KL and what it is compared with ---------------------------------------------------


def truth(logits: Tensor, ref: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(pi || ref), its gradient and that of KL(ref || pi), in closed form."""
    pi = logits.softmax(-1)
    d = (pi / ref).log()
    kl = (pi * d).sum()
    return kl, pi * (d - kl), pi - ref


def means(estimator: str, logits: Tensor, ref: Tensor, mu: Tensor | None = None, **options):
    """Mean value and mean gradient over tokens drawn from mu (pi if None), token by token."""
    leaf = logits.clone().requires_grad_()
    logp = leaf.log_softmax(-1)
    drawn = logp.detach().exp() if mu is None else mu
    if estimator == CORRECTED:
        options["log_ratio"] = logp - drawn.log()
    value = kl_estimate(logp, ref.log(), estimator=estimator, **options)  # type: ignore[arg-type]
    gradients = [torch.autograd.grad(v, leaf, retain_graph=True)[0] for v in value]
    assert len(gradients) == len(logits)
    return (drawn * value.detach()).sum(), drawn @ torch.stack(gradients)


def random_pair(seed: int, vocab: int = 5, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of pi, probabilities of the reference, probabilities of mu."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=g, dtype=torch.float64)
    logits[1:] = logits[0] + scale * logits[1:]
    return logits[0], logits[1].softmax(-1), logits[2].softmax(-1)


PAIRS = [random_pair(seed) for seed in range(6)]


# -- the table of biases, by enumeration ---------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", 0.166746, [0.0, 0.0, 0.0]),
        ("abs", 0.587056, [-0.308884, -0.187347, 0.496231]),
        ("k2", 0.196205, KL_GRADIENT),
        ("k3", 0.166746, OTHER_GRADIENT),
        ("k1+", 0.166746, KL_GRADIENT),
        ("k3+", 0.166746, KL_GRADIENT),
    ],
)
def test_golden_gradient_table(estimator, value, gradient):  # kl.gradient_table, kl.Ev.*, kl.Eg.*
    got = means(estimator, LOGITS, REF_PROBS)
    golden(got[0], value)
    golden(got[1], gradient)


def test_golden_gradient_table_off_policy():  # kl.off.*
    golden(means("k3", LOGITS, REF_PROBS, BEHAVIOR)[0], 0.120562)
    value, gradient = means(CORRECTED, LOGITS, REF_PROBS, BEHAVIOR)
    golden(value, 0.166746)
    golden(gradient, KL_GRADIENT)
    value, gradient = means(CORRECTED, LOGITS, REF_PROBS, BEHAVIOR, ratio_gradient=False)
    golden(value, 0.166746)
    golden(gradient, OTHER_GRADIENT)


@pytest.mark.parametrize("pair", PAIRS)
def test_every_bias_by_its_amount(pair):
    logits, ref, _ = pair
    kl, kl_gradient, other_gradient = truth(logits, ref)
    pi = logits.softmax(-1)
    d = (pi / ref).log()
    value_bias = {"abs": (pi * d.abs()).sum() - kl, "k2": (pi * d**2).sum() / 2 - kl}
    signs = pi * (d.sign() - (pi * d.sign()).sum())
    gradient_bias = {"k1": -kl_gradient, "k3": other_gradient - kl_gradient, "abs": signs - kl_gradient}
    for estimator in ON_POLICY:
        value, gradient = means(estimator, logits, ref)
        exactly(value - kl, value_bias.get(estimator.removesuffix("+"), double(0.0)))
        exactly(gradient - kl_gradient, gradient_bias.get(estimator, torch.zeros_like(pi)))
    assert min(b.abs() for b in value_bias.values()) > 1e-4
    assert min(b.norm() for b in gradient_bias.values()) > 1e-2
    assert value_bias["abs"] > 0


@pytest.mark.parametrize("pair", PAIRS)
def test_corrected_is_unbiased_under_another_policy_only_through_the_ratio(pair):
    logits, ref, mu = pair
    kl, kl_gradient, other_gradient = truth(logits, ref)
    value, gradient = means(CORRECTED, logits, ref, mu)
    exactly(value, kl)
    exactly(gradient, kl_gradient)
    value, gradient = means(CORRECTED, logits, ref, mu, ratio_gradient=False)
    exactly(value, kl)
    exactly(gradient, other_gradient)
    assert (kl_gradient - other_gradient).norm() > 1e-2
    # without the ratio, both the value and the gradient are those of a mean under mu
    pi = logits.softmax(-1)
    d = (pi / ref).log()
    slope = mu * (1 - torch.exp(-d))
    value, gradient = means("k3", logits, ref, mu)
    exactly(value, (mu * (torch.exp(-d) + d - 1)).sum())
    exactly(gradient, slope - pi * slope.sum())
    assert (value - kl).abs() > 1e-2


@pytest.mark.parametrize("pair", PAIRS)
def test_a_cap_biases_by_what_it_cuts_off(pair):
    logits, ref, mu = pair
    pi = logits.softmax(-1)
    q, d = pi / mu, (pi / ref).log()
    cap = (q.max() + q.min()).item() / 2
    k3 = torch.exp(-d) + d - 1
    lost = (mu * (q - cap).clamp(min=0) * k3).sum()
    value, gradient = means(CORRECTED, logits, ref, mu, cap=cap)
    exactly(value, truth(logits, ref)[0] - lost)
    # where it acts: cap * grad k3; elsewhere q grad k3 + q k3 grad log pi
    slope = mu * torch.where(q > cap, cap * (1 - torch.exp(-d)), q * (k3 + 1 - torch.exp(-d)))
    exactly(gradient, slope - pi * slope.sum())
    assert lost > 1e-4
    assert 0 < int((q > cap).sum()) < len(q)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_table_says_none_exactly_where_there_is_no_bias(estimator):
    value_off, gradient_off = 0.0, 0.0
    for logits, ref, mu in PAIRS:
        kl, kl_gradient, _ = truth(logits, ref)
        value, gradient = means(estimator, logits, ref, mu if estimator == CORRECTED else None)
        value_off = max(value_off, abs((value - kl).item()))
        gradient_off = max(gradient_off, (gradient - kl_gradient).norm().item())
    row = ESTIMATORS[estimator]
    assert (row.value_bias == "none") == (value_off < 1e-12)
    assert (row.gradient_bias == "none") == (gradient_off < 1e-12)
    assert row.value_bias == "none" or value_off > 1e-2
    assert row.gradient_bias == "none" or gradient_off > 1e-2
    assert row.where


def test_the_table_has_one_row_for_every_estimator():
    assert tuple(ESTIMATORS) == get_args(EstimatorName)
    assert len(ESTIMATORS) == 9


@pytest.mark.parametrize("seed", range(4))
def test_variance_is_high_where_the_table_says_so(seed):
    logits, ref, _ = random_pair(seed, vocab=20, scale=0.2)
    pi = logits.softmax(-1)
    variance = {}
    for estimator in ON_POLICY:
        x = kl_estimate(pi.log(), ref.log(), estimator=estimator)
        variance[estimator] = (pi * x**2).sum() - (pi * x).sum() ** 2
    rows = {v: [variance[e] for e in ON_POLICY if ESTIMATORS[e].variance == v] for v in ("low", "high")}
    assert (len(rows["low"]), len(rows["high"])) == (6, 2)
    assert max(rows["low"]) < min(rows["high"])


# -- edges -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_whatever_comes_in_finite_numbers_come_out(estimator, dtype):
    bad = [math.nan, math.inf, -math.inf, 1e4, -1e4, 3e4, -3e4, 0.0]
    for ref, ratio in [(bad, [0.0] * 8), ([1.0] * 8, bad), (bad, bad), (bad, bad[1:] + bad[:1])]:
        leaf = torch.zeros(8, dtype=dtype, requires_grad=True)
        log_ratio = leaf + torch.tensor(ratio, dtype=dtype) if estimator == CORRECTED else None
        kl = kl_estimate(leaf, torch.tensor(ref, dtype=dtype), estimator=estimator, log_ratio=log_ratio)
        (gradient,) = torch.autograd.grad(kl.sum(), leaf)
        assert kl.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert bool(kl.isfinite().all())
        assert bool(gradient.isfinite().all())
        assert gradient.numel() == kl.numel() == 8


@pytest.mark.parametrize("estimator", ON_POLICY)
def test_what_an_impossible_reference_counts(estimator):
    value, gradient = value_and_gradient(estimator, double([0.0, 0.0, 0.0]), double([math.nan, -math.inf, math.inf]))
    high = {"k1": 1e4, "abs": 1e4, "k2": 5e7, "k3": math.exp(-20) + 19}
    low = {"k1": -1e4, "abs": 1e4, "k2": 5e7, "k3": math.expm1(20) - 20}
    base = estimator.removesuffix("+")
    exactly(value, [0.0, high[base], low[base]])
    exactly(gradient, [0.0, 0.0, 0.0])


def test_an_unknown_ratio_counts_for_nothing():
    leaf = double([0.0, 0.0]).requires_grad_()
    log_ratio = leaf + double([math.nan, math.inf])
    kl = kl_estimate(leaf, double([1.0, 1.0]), estimator=CORRECTED, log_ratio=log_ratio)
    k3 = math.e - 2
    torch.testing.assert_close(kl.detach(), double([math.exp(-20) * k3, math.exp(20) * k3]), rtol=1e-12, atol=0)


def test_no_gradient_reaches_the_reference():
    ref = REF.clone().requires_grad_()
    leaf = LOGP.clone().requires_grad_()
    for estimator in ESTIMATORS:
        log_ratio = leaf - 0.1
        kl = kl_estimate(leaf, ref, estimator=estimator, log_ratio=log_ratio)
        assert torch.autograd.grad(kl.sum(), [leaf, ref], allow_unused=True)[1] is None


def test_straight_through_does_not_change_a_value_by_a_single_bit():
    d = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 3
    zero = torch.zeros_like(d)
    for base in ("k1", "abs", "k2", "k3"):
        plain = kl_estimate(d, zero, estimator=base)
        assert torch.equal(kl_estimate(d, zero, estimator=f"{base}+"), plain)


# The penalty as a composition: rewards, errors, formula, and the controllers of its coefficient.


# -- rewards ---------------------------------------------------------------------------------------


def test_penalized_rewards_stand_on_the_last_token_and_skip_empty_sequences():
    s = Segments.from_lengths([0, 2, 0, 0, 1, 3, 0])
    rewards = double([7.0, 1.0, 8.0, math.nan, 2.0, 3.0, 9.0]).requires_grad_()
    kl = double([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]).requires_grad_()
    got = penalized_rewards(rewards, s, kl, 0.5)
    exactly(got, [-0.05, 0.9, 1.85, -0.2, -0.25, 2.7])
    assert not got.requires_grad
    exactly(penalized_rewards(rewards, s, kl, 0), [0.0, 1.0, 2.0, 0.0, 0.0, 3.0])
    only_empty = Segments.from_lengths([0, 0])
    assert penalized_rewards(torch.ones(2), only_empty, torch.ones(0), 1.0).shape == (0,)


def test_rewards_and_kl_of_another_batch_are_refused():
    s = Segments.from_lengths([2, 1])
    with pytest.raises(ShapeError, match=r"'rewards': \(3,\), 'sequences': \(2,\)"):
        penalized_rewards(torch.ones(3), s, torch.ones(3), 1.0)
    with pytest.raises(ShapeError, match=r"'kl': \(2,\), 'tokens': \(3,\)"):
        penalized_rewards(torch.ones(2), s, torch.ones(2), 1.0)


# -- errors ----------------------------------------------------------------------------------------


def test_the_ratio_must_be_there_and_carry_its_gradient():
    leaf = LOGP.clone().requires_grad_()
    with pytest.raises(EvidenceError, match="needs log_ratio="):
        kl_estimate(leaf, REF, estimator=CORRECTED)
    detached = (leaf - 0.1).detach()
    with pytest.raises(MethodError, match="log_ratio has no gradient"):
        kl_estimate(leaf, REF, estimator=CORRECTED, log_ratio=detached)
    kl_estimate(leaf, REF, estimator=CORRECTED, log_ratio=detached, ratio_gradient=False)
    with torch.no_grad():
        kl_estimate(leaf, REF, estimator=CORRECTED, log_ratio=leaf - 0.1)


def plain(function):
    """The function without the run-time type checks of the test suite, as a user runs it."""
    return inspect.unwrap(function)


def test_tokens_of_different_batches_are_refused():
    with pytest.raises(ShapeError, match=r"'logp': \(3,\), 'logp_ref': \(2,\)"):
        plain(kl_estimate)(LOGP, REF[:2], estimator="k1")
    with pytest.raises(ShapeError, match=r"'log_ratio': \(1,\)"):
        plain(kl_estimate)(LOGP, REF, estimator=CORRECTED, log_ratio=REF[:1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "k4"}, "estimator='k4' is not one of"),
        ({"place": "advantage"}, "place='advantage' is not one of"),
        ({"coef": -0.1}, "coef=-0.1 must be positive and finite"),
        ({"coef": math.inf}, "coef=inf must be positive and finite"),
        ({"coef": math.nan}, "coef=nan must be a number"),
        ({"coef": None}, "coef=None must be positive and finite"),
        ({"coef": "0.1"}, "coef='0.1' must be a number"),
        ({"value_limit": 0.0}, "value_limit=0.0 must be positive"),
        ({"value_limit": math.nan}, "value_limit=nan must be a number"),
        ({"estimator": CORRECTED, "cap": -1.0}, "cap=-1.0 must be positive"),
        ({"cap": 2.0}, "cap and ratio_gradient belong to k3_corrected, not to 'k3'"),
        ({"ratio_gradient": False}, "belong to k3_corrected, not to 'k3'"),
        ({"estimator": CORRECTED, "place": "reward"}, "in the reward use estimator="),
        ({"coef": 0.0, "controller": Adaptive(target=0.1, horizon=10)}, "coef=0.0 must be positive"),
    ],
)
def test_penalties_that_cannot_be_are_refused(options, message):
    with pytest.raises(MethodError, match=message):
        unchecked_penalty(**{"estimator": "k3", "coef": 0.1, **options})


def unchecked_penalty(**options) -> KLPenalty:
    """A penalty checked by its own checks alone: the suite's type checks would come first."""
    penalty = object.__new__(KLPenalty)
    defaults = {"place": "loss", "cap": None, "value_limit": None, "ratio_gradient": True}
    for name, value in {**defaults, "controller": None, **options}.items():
        object.__setattr__(penalty, name, value)
    plain(KLPenalty.__post_init__)(penalty)
    return penalty


def test_estimates_refuse_the_same_options():
    with pytest.raises(MethodError, match="belong to k3_corrected"):
        kl_estimate(LOGP, REF, estimator="k1", cap=2.0)
    with pytest.raises(MethodError, match="value_limit=-1"):
        kl_estimate(LOGP, REF, estimator="k1", value_limit=-1)


# -- the penalty -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({"estimator": "k2", "coef": 0.001}, "loss + 0.001 k2"),
        ({"estimator": "k1", "coef": 1, "place": "reward"}, "reward - 1 k1"),
        (
            {"estimator": CORRECTED, "coef": 0.1, "cap": 2.0, "ratio_gradient": False},
            "loss + 0.1 k3_corrected (q <= 2, no gradient through q)",
        ),
        (
            {"estimator": "k3", "coef": 1e-3, "value_limit": 10.0, "controller": Adaptive(target=0.1, horizon=10_000)},
            "loss + 0.001 k3 (|value| <= 10, coef adapts to 0.1 nats)",
        ),
        ({"estimator": "k3", "coef": 0}, "loss + 0 k3"),
    ],
)
def test_formula_is_one_line_with_every_option(options, formula):
    penalty = KLPenalty(**options)
    assert penalty.formula == formula
    assert penalty.needs_ratio == (options["estimator"] == CORRECTED)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_penalty_is_the_unscaled_estimate_with_its_options(estimator):
    leaf = LOGP.clone().requires_grad_()
    ref = REF - 1.5
    options = {"value_limit": 0.5}
    if estimator == CORRECTED:
        options |= {"cap": 1.2, "ratio_gradient": False}
    ratio = leaf + double([1.0, 1.5, 2.0])
    penalty = KLPenalty(estimator=estimator, coef=7.0, **options)
    got = penalty(leaf, ref, ratio)
    expected = kl_estimate(leaf, ref, estimator=estimator, log_ratio=ratio, **options)
    assert torch.equal(got, expected)
    one, two = (torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in (got, expected))
    assert torch.equal(one, two)
    bare = kl_estimate(leaf, ref, estimator=estimator, log_ratio=ratio)
    assert not torch.equal(got, bare)


# -- controllers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kl", "expected"), [(0.5, 0.00100512), (0.105, 0.00100128), (0.05, 0.00099488)])
def test_adaptive_goldens(kl, expected):  # ctl.up, ctl.small, ctl.down
    got = Adaptive(target=0.1, horizon=10_000).next(0.001, kl=kl, samples=256)
    assert got == pytest.approx(expected, abs=1e-12)


def test_adaptive_edges():
    adaptive = Adaptive(target=0.1, horizon=100)
    assert adaptive.next(0.5, kl=math.nan, samples=256) == 0.5
    assert adaptive.next(0.5, kl=0.1, samples=256) == 0.5
    assert adaptive.next(1.0, kl=math.inf, samples=100) == pytest.approx(1.2)
    assert adaptive.next(1.0, kl=-math.inf, samples=100) == pytest.approx(0.8)
    assert adaptive.next(1.0, kl=-5, samples=100) == pytest.approx(0.8)
    assert adaptive.next(0.5, kl=9.0, samples=0) == 0.5


def test_a_huge_step_leaves_the_coefficient_positive():
    adaptive = Adaptive(target=0.1, horizon=100)
    assert adaptive.next(1.0, kl=0.0, samples=490) == pytest.approx(0.02)  # not floored yet
    assert adaptive.next(1.0, kl=0.0, samples=500) == 0.01
    assert adaptive.next(1.0, kl=0.0, samples=10**9) == 0.01


@pytest.mark.parametrize("name", ["target", "horizon"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_adaptive_refuses_what_it_cannot_divide_by(name, value):
    with pytest.raises(MethodError, match=f"{name}="):
        Adaptive(**{"target": 0.1, "horizon": 100, name: value})


# The penalty on whole sequences, by enumerating a tree: what the reward and the loss each miss.


class Tree:
    """All sequences of `horizon` tokens, packed, under pi (with gradient) and the reference."""

    def __init__(self, horizon: int, vocab: int = 3, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        draw = lambda t: torch.randn(vocab**t, vocab, generator=g, dtype=torch.float64)  # noqa: E731
        self.logits = [draw(t).requires_grad_() for t in range(horizon)]
        self.ref = [draw(t).log_softmax(-1) for t in range(horizon)]
        self.mu = [draw(t).log_softmax(-1) for t in range(horizon)]
        self.pi = [x.log_softmax(-1) for x in self.logits]
        y = torch.cartesian_prod(*[torch.arange(vocab)] * horizon).reshape(-1, horizon)
        self.count = vocab**horizon
        assert len(y) == self.count
        self.context = [
            sum((y[:, s] * vocab ** (t - 1 - s) for s in range(t)), torch.zeros(len(y)).long()) for t in range(horizon)
        ]
        self.y = y
        self.segments = Segments.from_lengths([horizon] * self.count)

    def logp(self, levels: list[Tensor]) -> Tensor:
        """Log-prob of every token of every sequence, packed."""
        columns = [levels[t][c, self.y[:, t]] for t, c in enumerate(self.context)]
        return torch.stack(columns, 1).reshape(-1)

    def law(self, levels: list[Tensor]) -> Tensor:
        return self.logp(levels).reshape(self.count, -1).sum(1).exp()

    def gradient(self, objective: Tensor) -> Tensor:
        return torch.cat(
            [
                g.reshape(-1)
                for g in torch.autograd.grad(
                    objective, self.logits, retain_graph=True, materialize_grads=True, allow_unused=True
                )
            ]
        )

    def sequence_kl(self) -> Tensor:
        law = self.law(self.pi)
        return (law * (law.log() - self.law(self.ref).log())).sum()

    def context_kl(self) -> list[Tensor]:
        return [(p.exp() * (p - r)).sum(-1) for p, r in zip(self.pi, self.ref)]

    def context_law(self, levels: list[Tensor]) -> list[Tensor]:
        """Probability of every context, position by position."""
        laws = [levels[0].new_ones(1)]
        for level in levels[:-1]:
            laws.append((laws[-1][:, None] * level.exp()).reshape(-1))
        return laws


def score_gradient(tree: Tree, rewards: Tensor, estimator: str, coef: float) -> Tensor:
    """Expected score-function gradient of the return with the penalty in the reward."""
    logp, logp_ref = tree.logp(tree.pi), tree.logp(tree.ref)
    penalty = KLPenalty(estimator=estimator, coef=coef, place="reward")  # type: ignore[arg-type]
    kl = penalty(logp, logp_ref)
    returns = tree.segments.sum(penalized_rewards(rewards, tree.segments, kl, penalty.coef))
    law = tree.law(tree.pi).detach()
    return tree.gradient((law * returns * tree.segments.sum(logp)).sum())


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_k1_in_the_reward_gives_the_gradient_of_the_sequence_kl(horizon):
    tree = Tree(horizon)
    rewards = torch.randn(tree.count, dtype=torch.float64)
    exact = (tree.law(tree.pi) * rewards).sum() - 0.3 * tree.sequence_kl()
    exactly(score_gradient(tree, rewards, "k1", 0.3), tree.gradient(exact))
    assert tree.gradient(tree.sequence_kl()).norm() > 0.05


def test_k1_in_the_reward_with_rewards_to_go():
    tree = Tree(3)
    logp = tree.logp(tree.pi)
    kl = kl_estimate(logp, tree.logp(tree.ref), estimator="k1")
    r = penalized_rewards(torch.zeros(tree.count, dtype=torch.float64), tree.segments, kl, 1.0)
    to_go = tree.segments.spread(tree.segments.sum(r)) - tree.segments.prefix_sum(r) + r
    law = tree.segments.spread(tree.law(tree.pi).detach())
    exactly(tree.gradient((law * to_go * logp).sum()), -tree.gradient(tree.sequence_kl()))


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_any_other_estimate_in_the_reward_misses_its_own_gradient(estimator):
    """grad E_pi[x] = E[score x] + E[grad x]; the reward has only the first term."""
    tree = Tree(2)
    logp, law = tree.logp(tree.pi), tree.law(tree.pi)
    sums = tree.segments.sum(kl_estimate(logp, tree.logp(tree.ref), estimator=estimator))
    missed = tree.gradient((law.detach() * sums).sum())
    zero = torch.zeros(tree.count, dtype=torch.float64)
    exactly(-score_gradient(tree, zero, estimator, 1.0), tree.gradient((law * sums).sum()) - missed)
    assert missed.norm() > 0.1
    if estimator == "k3":  # its mean is the sequence KL, so the shortfall is from that KL itself
        exactly((law * sums).sum().detach(), tree.sequence_kl().detach())


@pytest.mark.parametrize("estimator", ["k2", "k1+", "abs+", "k3+"])
def test_in_the_loss_the_contexts_are_held_fixed(estimator):
    tree = Tree(3)
    law = tree.segments.spread(tree.law(tree.pi).detach())
    kl = kl_estimate(tree.logp(tree.pi), tree.logp(tree.ref), estimator=estimator)
    got = tree.gradient((law * kl).sum())
    pairs = list(zip(tree.context_law(tree.pi), tree.context_kl()))
    assert len(pairs) == 3
    fixed = tree.gradient(torch.stack([(p.detach() * k).sum() for p, k in pairs]).sum())
    missed = tree.gradient(torch.stack([(p * k.detach()).sum() for p, k in pairs]).sum())
    exactly(got, fixed)
    exactly(tree.gradient(tree.sequence_kl()) - got, missed)
    assert missed.norm() > 0.1


def test_corrected_holds_the_contexts_of_the_rollout_policy_fixed():
    tree = Tree(3)
    logp, logp_mu = tree.logp(tree.pi), tree.logp(tree.mu)
    kl = kl_estimate(logp, tree.logp(tree.ref), estimator=CORRECTED, log_ratio=logp - logp_mu)
    got = (tree.segments.spread(tree.law(tree.mu)) * kl).sum()
    pairs = zip(tree.context_law(tree.mu), tree.context_kl())
    expected = torch.stack([(p * k).sum() for p, k in pairs]).sum()
    exactly(got.detach(), expected.detach())
    exactly(tree.gradient(got), tree.gradient(expected))
