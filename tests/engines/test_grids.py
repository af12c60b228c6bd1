"""Grids of few bits: their numbers, the straight-through pass, and what a model on a grid computes."""

import copy

import pytest
import torch
from torch import nn

from offdrift.engines.grids import (
    FP4_NUMBERS,
    GRIDS,
    fp8,
    int8,
    matrices,
    nvfp4,
    on_grid,
    put_on_grid,
    straight_through,
)
from offdrift.engines.hf import TransformersEngine
from offdrift.engines.score import score
from offdrift.errors import EngineError
from tests.engines.contract import PLAIN, PROMPTS
from tests.engines.models import tiny

E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E4M3 = E4M3[E4M3.isfinite()]


def test_codes_are_the_nearest_numbers_of_each_grid():
    torch.manual_seed(0)
    x = torch.randn(5, 64) * torch.tensor([1e-3, 1.0, 30.0, 1.0, 0.0])[:, None]
    numbers = {
        "int8": torch.arange(-127, 128).float(),
        "fp8": E4M3,
        "nvfp4": torch.tensor([s * y for s in (1, -1) for y in FP4_NUMBERS]),
    }
    for name, coded in (("int8", int8), ("fp8", fp8), ("nvfp4", nvfp4)):
        codes, scale = coded(x)
        assert torch.isin(codes, numbers[name]).all(), name
        wanted = x / scale.clamp(min=1e-30)
        wanted = wanted.clamp(numbers[name].min(), numbers[name].max())
        best = (wanted[..., None] - numbers[name]).abs().amin(-1)
        torch.testing.assert_close((codes - wanted).abs(), best, atol=1e-5, rtol=1e-5)


def test_a_scale_is_of_a_row_or_of_a_block_of_sixteen():
    x = torch.ones(2, 40)
    x[0, 0], x[1, 20] = 100.0, 100.0
    assert int8(x).scale.flatten().tolist() == pytest.approx([100 / 127, 100 / 127])
    assert fp8(x).scale.flatten().tolist() == pytest.approx([100 / 448, 100 / 448])
    scale = nvfp4(x).scale
    largest = [[scale[i, 16 * j].item() * 6 for j in range(3)] for i in range(2)]
    assert largest[0] == pytest.approx([100, 1, 1], rel=0.07)  # the scale itself has three bits of mantissa
    assert largest[1] == pytest.approx([1, 100, 1], rel=0.07)
    assert torch.equal(nvfp4(x.T, dim=0).value.T, nvfp4(x).value)


def test_halves_go_to_the_even_code():
    # Blocks whose largest number is 6 have scale 1: 0.25 -> 0, 0.75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4.
    x = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert nvfp4(x).codes.tolist() == [6, 0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("name", GRIDS)
def test_rounding_passes_the_gradient_and_gives_the_very_number(name):
    torch.manual_seed(1)
    x, outer = torch.randn(4, 32, requires_grad=True), torch.randn(4, 32)
    rounded = straight_through(x, GRIDS[name].weights)
    assert torch.equal(rounded, GRIDS[name].weights(x.detach()).value)
    assert not torch.equal(rounded, x)
    (rounded * outer).sum().backward()
    assert torch.equal(x.grad, outer)


def by_hand(layer: nn.Linear, x: torch.Tensor, name: str) -> torch.Tensor:
    grid = GRIDS[name]
    x = x if grid.activations is None else grid.activations(x).value
    return nn.functional.linear(x, grid.weights(layer.weight.detach()).value, layer.bias)


@pytest.mark.parametrize("name", GRIDS)
def test_a_layer_on_a_grid_multiplies_rounded_numbers_and_its_weight_stays(name):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 4))
    x = torch.randn(6, 32, requires_grad=True)
    before = copy.deepcopy(model.state_dict())
    with on_grid(model, name):
        y = model(x)
        expected = by_hand(model[1], by_hand(model[0], x.detach(), name), name)
        torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-6)
        y.sum().backward()
        assert isinstance(model[0].weight, nn.Parameter), "between passes the weight is the parameter"
    assert all(torch.equal(before[n], w) for n, w in model.state_dict().items())
    assert [n for n, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    torch.testing.assert_close(model(x), model[1](model[0](x)))
    # dL/dW of the second layer is the rounded input, dL/dx goes through the rounded weights.
    inner = by_hand(model[0], x.detach(), name)
    inner = inner if GRIDS[name].activations is None else GRIDS[name].activations(inner).value
    torch.testing.assert_close(model[1].weight.grad, inner.sum(0).expand(4, 8))
    through = (
        GRIDS[name].weights(model[1].weight.detach()).value.sum(0) @ GRIDS[name].weights(model[0].weight.detach()).value
    )
    torch.testing.assert_close(x.grad, through.expand(6, 32))


def test_an_exception_in_a_pass_leaves_the_parameter_in_its_place():
    model = nn.Sequential(nn.Linear(32, 8))
    with on_grid(model, "int8"), pytest.raises(RuntimeError):
        model(torch.randn(2, 31))
    assert model[0].weight is dict(model.named_parameters())["0.weight"]


@pytest.mark.parametrize(("kind", "name"), [*(("dense", name) for name in GRIDS), ("moe", "int8"), ("moe", "nvfp4")])
def test_engine_and_trainer_on_one_grid_are_one_policy(kind, name):
    model = tiny(kind)
    rollouts = TransformersEngine(model, quantization=name).generate(PROMPTS, PLAIN, seed=0, evidence="full")
    mu = rollouts.evidence.logp.double()

    def kl(trainer):
        pi = score(trainer, rollouts).logits.detach().double().log_softmax(-1)
        return float((mu.exp() * (mu - pi)).sum(-1).median())

    apart = kl(model)
    with on_grid(model, name):
        together = kl(model)
    # Where activations are rounded, too, a last bit may tip one of them over; most tokens see none of that.
    assert together < 1e-7
    assert apart > 1e-4
    assert kl(model) == apart


def test_the_gradient_of_a_mixture_on_a_grid_reaches_every_matrix():
    model = tiny("moe")
    rollouts = TransformersEngine(model).generate(PROMPTS, PLAIN, seed=0)
    hooks = put_on_grid(model, "int8")
    score(model, rollouts).logp.sum().backward()
    assert all(model.get_parameter(path).grad.abs().sum() > 0 for path in matrices(model))
    hooks.remove()


def test_what_cannot_be_put_on_a_grid_is_refused():
    with pytest.raises(EngineError, match=r"'w8a8' rounds the inputs of every matrix, and .* is a fused tensor"):
        TransformersEngine(tiny("moe"), quantization="w8a8")
    with pytest.raises(EngineError, match=r"'fp3'.*fp8_per_channel, int8, nvfp4, w8a8"):
        TransformersEngine(tiny("dense"), quantization="fp3")


def test_the_record_says_what_the_processor_multiplies_with():
    engine = TransformersEngine(tiny("dense"), quantization="int8")
    provenance = engine.generate(PROMPTS, PLAIN, seed=0).provenance
    assert provenance.quantization == "int8"
    assert provenance.instructions.split("+")[0] in ("avx512", "avx2", "scalar")
    assert TransformersEngine(tiny("dense")).generate(PROMPTS, PLAIN, seed=0).provenance.instructions is None
