"""Faults far below every threshold of health, each planted: precision does not explain them, and is never named."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from offdrift.check.bench import Bench, EngineSpec
from offdrift.check.check import check
from offdrift.check.measure import measure
from offdrift.check.precision import FLOOR, Explained, compared, explained, unexplained, without_precision
from offdrift.judge import load_rules
from offdrift.records.provenance import Sampling
from offdrift.segments import Segments
from tests.check.benches import BFLOAT16, FLOAT32, bench_of

LIMITS = load_rules().limits

SAMPLING = Sampling(max_tokens=16)
EAGER = EngineSpec("transformers", "bfloat16", {"attn_implementation": "eager"})


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def layer_moved(model: nn.Module, by: float = 0.03) -> None:
    """One layer by 3 % of each tensor's size."""
    g = draws()
    for name, weight in model.named_parameters():
        if "layers.1." in name:
            weight.add_(by * weight.std() * torch.randn(weight.shape, generator=g).to(weight))


def layer_moved_little(model: nn.Module) -> None:
    layer_moved(model, by=0.003)


def tied_head_stale(model: nn.Module) -> None:
    """The head is that of an update before; the embedding is new."""
    head, g = model.get_output_embeddings(), draws()
    old = copy.deepcopy(head.weight.detach())
    head.weight = nn.Parameter(old + 0.03 * old.std() * torch.randn(old.shape, generator=g).to(old))


def adapter_not_merged(model: nn.Module) -> None:
    """An adapter of rank 2 and 5 % of the size of queries and values, which the trainer has."""
    g = draws()
    for name, weight in model.named_parameters():
        if "q_proj" in name or "v_proj" in name:
            low = torch.randn(weight.shape[0], 2, generator=g) @ torch.randn(2, weight.shape[1], generator=g)
            weight.sub_((0.05 * weight.float().norm() * low / low.norm()).to(weight))


def rope_base(model: nn.Module) -> None:
    """Half as large again."""
    config, rope = model.config, model.model.rotary_emb
    base = 1.5 * config.rope_parameters["rope_theta"]
    rope.inv_freq.copy_(base ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim))


FAULTS = {f.__name__: f for f in (layer_moved, tied_head_stale, adapter_not_merged, rope_base)}


class Planted(Bench):
    """A bench whose rollout engine has a fault."""

    fault = staticmethod(lambda model: None)

    def engine(self, spec):
        fresh = self._engines.get(spec.kind, (None,))[0] != spec
        made = super().engine(spec)
        if fresh:
            with torch.no_grad():
                self.fault(made.model)
        return made


def found_on(fault, spec: EngineSpec, kind: str = "dense") -> dict:
    made = type("Faulty", (Planted,), {"fault": staticmethod(fault)})
    with bench_of(kind, count=16, made=made, sampling=SAMPLING) as bench:
        return check(bench, spec, FLOAT32, noise=False)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("spec", [FLOAT32, BFLOAT16], ids=str)
def test_a_small_fault_is_no_ordinary_mismatch(name, spec):
    found = found_on(FAULTS[name], spec)
    assert found["precision"]["exceeded"] is True
    assert found["verdict"]["level"] == "act"
    assert "weights or configuration differ" in found["verdict"]["text"]
    assert "nothing to repair" not in found["verdict"]["text"]
    causes = [f["cause"] for f in found["findings"]]
    assert causes[0] == "weights_or_configuration"
    assert "precision" not in causes
    assert found["passed"] is False
    assert found["recommended"]["method"] is None


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("spec", [FLOAT32, BFLOAT16, EAGER, EngineSpec("transformers", "float16")], ids=str)
def test_an_honest_pair_is_explained(kind, spec):
    found = found_on(lambda model: None, spec, kind)
    assert found["precision"]["exceeded"] is False
    assert found["precision"]["ratio"] < 2
    assert found["precision"]["tokens"] == 256
    assert found["verdict"]["level"] == "ok"
    assert "weights_or_configuration" not in {f["cause"] for f in found["findings"]}


def test_a_trainer_in_bfloat16_rounds_too():
    with bench_of(count=16, sampling=SAMPLING) as bench:
        drawn = bench.rollouts(FLOAT32)
        found = explained(bench, drawn, measure(bench, drawn, BFLOAT16), BFLOAT16)
    assert not found.exceeded
    assert 0.3 < found.ratio < 2
    assert found.multiple == 3


