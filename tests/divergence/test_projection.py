"""The projection into a KL ball: its optimality conditions, its gradient, and what it does at the edges."""

from __future__ import annotations

import math

import pytest
import torch

from offdrift.divergence.evidence import Distributions
from offdrift.divergence.projection import project
from offdrift.errors import BadValueError, ShapeError

BOUND = 0.05


def pair(*, v: int = 9, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve rows, from hardly moved to far."""
    g = torch.Generator().manual_seed(seed)
    old = 2 * torch.randn(12, v, generator=g, dtype=torch.float64)
    apart = torch.logspace(-3, 1.3, 12, dtype=torch.float64)[:, None]
    return old.to(dtype), (old + apart * torch.randn(12, v, generator=g, dtype=torch.float64)).to(dtype)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL of log-probs."""
    return (p.exp() * (p - q)).sum(-1)


def projected(old: torch.Tensor, new: torch.Tensor, *, bound: float) -> torch.Tensor:
    """The whole projected policy, log-probs, from the multiplier: where the Lagrangian is stationary."""
    tokens = torch.zeros(len(old), dtype=torch.int64)
    eta = project(given(old, new, tokens), bound=bound).multiplier[:, None]
    return ((new.log_softmax(-1) + eta * old.log_softmax(-1)) / (1 + eta)).log_softmax(-1)


def drawn(v: int = 9) -> torch.Tensor:
    return torch.arange(12) % v


def given(old: torch.Tensor, new: torch.Tensor, tokens: torch.Tensor | None = None) -> Distributions:
    return Distributions(old, new, drawn(old.shape[1]) if tokens is None else tokens)


@pytest.mark.parametrize("bound", [1e-3, BOUND, 0.4])
def test_outside_the_kl_is_the_bound_to_rounding_and_inside_nothing_changes(bound):
    old, new = (x.log_softmax(-1) for x in pair())
    there, pi = project(given(old, new), bound=bound), projected(old, new, bound=bound)
    far = kl(new, old) > bound
    assert torch.equal(there.outside, far)
    assert 3 <= int(far.sum()) <= 9
    torch.testing.assert_close(kl(pi, old)[far], torch.full_like(old[far, 0], bound), rtol=1e-11, atol=0)
    torch.testing.assert_close(pi[~far], new[~far], rtol=0, atol=1e-14)
    assert (there.multiplier[~far] == 0).all()
    assert (there.multiplier[far] > 0).all()
    torch.testing.assert_close(pi.logsumexp(-1), torch.zeros(12, dtype=torch.float64), rtol=0, atol=1e-13)


def test_the_multiplier_is_that_of_the_optimality_condition():
    """d/d pi_a of KL(pi || new) + eta KL(pi || old) is the same at every entry, and no feasible policy is nearer."""
    old, new = (x.log_softmax(-1) for x in pair())
    there, pi = project(given(old, new), bound=BOUND), projected(old, new, bound=BOUND)
    stationary = (pi - new) + there.multiplier[:, None] * (pi - old)
    torch.testing.assert_close(stationary, stationary[:, :1].expand_as(stationary), rtol=0, atol=1e-10)
    g = torch.Generator().manual_seed(1)
    for size in (1e-3, 0.03, 0.3):
        other = (pi + size * torch.randn(pi.shape, generator=g, dtype=torch.float64)).log_softmax(-1)
        allowed = there.outside & (kl(other, old) <= BOUND)
        assert int(allowed.sum()) > 0
        assert (kl(other, new)[allowed] > kl(pi, new)[allowed]).all()


def test_a_vocabulary_of_two_by_hand():
    """KL((p, 1 - p) || (1/2, 1/2)) = log 2 - H(p) = 0.05 at p = 0.65607."""
    two = lambda p: torch.tensor([[1 - p, p]], dtype=torch.float64).log()  # noqa: E731
    there = project(given(two(0.5), two(0.9), torch.tensor([1])), bound=BOUND)
    p = float(there.log_ratio.exp()) / 2
    assert math.log(2) + p * math.log(p) + (1 - p) * math.log(1 - p) == pytest.approx(BOUND, rel=1e-12)
    logit = lambda x: math.log(x / (1 - x))  # noqa: E731
    assert float(there.multiplier) == pytest.approx(logit(0.9) / logit(p) - 1, rel=1e-12)
    apart = 0.9 * math.log(0.9 / p) + 0.1 * math.log(0.1 / (1 - p))
    assert float(there.distance) == pytest.approx(apart, rel=1e-12)


def test_numbers_of_the_drawn_token_are_those_of_the_whole_policy():
    old, new = pair()
    there, pi = project(given(old, new), bound=BOUND), projected(old, new, bound=BOUND)
    at = lambda x: x.gather(1, drawn()[:, None])[:, 0]  # noqa: E731
    log_old, log_new = old.log_softmax(-1), new.log_softmax(-1)
    torch.testing.assert_close(there.log_ratio, at(pi - log_old), rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(there.distance, kl(log_new, pi), rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(there.logp, at(log_new), rtol=1e-12, atol=0)
    torch.testing.assert_close(there.logp_old, at(log_old), rtol=1e-12, atol=0)


def test_gradients_are_finite_differences():
    """Through the multiplier, too; of the distance with the projected policy held."""
    old, new = pair(v=5)
    leaf = new.clone().requires_grad_()
    there = project(given(old, leaf), bound=BOUND)
    (of_ratio,) = torch.autograd.grad(there.log_ratio.sum(), leaf, retain_graph=True)
    (of_distance,) = torch.autograd.grad(there.distance.sum(), leaf)
    held, step = projected(old, new, bound=BOUND), 1e-6
    for a in range(5):
        e = torch.zeros_like(new)
        e[:, a] = step
        ends = [project(given(old, new + s * e), bound=BOUND).log_ratio for s in (1, -1)]
        torch.testing.assert_close(of_ratio[:, a], (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)
        ends = [kl((new + s * e).log_softmax(-1), held) for s in (1, -1)]
        torch.testing.assert_close(of_distance[:, a], (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)
    assert (of_distance[~there.outside] == 0).all()
    torch.testing.assert_close(of_ratio.sum(-1), torch.zeros(12, dtype=torch.float64), rtol=0, atol=1e-12)


def test_moving_along_the_path_changes_nothing_outside_and_other_directions_learn():
    old, new = pair()
    leaf = new.clone().requires_grad_()
    there = project(given(old, leaf), bound=BOUND)
    (grad,) = torch.autograd.grad(there.log_ratio.sum(), leaf)
    along = torch.linalg.vecdot(grad, (new - old))[there.outside]
    assert along.abs().max() < 1e-10
    assert (grad[there.outside].norm(dim=-1) > 1e-3).all()


def test_half_precision_in_float32_out_and_the_gradient_in_the_logits_dtype():
    old, new = pair(dtype=torch.bfloat16)
    leaf = new.clone().requires_grad_()
    there = project(given(old, leaf), bound=BOUND)
    assert there.log_ratio.dtype == there.distance.dtype == torch.float32
    (there.log_ratio.sum() + there.distance.sum()).backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.bfloat16
    want = project(given(old.double(), new.double()), bound=BOUND)
    torch.testing.assert_close(there.log_ratio.double(), want.log_ratio, rtol=1e-6, atol=1e-6)


def test_tokens_that_a_filter_left_out_of_both_are_as_if_they_were_not_there():
    old, new = pair()
    wide = [torch.cat([x, torch.full((12, 2), -math.inf, dtype=x.dtype)], 1) for x in (old, new)]
    leaf, plain = wide[1].clone().requires_grad_(), new.clone().requires_grad_()
    got, want = project(given(wide[0], leaf, drawn()), bound=BOUND), project(given(old, plain), bound=BOUND)
    torch.testing.assert_close(got.log_ratio, want.log_ratio, rtol=1e-12, atol=1e-14)
    (got.log_ratio + got.distance).sum().backward()
    (want.log_ratio + want.distance).sum().backward()
    assert leaf.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(leaf.grad[:, :9], plain.grad, rtol=1e-10, atol=1e-13)
    assert (leaf.grad[:, 9:] == 0).all()


def test_what_only_one_policy_can_draw():
    """Only the current one: infinitely far; only the old one: the projected policy leaves it out."""
    old, new = (torch.tensor([x], dtype=torch.float64).log() for x in ([0.5, 0.5, 0.0], [0.1, 0.6, 0.3]))
    there = project(given(old, new, torch.tensor([1])), bound=BOUND)
    assert there.distance.tolist() == [math.inf]
    back = project(given(new, old, torch.tensor([1])), bound=0.8)
    assert back.distance.isfinite().all()
    assert back.log_ratio.isfinite().all()
    assert project(given(new, old, torch.tensor([2])), bound=0.8).log_ratio.tolist() == [-math.inf]


def test_rows_are_independent_however_many_there_are():
    old, new = pair(v=700)
    whole = project(given(old.repeat(20, 1), new.repeat(20, 1), drawn(700).repeat(20)), bound=BOUND)
    one = project(given(old, new), bound=BOUND)
    torch.testing.assert_close(whole.log_ratio, one.log_ratio.repeat(20), rtol=1e-12, atol=1e-14)
    none = project(given(old[:0], new[:0], drawn(700)[:0]), bound=BOUND)
    assert none.log_ratio.shape == (0,)


def test_the_search_of_an_accelerator_finds_the_same(monkeypatch):
    """A fixed number of steps for every row, and no question to the device."""
    both = given(*pair(v=50))
    want = project(both, bound=BOUND)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    got = project(both, bound=BOUND)
    torch.testing.assert_close(got.log_ratio, want.log_ratio, rtol=0, atol=1e-10)
    torch.testing.assert_close(got.multiplier, want.multiplier, rtol=1e-9, atol=0)


def test_what_is_refused():
    old, new = pair()
    refused = (ShapeError, BadValueError, TypeError)  # a TypeError is of tests that check shapes
    for parts in ((old[:, :8], new, drawn()), (old, new, drawn()[:5]), (old, new, drawn().double())):
        with pytest.raises(refused, match=r"one drawn token for each row|tokens holds|Distributions.__init__"):
            Distributions(*parts)
    for bound in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(BadValueError, match="positive, finite number of nats"):
            project(given(old, new), bound=bound)
    leaf = new.clone().requires_grad_()
    (grad,) = torch.autograd.grad(project(given(old, leaf), bound=BOUND).log_ratio.sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()
