"""Inputs that cannot mean anything are refused by name, with a way out."""

import pytest
import torch

from offdrift.advantages import ADVANTAGES, advantages
from offdrift.errors import BadValueError, EvidenceError, MethodError, ShapeError
from offdrift.segments import Segments
from tests.advantages.batches import random_batch
from tests.oracles.fixtures import double

S = Segments.from_lengths([2, 1, 2], group_ids=torch.tensor([4, 4, 4]))
R = double([1.0, 0.0, 0.5])
NEEDS = [(how, name) for how, row in ADVANTAGES.items() for name in row.needs]


@pytest.mark.parametrize(("how", "name"), NEEDS)
def test_a_missing_input_is_named_with_its_estimator_and_the_way_out(how, name):
    batch = random_batch(0, [1, 1, 1, 1])
    inputs = batch.inputs(how)
    del inputs[name]
    with pytest.raises(EvidenceError, match=f"'{how}' needs {name}, .* or choose "):
        advantages(batch.pack(batch.padded["rewards"]), batch.segments, how=how, **inputs)


def test_some_estimators_need_something():
    assert len(NEEDS) == 8


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "logp_old, sum_pi_squared was"),
        ({"logp_old": torch.zeros(5).double()}, "and sum_pi_squared was"),
        ({"sum_pi_squared": torch.zeros(5).double()}, "and logp_old was"),
    ],
)
def test_opob_says_what_it_could_use(given, missing):
    with pytest.raises(EvidenceError, match=f"opob.*{missing}.*give grad_norm_squared="):
        advantages(R, S, how="opob", **given)


def test_a_baseline_over_the_kept_needs_to_know_them():
    with pytest.raises(EvidenceError, match="baseline_over='kept' needs keep"):
        advantages(R, S, baseline_over="kept")


NAN, INF = float("nan"), float("inf")
PER_TOKEN = ("values", "logp_old", "sum_pi_squared", "weight")
PER_SEQUENCE = ("greedy_rewards", "grad_norm_squared")
# inputs, the error, and what it says
REFUSED = [
    ({"rewards": double([0.0, 1.0, NAN])}, BadValueError, "reward of sequence 2 is nan"),
    ({"rewards": double([0.0, 1.0, INF])}, BadValueError, "reward of sequence 2 is inf"),
    ({"rewards": double([0.0, 0.0, 1.0, 0.0, NAN])}, BadValueError, "reward of sequence 2 is nan at token 1;"),
    *(
        ({x: double([0.0, 0.0, 0.0, INF, 0.0])}, BadValueError, f"{x} of sequence 2 is inf at token 0;")
        for x in PER_TOKEN
    ),
    *(({x: double([0.0, NAN, 0.0])}, BadValueError, f"{x} of sequence 1 is nan;") for x in PER_SEQUENCE),
    ({"components": double([[0, 0], [0, NAN], [0, 0]])}, BadValueError, "components of sequence 1 is nan;"),
    ({"component_weights": double([1.0, NAN])}, BadValueError, "component_weights="),
    ({"components": double([[1, 0]] * 3), "component_weights": double([1, INF])}, BadValueError, "component_weights="),
    *(({"rewards": torch.zeros(n)}, ShapeError, rf"shape \({n},\) for 3 sequences of 5 tokens") for n in (2, 4, 6)),
    *(({x: torch.zeros(3)}, ShapeError, rf"{x} has shape \(3,\); expected 5 .* per token") for x in PER_TOKEN),
    *(({x: torch.zeros(5)}, ShapeError, rf"{x} has shape \(5,\); expected 3 .* per sequence") for x in PER_SEQUENCE),
    *(({x: y}, MethodError, f"{x}={y} must lie in") for x in ("gamma", "lam") for y in (-0.1, 1.1, NAN)),
]


@pytest.mark.parametrize(("inputs", "error", "words"), REFUSED)
def test_bad_numbers_and_shapes_are_named(inputs, error, words):
    how = "gdpo" if set(inputs) == {"components"} else "grpo"
    with pytest.raises(error, match=words):
        advantages(**{"rewards": R, "segments": S, "how": how} | inputs)


@pytest.mark.parametrize(
    ("position", "where"),
    [
        ([0, 1, 0, 3, 3], "sequence 2 is 3 at token 1"),
        ([0, 1, 0, 4, 3], "sequence 2 is 3 at token 1"),
        ([0, 1, -1, 0, 1], "sequence 1 is -1 at token 0"),
    ],
)
def test_columns_grow_along_a_sequence(position, where):
    with pytest.raises(BadValueError, match=f"position of {where}"):
        advantages(R, S, position=torch.tensor(position))


def test_best_of_one_names_its_group():
    s = Segments.from_lengths([1, 1, 1], group_ids=torch.tensor([4, 9, 4]))
    with pytest.raises(BadValueError, match=r"group 9 has one sequence \(sequence 1\)"):
        advantages(R, s, how="grpo_passk")
    with pytest.raises(BadValueError, match="group 0 has one sequence"):
        advantages(R, Segments.from_lengths([1, 1, 1]), how="grpo_passk", group_ids=None)


def test_opob_weighs_whole_sequences():
    inputs = {"grad_norm_squared": double([1.0, 1.0, 1.0])}
    with pytest.raises(BadValueError, match="weight of sequence 2 runs from 1 to 3; opob"):
        advantages(R, S, how="opob", weight=double([2, 2, 1, 1, 3]), **inputs)