@pytest.mark.parametrize(("really", "fault"), [(FLOAT32, None), (FLOAT32, layer_moved_little), (BFLOAT16, None)])
def test_an_engine_that_states_no_dtype_is_held_to_the_one_that_its_numbers_allow(really, fault):
    """A fault of .3 % in a float32 engine is far below what bfloat16 explains."""
    made = type("Faulty", (Planted,), {"fault": staticmethod(fault or (lambda model: None))})
    with bench_of(count=16, made=made, sampling=SAMPLING) as bench:
        drawn = bench.rollouts(really)
        drawn = drawn.with_(provenance=replace(drawn.provenance, dtype="bfloat16"))  # what a silent server is taken for
        baseline = measure(bench, drawn, FLOAT32)
        found = explained(bench, drawn, baseline, FLOAT32, stated=False)
        taken_at_its_word = explained(bench, drawn, baseline, FLOAT32)
    assert found.dtype == really.dtype
    assert found.stated is False
    assert found.exceeded == (fault is not None)
    assert not taken_at_its_word.exceeded


def test_what_transformers_cannot_repeat_is_said_and_judged_by_nothing():
    spec = EngineSpec("transformers", "bfloat16", {"quantization": "int8"})
    with bench_of(count=4, sampling=SAMPLING) as bench:
        drawn = bench.rollouts(spec)
        found = explained(bench, drawn, measure(bench, drawn, FLOAT32), FLOAT32)
    assert "int8" in found.why
    assert not found.exceeded
    assert unexplained(found) == []


def test_the_comparison_by_hand():
    """Four sequences of two tokens; what is explained is 1, the multiple is 3."""
    segments = Segments.from_lengths([2, 2, 2, 2])
    there = torch.ones(8, dtype=torch.float64)
    for here, exceeded in (([2.0] * 8, False), ([4.0, 4.1] * 4, True), ([100.0] + [1.0] * 7, False)):
        found = compared(
            torch.tensor(here).double(), there, segments, dtype="bfloat16", multiple=3.0, exact=True, limits=LIMITS
        )
        assert found.exceeded is exceeded, here
        assert found.measured == pytest.approx(sum(here) / 8)
        assert found.explained == pytest.approx(1.0)
    nothing = compared(
        torch.zeros(8).double(), torch.zeros(8), segments, dtype="float32", multiple=100.0, exact=True, limits=LIMITS
    )
    assert nothing.explained == FLOOR
    assert not nothing.exceeded


def test_precision_is_never_named_between_two_engines_in_float32():
    over = Explained("float32", measured=1.0, explained=0.001, multiple=100.0, z=9.0, share=1.0, sequences=16)
    (other,) = unexplained(over)
    named = replace(other, cause="precision")
    found = Explained("float32", "interrupted")
    assert without_precision([named, other], found, "float32", "float32") == [other]
    assert without_precision([named, other], found, "bfloat16", "float32") == [named, other]
    assert without_precision([named, other], over, "bfloat16", "float32") == [other]


def expert_stale(model: nn.Module) -> None:
    """One expert of eight, by 3 %: a few sequences are sent to it."""
    weight = model.model.layers[1].mlp.experts.down_proj
    weight[5].add_(0.03 * weight.std() * torch.randn(weight[5].shape, generator=draws()))


def test_an_expert_that_few_sequences_are_sent_to_is_found_in_float32():
    found = found_on(expert_stale, FLOAT32, "moe")
    precision = found["precision"]
    assert precision["ratio"] > 1e4
    assert 3 / 16 <= precision["share"] < 0.8
    assert precision["exceeded"] is True
    assert found["passed"] is False


@pytest.mark.parametrize(("multiple", "exceeded"), [("precision_times_float32", True), ("precision_times_half", False)])
def test_three_sequences_of_sixteen_are_enough_in_float32_alone(multiple, exceeded):
    found = Explained("", measured=1.0, explained=1e-9, multiple=LIMITS[multiple], z=2.0, share=3 / 16, sequences=16)
    assert found.exceeded is exceeded
    assert not replace(found, share=2 / 16).exceeded
