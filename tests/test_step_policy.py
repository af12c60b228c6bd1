"""Policies for steps without a gradient: what torch's optimizers do by themselves, and what a guard changes."""

import pytest
import torch

from offdrift.errors import BadValueError
from offdrift.step_policy import StepPolicy, guard

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1, weight_decay=0.1),
}
DECAY = {"AdamW": 0.9, "SGD": 0.9, "Muon": 0.95}
MEANS = {"AdamW": "exp_avg", "SGD": "momentum_buffer", "Muon": "momentum_buffer"}


def trained(name):
    """A weight after one step, with its optimizer and the mean of gradients that it keeps."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 4))
    optimizer = OPTIMIZERS[name]([weight])
    weight.grad = torch.randn(4, 4)
    optimizer.step()
    return weight, optimizer, optimizer.state[weight][MEANS[name]]


def empty_steps(weight, optimizer, n=3):
    for _ in range(n):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_without_a_gradient_unless_it_is_guarded(name):
    weight, optimizer, _ = trained(name)
    before = weight.detach().clone()
    steps = guard(optimizer, StepPolicy("step"))
    empty_steps(weight, optimizer)
    assert (steps.asked, steps.empty) == (3, 3)
    assert not torch.equal(weight, before)
    steps.remove()
    steps = guard(optimizer)
    before = weight.detach().clone()
    empty_steps(weight, optimizer)
    assert torch.equal(weight, before), "not even by weight decay"
    steps.remove()
    empty_steps(weight, optimizer)
    assert not torch.equal(weight, before), "without the guard it steps as before"
    assert steps.asked == 3


def test_muon_does_not_slow_down():
    """Its steps have the same size whatever its mean has shrunk to; AdamW's shrink."""
    moves = {}
    for name in ("AdamW", "Muon"):
        weight, optimizer, _ = trained(name)
        optimizer.param_groups[0]["weight_decay"] = 0.0
        moves[name] = []
        for _ in range(50):
            before = weight.detach().clone()
            empty_steps(weight, optimizer, 1)
            moves[name].append((weight - before).norm().item())
    assert moves["Muon"][-1] == pytest.approx(moves["Muon"][0], rel=0.02)
    assert moves["AdamW"][-1] < 0.05 * moves["AdamW"][0]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("empty", ["skip", "decay", "clear"])
def test_what_is_left_of_the_mean_of_gradients(name, empty):
    weight, optimizer, mean = trained(name)
    before, squares = mean.clone(), optimizer.state[weight].get("exp_avg_sq", torch.zeros(1)).clone()
    guard(optimizer, StepPolicy(empty))
    empty_steps(weight, optimizer)
    left = {"skip": 1.0, "decay": DECAY[name] ** 3, "clear": 0.0}[empty]
    torch.testing.assert_close(mean, left * before)
    assert torch.equal(optimizer.state[weight].get("exp_avg_sq", torch.zeros(1)), squares)


def test_a_step_with_a_gradient_is_the_optimizers_own():
    (guarded, optimizer, _), (free, other, _) = trained("AdamW"), trained("AdamW")
    steps = guard(optimizer, StepPolicy("clear", 0.25), acceptance=lambda: 0.25)
    for weight, of in ((guarded, optimizer), (free, other)):
        weight.grad = torch.full((4, 4), 1e-30)
        of.step()
    assert torch.equal(guarded, free)
    assert (steps.asked, steps.empty, steps.scale) == (1, 0, 1.0)


def test_a_step_shrinks_with_acceptance_and_the_rate_comes_back():
    weight, optimizer, _ = trained("SGD")
    optimizer.param_groups[0] |= {"weight_decay": 0.0, "momentum": 0.0}
    guard(optimizer, StepPolicy(min_acceptance=0.5), acceptance=lambda: 0.125)
    before = weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.testing.assert_close(weight, before - 0.1 * 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_gradient_that_is_not_a_number_is_not_empty():
    weight, optimizer, _ = trained("SGD")
    steps = guard(optimizer)
    weight.grad = torch.full_like(weight, float("nan"))
    optimizer.step()
    assert steps.empty == 0


def test_accelerate_and_schedulers_step_through_the_guard():
    accelerate = pytest.importorskip("accelerate")
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = accelerate.Accelerator(cpu=True).prepare(torch.optim.AdamW([weight], lr=0.1))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer, 1.0)
    steps = guard(optimizer)
    for gradient in (1.0, 0.0):
        weight.grad = torch.full((2,), gradient)
        before = weight.detach().clone()
        optimizer.step()
        schedule.step()
        assert torch.equal(weight, before) == (gradient == 0)
    assert (steps.asked, steps.empty) == (2, 1)


def test_what_cannot_be_done_is_refused():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adagrad([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(BadValueError, match="Adagrad"):
        StepPolicy("decay").settle(optimizer)
    StepPolicy("clear").settle(torch.optim.SGD([weight]))  # keeps nothing
    with pytest.raises(BadValueError, match="acceptance="):
        guard(optimizer, StepPolicy(min_acceptance=0.5))
    with pytest.raises(BadValueError, match="dict"):
        guard({})
    with pytest.raises(BadValueError, match="empty"):
        StepPolicy("stop")  # type: ignore[arg-type]
    with pytest.raises(BadValueError, match="min_acceptance"):
        StepPolicy(min_acceptance=2.0)
