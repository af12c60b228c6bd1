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


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in ("dense", "moe") for name in GRIDS])
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


class Looped(nn.Module):
    """Experts whose products no rounding sees: written as matrix products."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(self, x, top_k_index, top_k_weights, rounds=lambda x: x, weight=lambda w: w):
        out = torch.zeros_like(x)
        for token, k in torch.cartesian_prod(torch.arange(len(x)), torch.arange(top_k_index.shape[1])).tolist():
            expert = int(top_k_index[token, k])
            gate, up = (rounds(x[token]) @ weight(self.gate_up_proj[expert]).T).chunk(2)
            inner = nn.functional.silu(gate) * up
            out[token] += top_k_weights[token, k] * (rounds(inner) @ weight(self.down_proj[expert]).T)
        return out


@pytest.mark.parametrize("name", ["w8a8", "fp8_per_channel"])
@pytest.mark.parametrize("kind", ["eager", "batched_mm", "grouped_mm"])
def test_fused_experts_multiply_rounded_inputs_at_both_products(name, kind):
    model, grid = tiny("moe"), GRIDS[name]
    model.set_experts_implementation(kind)
    experts = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    torch.manual_seed(3)
    x = torch.randn(5, experts.gate_up_proj.shape[-1])
    index = torch.stack([torch.randperm(experts.gate_up_proj.shape[0])[:2] for _ in range(5)])
    chosen = (index, torch.rand(5, 2))
    rounds = {"rounds": lambda x: grid.activations(x).value, "weight": lambda w: grid.weights(w).value}
    with torch.no_grad():
        expected, plain = Looped(experts)(x, *chosen, **rounds), Looped(experts)(x, *chosen)
        with on_grid(model, name):
            got = experts(x, *chosen)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert (got - plain).abs().max() > 1e-3 * plain.abs().max()


def test_experts_whose_products_are_unknown_are_refused():
    model = tiny("moe")
    block = next(m for m in model.modules() if hasattr(getattr(m, "experts", None), "gate_up_proj"))
    block.experts = Looped(block.experts)
    with on_grid(model, "w8a8"), pytest.raises(EngineError, match="Looped multiplies by functions that are unknown"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("name", ["int8", "w8a8"])
def test_the_gradient_of_a_mixture_on_a_grid_reaches_every_matrix(name):
    model = tiny("moe")
    rollouts = TransformersEngine(model).generate(PROMPTS, PLAIN, seed=0)
    hooks = put_on_grid(model, name)
    score(model, rollouts).logp.sum().backward()
    assert all(model.get_parameter(path).grad.abs().sum() > 0 for path in matrices(model))
    hooks.remove()


def test_what_cannot_be_put_on_a_grid_is_refused():
    with pytest.raises(EngineError, match=r"'fp3'.*fp8_per_channel, int8, nvfp4, w8a8"):
        TransformersEngine(tiny("dense"), quantization="fp3")


def test_the_record_says_what_the_processor_multiplies_with():
    engine = TransformersEngine(tiny("dense"), quantization="int8")
    provenance = engine.generate(PROMPTS, PLAIN, seed=0).provenance
    assert provenance.quantization == "int8"
    assert provenance.instructions.split("+")[0] in ("avx512", "avx2", "scalar")
    assert TransformersEngine(tiny("dense")).generate(PROMPTS, PLAIN, seed=0).provenance.instructions is None
